"""KV events: the view of a router that subscribes to vLLM's own publisher, and the true state.

vLLM's real scheduler, publisher and event types, the real connector and a real server.
"""

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config.kv_events import KVEventsConfig

from pegaflow import _native
from pegaflow.vllm import events as block_events
from tests.python.harness import PATIENT, Engine
from tests.support.event_consumer import EventConsumer, consumer
from tests.support.waiting import wait_until

KINDS = {
    "plain": {},
    "asynchronous": {"asynchronous": True},
    "v2_asynchronous": {"v2_runner": True, "asynchronous": True},
    "old_release": {"old_release": True, "aggregate": True},
    "two_ranks": {"tensor_parallel_size": 2},
    "replicas": {"tensor_parallel_size": 2, "mla": True},
}


DEADLINES = ("reserve", "connect", "open", "lookup")


class Listened:
    """An engine, and a consumer of its events."""

    def __init__(self, engine: Engine, router: EventConsumer) -> None:
        self.engine = engine
        self.router = router
        self._pokes = 0

    def read(self) -> EventConsumer:
        """The blocks that the router lists once the engine is idle."""
        self.engine.run()
        self.engine.scheduler.kv_event_publisher._event_queue.join()
        return self.router.read()

    def listen(self) -> None:
        """Waits until the engine reads the server's journal, as from its first request on.

        Blocks that it finds saved before that are reported with their next request only.
        """
        events = self.engine.connector._scheduler.events
        events.listen()

        def has_begun() -> bool:
            assert events.take() == []
            return events._position != _native.JOURNAL_END

        wait_until(has_begun, "the engine does not read the journal")

    def believed(self) -> set[bytes]:
        return set(self.read().blocks["CPU"])

    def keys(self, tokens: list[int]) -> list[bytes]:
        return [bytes(key) for key in self.engine.hashes(tokens)]

    def there(self, keys: list[bytes]) -> set[bytes]:
        """The blocks among these that the server has, each by itself."""
        session = self.engine.connector._scheduler._session
        tickets = {key: session.lookup(key, len(key)) for key in keys}
        return {key for key, ticket in tickets.items() if session.take(ticket, 30.0)[0] == 1}

    def poke(self) -> None:
        """A step with work, so that vLLM calls its connector."""
        self._pokes += 1
        self.engine.ask(f"poke-{self._pokes}", [1 + self._pokes % 900] * 3, 1)

    def poke_until(self, condition: Any) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if condition():
                return
            self.poke()
        raise AssertionError(f"not reached: the router lists {len(self.believed())} blocks")


@contextlib.contextmanager
def listened(pega: Any, directory: Path, name: str = "e", **options: Any) -> Iterator[Listened]:
    with consumer(directory, name) as (config, connect):
        options["kv_events_config"] = KVEventsConfig(**config)
        with Engine(pega.address, **options) as engine:
            engine.wait_ready()
            yield Listened(engine, connect())
            engine.run()
            engine.check_at_rest()


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


@pytest.mark.parametrize("kind", KINDS)
def test_saved_blocks_are_reported_once_and_in_vllms_form(kind, pega, short_path, prompt):
    with listened(pega, short_path, kind, **KINDS[kind]) as one:
        tokens = prompt(500)
        one.engine.ask("plain", tokens, 40)
        one.engine.ask("again", tokens, 40)
        one.engine.ask("salted", tokens, 2, salt="tenant")
        one.engine.ask("adapted", tokens, 2, lora="style")

        router = one.read()

        # The consumer has compared tokens, parents, extra keys and LoRA with vLLM's own events.
        assert len(router.blocks["GPU"]) == len(router.blocks["CPU"]) == 33 + 31 + 31
        assert router.blocks["CPU"] == router.blocks["GPU"]
        one.poke()  # vLLM takes a step's counts before its events
        assert one.engine.stats["event_stored_blocks"] == 95
        assert one.engine.stats["event_removed_blocks"] == 0
        live = router.live()
        assert all(router.batches[number] == payload for number, payload in live.items())


