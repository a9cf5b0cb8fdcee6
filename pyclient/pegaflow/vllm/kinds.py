"""From vLLM's cache groups to kinds of blocks.

Groups whose blocks are needed at the same positions are one kind, and its members: their rule, its
length and the block size are equal. That includes all groups of equal spec. Groups of other layers
(another head size) may differ in their bytes, which are the members' own.

Both roles derive the same kinds from their own copy of the configuration: the scheduler's has one
layer's spec where a worker's has each layer's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from pegaflow.engine.kinds import BlockKind, BlockKinds, KindRule

#: The exact classes of specs that are served, and their rules. Subclasses recycle slots or hold
#: other data.
_RULES = {
    "FullAttentionSpec": KindRule.PREFIX,
    "MLAAttentionSpec": KindRule.PREFIX,
    "SlidingWindowSpec": KindRule.TRAILING,
    "ChunkedLocalAttentionSpec": KindRule.CHUNK,
    "MambaSpec": KindRule.STATE,
}


class UnservedGroups(Exception):
    """The cache groups cannot be served; the text has the reason."""


def layer_specs(group: Any) -> list[Any]:
    """The specs of a group's layers: one for all, or one for each."""
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(by_layer.values()) if by_layer else [group.kv_cache_spec]


def specs_by_layer(group: Any) -> dict[str, Any]:
    """The spec of each layer of a group."""
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return {
        layer: by_layer[layer] if by_layer else group.kv_cache_spec for layer in group.layer_names
    }


