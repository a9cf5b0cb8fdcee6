"""The common part of the waiting and the asynchronous cache: identity, arguments, status."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pegaflow import _native
from pegaflow.api.buffers import layout
from pegaflow.api.keys import pack
from pegaflow.api.kinds import Claim, Kind, KindRange, description, kind_layouts, native_kinds
from pegaflow.cli.endpoint import addr_from, socket_path

log = logging.getLogger("pegaflow.api")

#: Deadlines for a program that is not an engine's inner loop; docs/python_api.md.
PATIENT = {"lookup_deadline": 1.0, "open_deadline": 1.0, "reserve_deadline": 1.0}
#: Options of a mover that a session does not have.
MOVER_OPTIONS = ("load_patience", "load_bytes_per_second", "max_jobs", "sample_one_in")


def _with_layout(factors: Mapping[str, str], of_blocks: str) -> list[tuple[str, str]]:
    """The namespace's sorted list, with the format of its blocks.

    Raises:
        ValueError: ``factors`` has a layout of its own.
    """
    names = {str(name): str(value) for name, value in factors.items()}
    if "layout" in names:
        raise ValueError("factors: `layout` is reserved; it is derived from the arrays")
    return sorted((names | {"layout": of_blocks}).items())


class CacheBase:
    """One engine core of one rank: its session and its mover. Thread-safe."""

    def __init__(
        self,
        arrays: Iterable[Any] = (),
        *,
        factors: Mapping[str, str],
        block_axis: int | Sequence[int] = 0,
        kinds: Sequence[Kind] = (),
        unit_tokens: int = 0,
        alignment_tokens: int = 0,
        endpoint: str | None = None,
        instance: str | None = None,
        copy_threads: int = 1,
        verify: str = "off",
        raise_errors: bool = False,
        **deadlines: float,
    ) -> None:
        """Connects in the background, and again whenever the server comes back.

        Args:
            arrays: The KV cache; see ``pegaflow.api.buffers.layout``. Kept alive until close().
                Empty with ``kinds``.
            factors: Everything else that must be equal for blocks to be interchangeable: the
                model, its weights, dtype, block size, how keys are made. The arrays' layout is
                added. Equal factors share blocks.
            block_axis: Along which blocks are numbered, for all arrays or one for each.
            kinds: The kinds of blocks of a model that has several; the one of rule "prefix" first.
            unit_tokens: With ``kinds``: the tokens of a unit. A prompt has a key for each unit.
            alignment_tokens: With ``kinds``: what every restored length is a multiple of.
            endpoint: ``HOST:PORT`` of this machine or ``unix:PATH``, as the server's ``--addr``;
                by default from PEGAFLOW_ENGINE_ENDPOINT, else 127.0.0.1:50055.
            instance: Names this engine in the server's /instances.
            copy_threads: Threads that copy.
            verify: "off", "sample" or "all": checksums, as ``pegaflow.verify`` of the connector.
            raise_errors: A failure raises ``pegaflow._native.PegaFlowError`` instead.
            deadlines: Seconds, by the names of docs/python_api.md, as ``lookup_deadline=0.05``.

        Raises:
            LayoutError: an array cannot be cached as it lies.
            ValueError: another argument is invalid.
        """
        if not factors:
            raise ValueError("factors: the model's name is missing")
        self._set_kinds(tuple(arrays), block_axis, tuple(kinds), unit_tokens, alignment_tokens)
        self._raise_errors = raise_errors
        path = str(socket_path(endpoint or addr_from(os.environ)))
        name = instance or f"python-{os.getpid()}-{_native.random_id().hex()[:8]}"
        build = f"pegaflow.api {_native.__version__}"
        options = PATIENT | deadlines
        link_options = {k: v for k, v in options.items() if k not in MOVER_OPTIONS}
        self._device = _native.HostDevice(copy_threads)
        self._mover = self._make_mover(path, name, factors, build=build, verify=verify, **options)
        self._session = self._open_session(path, name, build, link_options)
        self._answer_patience_s = 2 * options["lookup_deadline"] + 1.0
        self._scheduler = _native.random_id()
        self._numbers = itertools.count(1)
        self._said = ""

    def _set_kinds(
        self,
        arrays: tuple[Any, ...],
        block_axis: int | Sequence[int],
        kinds: tuple[Kind, ...],
        unit_tokens: int,
        alignment_tokens: int,
    ) -> None:
        if kinds and arrays:
            raise ValueError("arrays: with kinds they are the members' of each kind")
        if kinds and (unit_tokens < 1 or alignment_tokens < 1):
            raise ValueError(
                f"kinds: unit_tokens {unit_tokens} and alignment_tokens {alignment_tokens} must be "
                "positive"
            )
        self._kinds = kinds
        self._unit_tokens = unit_tokens
        self._alignment_tokens = alignment_tokens
        #: The layouts of the members of each kind; they keep the arrays alive.
        self._members = kind_layouts(kinds) if kinds else [[layout(arrays, block_axis)]]

    def _make_mover(self, path: str, name: str, factors: Mapping[str, str], **options: Any) -> Any:
        plain = self._members[0][0] if not self._kinds else None
        if plain is not None:
            names = _with_layout(factors, plain.description)
            blocks = (plain.segments, plain.block_count)
            return _native.Mover(path, name, self._device, *blocks, names, **options)
        return _native.Mover.of_kinds(
            path,
            name,
            self._device,
            native_kinds(self._kinds, self._members),
            self._unit_tokens,
            self._alignment_tokens,
            _with_layout(factors, description(self._kinds, self._members)),
            **options,
        )

    def _open_session(self, path: str, name: str, build: str, options: dict[str, float]) -> Any:
        try:
            return _native.CacheSession(path, name, build, **options)
        except BaseException:
            self._mover.close()
            raise

    def _pack(
        self, keys: Sequence[bytes], blocks: Sequence[int] | None = None, kind: int = 0
    ) -> tuple[bytes, int]:
        """Keys as the native module takes them.

        Raises:
            ValueError: keys, the kind, or the blocks for them, are invalid.
        """
        packed = pack(keys)
        if blocks is not None:
            self._check_blocks(len(keys), blocks, kind)
        return packed

    def _check_blocks(self, count: int, blocks: Sequence[int], kind: int) -> None:
        if not 0 <= kind < len(self._members):
            raise ValueError(f"kind {kind} of {len(self._members)} kinds of blocks")
        members = self._members[kind]
        if len(blocks) != count * len(members):
            of_each = f", {len(members)} for each" if len(members) != 1 else ""
            raise ValueError(f"{count} keys for {len(blocks)} blocks{of_each}")
        for place, block in enumerate(blocks):
            block_count = members[place % len(members)].block_count
            if not 0 <= block < block_count:
                raise ValueError(f"block {block} of {block_count}")

    def _refuse_kinds(self, call: str) -> None:
        if self._kinds:
            raise ValueError(f"{call}: with several kinds of blocks, use claim() and load_ranges()")

    def _check_units(self, call: str, local_units: int, *, needs_kinds: bool = True) -> None:
        """
        Raises:
            ValueError: the cache has one kind of blocks, or the engine's own units do not fit.
        """
        if not self._kinds:
            if needs_kinds or local_units:
                raise ValueError(f"{call}: this cache was made without kinds")
        elif local_units < 0 or local_units * self._unit_tokens % self._alignment_tokens:
            raise ValueError(
                f"{call}: {local_units} units of {self._unit_tokens} tokens are no multiple of the "
                f"alignment of {self._alignment_tokens}"
            )

    def _check_ranges(
        self, claim: Claim, ranges: Sequence[tuple[int, int, int, Sequence[int]]]
    ) -> None:
        self._check_units("load_ranges", 0)
        if ranges and not claim.token:
            raise ValueError("load_ranges: the claim is empty")
        for kind, _, count, blocks in ranges:
            self._check_blocks(count, blocks, kind)

    def _start_save(
        self, packed: tuple[bytes, int], blocks: Sequence[int], kind: int
    ) -> tuple[str, int]:
        number = next(self._numbers)
        self._mover.save(self._scheduler, number, *packed, blocks, kind=kind)
        return "save", number

    def _start_load_ranges(
        self, claim: Claim, ranges: Sequence[tuple[int, int, int, Sequence[int]]]
    ) -> tuple[str, int]:
        number = next(self._numbers)
        self._mover.load_ranges(number, claim.token, ranges, claim.ranges)
        return "load", number

    @staticmethod
    def _to_claim(answer: tuple[Any, ...]) -> Claim:
        units, _, token, ranges, *_ = answer
        return Claim(units, tuple(KindRange(*one) for one in ranges), token)

    def unclaim(self, claim: Claim) -> None:
        """Ends a claim; its loads continue. Idempotent, and nothing for an empty claim."""
        if claim.token:
            self._session.unclaim(claim.token)

    def _start_load(self, token: bytes, blocks: Sequence[int]) -> tuple[str, int]:
        number = next(self._numbers)
        self._mover.load(number, token, 0, blocks)
        return "load", number

    def _failed(self, error: Exception) -> str:
        """A result's text for a failure, which is logged if it is a new one. May raise instead."""
        if self._raise_errors:
            raise error
        text = str(error)
        if text != self._said:
            self._said = text
            log.warning("pegaflow: the cache is unavailable: %s", text)
        return text

    @property
    def block_count(self) -> int:
        """That of the arrays; with several kinds, of the first member."""
        return next(member.block_count for members in self._members for member in members)

    def status(self) -> dict[str, Any]:
        """The state of the links: {"session": ..., "mover": ...}, each with state and detail."""
        return {"session": self._session.status(), "mover": self._mover.status()}

    def _wait_ready(self, timeout_s: float) -> bool:
        """Waits at most ``patience_s`` for each side to be connected; whether both are."""
        return self._mover.wait_ready(timeout_s) and self._session.wait_ready(timeout_s)

    def _close(self) -> None:
        """Waits for the copies in flight; afterwards the arrays may be freed."""
        self._mover.close()
        self._session.close()
