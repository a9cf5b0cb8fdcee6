#!/usr/bin/env python3
"""The socket lane beside Mooncake's TCP transport, over one virtual cable, in rounds by turns.

    ./dev bench net_mooncake [--rounds N] [--pages 64kb,2mb] [--bytes 256mb] [--json]

Both read the same pages from the same places of another process's memory to the same places of
their own, as many at a time: ours as `pegaflow-perf net` does, Mooncake with a request a page.
Mooncake comes from PyPI (46 MB), into a Python environment of its own in build/mooncake that is
made when it is not there; nothing else of PegaFlow uses it. Which of its settings is best here is
tried out before the rounds, and printed. Its bytes are compared once, before they are measured.
Needs root, for two network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Self

from perf.support.figure import Figure, note, publish
from perf.support.veth import End, NoNamespaces, cable

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
END = REPOSITORY / "perf" / "support" / "mooncake_end.py"

#: As many of ours, of both sides.
BATCH_PAGES = 64
DEPTH = 2
#: Reads with each setting, of which the median counts.
TRIES = 3


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a user of Mooncake's TCP transport may choose."""

    #: Connections to a peer; 4 is its own choice. One thread serves them all.
    lanes: int
    #: Of what it hands to a socket at once; 64 KiB is its own choice.
    slice_kib: int
    #: How its caller waits: with `batch_transfer_sync_read`, with two batches under way and
    #: `get_batch_transfer_status`, or so and asleep for most of the time that a batch takes.
    wait: str = "sync"

    def __str__(self) -> str:
        return f"{self.lanes} connections, slices of {self.slice_kib} KiB, {self.wait}"

    def environment(self) -> dict[str, str]:
        return {
            "MC_TCP_ENABLE_CONNECTION_POOL": "1",
            "MC_TCP_LANES_PER_PEER": str(self.lanes),
            "MC_TCP_SLICE_SIZE": str(self.slice_kib << 10),
            "MC_LOG_LEVEL": "ERROR",
        }


WAITS = ("sync", "async", "async asleep")
SETTINGS = [Setting(lanes, kib) for lanes, kib in itertools.product((1, 4, 8), (64, 1024))]


class Failed(RuntimeError):
    """A program that is measured ended, or said no; why is in the message."""


def install(environment: Path) -> Path:
    """The Python that has Mooncake; makes it when it is not there.

    Raises:
        Failed: pip could not.
    """
    python = environment / "bin" / "python"
    stamp = environment / "installed"
    if stamp.exists() and stamp.read_text() == PACKAGE:
        return python
    note(f"setup: installing {PACKAGE} into {environment} (46 MB)")
    # Without what its store and its HTTP servers need: the transfer engine alone is used.
    pip = ["-m", "pip", "install", "-q", "--no-input", "--no-deps", "--only-binary", ":all:"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(environment)],
        [str(python), *pip, PACKAGE],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise Failed(f"{PACKAGE} could not be installed: {said[-1] if said else 'no words'}")
    stamp.write_text(PACKAGE)
    return python


