"""vLLM's real scheduler over several kinds of blocks, with the connector's plans and no server.

The memory is a dictionary by block id, which shows what was written last: vLLM's groups share their
blocks. Before each forward pass the engine checks all that its layers would read, and before each
save what the copy would read. So a wrong block is detected where it is used, whatever the plans
have said.
"""

import collections
import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from pegaflow.engine.kinds import BlockKinds, KindRule
from pegaflow.vllm.keys import KeyChain, KindKeys
from pegaflow.vllm.kinds import read_kinds
from pegaflow.vllm.plans.load_plan import (
    ClaimedRange,
    LoadRange,
    LoadRefused,
    offered_tokens,
    pair,
    units_to_ask,
)
from pegaflow.vllm.plans.save_plan import SavePlan, SaveRules, Storable
from tests.python.fake_model import chain, next_token
from tests.python.harness import vllm_config
from tests.python.kinds_inputs import PLAIN, Inputs

HEADS = {"num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}


def full(block: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, **HEADS)


def window(block: int, tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block, sliding_window=tokens, **HEADS)


def chunked(block: int, tokens: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=tokens, **HEADS)


def state(block: int, **more: Any) -> MambaSpec:
    return MambaSpec(
        block_size=block,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        **more,
    )


#: The kernel writes the state inside of a step, as those of Mamba 2 on a GPU do.
CHECKPOINTS = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}


#: The groups of small models of these families.
SHAPES: dict[str, list[Any]] = {
    "gemma3": [window(16, 64), window(16, 64), full(16)],
    "gpt-oss": [window(16, 33), full(16)],
    "mistral-window": [window(16, 64)],
    "two windows": [full(16), window(32, 50), window(16, 20)],
    "llama4": [chunked(16, 64), chunked(16, 64), full(16)],
    "qwen3-next": [state(64), state(64), state(64), full(64)],
    "states with checkpoints": [state(64, **CHECKPOINTS), state(64, **CHECKPOINTS), full(64)],
    "states and windows": [state(64), window(32, 40), full(64)],
    "retained tokens": [
        full(16),
        SlidingWindowSpec(block_size=16, sliding_window=33, extra_retained_tokens=3, **HEADS),
    ],
    # Heads of other sizes: pages are as large with another number of tokens.
    "gemma4": [
        window(16, 64),
        window(16, 64),
        FullAttentionSpec(32, num_kv_heads=1, head_size=16, dtype=torch.float32),
    ],
    "kimi-k3": [
        state(64),
        state(64),
        MLAAttentionSpec(64, num_kv_heads=1, head_size=16, dtype=torch.float32),
    ],
    "two of full": [
        full(16),
        FullAttentionSpec(16, num_kv_heads=1, head_size=16, dtype=torch.half),
    ],
}


def cache_config(groups: Sequence[Any], blocks: int) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(groups)],
        prefix_cache_retention_interval=0,
    )


class Store:
    """The server: blocks of each kind by key, with what was saved under it."""

    def __init__(self, kinds: BlockKinds) -> None:
        self.kinds = kinds
        self.blocks: list[dict[bytes, Any]] = [{} for _ in kinds.kinds]

    def counts(self) -> list[int]:
        return [len(blocks) for blocks in self.blocks]

    def claim(self, units: Sequence[bytes], local: int) -> tuple[int, list[ClaimedRange]]:
        """The longest restorable prefix beyond ``local`` units, in units, and its blocks."""
        kinds = self.kinds
        for end in range(len(units), local, -1):
            tokens = end * kinds.unit_tokens
            if tokens % kinds.alignment_tokens != 0:
                continue
            wanted = [kind.wanted(tokens, local * kinds.unit_tokens) for kind in kinds.kinds]
            if all(
                units[kinds.unit_of(kinds.kinds[index], number)] in self.blocks[index]
                for index, blocks in enumerate(wanted)
                for number in blocks.numbers()
            ):
                return end, [
                    ClaimedRange(i, blocks.first, blocks.count)
                    for i, blocks in enumerate(wanted)
                    if blocks.count
                ]
        return 0, []


@dataclasses.dataclass
class Save:
    """One pinned block of a kind, until a copy has read it."""

    what: Storable
    key: bytes
    tokens: list[int]  #: The prompt up to the block's end.
    pinned: list[Any]
    ready: bool = False  #: The forward pass of its step has ended.


@dataclasses.dataclass
class Load:
    request: Request
    ranges: list[LoadRange]
    #: The contents of the claimed blocks, in the ranges' order.
    contents: list[Any]
    tokens: int
    local: int


