"""The demo's expected numbers and its comparison, without any server."""

import math
import types
from pathlib import Path

import pytest

from demo.children import StartsChildren
from demo.claims.nodes import MIDDLE, Broken, pulled_differences
from demo.client import Answer
from demo.compare import (
    COMPUTED_TOLERANCE,
    WHOLE_PROMPT_TOLERANCE,
    computed_differences,
    differences,
)
from demo.expectations import full_blocks, local_hit_blocks, offered_blocks
from demo.nodes_stage import DemoNode, NodeCounters
from demo.pd_stage import loaded_tokens
from demo.progress import Progress
from demo.prompts import BLOCK_TOKENS, Prompt, PromptMaker
from demo.report import Checks, Spread
from tests.support.network import Node
from tests.support.vllm_server import PegaServer


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (31, 0), (32, 1), (500, 15), (512, 16), (3000, 93), (3008, 94)]
)
def test_only_full_blocks_are_stored(tokens: int, blocks: int) -> None:
    assert full_blocks(tokens, 32) == blocks


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 0), (32, 0), (33, 1), (500, 15), (512, 15)])
def test_a_local_hit_leaves_a_token_to_compute(tokens: int, blocks: int) -> None:
    assert local_hit_blocks(tokens, 32) == blocks


def test_a_whole_prompt_of_full_blocks_is_offered() -> None:
    assert offered_blocks(512, 32, stored_blocks=16) == 16


def test_a_prompt_is_offered_except_for_its_partial_block() -> None:
    assert offered_blocks(500, 32, stored_blocks=15) == 15


def test_only_the_stored_prefix_is_offered() -> None:
    assert offered_blocks(1000, 32, stored_blocks=24) == 24


def test_blocks_beyond_the_prompt_are_not_offered() -> None:
    assert offered_blocks(100, 32, stored_blocks=50) == 3


def test_blocks_that_the_engine_has_are_not_offered() -> None:
    assert offered_blocks(1000, 32, stored_blocks=31, local_blocks=10) == 21


@pytest.mark.parametrize(
    ("stored", "local", "offered"), [(0, 0, 0), (1, 0, 0), (2, 0, 2), (16, 15, 0)]
)
def test_a_single_block_is_not_worth_a_load(stored: int, local: int, offered: int) -> None:
    assert offered_blocks(512, 32, stored_blocks=stored, local_blocks=local) == offered


@pytest.mark.parametrize(("tokens", "loaded"), [(500, 499), (512, 512), (513, 512), (514, 513)])
def test_a_decode_engine_computes_one_token(tokens: int, loaded: int) -> None:
    assert loaded_tokens(Prompt("x", tuple(range(tokens)))) == loaded


def test_the_prompts_have_full_and_partial_blocks_and_share_prefixes() -> None:
    prompts = PromptMaker(seed=5, vocabulary=2048).prompt_set()

    lengths = {len(prompt) for prompt in prompts}
    assert {500, 512, 1000, 1024, 3000, 3008} <= lengths
    assert {length % BLOCK_TOKENS == 0 for length in lengths} == {True, False}
    assert all(0 < token < 2048 for prompt in prompts for token in prompt.tokens)
    for prompt in prompts:
        if prompt.shared_tokens:
            head = prompt.tokens[: prompt.shared_tokens]
            assert any(o.tokens[: len(head)] == head for o in prompts if o is not prompt)
            assert prompt.shared_tokens % BLOCK_TOKENS == 0
            assert offered_blocks(
                len(prompt), BLOCK_TOKENS, full_blocks(prompt.shared_tokens, BLOCK_TOKENS)
            )


def test_a_seed_repeats_its_prompts() -> None:
    one, same, other = (PromptMaker(seed, 2048).prompt_set() for seed in (5, 5, 6))
    assert one == same
    assert one != other


def answer(*tokens: int, logprob: float = -4.0) -> Answer:
    return Answer(tokens, logprob, ttft_s=0.1, total_s=0.2)


def test_equal_answers_have_no_differences() -> None:
    assert differences(answer(1, 2), answer(1, 2), answer(1, 2)) == []


def test_a_wrong_token_is_detected_against_either() -> None:
    assert len(differences(answer(1, 9), answer(1, 2), answer(1, 2))) == 2
    assert len(differences(answer(1, 9), None, answer(1, 2))) == 1


def test_the_local_hit_must_be_equal_to_the_last_bit() -> None:
    shifted = math.nextafter(-4.0, 0.0)
    assert differences(answer(1, logprob=shifted), answer(1), answer(1))


def test_a_whole_prompt_may_differ_in_its_last_bits_only() -> None:
    near, far = -4.0 + WHOLE_PROMPT_TOLERANCE / 2, -4.0 + WHOLE_PROMPT_TOLERANCE * 2
    assert not differences(answer(1, logprob=near), answer(1), answer(1), whole_prompt=True)
    assert differences(answer(1, logprob=far), answer(1), answer(1), whole_prompt=True)


