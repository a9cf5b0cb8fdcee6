"""Servers that a stage starts, and stops at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from demo.progress import Progress
from tests.support.child_process import ChildProcess


class StartsChildren:
    """The servers of a stage that start and stop during it. Bound to the main thread."""

    progress: Progress

    def diagnose(self) -> None:
        """Keeps the servers' counters and logs at the first failure."""
        raise NotImplementedError

    @contextlib.contextmanager
    def running(self, *children: ChildProcess) -> Iterator[None]:
        """Starts these servers one after the other, and stops them at the end."""
        started: list[ChildProcess] = []
        try:
            for child in children:
                started.append(child)
                self.start(child)
            yield
        except Exception:
            self.diagnose()
            raise
        finally:
            for child in reversed(started):
                child.stop()

    def start(self, child: ChildProcess) -> None:
        """Starts a server and prints its progress."""
        what = child.log_file.stem
        with self.progress.step(f"{what} starts"):
            child.start()
        self.progress.say(f"{what} is ready")
