"""SGLang's real tree and pools with PegaFlow as its external linker share pages through servers."""

import os
import random
import signal
import string
import struct
from typing import Any

import pytest

from pegaflow import _native
from tests.python.test_sglang_hicache import PAGE, PATIENT, good, instances
from tests.support import sglang_classes
from tests.support.sglang_process import EngineProcess
from tests.support.stray_client import pool_of
from tests.support.vllm_server import PegaServer

pytestmark = pytest.mark.skipif(bool(sglang_classes.missing()), reason=sglang_classes.missing())

SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "windows": {"components": ("FULL", "SWA"), "sliding_window_size": 2 * PAGE, "layers": 3},
    "states": {
        "components": ("FULL", "MAMBA"),
        "enable_mamba_extra_buffer": True,
        "layers": 3,
        "mamba_cache_size": 60,
    },
}
#: Lookups wait as long as a busy machine needs; a pin of a request that has gone ends soon.
WAITING = PATIENT | {
    "pegaflow.call_wait_ms": 100,
    "pegaflow.pass_wait_ms": 1000,
    "pegaflow.pin_s": 0.02,
}
IDLE = {"offloads": 0, "locked": 0, "pins": 0, "queued": 0, "off": ""}
SEQUENCES = int(os.environ.get("PEGA_SGLANG_SEQUENCES", "60"))


def engine(server: PegaServer, **options: Any) -> EngineProcess:
    extra = {"pegaflow.host": server.address} | WAITING | options.pop("extra", {})
    return EngineProcess(
        "LinkerEngine", module="tests.support.sglang_linker_engine", extra=extra, **options
    )


def loaded(answer: dict[str, Any], pages: int) -> bool:
    return (answer["loaded"], answer["wrong"], answer["failed"]) == (pages, 0, False)


