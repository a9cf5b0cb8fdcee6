"""Real adapters in a real vLLM: blocks of an adapter belong to the weights that computed them."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import save_file

from pegaflow.vllm.adapters import AdapterFiles
from tests.python.vllm_cases import BLOCK, SMALL, ask, call, serve
from tests.support.hub import Hub
from tests.support.vllm_server import MODEL_NAME, PegaServer, VllmServer, ensure_model
from tests.support.waiting import wait_until

RANK = 8
WHOLE = 500 // BLOCK * BLOCK
RUNTIME = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
LORA = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2", "--max-cpu-loras", "4")


def write_adapter(directory: Path, seed: int) -> None:
    """Random weights for the projections of the attention, like a trainer's output."""
    chance = numpy.random.default_rng(seed)
    heads = SMALL.heads * SMALL.head_dim
    tensors = {}
    for layer in range(SMALL.layers):
        for name, rows in (("q_proj", heads), ("v_proj", SMALL.kv_heads * SMALL.head_dim)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (RANK, SMALL.hidden)), ("B", (rows, RANK))):
                drawn = chance.standard_normal(shape, dtype=numpy.float32)
                tensors[f"{prefix}.lora_{part}.weight"] = drawn * 0.2
    directory.mkdir(exist_ok=True)
    made = directory / "adapter_model.making"
    save_file(tensors, made, metadata={"format": "pt"})
    made.rename(directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config |= {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "base"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    settle(directory)


def settle(directory: Path) -> None:
    """Waits until a further change of the files would be visible, as for adapters of last week."""
    wait_until(
        lambda: AdapterFiles(str(directory)).is_stable(time.time_ns()), "the files are too new"
    )


def load(vllm: VllmServer, name: str, path: Path) -> None:
    call(vllm, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})


def replace(vllm: VllmServer, name: str, path: Path) -> None:
    call(vllm, "/v1/unload_lora_adapter", {"lora_name": name})
    load(vllm, name, path)


def modules(**paths: Path) -> list[str]:
    return ["--lora-modules", *(f"{name}={path}" for name, path in paths.items())]


def test_blocks_of_an_adapter_belong_to_the_weights_that_computed_them(
    own_pega: PegaServer, short_path: Path, prompt: Any
) -> None:
    tokens = prompt(500)
    model = ensure_model(SMALL)
    one, two = short_path / "one", short_path / "two"
    write_adapter(one, 1)
    write_adapter(two, 2)
    shutil.copytree(one, short_path / "one-as-it-was")
    names = (MODEL_NAME, "one", "two")

    with serve(
        model, short_path / "a", own_pega, *LORA, *modules(one=one, two=two), env=RUNTIME
    ) as a:
        first = {}
        for name in names:
            first[name], loaded = ask(a, tokens, model=name)
            assert loaded == 0, name
        for name in names:
            assert ask(a, tokens, model=name) == (first[name], WHOLE), name

        # Retrained under the same name and path: vLLM's own key is the same.
        write_adapter(one, 3)
        replace(a, "one", one)
        retrained, loaded = ask(a, tokens, model="one")
        assert loaded == 0 and retrained != first["one"]
        assert ask(a, tokens, model="one") == (retrained, 0), "vLLM's weights are uncertain"
        assert a.metrics().total("vllm:pegaflow_misses_total", reason="adapter") > 0
        # As documented, it is cached from a new path.
        shutil.copytree(one, short_path / "again")
        settle(short_path / "again")
        load(a, "again", short_path / "again")
        ask(a, prompt(40), model="again")  # its files are read meanwhile
        assert ask(a, tokens, model="again") == (retrained, 0)
        assert ask(a, tokens, model="again") == (retrained, WHOLE)
        assert ask(a, tokens, model="two") == (first["two"], WHOLE)

    with serve(
        model, short_path / "b", own_pega, *LORA, *modules(one=one, two=two), env=RUNTIME
    ) as b:
        assert ask(b, tokens, model="one") == (retrained, 0), "a block of the former adapter"
        assert ask(b, tokens, model="one") == (retrained, WHOLE)
        assert ask(b, tokens, model="two") == (first["two"], WHOLE)
        assert ask(b, tokens) == (first[MODEL_NAME], WHOLE)

    before = short_path / "one-as-it-was"
    plain = modules(one=one, two=two, before=before)
    with serve(model, short_path / "c", None, *LORA, *plain, env=RUNTIME) as c:
        assert ask(c, tokens)[0] == first[MODEL_NAME]
        assert ask(c, tokens, model="two")[0] == first["two"]
        assert ask(c, tokens, model="one")[0] == retrained
        assert ask(c, tokens, model="before")[0] == first["one"]
    assert len({tuple(answer) for answer in (*first.values(), retrained)}) == 4


def test_an_adapter_that_vllm_downloads_is_cached(
    own_pega: PegaServer, short_path: Path, prompt: Any
) -> None:
    tokens = prompt(500)
    home = short_path / "home"
    write_adapter(short_path / "pushed", 1)
    with Hub() as hub:
        hub.push("org/adapter", short_path / "pushed")
        online = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_ENDPOINT": hub.url}
        online |= {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
        model = ensure_model(SMALL)
        with serve(model, short_path / "d", own_pega, *LORA, env=RUNTIME | online) as vllm:
            assert not home.joinpath("hub", "models--org--adapter").exists()
            load(vllm, "one", Path("org/adapter"))
            base, _ = ask(vllm, tokens)
            answer, loaded = ask(vllm, tokens, model="one")
            assert loaded == 0 and answer != base
            assert ask(vllm, tokens, model="one") == (answer, WHOLE)
        assert not hub.unknown, hub.unknown
