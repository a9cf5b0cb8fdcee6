"""One ./dev of a checkout compiles at a time: two would write to the same files."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def one_at_a_time(build_dir: pathlib.Path) -> Iterator[None]:
    """Waits until no other ./dev of the checkout sets up or builds, as one_at_a_time of
    tools/setup.sh does. Not reentrant.

    Args:
        build_dir: A folder of the checkout's build/.
    """
    with (build_dir.absolute().parent / ".dev-lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting until another ./dev of this checkout has set up and built", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