@pytest.fixture(scope="module", params=SHAPES)
def shape(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(pega, shape):
    with engine(pega, **SHAPES[shape]) as one, engine(pega, **SHAPES[shape]) as two:
        assert one.do("ready") and two.do("ready")
        yield one, two


def test_another_process_loads_every_page_with_its_bytes(pair, prompt):
    one, two = pair
    tokens, rest = prompt(9 * PAGE), prompt(3 * PAGE)

    assert one.do("put", tokens)
    assert one.do("drain") == IDLE

    assert loaded(two.do("get", tokens), 9)
    assert loaded(two.do("get", tokens + rest), 9)
    assert loaded(two.do("get", rest), 0)
    one.do("empty")
    assert loaded(one.do("get", tokens), 9)
    assert one.do("drain") == two.do("drain") == IDLE


def test_without_known_ranks_others_may_allow_other_lengths(pega):
    with engine(pega) as one:
        assert one.do("agreeing_without_ranks") == 2


def test_a_router_finds_a_pool_by_the_names_in_sglangs_events(own_pega, prompt):
    with engine(own_pega) as one:
        assert one.do("ready")
        names = one.do("stored", prompt(5 * PAGE))
        assert one.do("drain") == IDLE
        assert len(set(names)) == 5
        (space,) = {each["namespace"] for each in own_pega.get_by_socket("/links")["engines"]}
        status, body = own_pega._ask("GET", f"/blocks?namespace={space}&keys=first8")
        assert status == 200
        (count,) = struct.unpack_from("<I", body, 44)
        assert sorted(struct.unpack_from(f"<{count}Q", body, 64)) == sorted(names)


def test_a_hit_on_the_device_is_continued(pair, prompt):
    one, two = pair
    tokens = prompt(10 * PAGE)
    one.do("put", tokens)
    one.do("drain")
    two.do("put", tokens[: 4 * PAGE])

    answer = two.do("get", tokens)

    assert answer["local"] == 4 and loaded(answer, 6)


def test_random_steps_of_two_engines_load_equal_bytes_and_hold_nothing(pega, pair, shape, seed):
    rng = random.Random(f"{seed} {shape}")
    # Prompts that share beginnings; each is longer than a part of the device pool.
    stem = [rng.randrange(10, 1000) for _ in range(6 * PAGE)]
    prompts = [
        stem[: rng.randrange(7) * PAGE] + [rng.randrange(10, 1000) for _ in range(14 * PAGE)]
        for _ in range(8)
    ]
    total = dict.fromkeys(("put", "get", "loaded", "wrong", "failed", "evicted", "reset"), 0)
    for _ in range(SEQUENCES):
        for one in pair:
            one.start("random_steps", rng.randrange(1 << 30), 12, prompts)
        for one in pair:
            for name, count in one.wait().items():
                total[name] += count
        for one in pair:
            one.start("drain")
        assert [one.wait() for one in pair] == [IDLE, IDLE]

    print(f"{shape}: {2 * SEQUENCES} sequences, {total}")
    assert (total["wrong"], total["failed"]) == (0, 0)
    assert total["loaded"] > SEQUENCES
    metrics = pega.metrics()
    assert metrics.total("pegaflow_pins") == 0


#: The calls of the linker at which a server ends or stops, and what makes SGLang call them.
CALLS = {
    "lookup": "get",
    "load": "get",
    "start_layer_wise_loading": "get",
    "finish_layer_wise_loading": "get",
    "offload": "put",
    "num_completed_offloads": "drain",
    "reset": "empty",
}


@pytest.fixture(scope="module")
def victim(short_path):
    """A server that tests kill and stop, and an engine of it."""
    from tests.python.conftest import server_binary

    with PegaServer(server_binary(), short_path / "victim", pool_size="64mb") as server:
        # Short enough to see a stopped server's deadlines pass.
        extra = dict.fromkeys(PATIENT, 300) | {"pegaflow.load_patience_ms": 1000}
        with engine(server, extra=extra, **SHAPES["windows"]) as made:
            assert made.do("ready")
            yield server, made


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_ends_or_stops_at_a_call_is_no_exception(victim, prompt, call, how):
    server, made = victim
    tokens = prompt(6 * PAGE)
    assert made.do("put", tokens)
    assert made.do("drain")["offloads"] == 0
    made.do("empty")
    before = made.do("status")["counts"]["aborted"]
    pid = server.pid
    made.do("trap", call, pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    try:
        if CALLS[call] == "get":
            answer = made.do("get", tokens)
            assert answer["wrong"] == 0
            # Only a load that was promised and cannot be made aborts its request.
            assert made.do("status")["counts"]["aborted"] - before == answer["failed"]
            if call == "start_layer_wise_loading":
                assert answer["failed"]
            elif call == "lookup":
                assert not answer["failed"] and answer["loaded"] == 0
        elif CALLS[call] == "put":
            assert made.do("put", prompt(3 * PAGE))
        else:
            made.do(CALLS[call])
        assert made.do("trapped", call)
        assert made.do("put", prompt(2 * PAGE))
        drained = made.do("drain")
        assert (drained["offloads"], drained["off"]) == (0, "")
    finally:
        if how == "stop":
            os.kill(pid, signal.SIGCONT)
        else:
            server.kill()
            server.start()
    assert made.do("ready")
    made.do("empty")
    made.do("forget_the_missed_deadline")
    assert made.do("put", tokens)
    made.do("drain")
    made.do("empty")
    assert loaded(made.do("get", tokens), 6)


def test_after_one_missed_deadline_lookups_are_misses_without_a_question(victim, prompt):
    server, made = victim
    tokens = prompt(4 * PAGE)
    made.do("put", tokens)
    made.do("drain")
    made.do("empty")
    made.do("forget_the_missed_deadline")
    before = made.do("status")["missed_deadlines"]
    os.kill(server.pid, signal.SIGSTOP)
    try:
        hits, missed = made.do("lookups", tokens, 20)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert hits == 0
    assert missed - before == 1


def test_pins_are_limited(pega, prompt):
    tokens, other = prompt(3 * PAGE), prompt(3 * PAGE)
    with engine(pega, extra={"pegaflow.max_pins": 1, "pegaflow.pin_s": 60}) as made:
        assert made.do("ready")
        for each in (tokens, other):
            made.do("put", each)
        made.do("drain", 2.0)
        made.do("empty")

        assert made.do("lookups", tokens, 1)[0] == 1
        assert made.do("lookups", other, 1)[0] == 0
        assert made.do("status")["pins"] == 1
        made.do("empty")
        assert made.do("lookups", other, 1)[0] == 1


def test_a_wrong_page_aborts_the_request_with_verification_and_is_seen_without(own_pega, prompt):
    for verify, failed, wrong in (("off", False, 1), ("all", True, 0)):
        tokens = prompt(6 * PAGE)
        with engine(own_pega, extra={"pegaflow.verify": verify}) as made:
            assert made.do("ready")
            made.do("put", tokens)
            made.do("drain")
            made.do("empty")
            with pool_of(own_pega) as pool:
                pool[pool.find(made.do("bytes_of", tokens, 3)) + 5] ^= 1

            answer = made.do("get", tokens)

            assert (answer["failed"], answer["wrong"]) == (failed, wrong)
            assert made.do("status")["counts"]["aborted"] == failed


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 32},
        {"dtype": "float16"},
        {"rank": (1, 2)},
        {"extra": {"pegaflow.weights_id": "other weights"}},
        SHAPES["windows"] | {"sliding_window_size": 3 * PAGE},
    ],
    ids=["page_size", "dtype", "rank", "weights", "window"],
)
def test_an_engine_whose_pages_differ_finds_none(pega, prompt, options):
    tokens = prompt(8 * PAGE)
    shape = SHAPES["windows"] if "components" in options else {}
    with engine(pega, **shape) as one, engine(pega, **options) as other:
        assert one.do("ready") and other.do("ready")
        one.do("put", tokens)
        one.do("drain")
        if "rank" in options:  # its collectives need the other rank
            assert other.do("found", tokens) == []
        else:
            assert loaded(other.do("get", tokens), 0)


