"""The reports of a mover's jobs, for threads that wait for them."""

from __future__ import annotations

import select
import threading
from typing import Any


class JobReports:
    """Hands each report to the thread that waits for its job. Thread-safe."""

    def __init__(self, mover: Any) -> None:
        """``mover``: a ``_native.Mover`` whose reports nothing else takes."""
        self._mover = mover
        self._changed = threading.Condition()
        self._collecting = False
        self._done: dict[tuple[str, int], Any] = {}

    def __len__(self) -> int:
        """The number of reports that no thread has taken yet."""
        return len(self._done)

    def wait(self, job: tuple[str, int]) -> Any:
        """The report of a job, ("load" or "save", number). One of the waiting threads collects the
        reports for all.
        """
        with self._changed:
            while job not in self._done:
                if self._collecting:
                    self._changed.wait()
                    continue
                self._collecting = True
                try:
                    self._changed.release()
                    try:
                        poll = select.poll()
                        poll.register(self._mover.finished_fd(), select.POLLIN)
                        poll.poll()
                    finally:
                        self._changed.acquire()
                    for done in self._mover.take_finished():
                        self._done[done.kind, done.id] = done
                finally:
                    self._collecting = False
                    self._changed.notify_all()
            return self._done.pop(job)
