#!/usr/bin/env python3
"""Run the tests that Meson lists, count their cases, and report the failures.

Called by `./dev test`, which builds the directories first. Each program runs under supervise.py,
so a program that leaves a process behind fails. The last line, and no other, reads
`N passed, N failed, N skipped`; the exit status is 0 only if a test ran and none failed.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading

import counting
import meson_tests
from meson_tests import Test, UsageError

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

SHOWN_LINES = 200
#: The build directories of sanitized programs.
SANITIZED = ("asan", "fuzz", "tsan")
# Readers of our output expect one closing line: ours. Pytest's own is left out.
PYTEST_CLOSING = re.compile(r"^=*\s*(?:\d+ \w+,? ?)+ in [\d.]+s\b.*$|^=+ .* in [\d.]+s.* =+$")

# The progress lines of libFuzzer; a finding is among thousands of them.
FUZZER_PROGRESS = re.compile(r"^(?:#\d+\s|\s*NEW_FUNC\[|\"[^\"]*\" # Uses: )")


class Runner:
    """Runs tests and keeps the sums. Thread-safe: two tests run at a time."""

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self.args = args
        self.seed = seed
        self.sums = counting.Outcome()
        self.bad: list[tuple[Test, counting.Outcome, pathlib.Path]] = []
        self.skips: list[str] = []
        self._running: list[str] = []
        self._print_lock = threading.Lock()

    def run_all(self, tests: list[Test]) -> None:
        parallel = [test for test in tests if not test.serial]
        for batch, jobs in (
            ([test for test in parallel if not test.waiting], self.args.jobs),
            ([test for test in parallel if test.waiting], self.args.jobs),
            ([test for test in tests if test.serial], 1),
        ):
            with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
                for done in [pool.submit(self._run_one, test) for test in batch]:
                    done.result()  # An error of the runner ends the run.

    def _run_one(self, test: Test) -> None:
        self._status(started=test.name)
        log = test.build_dir / "test-logs" / (test.name.replace("/", ".") + ".log")
        log.parent.mkdir(exist_ok=True)
        # Short, because a Unix socket's path may have 108 bytes only.
        scratch = pathlib.Path(tempfile.mkdtemp(prefix="pega-"))
        try:
            outcome, seconds = self._supervise(test, log, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self._report(test, outcome, seconds, log)

    def _supervise(
        self, test: Test, log: pathlib.Path, scratch: pathlib.Path
    ) -> tuple[counting.Outcome, float]:
        junit, report, tmp = scratch / "junit.xml", scratch / "report.json", scratch / "t"
        tmp.mkdir()
        wrapper = self.args.sanitizer_wrapper if test.build_dir.name in SANITIZED else ""
        command = [*wrapper.split(), *test.command]
        limit_s = test.timeout_s * self.args.timeout_multiplier
        if os.environ.get("PEGA_TEST_NO_LIMIT"):  # `./dev soak` sets the time itself
            limit_s = 0.0
        if test.suite == "fuzz":
            command += self._fuzz_options(test, scratch)
            limit_s = self.args.fuzz_seconds + 60
        command += self.args.extra
        environment = {
            **os.environ,
            **test.environment,
            "PEGA_TEST_SEED": str(self.seed),
            "PEGA_BUILD_DIR": str(test.build_dir),
            "PYTEST_ADDOPTS": f"--junit-xml={junit} -p no:cacheprovider",
            "TMPDIR": str(tmp),
        }
        supervisor = [sys.executable, str(HERE / "supervise.py")]
        supervisor += ["--timeout", str(limit_s or 24 * 3600), "--log", str(log)]
        supervisor += ["--report", str(report), "--", *command]
        subprocess.run(supervisor, env=environment, cwd=test.workdir or test.build_dir, check=True)
        told = json.loads(report.read_text())
        text = log.read_text(errors="replace")
        return counting.judge(told, text, junit, timeout_s=limit_s), told["seconds"]

    def _fuzz_options(self, test: Test, scratch: pathlib.Path) -> list[str]:
        target = test.name.rsplit("/", 1)[-1]
        findings = test.build_dir / "findings"
        findings.mkdir(exist_ok=True)
        found = scratch / "corpus"  # libFuzzer writes to the first folder and reads from all
        found.mkdir()
        corpus = ROOT / "tests" / "fuzz" / "corpus" / target
        return [
            f"-max_total_time={self.args.fuzz_seconds}",
            f"-seed={self.seed % 0xFFFFFFFF + 1}",
            "-timeout=10",
            "-error_exitcode=1",  # libFuzzer's own choice is 77, which means "skipped" to us
            "-rss_limit_mb=3072",
            "-print_final_stats=1",
            f"-artifact_prefix={findings}/{target}-",
            str(found),
            *([str(corpus)] if corpus.is_dir() else []),
        ]

    def _status(self, started: str = "", ended: str = "") -> None:
        """On a terminal: names the running tests, on a line that the next one overwrites."""
        with self._print_lock:
            if started:
                self._running.append(started)
            if ended:
                self._running.remove(ended)
            if sys.stdout.isatty():
                names = "...  " + "  ".join(self._running) if self._running else ""
                print(f"\r\033[K{names}\r", end="", flush=True)

    def _report(
        self, test: Test, outcome: counting.Outcome, seconds: float, log: pathlib.Path
    ) -> None:
        word = "FAIL" if outcome.failed else "PASS" if outcome.passed else "SKIP"
        cases = outcome.passed + outcome.failed + outcome.skipped
        detail = f"{cases} case{'s' if cases != 1 else ''}"
        if outcome.failed:
            detail += f", {outcome.failed} failed"
        if outcome.skipped:
            detail += f", {outcome.skipped} skipped"
        if outcome.note:
            detail += f", {outcome.note}"
        with self._print_lock:
            clear = "\r\033[K" if sys.stdout.isatty() else ""
            print(f"{clear}{word}  {test.name:<44} {seconds:7.1f} s  {detail}", flush=True)
            for reason in outcome.skip_reasons:
                print(f"        skipped: {reason}")
                self.skips.append(f"{test.name}: {reason}")
            if outcome.failed:
                self._show_failure(test, outcome, log)
                self.bad.append((test, outcome, log))
            self.sums.passed += outcome.passed
            self.sums.failed += outcome.failed
            self.sums.skipped += outcome.skipped
        self._status(ended=test.name)

    def _show_failure(self, test: Test, outcome: counting.Outcome, log: pathlib.Path) -> None:
        lines = [
            line
            for line in log.read_text(errors="replace").splitlines()
            if not FUZZER_PROGRESS.match(line)
        ]
        if len(lines) > SHOWN_LINES:
            print(f"    | ({len(lines) - SHOWN_LINES} earlier lines are in {log})")
        for line in lines[-SHOWN_LINES:]:
            if not PYTEST_CLOSING.match(line):
                print(f"    | {line}")
        for problem in outcome.problems:
            print(f"    {test.name} {problem}", flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    extra: list[str] = []
    if "--" in argv:
        cut = argv.index("--")
        argv, extra = argv[:cut], argv[cut + 1 :]
    parser = argparse.ArgumentParser(prog="./dev test", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="suites or names; none means all")
    parser.add_argument("--build-dir", type=pathlib.Path, action="append", required=True)
    parser.add_argument("--seed", type=int, help="repeat the run that printed this seed")
    parser.add_argument("--fuzz-seconds", type=int, default=5, help="seconds for each fuzz target")
    parser.add_argument(
        "--jobs", type=int, default=2, help="number of parallel tests that run at a time"
    )
    parser.add_argument("--timeout-multiplier", type=float, default=1.0)
    parser.add_argument(
        "--sanitizer-wrapper", default="", help="words before each command of a sanitized build"
    )
    parser.add_argument("--counts-file", type=pathlib.Path, help="append the sums to this file")
    parser.add_argument("--list", action="store_true", help="list the tests and run none")
    parser.add_argument("--no-build", action="store_true")
    args = parser.parse_intermixed_args(argv)
    args.extra = extra
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    try:
        known = [test for folder in args.build_dir for test in meson_tests.load(folder.resolve())]
        tests = meson_tests.select(known, args.words)
        if args.list:
            print("\n".join(test.name for test in tests))
            return 0
        if not args.no_build:
            meson_tests.build(tests)
    except UsageError as error:
        print(f"dev test: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print("dev test: the build failed, nothing was run", file=sys.stderr)
        return error.returncode

    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1, 1 << 32)
    print(f"seed {seed} (the same again: --seed {seed})", flush=True)
    runner = Runner(args, seed)
    runner.run_all(tests)

    for test, outcome, log in runner.bad:
        print(f"failed: {test.name}: {'; '.join(outcome.problems)}; log: {log}")
    sums = runner.sums
    text = f"{sums.passed} passed, {sums.failed} failed, {sums.skipped} skipped"
    if args.counts_file:
        with args.counts_file.open("a") as file:
            file.write(f"{sums.passed} {sums.failed} {sums.skipped}\n")
        text = f"this stage counted {text}"  # .ci/run prints the sum of its stages instead
    print(text, flush=True)
    return 0 if sums.failed == 0 and sums.passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