@pytest.mark.parametrize(("rank", "lengths"), [((0, 1), [5]), ((0, 2), [1, 2, 3, 4, 5])])
def test_a_rank_names_every_length_only_if_others_have_to_agree(pega, prompt, rank, lengths):
    tokens = prompt(5 * PAGE)
    with engine(pega, rank=rank) as one:
        assert one.do("ready")
        assert one.do("offload", tokens)
        assert one.do("found", tokens) == lengths


@pytest.mark.parametrize(
    "digest", ["", "0" * 63, "0" * 65, " " + "0" * 63, "g" * 64, "\u0660" * 64]
)
def test_a_digest_that_is_not_hexadecimal_is_no_key(digest):
    good = "0123456789abcdef" * 2 + "FEDCBA9876543210" * 2
    assert _native.pack_hex_keys([good, good.lower()]) == 2 * bytes.fromhex(good)
    assert _native.pack_hex_keys((good, digest)) is None
    assert _native.pack_hex_keys([good, b"0" * 64]) is None
    assert _native.pack_hex_keys(None) is None
    assert _native.pack_hex_keys([]) == b""


def test_every_character_is_a_digit_or_refused():
    for code in range(256):
        digest = chr(code) + "0" * 63
        wanted = bytes.fromhex(digest) if chr(code) in string.hexdigits else None
        assert _native.pack_hex_keys([digest]) == wanted, code


def test_an_invalid_option_leaves_the_engine_without_the_cache(pega, prompt):
    with engine(pega, extra={"pegaflow.pin": 1}) as made:
        tokens = prompt(3 * PAGE)
        assert made.do("put", tokens)
        assert loaded(made.do("get", tokens), 0)
        made.do("empty")
        assert loaded(made.do("get", tokens), 0)
        assert "unknown option pegaflow.pin" in made.do("status")["off"]


def test_the_server_names_the_kinds(pega, pair, shape):
    kinds = [each.get("kinds") for each in instances(pega) if "-linker-" in each["instance"]]
    rules = {tuple(kind["kind"] for kind in each) for each in kinds if each}
    expected = {"windows": ("full", "window"), "states": ("full", "state")}.get(shape)
    assert expected is None or expected in rules


def test_hicache_and_the_linker_do_not_share(pega, prompt):
    tokens = prompt(4 * PAGE)
    extra = {"pegaflow.host": pega.address} | PATIENT
    with engine(pega) as one, EngineProcess("HiCacheEngine", extra=extra) as other:
        assert one.do("ready") and other.do("ready")
        one.do("put", tokens)
        one.do("drain")
        assert good(other.do("get", tokens), 0)