class Plan(KVConnectorMetadata):
    pass


class KindsConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side: the real plans, and the store instead of a server."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.kinds = read_kinds(kv_cache_config, vllm_config.cache_config)
        self.rules = SaveRules.of(self.kinds, kv_cache_config, extra["interval"])
        self.room = extra["room"]
        self.store: Store = None  # type: ignore[assignment]
        self.pool: Any = None
        self.saves: list[Save] = []
        self.loads: list[Load] = []
        self.refused: list[tuple[Request, str]] = []
        self.requests: dict[str, tuple[Request, KindKeys, SavePlan]] = {}
        self.local: dict[str, int] = {}
        self.offered: dict[str, tuple[int, list[ClaimedRange], list[list[Any]]]] = {}
        self.failed: set[str] = set()
        self.hits: dict[str, tuple[int, int]] = {}  # local and loaded tokens at admission
        self.dropped = 0

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool

    def on_new_request(self, request: Request) -> None:
        unit = self.kinds.unit_tokens
        keys = KindKeys(KeyChain(request, unit, unit), self.kinds)
        plan = SavePlan(self.rules, request.num_prompt_tokens)
        self.requests[request.request_id] = (request, keys, plan)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Any:
        local = num_computed_tokens
        _, keys, plan = self.requests[request.request_id]
        self.local[request.request_id] = local
        self.offered.pop(request.request_id, None)
        count = units_to_ask(self.kinds, request.num_tokens, keys.usable_units())
        units = keys.units(count)
        known, _ = self.store.claim(units, 0)
        plan.admit(local, known * self.kinds.unit_tokens, request.shared_prefix_boundary)
        if request.request_id in self.failed:
            return 0, False
        found, ranges = self.store.claim(units, local // self.kinds.unit_tokens)
        tokens = offered_tokens(self.kinds, found, ranges, local, request.num_tokens)
        if tokens == 0:
            return 0, False
        held = [
            [
                self.store.blocks[one.kind][keys.key(one.kind, number)]
                for number in range(one.first, one.first + one.count)
            ]
            for one in ranges
        ]
        self.offered[request.request_id] = (found, ranges, held)
        return tokens, True

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external: int) -> None:
        local = self.local[request.request_id]
        if num_external == 0:
            self.hits.setdefault(request.request_id, (local, 0))
            return
        _, ranges, held = self.offered.pop(request.request_id)
        try:
            loads = pair(self.kinds, ranges, blocks.get_block_ids(), local, num_external)
        except LoadRefused as error:
            self.refused.append((request, str(error)))
            return
        claimed = {
            one.kind: (one.first, content) for one, content in zip(ranges, held, strict=True)
        }
        contents = []
        for one in loads:
            first, content = claimed[one.kind]
            contents.append(content[one.first - first : one.first - first + one.count])
        self.loads.append(Load(request, loads, contents, local + num_external, local))

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        block_state = scheduler_output.kv_connector_block_state
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            request, keys, plan = self.requests[request_id]
            tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
            offers = block_state.boundary_state_offloads.get(request_id, ())
            if not plan.has_work(tokens) and not offers:
                continue
            tables = block_state.get_block_ids(request_id)
            self._pin(
                request, keys, plan.step(tables, tokens, keys.usable_units(), self._room(), offers)
            )
        return Plan()

    def _room(self) -> int:
        return self.room - sum(len(save.pinned) for save in self.saves)

    def _pin(self, request: Request, keys: KindKeys, storables: list[Storable]) -> None:
        for one in storables:
            kind = self.kinds.kinds[one.kind]
            assert 0 not in one.ids
            pinned = [self.pool.blocks[block] for block in one.ids]
            assert all(block.ref_cnt > 0 for block in pinned), "a freed block is saved"
            self.pool.touch(pinned)
            tokens = list(request.all_token_ids[: (one.block + 1) * kind.block_tokens])
            assert len(tokens) == (one.block + 1) * kind.block_tokens
            self.saves.append(Save(one, keys.key(one.kind, one.block), tokens, pinned))
        assert self._room() >= 0

    def request_finished(self, request: Request, block_ids: Any) -> Any:
        raise AssertionError("not with several groups")

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> Any:
        _, keys, plan = self.requests.pop(request.request_id)
        self.failed.discard(request.request_id)
        if any(load.request is request for load in self.loads):
            return False, None
        written = min(
            request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens
        )
        found, late = plan.finish(block_ids, written, keys.usable_units(), self._room())
        self._pin(request, keys, found)
        for save in self.saves[len(self.saves) - len(found) :]:
            save.ready = True  # no forward pass follows
        self.dropped += len(late) + plan.dropped()
        return False, None

    def start_load_kv(self, *arguments: Any, **more: Any) -> None:
        raise AssertionError("there is no worker")

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


