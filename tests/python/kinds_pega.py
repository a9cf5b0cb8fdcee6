"""vLLM's real scheduler over several kinds of blocks, with the whole connector and real memory.

The groups' blocks lie in one memory, at the same place for the same id, as vLLM lays them out. The
model writes bytes that depend on all tokens so far, the group and the slot, and checks all bytes
that its layers would read. So any byte that a load puts into a wrong block, or that a save takes
from one, is found by the step that uses it.
"""

import pickle
import select
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from pegaflow import _native
from pegaflow.engine.kinds import KindRule
from pegaflow.vllm.events import READ_INTERVAL_S
from tests.python.fake_model import answer
from tests.python.harness import ALWAYS, BY_KIND, PATIENT
from tests.python.kinds_engine import KindsEngine, WrongBlock
from tests.python.kinds_inputs import PLAIN, Inputs

_MASK = (1 << 64) - 1


class PegaKindsEngine(KindsEngine):
    """One engine core and its workers. ``extra``: options of the connector."""

    def __init__(
        self,
        groups: Sequence[Any],
        address: str,
        *,
        extra: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self._address = address
        self._extra = ALWAYS | PATIENT | (extra or {})
        self.stats: dict[str, float] = {}
        self.hits: dict[str, tuple[int, int]] = {}  # local and loaded tokens at admission
        self.reasons: dict[str, str] = {}
        self.params: dict[str, Any] = {}  # kv_transfer_params of the responses
        super().__init__(groups, **more)

    def choose_connector(self, transfer: Any, interval: int, room: int) -> None:
        transfer.kv_connector_extra_config = {
            "pegaflow.host": self._address,
            "pegaflow.weights_id": "fake-model",
            "pegaflow.untested": True,
            "pegaflow.window_interval": interval,
            "pegaflow.max_pinned_percent": room,
        } | self._extra

    def connect(self, store: Any) -> None:
        specs = [group.kv_cache_spec for group in self.kv_config.kv_cache_groups]
        self._stride = max(spec.page_size_bytes for spec in specs)
        self._slot_bytes = [
            spec.page_size_bytes // (1 if rule.rule == KindRule.STATE else rule.block_tokens)
            for spec, rule in ((spec, self.rules_of(i)) for i, spec in enumerate(specs))
        ]
        self.memories: list[memoryview] = []  # of each rank
        self.workers: list[Any] = []
        ranks = self.config.parallel_config.world_size
        for rank in range(ranks):
            self._add_worker(rank, specs)
        self._aggregator = KVOutputAggregator.from_connector(self.connector, ranks)

    def _add_worker(self, rank: int, specs: list[Any]) -> None:
        raw = torch.zeros(self.kv_config.num_blocks * self._stride, dtype=torch.uint8)
        tensors = {}
        for number, spec in enumerate(specs):
            dtype = getattr(spec, "dtype", torch.float32)
            view = raw.view(dtype)
            item = view.element_size()
            tensors[f"layer.{number}"] = torch.as_strided(
                view,
                (self.kv_config.num_blocks, spec.page_size_bytes // item),
                (self._stride // item, 1),
            )
        self.memories.append(memoryview(raw.numpy()))
        config = pickle.loads(pickle.dumps(self.config))
        config.parallel_config.rank = rank
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self.kv_config)
        worker.register_kv_caches(tensors)
        self.workers.append(worker)

    @property
    def worker(self) -> Any:
        """The connector of the first rank."""
        return self.workers[0]

    def rules_of(self, group: int) -> Any:
        (kind,) = [kind for kind in self.kinds.kinds if group in kind.members]
        return kind

    @property
    def side(self) -> Any:
        return self.connector._scheduler

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            states = {self.side._session.status()["state"]}
            states.update(one._worker.mover.status()["state"] for one in self.workers)
            if states == {"ready"}:
                return
            assert time.monotonic() < deadline, states
            select.select([], [], [], 0.005)

    # ---- memory

    def _place(self, group: int, block: int, slot: int) -> slice:
        size = self._slot_bytes[group]
        start = block * self._stride + slot * size
        return slice(start, start + size)

    def _slot(self, rank: int, group: int, value: int) -> bytes:
        return bytes(self._slots(rank, group, [value]).tobytes())

    def _slots(self, rank: int, group: int, values: Sequence[int]) -> Any:
        """The words of the slots of several tokens, a row for each."""
        salt = (16 * rank + group + 1) * 0x9E3779B97F4A7C15 & _MASK
        words = np.arange(self._slot_bytes[group] // 8, dtype=np.uint64)
        return (np.array(values, dtype=np.uint64) ^ np.uint64(salt))[:, None] + words

    def _put(self, group: int, block: int, slot: int, value: int) -> None:
        assert block != 0
        if slot == 0:
            self.poison(block, 0xDD)
        for rank, memory in enumerate(self.memories):
            memory[self._place(group, block, slot)] = self._slot(rank, group, value)

    def poison(self, block: int, byte: int) -> None:
        start = block * self._stride
        for memory in self.memories:
            memory[start : start + self._stride] = bytes((byte,)) * self._stride

    def _expect(self, request_id: str, group: int, block: int, slot: int, value: int) -> None:
        for rank, memory in enumerate(self.memories):
            found = memory[self._place(group, block, slot)]
            if block == 0 or found != self._slot(rank, group, value):
                raise WrongBlock(
                    f"{request_id}: rank {rank}, group {group} reads slot {slot} of block {block}"
                )

    def _expect_tokens(
        self, request_id: str, group: int, table: list[int], tokens: range, values: list[int]
    ) -> None:
        """Compares all slots at once; the first wrong one is then found one by one."""
        if not tokens:
            return
        size = self._slot_bytes[group]
        numbers, slots = np.divmod(np.array(tokens), self.rules[group].block_tokens)
        blocks = np.array(table)[numbers]
        wanted = values[tokens.start : tokens.stop]
        right = bool(blocks.all())
        for rank, memory in enumerate(self.memories):
            # The slots of all blocks, [block, slot, word].
            held = np.ndarray(
                (self.kv_config.num_blocks, self.rules[group].block_tokens, size // 8),
                dtype=np.uint64,
                buffer=memory,
                strides=(self._stride, size, 8),
            )
            right = right and np.array_equal(held[blocks, slots], self._slots(rank, group, wanted))
        if not right:
            for block, slot, value in zip(blocks.tolist(), slots.tolist(), wanted, strict=True):
                self._expect(request_id, group, block, slot, value)
            raise AssertionError("the two comparisons of the same slots differ")

    def _copy_block(self, source: int, target: int) -> None:
        size = self._stride
        for memory in self.memories:
            content = bytes(memory[source * size : (source + 1) * size])
            memory[target * size : (target + 1) * size] = content

    def _has_computed(self) -> None:
        return None  # the worker's side saves after the step

    # ---- steps

    def run(self) -> None:
        for _ in range(20_000):
            if not self.scheduler.has_requests() and not self._queue:
                return
            self.step()
        raise AssertionError(f"not idle: {self.scheduler.requests}")

    def step(self) -> None:
        executed = False
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._queue.append((output, self._execute(output)))
            executed = output.total_num_scheduled_tokens > 0
            if len(self._queue) < self.depth and executed:
                return
        if self._queue:
            self._update(*self._queue.popleft())
        if not executed:
            movers = [getattr(one._worker, "mover", None) for one in self.workers]
            waits = [fd for one in movers if one and (fd := one.finished_fd()) is not None]
            select.select(waits, [], [], 0.001)

    def _execute(self, output: Any) -> ModelRunnerOutput:
        for worker in self.workers:
            # A worker gets a copy of the plan, and returns a copy of the output.
            meta = pickle.loads(pickle.dumps(output.kv_connector_metadata))
            worker.handle_preemptions(meta)
            worker.bind_connector_metadata(meta)
            worker.start_load_kv(None)
        sampled = self._forward(output)
        results = [self._end(worker, output, sampled) for worker in self.workers]
        made: ModelRunnerOutput = self._aggregator.aggregate(results, 0)
        return made

    def _end(self, worker: Any, output: Any, sampled: dict[str, list[int]]) -> ModelRunnerOutput:
        """The output of one rank's step."""
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        transfer = KVConnectorOutput(
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        assert not transfer.invalid_block_ids, "blocks of several groups would end the engine"
        ids = list(sampled)
        made = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[sampled[request_id] for request_id in ids],
            kv_connector_output=transfer,
        )
        if not sampled:
            made = ModelRunnerOutput.with_kv_conn_output_only(transfer)
        copied: ModelRunnerOutput = pickle.loads(pickle.dumps(made))
        return copied

    def _update(self, output: Any, result: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(output, result).values():
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                self._note(outputs.scheduler_stats.kv_connector_stats)
            for one in outputs.outputs:
                self.answers[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.reasons[one.request_id] = str(one.finish_reason)
                    self.params[one.request_id] = one.kv_transfer_params
                if stats := one.prefill_stats:
                    self.hits[one.request_id] = (
                        stats.num_local_cached_tokens,
                        stats.num_external_cached_tokens,
                    )

    def _note(self, stats: dict[str, Any]) -> None:
        for name, row in stats.items():
            for labels, value in row.items():
                key = f"{name}{{{labels}}}" if labels else name
                amount = len(value) if isinstance(value, list) else value
                if name in ("pinned_blocks", "serving", "link_state"):
                    self.stats[key] = amount
                    continue
                for one in {key, name} if name in BY_KIND else {key}:
                    self.stats[one] = self.stats.get(one, 0) + amount

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        tokens: int = 4,
        params: Any = None,
        inputs: Inputs = PLAIN,
    ) -> None:
        if inputs.lora is not None:
            self.side._adapters.wait(inputs.lora, 30)
        super().add(request_id, prompt, tokens, params, inputs)

    def ask(
        self, request_id: str, prompt: Sequence[int], tokens: int = 4, inputs: Inputs = PLAIN
    ) -> tuple[int, int]:
        self.add(request_id, prompt, tokens, inputs=inputs)
        self.run()
        return self.hits[request_id]

    def check_answer(self, request_id: str, prompt: Sequence[int]) -> None:
        """Compares a finished request's answer with that of an engine without a cache."""
        inputs, given = self.inputs[request_id], self.answers[request_id][len(prompt) :]
        assert given == answer(inputs.seen(prompt), len(given), inputs.seed), request_id

    def poke(self) -> None:
        """A step for the connector's own work, at least one reading of the journal later."""
        select.select([], [], [], 2 * READ_INTERVAL_S)
        self.ask(f"poke-{len(self.hits)}", [10, 11, 12], 2)

    def saved(self) -> dict[str, int]:
        """The blocks that saves have added so far, by the label of the kind."""
        return {
            label: int(self.stats.get(f"saved_blocks{{{label}}}", 0))
            for label in self.side.rules.labels
        }

    def check_at_rest(self, planted_errors: bool = False) -> None:
        assert not self.scheduler.requests
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are leaked"
        if hasattr(self.side, "_states"):
            assert not self.side._states and not self.side.loads.under_way()
            assert self.side.saves.pinned == 0
        for worker in (one._worker for one in self.workers):
            assert not getattr(worker, "loads", ()) and not getattr(worker, "saves", ())
        errors = any(name.startswith("internal_errors") for name in self.stats)
        assert errors == planted_errors, self.stats

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        super().close()


def plant_failures(engine: PegaKindsEngine, at_once: float, after_copies: float) -> SimpleNamespace:
    """Some loads of the first rank's mover fail from now on: at once, or after their copies, whose
    bytes are then wrong. Both are probabilities.
    """
    mover = engine.worker._worker.mover
    counted = SimpleNamespace(refused=0, failed=0)
    blocks: dict[int, list[int]] = {}

    class Flaky:
        def __getattr__(self, name: str) -> Any:
            return getattr(mover, name)

        def load_ranges(self, load: int, token: bytes, ranges: Any, claimed: Any) -> None:
            if engine.draw.random() < at_once:
                counted.refused += 1
                raise _native.Gone("planted")
            mover.load_ranges(load, token, ranges, claimed)
            blocks[load] = [block for one in ranges for block in one[3]]

        def take_finished(self) -> list[Any]:
            return [self._spoil(done) for done in mover.take_finished()]

        def _spoil(self, done: Any) -> Any:
            ids = blocks.pop(done.id, []) if done.kind == "load" else []
            if not ids or engine.draw.random() >= after_copies:
                return done
            counted.failed += 1
            for block in ids:
                engine.poison(block, 0xEE)
            names = ("kind", "id", "skipped", "bytes", "direct_bytes", "took_s", "copying_s", "cut")
            more = {name: getattr(done, name) for name in (*names, "verified", "corrupt")}
            return SimpleNamespace(
                **more, blocks=0, failed_blocks=ids[-1:], error="planted", error_code="planted"
            )

    engine.worker._worker.mover = Flaky()
    return counted
