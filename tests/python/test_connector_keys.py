"""A key names a block only if it was computed over exactly the tokens in it."""

import hashlib
from typing import Any

import pytest
from PIL import Image
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from pegaflow.vllm.keys import KeyChain


class FakeRequest:
    """Tokens and their chained hashes, one for each full unit, as vLLM keeps them."""

    def __init__(self, tokens: int, unit: int, width: int = 32) -> None:
        self.unit, self.width = unit, width
        self.tokens: list[int] = []
        self.block_hashes: list[bytes] = []
        self.append(*range(tokens))

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def append(self, *tokens: int) -> None:
        for token in tokens:
            self.tokens.append(token)
            done = len(self.block_hashes) * self.unit
            if len(self.tokens) == done + self.unit:
                parent = self.block_hashes[-1] if self.block_hashes else b""
                text = repr((parent, self.tokens[done:]))
                digest = hashlib.sha256(text.encode()).digest()
                self.block_hashes.append(digest[: self.width])


def test_a_block_is_named_by_the_last_hash_inside_it():
    request = FakeRequest(70, unit=8)
    chain = KeyChain(request, block_size=32, hash_unit=8)

    assert chain.usable_blocks() == 2
    assert chain.key(0) == request.block_hashes[3]
    assert chain.key(1) == request.block_hashes[7]
    assert chain.keys(0, 2) == [request.block_hashes[3], request.block_hashes[7]]
    assert chain.keys(1, 2) == [request.block_hashes[7]]
    assert chain.keys(1, 1) == []
    assert chain.key_bytes == 32


def test_equal_units_use_each_hash():
    request = FakeRequest(64, unit=16, width=16)
    chain = KeyChain(request, block_size=16, hash_unit=16)

    assert chain.usable_blocks() == 4
    assert chain.keys(0, 4) == request.block_hashes
    assert chain.key_bytes == 16


def test_a_request_grows_with_its_answer():
    request = FakeRequest(31, unit=16)
    chain = KeyChain(request, block_size=16, hash_unit=16)
    assert chain.usable_blocks() == 1

    request.append(7)

    assert chain.usable_blocks() == 2


def test_inconsistent_hashes_and_tokens_make_the_request_uncached():
    for hashes in (0, 1, 3, 7):
        request = FakeRequest(80, unit=16)
        request.block_hashes = (request.block_hashes * 2)[:hashes]
        chain = KeyChain(request, block_size=16, hash_unit=16)

        assert chain.usable_blocks() == 0
        assert chain.broken == f"{hashes} block hashes for 80 tokens"

        request.block_hashes = FakeRequest(80, unit=16).block_hashes
        assert chain.usable_blocks() == 0, "permanently uncertain"


def test_one_stale_hash_at_the_end_is_tolerated_and_never_used():
    # Another connector removes the last prompt token after vLLM has hashed it.
    request = FakeRequest(64, unit=16)
    chain = KeyChain(request, block_size=16, hash_unit=16)
    request.tokens.pop()

    assert len(request.block_hashes) == 4
    assert chain.usable_blocks() == 3
    assert not chain.broken


def test_hashes_that_chain_over_a_stale_one_are_never_used_either():
    # The token that replaces it is another one, and vLLM does not hash the block again.
    request = FakeRequest(64, unit=16)
    chain = KeyChain(request, block_size=16, hash_unit=16)
    request.tokens.pop()
    assert chain.usable_blocks() == 3

    request.append(999)
    assert len(request.block_hashes) == 4
    assert chain.usable_blocks() == 3, "its fourth hash covers other tokens"

    request.append(*range(16))
    assert len(request.block_hashes) == 5
    assert chain.usable_blocks() == 3


def test_a_stale_hash_finer_than_a_block_costs_its_block_only():
    request = FakeRequest(64, unit=8)
    chain = KeyChain(request, block_size=32, hash_unit=8)
    request.tokens.pop()

    assert chain.usable_blocks() == 1


def test_a_hash_that_the_wire_cannot_carry_makes_the_request_uncached():
    request = FakeRequest(32, unit=16)
    request.block_hashes = [digest * 2 for digest in request.block_hashes]
    chain = KeyChain(request, block_size=16, hash_unit=16)

    assert chain.usable_blocks() == 0
    assert chain.broken == "a block hash has 64 bytes"


def test_a_prompt_without_a_full_block_has_no_key():
    chain = KeyChain(FakeRequest(5, unit=16), block_size=16, hash_unit=16)

    assert chain.usable_blocks() == 0
    assert not chain.broken


# ---- images, by vLLM's own functions


def image_keys(color: str, first: int = 20, **hash_factors: Any) -> list[bytes]:
    """The keys of a prompt with one image, whose 20 tokens begin at ``first``."""
    hash_fn = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(hash_fn)
    identifier = MultiModalHasher.hash_kwargs(
        "blake3", model_id="m", image=Image.new("RGB", (32, 32), color), **hash_factors
    )
    feature = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=first, length=20),
    )
    request = Request(
        "r",
        list(range(100, 180)),
        SamplingParams(max_tokens=1),
        None,
        mm_features=[feature],
        block_hasher=get_request_block_hasher(16, hash_fn),
    )
    chain = KeyChain(request, block_size=16, hash_unit=16)
    assert chain.usable_blocks() == 5
    return chain.keys(0, 5)


@pytest.mark.parametrize(
    "other",
    [
        {"color": "blue"},
        {"color": "red", "first": 21},
        {"color": "red", "mm_processor_kwargs": {"num_crops": 4}},
    ],
)
def test_blocks_from_an_image_on_are_named_by_its_content(other):
    red = image_keys("red")
    assert image_keys("red") == red
    keys = image_keys(**other)
    assert keys[0] == red[0], "the text before it"
    assert not set(keys[1:]) & set(red[1:])
