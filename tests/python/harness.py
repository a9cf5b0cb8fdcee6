"""vLLM's real scheduler and KV-cache classes drive the real connector, without a model.

An ``Engine`` is one engine core: vLLM's Scheduler (or AsyncScheduler) with a PegaKVConnector of its
own, and its workers, each with another PegaKVConnector and a FakeModel in place of vLLM's model:
one in this process, or each in its own process, see rank.py. Plans and outputs are pickled in
between, as between vLLM's processes.
"""

import collections
import copy
import dataclasses
import functools
import json
import select
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.utils import get_pp_indices
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    get_kv_quant_mode,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from pegaflow.vllm.adapters import AdapterFiles
from tests.python import rank
from tests.python.fake_model import FakeModel, answer
from tests.python.rank import Rank, RankOptions, RankProcess

BLOCK = 16
#: Far more steps than any scenario takes, so that one that does not end is detected.
MAX_STEPS = 20_000

#: Long deadlines, for tests that are not about them: a busy machine must not turn a hit into a
#: miss.
PATIENT = {
    "pegaflow.lookup_deadline_ms": 20_000,
    "pegaflow.open_deadline_ms": 20_000,
    "pegaflow.reserve_deadline_ms": 20_000,
    "pegaflow.connect_deadline_ms": 20_000,
    "pegaflow.claim_limit_ms": 10_000,
    "pegaflow.load_patience_ms": 20_000,
}

#: Metrics whose label is the kind of the blocks; without it, an engine's stats have their sums.
BY_KIND = ("loaded_blocks", "saved_blocks")
#: Any drafted token: which ones are accepted is the fake model's decision.
DRAFTED = 7

#: The fake model computes faster than any load.
ALWAYS = {"pegaflow.load_policy": "always"}

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@functools.cache
def model_directory(**changes: Any) -> str:
    """A directory with the configuration of MODEL, with ``changes`` of its fields."""
    directory = Path(tempfile.mkdtemp(prefix="pega-model-"))
    (directory / "config.json").write_text(json.dumps(MODEL | changes))
    return str(directory)


def put_beside_another(config: VllmConfig) -> None:
    """Makes the config's connector the first of a MultiConnector's two."""
    ours = config.kv_transfer_config
    names = ("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config")
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "connectors": [
                {name: getattr(ours, name) for name in names},
                {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
            ]
        },
    )


def vllm_config(address: str, **changes: Any) -> VllmConfig:
    """A VllmConfig as `vllm serve` would make it; ``changes`` are arguments of EngineArgs.

    Exceptions are ``layout``, and ``data_parallel``, (index, size) of one of several engine cores.
    """
    layout = changes.pop("layout", "LBHNC")
    index, size = changes.pop("data_parallel", (0, 1))
    # There are no weights here, but the namespace needs an id.
    extra = {"pegaflow.host": address, "pegaflow.weights_id": "fake-model"}
    extra |= changes.pop("extra", {})
    transfer = KVTransferConfig(
        kv_connector="PegaKVConnector",
        kv_connector_module_path="pegaflow.connector",
        kv_role=changes.pop("role", "kv_both"),
        kv_connector_extra_config=extra,
        **changes.pop("transfer", {}),
    )
    arguments = {
        "model": model_directory(),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 64,
        "prefix_caching_hash_algo": "sha256_cbor",
        "kv_transfer_config": transfer,
    } | changes
    config = EngineArgs(**arguments).create_engine_config()
    # CPU attention wants blocks of 32; no attention is computed here.
    config.cache_config.block_size = BLOCK
    config.cache_config.kv_cache_layout = layout
    config.parallel_config.data_parallel_index = index
    config.parallel_config.data_parallel_size = size
    return config


def kv_cache_config(config: VllmConfig, blocks: int, specs: dict[str, Any] | None = None) -> Any:
    """The cache configuration of vLLM's engine core for this many blocks and one rank."""
    (made,) = _kv_cache_configs(config, blocks, [specs or rank_specs(config, 0)])
    return made


def kv_cache_configs(
    config: VllmConfig, blocks: int, mla: bool = False, indexer: bool = False
) -> list[Any]:
    """The same for each rank."""
    specs = [
        rank_specs(config, rank, mla or indexer, indexer)
        for rank in range(config.parallel_config.world_size)
    ]
    return _kv_cache_configs(config, blocks, specs)


#: Bytes of a token in the layers of DeepSeek V3.2: the latent with its scales, and its index key.
LATENT_BYTES, INDEX_BYTES = 656, 132


