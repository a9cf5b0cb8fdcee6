"""The event from which on other engines read a step's blocks: taken when the last layer's KV is
queued.

A GPU's stream is replaced by a list of work. The scheduler, the connector, the server and the
copies are real; another engine reads when the stream has come to the event, before the rest of the
step.
"""

import dataclasses
import functools
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata
from vllm.model_executor.layers.attention import (
    Attention,
    ChunkedLocalAttention,
    CrossAttention,
    MLAAttention,
)

from pegaflow import _native
from pegaflow.engine.layout import Geometry
from pegaflow.vllm import build
from pegaflow.vllm.computed import Computed, layers_with_hooks
from pegaflow.vllm.messages import SaveOrder, StepPlan
from pegaflow.vllm.worker_side import WorkerSide
from tests.python.fake_model import FakeModel
from tests.python.harness import Engine, kv_cache_config, put_beside_another, vllm_config
from tests.python.test_connector_hooks import Planted, plant

LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(3)]
METADATA = object()


# ---- the rule


class Stream:
    """Records which event is at which place of its work."""

    def __init__(self) -> None:
        self.current = 0xABC
        self.work: list[str] = []
        self.error: Exception | None = None

    def record(self, queue: int) -> int:
        if self.error is not None:
            raise self.error
        self.work.append(f"event on {queue:#x}")
        return len(self.work)


@pytest.fixture
def stream() -> Stream:
    return Stream()


def made(stream: Stream, layers: list[str] = LAYERS) -> Computed:
    return Computed(frozenset(layers), lambda: stream.current, stream.record)


def run(stream: Stream, computed: Computed, layers: list[str], metadata: Any = METADATA) -> None:
    for name in layers:
        stream.work.append(f"KV of {name}")
        computed.layer(name, metadata)


@pytest.mark.parametrize("order", [LAYERS, LAYERS[::-1]], ids=["forward", "backward"])
def test_the_event_is_recorded_in_the_hook_of_whichever_layer_comes_last(stream, order):
    computed, plan = made(stream), StepPlan()
    assert computed.begin(plan)

    run(stream, computed, order[:2])
    assert computed.event(plan) is None
    run(stream, computed, order[2:])
    stream.work.append("logits")

    assert stream.work == [*(f"KV of {name}" for name in order), "event on 0xabc", "logits"]
    assert computed.event(plan) == computed.event(plan) == 4, "all saves of the step use it"


@pytest.mark.parametrize(
    ("layers", "recorded"),
    [
        ([], 0),
        (LAYERS[:2], 0),
        (LAYERS[:2] + LAYERS[:1], 0),
        (LAYERS[:2] + LAYERS, 0),
        (["other", *LAYERS], 0),
        ([*LAYERS, "other"], 1),
        (LAYERS + LAYERS[:1], 1),
        (LAYERS + LAYERS, 1),
    ],
    ids=[
        "all missing, as in a CUDA graph",
        "the last one missing",
        "one repeated and one missing",
        "repeated before the last one",
        "an unknown one",
        "an unknown one behind the last one",
        "one repeated behind the last one",
        "all repeated",
    ],
)
def test_other_hooks_than_one_of_each_layer_leave_the_end_of_the_step(stream, layers, recorded):
    computed, plan = made(stream), StepPlan()
    computed.begin(plan)
    run(stream, computed, layers)
    assert computed.event(plan) is None
    assert stream.work.count("event on 0xabc") == recorded


def test_a_layer_without_metadata_leaves_the_end_of_the_step(stream):
    computed, plan = made(stream), StepPlan()
    computed.begin(plan)
    run(stream, computed, LAYERS[:1], metadata=None)
    run(stream, computed, LAYERS[1:])
    assert computed.event(plan) is None
    assert "event on 0xabc" not in stream.work


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_hook_on_another_stream_leaves_the_end_of_the_step(stream, at):
    computed, plan = made(stream), StepPlan()
    computed.begin(plan)
    for i, name in enumerate(LAYERS):
        stream.current = 0xDEF if i == at else 0xABC
        run(stream, computed, [name])
    stream.current = 0xABC
    assert computed.event(plan) is None


def test_a_save_on_another_stream_leaves_the_end_of_the_step(stream):
    computed, plan = made(stream), StepPlan()
    computed.begin(plan)
    run(stream, computed, LAYERS)
    stream.current = 0xDEF
    assert computed.event(plan) is None


