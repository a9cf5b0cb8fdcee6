#!/usr/bin/env python3
"""The socket lane beside Mooncake's TCP transport, over one virtual cable, in alternating rounds.

    ./dev bench net_mooncake [--rounds N] [--pages 64kb,2mb] [--bytes 256mb] [--json]

Both read the same pages from the same places of another process's memory to the same places of
their own, with as many in flight: the socket lane through `pegaflow-perf net`, Mooncake with one
request per page. Mooncake is installed from PyPI (46 MB) into its own Python environment in
build/mooncake if that is missing; nothing else of PegaFlow uses it. Its best settings on this
machine are determined before the rounds, and printed. Its bytes are compared once, before the
measurement. Needs root for two network namespaces.
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

#: Pages of a batch, on both sides.
BATCH_PAGES = 64
DEPTH = 2
#: Reads with each setting; the median counts.
TRIES = 3


@dataclasses.dataclass(frozen=True)
class Setting:
    """The options of Mooncake's TCP transport."""

    #: Connections to a peer; its default is 4. One thread serves them all.
    lanes: int
    #: Bytes that it passes to a socket at once; its default is 64 KiB.
    slice_kib: int
    #: How its caller waits: in `batch_transfer_sync_read`; with two batches in flight in
    #: `get_batch_transfer_status`; or like that, asleep for most of the time of a batch.
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
    """A measured program ended or reported an error; the message has the reason."""


def install(environment: Path) -> Path:
    """The Python of Mooncake's environment, which is created if it is missing.

    Raises:
        Failed: pip failed.
    """
    python = environment / "bin" / "python"
    stamp = environment / "installed"
    if stamp.exists() and stamp.read_text() == PACKAGE:
        return python
    note(f"setup: installing {PACKAGE} into {environment} (46 MB)")
    # Without the dependencies of its store and HTTP servers: only the transfer engine is used.
    pip = ["-m", "pip", "install", "-q", "--no-input", "--no-deps", "--only-binary", ":all:"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(environment)],
        [str(python), *pip, PACKAGE],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            output = (done.stderr or done.stdout).strip().splitlines()
            raise Failed(
                f"{PACKAGE} could not be installed: {output[-1] if output else 'no output'}"
            )
    stamp.write_text(PACKAGE)
    return python


class Process:
    """A child that answers lines with lines. Its log is kept for the error when it ends."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._log: IO[str] = tempfile.TemporaryFile("w+")
        # Mooncake's Python must not use this program's modules.
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
        if line := self._child.stdout.readline():
            return line
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
    """A holder and a reader with one setting."""

    def __init__(self, reader: Process, options: Options) -> None:
        self._reader = reader
        self._options = options

    def rate(self, page_bytes: int, wait: str, expected: float = 0.0, check: bool = False) -> float:
        """GB/s of one round. ``expected`` GB/s determine how long an asleep caller sleeps."""
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
        """Reads the whole memory and compares it.

        Raises:
            Failed: a byte differs.
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
        """Whole batches, as in `pegaflow-perf net`."""
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
        Failed: it does not start, or reads wrong bytes.
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
    """For each page size, the setting with the highest median, and that median."""
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
    """GB/s of one round of the lane, and of the plain sockets in that round.

    Raises:
        Failed: `pegaflow-perf net` failed.
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
            "link": "between two namespaces",
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
        Failed: a measured program failed.
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
                made.rate(page, setting.wait, expected)  # A warm-up, as in `pegaflow-perf net`.
                for turn in range(options.rounds):
                    # Each side begins equally often.
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
        argparse.ArgumentTypeError: it is not a size.
    """
    number, unit = text[:-2], text[-2:].lower()
    if not number.isdecimal() or unit not in ("kb", "mb"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 64kb or 2mb")
    return int(number) << (10 if unit == "kb" else 20)


def page_sizes(text: str) -> list[int]:
    """
    Raises:
        argparse.ArgumentTypeError: one is not a size, or not a page size of both programs.
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
    parser.add_argument("--json", action="store_true", help="print one JSON object per figure")
    parser.add_argument(
        "--rounds", type=int, default=10, help="rounds of each page size, at least 2"
    )
    parser.add_argument("--pages", type=page_sizes, default="64kb,2mb")
    parser.add_argument("--bytes", type=size, default="256mb", help="least bytes of a round")
    parser.add_argument(
        "--environment",
        type=Path,
        default=REPOSITORY / "build" / "mooncake",
        help="Python environment of Mooncake (default: %(default)s)",
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