def test_integers_are_the_low_64_bits(pega, short_path, prompt, monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    with listened(pega, short_path, "int") as one:
        tokens = prompt(100)
        one.engine.ask("a", tokens)
        low = {int.from_bytes(key[-8:], "big") for key in one.keys(tokens)}
        assert set(one.read().blocks["CPU"]) == low


@pytest.mark.pool_size("1mb")
def test_evicted_blocks_are_reported_as_removed(own_pega, short_path, prompt):
    with listened(own_pega, short_path, "evict") as one:
        prompts = [prompt(500) for _ in range(12)]  # 372 blocks, of which some 80 fit
        for number, tokens in enumerate(prompts):
            one.engine.ask(f"a{number}", tokens, 1)
        everything = [key for tokens in prompts for key in one.keys(tokens)]
        one.poke_until(lambda: one.believed() == one.there(everything))

        assert own_pega.metrics().total("pegaflow_cache_block_evictions_total") > 200
        assert 20 < len(one.believed()) < 100


def test_a_restarted_engine_reports_the_blocks_that_it_finds(pega, short_path, prompt):
    tokens = prompt(300)
    with listened(pega, short_path, "former") as one:
        one.engine.ask("a", tokens)
    with listened(pega, short_path, "heir") as heir:
        assert heir.engine.ask("a", tokens).loaded == 288
        assert heir.believed() == set(heir.keys(tokens))
        assert heir.read().blocks["CPU"] == heir.read().blocks["GPU"]


def test_blocks_that_another_engine_stored_are_also_reported_by_the_engine_that_computed_them(
    pega, short_path, prompt
):
    tokens = prompt(300)
    options = {"extra": PATIENT | {"pegaflow.mode": "save_only"}}
    with (
        listened(pega, short_path, "one") as one,
        listened(pega, short_path, "two", process=True, **options) as two,
    ):
        two.listen()
        one.engine.ask("a", tokens)
        two.engine.ask("a", tokens)
        two.engine.run()
        assert two.engine.stats["save_skipped_blocks"] == 18
        keys = set(one.keys(tokens))
        two.poke_until(lambda: keys <= two.believed())
        assert one.believed() == keys


def test_after_a_reset_every_engine_reports_all_blocks_as_removed(pega, short_path, prompt):
    tokens, after = prompt(300), prompt(200)
    with (
        listened(pega, short_path, "one") as one,
        listened(pega, short_path, "two", process=True) as two,
    ):
        one.engine.ask("a", tokens)
        assert two.engine.ask("a", tokens).loaded == 288
        assert len(two.believed()) == 18

        one.engine.run()
        assert one.engine.scheduler.reset_prefix_cache(reset_connector=True)
        one.engine.ask("b", after)
        two.poke_until(lambda: not two.believed())

        assert one.believed() == one.there(one.keys(tokens) + one.keys(after))
        assert one.believed() == set(one.keys(after))
        two.poke()
        assert two.engine.stats["event_take_backs"] == 1


def test_after_vllm_emptied_its_own_cache_blocks_are_reported_again_when_used(
    pega, short_path, prompt
):
    with listened(pega, short_path) as one:
        first, second = prompt(300), prompt(200)
        one.engine.ask("a", first)
        one.engine.ask("b", second)
        assert len(one.believed()) == 18 + 12
        one.engine.reset_local()
        # A router forgets all media with AllBlocksCleared.
        assert one.engine.ask("c", first).loaded == 288
        assert one.believed() == set(one.keys(first))
        one.engine.ask("d", second)
        assert one.believed() == set(one.keys(first)) | set(one.keys(second))


def test_a_cleanup_is_reported(own_pega, short_path, prompt):
    with listened(own_pega, short_path, "clean") as one:
        one.engine.ask("a", prompt(300))
        assert len(one.believed()) == 18
        assert own_pega.post("/cache/memory/cleanup")[0] == 200
        one.poke_until(lambda: not one.believed())


def test_a_restarted_server_has_no_block(own_pega, short_path, prompt):
    with listened(own_pega, short_path, "restart") as one:
        tokens = prompt(300)
        one.engine.ask("a", tokens)
        assert len(one.believed()) == 18
        own_pega.kill()
        own_pega.start()
        one.engine.wait_ready(60)
        one.poke_until(lambda: not one.believed())
        one.engine.reset_local()
        one.engine.ask("again", tokens)
        one.poke_until(lambda: one.believed() == set(one.keys(tokens)))
        assert one.believed() == one.there(one.keys(tokens))


def test_a_server_that_does_not_return_has_no_block(own_pega, short_path, prompt, monkeypatch):
    monkeypatch.setattr(block_events, "UNREACHABLE_S", 0.2)
    with listened(own_pega, short_path, "gone") as one:
        one.engine.ask("a", prompt(300))
        assert len(one.believed()) == 18
        own_pega.kill()
        one.poke_until(lambda: not one.believed())


def test_a_failed_connector_withdraws_its_reports(pega, short_path, prompt, monkeypatch):
    with consumer(short_path, "failed") as (config, connect):
        with Engine(pega.address, kv_events_config=KVEventsConfig(**config)) as engine:
            engine.wait_ready()
            one = Listened(engine, connect())
            engine.ask("a", prompt(300))
            assert len(one.believed()) == 18

            def broken(output: Any) -> None:
                raise RuntimeError("planted")

            monkeypatch.setattr(engine.connector._scheduler, "plan", broken)
            one.poke()
            assert not one.believed()
            engine.check_at_rest(planted_errors=True)


def test_an_engine_that_falls_behind_withdraws_its_reports(own_pega, short_path, prompt):
    """Another namespace fills the journal while this engine takes no step."""
    with listened(own_pega, short_path, "slow") as one:
        tokens = prompt(300)
        one.engine.ask("a", tokens)
        assert len(one.believed()) == 18
        with noise(str(own_pega.socket)) as save:
            for _ in range(20):  # with 8,192 blocks each, all of which are saved and most evicted
                save()
        one.poke_until(lambda: not one.believed())
        one.poke()
        assert one.engine.stats["event_take_backs"] == 1
        # Then it continues from there.
        one.engine.reset_local()
        one.engine.ask("again", tokens)
        one.poke_until(lambda: one.believed() == one.there(one.keys(tokens)))


@contextlib.contextmanager
def noise(socket: str) -> Iterator[Any]:
    """An engine with blocks of 4 KiB; yields a function that saves one job of new ones."""
    import select

    import numpy

    count = _native.MAX_KEYS
    memory = numpy.zeros(count * 4096, dtype=numpy.uint8)
    segment = (memory.ctypes.data, 4096, 4096)
    mover = _native.Mover(
        socket, "noise", _native.HostDevice(1), [segment], count, [("model", "noise")],
        **dict.fromkeys([f"{name}_deadline" for name in DEADLINES], 20.0),
    )  # fmt: skip
    scheduler = _native.random_id()
    jobs = 0

    def save() -> None:
        nonlocal jobs
        jobs += 1
        keys = numpy.random.default_rng(jobs).bytes(count * 16)
        mover.save(scheduler, jobs, keys, 16, range(count))
        ready, _, _ = select.select([mover.finished_fd()], [], [], 60)
        assert ready
        (done,) = mover.take_finished()
        assert done.blocks == count, done

    assert mover.wait_ready(60)
    try:
        yield save
    finally:
        mover.close()


def test_without_events_the_journal_is_not_requested(own_pega, short_path, prompt):
    with Engine(own_pega.address) as engine:
        engine.wait_ready()
        engine.ask("a", prompt(300))
        engine.run()
        assert engine.connector._scheduler.events is None
    calls = own_pega.metrics().total("pegaflow_rpc_requests_total", method="journal")
    assert calls == 0


@pytest.mark.pool_size("2mb")
def test_random_requests_of_two_engines(own_pega, short_path, seed):
    """Prompts that share beginnings, a pool that is too small, resets and cleanups."""
    random_ = random.Random(seed)
    roots = [
        [random_.randrange(10, 1000) for _ in range(random_.randrange(50, 400))] for _ in "abc"
    ]
    asked: dict[tuple[int, ...], None] = {}
    with (
        listened(own_pega, short_path, "r1") as one,
        listened(own_pega, short_path, "r2", process=True, asynchronous=True) as two,
    ):
        pair = [one, two]
        for number in range(30):
            which = random_.choice(pair)
            for i in range(random_.randrange(1, 4)):
                root = random_.choice(roots)
                tokens = root[: random_.randrange(40, len(root) + 1)]
                tokens = tokens + [random_.randrange(10, 1000)] * random_.randrange(0, 200)
                asked[tuple(tokens)] = None
                which.engine.add(f"{number}-{i}", tokens, random_.randrange(1, 5))
            if random_.random() < 0.2:
                which.engine.abort(f"{number}-0")
            which.engine.run()
            if random_.random() < 0.2:
                which.engine.reset_local()
            if random_.random() < 0.05:
                which.engine.run()
                assert which.engine.scheduler.reset_prefix_cache(reset_connector=True)
        everything = sorted({key for tokens in asked for key in one.keys(list(tokens))})

        for which in pair:

            def agreed(which: Listened = which) -> bool:
                return which.believed() & set(everything) <= which.there(everything)

            which.poke_until(agreed)
        assert one.believed() | two.believed()
