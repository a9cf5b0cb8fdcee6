"""`pegaflow-perf replay` puts traces through real servers; small ones are counted by hand."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.python.perf_program import BUILD, lines_of, perf

PAGE = 4096
CONVERSATION = (
    Path(__file__).resolve().parents[3] / "shared" / "traces" / "conversation_trace.jsonl.zst"
)


def write_trace(path, prompts):
    with path.open("w") as trace:
        for number, blocks in enumerate(prompts):
            request = {
                "timestamp": 1000 * number,
                "input_length": 512 * len(blocks),
                "output_length": 1,
                "hash_ids": list(blocks),
            }
            trace.write(json.dumps(request) + "\n")
    return path


def by_policy(figures, run):
    return {f["params"]["eviction"]: f for f in figures if f["run"] == run}


@pytest.fixture
def known_trace(tmp_path):
    """Prompts through a pool of 256 blocks, with the number of blocks that LRU finds of each."""
    a, b, c, d, e = (range(first, first + 64) for first in range(0, 320, 64))
    f = range(1000, 1032)
    steps = [
        (a, 0),
        (b, 0),
        (c, 0),
        (d, 0),  # The pool is full.
        (a, 64),
        (e, 0),  # b is evicted: a was used after it.
        (b, 0),  # c is evicted
        (a, 64),
        (d, 64),
        (f, 0),  # The last 32 of e are evicted, from the end of their chain on.
        (e, 32),  # The last 32 of b are evicted.
        ([*b[:40], 2000], 32),  # The rest of b is its beginning.
    ]
    return write_trace(tmp_path / "known.jsonl", [blocks for blocks, _ in steps]), [
        (len(blocks), found) for blocks, found in steps
    ]


def test_lru_finds_the_blocks_that_were_counted_by_hand(known_trace):
    trace, steps = known_trace
    asked = sum(blocks for blocks, _ in steps)
    found = sum(found for _, found in steps)
    figures = lines_of("replay", "--trace", str(trace), "--blocks", "256", "--eviction", "lru")

    assert {json.dumps(f["params"], sort_keys=True) for f in figures} == {
        json.dumps(
            {"trace": "known.jsonl", "blocks": 256, "eviction": "lru", "requests": len(steps)},
            sort_keys=True,
        )
    }
    value = {f["run"]: f["figure"] for f in figures}
    assert value["prefix hit rate"] == pytest.approx(found / asked)
    assert value["loaded"] == found * PAGE
    # All other blocks are saved: of the last prompt 8 of b and the new one.
    assert value["saved"] == (asked - found) * PAGE
    assert value["evictions"] == asked - found - 256
    assert value["found and not claimed"] == 0
    for run in ("lookup and claim", "load", "save"):
        assert 0 < value[f"{run}, p50"] <= value[f"{run}, p99"]
    assert value["CPU of the server a request"] > 0


@pytest.mark.parametrize("limit", range(1, 13))
def test_each_request_finds_its_part(known_trace, limit):
    """The sums of ever longer beginnings of the trace differ by one request."""
    trace, steps = known_trace
    figures = lines_of(
        "replay", "--trace", str(trace), "--blocks", "256", "--eviction", "lru",
        "--requests", str(limit),
    )  # fmt: skip
    (loaded,) = [f["figure"] for f in figures if f["run"] == "loaded"]
    assert loaded == PAGE * sum(found for _, found in steps[:limit])


def test_policies_are_compared_with_lru_of_the_same_run(known_trace):
    trace, steps = known_trace
    figures = lines_of(
        "replay", "--trace", str(trace), "--blocks", "256,2000", "--rounds", "3",
        "--eviction", "slru,lru,s3-fifo,weighted-lru",
    )  # fmt: skip
    for blocks in (256, 2000):
        of_size = [f for f in figures if f["params"]["blocks"] == blocks]
        rates = by_policy(of_size, "prefix hit rate")
        assert list(rates) == ["slru", "lru", "s3-fifo", "weighted-lru"]
        assert rates["lru"]["bound"] is None
        assert {rates[name]["bound"] for name in rates if name != "lru"} == {rates["lru"]["figure"]}
        assert {name: f["target"] for name, f in rates.items() if f["held"] is not None} == {
            "weighted-lru": 1
        }
        costs = by_policy(of_size, "CPU of the server a request")
        assert [f["target"] for f in costs.values() if f["bound"]] == [1.3] * 3
        assert {f["n"] for f in costs.values()} == {3}
        assert all("ratio" in f["spread"] for f in costs.values() if f["bound"])
    # All blocks fit: every policy finds all earlier ones, and evicts nothing.
    assert {f["figure"] for f in by_policy(of_size, "evictions").values()} == {0}
    assert len({f["figure"] for f in rates.values()}) == 1


def test_a_shortened_claim_is_reported(tmp_path):
    """One engine may hold half of the pool."""
    trace = write_trace(tmp_path / "long.jsonl", [range(200), range(200)])
    figures = lines_of("replay", "--trace", str(trace), "--blocks", "256", "--eviction", "lru")
    value = {f["run"]: f["figure"] for f in figures}
    assert value["loaded"] == 128 * PAGE
    assert value["found and not claimed"] == 72
    # Those 72 are cached, and are not saved again.
    assert value["saved"] == 200 * PAGE
    done = perf("replay", "--trace", str(trace), "--blocks", "256", "--eviction", "lru")
    assert "72 blocks were found and not claimed" in done.stdout


@pytest.mark.parametrize(
    "workload", ["conversation", "shared-prefix", "scan", "zipf", "agents", "loop", "mixed"]
)
def test_workloads_are_repeated_by_their_seed(workload):
    arguments = (
        "replay", "--workload", workload, "--requests", "300", "--blocks", "400",
        "--eviction", "weighted-lru", "--rounds", "2", "--seed", "7",
    )  # fmt: skip
    first, second = lines_of(*arguments), lines_of(*arguments)
    exact = [(f["run"], f["figure"]) for f in first if f["spread"] == "exact"]
    assert exact == [(f["run"], f["figure"]) for f in second if f["spread"] == "exact"]
    assert {f["params"]["trace"] for f in first} == {f"{workload}, seed 7"}
    assert {f["seed"] for f in first} == {7}
    assert dict(exact)["saved"] > 0


def test_the_table_is_on_standard_output_and_progress_on_standard_error(known_trace):
    trace, _ = known_trace
    done = perf(
        "replay", "--trace", "-", "--blocks", "256,300", "--eviction", "lru,slru",
        input=trace.read_text(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "standard input: 12 requests for 713 blocks, 353 of them distinct" in done.stdout
    rows = [line.split()[:3] for line in done.stdout.splitlines()[3:]]
    assert [row[:2] for row in rows] == [[b, e] for b in ("256", "300") for e in ("lru", "slru")]
    assert rows[0][2] == "0.3590"  # 256 of 713
    assert "pools of 300 blocks" in done.stderr
    assert "pools of" not in done.stdout


def test_help_shows_an_example():
    assert "Example: pegaflow-perf replay --trace" in perf("replay", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "scan", "--blocks", "0"], "is not from 256"),
        (["--workload", "scan", "--blocks", "255"], "is not from 256"),
        (["--workload", "scan", "--blocks", "1000,many"], "'many' is not a whole number"),
        (["--workload", "scan", "--blocks", ""], "--blocks: give at least one"),
        (["--workload", "scan", "--eviction", "lru,arc"], "lru, slru, s3-fifo or adaptive"),
        (["--workload", "scan", "--eviction", ""], "--eviction: give at least one"),
        (["--workload", "chess"], "choose from conversation, shared-prefix"),
        (["--workload", "scan", "--trace", "x"], "either --trace or --workload"),
        ([], "either --trace or --workload"),
    ],
)
def test_wrong_usage_exits_with_2_and_gives_the_reason(arguments, words):
    done = perf("replay", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""


def test_an_invalid_line_is_named(tmp_path, known_trace):
    trace = tmp_path / "wrong.jsonl"
    trace.write_text(known_trace[0].read_text() + '{"timestamp": 1, "input_length": 5}\n')
    done = perf("replay", "--trace", str(trace), "--blocks", "256")
    assert done.returncode == 2
    assert 'wrong.jsonl, line 13: expected the field "output_length"' in done.stderr
    assert done.stdout == ""


def test_a_missing_trace_is_an_error():
    done = perf("replay", "--trace", "/nonexistent/trace.jsonl")
    assert done.returncode == 1
    assert "/nonexistent/trace.jsonl: No such file or directory" in done.stderr


def test_hit_rates_of_the_conversation_trace_are_within_their_bounds(tmp_path):
    """Mooncake's trace in 1,000 blocks: LRU finds as many as published, the default policy more."""
    if not CONVERSATION.is_file() or shutil.which("zstd") is None:
        pytest.skip(f"needs {CONVERSATION.name} in ../shared/traces, and zstd")
    trace = tmp_path / "conversation.jsonl"
    subprocess.run(["zstd", "-qd", CONVERSATION, "-o", trace], check=True)
    figures = lines_of(
        "replay", "--trace", str(trace), "--blocks", "1000", "--eviction", "lru,weighted-lru",
        timeout_s=500,
    )  # fmt: skip
    rates = by_policy(figures, "prefix hit rate")
    assert round(rates["lru"]["figure"], 4) == 0.0445
    assert rates["weighted-lru"]["figure"] >= 0.0529


