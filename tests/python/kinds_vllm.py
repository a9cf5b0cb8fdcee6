"""A real vLLM with windows and states: the plans with a dictionary, or the connector with a server.

run() answers prompts one after another in a process of its own, each with vLLM's own cache empty,
and returns for each its tokens, those that were loaded, the log-probabilities of the most probable
tokens after the prompt, and the number of blocks of each kind that were stored so far. A request is
``LENGTH`` for a new prompt, or ``of I HEAD TAIL`` (with commas) for the first HEAD tokens of
request I and its answer, and TAIL others; HEAD 0 means all of them. Modes are ``plain``, and

``memory`` copies blocks to a dictionary and back, with the real plans and geometry. ``pega`` is the
whole connector and a pegaflow-server; before a request there may be ``refuse:`` or ``spoil:`` (its
load fails at once, or after copies of wrong bytes), ``wipe:`` (the states of the last load are
zeros in the pool), ``kill:`` or ``start:`` (of the server), ``preempt:`` (vLLM takes the request's
blocks after some tokens) or ``abort:`` (it is aborted there, and asked again).
``shifted`` is the same with a planted mistake: each window is saved one block too late.
"""

import contextlib
import copy
import ctypes
import multiprocessing
import os
import random
import select
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from pegaflow import _native
from pegaflow.engine.kinds import BlockKind, KindRule
from pegaflow.engine.layout import Geometry
from pegaflow.vllm.build import read_geometries
from pegaflow.vllm.metrics import Counts
from pegaflow.vllm.plans.save_plan import SavePlan
from tests.python.harness import ALWAYS, PATIENT
from tests.python.kinds_engine import KindsConnector, Load, Save, Store
from tests.python.test_connector_faults import wait_for_zero
from tests.support import granite_on_cpu
from tests.support.stray_client import pool_of
from tests.support.vllm_server import PegaServer

BLOCK = 32
INTERVAL = 256
#: Tokens of an answer, after which its request is preempted or aborted.
INTERRUPTED_AT = 3
#: The most probable tokens whose log-probabilities are reported.
ALTERNATIVES = 20
#: Far more seconds than a start and a request take on a busy machine.
STUCK_S = 500.0

context = multiprocessing.get_context("forkserver")
# Importing vLLM takes 10 s of a core: once for all, in a process without threads. The second module
# is what an engine imports at its start.
context.set_forkserver_preload(["tests.python.kinds_vllm", "vllm.v1.worker.cpu_worker"])


class MemoryConnector(KindsConnector):
    """Both sides in one process."""

    scheduler: "MemoryConnector"
    worker: "MemoryConnector"

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.places: list[Geometry] = []
        self.received: set[str] = set()
        self.copied: list[Save] = []
        if role == KVConnectorRole.SCHEDULER:
            self.store = Store(self.kinds)
            MemoryConnector.scheduler = self
        else:
            MemoryConnector.worker = self

    # ---- scheduler

    def has_pending_push_work(self) -> bool:
        return bool(self.saves)

    def update_connector_output(self, connector_output: Any) -> None:
        for save in self.copied:
            self.pool.free_blocks(save.pinned)
        self.copied.clear()

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.places = read_geometries(self._kv_cache_config, kv_caches)

    def start_load_kv(self, *arguments: Any, **more: Any) -> None:
        side = MemoryConnector.scheduler
        for load in side.loads:
            self._write(load)
            self.received.add(load.request.request_id)
            side.hits[load.request.request_id] = (load.local, load.tokens - load.local)
            side.requests[load.request.request_id][2].loaded(load.tokens)
        side.loads.clear()
        assert not side.refused

    def wait_for_layer_load(self, *arguments: Any, **more: Any) -> None:
        return None

    save_kv_layer = wait_for_layer_load

    def wait_for_save(self) -> None:
        side = MemoryConnector.scheduler
        for save in side.saves:
            members = self.kinds.kinds[save.what.kind].members
            pages = [
                self._page(group, block)
                for group, block in zip(members, save.what.ids, strict=True)
            ]
            content = [b"".join(ctypes.string_at(*piece) for piece in page) for page in pages]
            side.store.blocks[save.what.kind].setdefault(save.key, content)
        side.copied += side.saves
        side.saves.clear()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        self.wait_for_save()
        received, self.received = self.received, set()
        return None, received or None

    def _page(self, group: int, block: int) -> list[tuple[int, int]]:
        """Addresses and sizes of a block's pieces."""
        return [
            (piece.address + block * piece.stride, piece.size)
            for piece in self.places[group].segments
        ]

    def _write(self, load: Load) -> None:
        for one, contents in zip(load.ranges, load.contents, strict=True):
            ids = iter(one.blocks)
            for content in contents:
                for member, group in enumerate(self.kinds.kinds[one.kind].members):
                    offset = 0
                    for address, size in self._page(group, next(ids)):
                        part = content[member][offset : offset + size]
                        ctypes.memmove(address, part, size)
                        offset += size
                    assert offset == len(content[member])


