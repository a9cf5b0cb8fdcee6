"""An engine of several ranks while the server or one of its ranks is stopped."""

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.python.conftest import server_binary
from tests.python.harness import BLOCK, Engine
from tests.python.test_connector_faults import (
    wait_for_zero,
    when_load_is_ordered,
    when_save_is_ordered,
)
from tests.support.vllm_server import PegaServer
from tests.support.waiting import wait_until

#: The time of the fault: far above every deadline, so that each has passed.
STANDSTILL_S = 3.0
#: Shorter than that, and long enough for a busy machine to load.
LIMITS = {
    "pegaflow.lookup_deadline_ms": 2000,
    "pegaflow.open_deadline_ms": 2000,
    "pegaflow.reserve_deadline_ms": 2000,
    "pegaflow.claim_limit_ms": 2000,
    "pegaflow.load_patience_ms": 250,
}


def engine(address: str, **options: Any) -> Engine:
    return Engine(address, tensor_parallel_size=2, distributed_executor_backend="mp", **options)


@contextmanager
def standing_still(pid: int) -> Iterator[Callable[[], None]]:
    """A function that stops the process with all its threads for STANDSTILL_S, from now on."""
    go_on = threading.Timer(STANDSTILL_S, os.kill, (pid, signal.SIGCONT))

    def stop() -> None:
        os.kill(pid, signal.SIGSTOP)
        go_on.start()

    try:
        yield stop
    finally:
        if go_on.is_alive():
            go_on.join()


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("ordered", [when_load_is_ordered, when_save_is_ordered])
def test_a_rank_that_is_stopped_for_3_seconds_costs_no_answer(own_pega, prompt, slow, ordered):
    tokens, cold = prompt(300), prompt(200)
    with engine(own_pega.address) as made:
        made.wait_ready()
        made.ask("stored", tokens)
        made.reset_local()
    with engine(own_pega.address, extra=LIMITS) as made:
        made.wait_ready()
        with standing_still(made.ranks[slow].pid) as stop:
            started = time.monotonic()
            ordered(made, stop)
            made.add("again", tokens, 20)
            made.add("cold", cold, 20)
            made.run()
            assert time.monotonic() - started >= STANDSTILL_S, "it was never stopped"
        made.answers["again"].check()
        made.answers["cold"].check()
        wait_until(lambda: set(made.states()) == {"ready"}, "the links are not back")
        made.run()
        made.check_at_rest()
    wait_for_zero(own_pega, "pegaflow_claims", "pegaflow_pins", "pegaflow_reservations")
    # Whatever was stored meanwhile, loaded blocks are right.
    with engine(own_pega.address) as made:
        made.wait_ready()
        assert made.ask("stored", tokens, 20).loaded == 288
        made.ask("cold", cold, 20)
        made.reset_local()
        assert made.ask("cold again", cold, 20).loaded == 192
        made.run()
        made.check_at_rest()


@pytest.mark.parametrize("ordered", [when_load_is_ordered, when_save_is_ordered])
def test_a_server_that_stops_under_two_ranks_costs_their_deadlines(own_pega, prompt, ordered):
    tokens = prompt(300)
    with engine(own_pega.address) as made:
        made.wait_ready()
        made.ask("stored", tokens)
        made.run()
    stops = []

    def stop() -> None:
        os.kill(own_pega.pid, signal.SIGSTOP)
        stops.append(1)

    with engine(own_pega.address, extra=LIMITS) as made:
        made.wait_ready()
        ordered(made, stop)
        made.add("again", tokens, 20)
        made.add("cold", prompt(200), 20)
        try:
            made.run()
        finally:
            os.kill(own_pega.pid, signal.SIGCONT)
        assert stops
        made.answers["again"].check()
        made.answers["cold"].check()
        wait_until(lambda: set(made.states()) == {"ready"}, "the links are not back")
        made.run()
        made.check_at_rest()
    wait_for_zero(own_pega, "pegaflow_claims", "pegaflow_pins", "pegaflow_reservations")


def test_two_ranks_start_and_serve_without_a_server_and_use_a_later_one(short_path, prompt):
    tokens = prompt(300)
    server = PegaServer(server_binary(), short_path / "for-ranks", pool_size="64mb")
    with engine(server.address) as made:
        made.ask("before", tokens, 20)
        assert made.stats["saves"] == 0
        with server:
            made.wait_ready()
            made.reset_local()
            made.ask("computed", tokens)
            made.reset_local()
            assert made.ask("after", tokens).loaded == 288
            made.run()
            made.check_at_rest()


# ---- instances that return


def instances(server: PegaServer) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"http://{server.http}/instances", timeout=10) as answer:
        return json.loads(answer.read())["instances"]


def test_an_instance_returns_while_a_rank_of_its_former_process_still_runs(own_pega, prompt):
    tokens = prompt(300)
    name: dict[str, Any] = {"transfer": {"engine_id": "one"}}
    former = engine(own_pega.address, **name)
    former.wait_ready()
    former.ask("stored", tokens)
    former.run()
    former.ranks[1].kill()

    with engine(own_pega.address, **name) as again:
        # The server has two ranks of this instance: one of either incarnation.
        again.wait_states({"ready", "refused"})
        assert again.states() == ("ready", "refused", "ready")
        again.ask("short", prompt(10))  # the scheduler learns of it with its step
        assert again.ask("x", tokens, 20).loaded == 0
        assert again.stats["loads"] == again.stats["saves"] == 0
        again.reset_local()

        former.close()
        again.wait_states({"ready"}, 60)
        again.ask("also short", prompt(10))
        assert again.ask("y", tokens, 20).loaded == 288
        again.run()
        again.check_at_rest()
        (only,) = instances(own_pega)
        assert (only["instance"], only["state"], len(only["ranks"])) == ("one", "connected", 2)
    wait_for_zero(own_pega, "pegaflow_claims", "pegaflow_pins", "pegaflow_reservations")


def test_data_parallel_engines_of_two_ranks_share_blocks_and_one_dies(own_pega, prompt):
    tokens = prompt(300)
    made = [
        engine(own_pega.address, transfer={"engine_id": "replica"}, data_parallel=(index, 2))
        for index in range(2)
    ]
    for one in made:
        one.wait_ready()
    made[0].ask("x", tokens)
    made[0].run()
    assert sorted(one["instance"] for one in instances(own_pega)) == [
        "replica-dp0",
        "replica-dp1",
    ]
    made[0].ranks[0].kill()
    made[0].close()

    assert made[1].ask("x", tokens).loaded == 288
    made[1].run()
    made[1].check_at_rest()
    made[1].close()
    wait_for_zero(own_pega, "pegaflow_claims", "pegaflow_pins")
    assert own_pega.metrics().total("pegaflow_cache_block_insertions_total") == 303 // BLOCK
