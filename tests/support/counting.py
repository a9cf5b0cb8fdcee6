"""The number of test cases that a test program ran, read from its output and files."""

import dataclasses
import pathlib
import re
import xml.etree.ElementTree as ET

EXIT_SKIPPED = 77  # Meson's and automake's number for "cannot run here"

DOCTEST = re.compile(
    r"^\[doctest\] test cases: +(\d+) +\| +(\d+) passed +\| +(\d+) failed +\|(?: +(\d+) skipped)?",
    re.MULTILINE,
)
#: The line of tests/support/doctest_main.cpp for a case that skipped itself.
DOCTEST_SKIPPED = re.compile(r"^\[skipped\] (.*)$", re.MULTILINE)
UNITTEST_RAN = re.compile(r"^Ran (\d+) tests? in ", re.MULTILINE)
UNITTEST_END = re.compile(r"^(?:OK|FAILED)(?: \((.*)\))?$", re.MULTILINE)
FUZZ_UNITS = re.compile(r"^stat::number_of_executed_units: +(\d+)", re.MULTILINE)


@dataclasses.dataclass
class Outcome:
    """The result of one test program. It is good if ``failed`` is 0."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)
    skip_reasons: list[str] = dataclasses.field(default_factory=list)
    note: str = ""  # for the progress line: "81234 inputs"


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def count_junit(path: pathlib.Path) -> Outcome | None:
    """Pytest's cases; None if there is no (complete) file, as after a crash."""
    try:
        root = ET.parse(path).getroot()
    except (FileNotFoundError, ET.ParseError):
        return None
    outcome = Outcome()
    for case in root.iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed += 1
        elif skipped is not None:
            outcome.skipped += 1
            outcome.skip_reasons.append(f"{case.get('name')}: {skipped.get('message', '')}")
        else:
            outcome.passed += 1
    return outcome


def count_output(text: str) -> Outcome | None:
    """The cases of a doctest or unittest program; None if it is neither."""
    if found := DOCTEST.findall(text):
        _, passed, failed, skipped = (int(word or 0) for word in found[-1])
        reasons = DOCTEST_SKIPPED.findall(text)
        # doctest counts a case that skipped itself as passed.
        outcome = Outcome(passed - len(reasons), failed, skipped + len(reasons))
        outcome.skip_reasons = reasons
        if skipped:
            outcome.skip_reasons.append(f"{skipped} cases are decorated with doctest::skip()")
        return outcome
    if ran := UNITTEST_RAN.search(text):
        words = UNITTEST_END.search(text, ran.end())
        numbers = (
            dict(word.split("=") for word in (words.group(1) or "").split(", ") if "=" in word)
            if words
            else {}
        )
        failed = int(numbers.get("failures", 0)) + int(numbers.get("errors", 0))
        skipped = int(numbers.get("skipped", 0))
        outcome = Outcome(max(0, int(ran.group(1)) - failed - skipped), failed, skipped)
        if skipped:
            outcome.skip_reasons.append(f"{skipped} cases were skipped, see the log")
        return outcome
    return None


def judge(report: dict, text: str, junit: pathlib.Path, *, timeout_s: float) -> Outcome:
    """Counts the cases and adds every other failure of the program.

    Args:
        report: The report of supervise.py.
        text: The whole output of the program.
        junit: The file that pytest writes; other programs write none.
        timeout_s: The limit, for the message about a program that exceeded it.
    """
    problems = []
    if report["timed_out"]:
        problems.append(f"was stopped after its limit of {timeout_s:.0f} s")
    elif report["signal"]:
        problems.append(f"was ended by signal {report['signal']}")
    elif report["exit"] not in (0, EXIT_SKIPPED):
        problems.append(f"exited with {report['exit']}")
    problems += [f"left a process behind: {name}" for name in report["leaked"]]

    if report["exit"] == EXIT_SKIPPED and not problems:
        return Outcome(skipped=1, skip_reasons=[last_line(text) or "it gave no reason"])

    outcome = count_junit(junit) or count_output(text)
    if outcome is None:
        outcome = Outcome(passed=0 if problems else 1)
    elif outcome.failed and not problems:
        problems.append("counted failed cases and yet exited with 0")
    elif not (outcome.passed or outcome.failed or outcome.skipped) and not problems:
        problems.append("ran no test case")
    if units := FUZZ_UNITS.search(text):
        outcome.note = f"{units.group(1)} inputs"
    if problems and not outcome.failed:
        outcome.failed = 1
    outcome.problems = problems
    return outcome
