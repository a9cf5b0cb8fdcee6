"""vLLM's sleep mode around an Engine of the harness: the real engine core and executor, and memory
that is really gone.

vLLM has sleep mode on GPUs only. Here a worker makes the pages of its KV cache inaccessible, in the
order of vLLM 0.33's GPU worker, so that a copy from or to a sleeping engine ends the process.
"""

import ctypes
import mmap
import queue
from collections.abc import Iterator
from typing import Any

from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from tests.python.harness import Engine
from tests.python.rank import Rank

_libc = ctypes.CDLL(None, use_errno=True)
_NONE, _ALL = 0, mmap.PROT_READ | mmap.PROT_WRITE


def _pages(rank: Rank) -> Iterator[tuple[int, int]]:
    """The whole pages of each allocation of the KV cache."""
    storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in _views(rank)}
    for address, storage in storages.items():
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (address + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        assert stop > first, "the KV cache has no whole page"
        yield first, stop - first


def _views(rank: Rank) -> Any:
    return rank.model.tensors.values()


def _protect(rank: Rank, rights: int) -> None:
    for address, size in _pages(rank):
        if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), rights) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")


def unmap(rank: Rank) -> None:
    """vLLM 0.33's GPU worker: sleep()."""
    rank.worker.unregister_kv_caches()
    _protect(rank, _NONE)


def remap(rank: Rank) -> None:
    """vLLM 0.33's GPU worker: wake_up() of the KV cache; other bytes are there now."""
    _protect(rank, _ALL)
    for array in rank.model.arrays:
        array[...] = 0xDDDDDDDDDDDDDDDD
    rank.worker.restore_kv_caches()


def _executor(engine: Engine) -> UniProcExecutor:
    """vLLM's executor; its workers are the engine's ranks."""
    executor = object.__new__(UniProcExecutor)
    executor.sleeping_tags = set()

    def collective_rpc(method: str, *args: Any, **kwargs: Any) -> list[None]:
        tags = (kwargs.get("kwargs") or {}).get("tags")
        if method == "sleep":
            act = unmap
        elif method == "wake_up" and (tags is None or "kv_cache" in tags):
            act = remap
        else:
            return [None]
        return [one.do(act) for one in engine.ranks]

    executor.collective_rpc = collective_rpc
    executor.discard = lambda tags: [one.do(unmap) for one in engine.ranks]
    return executor


def core_of(engine: Engine, kind: type[EngineCore] = EngineCoreProc) -> EngineCore:
    """vLLM's engine core, as in a process of its own, around the engine's scheduler and workers."""
    core = object.__new__(kind)
    core.vllm_config = engine.config
    core.scheduler = engine.scheduler
    core.mm_receiver_cache = None
    core.model_executor = _executor(engine)
    core.engines_running = False
    core.batch_queue = None
    core.output_queue = queue.Queue()
    core._idle_state_callbacks = []
    return core


def drain(engine: Engine, core: EngineCore) -> None:
    """The engine core's loop until it is idle, and what it does then."""
    engine.run()
    core._notify_idle_state_callbacks()


def sleep(engine: Engine, level: int = 1, mode: str = "abort") -> EngineCore:
    """POST /sleep"""
    core = core_of(engine)
    pending = core.sleep(level, mode)
    if pending is not None:
        drain(engine, core)
        pending.result(timeout=0)
    return core


def nap(engine: Engine, level: int = 1) -> None:
    """A sleep, and a wake-up of all."""
    assert sleep(engine, level).wake_up()
