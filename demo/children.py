"""Servers that a stage starts, and of which nothing is left at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from demo.progress import Progress
from tests.support.child_process import ChildProcess


class StartsChildren:
    """Of a stage whose servers come and go. Belongs to the main thread."""

    progress: Progress

    def diagnose(self) -> None:
        """Keeps what the servers say of themselves, at the first thing that went wrong."""
        raise NotImplementedError

    @contextlib.contextmanager
    def running(self, *children: ChildProcess) -> Iterator[None]:
        """These servers, one start after the other; nothing of them is left at the end."""
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
        """Starts a server, with lines that say so."""
        what = child.log_file.stem
        with self.progress.step(f"{what} starts"):
            child.start()
        self.progress.say(f"{what} is ready")