def test_a_pool_of_another_size_is_rejected(tmp_path):
    """As with reserved huge pages, to which a pool is rounded."""
    server = tmp_path / "server"
    server.write_text(
        f'#!/bin/sh\nexec {BUILD / "server" / "pegaflow-server"} "$@" --pool-size 2mb\n'
    )
    server.chmod(0o755)
    done = perf("replay", "--workload", "scan", "--blocks", "600", "--server", str(server))
    assert done.returncode == 1
    assert "has 512 blocks, not 600" in done.stderr


def test_a_chain_on_two_nodes_is_found_on_a_third(tmp_path):
    """One part after the other, each from its owner; counted by hand."""
    a, b, c = range(32), range(32, 64), range(100, 324)
    # To nodes 0, 1, 2, 0, 1, 2. The second fetches a and saves b; c replaces its replicas of a, so
    # that no node has both at the end.
    prompts = [a, [*a, *b], [900], [901], c, [*a, *b]]
    trace = write_trace(tmp_path / "parts.jsonl", prompts)

    figures = lines_of(
        "replay", "--trace", str(trace), "--nodes", "3", "--blocks", "256", "--eviction", "lru"
    )

    by_run = {f["run"]: f for f in figures}
    rate = by_run["prefix hit rate of all nodes"]
    assert rate["figure"] == pytest.approx(96 / 386)
    assert rate["held"]
    assert by_run["found at another node"]["figure"] == 96
    assert by_run["evictions"]["figure"] == 32
    assert by_run["evictions of replicas"]["figure"] == 32


def test_requests_can_be_distributed_at_random_and_runs_are_repeatable():
    def run(seed):
        figures = lines_of(
            "replay", "--workload", "zipf", "--requests", "300", "--nodes", "4",
            "--blocks", "512", "--deal", "random", "--eviction", "weighted-lru", "--seed", seed,
        )  # fmt: skip
        return [f["figure"] for f in figures]

    assert run("1") == run("1")
    assert run("1") != run("2")


def test_an_unknown_distribution_is_rejected(known_trace):
    trace, _ = known_trace
    done = perf("replay", "--trace", str(trace), "--nodes", "2", "--deal", "fairly")
    assert done.returncode != 0
    assert "neither round-robin nor random" in done.stderr
