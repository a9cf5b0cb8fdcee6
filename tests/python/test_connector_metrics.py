"""Counts of the connector are in vLLM's metrics, and in one log line a minute."""

import json
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client import Counter, Gauge, Histogram

from pegaflow.connector import PegaKVConnector
from pegaflow.vllm.metrics import COUNTER, METRICS, Counts, Summary
from tests.python.harness import Engine


def exposed(*payloads: dict[str, Any]) -> dict[str, float]:
    """The values that Prometheus reads after vLLM's front end received these."""
    for collector in list(prometheus_client.REGISTRY._collector_to_names):
        if any("pegaflow" in n for n in prometheus_client.REGISTRY._collector_to_names[collector]):
            prometheus_client.REGISTRY.unregister(collector)
    from tests.python.harness import vllm_config

    metrics = PegaKVConnector.build_prom_metrics(
        vllm_config("unix:/nowhere.sock"),
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["model_name", "engine"],
        {0: ["tiny", "0"], 1: ["tiny", "1"]},
    )
    for payload in payloads:
        # As between vLLM's processes.
        metrics.observe(json.loads(json.dumps(payload)), 0)
    return {
        f"{sample.name}{dict(sample.labels)}": sample.value
        for family in prometheus_client.REGISTRY.collect()
        for sample in family.samples
        if "pegaflow" in sample.name and "_created" not in sample.name
    }


LABELS = {"model_name": "tiny", "engine": "0"}


def test_every_metric_exists_from_the_start_or_has_labels():
    found = exposed()
    for metric in METRICS:
        suffix = "_total" if metric.kind == COUNTER else ""
        name = f"vllm:pegaflow_{metric.name}{suffix}{LABELS}"
        if not metric.labels:
            assert found.get(name, found.get(name.replace("{", "_count{", 1))) == 0, name


def test_counts_of_both_sides_add_up():
    worker, scheduler = Counts(), Counts()
    worker.set_link_state("worker", "ready")
    worker.add("internal_errors", 1, "worker")
    scheduler.add("misses", 2, "late")
    scheduler.add("misses", 1, "no_server")
    scheduler.add("loaded_blocks", 7)
    scheduler.add("loaded_blocks", 0)
    scheduler.observe("load_seconds", 0.03)
    scheduler.set("pinned_blocks", 4)
    first = worker.take().aggregate(scheduler.take())
    scheduler.add("misses", 3, "late")
    scheduler.observe("load_seconds", 0.3)
    scheduler.set("pinned_blocks", 1)

    found = exposed(first.to_dict(), scheduler.take().to_dict())

    assert found[f"vllm:pegaflow_misses_total{LABELS | {'reason': 'late'}}"] == 5
    assert found[f"vllm:pegaflow_misses_total{LABELS | {'reason': 'no_server'}}"] == 1
    assert found[f"vllm:pegaflow_loaded_blocks_total{LABELS | {'kind': 'full'}}"] == 7
    assert found[f"vllm:pegaflow_load_seconds_count{LABELS}"] == 2
    assert found[f"vllm:pegaflow_load_seconds_sum{LABELS}"] == pytest.approx(0.33)
    assert found[f"vllm:pegaflow_pinned_blocks{LABELS}"] == 1
    for state, value in (("ready", 1), ("broken", 0)):
        labels = LABELS | {"side": "worker", "state": state}
        assert found[f"vllm:pegaflow_link_state{labels}"] == value


def test_counts_are_reported_once():
    counts = Counts()
    assert counts.take() is None
    counts.add("hits")
    assert counts.take().data == {"hits": {"": 1}}
    assert counts.take() is None


def test_an_undeclared_metric_is_an_error():
    with pytest.raises(AssertionError, match="hitz"):
        Counts().add("hitz")


def test_metrics_of_another_release_are_ignored():
    assert exposed({"of_tomorrow": {"": 1}}) == exposed()


def test_an_engine_reports_its_loads_and_saves(pega, prompt):
    tokens = prompt(300)
    with Engine(pega.address) as engine:
        engine.wait_ready()
        engine.ask("cold", tokens)
        engine.reset_local()
        engine.ask("again", tokens)
        engine.run()
        stats = engine.stats
        assert stats["misses{not_cached}"] == 1
        assert stats["hits"] == stats["loads"] == stats["load_seconds"] == 1
        assert stats["loaded_bytes"] == 18 * engine.worker._worker.mover.page_bytes
        assert stats["saved_blocks"] == 18
        assert stats["saved_bytes"] == stats["loaded_bytes"]
        assert stats["pinned_blocks"] == 0
        assert stats["link_state{scheduler|ready}"] == stats["link_state{worker|ready}"] == 1
        sources = engine.connector.get_external_cache_hit_sources(
            SimpleNamespace(request_id="again"), 32
        )
        assert {str(source.value): n for source, n in sources.items()} == {"host": 32}


def test_the_log_line_sums_up_events_and_is_omitted_without_any():
    summary = Summary(60.0, now=0.0)
    counts = Counts()
    for took in (0.010, 0.020, 0.090):
        counts.add("loads")
        counts.observe("load_seconds", took)
    counts.add("loaded_blocks", 30)
    counts.add("loaded_bytes", 3e6)
    counts.add("saves", 2)
    counts.add("saved_blocks", 8)
    counts.add("saved_bytes", 1e6)
    counts.add("save_skipped_blocks", 1)
    counts.add("misses", 2, "not_cached")
    counts.add("misses", 5, "late")
    counts.add("save_dropped_blocks", 4, "pin_limit")
    summary.note(counts.take())
    summary.note(None)

    assert summary.line(59.9, "ready") == ""
    assert summary.line(61.0, "ready") == (
        "pegaflow: in 61 s 3 requests loaded 30 blocks, 3.0 MB, median 20 ms; "
        "saved 8 blocks, 1.0 MB, 1 were cached or had no room; "
        "misses: late 5, not_cached 2; blocks dropped: pin_limit 4; link ready"
    )
    assert summary.line(200.0, "ready") == ""


def test_the_log_line_can_be_disabled():
    summary = Summary(0.0, now=0.0)
    summary.note(Counts(data={"loads": {"": 1}}))
    assert summary.line(1e6, "ready") == ""


def test_the_log_line_is_written_in_a_step(pega, prompt, caplog):
    with Engine(pega.address, extra={"pegaflow.log_interval_s": 0.001}) as engine:
        engine.wait_ready()
        engine.connector._scheduler._link_seen_at = float("-inf")
        engine.ask("a", prompt(100))
        engine.run()
        engine.connector._scheduler._link_seen_at = float("-inf")
        engine.ask("b", prompt(100))
        engine.run()
    lines = [r.getMessage() for r in caplog.records if "pegaflow: in " in r.getMessage()]
    assert any("saved 6 blocks" in line and "link ready" in line for line in lines), lines


def test_vllms_own_log_line_shows_transfers():
    counts = Counts()
    counts.add("saved_blocks", 3)
    counts.add("misses", 1, "late")
    assert counts.reduce() == {"saved_blocks": 3}
    assert not counts.is_empty()
    counts.reset()
    assert counts.is_empty()
