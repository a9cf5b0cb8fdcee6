"""KV events in vLLM's own types, for the releases that differ in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

try:
    from vllm.v1.core.kv_cache_utils import to_event_extra_keys  # 0.31 and later
except ImportError:

    def to_event_extra_keys(extra_keys: Any) -> Any:
        return extra_keys  # already untagged


#: The pool is the node's memory: "CPU", and LOCAL to the publishing engine.
MEDIUM = "CPU"
LOCALITY = "LOCAL"


@dataclasses.dataclass(eq=False)
class Run:
    """Consecutive blocks of one chain, with their data for events.

    Copied from the request when its keys are known to fit its tokens, because the request changes
    and ends.
    """

    keys: list[bytes]  #: In the cache.
    hashes: list[bytes]  #: In vLLM and its consumers.
    parent: bytes | None  #: vLLM's hash of the block before.
    token_ids: list[int]
    extra_keys: list[tuple[Any, ...] | None]
    lora_id: int | None
    lora_name: str | None
    session_id: str | None


class EventFormat:
    """Builds events for the only cache group of an engine."""

    def __init__(self, group: Any, block_size: int) -> None:
        self.block_size = block_size
        self._of_group = {
            "group_idx": 0,
            "kv_cache_spec_kind": get_kv_cache_spec_kind(group.kv_cache_spec).value,
            "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            "locality": LOCALITY,
        }
        self._has_session = "session_id" in BlockStored.__struct_fields__

    def run(self, request: Any, chain: Any, first: int, stop: int) -> Run:
        """The blocks ``first`` to ``stop`` - 1 of a request, all of whose keys can be trusted."""
        size = self.block_size
        lora = request.lora_request
        return Run(
            keys=chain.keys(first, stop),
            hashes=chain.hashes(first, stop),
            parent=chain.hash(first - 1) if first else None,
            token_ids=list(request.all_token_ids[first * size : stop * size]),
            extra_keys=self._extra_keys(request, first, stop),
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            session_id=getattr(request, "session_id", None),
        )

    def _extra_keys(self, request: Any, first: int, stop: int) -> list[tuple[Any, ...] | None]:
        has_none = not (
            request.lora_request
            or request.mm_features
            or request.cache_salt
            or getattr(request, "prompt_embeds", None) is not None
        )
        if has_none:
            return [None] * (stop - first)
        keys, size, feature = [], self.block_size, 0
        for block in range(first, stop):
            extra, feature = generate_block_hash_extra_keys(
                request, block * size, (block + 1) * size, feature
            )
            keys.append(extra)
        return keys

    def stored(self, run: Run, first: int, stop: int) -> BlockStored:
        """The blocks ``first`` to ``stop`` - 1 of a run."""
        parent = run.hashes[first - 1] if first else run.parent
        size = self.block_size
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(name) for name in run.hashes[first:stop]],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=run.token_ids[first * size : stop * size],
            block_size=size,
            lora_id=run.lora_id,
            medium=MEDIUM,
            lora_name=run.lora_name,
            extra_keys=to_event_extra_keys(run.extra_keys[first:stop]),
            **self._of_group,
            **({"session_id": run.session_id} if self._has_session else {}),
        )

    def clears_all(self, event: Any) -> bool:
        return isinstance(event, AllBlocksCleared)

    def removed(self, hashes: Sequence[bytes]) -> BlockRemoved:
        return BlockRemoved(
            block_hashes=[maybe_convert_block_hash(name) for name in hashes],
            medium=MEDIUM,
            group_idx=0,
            locality=LOCALITY,
        )