class Pega:
    """A server, and the connector of the engine in this process."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Adds the connector to the engine's options."""
        from pegaflow.vllm import build, support
        from pegaflow.vllm.scheduler_side import SchedulerSide

        support.SERVES_KINDS = True
        self._places: list[Geometry] = []
        self._states: NotedStates | None = None

        def keep_places(*arguments: Any) -> list[Geometry]:
            self._places = read_geometries(*arguments)
            return self._places

        build.read_geometries = keep_places
        binary = Path(os.environ["PEGA_BUILD_DIR"], "server", "pegaflow-server")
        self._directory = tempfile.TemporaryDirectory(prefix="pega-")
        self.server = PegaServer(binary, Path(self._directory.name), pool_size="256mb").start()
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="PegaKVConnector",
            kv_connector_module_path="pegaflow.connector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "pegaflow.host": self.server.address,
                "pegaflow.window_interval": INTERVAL,
                "pegaflow.untested": True,
                "pegaflow.max_pinned_percent": 50,
            }
            | ALWAYS
            | PATIENT,
        )
        self.counts = Counts()
        original, counts = SchedulerSide.take_counts, self.counts

        def take_counts(side: SchedulerSide) -> Counts | None:
            taken = original(side)
            if taken is not None:
                counts.aggregate(copy.deepcopy(taken))
            return taken

        SchedulerSide.take_counts = take_counts

    def _wait_ready(self, llm: Any) -> None:
        deadline = time.monotonic() + 60
        side = self._core(llm).scheduler.connector._scheduler
        mover = get_kv_transfer_group()._worker.mover
        while {side._session.status()["state"], mover.status()["state"]} != {"ready"}:
            assert time.monotonic() < deadline
            select.select([], [], [], 0.01)

    def _core(self, llm: Any) -> Any:
        return llm.llm_engine.engine_core.engine_core

    def prepare(self, llm: Any, order: str) -> None:
        self.counts.reset()
        if order == "kill":
            self.server.kill()
            return
        if order == "start":
            self.server.start()
        self._wait_ready(llm)
        worker = get_kv_transfer_group()._worker
        if self._states is None:
            self._states = NotedStates(worker, lambda ranges: self._states_of(llm, ranges))
        if order == "wipe":
            self._wipe_states()
        if order in ("refuse", "spoil"):
            if order == "refuse":
                refuse_the_next_load(worker)
            else:
                spoil_the_next_load(worker, lambda ranges: self._overwrite(llm, ranges))

    def _pieces(self, llm: Any, ranges: Any, *rules: KindRule) -> Iterator[tuple[int, int]]:
        """Addresses and sizes of the pieces of these blocks; with ``rules``, of such kinds only."""
        kinds = self._core(llm).scheduler.connector._scheduler.rules._kinds
        for number, _, count, blocks in ranges:
            kind = kinds.kinds[number]
            if rules and kind.rule not in rules:
                continue
            for group, block in zip(kind.members * count, blocks, strict=True):
                for piece in self._places[group].segments:
                    yield piece.address + block * piece.stride, piece.size

    def _overwrite(self, llm: Any, ranges: Any) -> None:
        for address, size in self._pieces(llm, ranges):
            ctypes.memset(address, 0x3F, size)

    def _states_of(self, llm: Any, ranges: Any) -> list[bytes]:
        return [ctypes.string_at(*piece) for piece in self._pieces(llm, ranges, KindRule.STATE)]

    def _wipe_states(self) -> None:
        """Finds the states of the last load in the pool, and makes them zeros."""
        assert self._states is not None and self._states.loaded
        with pool_of(self.server) as pool:
            for content in self._states.loaded:
                assert any(content)
                at = pool.find(content)
                assert at >= 0, "a state that was loaded is not in the pool"
                pool[at : at + len(content)] = bytes(len(content))

    def preempted(self, llm: Any, prompt: list[int], params: Any) -> Any:
        """The answer to a request that loses all of its blocks meanwhile."""
        engine, scheduler = llm.llm_engine, self._core(llm).scheduler
        for output in steps_of(engine, "preempted", prompt, params):
            if len(output.outputs[0].token_ids) == INTERRUPTED_AT:
                assert [one.status.name for one in scheduler.running] == ["RUNNING"]
                assert scheduler.reset_prefix_cache(reset_running_requests=True)
        assert output.finished
        return output

    def abort(self, llm: Any, prompt: list[int], params: Any) -> None:
        """Asks, and leaves vLLM's own cache empty."""
        for output in steps_of(llm.llm_engine, "aborted", prompt, params):
            if len(output.outputs[0].token_ids) == INTERRUPTED_AT:
                llm.llm_engine.abort_request(["aborted"])
        assert not output.finished
        self._end_saves(llm)
        assert llm.reset_prefix_cache()

    def _end_saves(self, llm: Any) -> None:
        """Steps until the last saves of former requests are reported."""
        while self._core(llm).scheduler.has_requests():
            llm.llm_engine.step()

    def note(self, llm: Any) -> dict[str, Any]:
        core = self._core(llm)
        self._end_saves(llm)
        side = core.scheduler.connector._scheduler
        assert side.saves.pinned == 0 and not side.loads.under_way() and not side._states
        self.counts.aggregate(side.counts)
        counted = self.counts.data
        assert "internal_errors" not in counted, counted
        return {
            "added": {
                label: counted.get("saved_blocks", {}).get(label, 0) for label in side.rules.labels
            },
            "blocks_loaded": counted.get("loaded_blocks", {}),
            "failures": counted.get("load_failures", {}),
        }

    def close(self) -> None:
        wait_for_zero(self.server, "pegaflow_claims", "pegaflow_pins")
        self.server.stop()
        self._directory.cleanup()


