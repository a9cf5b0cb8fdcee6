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
    """Consecutive blocks of one kind and chain, with their data for events.

    Copied from the request when its keys are known to fit its tokens, because the request changes
    and ends.
    """

    kind: int
    keys: list[bytes]  #: In the cache.
    hashes: list[bytes]  #: In vLLM and its consumers.
    parent: bytes | None  #: vLLM's hash of the block before.
    token_ids: list[int]
    extra_keys: list[tuple[Any, ...] | None]
    lora_id: int | None
    lora_name: str | None
    session_id: str | None


class EventFormat:
    """Builds events for the cache groups of an engine. A kind's events are those of its first
    group, since its groups are stored and removed together.
    """

    def __init__(self, groups: Sequence[Any], first_members: Sequence[int] = (0,)) -> None:
        """``groups`` are vLLM's, ``first_members`` has the number of one of them for each kind."""
        specs = [groups[number].kv_cache_spec for number in first_members]
        self._groups = tuple(first_members)
        self._block_sizes = [spec.block_size for spec in specs]
        self._of_group = [
            {
                "group_idx": number,
                "kv_cache_spec_kind": get_kv_cache_spec_kind(spec).value,
                "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(spec),
                "locality": LOCALITY,
            }
            for number, spec in zip(first_members, specs, strict=True)
        ]
        self._has_session = "session_id" in BlockStored.__struct_fields__

    def run(self, kind: int, request: Any, names: Any, first: int, stop: int) -> Run:
        """The blocks ``first`` to ``stop`` - 1 of a request, all of whose keys can be trusted.

        ``names``: the KeyChain or KeysOfKind with these blocks.
        """
        size = self._block_sizes[kind]
        lora = request.lora_request
        return Run(
            kind=kind,
            keys=names.keys(first, stop),
            hashes=names.hashes(first, stop),
            parent=names.hash(first - 1) if first else None,
            token_ids=list(request.all_token_ids[first * size : stop * size]),
            extra_keys=self._extra_keys(request, size, first, stop),
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            session_id=getattr(request, "session_id", None),
        )

    def _extra_keys(
        self, request: Any, size: int, first: int, stop: int
    ) -> list[tuple[Any, ...] | None]:
        has_none = not (
            request.lora_request
            or request.mm_features
            or request.cache_salt
            or getattr(request, "prompt_embeds", None) is not None
        )
        if has_none:
            return [None] * (stop - first)
        keys, feature = [], 0
        for block in range(first, stop):
            extra, feature = generate_block_hash_extra_keys(
                request, block * size, (block + 1) * size, feature
            )
            keys.append(extra)
        return keys

    def stored(self, run: Run, first: int, stop: int) -> BlockStored:
        """The blocks ``first`` to ``stop`` - 1 of a run."""
        parent = run.hashes[first - 1] if first else run.parent
        size = self._block_sizes[run.kind]
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(name) for name in run.hashes[first:stop]],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=run.token_ids[first * size : stop * size],
            block_size=size,
            lora_id=run.lora_id,
            medium=MEDIUM,
            lora_name=run.lora_name,
            extra_keys=to_event_extra_keys(run.extra_keys[first:stop]),
            **self._of_group[run.kind],
            **({"session_id": run.session_id} if self._has_session else {}),
        )

    def clears_all(self, event: Any) -> bool:
        return isinstance(event, AllBlocksCleared)

    def removed(self, kind: int, hashes: Sequence[bytes]) -> BlockRemoved:
        return BlockRemoved(
            block_hashes=[maybe_convert_block_hash(name) for name in hashes],
            medium=MEDIUM,
            group_idx=self._groups[kind],
            locality=LOCALITY,
        )
