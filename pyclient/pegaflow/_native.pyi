"""The C++ client, as thin as possible. Importing it starts no thread and opens no socket.

Failures are exceptions of the classes below, one for each reaction of the caller. Every call
releases the GIL before it waits. Keys come packed: ``n * key_bytes`` bytes, back to back.

In a namespace with several kinds of blocks, prompts are hashed in units of ``unit_tokens`` tokens.
A lookup or a claim has the keys of units, and block ``b`` of a kind is saved under the key of the
unit that it ends with: ``(b + 1) * block_tokens / unit_tokens - 1``.
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

def pack_hex_keys(digests: object) -> bytes | None:
    """Digests of 32 bytes in hexadecimal, as keys of 32 bytes back to back.

    None unless that is a sequence of strings of 64 hexadecimal digits.
    """

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
    def lookup(
        self,
        keys: bytes,
        key_bytes: int,
        local_units: int = 0,
        nodes: Sequence[bytes] = (),
        no_nodes: bool = False,
        prefill_node: bytes = b"",
    ) -> int:
        """Asks how many leading keys are cached; a ticket for take().

        With several kinds: how many leading units can be restored, where the engine has the first
        ``local_units`` itself, a multiple of the alignment. ``nodes``: incarnations of servers that
        are asked first, instead of all. ``no_nodes``: no other server is asked. ``prefill_node``:
        the incarnation of the server of the engine that computes the prompt; blocks that its
        workers save count as offered, if this engine can read their memory.
        """
    def claim(
        self,
        keys: bytes,
        key_bytes: int,
        compute_delay_s: float = 0.0,
        compute_block_s: float = 0.0,
        local_units: int = 0,
        nodes: Sequence[bytes] = (),
        no_nodes: bool = False,
    ) -> int:
        """Asks for a claim on the longest cached prefix; a ticket for take() or take_claim().

        With several kinds: on all blocks that the longest restorable prefix needs beyond
        ``local_units``; a ticket for take_ranges(). ``compute_delay_s`` and ``compute_block_s``:
        the time in which the engine computes what it does not load; 0: unknown. ``nodes`` and
        ``no_nodes`` are those of lookup().
        """
    def take(
        self, ticket: int, patience_s: float = 0.0
    ) -> tuple[int, bool, bytes, int, int] | None:
        """(blocks, complete, token, coming, offered) or None: not yet.

        The token is empty without a claim. The last ``coming`` of the blocks are at another node: a
        load waits for them, and some may not arrive. With several kinds, ``blocks`` are units.
        ``offered``, for a lookup: the number of blocks after those of this node that
        Mover.load_following() would read out of another engine's memory.

        Raises:
            Timeout, PeerLost: There was no response.
            Gone: The ticket is unknown.
            Refused: The server does not support several kinds, which the question needs.
            InvalidArgument: ``local_units`` are no multiple of the alignment.
        """
    def take_claim(
        self, ticket: int, patience_s: float = 0.0
    ) -> tuple[int, bool, bytes, int, float, float] | None:
        """take() and the seconds in which the first and the last block arrive; 0: unknown."""
    def take_ranges(
        self, ticket: int, patience_s: float = 0.0
    ) -> tuple[int, bool, bytes, list[tuple[int, int, int]], int, float, float] | None:
        """(units, complete, token, ranges, coming, first_s, last_s) of a claim with several kinds;
        raises as take().

        A range is (kind, first, count): blocks by their number from the prompt's beginning. The
        claim has exactly these. ``coming``: ``units`` if some of the blocks are at another node,
        else 0; first_s and last_s are as in take_claim(). Without a claim, units is 0.
        """
    def boundaries(self, keys: bytes, key_bytes: int, local_units: int = 0) -> int:
        """Asks for every length at which a prompt can be restored; only with several kinds."""
    def take_boundaries(
        self, ticket: int, patience_s: float = 0.0
    ) -> tuple[list[int], bool] | None:
        """(multiples, complete) or None; raises as take().

        Ascending; a multiple m stands for a prefix of ``m * alignment_tokens`` tokens.
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
    def take_journal_of_kinds(
        self, ticket: int, patience_s: float = 0.0
    ) -> tuple[int, int, bool, bool, list[tuple[bytes, bool, int]]] | None:
        """take_journal() with entries (key, is_there, kind)."""
    def wants_chains(self) -> bool:
        """Whether a router wants to know which blocks prompts have; true once a second while that
        is not known.
        """
    def report_chain(self, session: str, keys: bytes, key_bytes: int, block_tokens: int) -> None:
        """Reports to routers which full blocks the prompt of a request with this session id has.

        Those of the first kind of rule prefix, from the first on, at most MAX_KEYS. Does not wait.
        The id itself is not sent.
        """
    def await_job(
        self,
        server: bytes,
        scheduler: bytes,
        number: int,
        patience_s: float,
        begun: bool = False,
    ) -> int:
        """Waits for the end of another engine's job and of those before it.

        ``begun``: only until all ranks of that engine have begun the job, so that lookups see what
        it offers. take_wait() then raises Refused if the server does not support direct reads.
        """
    def take_wait(self, ticket: int, patience_s: float = 0.0) -> int | None:
        """The number up to which all jobs of that engine have ended, or with ``begun`` have begun.

        0 if the server does not report it, although the job has ended; None if it has not. Raises
        as take(), and Busy, Refused or Gone if that is unknown. In each case a lookup finds the
        blocks that were sealed.
        """
    def events(self) -> int:
        """The number of answers that have arrived, and of calls of interrupt()."""
    def await_event(self, seen: int, patience_s: float) -> bool:
        """Sleeps, at most ``patience_s``, until events() is no longer ``seen``; whether it changed.

        Releases the GIL. A caller that reads events() before it takes answers misses none.
        """
    def interrupt(self) -> None:
        """Ends await_event() of another thread, or its next one with an older ``seen``."""
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
    blocks: int  # Saved or loaded; a block of a kind with several members counts once.
    skipped: int  # Of a save.
    bytes: int  # Copied.
    direct_bytes: int  # Those of them that came out of another engine's memory.
    took_s: float
    copying_s: float  # Of a load: time on the device.
    cut: str  # Why computing would have been faster than the load: "stuck", "slow" or "".
    failed_blocks: list[int]  # Block numbers of the engine, those of all kinds and members.
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
    ``cells``: if engines of other tensor-parallel sizes share the blocks, the number of consecutive
    shards that this rank holds, from ``shard`` on; ``segments`` are then those of the first cell,
    followed by equally many of each other one. 0: only engines of the same size have its shard.
    ``direct_group``: engines of this host that name the same group read each other's blocks while
    they are saved; "": none does. Not together with ``cells``. ``has_fixed_memory``: whether the
    addresses of the segments stand for the same memory until close(); if not, other engines do not
    map memory that consists of several allocations of a GPU. ``direct_nics``: RDMA cards over
    which engines of other hosts do so, too, and this one reads the pools of other nodes, ["auto"]
    for all; without one that can be used a
    warning is logged. ``ucx_library``: the file of libucp for it, "" for the installed one.
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
        cells: int = 0,
        saves: bool = True,
        numa_node: int = -1,
        direct_group: str = "",
        has_fixed_memory: bool = True,
        direct_nics: Sequence[str] = (),
        ucx_library: str = "",
        **options: Any,
    ) -> None: ...
    @staticmethod
    def of_kinds(
        socket_path: str,
        instance: str,
        device: Device,
        kinds: Sequence[tuple[int, int, int, Sequence[tuple[Sequence[tuple[int, int, int]], int]]]],
        unit_tokens: int,
        alignment_tokens: int,
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
    ) -> Mover:
        """A mover of a model with several kinds of blocks.

        ``kinds``: (rule, tokens, block_tokens, members) each. Rules are 0 prefix, 1 trailing, 2
        chunk and 3 state, and kind 0 is the prefix if there is one; ``tokens`` is the window
        without the next token, the chunk, or 0. ``members`` are the engine's cache groups of the
        kind, (segments, block_count) each; a page of the kind has their pages one behind the other,
        and they may lie over each other in memory. Without members this rank has no layer of the
        kind. ``unit_tokens``: of a hash; ``alignment_tokens``: what every restored length is a
        multiple of. All ranks of an instance name equal kinds.

        With a server that does not support several kinds, ``status()`` is "refused" and names the
        server's version.

        Raises:
            InvalidArgument: A value is invalid; the server refuses rules that do not fit together.
        """
    @property
    def page_bytes(self) -> int:
        """The bytes of this rank's page of kind 0."""
    @property
    def kind_page_bytes(self) -> list[int]:
        """Those of each kind; 0: this rank has no layer of it."""
    def record(self, queue: int = 0) -> int:
        """An event that marks the engine's work on ``queue`` so far, for save() in the same step.

        A GPU reuses it after 4,096 others; a save that still waits for it then fails.

        Raises:
            Internal: The device is broken.
        """
    def save(
        self,
        scheduler: bytes,
        job: int,
        keys: bytes,
        key_bytes: int,
        blocks: Sequence[int],
        queue: int = 0,
        kind: int = 0,
        depths: bytes = b"",
        may_refuse: bool = False,
        computed: int | None = None,
    ) -> None:
        """Saves after the engine's work on ``queue``; for a GPU the handle of a CUDA stream.

        ``computed``: an earlier point of that work, of record(), from which on the blocks have
        their final content. Other engines read them from there on; the save does not.

        ``blocks``: those of all members of ``kind`` for the first key, then for the next one. For a
        kind without members it is empty, and the job is reported at once with all keys skipped.

        ``depths``: for each key one byte, 1 + log2(1 + n) rounded down for a block with n blocks
        before it in its prompt, or 0; empty: unknown. A server that may not write all blocks to
        its disks prefers those near the start.

        ``may_refuse``: no other engine waits for these blocks, so a server may skip some to keep
        those that it has.

        Raises:
            InvalidArgument: An unknown kind, no key, or blocks or depths that do not fit the keys.
            PeerLost: There is no server.
            Busy: Too many jobs are in flight or not taken.
        """
    def load(
        self,
        load: int,
        token: bytes,
        first: int,
        blocks: Sequence[int],
        computing: tuple[float, float] | None = None,
    ) -> None:
        """Loads the claimed blocks from ``first`` on, of one kind of full attention.

        ``computing``: (delay_s, block_s), the time in which the engine would compute them; a load
        that falls behind is cut. Raises as save().
        """
    def load_ranges(
        self,
        load: int,
        token: bytes,
        ranges: Sequence[tuple[int, int, int, Sequence[int]]],
        claimed: Sequence[tuple[int, int, int]],
        computing: tuple[float, float] | None = None,
    ) -> None:
        """Loads blocks of several kinds, with one report for all of them.

        ``ranges``: (kind, first, count, blocks) each, at most one a kind. ``first`` is a block's
        number from the prompt's beginning; ``blocks`` are those of all members for the first block,
        then for the next one. ``claimed``: the ranges of take_ranges(); a part of each may be
        loaded. The first block that fails ends the load, and ``failed_blocks`` has those of all
        kinds. ``computing`` has an effect only for one range of a prefix.

        Raises:
            InvalidArgument: Blocks that are not claimed, a second range of a kind, or blocks that
                do not fit their count.
            PeerLost, Busy: As save().
        """
    def load_following(
        self,
        load: int,
        keys: bytes,
        key_bytes: int,
        blocks: Sequence[int],
        patience_s: float,
        node: bytes = b"",
    ) -> None:
        """Loads blocks by their keys, those of a part of a prompt in its order.

        Loads the cached blocks, and blocks that another engine of the direct group is
        saving, as soon as it has computed them. Waits at most ``patience_s`` in all; the blocks
        that neither has by then have failed. The load is never returned by follow(). ``node``: the
        incarnation of the server of that other engine, if it may be another one.

        Raises:
            InvalidArgument: No key, or blocks that do not fit the keys.
            Refused: There is no direct group, or the server does not support direct reads.
            PeerLost, Busy: As save().
        """
    def cancel_load(self, load: int) -> None: ...
    def follow(self, within_s: float, queue: int = 0) -> list[Followed]:
        """Completes loads early: later work on ``queue`` waits for their copies on the device."""

    def take_finished(self) -> list[Finished]: ...
    def finished_fd(self) -> int: ...
    def status(self) -> dict[str, Any]: ...
    def wait_ready(self, patience_s: float) -> bool: ...
    def close(self) -> None: ...
