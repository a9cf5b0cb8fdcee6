"""The C++ client, as thin as possible. Importing it starts no thread and opens no socket.

Failures are exceptions of the classes below, one for each reaction of the caller. Every call
releases the GIL before it waits. Keys come packed: ``n * key_bytes`` bytes, back to back.
"""

from collections.abc import Sequence
from typing import Any

__version__: str
MAX_KEYS: int  # The limit of leading keys for a lookup or claim, 8192.
HAS_CUDA_KERNELS: bool  # Whether this build contains the kernels for NVIDIA GPUs.
JOURNAL_END: int  # The current position in the journal.

class PegaFlowError(RuntimeError): ...  # str(error) is the detail.
class InvalidArgument(PegaFlowError, ValueError): ...
class Busy(PegaFlowError): ...
class OutOfCapacity(PegaFlowError): ...
class Gone(PegaFlowError): ...
class Timeout(PegaFlowError, TimeoutError): ...
class Cancelled(PegaFlowError): ...
class PeerLost(PegaFlowError, ConnectionError): ...
class Refused(PegaFlowError): ...
class Corrupt(PegaFlowError): ...
class IoError(PegaFlowError, OSError): ...
class Internal(PegaFlowError): ...

def random_id() -> bytes:
    """16 random bytes: an incarnation."""

def default_socket_path(port: int) -> str:
    """The path of a server's socket, from its ``--addr HOST:port``.

    Depends on PEGAFLOW_RUNTIME_DIR and the defaults.
    """

def set_log_level(name: str) -> None:
    """Sets what the C++ side logs to stderr: "trace", "debug", "info", "warn", "error" or "off"."""

class CacheSession:
    """The scheduler's side; see client/cache_session.h. Thread-safe.

    ``options``: keyword arguments named like the fields of LinkOptions; durations are seconds
    (float), e.g. ``lookup_deadline=0.05``. Unknown names raise InvalidArgument.
    """

    def __init__(
        self, socket_path: str, instance: str, build: str = "", **options: Any
    ) -> None: ...
    def lookup(self, keys: bytes, key_bytes: int) -> int: ...
    def claim(self, keys: bytes, key_bytes: int) -> int: ...
    def take(self, ticket: int, patience_s: float = 0.0) -> tuple[int, bool, bytes, int] | None:
        """(blocks, complete, token, coming) or None: not yet.

        The token is empty without a claim. The last ``coming`` of the blocks are at another node: a
        load waits for them, and some may not arrive.

        Raises:
            Timeout, PeerLost: There was no response.
            Gone: The ticket is unknown.
        """
    def journal(self, space: int, position: int) -> int:
        """Asks for the journal since an answer with this ``space`` and ``position``.

        With JOURNAL_END only the current position is returned.
        """
    def take_journal(
        self, ticket: int, patience_s: float = 0.0
    ) -> tuple[int, int, bool, bool, list[tuple[bytes, bool]]] | None:
        """(space, position, lost, more, [(key, is_there)]) or None; raises as take().

        Keys have 32 bytes, shorter ones are padded with zeros. ``lost``: earlier entries are
        missing, so any block may be gone. ``more``: ask again at once.
        """
    def await_job(self, server: bytes, scheduler: bytes, number: int, patience_s: float) -> int:
        """Waits for the end of another engine's job and of those before it."""
    def take_wait(self, ticket: int, patience_s: float = 0.0) -> bool:
        """Whether they have ended; raises as take(), and Busy, Refused or Gone if that is unknown.

        In each case a lookup finds the blocks that were sealed.
        """
    def forget(self, ticket: int) -> None: ...
    def unclaim(self, token: bytes) -> None: ...
    def ask_reset(self, deadline_s: float) -> int:
        """Makes everything that the namespace holds unfindable; a ticket for take_reset()."""
    def take_reset(self, ticket: int, patience_s: float = 0.0) -> tuple[int, list[str]] | None:
        """The result of reset_cache(), or None: not yet. Raises as take()."""
    def reset_cache(self, patience_s: float) -> tuple[int, list[str]]:
        """The new generation, and the addresses of nodes that did not confirm the reset."""
    def status(self) -> dict[str, Any]:
        """Keys: state, detail, connections, server, server_build, namespace_hash.

        ``state`` is "connecting", "refused", "ready", "broken" or "retired".
        """
    def wait_ready(self, patience_s: float) -> bool:
        """Waits at most ``patience_s`` until it is ready. For starts and tests, not for engines."""
    def close(self) -> None: ...

