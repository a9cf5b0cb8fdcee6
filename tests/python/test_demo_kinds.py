"""`./dev demo --model` and `--draft`: their options, and what their checks find. No server."""

import dataclasses
import importlib.metadata
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

from demo.__main__ import _parse
from demo.claims.kinds import Sums, check_prompt
from demo.client import Answer
from demo.compare import BFLOAT16_BOUND, forced_differences, largest_shift
from demo.expectations import DRAFTED_LAYERS, MODEL_LAYERS, Expected, ExpectedCache, Layers
from demo.kinds_stage import INTERVAL, Counted, KindsStage
from demo.progress import Progress
from demo.prompts import Prompt, PromptMaker
from demo.report import Checks
from demo.stage import kill_in_a_load
from demo.subjects import DRAFTS, MODELS, Subject
from tests.support import granite_on_cpu

# ---- options


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_chosen_by_name(name):
    assert _parse(["--model", name]).model == name


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_method_is_chosen_by_name(name):
    assert _parse(["--draft", name]).draft == name


def test_without_an_option_the_demo_is_that_of_one_kind():
    options = _parse([])
    assert (options.model, options.draft) == (None, None)


@pytest.mark.parametrize("other", [["--pd"], ["--nodes", "3"], ["--prove"], ["--tp", "2"]])
@pytest.mark.parametrize("chosen", [["--model", "gemma3"], ["--draft", "eagle"]])
def test_other_parts_of_the_demo_are_runs_of_their_own(chosen, other, capsys):
    with pytest.raises(SystemExit):
        _parse([*chosen, *other])
    assert f"{chosen[0]} cannot be combined with" in capsys.readouterr().err


def test_a_model_and_a_draft_are_two_runs(capsys):
    with pytest.raises(SystemExit):
        _parse(["--model", "gemma3", "--draft", "ngram"])
    assert "--model and --draft are two runs" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--model", "--draft"])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(option, capsys):
    with pytest.raises(SystemExit):
        _parse([option, "gpt-2"])
    assert "invalid choice: 'gpt-2' (choose from" in capsys.readouterr().err


def test_each_hybrid_family_is_demonstrated():
    assert MODEL_LAYERS.keys() == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_the_type_of_states_is_the_same_on_each_machine(name):
    has_states = any(one.name == "state" for one in MODELS[name].layers)
    stated = "--mamba-ssm-cache-dtype float32" in " ".join(MODELS[name].arguments())
    assert stated == has_states


def test_a_changed_vllm_is_stated_before_the_claims(tmp_path):
    for subject in (*MODELS.values(), *DRAFTS.values()):
        assert bool(subject.plugin) == bool(subject.change)
    stage = Replay(MODELS["granite"], servers_of(MODELS["granite"]))
    stage.figures = {}
    assert stage.describe().endswith("the CPU build cannot keep states inside of a chunk")
    assert stage.figures["change_to_vllm"] == MODELS["granite"].change


def test_the_change_for_granite_is_a_plugin_that_vllm_finds(tmp_path):
    path = MODELS["granite"].plugin(tmp_path / "plugin")
    (found,) = importlib.metadata.distributions(path=[str(path[0])])
    (entry,) = found.entry_points
    assert entry.group == "vllm.general_plugins"
    assert entry.load() is granite_on_cpu.patch


def test_a_draft_by_n_grams_has_prompts_to_draft_from():
    subject = DRAFTS["ngram"]
    made = subject.prompt(PromptMaker(1, 2048), 500)
    assert len(made) == 500
    assert made[40:80] == made[:40]
    other = MODELS["gemma3"].prompt(PromptMaker(1, 2048), 500)
    assert other[40:80] != other[:40]


def test_no_block_ends_with_an_answer_that_was_drafted():
    subject = DRAFTS["ngram"]
    stage = Replay(subject, servers_of(subject))
    stage.maker = PromptMaker(1, 2048)
    assert len(stage.prompt("x", (5,) * 640, 32)) == 641
    assert len(stage.prompt("x", (5,) * 641, 32)) == 641
    stage.subject = MODELS["gemma3"]
    assert len(stage.prompt("x", (5,) * 640, 32)) == 640


# ---- the calculator with drafts that have KV


def drafted(length: int, tokens: int = 1) -> tuple[int, int]:
    """Tokens that are loaded when a prompt is asked again, and blocks that it stores before."""
    cache = ExpectedCache(DRAFTED_LAYERS, 0, 64, last_block_is_proof=True)
    prompt = tuple(range(length))
    stored = cache.ask(prompt, range(tokens)).stored_blocks["full"]
    again = cache.ask(prompt, range(tokens))
    assert again.stored_blocks == {"full": 0}
    return again.loaded_tokens, stored


@pytest.mark.parametrize(
    ("length", "loaded", "stored"),
    [(31, 0, 0), (95, 0, 2), (100, 64, 3), (200, 160, 6), (512, 480, 16)],
)
def test_the_last_block_of_a_drafted_prompt_is_not_loaded(length, loaded, stored):
    assert drafted(length) == (loaded, stored)


