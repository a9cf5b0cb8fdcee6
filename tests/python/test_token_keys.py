"""The block hashes of index/token_keys beside those of vLLM's own functions, for random prompts."""

import ctypes
import ctypes.util
import json
import os
import pathlib
import random
import subprocess
import types

import pytest
from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils

PROGRAM = pathlib.Path(os.environ["PEGA_BUILD_DIR"]) / "tests/unit/index/token_keys_lines"
PROMPTS = 100  # Of each algorithm and form.
SIZES = (1, 2, 3, 4, 16, 32, 300)
EDGES = (0, 1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)


class Xxh128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def xxh3_128_digest(data: bytes) -> bytes:
    """The digest of the Python package ``xxhash``, from the C library under it.

    vLLM requires the package for two of its algorithms and does not install it.
    """
    function = ctypes.CDLL(ctypes.util.find_library("xxhash")).XXH3_128bits
    function.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    function.restype = Xxh128
    digest = function(data, len(data))
    return digest.high.to_bytes(8, "big") + digest.low.to_bytes(8, "big")


@pytest.fixture(autouse=True)
def with_xxhash(monkeypatch: pytest.MonkeyPatch) -> None:
    if hashing._xxhash is None:
        package = types.SimpleNamespace(xxh3_128_digest=xxh3_128_digest)
        monkeypatch.setattr(hashing, "_xxhash", package)


def random_text(draws: random.Random) -> str:
    """A text of 1 to 400 characters, some of them not ASCII."""
    alphabet = "abc-/0é漢😀"
    return "".join(draws.choices(alphabet, k=draws.choice((1, 2, 7, 64, 300, 400))))[:300]


def random_prompt(draws: random.Random, algorithm: str, extras: str) -> dict:
    block_size = draws.choice(SIZES)
    count = draws.randrange(0, 5 * block_size)
    tokens = [
        draws.choice(EDGES) if draws.random() < 0.1 else draws.randrange(200_000)
        for _ in range(count)
    ]
    items: list[list] = []
    end = 0
    while draws.random() < 0.6 and len(items) < 40:
        offset = end + draws.choice((0, 0, 1, draws.randrange(2 * block_size)))
        length = draws.choice((1, 2, draws.randrange(1, 3 * block_size + 1)))
        items.append([random_text(draws), offset, length])
        end = offset + length
    with_lora = draws.random() < 0.4
    return {
        "algorithm": algorithm,
        "extras": extras,
        "seed": draws.choice(("0", "vllm-none-hash", random_text(draws)[:60])),
        "block_size": block_size,
        "tokens": tokens,
        "cache_salt": random_text(draws) if draws.random() < 0.4 else "",
        "lora_name": random_text(draws) if with_lora else "",
        "lora_path": random_text(draws) if with_lora else "",
        "items": items,
    }


def fresh(text: str) -> str:
    """The text as an object of its own, as a server's parser makes it for each request."""
    return text.encode().decode()


def request_of(prompt: dict) -> types.SimpleNamespace:
    """What vLLM's functions read of a request."""
    lora = None
    if prompt["lora_name"]:
        lora = types.SimpleNamespace(
            lora_name=fresh(prompt["lora_name"]), lora_path=fresh(prompt["lora_path"])
        )
    features = [
        types.SimpleNamespace(
            identifier=fresh(name),
            mm_position=types.SimpleNamespace(offset=offset, length=length),
        )
        for name, offset, length in prompt["items"]
    ]
    return types.SimpleNamespace(
        mm_features=features,
        lora_request=lora,
        cache_salt=fresh(prompt["cache_salt"]) or None,
        prompt_embeds=None,
        all_token_ids=prompt["tokens"],
        num_tokens=len(prompt["tokens"]),
        block_hashes=[],
    )


def old_form(extras: tuple | None, form: str) -> tuple | None:
    """The extra keys as releases before 0.31 wrote them: without tags, adapters without a path."""
    if extras is None:
        return None
    old: list = []
    for tag, *values in extras:
        if tag == "mm" and form == "untagged":
            old.append(tuple(values))
        else:
            old.append(values[0])
    return tuple(old)


def hashes_of_vllm(prompt: dict) -> str:
    function = hashing.get_hash_fn_by_name(prompt["algorithm"])
    kv_cache_utils.NONE_HASH = function(fresh(prompt["seed"]))
    size = prompt["block_size"]
    request = request_of(prompt)
    if prompt["extras"] == "tagged":
        hashes = kv_cache_utils.get_request_block_hasher(size, function)(request)
        return " ".join(each.hex() for each in hashes)
    hashes = []
    item = 0
    for begin in range(0, request.num_tokens - size + 1, size):
        extras, item = kv_cache_utils.generate_block_hash_extra_keys(
            request, begin, begin + size, item
        )
        hashes.append(
            kv_cache_utils.hash_block_tokens(
                function,
                hashes[-1] if hashes else None,
                request.all_token_ids[begin : begin + size],
                old_form(extras, prompt["extras"]),
            )
        )
    return " ".join(each.hex() for each in hashes)


def hashes_of_pegaflow(prompts: list[dict]) -> list[str]:
    lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    run = subprocess.run([PROGRAM], input=lines, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


@pytest.mark.parametrize("extras", ["tagged", "untagged", "bare"])
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_random_prompts_have_vllms_hashes(algorithm: str, extras: str) -> None:
    draws = random.Random(f"{os.environ['PEGA_TEST_SEED']} {algorithm} {extras}")
    prompts = [random_prompt(draws, algorithm, extras) for _ in range(PROMPTS)]

    found = hashes_of_pegaflow(prompts)

    assert len(found) == len(prompts)
    for prompt, line in zip(prompts, found, strict=True):
        assert line == hashes_of_vllm(prompt), json.dumps(prompt)
    assert sum(len(line.split()) for line in found) > PROMPTS


def test_another_salt_or_seed_gives_other_hashes() -> None:
    """The comparison can fail: each part of a prompt changes the hashes."""
    prompt = random_prompt(random.Random(1), "sha256", "tagged")
    prompt |= {"block_size": 4, "tokens": list(range(16)), "items": [["a", 2, 9]]}
    others = [
        prompt,
        prompt | {"cache_salt": "another"},
        prompt | {"seed": "another"},
        prompt | {"items": [["a", 3, 8]]},
        prompt | {"lora_name": "another", "lora_path": "/there"},
        prompt | {"extras": "untagged"},
    ]
    assert len(set(hashes_of_pegaflow(others))) == len(others)
