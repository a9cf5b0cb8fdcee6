"""Waits for a condition of another process. Needs only Python itself."""

import select
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Returns as soon as ``condition()`` is true; fails with ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        select.select([], [], [], 0.02)
