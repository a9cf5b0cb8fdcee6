"""SGLang's real HiCache, its tree, pools and threads, shares pages through real servers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from typing import Any

import pytest

from tests.support import sglang_classes
from tests.support.sglang_metrics import SGLANG_METRICS
from tests.support.sglang_process import EngineProcess
from tests.support.stray_client import pool_of
from tests.support.vllm_server import PegaServer

pytestmark = pytest.mark.skipif(bool(sglang_classes.missing()), reason=sglang_classes.missing())

PAGE = 16
#: A busy machine must not turn a hit into a miss, in tests that are not about deadlines.
PATIENT = {
    "pegaflow.lookup_deadline_ms": 20_000,
    "pegaflow.open_deadline_ms": 20_000,
    "pegaflow.reserve_deadline_ms": 20_000,
    "pegaflow.connect_deadline_ms": 20_000,
    "pegaflow.load_patience_ms": 20_000,
}


def engine(server: PegaServer, kind: str = "HiCacheEngine", **options: Any) -> EngineProcess:
    extra = {"pegaflow.host": server.address} | PATIENT | options.pop("extra", {})
    return EngineProcess(kind, extra=extra, **options)


@pytest.fixture(scope="module")
def one(pega):
    with engine(pega) as made:
        assert made.do("ready")
        yield made


@pytest.fixture(scope="module")
def two(pega):
    with engine(pega) as made:
        assert made.do("ready")
        yield made


def test_the_dashboard_names_metrics_of_this_sglang():
    """They are read from SGLang's source: its collector needs a running engine."""
    source = sglang_classes.DIRECTORY / "sglang/srt/observability/metrics_collector.py"
    text = source.read_text()
    for metric, labels in SGLANG_METRICS.items():
        name = metric.removesuffix("_bucket")
        _, found, rest = text.partition(f'name="{name}"')
        assert found, metric
        made, _, _ = rest.partition('name="')
        for label in labels & {"cache_source", "is_streaming"}:
            assert f'"{label}"' in made, (metric, label)


def instances(server: PegaServer) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"http://{server.http}/instances", timeout=20) as answer:
        return json.load(answer)["instances"]


def good(answer: dict[str, Any], pages: int) -> bool:
    return (answer["found"], answer["wrong"]) == (pages, 0)


def test_another_process_finds_every_page_with_its_bytes(one, two, prompt):
    tokens = prompt(9 * PAGE)

    assert one.do("put", tokens)["acked"] == 9

    assert good(two.do("get", tokens), 9)
    two.do("empty")
    assert good(two.do("get", tokens), 9)
    one.do("empty")
    assert good(one.do("get", tokens), 9)


def test_a_longer_prompt_loads_its_common_pages(one, two, prompt):
    tokens, rest = prompt(5 * PAGE), prompt(4 * PAGE)
    one.do("put", tokens)

    assert good(two.do("get", tokens + rest), 5)
    assert good(two.do("get", rest), 0)


