"""The pool of a server, mapped by a process that must not write to it."""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.vllm_server import PegaServer


@contextmanager
def pool_of(server: PegaServer) -> Iterator[mmap.mmap]:
    """The pool as a stray client maps it, to be overwritten by mistake."""
    for entry in Path(f"/proc/{server.pid}/fd").iterdir():
        if os.readlink(entry).startswith("/memfd:"):
            fd = os.open(entry, os.O_RDWR | os.O_CLOEXEC)
            try:
                pool = mmap.mmap(fd, os.fstat(fd).st_size)
            finally:
                os.close(fd)
            with pool:
                yield pool
            return
    raise AssertionError("the server has no pool")
