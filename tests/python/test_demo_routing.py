"""`./dev demo --routing`: its options, what its checks find, and its proxy of events. No server."""

from __future__ import annotations

import dataclasses
import html
from pathlib import Path

import pytest
import zmq

from demo.__main__ import _parse
from demo.chart import Event, Sample, svg_chart, text_chart
from demo.claims.routing import Arm, arm_table, beside_round_robin, goes_where_cache_is
from demo.client import Answer
from demo.routing_stage import ANSWER, FIRST, LEGEND, QUESTION, Counted, Reply, Turn
from tests.support.publishing_vllm import EventProxy


def test_routing_is_a_run_of_its_own() -> None:
    assert _parse(["--routing"]).routing
    assert not _parse([]).routing


@pytest.mark.parametrize(
    "other", [["--pd"], ["--nodes", "3"], ["--prove"], ["--ssd"], ["--sglang"]]
)
def test_routing_is_not_combined_with_another_setup(
    other: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _parse(["--routing", *other])
    assert "cannot be combined with" in capsys.readouterr().err


# ---- where turns go


def answer(*tokens: int, cached: int = 0) -> Answer:
    return Answer(tokens, -1.0, 0.1, 0.2, cached_tokens=cached)


def turn(number: int = 2) -> Turn:
    """Turn ``number`` of a conversation."""
    prompt = FIRST + (number - 1) * (QUESTION + ANSWER)
    history = prompt - QUESTION - 1 if number > 1 else 0
    return Turn(f"turn {number}", (5,) * prompt, history, answer(1, 2))


def reply(own: int, loaded: int = 0, pulled: int = 0, tokens: tuple[int, ...] = (1, 2)) -> Reply:
    counted = Counted((1, 0), own, loaded, pulled)
    return Reply(turn(), answer(*tokens, cached=own + loaded), counted)


#: Tokens of the full blocks of a second turn's history.
KNOWN = (FIRST + ANSWER - 1) // 32 * 32


def arm(*replies: Reply, policy: str = "kv-aware") -> Arm:
    return Arm(policy, [], list(replies), close=len(replies), reports=len(replies))


def test_a_history_has_the_blocks_that_the_turn_before_computed() -> None:
    assert turn(1).known == 0
    assert turn().known == KNOWN


@pytest.mark.parametrize(
    ("own", "stayed"), [(KNOWN, True), (KNOWN - 32, True), (KNOWN - 64, False)]
)
def test_the_engine_has_the_history_but_for_its_last_block(own: int, stayed: bool) -> None:
    assert reply(own).stayed == stayed


def test_the_engine_of_a_reply_is_the_one_that_counted_it() -> None:
    assert Reply(turn(), answer(1), Counted((0, 1))).engine == 1
    assert (Counted((3, 5), 9, 8, 7) - Counted((2, 5), 4, 8, 1)) == Counted((1, 0), 5, 0, 6)


def test_turns_that_find_their_history_are_right() -> None:
    claim = goes_where_cache_is(arm(reply(KNOWN), reply(KNOWN)))
    assert claim.held, claim.detail


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (reply(0, KNOWN), "the engine had 0 of the"),
        (reply(KNOWN, tokens=(1, 3)), "tokens differ from vLLM without the connector"),
        (
            dataclasses.replace(reply(KNOWN), answer=answer(1, 2, cached=0)),
            "0 cached tokens reported",
        ),
    ],
)
def test_a_turn_that_misses_its_history_or_its_answer_fails_the_claim(
    wrong: Reply, problem: str
) -> None:
    claim = goes_where_cache_is(arm(reply(KNOWN), wrong))
    assert not claim.held
    assert problem in claim.detail


def test_predictions_that_are_far_from_the_reports_fail_the_claim() -> None:
    made = arm(*[reply(KNOWN)] * 10)
    made.close = 9
    assert "9 of 10 reports" in goes_where_cache_is(made).detail
    made.close, made.reports = 9, 9
    assert "reports of cached tokens: 9, expected 10" in goes_where_cache_is(made).detail


def test_round_robin_has_to_be_worse() -> None:
    own, other = arm(reply(KNOWN), reply(KNOWN)), arm(reply(KNOWN), reply(0, KNOWN, pulled=9))
    assert beside_round_robin(own, other).held
    claim = beside_round_robin(own, own)
    assert not claim.held
    assert "round robin happened to keep every conversation" in claim.detail
    wrong = arm(reply(KNOWN), reply(0, KNOWN, pulled=9, tokens=(7, 7)))
    assert not beside_round_robin(own, wrong).held


def test_the_table_has_the_shares_of_each_policy() -> None:
    prompt = len(turn().prompt)
    made = arm(reply(prompt // 2, prompt // 4, pulled=3 << 20), policy="round-robin")
    line = arm_table([made]).splitlines()[2]
    assert line.split()[:10] == "round-robin 1 0 50 % 25 % 25 % 3.0".split()


def test_the_chart_names_the_two_caches() -> None:
    samples, events = [Sample(1, 0.25, 0.5)], [Event(0, "kv-aware")]
    text = text_chart(samples, events, legend=LEGEND)
    assert "# in the engine's own, + loaded from a node's pool" in text
    assert html.escape(LEGEND.lower) in svg_chart(samples, events, LEGEND)


# ---- the proxy


class Engine:
    """Publishes batches of one number each, at a Unix socket."""

    def __init__(self, context: zmq.Context, socket: Path) -> None:
        self.publisher = context.socket(zmq.XPUB)
        self.publisher.bind(f"ipc://{socket}")

    def wait_for_subscriber(self) -> None:
        assert self.publisher.poll(10_000)
        assert self.publisher.recv() == b"\x01"


def test_a_proxy_drops_batches_only_when_it_is_set_to(tmp_path: Path) -> None:
    socket = tmp_path / "events"
    context = zmq.Context()
    engine = Engine(context, socket)
    subscriber = context.socket(zmq.SUB)
    subscriber.rcvtimeo = 10_000
    try:
        with EventProxy(socket) as proxy:
            engine.wait_for_subscriber()
            subscriber.subscribe(b"")
            subscriber.connect(f"ipc://{socket}")
            number = 0
            # Until its subscription has arrived, batches reach no subscriber.
            while not subscriber.poll(10):
                number += 1
                engine.publisher.send_multipart([b"", bytes([number])])
            first = subscriber.recv_multipart()[1][0]
            for expected in range(first + 1, number + 1):
                assert subscriber.recv_multipart()[1] == bytes([expected])
            with proxy.dropping():
                passed = proxy.passed
                engine.publisher.send_multipart([b"", b"lost"])
                while not proxy.dropped:
                    assert not subscriber.poll(10)
            engine.publisher.send_multipart([b"", b"kept"])
            assert subscriber.recv_multipart()[1] == b"kept"
            assert proxy.dropped == 1
        assert proxy.passed == passed + 1
    finally:
        context.destroy(linger=0)