def test_more_pages_than_one_call_of_the_controller_has(one, two, prompt):
    # 128 pages at most in each: SGLang's STORAGE_BATCH_SIZE. The pools have 64.
    for _ in range(3):
        two.do("empty")
        one.do("empty")
        tokens = prompt(60 * PAGE)
        assert one.do("put", tokens)["acked"] == 60
        assert good(two.do("get", tokens), 60)
    two.do("empty")
    one.do("empty")


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 32},
        {"dtype": "float16"},
        {"layers": 4},
        {"extra": {"pegaflow.weights_id": "other weights"}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_engine_whose_pages_differ_finds_none(pega, one, prompt, options):
    tokens = prompt(8 * PAGE)
    one.do("put", tokens)

    with engine(pega, **options) as other:
        assert other.do("ready")
        assert good(other.do("get", tokens), 0)
        pages = len(tokens) // options.get("page_size", PAGE)
        assert other.do("put", tokens)["acked"] == pages
        other.do("empty")
        assert good(other.do("get", tokens), pages)


@pytest.mark.pool_size("2mb")
def test_a_full_pool_evicts_pages_and_never_returns_other_bytes(own_pega, prompt):
    # A page has 2 x 2 x 16 x 2 x 32 x 2 = 8 KiB: the pool has room for 256.
    prompts = [prompt(40 * PAGE) for _ in range(12)]
    with engine(own_pega) as made:
        assert made.do("ready")
        for tokens in prompts:
            made.do("put", tokens)
            made.do("empty")

        answers = []
        for tokens in prompts:
            answers.append(made.do("get", tokens))
            made.do("empty")

    assert all(answer["wrong"] == 0 for answer in answers)
    assert 0 < sum(answer["found"] for answer in answers) <= 256


def test_a_server_that_was_killed_is_a_miss_and_used_again_after_its_restart(own_pega, prompt):
    tokens = prompt(6 * PAGE)
    with engine(own_pega) as made:
        assert made.do("ready")
        made.do("put", tokens)
        own_pega.kill()
        made.do("empty")

        missed = made.do("get", tokens)
        not_saved = made.do("put", prompt(3 * PAGE))

        assert good(missed, 0) and missed["seconds"] < 5
        assert not_saved["acked"] == 0
        own_pega.start()
        assert made.do("ready")
        made.do("empty")
        assert good(made.do("get", tokens), 0)  # the pool was memory of the server's
        assert made.do("put", tokens)["acked"] == 6
        made.do("empty")
        assert good(made.do("get", tokens), 6)


@pytest.mark.parametrize("call", ["batch_exists", "get", "put"])
def test_no_call_waits_longer_for_a_stopped_server_than_its_deadline(own_pega, prompt, call):
    # The deadlines of the defaults; the test's own limit is for a busy machine.
    extra = {name: value for name, value in PATIENT.items() if "load" in name}
    extra = dict.fromkeys(PATIENT, 200) | extra | {"pegaflow.load_patience_ms": 500}
    tokens = prompt(4 * PAGE)
    with engine(own_pega, extra=extra) as made:
        assert made.do("ready")
        made.do("put", tokens)
        keys = made.do("hashes", tokens)
        made.do("empty")
        os.kill(own_pega.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            if call == "batch_exists":
                assert made.do("call", "batch_exists", keys)[0] == 0
            elif call == "get":
                assert good(made.do("get", tokens), 0)
            else:
                assert made.do("put", prompt(4 * PAGE))["acked"] == 0
            assert time.monotonic() - began < 10
        finally:
            os.kill(own_pega.pid, signal.SIGCONT)
        assert made.do("status")["off"] == ""


def test_an_overwritten_page_is_not_loaded(own_pega, prompt):
    tokens = prompt(6 * PAGE)
    with engine(own_pega, extra={"pegaflow.verify": "all"}) as made:
        assert made.do("ready")
        made.do("put", tokens)
        made.do("empty")
        first_bytes = made.do("bytes_of", tokens, 3)
        with pool_of(own_pega) as pool:
            at = pool.find(first_bytes)
            assert at >= 0
            pool[at + 5] ^= 1

        answer = made.do("get", tokens)

        assert answer["wrong"] == 0 and answer["found"] == 3


def test_without_verification_the_same_byte_is_noticed_by_this_test(own_pega, prompt):
    tokens = prompt(6 * PAGE)
    with engine(own_pega) as made:
        assert made.do("ready")
        made.do("put", tokens)
        made.do("empty")
        with pool_of(own_pega) as pool:
            pool[pool.find(made.do("bytes_of", tokens, 3)) + 5] ^= 1

        answer = made.do("get", tokens)

        assert (answer["found"], answer["wrong"]) == (6, 1)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"pegaflow.prot": 1}, "unknown option pegaflow.prot; the nearest is pegaflow.port"),
        ({"pegaflow.verify": "yes"}, "pegaflow.verify='yes' is not one of off, sample, all"),
        ({"interface_v1": 0}, 'add "interface_v1": 1'),
    ],
    ids=["name", "value", "interface"],
)
def test_an_invalid_configuration_leaves_the_engine_without_the_cache(pega, prompt, extra, words):
    with engine(pega, extra=extra) as made:
        tokens = prompt(3 * PAGE)
        made.do("put", tokens)
        made.do("empty")
        assert good(made.do("get", tokens), 0)
        assert words in made.do("status")["off"]
        deadline = time.monotonic() + 30
        while not any(
            words in row["detail"] for each in instances(pega) for row in each["not_served"]
        ):
            assert time.monotonic() < deadline, "the notice does not arrive"


def test_weights_without_a_name_are_not_shared(own_pega, prompt):
    with engine(own_pega, extra={"pegaflow.weights_id": ""}) as made:
        assert "name the weights with pegaflow.weights_id" in made.do("status")["off"]


def test_an_engine_leaves_the_cache_before_its_weights_are_replaced(pega, two, prompt):
    tokens = prompt(3 * PAGE)
    with engine(pega) as made:
        assert made.do("ready")
        made.do("put", tokens)
        made.do("empty")

        made.do("replace_weights")

        assert good(made.do("get", tokens), 0)
        assert "its weights are replaced" in made.do("status")["off"]
    assert good(two.do("get", tokens), 3)


