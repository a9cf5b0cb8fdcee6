"""The dashboard and the alert rules name only metrics and labels that exist."""

import contextlib
import json
import os
import re
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import yaml

from pegaflow.api import Cache
from pegaflow.vllm.metrics import COUNTER, GAUGE, HISTOGRAM, METRICS
from tests.python.harness import Engine
from tests.support.disk_server import disk_options
from tests.support.prometheus import read_metrics
from tests.support.promql import NotPromQL, selectors
from tests.support.sglang_metrics import SGLANG_METRICS
from tests.support.vllm_server import PegaServer, RouterServer

ROUTER = Path(os.environ["PEGA_BUILD_DIR"]) / "router" / "pegaflow-router"
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
#: Labels that Prometheus itself adds, and those that vLLM adds to the connector's metrics.
FROM_PROMETHEUS = {"instance", "job"}
FROM_VLLM = {"model_name", "engine"}


def dashboard():
    return json.loads((DEPLOY / "grafana" / "pegaflow.json").read_text())


def alerts():
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels():
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions():
    """The origin of each expression, and the expression with Grafana's variables filled in."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$server", ".*").replace("$model", ".*")
    for rule in alerts():
        yield rule["alert"], rule["expr"]


@pytest.fixture(scope="module")
def router_metrics(pega, tmp_path_factory):
    """A router's page; its engine is absent, which changes no name. Two caches differ."""
    if not ROUTER.exists():
        pytest.skip("built without the router")
    with contextlib.ExitStack() as stack:
        for name in ("p", "d"):
            memory = [np.zeros((4, 16, 64), np.float16)]
            cache = Cache(memory, factors={"model": name}, endpoint=pega.address, instance=name)
            stack.enter_context(cache)
            cache.wait_ready(timeout_s=30)
        router = RouterServer(ROUTER, tmp_path_factory.mktemp("router"), [], ["127.0.0.1:1"])
        router.arguments += ["--servers", f"http://{pega.http}", "--prefill", "http://127.0.0.1:1"]
        stack.enter_context(router)
        urllib.request.urlopen(f"http://{router.http}/version", timeout=20).close()
        end = time.monotonic() + 30
        while not list((metrics := router.metrics()).items("pegaflow_router_namespace_values")):
            assert time.monotonic() < end
        return metrics


@pytest.fixture(scope="module")
def node_metrics(short_path):
    """The page of a server with both lanes among other nodes, of which one is absent, as is the
    directory."""
    secret = short_path / "peers.secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    peers = ["--peers", "127.0.0.1:1", "--peer-listen", "127.0.0.1:0"]
    peers += ["--peer-secret-file", str(secret)]
    peers += ["--directory", "redis://127.0.0.1:1", "--peer-networks", "127.0.0.0/8"]
    binary = Path(os.environ["PEGA_BUILD_DIR"]) / "server" / "pegaflow-server"
    node = PegaServer(
        binary,
        short_path / "node",
        pool_size="64mb",
        arguments=peers,
        env={"PEGAFLOW_TEST_UCX_OVER_TCP": "lo"},
    )
    with node:
        return node.metrics()


@pytest.fixture(scope="module")
def disk_metrics(short_path):
    """The page of a server with an SSD tier."""
    binary = Path(os.environ["PEGA_BUILD_DIR"]) / "server" / "pegaflow-server"
    directory = short_path / "ssd"
    words = disk_options([directory / "disk"])
    with PegaServer(binary, directory, pool_size="64mb", arguments=words) as server:
        return server.metrics()


@pytest.fixture(scope="module")
def kept_metrics(short_path):
    """The page of a server whose pool outlives it; its keeper is absent, which changes no name."""
    binary = Path(os.environ["PEGA_BUILD_DIR"]) / "server" / "pegaflow-server"
    words = ["--keep", "external"]
    with PegaServer(binary, short_path / "kept", pool_size="64mb", arguments=words) as server:
        return server.metrics()


def disk_states():
    """All states of a disk: a page has only the present one."""
    source = (DEPLOY.parent / "server" / "ssd" / "ssd_disk.cpp").read_text()
    function = source[source.index("to_string(SsdDisk::State") :].split("\n}\n")[0]
    return set(re.findall(r'return "([a-z-]+)";', function)) - {"unknown"}


def event_states():
    """All states of an engine's KV events: a page has only the present ones."""
    source = (DEPLOY.parent / "index" / "events" / "source.cpp").read_text()
    names = source[source.index("to_string(Trust") :].split("};")[0]
    return set(re.findall(r'"([a-z_]+)"', names)) | {"no_events"}


