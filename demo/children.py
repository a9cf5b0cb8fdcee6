"""Servers that a stage starts, and stops at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from demo.progress import Progress
from tests.support.child_process import ChildProcess


class StartsChildren:
    """The servers of a stage that start and stop during it. Bound to the main thread."""

    progress: Progress

    def diagnose(self) -> None:
        """Keeps the servers' counters and logs at the first failure."""
        raise NotImplementedError

    @contextlib.contextmanager
    def running(self, *children: ChildProcess, together: bool = False) -> Iterator[None]:
        """Starts these servers one after the other, or together, and stops them at the end."""
        started: list[ChildProcess] = []
        try:
            if together:
                started += children
                self._start_together(children)
            else:
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

    def _start_together(self, children: Sequence[ChildProcess]) -> None:
        what = " and ".join(child.log_file.stem for child in children)
        with self.progress.step(f"{what} start"):
            for child in children:
                child.launch()
            for child in children:
                child.wait_until_started()
        self.progress.say(f"{what} are ready")