class Finished:
    kind: str  # "save" or "load"
    id: int
    blocks: int
    skipped: int
    bytes: int
    took_s: float
    failed_blocks: list[int]
    verified: int  # Pages of a load that were compared with their checksums.
    corrupt: int  # Those of them that differed from the saved page.
    error: str | None  # "timeout: ..." or None
    error_code: str | None  # "timeout", "gone", ... or None

class Followed:
    load: int
    blocks: int
    bytes: int
    took_s: float

class Device:
    """Copies between an engine's memory and the pool; see transport/device.h."""

class HostDevice(Device):
    """Copies between the pool and ordinary memory with threads of its own; see transport/host."""

    def __init__(self, threads: int = 1) -> None: ...

class CudaDevice(Device):
    """Copies between the pool and GPU ``ordinal`` of this process; see transport/cuda.

    Raises:
        Refused: No driver, or no such GPU.
        OutOfCapacity, IoError: The error of CUDA.
    """

    def __init__(self, ordinal: int = 0) -> None: ...
    def info(self) -> dict[str, Any]:
        """Keys: name, kernels, path ("staged", "direct", "none"), direct_share, register_s."""

class DeclineNotice:
    """Reports why an engine that is configured to use the cache does not; see
    client/decline_notice.h. Thread-safe.

    ``side``: "scheduler" or "worker", with its ``rank``. ``reason``: "other", "configuration",
    "engine", "model", "weights", "device" or "failure". ``options`` as for CacheSession.
    """

    def __init__(
        self,
        socket_path: str,
        instance: str,
        build: str = "",
        side: str = "scheduler",
        rank: int = 0,
        reason: str = "other",
        detail: str = "",
        **options: Any,
    ) -> None: ...
    def status(self) -> dict[str, Any]: ...
    def close(self) -> None:
        """Ends the connection, within 1 s. Idempotent."""

class Mover:
    """The worker's side; see client/mover.h. Thread-safe.

    ``segments``: (address, block_stride_bytes, size_bytes) each; the memory must stay valid until
    close() has returned. ``factors``: the namespace's canonical list of (name, value). ``shard`` of
    ``shards``: the share of each block that this rank holds, by default its rank of ``ranks``;
    ranks with the same bytes name one shard, and all but the lowest of them set ``saves=False``:
    their save() is reported at once with 0 blocks. ``numa_node``: the preferred NUMA node of its
    pages, -1 for the one to whose cores this process is bound. ``options``: fields of LinkOptions
    and of Mover::Options, durations in seconds; ``verify`` is "off", "sample" or "all".
    """

    def __init__(
        self,
        socket_path: str,
        instance: str,
        device: Device,
        segments: Sequence[tuple[int, int, int]],
        block_count: int,
        factors: Sequence[tuple[str, str]],
        rank: int = 0,
        ranks: int = 1,
        build: str = "",
        *,
        shard: int | None = None,
        shards: int | None = None,
        saves: bool = True,
        numa_node: int = -1,
        **options: Any,
    ) -> None: ...
    @property
    def page_bytes(self) -> int: ...
    def save(
        self,
        scheduler: bytes,
        job: int,
        keys: bytes,
        key_bytes: int,
        blocks: Sequence[int],
        queue: int = 0,
    ) -> None:
        """Saves after the engine's work on ``queue``; for a GPU the handle of a CUDA stream."""
    def load(self, load: int, token: bytes, first: int, blocks: Sequence[int]) -> None: ...
    def cancel_load(self, load: int) -> None: ...
    def follow(self, within_s: float, queue: int = 0) -> list[Followed]:
        """Completes loads early: later work on ``queue`` waits for their copies on the device."""

    def take_finished(self) -> list[Finished]: ...
    def finished_fd(self) -> int: ...
    def status(self) -> dict[str, Any]: ...
    def wait_ready(self, patience_s: float) -> bool: ...
    def close(self) -> None: ...
