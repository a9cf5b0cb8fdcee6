"""Notes when a vLLM engine schedules, computes and reports, as lines of JSON.

With ``PEGA_TIMELINE`` in the environment, which names a folder, each engine core writes a file
there: the time (CLOCK_MONOTONIC, equal for all processes of a machine), the engine (its
``CUDA_VISIBLE_DEVICES``), the event and a number. ``perf/support/handover_timeline.py`` reads them.

    arrived    a request is known to the scheduler
    asked      the connector has offered tokens that it will load; the number of tokens
    scheduled  a step with tokens begins; their number
    launched   its kernels are queued
    computed   the GPU has executed them; the number of tokens
    loaded     the connector's mover has ended a job
    received   the worker has reported the end of loads to vLLM
    answered   the scheduler has tokens of requests; the number of requests
    NAME()     a function of CALLS has returned; the milliseconds that it took, if at least 0.05
"""

import functools
import json
import os
import pathlib
import queue
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

#: Functions of which it is known when they took long: module, class, name.
CALLS = (
    ("vllm.v1.core.sched.scheduler", "Scheduler", "_update_waiting_for_remote_kv"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", "allocate_slots"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "add_requests"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "prepare_inputs"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "prepare_attn"),
    ("vllm.v1.worker.gpu.kv_connector", "ActiveKVConnector", "pre_forward"),
    ("vllm.v1.worker.gpu.kv_connector", "ActiveKVConnector", "post_forward"),
    ("pegaflow.connector", "PegaKVConnector", "build_connector_meta"),
    ("pegaflow.connector", "PegaKVConnector", "update_connector_output"),
    ("pegaflow.connector", "PegaKVConnector", "update_state_after_alloc"),
)


class _Thread:
    """Handles what is put into its queue, in the process that puts it: vLLM loads plugins in a
    process and may fork its engine core from there.
    """

    def __init__(self, run: Callable[[queue.SimpleQueue], None]) -> None:
        self._run = run
        self._process = 0

    def put(self, item: Any) -> None:
        if self._process != os.getpid():
            self._process, self._queue = os.getpid(), queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._queue,), daemon=True).start()
        self._queue.put(item)


def _write(notes: queue.SimpleQueue) -> None:
    path = pathlib.Path(os.environ["PEGA_TIMELINE"]) / f"{os.getpid()}.jsonl"
    engine = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    with path.open("w", buffering=1) as file:
        while True:
            at, event, number = notes.get()
            file.write(json.dumps([at, engine, event, number]) + "\n")


def _watch_gpu(events: queue.SimpleQueue) -> None:
    while True:
        event, tokens = events.get()
        event.synchronize()
        _note("computed", tokens)


_writer, _gpu = _Thread(_write), _Thread(_watch_gpu)


def _note(event: str, number: float = 0) -> None:
    _writer.put((time.monotonic(), event, number))


def _wrap(owner: Any, name: str, after: Callable[..., None], before: Any = None) -> None:
    """``after`` receives the result and the arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        after(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapped)


def _watch_jobs(descriptor: int) -> None:
    """Does not read it: the engine does."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while True:
        poller.poll()
        _note("loaded")
        while poller.poll(0):
            time.sleep(0.0002)


def _scheduler() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    def scheduled(result: Any, *_: Any, **__: Any) -> None:
        if result.total_num_scheduled_tokens:
            _note("scheduled", result.total_num_scheduled_tokens)

    def answered(result: Any, *_: Any, **__: Any) -> None:
        found = sum(
            bool(one.new_token_ids) for outputs in result.values() for one in outputs.outputs
        )
        if found:
            _note("answered", found)

    _wrap(Scheduler, "schedule", scheduled)
    _wrap(Scheduler, "update_from_output", answered)
    _wrap(Scheduler, "add_request", lambda *_, **__: _note("arrived"))


def _runner() -> None:
    import torch
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def launched(_: Any, runner: Any, output: Any, *__: Any, **___: Any) -> None:
        if output.total_num_scheduled_tokens:
            _note("launched")
            event = torch.cuda.Event(blocking=True)
            event.record()
            _gpu.put((event, output.total_num_scheduled_tokens))

    def received(result: Any, *_: Any, **__: Any) -> None:
        if result is not None and result.finished_recving:
            _note("received", len(result.finished_recving))

    _wrap(GPUModelRunner, "execute_model", launched)
    _wrap(ActiveKVConnector, "post_forward", received)


def _connector() -> None:
    from pegaflow.connector import PegaKVConnector
    from pegaflow.vllm.worker_side import WorkerSide

    def asked(result: Any, *_: Any, **__: Any) -> None:
        if result[0]:
            _note("asked", result[0])

    def registered(_: Any, side: Any, *__: Any, **___: Any) -> None:
        if side.mover is not None:
            watch = threading.Thread(
                target=_watch_jobs, args=(side.mover.finished_fd(),), daemon=True
            )
            watch.start()

    _wrap(PegaKVConnector, "get_num_new_matched_tokens", asked)
    _wrap(WorkerSide, "register", registered)


def _time(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        try:
            return original(*args, **kwargs)
        finally:
            took_ms = (time.monotonic() - begin) * 1e3
            if took_ms >= 0.05:
                _note(f"{name}()", took_ms)

    setattr(owner, name, timed)


def register() -> None:
    """Entry point of the group vllm.general_plugins; vLLM calls it in each of its processes."""
    if not os.environ.get("PEGA_TIMELINE"):
        return
    _scheduler()
    _runner()
    try:
        _connector()
    except ImportError:
        print("timeline: no pegaflow here, its events are missing")
    for module, owner, name in CALLS:
        if (found := sys.modules.get(module)) is not None:
            _time(getattr(found, owner), name)
