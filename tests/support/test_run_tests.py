"""Tests of the runner: each case runs run_tests.py on a build directory of small programs."""

import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import unittest

HERE = pathlib.Path(__file__).resolve().parent
CLOSING = re.compile(r"^(\w+: )?\d+ passed, \d+ failed(, \d+ skipped)?$")


class RunTestsTest(unittest.TestCase):
    def setUp(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="pega-runner-")
        self.addCleanup(self._scratch.cleanup)
        self.build = pathlib.Path(self._scratch.name)
        (self.build / "meson-info").mkdir()
        (self.build / "meson-info" / "intro-targets.json").write_text("[]")
        self.tests: list[dict] = []

    def add(self, name: str, script: str, *, timeout: int = 30, python: bool = False) -> None:
        """Adds a test whose program is this script, for bash or for Python."""
        path = self.build / name.replace("/", "_")
        interpreter = sys.executable if python else "/bin/bash"
        path.write_text(f"#!{interpreter}\n" + textwrap.dedent(script))
        path.chmod(0o755)
        self.tests.append(
            {
                "name": name,
                "suite": ["pegaflow:" + name.split("/")[0]],
                "cmd": [str(path)],
                "env": {},
                "workdir": None,
                "timeout": timeout,
                "is_parallel": True,
                "depends": [],
            }
        )

    def run_tests(self, *words: str) -> tuple[int, list[str]]:
        (self.build / "meson-info" / "intro-tests.json").write_text(json.dumps(self.tests))
        done = subprocess.run(
            [sys.executable, str(HERE / "run_tests.py"), "--build-dir", str(self.build), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout.splitlines()

    def assert_ends(self, lines: list[str], last: str) -> None:
        self.assertEqual(lines[-1], last, "\n".join(lines))
        closing = [line for line in lines if CLOSING.match(line)]
        self.assertEqual(closing, [last], "only the last line may count")

    def test_a_plain_program_is_one_case(self) -> None:
        self.add("unit/good", "echo fine")

        code, lines = self.run_tests()

        self.assert_ends(lines, "1 passed, 0 failed, 0 skipped")
        self.assertEqual(code, 0)

    def test_only_programs_with_a_sanitizer_get_its_wrapper(self) -> None:
        for name, word in (("release", "unwrapped"), ("fuzz", "wrapped"), ("asan", "wrapped")):
            with self.subTest(name):
                self.tests.clear()
                self.build = pathlib.Path(self._scratch.name) / name
                (self.build / "meson-info").mkdir(parents=True)
                (self.build / "meson-info" / "intro-targets.json").write_text("[]")
                self.add("unit/one", f"test ${{PEGA_WRAPPER:-unwrapped}} = {word}")

                code, lines = self.run_tests(
                    "--sanitizer-wrapper", "env PEGA_WRAPPER=wrapped", "unit"
                )

                self.assert_ends(lines, "1 passed, 0 failed, 0 skipped")
                self.assertEqual(code, 0)

    def test_doctest_cases_are_counted_one_by_one(self) -> None:
        self.add(
            "unit/cases",
            """
            echo '[doctest] test cases:  7 |  5 passed | 2 failed | 1 skipped'
            exit 1
            """,
        )

        code, lines = self.run_tests()

        self.assert_ends(lines, "5 passed, 2 failed, 1 skipped")
        self.assertEqual(code, 1)

    def test_a_doctest_case_that_skips_itself_is_skipped_with_its_reason(self) -> None:
        self.add(
            "unit/cases",
            """
            echo '[skipped] checksums are right: built without CUDA kernels'
            echo '[doctest] test cases:  3 |  3 passed | 0 failed | 0 skipped'
            """,
        )

        code, lines = self.run_tests()

        self.assertIn("        skipped: checksums are right: built without CUDA kernels", lines)
        self.assert_ends(lines, "2 passed, 0 failed, 1 skipped")
        self.assertEqual(code, 0)

    def test_unittest_cases_are_counted_one_by_one(self) -> None:
        self.add(
            "layering/cases",
            """
            echo 'Ran 6 tests in 0.100s'
            echo
            echo 'FAILED (failures=1, errors=1, skipped=1)'
            exit 1
            """,
        )

        _, lines = self.run_tests()

        self.assert_ends(lines, "3 passed, 2 failed, 1 skipped")

    def test_pytest_cases_are_counted_and_its_closing_line_is_left_out(self) -> None:
        # Writes pytest's file, at the path that the runner gives to pytest.
        self.add(
            "python/cases",
            """
            file=${PYTEST_ADDOPTS#--junit-xml=}
            cat > "${file%% *}" <<END
            <testsuites><testsuite><testcase name="a"/><testcase name="b"><failure/></testcase>
            <testcase name="c"><skipped message="no device"/></testcase></testsuite></testsuites>
            END
            echo '===== 1 failed, 1 passed, 1 skipped in 0.10s ====='
            exit 1
            """,
        )

        _, lines = self.run_tests()

        self.assert_ends(lines, "1 passed, 1 failed, 1 skipped")
        self.assertFalse([line for line in lines if " in 0.10s" in line])
        self.assertTrue([line for line in lines if "c: no device" in line])

    def test_exit_77_is_a_skip_and_its_reason_is_shown(self) -> None:
        self.add("unit/good", "true")
        self.add("unit/device", "echo 'no such device here'; exit 77")

        code, lines = self.run_tests()

        self.assert_ends(lines, "1 passed, 0 failed, 1 skipped")
        self.assertTrue([line for line in lines if "skipped: no such device here" in line])
        self.assertEqual(code, 0)

    def test_a_fuzzer_with_a_finding_fails(self) -> None:
        # libFuzzer exits with the code of -error_exitcode, or with 77.
        self.add(
            "fuzz/target",
            """
            code=77
            for word; do case $word in -error_exitcode=*) code=${word#*=} ;; esac; done
            echo '==1== ERROR: libFuzzer: deadly signal'
            for i in $(seq 300); do echo "#$i	REDUCE cov: 1 ft: 1 corp: 1/1b"; done
            exit "$code"
            """,
        )

        code, lines = self.run_tests()

        self.assertIn("    | ==1== ERROR: libFuzzer: deadly signal", lines)
        self.assert_ends(lines, "0 passed, 1 failed, 0 skipped")
        self.assertEqual(code, 1)

    def test_a_run_in_which_everything_is_skipped_fails(self) -> None:
        self.add("unit/device", "exit 77")

        code, lines = self.run_tests()

        self.assert_ends(lines, "0 passed, 0 failed, 1 skipped")
        self.assertNotEqual(code, 0)

    def test_a_failed_exit_after_passed_cases_fails(self) -> None:
        self.add("unit/late", "echo '[doctest] test cases: 3 | 3 passed | 0 failed |'; exit 3")

        code, lines = self.run_tests()

        self.assert_ends(lines, "3 passed, 1 failed, 0 skipped")
        self.assertEqual(code, 1)

    def test_failed_cases_fail_even_with_exit_0(self) -> None:
        self.add("unit/liar", "echo '[doctest] test cases: 3 | 2 passed | 1 failed |'")

        code, lines = self.run_tests()

        self.assert_ends(lines, "2 passed, 1 failed, 0 skipped")
        self.assertEqual(code, 1)

    def test_a_program_without_any_case_fails(self) -> None:
        self.add("unit/empty", "echo '[doctest] test cases: 0 | 0 passed | 0 failed | 0 skipped'")

        _, lines = self.run_tests()

        self.assert_ends(lines, "0 passed, 1 failed, 0 skipped")

    def test_a_crash_fails_and_names_the_signal(self) -> None:
        self.add("unit/crash", "kill -SEGV $$")

        _, lines = self.run_tests()

        self.assert_ends(lines, "0 passed, 1 failed, 0 skipped")
        self.assertTrue([line for line in lines if "ended by signal 11" in line])

    def test_a_process_left_behind_fails_the_test_and_is_killed(self) -> None:
        # In a session of its own, with its parent gone, like a daemon.
        mark = self.build / "pid"
        self.add("unit/leak", f"setsid bash -c 'echo $$ > {mark}; exec sleep 600' & disown")
        self.add("unit/good", "true")

        code, lines = self.run_tests()

        self.assert_ends(lines, "1 passed, 1 failed, 0 skipped")
        self.assertTrue([line for line in lines if "left a process behind" in line])
        self.assertTrue([line for line in lines if "sleep 600" in line])
        self.assertEqual(code, 1)
        with self.assertRaises(ProcessLookupError):
            os.kill(int(mark.read_text()), 0)

    def test_a_child_that_is_ending_is_not_a_leak(self) -> None:
        self.add(
            "unit/tidy",
            """
            import os, signal
            pid = os.fork()
            if pid == 0:
                signal.pause()
            os.kill(pid, signal.SIGKILL)  # but not reaped
            """,
            python=True,
        )

        _, lines = self.run_tests()

        self.assert_ends(lines, "1 passed, 0 failed, 0 skipped")

    def test_a_test_that_exceeds_its_limit_is_stopped_with_all_its_processes(self) -> None:
        mark = self.build / "pid"
        self.add("unit/hang", f"sleep 601 & echo $! > {mark}; wait", timeout=3)

        _, lines = self.run_tests()

        self.assert_ends(lines, "0 passed, 1 failed, 0 skipped")
        self.assertTrue([line for line in lines if "limit of 3 s" in line])
        with self.assertRaises(ProcessLookupError):
            os.kill(int(mark.read_text()), 0)

    def test_the_end_of_the_runner_ends_the_tests(self) -> None:
        pid_file, ready = self.build / "pid", self.build / "ready"
        os.mkfifo(ready)
        self.add("unit/hang", f"echo $$ > {pid_file}; echo > {ready}; exec sleep 602", timeout=120)
        (self.build / "meson-info" / "intro-tests.json").write_text(json.dumps(self.tests))
        runner = subprocess.Popen(
            [sys.executable, str(HERE / "run_tests.py"), "--build-dir", str(self.build)],
            stdout=subprocess.PIPE,
        )
        ready.read_text()  # Returns when the test program is running.
        test = os.pidfd_open(int(pid_file.read_text()))

        runner.send_signal(signal.SIGKILL)
        runner.communicate()

        # Readable once the test program is gone; blocks for at most its Meson limit.
        with os.fdopen(test) as ended:
            self.assertTrue(select.select([ended], [], [], 60)[0], "the test outlived the runner")

    def test_suites_names_and_parts_of_names_select_tests(self) -> None:
        for name in ("unit/base/units", "unit/engine/units", "sim/store", "layering/unit"):
            self.add(name, "true")

        for word, count in (("unit", 2), ("unit/base/units", 1), ("units", 2), ("sim/sto", 1)):
            with self.subTest(word):
                _, lines = self.run_tests(word)
                self.assert_ends(lines, f"{count} passed, 0 failed, 0 skipped")

    def test_a_suite_on_request_runs_only_when_it_is_named(self) -> None:
        for name in ("unit/nodes", "rxe/nodes"):
            self.add(name, "true")

        for words, count in (((), 1), (("nodes",), 1), (("rxe",), 1), (("unit", "rxe/nodes"), 2)):
            with self.subTest(words):
                _, lines = self.run_tests(*words)
                self.assert_ends(lines, f"{count} passed, 0 failed, 0 skipped")

    def test_waiting_tests_run_beside_each_other_and_other_tests_before_or_after(self) -> None:
        ended, meeting = self.build / "ended", self.build / "meeting"
        ended.mkdir()
        os.mkfifo(meeting)  # Each end waits for the other one.
        self.add("python/alone", f"ls {ended}/fault {ended}/integration", timeout=10)
        self.tests[-1]["is_parallel"] = False
        wait = f"ls {ended}/unit && %s {meeting} && touch {ended}/%s"
        self.add("integration/one", wait % ("echo >", "integration"), timeout=10)
        self.add("fault/other", wait % ("cat", "fault"), timeout=10)
        self.add("unit/first", f"touch {ended}/unit")

        _, lines = self.run_tests()

        self.assert_ends(lines, "4 passed, 0 failed, 0 skipped")

    def test_an_unknown_name_is_rejected_and_the_fix_is_named(self) -> None:
        self.add("unit/good", "true")

        code, lines = self.run_tests("untit")

        self.assertEqual(code, 2)
        self.assertIn("no test is called 'untit'; the suites are", lines[0])

    def test_seed_reaches_the_program_and_is_printed(self) -> None:
        self.add("unit/seed", '[ "$PEGA_TEST_SEED" = 4711 ]')

        _, lines = self.run_tests("--seed", "4711")

        self.assertIn("seed 4711", lines[0])
        self.assert_ends(lines, "1 passed, 0 failed, 0 skipped")

    def test_counts_go_to_a_file_instead_of_the_closing_line(self) -> None:
        self.add("unit/good", "true")
        counts = self.build / "counts"

        _, lines = self.run_tests("--counts-file", str(counts))

        self.assertEqual(counts.read_text(), "1 0 0\n")
        self.assertFalse([line for line in lines if CLOSING.match(line)])


if __name__ == "__main__":
    unittest.main()