class Process:
    """A child that answers lines with lines; what it says besides is kept for when it ends."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._log: IO[str] = tempfile.TemporaryFile("w+")
        # Mooncake's Python shall not see ours.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**kept, **(environment or {})},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.communicate()
        self._log.close()

    def line(self) -> str:
        """
        Raises:
            Failed: it has ended.
        """
        assert self._child.stdout is not None
        if said := self._child.stdout.readline():
            return said
        self._log.seek(0)
        words = self._log.read().strip().splitlines()
        raise Failed(words[-1] if words else f"it ended with {self._child.wait()}")

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """
        Raises:
            Failed: it has ended.
        """
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # line() says why.
            self._child.stdin.write(json.dumps(question) + "\n")
            self._child.stdin.flush()
        answer: dict[str, Any] = json.loads(self.line())
        return answer


class Mooncake:
    """A holder and a reader, with one setting."""

    def __init__(self, reader: Process, options: Options) -> None:
        self._reader = reader
        self._options = options

    def rate(self, page_bytes: int, wait: str, expected: float = 0.0, check: bool = False) -> float:
        """GB/s of one round, at which ``expected`` is how fast it may be, to sleep by."""
        size = self._options.round_bytes(page_bytes)
        batch_bytes = page_bytes * BATCH_PAGES
        asleep_s = batch_bytes / expected / 1e9 if wait == "async asleep" else 0.0
        question = {
            "size_bytes": size,
            "page_bytes": page_bytes,
            "pages": BATCH_PAGES,
            "depth": 1 if wait == "sync" else DEPTH,
            "asleep_s": asleep_s,
            "check": check,
        }
        took_s: float = self._reader.ask(question)["took_s"]
        return size / took_s / 1e9

    def check(self) -> None:
        """Reads the whole memory, and compares it.

        Raises:
            Failed: a byte is wrong.
        """
        batch_bytes = self._options.memory_bytes // BATCH_PAGES
        self._reader.ask(
            {
                "size_bytes": self._options.memory_bytes,
                "page_bytes": batch_bytes,
                "pages": BATCH_PAGES,
                "depth": 1,
                "asleep_s": 0.0,
                "check": True,
            }
        )


@dataclasses.dataclass(frozen=True)
class Options:
    pages: list[int]
    least_bytes: int
    rounds: int
    seed: int

    def round_bytes(self, page_bytes: int) -> int:
        """Whole batches; as `pegaflow-perf net` has it."""
        batch_bytes = page_bytes * BATCH_PAGES
        return batch_bytes * max(self.least_bytes // batch_bytes, 2 * DEPTH)

    @property
    def memory_bytes(self) -> int:
        return max(64 << 20, max(self.pages) * BATCH_PAGES * DEPTH)


@contextlib.contextmanager
def mooncake(
    python: Path, near: End, far: End, setting: Setting, options: Options
) -> Iterator[Mooncake]:
    """
    Raises:
        Failed: it does not start, or does not read what was written.
    """

    def command(end: End, what: str, *more: str) -> list[str]:
        size, seed = str(options.memory_bytes), str(options.seed)
        return [*end.prefix, str(python), str(END), what, end.address, size, seed, *more]

    environment = setting.environment()
    with Process(command(far, "hold"), environment) as holder:
        offer = json.loads(holder.line())
        words = (offer["name"], str(offer["base"]))
        with Process(command(near, "read", *words), environment) as reader:
            made = Mooncake(reader, options)
            made.check()
            yield made


def best_settings(
    python: Path, near: End, far: End, options: Options
) -> dict[int, tuple[Setting, float]]:
    """For each page size the setting with the highest median, and that."""
    best: dict[int, tuple[Setting, float]] = {}
    for setting in SETTINGS:
        with mooncake(python, near, far, setting, options) as made:
            for page in options.pages:
                expected = 0.0
                for wait in WAITS:
                    tries = [made.rate(page, wait, expected) for _ in range(TRIES)]
                    found = statistics.median(tries)
                    expected = max(expected, found)
                    if page not in best or found > best[page][1]:
                        best[page] = (dataclasses.replace(setting, wait=wait), found)
    return best


def ours(perf: Path, near: End, at: str, page_bytes: int, options: Options) -> tuple[float, float]:
    """GB/s of one round of the lane, and of the plain sockets of that round.

    Raises:
        Failed: `pegaflow-perf net` said no.
    """
    done = subprocess.run(
        [*near.prefix, str(perf), "net", at, "--json", "--rounds", "1",
         "--pages", str(page_bytes), "--bytes", str(options.round_bytes(page_bytes)),
         "--batch", str(BATCH_PAGES), "--depth", str(DEPTH), "--seed", str(options.seed)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        figure = json.loads(line)
        if figure["unit"] == "GB/s":
            return figure["figure"], figure["bound"]
    raise Failed(f"pegaflow-perf net: {done.stderr.strip()}")


def compare(
    page_bytes: int, lane: list[float], beside: list[float], setting: Setting, options: Options
) -> Figure:
    ratios = sorted(a / b for a, b in zip(lane, beside, strict=True))
    spread = f"ratio of the rounds {ratios[0]:.2f} to {ratios[-1]:.2f}"
    return Figure(
        run=f"get, pages of {page_bytes >> 10} KiB in batches of {BATCH_PAGES}",
        params={
            "page_bytes": page_bytes,
            "batch": BATCH_PAGES,
            "depth": DEPTH,
            "way": "between two namespaces",
            "mooncake": PACKAGE,
            **dataclasses.asdict(setting),
            "seed": options.seed,
        },
        figure=statistics.median(lane),
        unit="GB/s",
        bound=statistics.median(beside),
        bound_name=f"Mooncake over TCP, {setting}",
        target=1.0,
        n=len(lane),
        spread=spread,
        at_least=True,
    )


def measure(python: Path, perf: Path, options: Options) -> Iterator[Figure]:
    """
    Raises:
        Failed: a program that is measured did not do what it should.
        NoNamespaces: they need root.
    """
    with cable() as (near, far), contextlib.ExitStack() as stack:
        note("trying Mooncake's settings")
        best = best_settings(python, near, far, options)
        listen = [*far.prefix, str(perf), "net", "--listen", f"{far.address}:0"]
        at = stack.enter_context(Process(listen)).line().split()[-1]
        for page in options.pages:
            setting, expected = best[page]
            note(f"pages of {page >> 10} KiB; Mooncake's best: {setting}, {expected:.2f} GB/s")
            lane: list[float] = []
            plain: list[float] = []
            beside: list[float] = []
            with mooncake(python, near, far, setting, options) as made:
                made.rate(page, setting.wait, expected)  # As ours does before it is measured.
                for turn in range(options.rounds):
                    # Each is first as often as the other.
                    for first in (turn % 2 == 0, turn % 2 != 0):
                        if first:
                            figure, sockets = ours(perf, near, at, page, options)
                            lane.append(figure)
                            plain.append(sockets)
                        else:
                            beside.append(made.rate(page, setting.wait, expected))
            note(f"plain sockets in the same rounds: {statistics.median(plain):.2f} GB/s")
            yield compare(page, lane, beside, setting, options)


def size(text: str) -> int:
    """Bytes of "64kb", "2mb".

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    number, unit = text[:-2], text[-2:].lower()
    if not number.isdecimal() or unit not in ("kb", "mb"):
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 64kb or 2mb")
    return int(number) << (10 if unit == "kb" else 20)


