"""The common part of the waiting and the asynchronous cache: identity, arguments, status."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pegaflow import _native
from pegaflow.api.buffers import Layout, layout
from pegaflow.api.keys import pack
from pegaflow.cli.endpoint import addr_from, socket_path

log = logging.getLogger("pegaflow.api")

#: Deadlines for a program that is not an engine's inner loop; docs/python_api.md.
PATIENT = {"lookup_deadline": 1.0, "open_deadline": 1.0, "reserve_deadline": 1.0}
#: Options of a mover that a session does not have.
MOVER_OPTIONS = ("load_patience", "load_bytes_per_second", "max_jobs", "sample_one_in")


def _with_layout(factors: Mapping[str, str], of_arrays: Layout) -> list[tuple[str, str]]:
    """The namespace's sorted list.

    Raises:
        ValueError: ``factors`` has a layout of its own.
    """
    names = {str(name): str(value) for name, value in factors.items()}
    if "layout" in names:
        raise ValueError("factors: `layout` is reserved; it is derived from the arrays")
    return sorted((names | {"layout": of_arrays.description}).items())


class CacheBase:
    """One engine core of one rank: its session and its mover. Thread-safe."""

    def __init__(
        self,
        arrays: Iterable[Any],
        *,
        factors: Mapping[str, str],
        block_axis: int | Sequence[int] = 0,
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
            factors: Everything else that must be equal for blocks to be interchangeable: the
                model, its weights, dtype, block size, how keys are made. The arrays' layout is
                added. Equal factors share blocks.
            block_axis: Along which blocks are numbered, for all arrays or one for each.
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
        self._layout = layout(arrays, block_axis)
        self._raise_errors = raise_errors
        names = _with_layout(factors, self._layout)
        path = str(socket_path(endpoint or addr_from(os.environ)))
        name = instance or f"python-{os.getpid()}-{_native.random_id().hex()[:8]}"
        build = f"pegaflow.api {_native.__version__}"
        options = PATIENT | deadlines
        link_options = {k: v for k, v in options.items() if k not in MOVER_OPTIONS}
        self._device = _native.HostDevice(copy_threads)
        self._mover = _native.Mover(
            path,
            name,
            self._device,
            self._layout.segments,
            self._layout.block_count,
            names,
            build=build,
            verify=verify,
            **options,
        )
        self._session = self._open_session(path, name, build, link_options)
        self._answer_patience_s = 2 * options["lookup_deadline"] + 1.0
        self._scheduler = _native.random_id()
        self._numbers = itertools.count(1)
        self._said = ""

    def _open_session(self, path: str, name: str, build: str, options: dict[str, float]) -> Any:
        try:
            return _native.CacheSession(path, name, build, **options)
        except BaseException:
            self._mover.close()
            raise

    def _pack(
        self, keys: Sequence[bytes], blocks: Sequence[int] | None = None
    ) -> tuple[bytes, int]:
        """Keys as the native module takes them.

        Raises:
            ValueError: keys, or the blocks for them, are invalid.
        """
        packed = pack(keys)
        if blocks is not None:
            if len(blocks) != len(keys):
                raise ValueError(f"{len(keys)} keys for {len(blocks)} blocks")
            for block in blocks:
                if not 0 <= block < self._layout.block_count:
                    raise ValueError(f"block {block} of {self._layout.block_count}")
        return packed

    def _start_save(self, packed: tuple[bytes, int], blocks: Sequence[int]) -> tuple[str, int]:
        number = next(self._numbers)
        self._mover.save(self._scheduler, number, *packed, blocks)
        return "save", number

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
        return self._layout.block_count

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
