"""An engine that is configured to use the cache and does not is visible, with the reason."""

import json
import logging
import os
import shutil
import urllib.request
from pathlib import Path
from typing import Any

from pegaflow import _native
from pegaflow.cli import server_view
from pegaflow.cli.finding import ADVICE, OK, PROBLEM
from pegaflow.vllm.build import Unservable
from tests.python.harness import Engine
from tests.support.prometheus import read_metrics
from tests.support.vllm_server import ModelShape, VllmOptions, VllmServer, ensure_model
from tests.support.waiting import wait_until


def instances(pega: Any) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"http://{pega.http}/instances", timeout=20) as answer:
        return json.load(answer)["instances"]


def not_served(pega: Any) -> list[dict[str, Any]]:
    return [row for engine in instances(pega) for row in engine["not_served"]]


def findings(pega: Any) -> list[Any]:
    return list(server_view.check_instances(instances(pega)))


# ---- the real scheduler and worker sides


def test_a_worker_that_cannot_serve_is_shown_with_its_reason(pega, prompt, monkeypatch):
    def refuse(*arguments):
        raise Unservable("the weights have no id", "weights")

    monkeypatch.setattr("pegaflow.vllm.build._make_mover", refuse)
    with Engine(pega.address) as engine:
        engine.ask("a", prompt(100))
        engine.ask("b", prompt(40))

        # vLLM's own metrics show it for both sides.
        assert engine.stats["serving{worker}"] == 0
        assert engine.stats["serving{scheduler}"] == 0
        wait_until(lambda: len(not_served(pega)) == 1, "the notice does not arrive")
        (shown,) = instances(pega)
        (row,) = shown["not_served"]
        assert shown["state"] == "not served: the weights have no id"
        assert (row["side"], row["rank"], row["reason"]) == ("worker", 0, "weights")
        assert "vllm" in row["build"]
        metrics = read_metrics(pega.http)
        assert metrics.total("pegaflow_instances_not_served", reason="weights") == 1
        finding = findings(pega)[0]
        assert finding.status == PROBLEM
        assert "the weights have no id" in finding.detail
        assert "pegaflow weights-id" in finding.fix
    wait_until(lambda: not instances(pega), "the notice outlives its engine")


def test_a_scheduler_that_cannot_serve_is_shown_with_its_reason(pega, prompt):
    with Engine(pega.address, extra={"pegaflow.mode": "x"}) as engine:
        engine.ask("a", prompt(100))
        wait_until(lambda: len(not_served(pega)) == 1, "the notice does not arrive")
        (row,) = not_served(pega)
        assert (row["side"], row["reason"]) == ("scheduler", "configuration")
        assert "not one of read_write, save_only" in row["detail"]
    wait_until(lambda: not instances(pega), "the notice outlives its engine")


def test_a_side_that_failed_is_shown(pega, prompt, monkeypatch):
    with Engine(pega.address) as engine:
        engine.wait_ready()

        def fail(*arguments):
            raise RuntimeError("planted")

        monkeypatch.setattr(engine.connector._scheduler, "plan", fail)
        engine.ask("a", prompt(100))
        wait_until(lambda: len(not_served(pega)) == 1, "the notice does not arrive")
        (row,) = not_served(pega)
        assert (row["side"], row["reason"]) == ("scheduler", "failure")
        assert "planted" in row["detail"]
    wait_until(lambda: not instances(pega), "the notice outlives its engine")


def test_without_a_server_a_notice_waits_for_one(own_pega):
    pega = own_pega
    pega.kill()
    notice = _native.DeclineNotice(
        str(pega.socket),
        "engine",
        "a test",
        reason="model",
        detail="not served",
        reconnect_interval=0.05,
    )
    assert notice.status()["state"] == "connecting"

    pega.start()

    wait_until(lambda: len(not_served(pega)) == 1, "the notice does not arrive")
    notice.close()
    notice.close()
    wait_until(lambda: not instances(pega), "the notice outlives its connection")


def test_the_log_line_that_names_the_instance_waits_for_the_workers(pega, prompt, caplog):
    caplog.set_level(logging.INFO)
    with Engine(pega.address) as engine:
        assert not [r for r in caplog.records if "all ranks use the cache" in r.getMessage()]
        engine.wait_ready()
        engine.ask("a", prompt(100))
        engine.ask("b", prompt(100))
        lines = [r.getMessage() for r in caplog.records if "all ranks use" in r.getMessage()]
        assert len(lines) == 1
        assert "instance" in lines[0]
        assert engine.stats["serving{scheduler}"] == 1


def test_the_copy_path_of_an_engine_is_shown(pega):
    with Engine(pega.address) as engine:
        engine.wait_ready()
        wait_until(lambda: "device" in instances(pega)[0]["ranks"][0], "the device does not appear")
        (shown,) = instances(pega)
        (rank,) = shown["ranks"]
        assert (rank["device"], rank["kernels"], rank["copy_path"]) == (
            "host memory",
            "not needed",
            "host",
        )
        assert shown["loads"] is True
        (line,) = [f for f in findings(pega) if f.check == "device"]
        assert line.status == OK
        assert "host memory" in line.detail


def test_doctor_gives_advice_about_missing_kernels():
    rank = {
        "connected": True,
        "device": "NVIDIA H200",
        "kernels": "missing",
        "copy_path": "direct",
    }
    engine = {
        "instance": "a",
        "state": "connected",
        "namespace": "n",
        "factors": [{"name": "weights", "value": "w"}],
        "ranks": [rank, rank],
        "not_served": [],
    }
    (line,) = [f for f in server_view.check_instances([engine]) if f.check == "device"]
    assert line.status == ADVICE
    assert "NVIDIA H200" in line.detail
    assert "nvcc" in line.fix


# ---- a real vllm serve


def windowed_model(directory: Path) -> Path:
    """A model with a sliding window in each layer, which is not served."""
    base = ensure_model(ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16))
    shutil.copytree(base, directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 64,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_real_engine_with_a_rejected_model_is_shown(pega, short_path, tmp_path):
    options = VllmOptions(
        model=windowed_model(tmp_path / "model"),
        connector=pega.address,
        extra_config={},
        block_size=32,
        kv_cache_bytes=64 << 20,
        prefix_caching=False,
        python_path=[Path(os.environ["PEGA_BUILD_DIR"]) / "python"],
    )
    with VllmServer(options, short_path / "v"):
        wait_until(lambda: len(not_served(pega)) == 1, "the notice does not arrive")
        (row,) = not_served(pega)
        assert (row["side"], row["reason"]) == ("scheduler", "model")
        assert "need vLLM's prefix caching" in row["detail"]
        assert findings(pega)[0].status == PROBLEM
    wait_until(lambda: not instances(pega), "the notice outlives its engine")
