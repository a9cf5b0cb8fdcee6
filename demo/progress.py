"""One line per step, with the seconds since the start."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Prints the progress; on a terminal the current step is shown with a running clock.

    Thread-bound, but for the clock's own thread, which lives only within a step.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._terminal = sys.stdout.isatty()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        clear = "\r\033[K" if self._terminal else ""
        print(f"{clear}[{self.elapsed_s():6.1f} s] {text}", flush=True)

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Runs the clock during a step; the caller prints the outcome."""
        if not self._terminal:
            yield
            return
        done = threading.Event()
        clock = threading.Thread(target=self._run_clock, args=(text, done), daemon=True)
        clock.start()
        try:
            yield
        finally:
            done.set()
            clock.join()

    def _run_clock(self, text: str, done: threading.Event) -> None:
        while True:
            print(f"\r\033[K[{self.elapsed_s():6.1f} s] {text} ...", end="", flush=True)
            if done.wait(0.5):
                print("\r\033[K", end="", flush=True)
                return
