"""A real vLLM on the CPU writes the KV of each layer before it calls the layer's hook.

The connector depends on it where a GPU computes: the saves of a step wait for the last hook.
"""

import json
import os

from tests.python.hook_order import FILE_ENV
from tests.python.vllm_cases import BLOCK, PATIENT, SMALL, ask, forget
from tests.support.vllm_server import REPOSITORY, VllmOptions, VllmServer, ensure_model


def test_each_layer_has_one_hook_after_its_kv(pega, prompt, short_path):
    lines = short_path / "hooks.jsonl"
    options = VllmOptions(
        model=ensure_model(SMALL),
        kv_transfer_config={
            "kv_connector": "HookOrder",
            "kv_connector_module_path": "tests.python.hook_order",
            "kv_role": "kv_both",
            "kv_connector_extra_config": PATIENT | {"pegaflow.host": pega.address},
        },
        block_size=BLOCK,
        max_model_len=1024,
        kv_cache_bytes=16 << 20,
        python_path=[REPOSITORY / os.environ["PEGA_BUILD_DIR"] / "python", REPOSITORY],
    )
    with VllmServer(options, short_path / "v", {FILE_ENV: str(lines)}) as vllm:
        tokens = prompt(300)
        computed, _ = ask(vllm, tokens)
        assert ask(vllm, tokens) == (computed, 288)
        forget(vllm)

    steps = [json.loads(line) for line in lines.read_text().splitlines()]
    forward = [step for step in steps if step["hooks"]]  # others wait for a load
    assert len(forward) >= 2 * 8, "a step for each token of both answers"
    for step in forward:
        assert len(step["layers"]) == SMALL.layers
        assert step["watched"] == step["layers"] == sorted(step["hooks"])
        assert sorted(step["written"]) == step["layers"]
        assert step["written_after_hook"] == []
