"""`./dev` explains itself and names fixes, and `.ci/run` adds up the counts of its stages."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from meson_tests import ON_REQUEST, SUITES

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command,
        cwd="/",
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


class DevTest(unittest.TestCase):
    def test_every_subcommand_of_the_help_text_has_a_help_text(self) -> None:
        listed = re.findall(r"^  (\w+) {2,}", run(str(ROOT / "dev")).stdout, re.MULTILINE)
        self.assertLessEqual(
            {"demo", "test", "build", "check", "fmt", "bench", "run", "bundle", "soak", "help"},
            set(listed),
        )
        for subcommand in listed:
            for flag in ("--help", "-h"):
                with self.subTest(f"{subcommand} {flag}"):
                    done = run(str(ROOT / "dev"), subcommand, flag)
                    self.assertEqual(done.returncode, 0)
                    self.assertTrue(done.stdout.startswith("usage: ./dev"), done.stdout)

    def test_unknown_words_are_rejected_with_the_fix(self) -> None:
        for words, fix in (
            (("tset",), "see ./dev help"),
            (("test", "--sed", "1"), "see ./dev test --help"),
            (("build", "--fast"), "see ./dev build --help"),
            (("check", "--quick"), "see ./dev check --help"),
            (("bundle",), "see ./dev bundle --help"),
            (("soak", "now"), "see ./dev soak --help"),
            (("run",), "see ./dev run --help"),
        ):
            with self.subTest(words):
                done = run(str(ROOT / "dev"), *words)
                self.assertEqual(done.returncode, 1)
                self.assertIn(fix, done.stderr)


class GpuTest(unittest.TestCase):
    """`./dev demo --pd --direct` on a machine whose driver lists a GPU."""

    def demo(self, *words: str, **environment: str) -> subprocess.CompletedProcess:
        with tempfile.TemporaryDirectory() as programs:
            lists = pathlib.Path(programs, "nvidia-smi")
            lists.write_text("#!/bin/sh\necho 0, GPU-1, 9.0\n")
            lists.chmod(0o755)
            environment["PATH"] = f"{programs}:{os.environ['PATH']}"
            return run(str(ROOT / "dev"), "demo", "--pd", "--direct", *words, **environment)

    def test_a_python_without_vllm_is_rejected_before_anything_is_built(self) -> None:
        done = self.demo(PEGA_VLLM_PYTHON="/usr/bin/python3")
        self.assertEqual(done.returncode, 1)
        self.assertIn("PEGA_VLLM_PYTHON: /usr/bin/python3 cannot run vLLM", done.stderr)
        self.assertIn("it has no vllm", done.stderr)
        self.assertEqual(done.stdout, "")

    def test_an_invalid_path_of_a_python_is_rejected(self) -> None:
        reasons = {"bin/python": "is not an absolute path", "/none/python": "is missing"}
        for path, reason in reasons.items():
            with self.subTest(path):
                done = self.demo(PEGA_VLLM_PYTHON=path)
                self.assertEqual(done.returncode, 1)
                self.assertIn("PEGA_VLLM_PYTHON: ", done.stderr)
                self.assertIn(reason, done.stderr)

    def test_cuda_is_rejected_where_no_gpu_is_visible(self) -> None:
        done = self.demo("--device", "cuda", CUDA_VISIBLE_DEVICES="")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--device cuda: CUDA_VISIBLE_DEVICES is ''", done.stderr)
        self.assertIn("--device cpu needs no GPU", done.stderr)


class SetupTest(unittest.TestCase):
    """Packages that are missing for a user who is not root and has only these programs."""

    TOOLS = ("dpkg-query", "comm", "sort", "sed", "cat")

    def need_packages(self, sudo: str | None) -> subprocess.CompletedProcess:
        if not shutil.which("dpkg-query"):
            self.skipTest("no dpkg-query: not a Debian")
        with tempfile.TemporaryDirectory() as folder:
            for name in self.TOOLS:
                os.symlink(str(shutil.which(name)), f"{folder}/{name}")
            programs = {"id": "echo 1000", "sudo": sudo}
            for name, script in programs.items():
                if script is not None:
                    path = pathlib.Path(folder, name)
                    path.write_text(f"#!/bin/bash\n{script}\n")
                    path.chmod(0o755)
            script = "source tools/setup.sh; packages_odd=(pega-none-a pega-none-b)"
            return run("/bin/bash", "-c", f'cd "{ROOT}"; {script}; need_packages odd', PATH=folder)

    def test_without_sudo_the_command_for_root_is_shown_and_no_install_is_claimed(self):
        done = self.need_packages(sudo=None)

        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stdout, "")
        self.assertIn("2 packages are missing, and there is no sudo", done.stderr)
        self.assertIn("-y --no-install-recommends pega-none-a pega-none-b\n", done.stderr)

    def test_a_sudo_that_refuses_is_distinguished_from_a_failed_apt(self):
        done = self.need_packages(sudo="echo sudo: not for you >&2; exit 1")

        self.assertEqual(done.returncode, 1)
        self.assertIn("sudo: not for you\n", done.stderr)
        self.assertIn("sudo does not let you install them. Have root run: apt-get", done.stderr)


class OneAtATimeTest(unittest.TestCase):
    """Two commands that compile in one checkout."""

    WAITS = "waiting until another ./dev of this checkout has set up and built\n"
    SETUP = f'source "{ROOT}/tools/setup.sh"; '

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def start(self, *command: str) -> subprocess.Popen:
        process = subprocess.Popen(
            command, cwd=self.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def shell(self, script: str) -> subprocess.Popen:
        return self.start("bash", "-euc", self.SETUP + script)

    def line(self, process: subprocess.Popen) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    def end(self, process: subprocess.Popen) -> None:
        """Lets the command go on that reads a line."""
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    HELD = "one_at_a_time eval 'echo begun; read -r _'"

    def test_the_second_one_says_that_it_waits_and_begins_behind_the_first(self) -> None:
        first = self.shell(self.HELD + "; echo ended; read -r _")
        self.assertEqual(self.line(first), "begun\n")
        second = self.shell(self.HELD)
        self.assertEqual(self.line(second), self.WAITS)
        self.end(first)
        self.assertEqual(self.line(first), "ended\n")
        self.assertEqual(self.line(second), "begun\n", "while the first one goes on")

    def test_the_tests_wait_as_well(self) -> None:
        first = self.shell(self.HELD)
        self.assertEqual(self.line(first), "begun\n")
        script = (
            "import pathlib, sys\n"
            f"sys.path.insert(0, {str(ROOT / 'tests' / 'support')!r})\n"
            "from checkout import one_at_a_time\n"
            "with one_at_a_time(pathlib.Path('build/release')): print('begun', flush=True)\n"
        )
        second = self.start(sys.executable, "-c", script)
        self.assertEqual(self.line(second), self.WAITS)
        self.end(first)
        self.assertEqual(self.line(second), "begun\n")

    def test_a_command_that_is_killed_lets_the_next_one_begin(self) -> None:
        first = self.shell("one_at_a_time eval 'echo begun; read -r _'")
        self.assertEqual(self.line(first), "begun\n")
        first.kill()
        first.wait()
        self.assertEqual(self.line(self.shell(self.HELD)), "begun\n")

    def test_one_command_within_another_does_not_wait(self) -> None:
        self.assertEqual(self.line(self.shell("one_at_a_time one_at_a_time echo begun")), "begun\n")

    def test_a_failure_is_that_of_the_command(self) -> None:
        process = self.shell("one_at_a_time sh -c 'exit 7'; echo went on")
        self.assertEqual(process.communicate()[0], "")
        self.assertEqual(process.returncode, 7)


class CiRunTest(unittest.TestCase):
    """Runs .ci/run with a `dev` that only counts."""

    def run_with(self, dev: str) -> tuple[int, list[str]]:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / ".ci").mkdir()
            shutil.copy(ROOT / ".ci" / "run", root / ".ci" / "run")
            (root / "dev").write_text("#!/bin/bash\n" + dev)
            (root / "dev").chmod(0o755)
            done = run("bash", str(root / ".ci" / "run"))
        return done.returncode, done.stdout.splitlines()

    COUNT = 'while [ $# -gt 1 ]; do shift; done; echo "10 0 2" >>"$1"\n'

    def test_the_last_line_is_the_sum(self) -> None:
        code, lines = self.run_with('[ "$1" = check ] && exit 0\n' + self.COUNT)

        self.assertEqual(lines[-1], "20 passed, 0 failed, 4 skipped")
        self.assertEqual(code, 0)
        self.assertTrue([line for line in lines if line.startswith("test-asan")])

    def test_a_failed_stage_fails_the_run_and_the_later_ones_still_run(self) -> None:
        code, lines = self.run_with('[ "$1" = check ] && exit 1\n' + self.COUNT)

        self.assertEqual(lines[-1], "20 passed, 0 failed, 4 skipped")
        self.assertIn("failed: check", lines)
        self.assertNotEqual(code, 0)

    def test_a_failure_with_the_random_seed_is_shown_and_does_not_fail_the_gate(self) -> None:
        advice = 'case "$*" in "test sim "*) exit 1 ;; esac\n'
        code, lines = self.run_with('[ "$1" = check ] && exit 0\n' + advice + self.COUNT)

        self.assertEqual(lines[-1], "20 passed, 0 failed, 4 skipped")
        self.assertIn("advice FAILED, which does not fail the gate; to repeat: ", lines[-2])
        seed = lines[-2].split("--seed ")[1].split()[0]
        self.assertIn(f"==== advice: seed {seed}", lines)
        self.assertEqual(code, 0)

    def test_both_test_stages_together_run_every_suite(self) -> None:
        _, lines = self.run_with('echo "ran: $*"\n')

        stages = [line.split()[2:] for line in lines if line.startswith("ran: test ")]
        words, asan = stages[0][: stages[0].index("--seed")], stages[1]
        self.assertEqual(asan[:2], ["--asan", "--seed"], "all suites of a sanitizer")
        found = re.search(r"asan\) suites=\(([^)]*)\)", (ROOT / "dev").read_text())
        assert found is not None
        self.assertEqual({*words, *found[1].split(), "router"}, {*SUITES, "router"} - ON_REQUEST)

    def test_a_run_without_tests_fails(self) -> None:
        code, lines = self.run_with("exit 0\n")

        self.assertEqual(lines[-1], "0 passed, 0 failed, 0 skipped")
        self.assertNotEqual(code, 0)


if __name__ == "__main__":
    unittest.main()