def test_the_last_block_is_the_last_of_the_whole_hit():
    cache = ExpectedCache(DRAFTED_LAYERS, 0, 64, last_block_is_proof=True)
    prompt = tuple(range(200))
    cache.ask(prompt, range(1000, 1040))
    turn = prompt + tuple(range(1000, 1040)) + (5,) * 60
    # 239 tokens were computed: 7 blocks.
    assert cache.ask(turn, [1]).loaded_tokens == 6 * 32


# ---- a planted mistake in the calculator is found


class Replay(KindsStage):
    """A stage whose servers are another calculator's counts and the baseline's answers."""

    def __init__(self, subject: Subject, servers: ExpectedCache) -> None:
        self.subject = subject
        self.progress = Progress()
        self.servers = servers
        self.expected = self._empty_cache()
        self.page_bytes = {one.name: 1000 for one in subject.layers}
        self.baseline: dict[str, Answer] = {}

    def ask_counted(self, tokens, length, *, is_foreign=False):
        answer = self.baseline["x"].after(len(tokens) - 1400)
        counts = self._wanted(self.servers.ask(tokens, answer.tokens), is_foreign=is_foreign)
        wanted = self._wanted(self.expected.ask(tokens, answer.tokens), is_foreign=is_foreign)
        return answer, Counted(counts, wanted)


def answer_of(*tokens: int) -> Answer:
    logprobs = (-2.0,) * len(tokens)
    others = tuple({token: -2.0, 9: -2.05, 8: -3.0} for token in tokens)
    return Answer(tokens, -2.0, 0.1, 0.2, logprobs, others)


def problems(subject: Subject, servers: ExpectedCache) -> list[str]:
    """What is found when a prompt is asked twice of servers that count like another calculator."""
    stage, checks = Replay(subject, servers), Checks()
    stage.baseline["x"] = answer_of(*[7] * 32)
    prompt = Prompt("x", PromptMaker(1, 2048).tokens(1400))
    for _ in range(2):
        check_prompt(stage, checks, checks, Sums(), prompt)
    assert checks.count == 4
    return checks.failures


def servers_of(subject: Subject, **changes: object) -> ExpectedCache:
    layers = [dataclasses.replace(one, **changes) if one.reach else one for one in subject.layers]
    least = max(subject.grid, 64)
    return ExpectedCache(layers, INTERVAL, least, last_block_is_proof=subject.drafts_have_kv)


@pytest.mark.parametrize("subject", [*MODELS.values(), *DRAFTS.values()], ids=lambda one: one.name)
def test_equal_counts_have_no_differences(subject):
    assert problems(subject, servers_of(subject)) == []


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "mistral-window"])
@pytest.mark.parametrize("reach", [96, 160])
def test_a_window_of_another_length_is_found(name, reach):
    found = problems(MODELS[name], servers_of(MODELS[name], reach=reach))
    assert any("(window)" in line for line in found)
    assert not any("(full)" in line for line in found)


class ForgetsStates(ExpectedCache):
    def _store(self, prompt, written, hit):
        super()._store(prompt, written, hit)
        self._stored["state"].clear()


def test_a_state_that_is_not_kept_is_found():
    subject = MODELS["qwen3-next"]
    cold, again = problems(subject, ForgetsStates(subject.layers, INTERVAL, 256))
    assert "blocks stored, by the server (state): 0, expected 1" in cold
    assert "tokens from the cache: 0, expected 1280" in again


class LoadsTheProof(ExpectedCache):
    def _hit(self, prompt):
        hit = super()._hit(prompt)
        return hit + 32 if hit else 0


def test_a_load_of_the_block_that_only_proves_a_draft_is_found():
    subject = DRAFTS["eagle"]
    wrong = LoadsTheProof(subject.layers, INTERVAL, 64, last_block_is_proof=True)
    (again,) = problems(subject, wrong)
    assert "tokens from the cache: 1376, expected 1344" in again


def test_a_request_without_a_hit_loads_nothing_of_any_kind():
    subject = MODELS["gemma3"]
    stage = Replay(subject, servers_of(subject))
    expected = Expected(0, {"full": 0, "window": 0}, {"full": 3, "window": 4})
    wanted = stage._wanted(expected, is_foreign=True)
    assert wanted["blocks of another process"] == 0
    assert {name: count for name, count in wanted.items() if count} == {
        "blocks stored, by vLLM (full)": 3,
        "blocks stored, by the server (full)": 3,
        "bytes stored (full)": 3000,
        "blocks stored, by vLLM (window)": 4,
        "blocks stored, by the server (window)": 4,
        "bytes stored (window)": 4000,
    }


def test_blocks_of_another_process_are_those_that_are_loaded():
    subject = MODELS["gemma3"]
    stage = Replay(subject, servers_of(subject))
    wanted = stage._wanted(
        Expected(96, {"full": 3, "window": 3}, {"full": 0, "window": 0}), is_foreign=True
    )
    assert wanted["blocks of another process"] == 6


