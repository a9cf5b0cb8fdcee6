"""The tests that Meson lists, and the selection of the user."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from checkout import one_at_a_time

SUITES = ("unit", "integration", "sim", "fault", "fuzz", "python", "layering", "rxe")

# Suites that run only when they are named: they download a kernel and emulate a machine.
ON_REQUEST = frozenset({"rxe"})

# These start servers and mostly wait for them: they run beside each other, but not beside programs
# that take a whole core. A test that runs beside no other is not parallel in its meson.build.
WAITING_SUITES = frozenset({"integration", "fault"})
# Each emulates a machine.
SERIAL_SUITES = frozenset({"rxe"})


class UsageError(Exception):
    """No test matches the selection; the text lists the valid names."""


@dataclasses.dataclass(frozen=True)
class Test:
    """One test program as Meson lists it."""

    name: str  # "unit/engine/block_store"
    suite: str
    command: tuple[str, ...]
    environment: dict[str, str]
    workdir: str | None
    timeout_s: float  # 0: without a limit
    serial: bool  # runs beside no other test
    waiting: bool  # runs beside other waiting tests only
    targets: tuple[str, ...]  # built by ninja before the test runs
    build_dir: pathlib.Path


def introspect(build_dir: pathlib.Path, what: str) -> list[dict]:
    path = build_dir / "meson-info" / f"intro-{what}.json"
    return json.loads(path.read_text())


def load(build_dir: pathlib.Path) -> list[Test]:
    """All tests of one build directory, in Meson's order."""
    outputs: dict[str, list[str]] = {}  # target id -> files, relative to the build directory
    for target in introspect(build_dir, "targets"):
        outputs[target["id"]] = [os.path.relpath(name, build_dir) for name in target["filename"]]
    built = {name for names in outputs.values() for name in names}

    tests = []
    for entry in introspect(build_dir, "tests"):
        suite = entry["suite"][0].split(":")[-1] if entry["suite"] else ""
        needs = [name for target in entry["depends"] for name in outputs.get(target, [])]
        needs += [os.path.relpath(word, build_dir) for word in entry["cmd"] if os.path.isabs(word)]
        tests.append(
            Test(
                name=entry["name"],
                suite=suite,
                command=tuple(entry["cmd"]),
                environment=dict(entry["env"]),
                workdir=entry["workdir"],
                timeout_s=float(entry["timeout"] or 0),
                serial=suite in SERIAL_SUITES or not entry["is_parallel"],
                waiting=suite in WAITING_SUITES,
                targets=tuple(sorted({name for name in needs if name in built})),
                build_dir=build_dir,
            )
        )
    return tests


def select(tests: Sequence[Test], words: Sequence[str]) -> list[Test]:
    """The tests that the words name: a suite, a test's name, its beginning, or a part of it.

    The most exact meaning wins, so that `unit` is the suite and not each name that holds it.
    """
    if not words:
        return [test for test in tests if test.suite not in ON_REQUEST]
    chosen: set[str] = set()
    for word in words:
        meanings = (
            [t.name for t in tests if t.suite == word],
            [t.name for t in tests if t.name == word],
            [t.name for t in tests if t.name.startswith(word.rstrip("/") + "/")],
            [t.name for t in tests if word in t.name and t.suite not in ON_REQUEST],
        )
        found = next((names for names in meanings if names), None)
        if found is None:
            if word in SUITES:
                raise UsageError(f"the suite '{word}' has no test in this build")
            raise UsageError(
                f"no test is called '{word}'; the suites are {' '.join(SUITES)}, "
                "and `./dev test --list` names every test"
            )
        chosen.update(found)
    return [test for test in tests if test.name in chosen]


def build(tests: Sequence[Test]) -> None:
    """Lets ninja build the tests' programs.

    Raises:
        subprocess.CalledProcessError: A file does not compile; ninja has printed the error.
    """
    for build_dir in dict.fromkeys(test.build_dir for test in tests):
        targets = sorted({t for test in tests if test.build_dir == build_dir for t in test.targets})
        if targets:
            # On a terminal ninja updates one line; elsewhere that would be many lines.
            quiet = [] if sys.stdout.isatty() else ["--quiet"]
            print(f"building {len(targets)} programs in {build_dir}", flush=True)
            with one_at_a_time(build_dir):
                subprocess.run(["ninja", "-C", str(build_dir), *quiet, *targets], check=True)