def steps_of(engine: Any, name: str, prompt: list[int], params: Any) -> Iterator[Any]:
    """The outputs of the only request, step by step."""
    engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        yield from engine.step()


class _Around:
    """A mover with another behavior for one load."""

    def __init__(self, worker: Any) -> None:
        self._worker, self._mover = worker, worker.mover
        worker.mover = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    def _leave(self) -> None:
        self._worker.mover = self._mover


class NotedStates(_Around):
    """Keeps the states of the last load as the mover has copied them: nothing has run on them."""

    def __init__(self, worker: Any, read: Callable[[Any], list[bytes]]) -> None:
        super().__init__(worker)
        self.loaded: list[bytes] = []
        self._read = read
        self._ranges: dict[int, Any] = {}

    def load_ranges(self, load: int, token: bytes, ranges: Any, claimed: Any) -> None:
        self._ranges[load] = ranges
        self._mover.load_ranges(load, token, ranges, claimed)

    def take_finished(self) -> list[Any]:
        finished = self._mover.take_finished()
        for done in finished:
            if done.kind == "load" and done.id in self._ranges:
                self.loaded = self._read(self._ranges.pop(done.id))
        return finished


def refuse_the_next_load(worker: Any) -> None:
    class Refusing(_Around):
        def load_ranges(self, *arguments: Any) -> None:
            self._leave()
            raise _native.Gone("planted")

    Refusing(worker)


def spoil_the_next_load(worker: Any, overwrite: Callable[[Any], None]) -> None:
    """It reports an error after its copies, and the blocks have other bytes."""
    planted: dict[int, Any] = {}

    class Spoiling(_Around):
        def load_ranges(self, load: int, token: bytes, ranges: Any, claimed: Any) -> None:
            self._mover.load_ranges(load, token, ranges, claimed)
            planted[load] = ranges

        def take_finished(self) -> list[Any]:
            return [self._spoil(done) for done in self._mover.take_finished()]

        def _spoil(self, done: Any) -> Any:
            if done.kind != "load" or done.id not in planted:
                return done
            self._leave()
            ranges = planted.pop(done.id)
            overwrite(ranges)
            names = ("kind", "id", "skipped", "bytes", "direct_bytes", "took_s", "copying_s", "cut")
            more = {name: getattr(done, name) for name in (*names, "verified", "corrupt")}
            return SimpleNamespace(
                **more,
                blocks=0,
                failed_blocks=ranges[0][3][:1],
                error="planted",
                error_code="planted",
            )

    Spoiling(worker)