# ---- answers under teacher forcing


def test_equal_answers_are_right():
    assert forced_differences(answer_of(1, 2, 3), answer_of(1, 2, 3), 0.1) == ([], None)


def test_a_shorter_answer_is_compared_to_its_end():
    assert forced_differences(answer_of(1, 2), answer_of(1, 2, 3), 0.1) == ([], None)


def test_another_token_that_is_as_probable_is_right_and_its_place_is_returned():
    assert forced_differences(answer_of(1, 2, 3), answer_of(1, 9, 3), 0.1) == ([], 1)


def test_another_token_that_is_less_probable_is_an_error():
    found, place = forced_differences(answer_of(1, 2, 3), answer_of(1, 8, 3), 0.1)
    assert len(found) == 1
    assert "the log-probability of token 2 is -1.00e+00 off" in found[0]
    assert place == 1


def test_a_token_that_is_not_among_the_most_probable_is_an_error():
    found, place = forced_differences(answer_of(1, 2, 3), answer_of(1, 77, 3), 0.1)
    assert found == [
        "token 77 of vLLM without the connector is not among the 3 most probable at place 2"
    ]
    assert place == 1


@pytest.mark.parametrize(("shift", "errors"), [(0.05, 0), (0.2, 3), (-0.2, 3)])
def test_each_token_has_the_log_probability_of_the_baseline_within_the_bound(shift, errors):
    right = answer_of(1, 2, 3)
    other = dataclasses.replace(right, logprobs=tuple(one + shift for one in right.logprobs))
    assert len(forced_differences(right, other, BFLOAT16_BOUND)[0]) == errors


@pytest.mark.parametrize("name", ["qwen3-next", "granite"])
def test_a_prompt_ends_a_token_behind_the_state_that_is_loaded_for_it(name):
    subject = MODELS[name]
    prompt = PromptMaker(1, 2048).tokens(subject.lengths[0])
    servers = servers_of(subject)
    servers.ask(prompt, [7] * 32)
    assert servers.ask(prompt, [7] * 32).loaded_tokens == len(prompt) - 1


def test_the_largest_shift_is_that_of_the_tokens_in_common():
    right = answer_of(1, 2, 3, 4)
    other = dataclasses.replace(right, tokens=(1, 2, 8, 4), logprobs=(-2.0, -2.03, -9.0, -9.0))
    assert largest_shift(right, other) == pytest.approx(0.03)
    assert largest_shift(right, right) == 0


class Forced(Replay):
    """Its answers have another token at each third place, which is as probable."""

    def ask_counted(self, tokens, length, *, is_foreign=False):
        _, counted = super().ask_counted(tokens, length, is_foreign=is_foreign)
        rest = self.baseline["x"].after(len(tokens) - 1400)
        drawn = tuple(9 if place == 2 else token for place, token in enumerate(rest.tokens))
        return dataclasses.replace(rest, tokens=drawn), counted


def test_an_answer_with_another_token_is_continued_with_that_of_the_baseline():
    subject = MODELS["qwen3-next"]
    stage, checks, sums = Forced(subject, servers_of(subject)), Checks(), Sums()
    stage.baseline["x"] = answer_of(*random.Random(1).choices(range(20, 90), k=32))
    check_prompt(stage, checks, checks, sums, Prompt("x", tuple(range(1400))))
    assert checks.failures == []
    # After 3, 6, ... 30 tokens.
    assert (sums.requests, sums.forced) == (1, 10)


def test_layers_of_the_subjects_are_kinds_with_one_grid():
    for subject in (*MODELS.values(), *DRAFTS.values()):
        assert subject.grid in (32, 256)
        assert all(isinstance(one, Layers) for one in subject.layers)
        assert all(subject.grid % one.block_tokens == 0 for one in subject.layers)


# ---- kills


class StoppableEngine:
    """A process in a session of its own, and a server whose kill waits until that is stopped."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self.pid = self.process.pid
        self.kills: list[str] = []

    def kill(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)
        self.kills.append("while the engine is stopped")

    def ends(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WCONTINUED)
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0


def test_the_server_is_killed_while_the_engine_cannot_end_its_load():
    engine = StoppableEngine()
    # The first load ends before the engine is stopped, the second one does not.
    pins = iter([0, 1, 0, 0, 2, 2])

    held = kill_in_a_load(engine, engine, lambda: next(pins), lambda: False)

    assert (held, engine.kills) == (2, ["while the engine is stopped"])
    engine.ends()


def test_without_a_load_the_server_is_killed_after_the_requests():
    kills = []
    server = SimpleNamespace(kill=lambda: kills.append("killed"))
    done = iter([False, False, True])

    held = kill_in_a_load(server, SimpleNamespace(pid=0), lambda: 0, lambda: next(done))

    assert (held, kills) == (0, ["killed"])
