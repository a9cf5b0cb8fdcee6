"""The handover of a prompt's blocks from a prefill engine to a decode engine.

A router sends a prompt to a prefill engine first, with ``kv_transfer_params`` that request a
handover, and passes the parameters of the response to a decode engine. So the decode engine knows
which save to wait for, instead of computing blocks that are about to be saved.
docs/prefill_decode.md describes the waits.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pegaflow import _native
from pegaflow.vllm.early import EarlyWaits, reason_of
from pegaflow.vllm.hints import PARAMS, params_of
from pegaflow.vllm.keys import KeyChain
from pegaflow.vllm.metrics import Counts
from pegaflow.vllm.requests import RequestState

if TYPE_CHECKING:
    from pegaflow.vllm.plans import BlockRules

#: A single token is computed anyway: the engine needs its output to continue.
MIN_TAIL_TOKENS = 2

#: The limit of one engine's concurrent waits. Its lookups and claims share the client's 1,024
#: pending questions, and a prefill engine that hangs must not use up those of other requests.
MAX_WAITS = 512

#: A load that begins at the end of its request's wait has this time for blocks that are there.
LEAST_WAIT_S = 0.01

_LIMIT = 1 << 62  # of whole numbers from a router
_LONGEST_WAIT_MS = 3_600_000
_TAIL_KEY_BYTES = 32  # if no full block of the prompt determines the length of its keys


@dataclasses.dataclass(frozen=True)
class Handover:
    """A prefill engine's report about its saves of a prompt."""

    node: bytes  #: The incarnation of the server that has the blocks.
    scheduler: bytes  #: The incarnation of the job's scheduler.
    job: int  #: The last of the request's saves; 0: there was nothing to save.
    tokens: int  #: Tokens of the prompt that are cached when the job has ended.
    #: The request came together with its prefill, and waits so long for it; 0: it came after it.
    #: Then ``job`` is one that was not over when the router last heard of the prefill engine.
    wait_s: float = 0.0
    #: In a report: whether requests may come together with their prefill.
    may_be_early: bool = False

    @classmethod
    def read(cls, request: Any) -> Handover | None:
        """Parses a request's parameters, which come from the network; None for anything else."""
        params = params_of(request)
        try:
            node = bytes.fromhex(params["node"])
            scheduler = bytes.fromhex(params["incarnation"])
            job, tokens = params["job"], params["tokens"]
            wait_ms = params.get("wait_ms", 0)
        except (KeyError, TypeError, ValueError):
            return None
        if len(node) != 16 or len(scheduler) != 16:
            return None
        numbers = (job, tokens, wait_ms)
        if not all(type(number) is int and 0 <= number < _LIMIT for number in numbers):
            return None
        return cls(node, scheduler, job, tokens, min(wait_ms, _LONGEST_WAIT_MS) / 1e3)

    def params(self) -> dict[str, Any]:
        """The parameters of the response, which the router passes on unchanged."""
        report: dict[str, Any] = {
            "node": self.node.hex(),
            "incarnation": self.scheduler.hex(),
            "job": self.job,
            "tokens": self.tokens,
        }
        if self.may_be_early:
            report["early"] = True
        return {PARAMS: report}


def is_asked_for(request: Any) -> bool:
    """Whether the router requests a handover: the whole prompt saved, and its place reported."""
    return params_of(request).get("save_tail") is True


def may_be_early(rules: BlockRules) -> bool:
    """Whether the last full block of a prompt in the cache shows that its prefill has ended.

    With several kinds of blocks, or with drafts, a prefill may end without that block.
    """
    return not (
        rules.has_kinds
        or rules.awaits_next_token
        or rules.proof_units
        or rules.undrafted_from is not None
    )