def test_another_engine_may_round_differently_within_the_tolerance() -> None:
    inside, outside = -4.0 + COMPUTED_TOLERANCE / 2, -4.0 + COMPUTED_TOLERANCE * 2
    assert not computed_differences(answer(1, logprob=inside), answer(1))
    assert computed_differences(answer(1, logprob=outside), answer(1))


def test_a_shorter_answer_is_compared_up_to_its_end() -> None:
    assert not computed_differences(answer(1), answer(1, 2))
    assert computed_differences(answer(3), answer(1, 2))


def test_a_claim_without_a_check_does_not_hold() -> None:
    assert not Checks().claim("x", "").held


def test_one_failed_check_fails_the_claim_and_gives_the_reason() -> None:
    checks = Checks()
    checks.equal("blocks", 3, 3)
    assert checks.claim("x", "fine").detail == "fine"

    checks.equal("blocks", 3, 4)

    claim = checks.claim("x", "fine")
    assert not claim.held
    assert claim.detail == "blocks: 3, expected 4"


def test_a_spread_shows_median_and_range() -> None:
    assert str(Spread((3.0, 1.0, 2.0))) == "2.00 s (1.00 to 3.00)"


PAGE = 1 << 17


def demo_node(name: str) -> DemoNode:
    return DemoNode(Node(name, 1), PegaServer(Path("server"), Path("directory")))


def pulled(**changes: int) -> list[str]:
    """The problems if B read 31 blocks of A, with ``changes`` of B's counts."""
    right = {"fetched_blocks": 31, "fetched_bytes": 31 * PAGE}
    counted = {
        "a": NodeCounters(lent_bytes=31 * PAGE),
        "b": NodeCounters(**(right | changes)),
        "c": NodeCounters(questions=2),
    }
    return pulled_differences(counted, demo_node("b"), demo_node("a"), 31, PAGE)


def test_a_pull_is_counted_by_the_reader_and_the_owner() -> None:
    assert pulled() == []
    assert pulled(fetched_blocks=30)
    assert pulled(fetched_bytes=31 * PAGE - 1)
    assert pulled(given_up_blocks=1)
    assert pulled(lent_bytes=PAGE) == [f"node B lent {PAGE} bytes"]


def test_a_node_without_an_engine_counts_the_blocks_that_it_lent() -> None:
    earlier, later = NodeCounters(lent_bytes=3), NodeCounters(lent_bytes=10, questions=4)
    assert later - earlier == NodeCounters(lent_bytes=7, questions=4)


@pytest.mark.parametrize(
    ("share", "whole", "failures"),
    [(0.5, 64, 0), (MIDDLE[0] / 2, 0, 1), (1.0, 64, 1), (0.5, 93, 1)],
)
def test_a_break_must_happen_in_the_middle(share: float, whole: int, failures: int) -> None:
    checks = Checks()
    stage = types.SimpleNamespace(baseline={"x": answer(1, 2)})
    Broken(answer(1, 2), share, whole, {}).check(checks, stage, Prompt("x", (5,) * 3000))
    assert len(checks.failures) == failures


def test_a_wrong_answer_after_a_break_is_detected() -> None:
    checks = Checks()
    stage = types.SimpleNamespace(baseline={"x": answer(1, 2)})
    Broken(answer(1, 3), 0.5, 0, {}).check(checks, stage, Prompt("x", (5,) * 3000))
    assert len(checks.failures) == 1


class NotedStage(StartsChildren):
    """Records the calls for its children, which do not exist."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.noted: list[str] = []

    def diagnose(self) -> None:
        self.noted.append("diagnose")

    def child(self, name: str, starts: bool = True) -> types.SimpleNamespace:
        def start() -> None:
            self.noted.append(f"start {name}")
            if not starts:
                raise RuntimeError(name)

        return types.SimpleNamespace(
            log_file=Path(f"{name}.log"),
            start=start,
            stop=lambda: self.noted.append(f"stop {name}"),
        )


def test_a_stage_stops_its_processes_in_reverse_order() -> None:
    stage = NotedStage()
    with stage.running(stage.child("a"), stage.child("b")):
        stage.noted.append("work")
    assert stage.noted == ["start a", "start b", "work", "stop b", "stop a"]


def test_a_stage_collects_errors_of_its_servers_before_it_stops_them() -> None:
    stage = NotedStage()
    with (
        pytest.raises(RuntimeError),
        stage.running(stage.child("a"), stage.child("b", starts=False), stage.child("c")),
    ):
        pytest.fail("b did not start")
    assert stage.noted == ["start a", "start b", "diagnose", "stop b", "stop a"]

    stage = NotedStage()
    with pytest.raises(ZeroDivisionError), stage.running(stage.child("a")):
        _ = 1 / 0
    assert stage.noted == ["start a", "diagnose", "stop a"]