@pytest.fixture(scope="module")
def known(pega, router_metrics, node_metrics, disk_metrics, kept_metrics):
    """For each metric: label -> values seen, None for later values, and its kind."""
    with Engine(pega.address) as engine:
        engine.wait_ready()
        engine.ask("a", list(range(10, 310)))
        engine.reset_local()
        engine.ask("b", list(range(10, 310)))
        engine.run()
        metrics = read_metrics(pega.http)
    found = {}
    pages = (metrics, router_metrics, node_metrics, disk_metrics, kept_metrics)
    for name, labels, _ in (sample for page in pages for sample in page.items("pegaflow_")):
        its = found.setdefault(name, {})
        for label, value in labels.items():
            its.setdefault(label, set()).add(value)
    assert len(found) > 60, "the server's page"
    states = found["pegaflow_ssd_disk_state"]["state"]
    assert states < disk_states()
    states |= disk_states()
    states = found["pegaflow_router_kv_source"]["state"]
    assert states < event_states()
    states |= event_states()
    if found["pegaflow_lane_info"]["lane"] == {"tcp"}:  # Built without UCX.
        for labels in found.values():
            labels |= {"lane": None} if "lane" in labels else {}
    for metric in METRICS:
        labels = dict.fromkeys((*metric.labels, *FROM_VLLM))
        name = f"vllm:pegaflow_{metric.name}"
        if metric.kind == COUNTER:
            found[f"{name}_total"] = labels
        elif metric.kind == GAUGE:
            found[name] = labels
        elif metric.kind == HISTOGRAM:
            found[f"{name}_bucket"] = labels | {"le": None}
            found[f"{name}_sum"] = found[f"{name}_count"] = labels
    for name, labels in SGLANG_METRICS.items():
        found[name] = dict.fromkeys(labels)
    found["up"] = {}
    return found


def problems(expression, known):
    """The parts of the expression that do not exist, or are used in the wrong way."""
    for each in selectors(expression):
        if each.metric not in known:
            yield f"no metric {each.metric}"
            continue
        labels = known[each.metric]
        for label in {*each.matchers, *each.grouped_by} - FROM_PROMETHEUS:
            if label not in labels:
                yield f"{each.metric} has no label {label}"
        for label, (operator, value) in each.matchers.items():
            values = labels.get(label)
            if values is None:
                continue
            wanted = value.split("|") if operator == "=~" else [value]
            for one in wanted:
                if not any(re.fullmatch(one, there) for there in values):
                    yield f"{each.metric} has no {label}={one}, only {sorted(values)}"
        is_counter = each.metric.endswith(("_total", "_bucket", "_sum", "_count"))
        # pegaflow_hll_... are gauges with conventional names.
        if is_counter != (each.function in ("rate", "increase")) and "_hll_" not in each.metric:
            yield f"{each.metric} with {each.function or 'no function'}"


def test_every_expression_uses_existing_metrics_and_labels(known):
    wrong = [
        f"{where}: {problem}"
        for where, expression in expressions()
        for problem in problems(expression, known)
    ]
    assert not wrong, "\n".join(wrong)


def test_legends_and_texts_name_labels_that_the_expression_keeps(known):
    for panel in panels():
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                found = selectors(target["expr"].replace("$server", "x").replace("$model", "x"))
                kept = [
                    each.grouped_by or {*known[each.metric], *FROM_PROMETHEUS} for each in found
                ]
                assert all(label in labels for labels in kept), (panel["title"], target)
    for rule in alerts():
        texts = " ".join(rule["annotations"].values())
        for label in re.findall(r"\$labels\.(\w+)", texts):
            kept = [
                each.grouped_by or {*known[each.metric], *FROM_PROMETHEUS}
                for each in selectors(rule["expr"])
            ]
            assert any(label in labels for labels in kept), (rule["alert"], label)


def test_variables_are_filled_from_metrics_that_exist(known):
    queries = [each["query"] for each in dashboard()["templating"]["list"]]
    assert queries[0] == "prometheus"
    for query in queries[1:]:
        metric, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", query).groups()
        assert metric in known
        assert label in {*known[metric], *FROM_PROMETHEUS}


def test_every_metric_of_failures_is_on_the_dashboard(known):
    """Metrics to which the documentation refers are visible without typing their names."""
    shown = {each.metric for _, expression in expressions() for each in selectors(expression)}
    docs = DEPLOY.parent / "docs"
    rows = []
    for name, at_least in (("operations.md", 15), ("nodes.md", 10), ("ssd.md", 10), ("keep.md", 4)):
        page = (docs / name).read_text()
        table = page[page.index("## Metrics\n") :].split("\n## ")[0]
        found = [line for line in table.splitlines() if line.startswith("| `pegaflow_")]
        assert len(found) > at_least, name
        rows += found
    for row in rows:
        names = re.findall(r"`(pegaflow_\w+)", row.split("|")[1])
        assert names
        assert any(shown & {name, f"{name}_bucket"} for name in names), row


