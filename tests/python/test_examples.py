"""The examples run as in their READMEs, small: one start of vLLM each."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from tests.python.harness import PATIENT
from tests.support.vllm_server import ModelShape, PegaServer, ensure_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SMALL = ModelShape(layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32)
KV_BYTES = 64 << 20

sys.path.insert(0, str(EXAMPLES))  # the scripts import each other


def run(*words: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=540)


def test_the_second_run_of_basic_vllm_loads_its_blocks_and_has_the_same_answers(tmp_path):
    engine = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "block_size": 32,
        "kv_cache_memory_bytes": KV_BYTES,
    }
    binary = Path(os.environ["PEGA_BUILD_DIR"], "server/pegaflow-server")
    with PegaServer(binary, tmp_path, pool_size="256mb") as server:
        words = ["--model", ensure_model(SMALL), "--server", server.address, "--output-len", "4"]
        words += ["--connector", json.dumps(PATIENT), "--llm", json.dumps(engine)]
        done = run(EXAMPLES / "basic_vllm.py", *words)

        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        assert "cold: " in done.stdout
        assert " 0 of " in done.stdout  # the first run loaded nothing from a cache
        assert "the answers are the same" in done.stdout
        assert server.metrics().total("pegaflow_load_blocks_total") > 0


def test_bench_kv_cache_measures_both_rounds_and_draws_them(tmp_path):
    words = ["--model", ensure_model(SMALL), "--num-prompts", "4", "--input-len", "200"]
    words += ["--output-len", "2", "--request-rate", "inf", "--pool-size", "256mb"]
    words += ["--connector", json.dumps(PATIENT), "--output-dir", tmp_path / "out", "--"]
    words += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    words += ["--block-size", "32", "--kv-cache-memory-bytes", str(KV_BYTES)]
    done = run(EXAMPLES / "bench_kv_cache.py", *words)

    log = tmp_path / "out/vllm.log"
    told = log.read_text()[-3000:] if log.exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + told
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["loaded_blocks"] == 4 * (200 // 32)
    for name in ("cold", "warm"):
        assert len(results[name]["ttft_s"]) == 4
        assert f"\n{name} " in done.stdout
        assert {"mean_ttft_ms", "p50_ttft_ms", "p99_ttft_ms"} <= set(results[name])
    assert list((tmp_path / "out").glob("ttft.*"))


def test_the_summary_of_a_round_is_mean_median_and_p99():
    import bench_kv_cache

    hundred = [number / 1000 for number in range(1, 101)]

    found = bench_kv_cache.summary(hundred)

    assert found["mean_ttft_ms"] == pytest.approx(50.5)
    assert found["p50_ttft_ms"] == pytest.approx(50.5)
    assert found["p99_ttft_ms"] == pytest.approx(99)
    assert bench_kv_cache.summary([0.002])["p99_ttft_ms"] == pytest.approx(2)


def test_without_matplotlib_the_plot_is_an_svg_with_both_rounds(tmp_path, monkeypatch):
    import plot

    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    picture = plot.draw(tmp_path, {"cold": [0.5, 1.0], "warm": [0.1, 0.2]})

    assert picture.name == "ttft.svg"
    tree = xml.etree.ElementTree.parse(picture)
    space = "{http://www.w3.org/2000/svg}"
    assert {"cold", "warm"} <= {text.text for text in tree.iter(f"{space}text")}
    assert len(list(tree.iter(f"{space}polyline"))) == 3
