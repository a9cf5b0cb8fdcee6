"""The bytes that a server stores for the shape of gpt-oss, against the calculator's formula."""

import pytest

from demo.expectations import ExpectedCache, Layers
from tests.python.kinds_engine import full, window
from tests.python.soak_engine import SoakEngine
from tests.python.test_kinds_expectations import prompt_of

WINDOW = 128
INTERVAL = 2048  # the default of pegaflow.window_interval


@pytest.mark.parametrize("prompt_tokens", [16 * 1024, 20_000, 24 * 1024 + 5])
def test_windows_of_gpt_oss_add_a_tenth_at_most(own_pega, prompt_tokens, monkeypatch):
    # The model's directory has a shorter limit; no position is computed here.
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    # As many layers have windows as full attention, so blocks of both have equal pages.
    engine = SoakEngine(
        [window(16, WINDOW), full(16)],
        own_pega.address,
        blocks=4000,
        interval=INTERVAL,
        room=50,
        max_model_len=32_768,
        max_num_batched_tokens=2048,
        extra={"pegaflow.weights_id": f"gpt-oss-{prompt_tokens}"},
    )
    try:
        engine.wait_ready()
        prompt = prompt_of(prompt_tokens)
        engine.ask("a", prompt, 20)
        engine.run()
        answer = engine.answers["a"][prompt_tokens:]
        page_bytes = engine.worker._worker.mover.kind_page_bytes
    finally:
        engine.close()

    layers = [Layers("full", 16), Layers("window", 16, WINDOW)]
    expected = ExpectedCache(layers, INTERVAL).ask(prompt, answer).stored_blocks
    metrics = own_pega.metrics()
    stored = {
        kind: metrics.total("pegaflow_kind_saved_bytes_total", kind=kind)
        for kind in ("full", "window")
    }
    assert page_bytes == [4096, 4096]
    assert stored == {kind: blocks * 4096 for kind, blocks in expected.items()}
    assert metrics.total("pegaflow_cache_resident_blocks") == sum(expected.values())
    per_thousand = {kind: size / prompt_tokens * 1000 for kind, size in stored.items()}
    print(f"{prompt_tokens} tokens: {per_thousand} bytes for each 1,000")
    assert not engine.wrong
    assert stored["window"] <= 0.1 * stored["full"]