class Waits:
    """Decode requests that wait for a prefill engine's saves. Bound to the scheduler's thread.

    While a request waits it has no GPU blocks, and no step waits for it: the server responds when
    the saves have ended, and each step only polls. After any response, the usual lookup follows,
    and missing blocks are computed.
    """

    def __init__(
        self,
        session: Any,
        *,
        patience_s: float,
        follows: bool,
        direct: bool,
        counts: Counts,
        clock: Callable[[], float],
    ) -> None:
        """``follows``: whether a prompt's last full block shows that all of it is there.
        ``direct``: whether blocks may be read out of other engines' memory.
        """
        self._session = session
        self._follows = follows
        self._early = EarlyWaits(
            session, patience_s=patience_s, clock=clock, direct=direct and follows
        )
        self._patience_s = patience_s
        self._counts = counts
        self._clock = clock
        self._open = 0

    def begin(self, state: RequestState) -> bool:
        """Begins to wait for the request's handover, if it has one; whether it waits.

        Call it once, at arrival.
        """
        state.handover = handover = Handover.read(state.request)
        if handover is None or handover.job == 0 or self._patience_s <= 0:
            return False
        if handover.wait_s:
            result = self._begin_early(state, handover)
            if result:
                self._counts.add("early_handovers", 1, result)
                return False
            state.wait_since = self._clock()
            self._open += 1
            return True
        if self._open >= MAX_WAITS:
            self._ended("busy")
            return False
        try:
            state.wait = self._session.await_job(
                handover.node, handover.scheduler, handover.job, self._patience_s
            )
        except _native.PegaFlowError as error:
            self._ended(reason_of(error))
            return False
        state.wait_since = self._clock()
        self._open += 1
        return True

    def _begin_early(self, state: RequestState, handover: Handover) -> str:
        """Begins the wait of a request that came with its prefill; why it does not wait."""
        if not self._follows:
            return "unable"
        if self._open >= MAX_WAITS:
            return "busy"
        return "" if self._early.begin(state, handover) else "unable"

    def is_waiting(self, state: RequestState, local: int, first: int) -> bool:
        """``local``: blocks that vLLM has itself. ``first``: the index of the first block that
        could be worth a load.
        """
        if state.early is not None:
            state.early.local = local
            return self._is_early(state, first)
        if state.wait is None:
            return False
        try:
            if self._session.take_wait(state.wait) is None:
                return True
            self._ended("over")
        except _native.PegaFlowError as error:
            self._ended(reason_of(error))
        state.wait = None
        self._open -= 1
        self._counts.observe("handover_seconds", self._clock() - state.wait_since)
        return False

    def _is_early(self, state: RequestState, first: int) -> bool:
        """The same for a request that came together with its prefill."""
        if state.early.has_begun:
            return False
        result = self._early.poll(state, first)
        if result == "begun":
            self._expect_tail(state)
            return False
        if result:
            self.conclude(state, result)
        return not result

    def poll(self, state: RequestState, first: int) -> str:
        """Why no further save of a prefill is waited for; "": one is. The wait goes on. ``first``:
        the index of the first block that is missing.
        """
        return self._early.poll(state, first)

    def left_s(self, state: RequestState) -> float:
        """The rest of the time for which a request waits for its prefill; above 0."""
        return max(LEAST_WAIT_S, state.early.deadline - self._clock())

    def conclude(self, state: RequestState, result: str) -> None:
        """Ends the wait of a request that came together with its prefill, if it still waits."""
        if state.early is None:
            return
        self._early.end(state)
        if result == "over":
            self._expect_tail(state)
        self._open -= 1
        self._counts.add("early_handovers", 1, result)
        self._counts.observe("early_handover_seconds", self._clock() - state.wait_since)

    def _expect_tail(self, state: RequestState) -> None:
        # The partial block is saved with the last full one, or will be missed.
        tokens = state.request.num_prompt_tokens
        state.handover = dataclasses.replace(state.handover, tokens=tokens)

    def limit_blocks(self, blocks: int) -> None:
        """Requests may hold so many of the GPU's blocks while their prefills run."""
        self._early.block_limit = blocks

    def drop(self, state: RequestState) -> None:
        """Ends the wait of a request."""
        if state.early is not None:
            self._early.end(state)
            self._open -= 1
            self._counts.add("early_handovers", 1, "dropped")
        ticket, state.wait = state.wait, None
        if ticket is not None:
            self._session.forget(ticket)
            self._open -= 1
            self._ended("dropped")

    def _ended(self, result: str) -> None:
        self._counts.add("handovers", 1, result)


# ---- the partial block at the end of a prompt


def tail_tokens(request: Any, block_size: int) -> int:
    """The number of tokens after the prompt's last full block, if they get a key; else 0."""
    tokens = request.num_prompt_tokens % block_size
    return tokens if tokens >= MIN_TAIL_TOKENS else 0


def tail_key(request: Any, chain: KeyChain, block_size: int) -> bytes:
    """The key of the prompt's last, partial block; empty if it cannot be named.

    A key of PegaFlow's: vLLM hashes full blocks only. It hashes the key of the block before, which
    identifies everything before it, the tokens, and the other inputs of their KV. It is as long as
    the other keys of the request.
    """
    tokens = tail_tokens(request, block_size)
    blocks = request.num_prompt_tokens // block_size
    if not tokens or chain.usable_blocks() < blocks:
        return b""
    ids = request.prompt_token_ids
    if ids is None or len(ids) != request.num_prompt_tokens:
        return b""  # embeddings, which have no tokens
    if getattr(request, "resumable", False):
        return b""  # its prompt is not complete
    adapter = chain.adapter
    if chain.doubt:
        return b""
    extra = _extra_keys(request, blocks * block_size)
    if extra is None:
        return b""
    if adapter is not None:
        extra += [b"adapter", adapter.digest]
    if chain.salt:
        extra += [b"view", chain.salt]
    parent = chain.key(blocks - 1) if blocks else b""
    digest = hashlib.sha256(b"pegaflow tail 1\0")
    for part in (
        parent,
        b"".join(int(token).to_bytes(8, "little") for token in ids[blocks * block_size :]),
        *extra,
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()[: chain.key_bytes or _TAIL_KEY_BYTES]


def _extra_keys(request: Any, start: int) -> list[bytes] | None:
    """The other inputs of the KV of tokens from ``start`` on; None: unknown.

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
