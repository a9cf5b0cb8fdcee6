"""One worker of an engine: the real connector's worker side and a FakeModel, here or in a process.

``Rank`` calls the connector's hooks in the order of either of vLLM's model runners. ``RankProcess``
is the same in a process of its own, as in vLLM; plans and outputs cross a pipe.
"""

import dataclasses
import multiprocessing
import os
import pickle
import select
import signal
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.python.fake_model import FakeModel

#: Far more than a step takes on a busy machine; a rank that hangs is detected.
ANSWER_S = 120.0


@dataclasses.dataclass(frozen=True)
class RankOptions:
    """The arguments of a worker."""

    config: Any  # The rank's own: parallel_config.rank is set.
    kv_cache_config: Any
    v2_runner: bool = False
    old_release: bool = False
    content: int = 0  #: Ranks with equal numbers hold the same bytes.
    model_class: type[FakeModel] = FakeModel


class AttentionLayer:
    """A layer of vLLM's that computes without scales."""

    _k_scale = _v_scale = _q_scale = _prob_scale = torch.tensor(1.0)


class Rank:
    """A worker in this process."""

    def __init__(self, options: RankOptions) -> None:
        self._options = options
        self.model = options.model_class(options.kv_cache_config, options.content)
        self._computed: dict[str, int] = {}
        # vLLM's workers receive a pickled copy of the configuration, and enter their layers.
        config = pickle.loads(pickle.dumps(options.config))
        for group in options.kv_cache_config.kv_cache_groups:
            for name in group.layer_names:
                config.compilation_config.static_forward_context[name] = AttentionLayer()
        self.worker = KVConnectorFactory.create_connector(
            config,
            KVConnectorRole.WORKER,
            options.kv_cache_config,
        )
        self.worker.register_kv_caches(self.model.tensors)

    def execute(self, output: Any, seeds: dict[str, int]) -> ModelRunnerOutput:
        """One step. ``seeds`` has the seed of each new request."""
        worker, meta = self.worker, output.kv_connector_metadata
        v2_runner = self._options.v2_runner
        if not v2_runner:
            worker.handle_preemptions(meta)
        self._update_rows(output, seeds)
        if output.new_block_ids_to_zero:
            self.model.poison(output.new_block_ids_to_zero)
        if v2_runner:
            worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        if output.has_sync_kv_loads:
            worker.start_load_kv(None)
        drafts = output.scheduled_spec_decode_tokens
        sampled = {
            request_id: self.model.forward(
                request_id,
                self._computed[request_id],
                scheduled,
                len(drafts.get(request_id, ())),
            )
            for request_id, scheduled in output.num_scheduled_tokens.items()
        }
        if v2_runner:
            worker.finish_forward()
        if not output.has_sync_kv_loads:
            worker.start_load_kv(None)
        if sampled or not self._options.old_release:  # old: only in steps with work
            worker.wait_for_save()
        self.model.draft()
        results = worker.get_transfer_results(output.finished_req_ids)
        transfer = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_cache_events=worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        if not sampled:
            return ModelRunnerOutput.with_kv_conn_output_only(transfer)
        ids = list(sampled)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[sampled[request_id] for request_id in ids],
            kv_connector_output=transfer,
        )

    def _update_rows(self, output: Any, seeds: dict[str, int]) -> None:
        """A model runner's state of its requests."""
        for request_id in output.finished_req_ids:
            self.model.remove(request_id)
        self._computed = {}
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self.model.add(new.req_id, seeds[new.req_id], tokens, new.block_ids[0])
            self._computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            ids = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                tokens = cached.all_token_ids[request_id]
                self.model.add(request_id, self.model.seed_of(request_id), tokens, ids[0])
            elif ids is not None:
                self.model.append_blocks(request_id, ids[0])
            self._computed[request_id] = cached.num_computed_tokens[i]

    # ---- calls of the harness to either kind

    def begin(self, output: Any, seeds: dict[str, int]) -> None:
        # A worker gets a copy of the plan, and returns a copy of the output.
        self._result = self.execute(pickle.loads(pickle.dumps(output)), seeds)

    def end(self) -> ModelRunnerOutput:
        return pickle.loads(pickle.dumps(self._result))

    def do(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """The result of ``act``, called with this rank (where it lives) and ``arguments``."""
        return act(self, *arguments)

    def finished_fd(self) -> int | None:
        mover = getattr(self.worker._worker, "mover", None)
        return mover.finished_fd() if mover is not None else None

    def close(self) -> None:
        self.worker.shutdown()


def state(rank: Rank) -> str:
    """The state of the link to the server; "off" without one."""
    mover = getattr(rank.worker._worker, "mover", None)
    return mover.status()["state"] if mover is not None else "off"


def detail(rank: Rank) -> str:
    """The reason of the link's state."""
    return rank.worker._worker.mover.status()["detail"]


def jobs(rank: Rank) -> tuple[list[int], list[int]]:
    """Loads and save jobs that were accepted and not reported."""
    side = rank.worker._worker
    return list(getattr(side, "loads", ())), list(getattr(side, "saves", ()))


def checked_tokens(rank: Rank) -> int:
    return rank.model.checked_tokens


class RankDied(Exception):
    """A worker's process is gone; vLLM's engine ends with it."""


context = multiprocessing.get_context("forkserver")
# Importing vLLM takes 10 s of a core: once for all, in a process without threads.
context.set_forkserver_preload(["tests.python.rank"])


def _serve(pipe: Any, options: RankOptions) -> None:
    rank = Rank(options)
    pipe.send(None)
    try:
        while True:
            kind, act, arguments = pipe.recv()
            if kind == "close":
                rank.close()
                pipe.send(None)
                return
            try:
                pipe.send((act(rank, *arguments), None))
            except Exception as error:
                pipe.send((None, error))
    except EOFError:
        rank.close()  # the test has ended


def _execute(rank: Rank, output: Any, seeds: dict[str, int]) -> ModelRunnerOutput:
    return rank.execute(output, seeds)


class RankProcess:
    """A worker in a process of its own. Ends with close(), or with the test's process."""

    def __init__(self, options: RankOptions) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, options), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _send(self, *message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise RankDied(str(error)) from None

    def _receive(self) -> Any:
        try:
            if not self._pipe.poll(ANSWER_S):
                raise AssertionError(f"rank process {self.pid} did not respond for {ANSWER_S} s")
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RankDied(str(error)) from None

    def _answer(self) -> Any:
        value, error = self._receive()
        if error is not None:
            raise error
        return value

    def begin(self, output: Any, seeds: dict[str, int]) -> None:
        self._send("do", _execute, (output, seeds))

    def end(self) -> ModelRunnerOutput:
        return self._answer()

    def do(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """The result of ``act``, a function of a module, in the rank's process."""
        self._send("do", act, arguments)
        return self._answer()

    def finished_fd(self) -> int | None:
        return None

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(ANSWER_S)

    def close(self) -> None:
        if self._process.is_alive():
            try:
                self._send("close", None, ())
                self._receive()
            except RankDied:
                pass  # it died before it could report that, as intended
        self._process.join(ANSWER_S)
        self._pipe.close()


def pause(ranks: list[Any]) -> None:
    """vLLM's loop pauses a millisecond after a step without work; a finished job ends it here.

    In a scenario without a connected worker the pause is what it is in vLLM.
    """
    waits = [fd for rank in ranks if (fd := rank.finished_fd()) is not None]
    select.select(waits, [], [], 0.001)
