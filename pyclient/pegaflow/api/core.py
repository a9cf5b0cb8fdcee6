"""The common part of the waiting and the asynchronous cache: identity, arguments, status."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pegaflow import _native
from pegaflow.api import arguments
from pegaflow.api.buffers import arrays_of, layout
from pegaflow.api.keys import pack
from pegaflow.api.kinds import (
    Claim,
    Kind,
    KindRange,
    check_kinds,
    description,
    kind_layouts,
    native_kinds,
)
from pegaflow.cli.endpoint import addr_from, socket_path

log = logging.getLogger("pegaflow.api")

#: Deadlines for a program that is not an engine's inner loop; docs/python_api.md.
PATIENT = {"lookup_deadline": 1.0, "open_deadline": 1.0, "reserve_deadline": 1.0}
#: Options of a mover that a session does not have.
MOVER_OPTIONS = ("load_patience", "load_bytes_per_second", "max_jobs", "sample_one_in")


def _address(endpoint: str | None, instance: str | None) -> tuple[str, str]:
    """The path of the server's socket, and the name of this engine.

    Raises:
        ValueError: either of them is invalid.
    """
    if endpoint is None:
        endpoint = addr_from(os.environ)
    path = str(socket_path(arguments.text("endpoint", endpoint)))
    if instance is None:
        instance = f"python-{os.getpid()}-{_native.random_id().hex()[:8]}"
    return path, arguments.text("instance", instance)


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
        arguments.options(deadlines)
        self._raise_errors = arguments.boolean("raise_errors", raise_errors)
        arguments.whole("copy_threads", copy_threads, 1, 64)
        arguments.choice("verify", verify, ("off", "sample", "all"))
        self._set_kinds(arrays, block_axis, kinds, unit_tokens, alignment_tokens)
        listed = arguments.factor_list(factors, self._format())
        path, name = _address(endpoint, instance)
        build = f"pegaflow.api {_native.__version__}"
        options = PATIENT | deadlines
        link_options = {k: v for k, v in options.items() if k not in MOVER_OPTIONS}
        self._device = _native.HostDevice(copy_threads)
        self._mover = self._make_mover(path, name, listed, build=build, verify=verify, **options)
        self._session = self._open_session(path, name, build, link_options)
        self._answer_patience_s = 2 * options["lookup_deadline"] + 1.0
        self._scheduler = _native.random_id()
        self._numbers = itertools.count(1)
        self._said = ""

    def _set_kinds(
        self,
        arrays: Iterable[Any],
        block_axis: int | Sequence[int],
        kinds: Sequence[Kind],
        unit_tokens: int,
        alignment_tokens: int,
    ) -> None:
        self._kinds = tuple(arguments.listed("kinds", kinds, "Kind"))
        if self._kinds:
            if arrays_of(arrays):
                raise ValueError("arrays: with kinds they are the members' of each kind")
            check_kinds(self._kinds, unit_tokens, alignment_tokens)
        else:
            for name, value in (
                ("unit_tokens", unit_tokens),
                ("alignment_tokens", alignment_tokens),
            ):
                if arguments.whole(name, value, 0, 1 << 30):
                    raise ValueError(f"{name}={value} without kinds: remove it, or state kinds")
        self._unit_tokens = unit_tokens
        self._alignment_tokens = alignment_tokens
        #: The layouts of the members of each kind; they keep the arrays alive.
        self._members = kind_layouts(self._kinds) if self._kinds else [[layout(arrays, block_axis)]]

    def _format(self) -> str:
        """The format of the blocks."""
        if self._kinds:
            return description(self._kinds, self._members)
        return self._members[0][0].description

    def _make_mover(
        self, path: str, name: str, factors: Sequence[tuple[str, str]], **options: Any
    ) -> Any:
        if not self._kinds:
            plain = self._members[0][0]
            blocks = (plain.segments, plain.block_count)
            return _native.Mover(path, name, self._device, *blocks, factors, **options)
        return _native.Mover.of_kinds(
            path,
            name,
            self._device,
            native_kinds(self._kinds, self._members),
            self._unit_tokens,
            self._alignment_tokens,
            factors,
            **options,
        )

    def _open_session(self, path: str, name: str, build: str, options: dict[str, float]) -> Any:
        try:
            return _native.CacheSession(path, name, build, **options)
        except BaseException:
            self._mover.close()
            raise

    def _pack(self, keys: Sequence[bytes]) -> tuple[bytes, int]:
        """Keys as the native module takes them.

        Raises:
            ValueError: they are invalid.
        """
        self._check_caller()
        return pack(keys)

    def _pack_blocks(
        self, keys: Sequence[bytes], blocks: Sequence[int], kind: int = 0, *, load: bool = False
    ) -> tuple[tuple[bytes, int], list[int]]:
        """Keys and the blocks for them, as the native module takes them.

        Raises:
            ValueError: keys, the kind, or the blocks for them, are invalid.
        """
        self._check_caller()
        packed, key_bytes = pack(keys)
        listed = self._check_blocks("blocks", len(packed) // key_bytes, blocks, kind, load=load)
        return (packed, key_bytes), listed

    def _check_caller(self) -> None:
        """Raises an exception if the caller may not use the cache. Before each call."""

    def _check_blocks(
        self, name: str, count: int, blocks: Sequence[int], kind: int, *, load: bool
    ) -> list[int]:
        kinds = len(self._members)
        try:
            kind = arguments.whole("kind", kind, 0, kinds - 1)
        except ValueError:
            raise ValueError(
                f"kind {arguments.shown(kind)} of {kinds} kinds of blocks, numbered from 0"
            ) from None
        counts = [member.block_count for member in self._members[kind]]
        listed = arguments.listed(name, blocks, "whole numbers")
        if len(listed) != count * len(counts):
            of_each = f", {len(counts)} for each" if len(counts) != 1 else ""
            raise ValueError(f"{count} keys for {len(listed)} blocks{of_each}")
        return arguments.block_list(name, listed, counts, distinct=load)

    def _refuse_kinds(self, call: str) -> None:
        if self._kinds:
            raise ValueError(f"{call}: with several kinds of blocks, use claim() and load_ranges()")

    def _check_units(self, call: str, local_units: int, *, needs_kinds: bool = True) -> None:
        """
        Raises:
            ValueError: the cache has one kind of blocks, or the engine's own units do not fit.
        """
        arguments.whole(f"{call}: local_units", local_units, 0, _native.MAX_KEYS)
        if not self._kinds:
            if needs_kinds or local_units:
                raise ValueError(f"{call}: this cache was made without kinds")
        elif local_units * self._unit_tokens % self._alignment_tokens:
            raise ValueError(
                f"{call}: {local_units} units of {self._unit_tokens} tokens are no multiple of the "
                f"alignment of {self._alignment_tokens}"
            )

    def _check_ranges(
        self, claim: Claim, ranges: Sequence[tuple[int, int, int, Sequence[int]]]
    ) -> list[tuple[int, int, int, list[int]]]:
        """The ranges as the native module takes them.

        Raises:
            ValueError: the cache has one kind of blocks, or the claim or a range is invalid.
        """
        self._check_caller()
        self._check_units("load_ranges", 0)
        self._check_claim("load_ranges", claim)
        given = arguments.listed("ranges", ranges, "LoadRange")
        if given and not claim.token:
            raise ValueError("load_ranges: the claim is empty")
        made: list[tuple[int, int, int, list[int]]] = []
        for number, one in enumerate(given):
            name = f"ranges[{number}]"
            if not isinstance(one, tuple | list) or len(one) != 4:
                raise ValueError(
                    f"{name}={arguments.shown(one)} is not a LoadRange, or (kind, first, count, "
                    "blocks)"
                )
            kind, first, count, blocks = one
            kind = arguments.whole(f"{name}: kind", kind, 0, len(self._members) - 1)
            first = arguments.whole(f"{name}: first", first, 0, (1 << 32) - 1)
            count = arguments.whole(f"{name}: count", count, 0, (1 << 32) - 1)
            if kind in (known[0] for known in made):
                raise ValueError(f"{name}: kind {kind} has another range; one a kind is possible")
            listed = self._check_blocks(f"{name}: blocks", count, blocks, kind, load=True)
            made.append((kind, first, count, listed))
        return made

    @staticmethod
    def _check_claim(call: str, claim: Any) -> None:
        """
        Raises:
            ValueError: it is not that of claim().
        """
        if not isinstance(claim, Claim):
            raise ValueError(f"{call}: claim={arguments.shown(claim)} is not that of claim()")

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
        self._check_claim("unclaim", claim)
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
        """Waits at most ``timeout_s`` for each side to be connected; whether both are."""
        timeout_s = arguments.seconds("timeout_s", timeout_s)
        return self._mover.wait_ready(timeout_s) and self._session.wait_ready(timeout_s)

    def _close(self) -> None:
        """Waits for the copies in flight; afterwards the arrays may be freed."""
        self._mover.close()
        self._session.close()