def save_windows_a_block_too_late() -> None:
    def ids(self: Any, kind: BlockKind, tables: Any, number: int) -> tuple[int, ...]:
        number += kind.rule == KindRule.TRAILING
        found = tuple(tables[group][min(number, len(tables[group]) - 1)] for group in kind.members)
        return () if 0 in found else found

    SavePlan._ids = ids


def run(model: Path, dtype: str, mode: str, requests: Sequence[str]) -> list[dict[str, Any]]:
    """The results of all requests to a new engine in a process of its own."""
    pipe, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, str(model), dtype, mode, requests))
    process.start()
    theirs.close()
    results: list[dict[str, Any]] = []
    try:
        with contextlib.suppress(EOFError):
            while True:
                assert pipe.poll(STUCK_S), f"{model.name}: no answer in {STUCK_S:.0f} s"
                results.append(pipe.recv())
        process.join(STUCK_S)
        assert process.exitcode == 0, f"{model.name}: the engine ended, see its output"
    finally:
        process.kill()
        process.join()
        pipe.close()
    return results


def _run(pipe: Any, *arguments: Any) -> None:
    for result in answers(*arguments):
        pipe.send(result)


def answers(model: str, dtype: str, mode: str, requests: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The result of each request to a new engine in this process, which must have no other."""
    granite_on_cpu.patch()
    more: dict[str, Any] = {}
    if dtype == "float32" and "granite" not in model:
        more["block_size"] = BLOCK
    if mode == "shifted":
        save_windows_a_block_too_late()
    pega = Pega(more) if mode in ("pega", "shifted") else None
    if mode == "memory":
        more["kv_transfer_config"] = KVTransferConfig(
            kv_connector="MemoryConnector",
            kv_connector_module_path="tests.python.kinds_vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"interval": INTERVAL, "room": 10_000},
        )
    llm = LLM(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=4096,
        kv_cache_memory_bytes=96 << 20,
        max_num_batched_tokens=1024,
        enable_prefix_caching=True,
        distributed_executor_backend="uni",
        disable_log_stats=True,
        # vLLM's choice of this type, and of the size of a block with it, depends on the machine.
        mamba_ssm_cache_dtype="float32",
        **more,
    )
    draw = random.Random(5)
    texts: list[list[int]] = []
    for line in requests:
        order, _, line = line.rpartition(":")
        if pega is not None:
            pega.prepare(llm, order)
        if line.startswith("of,"):
            _, index, head, tail = line.split(",")
            prompt = texts[int(index)][: int(head) or None]
            prompt = prompt + [draw.randrange(3, 2048) for _ in range(int(tail))]
        else:
            prompt = [draw.randrange(3, 2048) for _ in range(int(line))]
        params = SamplingParams(
            temperature=0, max_tokens=20, ignore_eos=True, logprobs=ALTERNATIVES
        )
        if pega is not None and order == "abort":
            pega.abort(llm, prompt, params)
        if pega is not None and order == "preempt":
            output = pega.preempted(llm, prompt, params)
        else:
            (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        answer = list(output.outputs[0].token_ids)
        texts.append(prompt + answer)
        told = {"prompt": prompt, "answer": answer, "cached": output.num_cached_tokens}
        first = output.outputs[0].logprobs[0]
        told["first"] = {token: one.logprob for token, one in first.items()}
        if mode == "memory":
            side = MemoryConnector.scheduler
            # An engine without requests makes no more steps; these blocks are pinned.
            MemoryConnector.worker.wait_for_save()
            side.update_connector_output(None)
            (told["loaded"],) = [loaded for _, loaded in side.hits.values()]
            told["local"] = [local for local, _ in side.hits.values()][0]
            side.hits.clear()
            told["stored"] = {
                kind.rule.label: count
                for kind, count in zip(side.kinds.kinds, side.store.counts(), strict=True)
            }
        if pega is not None:
            told |= pega.note(llm)
        yield told
        assert llm.reset_prefix_cache()
    if pega is not None:
        pega.close()