@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_hook_on_another_thread_leaves_the_end_of_the_step(stream, at):
    computed, plan = made(stream), StepPlan()
    computed.begin(plan)
    for i, name in enumerate([*LAYERS, LAYERS[0]]):
        if i == at:
            other = threading.Thread(target=run, args=(stream, computed, [name]))
            other.start()
            other.join()
        elif i < 3:
            run(stream, computed, [name])
    assert computed.event(plan) is None


def test_a_step_has_no_event_of_another_one(stream):
    computed, first, second = made(stream), StepPlan(), StepPlan()
    computed.begin(first)
    run(stream, computed, LAYERS)
    assert computed.event(second) is None

    computed.begin(second)
    assert computed.event(first) is computed.event(second) is None
    run(stream, computed, LAYERS[:2])  # it fails in the middle
    computed.begin(first)
    run(stream, computed, LAYERS[2:])
    assert computed.event(first) is None

    computed.begin(first)
    run(stream, computed, LAYERS)
    computed.clear()
    assert computed.event(first) is None


def test_a_broken_gpu_leaves_the_error_to_the_save(stream):
    computed, plan = made(stream), StepPlan()
    stream.error = _native.Internal("planted")
    computed.begin(plan)
    run(stream, computed, LAYERS)
    assert computed.event(plan) is None


# ---- the layers to which it applies


def of(kind: type, **attributes: Any) -> Any:
    """A layer of vLLM's without weights."""
    layer = kind.__new__(kind)
    for name, value in attributes.items():
        layer.__dict__[name] = value
    return layer


@pytest.mark.parametrize(
    ("layers", "fits"),
    [
        ([of(Attention), of(Attention)], True),
        ([of(MLAAttention, hisparse_cache=None), of(Attention)], True),
        ([of(MLAAttention, hisparse_cache=object()), of(Attention)], False),
        ([of(Attention), of(CrossAttention)], False),
        ([of(Attention), of(ChunkedLocalAttention)], False),
        ([of(Attention), of(type("Attention", (Attention,), {}))], False),
        ([of(Attention), object()], False),
        ([of(Attention)], False),
    ],
    ids=["plain", "MLA", "HiSparse", "cross", "chunked", "subclass", "indexer", "absent"],
)
def test_only_layers_that_write_their_kv_before_their_hook_are_watched(tmp_path, layers, fits):
    config = vllm_config(f"unix:{tmp_path}/absent.sock")
    config.compilation_config.static_forward_context.update(zip(LAYERS, layers, strict=False))
    assert layers_with_hooks(config, LAYERS[:2]) == (set(LAYERS[:2]) if fits else set())


def test_a_draft_model_leaves_the_end_of_the_step(tmp_path, monkeypatch):
    config = vllm_config(f"unix:{tmp_path}/absent.sock")
    config.compilation_config.static_forward_context.update(
        {name: of(Attention) for name in LAYERS}
    )
    monkeypatch.setattr("pegaflow.vllm.drafts.have_kv", lambda config: True)
    assert layers_with_hooks(config, LAYERS) == frozenset()


@pytest.mark.parametrize("layers", [[], LAYERS], ids=["not watched", "watched"])
def test_a_step_without_saves_watches_no_layer(stream, layers):
    side = WorkerSide(lambda caches: None)
    side.mover = type("Mover", (), {"computed": made(stream, layers)})()
    with_save = StepPlan(saves=[SaveOrder(1, b"key", 3, [5])])
    assert side.begin_step(StepPlan()) is None
    assert side.begin_step(with_save) is (side.mover.computed if layers else None)
    assert side.begin_step(StepPlan()) is None
    side.begin_step(with_save)
    side.end_step()
    assert side.mover.computed.event(with_save) is None


def test_a_rank_whose_bytes_another_one_saves_watches_no_layer(stream):
    side = WorkerSide(lambda caches: None, saves=False)
    side.mover = type("Mover", (), {"computed": made(stream)})()
    assert side.begin_step(StepPlan(saves=[SaveOrder(1, b"key", 3, [5])])) is None


# ---- the mover of a GPU