class WrongBlock(AssertionError):
    """A block does not hold what its reader expects."""


class KindsEngine:
    """One engine core and its memory.

    ``retention`` is vLLM's option for the boundaries that its own cache keeps; it offers the states
    at those.
    """

    def __init__(
        self,
        groups: Sequence[Any],
        *,
        blocks: int = 400,
        interval: int = 128,
        room: int = 100,
        draw: random.Random | None = None,
        asynchronous: bool = False,
        store: Store | None = None,
        retention: int | None = 0,
        **changes: Any,
    ) -> None:
        config = vllm_config(
            "unix:/nowhere.sock",
            **{"max_model_len": 4096, "max_num_batched_tokens": 256} | changes,
        )
        self.choose_connector(config.kv_transfer_config, interval, room)
        kv_config = cache_config(groups, blocks)
        kv_config.prefix_cache_retention_interval = retention
        config.cache_config.block_size = groups[0].block_size
        if kv_config.has_mamba_layers:
            config.cache_config.mamba_cache_mode = "align"
        if asynchronous:
            config.scheduler_config.async_scheduling = True
        block_size, unit = resolve_kv_cache_block_sizes(kv_config, config)
        config.cache_config.block_size = block_size
        config.cache_config.num_gpu_blocks = blocks
        kv_config.hash_block_size = unit
        kv_config.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            kv_config, config, block_size, unit
        )
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(unit, hash_fn)
        self.config, self.kv_config = config, kv_config
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=unit,
            log_stats=True,
        )
        self.kinds = read_kinds(kv_config, config.cache_config)
        self.draw = draw or random.Random(0)
        self.rules = {group: kind for kind in self.kinds.kinds for group in kind.members}
        #: By block id: the group that wrote it last, and the values of its slots (or its state).
        self.memory: dict[int, tuple[int, dict[int, int]]] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.answers: dict[str, list[int]] = {}
        self.inputs: dict[str, Inputs] = {}
        self.depth = 2 if asynchronous else 1
        self._queue: collections.deque[Any] = collections.deque()
        self.fail_loads = 0.0
        self.copy_chance = 1.0
        self.connector = self.scheduler.connector
        self.connect(store)

    # ---- the connector

    def choose_connector(self, transfer: Any, interval: int, room: int) -> None:
        transfer.kv_connector = "KindsConnector"
        transfer.kv_connector_module_path = "tests.python.kinds_engine"
        transfer.kv_connector_extra_config = {"interval": interval, "room": room}
        transfer.kv_load_failure_policy = "recompute"

    def connect(self, store: Store | None) -> None:
        self.store = store or Store(self.kinds)
        self.connector.store = self.store

    # ---- requests

    def request(
        self,
        request_id: str,
        prompt: Sequence[int],
        tokens: int,
        params: Any = None,
        inputs: Inputs = PLAIN,
    ) -> Request:
        extra = {"kv_transfer_params": params} if params is not None else None
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=extra)
        return Request(
            request_id,
            list(prompt),
            sampling,
            None,
            block_hasher=self.hasher,
            **inputs.of_request(),
        )

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        tokens: int = 4,
        params: Any = None,
        inputs: Inputs = PLAIN,
    ) -> None:
        """``params``: the request's kv_transfer_params."""
        request = self.request(request_id, prompt, tokens, params, inputs)
        self.answers[request_id] = list(prompt)
        self.inputs[request_id] = inputs
        self.scheduler.add_request(request)

    def ask(self, request_id: str, prompt: Sequence[int], tokens: int = 4) -> tuple[int, int]:
        """One request to its end; the tokens of vLLM's own hit, and those that were loaded."""
        self.add(request_id, prompt, tokens)
        self.run()
        return self.connector.hits[request_id]

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def restart_server(self) -> None:
        """The store is empty, and the connector knows it."""
        for blocks in self.store.blocks:
            blocks.clear()
        for _, _, plan in self.connector.requests.values():
            plan.forget()

    def reset_local(self) -> None:
        self.run()
        assert self.scheduler.reset_prefix_cache()

    def preempt_all(self) -> None:
        """Takes the blocks of all running requests, as vLLM's reset_running_requests does."""
        self.counts["preemptions"] += len(self.scheduler.running)
        while self.scheduler.running:
            request = self.scheduler.running.pop()
            self.scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        self.scheduler.prev_step_scheduled_req_ids.clear()

    # ---- steps

    def run(self) -> None:
        for _ in range(20_000):
            if not self.scheduler.has_requests() and not self._queue and not self.connector.saves:
                return
            self.step()
        raise AssertionError("not idle")

    def step(self) -> None:
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._queue.append((output, self._forward(output)))
            if len(self._queue) < self.depth and output.total_num_scheduled_tokens > 0:
                return
        if self._queue:
            output, sampled = self._queue.popleft()
            self._update(output, sampled)
        self.copy()

    def _update(self, output: Any, sampled: dict[str, list[int]]) -> None:
        received, failed = self._finish_loads()
        ids = list(sampled)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[sampled[request_id] for request_id in ids],
            kv_connector_output=KVConnectorOutput(
                finished_recving=received or None, failed_recving=failed
            ),
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                self.answers[one.request_id] += one.new_token_ids

    def copy(self) -> None:
        """Some of the pinned blocks are copied and released."""
        kept = []
        for save in self.connector.saves:
            if not save.ready or self.draw.random() > self.copy_chance:
                kept.append(save)
                continue
            contents = [
                self._content(save, group, block)
                for group, block in zip(
                    self.kinds.kinds[save.what.kind].members, save.what.ids, strict=True
                )
            ]
            self._check_key(save)
            self.store.blocks[save.what.kind].setdefault(save.key, contents)
            self.counts[f"saved {self.kinds.kinds[save.what.kind].rule.label}"] += 1
            self.connector.pool.free_blocks(save.pinned)
        self.connector.saves = kept

    def _check_key(self, save: Save) -> None:
        """vLLM's hash of exactly the block's tokens, computed anew."""
        made = self.request("check", save.tokens, 1)
        assert made.block_hashes[len(save.tokens) // self.kinds.unit_tokens - 1] == save.key

    def _content(self, save: Save, group: int, block: int) -> dict[int, int]:
        kind = self.rules[group]
        values = chain(0, save.tokens)
        owner, content = self.memory.get(block, (-1, {}))
        if kind.rule == KindRule.STATE:
            expected = {0: values[-1]}
        else:
            expected = dict(enumerate(values[-kind.block_tokens :]))
        if owner != group or content != expected:
            raise WrongBlock(f"save of {save.what} reads block {block} of group {owner}")
        return dict(content)

    def _finish_loads(self) -> tuple[set[str], set[str]]:
        received: set[str] = set()
        failed: set[str] = set()
        for request, reason in self.connector.refused:
            self.counts[f"refused {reason}"] += 1
            self._failed(request, failed, received)
        self.connector.refused = []
        kept = []
        for load in self.connector.loads:
            if self.draw.random() > self.copy_chance:
                kept.append(load)
                continue
            fails = self.draw.random() < self.fail_loads
            self._write(load, garbage=fails)
            if fails:
                self._failed(load.request, failed, received)
                continue
            self.counts["loads"] += 1
            self.counts["loaded tokens"] += load.tokens - load.local
            received.add(load.request.request_id)
            if one := self.connector.requests.get(load.request.request_id):
                one[2].loaded(load.tokens)
            self.connector.hits[load.request.request_id] = (load.local, load.tokens - load.local)
        self.connector.loads = kept
        return received, failed

    def _failed(self, request: Request, failed: set[str], received: set[str]) -> None:
        self.counts["failed loads"] += 1
        failed.add(request.request_id)
        received.add(request.request_id)
        if one := self.connector.requests.get(request.request_id):
            self.connector.failed.add(request.request_id)
            one[2].load_failed(self.connector.local[request.request_id])

    def _write(self, load: Load, garbage: bool) -> None:
        for one, contents in zip(load.ranges, load.contents, strict=True):
            members = self.kinds.kinds[one.kind].members
            ids = iter(one.blocks)
            for content in contents:
                for member, group in enumerate(members):
                    block = next(ids)
                    held = self.connector.pool.blocks[block]
                    assert block != 0 and held.ref_cnt == 1, "a load writes to a shared block"
                    self.memory[block] = (group, {0: -1} if garbage else dict(content[member]))

    # ---- the model

    def _forward(self, output: Any) -> dict[str, list[int]]:
        for copy in output.kv_cache_block_copies or ():
            self._copy_block(copy.src_block_id, copy.dst_block_id)
        sampled = {}
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            # The scheduler has counted them already; the model is deterministic, so the tokens of a
            # step in flight are known.
            end = request.num_computed_tokens
            start = end - scheduled
            inputs = self.inputs[request_id]
            seed, tokens = inputs.seed, inputs.seen(request.all_token_ids)
            values = chain(seed, tokens)
            while len(tokens) < end:
                tokens.append(next_token(values[-1]))
                values += chain(seed, tokens, len(tokens) - 1, values[-1])
            for group, table in enumerate(tables):
                self._read(request_id, group, table, start, values)
                self._compute(group, table, start, end, values)
            sampled[request_id] = [next_token(values[end - 1])] if end >= len(tokens) else []
        self._has_computed()
        return sampled

    def _has_computed(self) -> None:
        """The step has written its blocks."""
        for save in self.connector.saves:
            save.ready = True

    def _read(
        self, request_id: str, group: int, table: list[int], start: int, values: list[int]
    ) -> None:
        """Checks all that the layers of a group read for the token at ``start``."""
        kind = self.rules[group]
        if kind.rule == KindRule.STATE:
            if start:
                block = table[(start - 1) // kind.block_tokens]
                self._expect(request_id, group, block, 0, values[start - 1])
            return
        spec = self.kv_config.kv_cache_groups[group].kv_cache_spec
        first = {
            KindRule.PREFIX: 0,
            # Without the tokens that are retained for drafts.
            KindRule.TRAILING: max(0, start + 1 - (getattr(spec, "sliding_window", None) or 0)),
            KindRule.CHUNK: start // kind.tokens * kind.tokens if kind.tokens else 0,
        }[kind.rule]
        self._expect_tokens(request_id, group, table, range(first, start), values)
        self.counts["read tokens"] += start - first

    def _expect_tokens(
        self, request_id: str, group: int, table: list[int], tokens: range, values: list[int]
    ) -> None:
        size = self.rules[group].block_tokens
        for first in range(tokens.start // size * size, tokens.stop, size):
            block = table[first // size]
            owner, content = self.memory.get(block, (-1, {}))
            for token in range(max(first, tokens.start), min(first + size, tokens.stop)):
                if owner != group or content.get(token - first) != values[token]:
                    self._expect(request_id, group, block, token - first, values[token])

    def _expect(self, request_id: str, group: int, block: int, slot: int, value: int) -> None:
        owner, content = self.memory.get(block, (-1, {}))
        if owner != group or content.get(slot) != value:
            raise WrongBlock(f"{request_id}: group {group} reads slot {slot} of block {block}")

    def _compute(
        self, group: int, table: list[int], start: int, end: int, values: list[int]
    ) -> None:
        kind = self.rules[group]
        if kind.rule == KindRule.STATE:
            self._checkpoint(group, table, start, end, values)
            block = table[(end - 1) // kind.block_tokens]
            assert block != 0
            self._put(group, block, 0, values[end - 1])
            return
        for token in range(start, end):
            number, slot = divmod(token, kind.block_tokens)
            self._put(group, table[number], slot, values[token])

    def _put(self, group: int, block: int, slot: int, value: int) -> None:
        """Writes a slot of a block, or its state. The first slot is written first."""
        owner, content = self.memory.get(block, (-1, {}))
        if owner != group or slot == 0:
            content = {}
            self.memory[block] = (group, content)
        content[slot] = value

    def _copy_block(self, source: int, target: int) -> None:
        owner, content = self.memory[source]
        self.memory[target] = (owner, dict(content))

    def _checkpoint(
        self, group: int, table: list[int], start: int, end: int, values: list[int]
    ) -> None:
        """The state that a kernel writes inside of a step, where vLLM's workers have it written."""
        spec = self.kv_config.kv_cache_groups[group].kv_cache_spec
        if not spec.num_prefill_checkpoint_blocks:
            return
        (offset,), (column,) = compute_mamba_prefill_checkpoints(
            [end],
            [end - start],
            hash_block_size=self.kv_config.hash_block_size,
            mamba_block_size=spec.block_size,
            checkpoint_alignment=spec.prefill_checkpoint_alignment,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=self.kv_config.cache_hit_alignment_tokens,
        )
        if column >= 0 and table[column] != 0:
            self._put(group, table[column], 0, values[start + offset - 1])
            self.counts["checkpoints"] += 1

    def check_at_rest(self) -> None:
        assert not self.connector.saves and not self.connector.loads
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are leaked"

    def close(self) -> None:
        self.scheduler.shutdown()
