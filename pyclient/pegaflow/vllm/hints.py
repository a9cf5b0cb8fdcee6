"""What a router wrote into a request about its blocks, and what it wants to know of them.

Two ways lead here: ``kv_transfer_params.pegaflow`` of PegaFlow's own router, and vLLM's KV hints
(``Request.kv_hints``), which other orchestrators send. Both come from the network. A hint never
fails a request and never makes it wait: it says whom to ask first, and the owners decide.
docs/router_api.md describes both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pegaflow import _native
from pegaflow.vllm.keys import KeyChain
from pegaflow.vllm.metrics import Counts

if TYPE_CHECKING:
    from pegaflow.vllm.plans import BlockRules

#: The key of PegaFlow's part of ``kv_transfer_params``.
PARAMS = "pegaflow"
#: The most nodes that are asked first; the server takes no more than 8.
MAX_SOURCES = 3
#: The most actions of one envelope that are read.
MAX_ACTIONS = 16
#: Requests with longer session ids, in characters, are not reported to routers.
MAX_SESSION = 256
#: The instruction to read from no other node.
COMPUTE = "compute"

_NODE_BYTES = 16
#: The major version of each action that is understood.
_VERSIONS = {"kv.fetch": "1", "kv.prefetch": "1", "kv.release": "1"}


def params_of(request: Any) -> dict[str, Any]:
    """PegaFlow's part of a request's ``kv_transfer_params``; {}: there is none."""
    params = getattr(request, "kv_transfer_params", None)
    ours = params.get(PARAMS) if isinstance(params, dict) else None
    return ours if isinstance(ours, dict) else {}


@dataclasses.dataclass(frozen=True)
class Hints:
    """The hints of one request; without any, nothing is changed."""

    nodes: tuple[bytes, ...] = ()  #: Incarnations of the servers to ask first.
    no_nodes: bool = False  #: Blocks of other nodes are not wanted: computing is faster.
    releases: bool = False  #: Nothing of the request will be needed again: it is not saved.
    reports_keys: bool = False  #: The answer names the keys of the prompt's blocks.

    @classmethod
    def read(cls, request: Any, counts: Counts) -> Hints:
        """Parses both kinds of hints; those of PegaFlow's router win. Never raises."""
        ours = params_of(request)
        hints = cls(reports_keys=ours.get("report_keys") is True)
        for action, payload in _actions(request):
            result = _VERSIONS.get(action) and action.removeprefix("kv.")
            counts.add("kv_hints", 1, result or "ignored")
            if action == "kv.release":
                hints = dataclasses.replace(hints, releases=True)
            elif result:
                nodes = _nodes(payload.get("sources"))
                hints = dataclasses.replace(hints, nodes=nodes or hints.nodes)
        told = ours.get("hints")
        if told == COMPUTE:
            return dataclasses.replace(hints, nodes=(), no_nodes=True)
        return dataclasses.replace(hints, nodes=_nodes(told) or hints.nodes)

    def arguments(self) -> dict[str, Any]:
        """The arguments of a lookup or claim."""
        if not self.nodes and not self.no_nodes:
            return {}
        return {"nodes": self.nodes, "no_nodes": self.no_nodes}


NO_HINTS = Hints()


def _actions(request: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The actions of vLLM's envelope, where this release has it, each with its payload.

    An action of an unknown type or version has the name "".
    """
    envelope = getattr(request, "kv_hints", None)
    actions = getattr(envelope, "actions", None)
    if not isinstance(actions, list | tuple):
        return
    for action in actions[:MAX_ACTIONS]:
        name = getattr(action, "action_type", None)
        version = getattr(action, "action_version", None)
        payload = getattr(action, "payload", None)
        known = isinstance(name, str) and isinstance(version, str) and name in _VERSIONS
        if known and version.partition(".")[0] != _VERSIONS[name]:
            known = False
        yield (name if known else ""), (payload if isinstance(payload, dict) else {})


def _nodes(sources: Any) -> tuple[bytes, ...]:
    """The nodes of ``[{"node": HEX, "blocks": N}, ..]``; entries that name none are dropped."""
    nodes: list[bytes] = []
    for source in sources[:MAX_SOURCES] if isinstance(sources, list) else ():
        node = source.get("node") if isinstance(source, dict) else None
        try:
            raw = bytes.fromhex(node) if isinstance(node, str) else b""
        except ValueError:
            continue  # it came from the network
        if len(raw) == _NODE_BYTES:
            nodes.append(raw)
    return tuple(nodes)


def keys_report(chain: KeyChain, prompt_tokens: int, unit_tokens: int) -> dict[str, Any]:
    """The keys of the prompt's full blocks, for the router that asked for them; {}: none.

    Up to MAX_KEYS keys, as hexadecimal digits in one text.
    """
    count = min(chain.usable_blocks(), prompt_tokens // unit_tokens, _native.MAX_KEYS)
    if count == 0:
        return {}
    keys = b"".join(chain.keys(0, count)).hex()
    return {"keys": keys, "key_bytes": chain.key_bytes, "block_tokens": unit_tokens}


def report_chain(session: Any, request: Any, chain: KeyChain, rules: BlockRules) -> None:
    """Reports to routers which full blocks the prompt of a request with a session id has.

    So a router learns what a text became also from an engine without KV events. Bounded by
    MAX_KEYS, and nothing is sent while no router reads.
    """
    name = getattr(request, "session_id", None)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_SESSION or not rules.chain_units:
        return
    if not session.wants_chains():
        return
    tokens = min(request.num_prompt_tokens, _native.MAX_KEYS * rules.unit_tokens)
    count = min(chain.usable_blocks(), tokens // rules.unit_tokens)
    keys = chain.keys(0, count)[rules.chain_units - 1 :: rules.chain_units]
    if keys:
        block_tokens = rules.unit_tokens * rules.chain_units
        session.report_chain(name, b"".join(keys), chain.key_bytes, block_tokens)


def with_keys(params: dict[str, Any] | None, report: dict[str, Any]) -> dict[str, Any] | None:
    """The parameters of the response with the report of the keys, if there is one."""
    if not report:
        return params
    return {PARAMS: {**(params or {}).get(PARAMS, {}), **report}}