def test_saves_of_a_gpu_take_the_event_of_its_stream(monkeypatch):
    calls = []

    class Mover:
        def record(self, queue: int) -> int:
            calls.append(("record", queue))
            return 17

        def save(self, *arguments: Any, **more: Any) -> None:
            calls.append(("save", arguments[5:], more))

        def close(self) -> None:
            calls.append("close")

    class Current:
        cuda_stream = 0xABC

    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: Current)
    side = WorkerSide(lambda caches: None)
    side.mover = build._OnStream(Mover(), 3, frozenset(LAYERS))
    for layers in (LAYERS, LAYERS[:2]):
        plan = StepPlan(saves=[SaveOrder(1, b"key", 3, [5]), SaveOrder(2, b"yek", 3, [6])])
        computed = side.begin_step(plan)
        for name in layers:
            computed.layer(name, METADATA)
        side.submit_saves(plan)
        side.end_step()

    early, late = ("save", (0xABC,), {"computed": 17}), ("save", (0xABC,), {})
    assert calls == [("record", 0xABC), early, early, late, late]


def test_a_child_of_a_multi_connector_gets_the_hooks(tmp_path, monkeypatch, stream):
    config = vllm_config(f"unix:{tmp_path}/absent.sock", max_model_len=128)
    put_beside_another(config)
    caches = kv_cache_config(config, 16)
    group = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", group)
    group.register_kv_caches(FakeModel(caches).tensors)
    side = group._connectors[0]._worker
    side.close()
    events = []

    class Mover:
        computed = made(stream)

        def save(self, *arguments: Any, computed: int | None = None, **more: Any) -> None:
            events.append(computed)

    side.mover = Mover()
    plan = StepPlan(saves=[SaveOrder(1, b"key", 3, [5])])
    for layers in (LAYERS, LAYERS[:2], LAYERS):
        plan = dataclasses.replace(plan)
        group.bind_connector_metadata(MultiKVConnectorMetadata((plan, KVConnectorMetadata())))
        for name in layers:
            group.save_kv_layer(name, None, METADATA)
        group.wait_for_save()
        group.clear_connector_metadata()
        assert side.mover.computed.event(plan) is None, "the step is over"
    assert events == [1, None, 2]


@pytest.mark.parametrize("group", ["", "pd"])
def test_engines_that_no_other_one_reads_watch_no_layer(tmp_path, group):
    config = vllm_config(f"unix:{tmp_path}/absent.sock")
    config.compilation_config.static_forward_context.update(
        {name: of(Attention) for name in LAYERS}
    )
    where = Geometry((), tuple(LAYERS), 10, ("",) * len(LAYERS), "cuda")
    found = build._watched_layers(config, where, {"direct_group": group} if group else {})
    assert found == (set(LAYERS) if group else set())


# ---- the bytes


class LayeredModel(FakeModel):
    """Queues its KV on a stream, layer by layer; the stream has run when the step ends."""

    def __init__(self, config: Any, content: int) -> None:
        super().__init__(config, content)
        self.queued: list[Callable[[], None]] = []
        self._computed: list[list[Callable[[], None]]] = [[] for _ in self.arrays]

    def forward(self, *arguments: Any, **more: Any) -> list[int]:
        before = [array.copy() for array in self.arrays]
        sampled = super().forward(*arguments, **more)
        for layer, array in enumerate(self.arrays):
            changed = (array != before[layer]).nonzero()
            values = array[changed]
            array[changed] = before[layer][changed]
            self._computed[layer].append(functools.partial(array.__setitem__, changed, values))
        return sampled

    def run_layer(self, layer: int) -> None:
        """The layer's op: its KV is queued."""
        self.queued += self._computed[layer]
        self._computed[layer] = []

    def advance(self, until: int) -> None:
        """The GPU runs the first work that is queued."""
        for write in self.queued[:until]:
            write()
        del self.queued[:until]

    def draft(self) -> None:
        self.advance(len(self.queued))