def rank_specs(
    config: VllmConfig, rank: int, mla: bool = False, indexer: bool = False
) -> dict[str, Any]:
    """The KV specs of the layers of one rank: those of its stage, with its share of heads.

    ``indexer``: each layer has two caches of different sizes, as in DeepSeek V3.2.
    """
    parallel, model = config.parallel_config, config.model_config.hf_config
    tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    common = {
        "block_size": BLOCK,
        "head_size": model.head_dim,
        "dtype": config.model_config.dtype,
    }
    spec = (
        MLAAttentionSpec(num_kv_heads=1, max_tp_shards=1, **common)
        if mla
        else FullAttentionSpec(num_kv_heads=max(1, model.num_key_value_heads // tensor), **common)
    )
    first, end = get_pp_indices(model.num_hidden_layers, rank // tensor, stages)
    if not indexer:
        return {f"model.layers.{i}.self_attn.attn": spec for i in range(first, end)}
    packed = {"dtype": torch.uint8, "num_kv_heads": 1, "max_tp_shards": 1, "block_size": BLOCK}
    latent = MLAAttentionSpec(
        head_size=576,
        cache_dtype_str="fp8_ds_mla",
        kv_quant_mode=get_kv_quant_mode("fp8_ds_mla"),
        state_content_bytes=LATENT_BYTES,
        is_index_group_leader=True,
        **packed,
    )
    index = MLAAttentionSpec(head_size=INDEX_BYTES, cache_role=SparseCacheRole.INDEXER, **packed)
    return {
        f"model.layers.{i}.self_attn.{name}": one
        for i in range(first, end)
        for name, one in (("attn", latent), ("indexer.k_cache", index))
    }


def content_of(config: VllmConfig, rank: int, mla: bool = False) -> int:
    """A number for the bytes that a rank holds; ranks with equal numbers hold the same bytes.

    It is the number of the rank's first KV head, counted through all stages.
    """
    tensor = config.parallel_config.tensor_parallel_size
    stage, within = divmod(rank, tensor)
    heads = 1 if mla else config.model_config.hf_config.num_key_value_heads
    return stage * heads + within * heads // tensor


def _kv_cache_configs(config: VllmConfig, blocks: int, specs: list[dict[str, Any]]) -> list[Any]:
    memory = [sum(spec.page_size_bytes for spec in one.values()) * blocks for one in specs]
    config.cache_config.num_gpu_blocks_override = blocks
    made = get_kv_cache_configs(config, specs, memory)
    for one in made:
        one.kv_cache_layout = config.cache_config.kv_cache_layout
        one.hash_block_size = BLOCK
    config.cache_config.num_gpu_blocks = made[0].num_blocks
    return made


#: The file of an adapter with the text from which the fake model computes.
WEIGHTS = "adapter_model.safetensors"


@functools.cache
def adapter(name: str) -> LoRARequest:
    """An adapter that has files."""
    directory = Path(tempfile.mkdtemp(prefix="pega-adapter-"))
    return train(directory, f"weights of {name}", name=name, number=1 + zlib.crc32(name.encode()))


def train(directory: Path, weights: str, *, name: str, number: int, **more: Any) -> LoRARequest:
    """Writes an adapter, and returns when its files are old enough to be trusted."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text('{"r": 8}')
    (directory / WEIGHTS).write_text(weights)
    poller = select.poll()
    while not AdapterFiles(str(directory)).is_stable(time.time_ns()):
        poller.poll(5)
    return LoRARequest(name, number, str(directory), **more)


@dataclasses.dataclass
class Answer:
    """The answer that a client of the engine receives."""

    prompt: list[int]
    seed: int
    wanted: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str = ""
    loaded: int = 0  #: Tokens that vLLM counts as external hits.
    local: int = 0
    params: dict[str, Any] | None = None  #: ``kv_transfer_params`` of the response.

    def check(self) -> None:
        expected = answer(self.prompt, self.wanted, self.seed)
        assert self.finish_reason == "length", self.finish_reason
        assert self.tokens == expected, (self.tokens, expected)


class Engine:
    """One engine core and its workers. A context manager; all resources are released at the end.

    With ``process`` each worker has a process of its own, as in vLLM; two engines whose workers
    share a process are one process to the server. Several ranks (``tensor_parallel_size`` and
    ``pipeline_parallel_size`` among ``changes``) always have their own.
    """

    def __init__(
        self,
        address: str,
        *,
        blocks: int = 256,
        asynchronous: bool = False,
        v2_runner: bool = False,
        old_release: bool = False,
        aggregate: bool = False,
        patient: bool = True,
        process: bool = False,
        mla: bool = False,
        indexer: bool = False,
        model_class: type[FakeModel] = FakeModel,
        **changes: Any,
    ) -> None:
        changes["extra"] = ALWAYS | (PATIENT if patient else {}) | changes.get("extra", {})
        self.config = vllm_config(address, **changes)
        if asynchronous:
            self.config.scheduler_config.async_scheduling = True  # vLLM disables it on a CPU
        parallel = self.config.parallel_config
        mla = mla or indexer
        worker_configs = kv_cache_configs(self.config, blocks, mla, indexer)
        # vLLM makes the workers' connectors first.
        self.ranks: list[Rank | RankProcess] = []
        for number, worker_config in enumerate(worker_configs):
            config = copy.deepcopy(self.config)
            config.parallel_config.rank = number
            content = content_of(config, number, mla)
            options = RankOptions(
                config, worker_config, v2_runner, old_release, content, model_class
            )
            several = parallel.world_size > 1
            self.ranks.append((RankProcess if process or several else Rank)(options))
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK, hash_fn)
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=generate_scheduler_kv_cache_config(worker_configs),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        # Makes vLLM report newly allocated blocks, so that the worker can overwrite them.
        self.scheduler.needs_kv_cache_zeroing = True
        self.scheduler.use_v2_model_runner = v2_runner
        self.connector = self.scheduler.connector
        if patient and (adapters := getattr(self.connector._scheduler, "_adapters", None)):
            adapters.looks.patience_s = 20
        if old_release:  # which has no block state to return
            self.connector._scheduler._own_tables = True
        aggregate = aggregate or parallel.world_size > 1
        self._aggregator = (
            KVOutputAggregator.from_connector(self.connector, parallel.world_size)
            if aggregate
            else None
        )
        # Like vLLM's max_concurrent_batches.
        stages = parallel.pipeline_parallel_size
        self._depth = stages if stages > 1 else 2 if asynchronous else 1
        self._queue: collections.deque[tuple[Any, ModelRunnerOutput]] = collections.deque()
        self.answers: dict[str, Answer] = {}
        self.stats: collections.Counter[str] = collections.Counter()
        self.steps = 0
        self.bad_blocks: list[int] = []  # The blocks that the worker reported as not loaded.
        #: Called with each SchedulerOutput before the worker gets it.
        self.on_schedule: Callable[[Any], None] = lambda output: None

    # ---- requests of a client

    def add(
        self,
        request_id: str,
        prompt: list[int],
        tokens: int = 4,
        *,
        salt: str | None = None,
        lora: str | LoRARequest | None = None,
        skip_reading: bool | None = None,
        params: dict[str, Any] | None = None,
        session: str | None = None,
    ) -> Answer:
        lora = adapter(lora) if isinstance(lora, str) else lora
        if lora is not None:
            self.connector._scheduler._adapters.wait(lora, 30)
        weights = (Path(lora.lora_path) / WEIGHTS).read_text() if lora else None
        seed = zlib.crc32(f"{salt}/{weights}".encode()) if salt or lora else 0
        params = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            skip_reading_prefix_cache=skip_reading,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        request = self._request(
            request_id,
            prompt,
            params,
            cache_salt=salt,
            lora_request=lora,
            **({"session_id": session} if session is not None else {}),
        )
        made = Answer(list(prompt), seed, tokens)
        self.answers[request_id] = made
        self.scheduler.add_request(request)
        return made

    def _request(self, request_id: str, prompt: list[int], params: Any, **more: Any) -> Request:
        return Request(request_id, list(prompt), params, None, block_hasher=self._hasher, **more)

    def hashes(self, prompt: list[int]) -> list[bytes]:
        """vLLM's hash of each block of a prompt."""
        return list(self._request("hashes", prompt, SamplingParams(max_tokens=1)).block_hashes)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def ask(self, request_id: str, prompt: list[int], tokens: int = 4, **options: Any) -> Answer:
        """One request from its arrival to its answer, which is checked."""
        made = self.add(request_id, prompt, tokens, **options)
        self.run()
        made.check()
        return made

    def reset_local(self) -> None:
        """Empties vLLM's own cache, as POST /reset_prefix_cache does."""
        self.run()
        assert self.scheduler.reset_prefix_cache()

    def preempt_all(self) -> None:
        """Takes the blocks of all running requests, as vLLM's reset_running_requests does."""
        while self.scheduler.running:
            request = self.scheduler.running.pop()
            self.scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        self.scheduler.prev_step_scheduled_req_ids.clear()

    # ---- iterations of the engine core's loop

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Steps until no work is left, or ``until`` returns true."""
        for _ in range(MAX_STEPS):
            if until is not None and until():
                return
            if not self.scheduler.has_requests() and not self._queue:
                assert until is None, "the engine became idle first"
                return
            self.step()
        raise AssertionError(f"not idle after {MAX_STEPS} steps: {self.scheduler.requests}")

    def step(self) -> None:
        """One iteration, with as many batches in flight as the engine's kind has."""
        self.steps += 1
        executed = False
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            assert output.kv_connector_block_state is None
            self.on_schedule(output)
            self._queue.append((output, self._execute(output)))
            executed = output.total_num_scheduled_tokens > 0
            if len(self._queue) < self._depth and (executed or self.scheduler.has_requests()):
                return
        if self._queue:
            self._update(*self._queue.popleft())
        if not executed:
            rank.pause(self.ranks)

    def _execute(self, output: Any) -> ModelRunnerOutput:
        seeds = {new.req_id: self.answers[new.req_id].seed for new in output.scheduled_new_reqs}
        for one in self.ranks:
            one.begin(output, seeds)
        results = [one.end() for one in self.ranks]
        for result in results:
            if result.kv_connector_output is not None:
                self.bad_blocks += result.kv_connector_output.invalid_block_ids
        if self._aggregator is None:
            return results[0]
        # The last stage's first rank returns the tokens.
        parallel = self.config.parallel_config
        output_rank = parallel.world_size - parallel.tensor_parallel_size
        made = self._aggregator.aggregate(results, output_rank)
        assert made is not None
        return made

    def _update(self, output: Any, result: ModelRunnerOutput) -> None:
        self._update_requests(output, result)
        speculation = self.config.speculative_config
        if speculation is not None and not self.config.scheduler_config.async_scheduling:
            drafts = [DRAFTED] * speculation.num_speculative_tokens
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(result.req_ids, [list(drafts) for _ in result.req_ids])
            )

    def _update_requests(self, output: Any, result: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(output, result).values():
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                self._note(outputs.scheduler_stats.kv_connector_stats)
            for one in outputs.outputs:
                made = self.answers[one.request_id]
                made.tokens += one.new_token_ids
                if one.finish_reason is not None:
                    made.finish_reason = str(one.finish_reason)
                    made.params = one.kv_transfer_params
                if one.prefill_stats is not None:
                    made.loaded = one.prefill_stats.num_external_cached_tokens
                    made.local = one.prefill_stats.num_local_cached_tokens

    def _note(self, stats: dict[str, Any]) -> None:
        for name, row in stats.items():
            for labels, value in row.items():
                if labels and name in BY_KIND:
                    self.stats[name] += value  # of all kinds
                key = f"{name}{{{labels}}}" if labels else name
                if isinstance(value, list):
                    self.stats[key] += len(value)
                elif name in ("pinned_blocks", "serving", "link_state"):
                    self.stats[key] = value
                else:
                    self.stats[key] += value

    # ---- conditions at the end

    @property
    def worker(self) -> Any:
        """The only worker's connector, if it lives in this process."""
        (one,) = self.ranks
        assert isinstance(one, Rank)
        return one.worker

    @property
    def model(self) -> Any:
        (one,) = self.ranks
        assert isinstance(one, Rank)
        return one.model

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Waits until all sides are connected and each worker is registered."""
        self.wait_states({"ready"}, timeout_s)

    def wait_states(self, wanted: set[str], timeout_s: float = 60.0) -> None:
        """Waits until each side's link is in one of the states."""
        deadline = time.monotonic() + timeout_s
        while not wanted.issuperset(self.states()):
            assert time.monotonic() < deadline, (
                f"{self.states()}: {self.connector._scheduler._session.status()}"
            )
            select.select([], [], [], 0.005)

    def states(self) -> tuple[str, ...]:
        """The states of the scheduler's link and of each worker's."""
        return (
            self.connector._scheduler._session.status()["state"],
            *(one.do(rank.state) for one in self.ranks),
        )

    def check_at_rest(self, planted_errors: bool = False) -> None:
        """Checks that nothing is in flight, pinned or remembered, and that no error occurred."""
        assert not self.scheduler.requests
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "GPU blocks are leaked"
        side = self.connector._scheduler
        if hasattr(side, "_states"):
            assert not side._states
            assert not side.loads.under_way()
            assert side.saves is None or side.saves.pinned == 0
        for one in self.ranks:
            assert one.do(rank.jobs) == ([], [])
        errors = any(name.startswith("internal_errors") for name in self.stats)
        assert errors == planted_errors, self.stats

    def close(self) -> None:
        for one in self.ranks:
            one.close()
        self.scheduler.shutdown()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