def test_every_metric_of_lanes_is_on_the_dashboard_and_has_an_alert(known):
    def named(sources):
        return {each.metric for expression in sources for each in selectors(expression)}

    lanes = {metric for metric in known if "_lane_" in metric or metric.endswith("_lane")}
    shown = named(
        target["expr"].replace("$server", ".*").replace("$model", ".*")
        for panel in panels()
        for target in panel["targets"]
    )
    assert len(lanes) == 5
    assert lanes <= shown
    # The alerts cover two of them: the lane in use, and that it broke.
    watched = named(rule["expr"] for rule in alerts())
    assert {"pegaflow_peer_lane", "pegaflow_peer_lane_falls_total"} <= watched


def test_every_metric_of_disks_is_on_the_dashboard_and_in_the_documentation(known):
    disks = {metric for metric in known if metric.startswith("pegaflow_ssd_")}
    shown = {
        each.metric
        for panel in panels()
        for target in panel["targets"]
        for each in selectors(target["expr"].replace("$server", ".*").replace("$model", ".*"))
    }
    page = (DEPLOY.parent / "docs" / "ssd.md").read_text()
    assert len(disks) > 15
    assert disks <= shown
    assert set(re.findall(r"\bpegaflow_ssd_\w*\w", page)) - {"pegaflow_ssd_"} == disks


def test_the_alerts_of_disks_cover_each_state_that_needs_an_operator(known):
    rules = [rule for rule in alerts() if rule["alert"].startswith("PegaflowSsd")]
    watched = {each.metric for rule in rules for each in selectors(rule["expr"])}
    assert {
        "pegaflow_ssd_disk_state",
        "pegaflow_ssd_breaker_open",
        "pegaflow_ssd_slow",
        "pegaflow_ssd_proof_failures_total",
        "pegaflow_ssd_bytes_in_flight",
        "pegaflow_ssd_rejected_blocks_total",
    } <= watched


def test_every_metric_of_a_kept_pool_is_on_the_dashboard_and_in_the_documentation(kept_metrics):
    names = ("pegaflow_keeper", "pegaflow_adopt", "pegaflow_former_clients")
    kept = {name for name, _, _ in kept_metrics.items("pegaflow_") if name.startswith(names)}
    shown = {
        each.metric
        for panel in panels()
        for target in panel["targets"]
        for each in selectors(target["expr"].replace("$server", ".*").replace("$model", ".*"))
    }
    page = (DEPLOY.parent / "docs" / "keep.md").read_text()
    assert len(kept) == 7
    assert kept <= shown
    assert kept <= set(re.findall(r"\bpegaflow_\w*\w", page))


def test_the_alerts_of_a_kept_pool_cover_each_state_that_needs_an_operator():
    rules = [rule for rule in alerts() if each_metric(rule) & {"pegaflow_keeper"}]
    assert [rule["alert"] for rule in rules] == ["PegaflowKeeperMissing"]
    watched = set().union(*map(each_metric, alerts()))
    assert {"pegaflow_former_clients", "pegaflow_adopted_waits_for_nodes"} <= watched


def each_metric(rule):
    return {each.metric for each in selectors(rule["expr"])}


def test_panels_have_unique_ids_and_places():
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_alerts_have_unique_names_and_describe_the_next_step():
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names))
    for rule in alerts():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("pegaflow_pool_size_bytes", "no metric"),
        ('pegaflow_quarantine_slots{cause="timeout"}', "no label cause"),
        ('pegaflow_quarantine_slots{reason="late"}', "no reason=late"),
        ("sum by (method) (pegaflow_pins)", "no label method"),
        ("pegaflow_load_bytes_total", "no function"),
        ("rate(pegaflow_pins[5m])", "with rate"),
        ('sum(rate(pegaflow_rpc_requests_total{method=~"lookup|guess"}[5m]))', "method=guess"),
        ("rate(vllm:pegaflow_hits[5m])", "no metric"),
    ],
)
def test_a_renamed_metric_or_label_is_detected(expression, problem, known):
    assert problem in " ".join(problems(expression, known))


@pytest.mark.parametrize(
    "expression",
    [
        "sum(pegaflow_pins",
        "pegaflow_pins)",
        "rate(pegaflow_load_bytes_total)",
        "pegaflow_pins[5m]",
        "pegaflow_pins{reason}",
        "pegaflow_pins{reason=late}",
        "pegaflow_pins pegaflow_claims",
        "frobnicate(pegaflow_pins)",
        "sum by (pegaflow_pins)",
        "",
        "1 +",
        "a ; b",
    ],
)
def test_invalid_promql_is_rejected(expression):
    with pytest.raises(NotPromQL):
        selectors(expression)