def read_kinds(kv_cache_config: Any, cache_config: Any) -> BlockKinds:
    """The kinds of a model's cache groups.

    Raises:
        UnservedGroups: a group is of an unknown class, may not be transferred, or does not fit.
    """
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise UnservedGroups("0 cache groups are not supported")
    _check_groups(kv_cache_config)
    members: dict[tuple[KindRule, int, int], list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(_signature(group), []).append(number)
    blocks = [signature[2] for signature in members]
    unit = _hash_unit(kv_cache_config, cache_config, blocks)
    made = BlockKinds(
        kinds=tuple(
            BlockKind(*signature, tuple(numbers))
            # In vLLM's order, the prefix kind before the others.
            for signature, numbers in sorted(
                members.items(), key=lambda item: item[0][0] != KindRule.PREFIX
            )
        ),
        unit_tokens=unit,
        # vLLM can hit at hash units where all layers allow it; such a hit ends inside of a block.
        alignment_tokens=math.lcm(
            *blocks, getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or 1
        ),
    )
    if reason := made.problem() or _inside_of_states(made, kv_cache_config, cache_config):
        raise UnservedGroups(reason)
    return made


def _inside_of_states(kinds: BlockKinds, kv_cache_config: Any, cache_config: Any) -> str:
    """Why --prefix-match-unit cannot be served beside states; empty if it can.

    With it vLLM's own hits end inside of a block with a state. vLLM then continues from a copy of
    an earlier state, of which the connector learns nothing: answers had other log-probabilities.
    """
    option = getattr(cache_config, "prefix_match_unit", None)
    states = [kind.block_tokens for kind in kinds.kinds if kind.rule == KindRule.STATE]
    if not option or not states or option >= max(states):
        return ""
    hit = getattr(kv_cache_config, "cache_hit_alignment_tokens", None)
    if hit is None:
        # Releases that do not state it search for windows and chunks by whole blocks.
        coarse = (KindRule.TRAILING, KindRule.CHUNK)
        whole = any(kind.rule in coarse and kind.block_tokens != option for kind in kinds.kinds)
        hit = kinds.alignment_tokens if whole else option
    if hit >= max(states):
        return ""
    return (
        f"with --prefix-match-unit {option} hits of vLLM end inside of blocks of {max(states)} "
        "tokens with a state, which is not supported; remove the option"
    )


def _check_groups(kv_cache_config: Any) -> None:
    """
    Raises:
        UnservedGroups: a group has another reason than its sizes.
    """
    groups = kv_cache_config.kv_cache_groups
    layers: set[str] = set()
    for group in groups:
        if getattr(group, "is_eagle_group", False):
            raise UnservedGroups("layers of a draft model are not supported yet")
        if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
            raise UnservedGroups("a connector may not transfer the cache group")
        if (role := getattr(group, "role", "default")) != "default":
            raise UnservedGroups(f"cache groups with the role {role} are not supported yet")
        if shared := layers & set(group.layer_names):
            raise UnservedGroups(f"cache groups that share layer {min(shared)} are not supported")
        layers |= set(group.layer_names)
        for spec in layer_specs(group):
            if reason := spec_problem(spec):
                raise UnservedGroups(reason)
    # After the checks by class, whose reasons are more precise.
    cacheable = getattr(kv_cache_config, "prefix_cacheable_group_ids", None)
    if cacheable is not None and len(cacheable) != len(groups):
        left = sorted(set(range(len(groups))) - set(cacheable))
        raise UnservedGroups(f"cache group {left[0]} is outside of vLLM's prefix cache")


def spec_problem(spec: Any) -> str:
    """Why layers with this spec cannot be served; empty if they can."""
    kind = type(spec).__name__
    if kind not in _RULES:
        return f"layers of kind {kind} are not supported yet"
    if getattr(spec, "non_causal", False):
        return "layers that look ahead have different KV for the same prefix"
    if getattr(spec, "prefix_replay_tokens", 0):
        return "layers that recompute a window after each hit are not supported yet"
    if _RULES[kind] == KindRule.STATE:
        if (mode := getattr(spec, "mamba_cache_mode", "none")) != "align":
            return f"states need --mamba-cache-mode align with prefix caching; it is {mode}"
        if getattr(spec, "num_speculative_blocks", 0):
            return "states with speculative decoding are not supported yet"
    return ""


def _signature(group: Any) -> tuple[KindRule, int, int]:
    """The rule of a group, its length in tokens, and the block size."""
    found = {_rule(spec) for spec in layer_specs(group)}
    if len(found) != 1:
        raise UnservedGroups("a cache group of layers with different windows is not supported")
    return (*found.pop(), group.kv_cache_spec.block_size)


def _rule(spec: Any) -> tuple[KindRule, int]:
    rule = _RULES[type(spec).__name__]
    if rule == KindRule.TRAILING:
        # vLLM keeps a few tokens more for drafts of several layers, and allocates them for a hit.
        return rule, spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
    if rule == KindRule.CHUNK:
        return rule, spec.attention_chunk_size
    return rule, 0


def _hash_unit(kv_cache_config: Any, cache_config: Any, blocks: Sequence[int]) -> int:
    """Tokens between two block hashes, which older releases do not state."""
    unit = getattr(kv_cache_config, "hash_block_size", None) or getattr(
        cache_config, "hash_block_size", None
    )
    if not unit and len(kv_cache_config.kv_cache_groups) > 1:
        unit = getattr(cache_config, "prefix_match_unit", None)
    return unit or math.gcd(*blocks)


def saved_blocks(
    kind: BlockKind, spec: Any, first: int, end: int, alignment: int, boundaries: Sequence[int]
) -> list[bool]:
    """Whether each of the blocks ``first`` to ``end`` - 1 of a kind is needed at a boundary.

    Windows: vLLM's own mask for them, so that a later release which needs other blocks gets them.
    Its interval of retained boundaries is left to the caller, who has one of his own.
    """
    if kind.rule == KindRule.TRAILING:
        mask = _window_mask(spec, first, end, alignment, boundaries)
        return [True] * (end - first) if mask is None else list(mask)
    marked = [False] * (end - first)
    for boundary in boundaries:
        for number in kind.needed(boundary // alignment * alignment).numbers():
            if first <= number < end:
                marked[number - first] = True
    return marked


def _window_mask(
    spec: Any, first: int, end: int, alignment: int, boundaries: Sequence[int]
) -> Sequence[bool] | None:
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    if extra := getattr(spec, "extra_retained_tokens", 0):
        # The mask of vLLM's own cache leaves them out; a load has to bring them.
        spec = dataclasses.replace(
            spec, sliding_window=spec.sliding_window + extra, extra_retained_tokens=0
        )
    return SlidingWindowManager.reachable_block_mask(
        start_block=first,
        end_block=end,
        alignment_tokens=alignment,
        kv_cache_spec=spec,
        use_eagle=False,
        retention_interval=0,
        reachable_boundaries=tuple(boundaries),
    )