class StreamMover:
    """A real mover. Another engine reads the blocks of a save at the event of the last layer, and
    the save at the end of the stream's work."""

    def __init__(self, mover: Any, model: LayeredModel, early_by: int) -> None:
        self._mover, self._model = mover, model
        self._early_by = early_by  # a mistake: work that the event should be behind, and is not
        self._finished: list[Any] = []
        self.computed = Computed(frozenset(model.tensors), lambda: 0xABC, self._record)
        self.early = 0  #: Saves with an event of the last layer.
        self.late = 0
        self.wrong: list[int] = []  #: Layers that another engine has read without all KV.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    def _record(self, queue: int) -> int:
        return len(self._model.queued) - self._early_by

    def save(self, *arguments: Any, computed: int | None = None, **more: Any) -> None:
        model = self._model
        self.early += computed is not None
        self.late += computed is None
        model.advance(len(model.queued) if computed is None else computed)
        read = [array.copy() for array in model.arrays]
        model.advance(len(model.queued))
        self.wrong += [i for i, was in enumerate(read) if (was != model.arrays[i]).any()]
        self._mover.save(*arguments, **more)
        while not any(done.id == arguments[1] for done in self._finished):
            assert select.select([self._mover.finished_fd()], [], [], 60)[0], "no report"
            self._finished += self._mover.take_finished()

    def take_finished(self) -> list[Any]:
        finished, self._finished = self._finished, []
        return finished + self._mover.take_finished()


@pytest.fixture
def layered(pega: Any) -> Iterator[Callable[..., tuple[Engine, StreamMover]]]:
    """Engines on such a stream. ``hooks`` are the layers whose hooks vLLM calls in a step."""
    engines = []

    def start(hooks: list[int], early_by: int = 0) -> tuple[Engine, StreamMover]:
        engine = Engine(pega.address, v2_runner=True, model_class=LayeredModel)
        engines.append(engine)
        engine.wait_ready()
        worker, model = engine.worker, engine.model
        mover = StreamMover(worker._worker.mover, model, early_by)
        worker._worker.mover = mover
        names = list(model.tensors)

        def finish_forward() -> None:
            for layer, name in enumerate(names):
                model.run_layer(layer)
                for _ in range(hooks.count(layer)):
                    worker.save_kv_layer(name, model.tensors[name], METADATA)

        worker.finish_forward = finish_forward
        return engine, mover

    yield start
    for engine in engines:
        engine.close()


def load_again(engine: Engine, tokens: list[int]) -> int:
    """Saves a prompt and loads it; the model checks each byte. The number of loaded tokens."""
    engine.ask("stored", tokens)
    engine.reset_local()
    loaded = engine.ask("again", tokens).loaded
    engine.run()
    return loaded


@pytest.mark.parametrize(
    ("hooks", "is_early"),
    [([0, 1, 2], True), ([], False), ([0, 1], False), ([1, 2], False), ([0, 1, 2, 2], False)],
    ids=["all layers", "CUDA graph", "not the last", "not the first", "last one twice"],
)
def test_blocks_that_are_read_have_the_kv_of_all_layers(layered, prompt, hooks, is_early):
    engine, mover = layered(hooks)
    assert load_again(engine, prompt(300)) == 288
    assert (mover.early > 0, mover.late > 0) == (is_early, not is_early)
    assert mover.wrong == []
    engine.check_at_rest()


def test_an_event_one_layer_too_early_is_found(layered, prompt):
    """The test above depends on the place of the event."""
    engine, mover = layered([0, 1, 2], early_by=1)
    assert load_again(engine, prompt(200)) > 0
    assert set(mover.wrong) == {2}
    assert mover.early > 0


def test_a_failure_in_a_layers_hook_costs_the_cache_only(layered, prompt):
    engine, mover = layered([0, 1, 2])
    mover.computed._current = lambda: (_ for _ in ()).throw(Planted())
    engine.ask("stored", prompt(300))
    assert engine.stats["serving{worker}"] == 0
    engine.ask("x", prompt(100))
    engine.run()
    engine.check_at_rest(planted_errors=True)


@pytest.mark.parametrize("path", ["_worker.begin_step", "_worker.end_step"])
def test_a_failure_at_the_begin_or_the_end_of_a_step_costs_the_cache_only(layered, prompt, path):
    engine, _ = layered([0, 1, 2])
    plant(engine.worker, path, 0)
    engine.ask("stored", prompt(300))
    assert engine.stats["serving{worker}"] == 0
    engine.run()
    engine.check_at_rest(planted_errors=True)


def test_engines_on_cpus_watch_no_layer(pega, prompt):
    with Engine(pega.address) as engine:
        engine.wait_ready()
        begun = []
        side = engine.worker._worker
        begin = side.begin_step
        side.begin_step = lambda plan: begun.append(begin(plan)) or begun[-1]
        engine.ask("stored", prompt(100))
        engine.run()
        assert begun
        assert set(begun) == {None}
