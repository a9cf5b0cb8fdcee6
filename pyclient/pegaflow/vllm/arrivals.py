"""Requests that reach an engine while its worker waits for the end of a load.

vLLM runs the worker of a single rank on the scheduler's thread: what waits there holds up requests
too. So their arrival ends the wait.
"""

from __future__ import annotations

import contextlib
import os
import select

#: The longest wait where arrivals end it, and where the scheduler is in another process.
LONG_S, SHORT_S = 0.004, 0.001


class Arrivals:
    """The arrivals of this process. note() may be called from any thread, wait() from one."""

    def __init__(self) -> None:
        self._event = -1  # the file descriptor, in a process that has a scheduler

    def begin(self) -> None:
        """The scheduler is in this process, and reports its arrivals. Idempotent."""
        if self._event < 0:
            self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def end(self) -> None:
        """The scheduler is not in this process. No other thread may use this object. Idempotent."""
        if self._event >= 0:
            os.close(self._event)
            self._event = -1

    def note(self) -> None:
        """A request arrives. It ends the wait that is in progress, or else the next one."""
        if self._event >= 0:
            os.eventfd_write(self._event, 1)

    def wait(self, descriptor: int) -> bool:
        """Waits until ``descriptor`` is readable, a request arrives or the time is over; whether
        it is readable.
        """
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        limit_s = SHORT_S
        if self._event >= 0:
            poller.register(self._event, select.POLLIN)
            limit_s = LONG_S
        ready = [one for one, _ in poller.poll(limit_s * 1e3)]
        if self._event in ready:
            with contextlib.suppress(BlockingIOError):  # another thread has read it
                os.eventfd_read(self._event)
        return descriptor in ready


ARRIVALS = Arrivals()
# A child that shared the file descriptor would read its parent's arrivals, and end its parent's
# waits. It has none until a scheduler begins in it.
os.register_at_fork(after_in_child=ARRIVALS.end)
