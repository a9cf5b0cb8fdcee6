"""The longest restorable prefix is the one that vLLM's own coordinator finds in the same blocks."""

import os
import random
import subprocess
from pathlib import Path

import torch
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

PREFIX, TRAILING, CHUNK, STATE = range(4)
#: `./dev soak` sets 1,000,000.
CASES = int(os.environ.get("PEGA_RESTORABLE_CASES", "20000"))


class Existing:
    """The index of vLLM's block pool, over a set of blocks that need not be in any pool."""

    def __init__(self) -> None:
        self.present: set[bytes] = set()
        self.block = KVCacheBlock(1)

    def get_one_block(self, key: bytes) -> KVCacheBlock | None:
        return self.block if key in self.present else None


class Model:
    """A coordinator of vLLM for random cache groups, and the same groups as kinds."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.unit = 2 ** draw.randrange(1, 5)
        has_chunks = draw.random() < 0.25
        # vLLM has chunks only where all groups have blocks of equal size.
        sizes = [self.unit] if has_chunks else [self.unit, 2 * self.unit, 4 * self.unit]
        #: For each kind: rule, tokens, block, number of vLLM's groups.
        self.kinds: list[tuple[int, int, int, int]] = []
        specs = []
        for _ in range(draw.randint(1, 4)):
            spec, kind = self._draw_spec(draw.choice(sizes), has_chunks)
            if spec in specs:
                continue
            specs.append(spec)
            self.kinds.append((*kind, draw.randint(1, 3)))
        # The unit is the block of some group, else vLLM hashes in larger units.
        self.unit = min(kind[2] for kind in self.kinds)
        self.alignment = max(kind[2] for kind in self.kinds)
        if has_chunks and len(self.kinds) == 1:
            self.kinds[0] = (*self.kinds[0][:3], max(2, self.kinds[0][3]))
        self.group_ids: list[list[int]] = []
        groups: list[KVCacheGroupSpec] = []
        for spec, (_, _, _, members) in zip(specs, self.kinds, strict=True):
            self.group_ids.append(list(range(len(groups), len(groups) + members)))
            groups += [KVCacheGroupSpec([f"layer{len(groups) + i}"], spec) for i in range(members)]
        self.coordinator = get_kv_cache_coordinator(
            KVCacheConfig(2, [], groups),
            max_model_len=1 << 20,
            max_in_flight_tokens=1 << 20,
            use_eagle=False,
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=self.alignment,
            hash_block_size=self.unit,
            allow_partial_hash_hits=False,
        )
        self.existing = Existing()
        self.coordinator.block_pool.cached_block_hash_to_block = self.existing

    def _draw_spec(self, block: int, has_chunks: bool) -> tuple[object, tuple[int, int, int]]:
        draw = self.draw
        attention = {
            "block_size": block,
            "num_kv_heads": 1,
            "head_size": draw.choice([64, 128]),
            "dtype": torch.float16,
        }
        rule = draw.choice([PREFIX, TRAILING, CHUNK if has_chunks else STATE, TRAILING])
        if rule == PREFIX:
            return FullAttentionSpec(**attention), (PREFIX, 0, block)
        if rule == TRAILING:
            window = draw.randint(2, 7 * block)
            return SlidingWindowSpec(**attention, sliding_window=window), (rule, window - 1, block)
        if rule == CHUNK:
            chunk = block * draw.randint(1, 6)
            spec = ChunkedLocalAttentionSpec(**attention, attention_chunk_size=chunk)
            return spec, (rule, chunk, block)
        spec = MambaSpec(
            block_size=block, shapes=((4,),), dtypes=(torch.float16,), mamba_cache_mode="align"
        )
        return spec, (STATE, 0, block)

    def draw_case(self) -> tuple[int, str]:
        """The hit of vLLM's coordinator, and the search for `restorable_search`."""
        draw, units = self.draw, self.draw.randrange(120)
        tokens = units * self.unit
        hashes = [(i + 1).to_bytes(32, "big") for i in range(units)]
        self.existing.present = present = set()
        fields = [self.unit, self.alignment, units, 0]
        for (rule, length, block, _), group_ids in zip(self.kinds, self.group_ids, strict=True):
            holes = 2 ** -draw.randint(1, 8)
            digits = ""
            for number in range(tokens // block):
                key = hashes[(number + 1) * block // self.unit - 1]
                # A block exists once all groups of its kind have it.
                missing = draw.choice(group_ids) if draw.random() < holes else None
                present.update(
                    make_block_hash_with_group_id(key, group)
                    for group in group_ids
                    if group != missing
                )
                digits += "0" if missing is not None else "1"
            fields += [rule, length, block, digits or "-"]
        limit = tokens // self.alignment * self.alignment
        _, hit, _ = self.coordinator.find_longest_cache_hit(hashes, limit)
        return hit, " ".join(map(str, fields))


def test_random_groups_and_blocks_have_the_hit_of_vllms_coordinator(seed: int):
    draw = random.Random(seed)
    expected, searches = [], []
    while len(expected) < CASES:
        model = Model(draw)
        for _ in range(20):
            hit, line = model.draw_case()
            expected.append(hit)
            searches.append(line)
    program = Path(os.environ["PEGA_BUILD_DIR"]) / "tests" / "support" / "restorable_search"
    done = subprocess.run(
        [program], input="\n".join(searches) + "\n", text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [int(line) for line in done.stdout.splitlines()]
    differences = [
        (line, hit, ours)
        for line, hit, ours in zip(searches, expected, found, strict=True)
        if hit != ours
    ]
    assert not differences, f"{len(differences)} of {len(found)}: {differences[:3]}"
    hits = sum(hit > 0 for hit in found)
    assert CASES * 0.2 < hits < CASES * 0.95, hits