def test_an_operators_clear_empties_the_namespace_for_all(pega, prompt):
    tokens = prompt(3 * PAGE)
    extra = {"pegaflow.weights_id": "cleared"}
    with engine(pega, extra=extra) as first, engine(pega, extra=extra) as second:
        assert first.do("ready") and second.do("ready")
        first.do("put", tokens)

        assert first.do("call", "clear")[0] is True

        assert good(second.do("get", tokens), 0)


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("pegaflow.sglang.peagflow_radix_cache", "PeagflowRadixCache"),
        ("pegaflow.sglang.pegaflow_radix_cache", "PegaflowRadixCache"),
    ],
)
def test_the_earlier_names_are_the_same_class(pega, one, prompt, module, kind):
    tokens = prompt(4 * PAGE)
    one.do("put", tokens)
    with engine(pega, backend_module=module, backend_class=kind) as made:
        assert made.do("ready")
        assert good(made.do("get", tokens), 4)


def test_ranks_with_equal_pages_save_them_once(pega):
    keys = [f"{number:064x}" for number in range(1, 6)]
    with (
        engine(pega, "LatentEngine", rank=0) as writer,
        engine(pega, "LatentEngine", rank=1) as reader,
    ):
        assert writer.do("ready") and reader.do("ready")

        reader.do("set", keys, 3)  # another rank's pages: nothing is saved
        assert reader.do("get", keys)[0] == [False] * 5
        assert writer.do("set", keys[:4], 2) == [True] * 4

        assert reader.do("get", keys) == ([True] * 4 + [False], True, pytest.approx(1.8))


def test_windows_and_states_are_restored_where_all_pools_allow(pega):
    keys = [f"{number:064x}" for number in range(100, 112)]
    tree = {"components": ("FULL", "SWA"), "sliding_window_size": 32, "layers": 3}
    with (
        engine(pega, "PoolsEngine", **tree) as first,
        engine(pega, "PoolsEngine", **tree) as second,
    ):
        assert first.do("ready") and second.do("ready")
        assert first.do("set", "kv", keys[:10], list(range(10))) == [True] * 10
        # Windows of two pages that end after 3, 7 and 12 pages; a single page after 9.
        for ends in ([2, 3], [6, 7], [9], [11, 12]):
            chosen = [keys[end - 1] for end in ends]
            assert all(first.do("set", "swa", chosen, list(range(len(chosen)))))

        assert second.do("lengths", keys, {"swa": 2}) == (7, [3, 7])
        assert second.do("lengths", keys[4:], {"swa": 2}) == (3, [3])
        assert second.do("fetch", "swa", keys[5:7], [4, 2]) == ([True, True], 0)
        assert second.do("fetch", "swa", keys[7:9], [4, 2]) == ([False, False], 0)
        assert second.do("fetch", "kv", keys[:7], list(range(20, 27))) == ([True] * 7, 0)


def test_states_are_found_one_by_one(pega):
    keys = [f"{number:064x}" for number in range(200, 208)]
    tree = {"components": ("FULL", "MAMBA"), "enable_mamba_extra_buffer": True, "layers": 3}
    with (
        engine(pega, "PoolsEngine", **tree) as first,
        engine(pega, "PoolsEngine", **tree) as second,
    ):
        assert first.do("ready") and second.do("ready")
        first.do("set", "kv", keys, list(range(8)))
        assert first.do("set", "mamba", [keys[2], keys[5]], [3, 1]) == [True, True]

        assert second.do("lengths", keys, {"mamba": 1}) == (6, [3, 6])
        assert second.do("fetch", "mamba", [keys[5]], [7]) == ([True], 0)
        assert second.do("fetch", "mamba", [keys[6]], [7]) == ([False], 0)


def test_the_server_the_doctor_and_top_name_the_engine(pega, one):
    rows = [each for each in instances(pega) if "sglang-" in each["instance"]]
    assert any("sglang 0.5.23" in each["build"] for each in rows)
    factors = {each["name"]: each["value"] for row in rows for each in row["factors"]}
    assert factors["engine"] == "sglang"

    def shown(*command: str) -> str:
        line = [sys.executable, "-m", "pegaflow", *command, "--http-addr", pega.http]
        return subprocess.run(line, capture_output=True, text=True, timeout=60).stdout

    assert re.search(r"^ +[0-9]+ of sglang 0.5.23", shown("top", "--once"), re.MULTILINE)
    assert json.loads(shown("top", "--once", "--json"))["clients"]["programs"]["sglang 0.5.23"] > 0
    lines = shown("doctor", "--addr", pega.address)
    assert re.search(r"-hicache-0-kv: .*sglang\s+0.5.23", lines, re.DOTALL)