def page_sizes(text: str) -> list[int]:
    """
    Raises:
        argparse.ArgumentTypeError: one is none, or not a page of both programs.
    """
    sizes = [size(word) for word in text.split(",")]
    for page in sizes:
        if not 64 << 10 <= page <= 16 << 20 or page % (64 << 10):
            raise argparse.ArgumentTypeError("pages are multiples of 64 KiB up to 16 MiB")
    return sizes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a figure")
    parser.add_argument("--rounds", type=int, default=10, help="of each page size, at least 2")
    parser.add_argument("--pages", type=page_sizes, default="64kb,2mb")
    parser.add_argument("--bytes", type=size, default="256mb", help="what a round moves at least")
    parser.add_argument(
        "--environment",
        type=Path,
        default=REPOSITORY / "build" / "mooncake",
        help="of Mooncake (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("--rounds: at least 2")
    options = Options(given.pages, given.bytes, given.rounds, given.seed)
    perf = Path(os.environ["PEGA_BUILD_DIR"]) / "perf" / "pegaflow-perf"
    try:
        figures = list(measure(install(given.environment), perf, options))
    except (Failed, NoNamespaces) as error:
        raise SystemExit(f"net_mooncake: {error}") from error
    return 0 if publish(figures, given.json) else 1


if __name__ == "__main__":
    sys.exit(main())
