"""From a prefill engine to a decode engine: what the first has saved, and when it is there.

A router sends a prompt to a prefill engine first, with ``kv_transfer_params`` that ask for it, and
hands what that engine answers to a decode engine. So the decode engine knows which save to wait
for, instead of computing what is about to be there. Who waits for what: docs/prefill_decode.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

from pegaflow import _native
from pegaflow.connector.errors import error_code
from pegaflow.connector.metrics import Counts
from pegaflow.connector.requests import RequestState

#: Our part of ``kv_transfer_params``.
PARAMS = "pegaflow"
#: A single token is computed anyway: the engine needs its output to go on.
MIN_TAIL_TOKENS = 2

#: Waits of one engine at a time. Its lookups and claims share the 1,024 questions that a client may
#: have open, and a prefill engine that hangs must not cost other requests theirs.
MAX_WAITS = 512

_LIMIT = 1 << 62  # of whole numbers that a router may hand us
_TAIL_KEY_BYTES = 32  # where no block of the prompt says how long its keys are


@dataclasses.dataclass(frozen=True)
class Handover:
    """What a prefill engine says of its saves of a prompt."""

    node: bytes  #: The server that has them: its incarnation.
    scheduler: bytes  #: Whose job it is.
    job: int  #: The last of the request's saves; 0: there was nothing to save.
    tokens: int  #: Of the prompt, that are in the cache once it is over.

    @classmethod
    def read(cls, request: Any) -> Handover | None:
        """Out of a request's parameters, which come from the network; None for anything else."""
        params = _params(request)
        try:
            node = bytes.fromhex(params["node"])
            scheduler = bytes.fromhex(params["incarnation"])
            job, tokens = params["job"], params["tokens"]
        except (KeyError, TypeError, ValueError):
            return None
        if len(node) != 16 or len(scheduler) != 16:
            return None
        if not all(type(number) is int and 0 <= number < _LIMIT for number in (job, tokens)):
            return None
        return cls(node, scheduler, job, tokens)

    def params(self) -> dict[str, Any]:
        """For the response; the router hands it on as it is."""
        return {
            PARAMS: {
                "node": self.node.hex(),
                "incarnation": self.scheduler.hex(),
                "job": self.job,
                "tokens": self.tokens,
            }
        }


def is_asked_for(request: Any) -> bool:
    """Whether the router wants the prompt saved to its last token, and to be told where."""
    return _params(request).get("save_tail") is True


def _params(request: Any) -> dict[str, Any]:
    params = getattr(request, "kv_transfer_params", None)
    ours = params.get(PARAMS) if isinstance(params, dict) else None
    return ours if isinstance(ours, dict) else {}


class Waits:
    """Decode requests that wait for a prefill engine's saves. Bound to the scheduler's thread.

    While a request waits it has no GPU blocks, and no step waits for it: the server answers when
    the saves are over, and each step only looks. Whatever the answer, the cache is asked as usual
    then, and what it does not have is computed.
    """

    def __init__(
        self, session: Any, *, patience_s: float, counts: Counts, clock: Callable[[], float]
    ) -> None:
        self._session = session
        self._patience_s = patience_s
        self._counts = counts
        self._clock = clock
        self._open = 0

    def begin(self, state: RequestState) -> bool:
        """Asks about the request's handover, if it has one; whether there is something to wait for.

        To be called once, at arrival.
        """
        state.handover = handover = Handover.read(state.request)
        if handover is None or handover.job == 0 or self._patience_s <= 0:
            return False
        if self._open >= MAX_WAITS:
            self._ended("busy")
            return False
        try:
            state.wait = self._session.await_job(
                handover.node, handover.scheduler, handover.job, self._patience_s
            )
        except _native.PegaFlowError as error:
            self._ended(_reason(error))
            return False
        state.wait_since = self._clock()
        self._open += 1
        return True

    def is_waiting(self, state: RequestState) -> bool:
        if state.wait is None:
            return False
        try:
            if not self._session.take_wait(state.wait):
                return True
            self._ended("over")
        except _native.PegaFlowError as error:
            self._ended(_reason(error))
        state.wait = None
        self._open -= 1
        self._counts.observe("handover_seconds", self._clock() - state.wait_since)
        return False

    def drop(self, state: RequestState) -> None:
        """Nobody needs the answer any more."""
        ticket, state.wait = state.wait, None
        if ticket is not None:
            self._session.forget(ticket)
            self._open -= 1
            self._ended("dropped")

    def _ended(self, result: str) -> None:
        self._counts.add("handovers", 1, result)


def _reason(error: Exception) -> str:
    return "no_server" if isinstance(error, _native.PeerLost) else error_code(error)


# ---- the block at the end of a prompt that the prompt does not fill


def tail_tokens(request: Any, block_size: int) -> int:
    """Tokens of the prompt behind its last full block, if they are worth a key; else 0."""
    tokens = request.num_prompt_tokens % block_size
    return tokens if tokens >= MIN_TAIL_TOKENS else 0


def tail_key(state: RequestState, block_size: int) -> bytes:
    """Names the KV of the prompt's last, partial block; empty where it cannot be named.

    A key of our own: vLLM hashes full blocks only. Over the key of the block before, which stands
    for all that comes before it, the tokens, and what else shapes their KV. As long as the other
    keys of the request.
    """
    request = state.request
    tokens = tail_tokens(request, block_size)
    blocks = request.num_prompt_tokens // block_size
    if not tokens or state.chain.usable_blocks() < blocks:
        return b""
    ids = request.prompt_token_ids
    if ids is None or len(ids) != request.num_prompt_tokens:
        return b""  # embeddings, which have no tokens
    if getattr(request, "resumable", False):
        return b""  # its prompt is not complete
    adapter = state.chain.adapter
    if state.chain.doubt:
        return b""
    extra = _extra_keys(request, blocks * block_size)
    if extra is None:
        return b""
    if adapter is not None:
        extra += [b"adapter", adapter.digest]
    if state.chain.salt:
        extra += [b"view", state.chain.salt]
    parent = state.chain.key(blocks - 1) if blocks else b""
    digest = hashlib.sha256(b"pegaflow tail 1\0")
    for part in (
        parent,
        b"".join(int(token).to_bytes(8, "little") for token in ids[blocks * block_size :]),
        *extra,
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()[: state.chain.key_bytes or _TAIL_KEY_BYTES]


def _extra_keys(request: Any, start: int) -> list[bytes] | None:
    """What shapes the KV of tokens from ``start`` on beside them; None: we cannot tell.

    The salt and the adapter are in the key of the block before as well, where there is one.
    """
    if getattr(request, "prompt_embeds", None) is not None:
        return None
    extra = []
    if salt := getattr(request, "cache_salt", None):
        extra += [b"salt", str(salt).encode()]
    if lora := getattr(request, "lora_request", None):
        extra += [b"lora", str(lora.lora_name).encode(), str(lora.lora_path).encode()]
    for feature in getattr(request, "mm_features", None) or ():
        place = feature.mm_position
        if place.offset + place.length <= start:
            continue
        extra += [b"mm", str(feature.identifier).encode(), str(place.offset - start).encode()]
    return extra
