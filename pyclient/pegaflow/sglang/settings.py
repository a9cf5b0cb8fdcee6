"""The options of PegaFlow inside SGLang, and which environment variables set them.

The rows that SGLang and vLLM share are those of ``engine.config``: names, units, bounds and
environment variables are the same. SGLang passes them as ``pegaflow.NAME`` in
``--hicache-storage-backend-extra-config`` or ``linker_extra_config``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from pegaflow.engine.config import (
    INSTANCE_ENV,
    OPTIONS,
    ConfigError,
    Option,
    read_values,
    refuse_unknown,
    shown_value,
)

_SHARED = (
    "host",
    "port",
    "weights_id",
    "load_patience_ms",
    "load_bytes_per_second",
    "connect_deadline_ms",
    "lookup_deadline_ms",
    "open_deadline_ms",
    "reserve_deadline_ms",
    "copy_threads",
    "verify",
)

SGLANG_OPTIONS = (
    *(option for option in OPTIONS if option.name in _SHARED),
    Option(
        "call_wait_ms",
        1.0,
        "The linker only: how long one lookup waits for the server.",
        unit="ms",
        bounds=(0.1, 100),
    ),
    Option(
        "pass_wait_ms",
        4.0,
        "The linker only: how long all lookups of one scheduling pass wait together. After it, and "
        "for a second after a lookup without an answer, lookups are misses at once.",
        unit="ms",
        bounds=(0.1, 1000),
    ),
    Option(
        "pin_s",
        10.0,
        "The linker only: how long the blocks of a lookup stay pinned for a request that is not "
        "looked up again.",
        unit="s",
        bounds=(0.01, 600),
    ),
    Option(
        "max_pins",
        256,
        "The linker only: the number of requests whose blocks are pinned at once. Further lookups "
        "are misses.",
        bounds=(1, 65_536),
    ),
    Option(
        "untested",
        False,
        "Serves what was not tested on the engine's kind of device (docs/sglang.md). Otherwise "
        "such an engine runs without the cache.",
    ),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options' values. Immutable."""

    host: str
    port: int
    weights_id: str
    load_patience_ms: float
    load_bytes_per_second: float
    connect_deadline_ms: float
    lookup_deadline_ms: float
    open_deadline_ms: float
    reserve_deadline_ms: float
    copy_threads: int
    verify: str
    call_wait_ms: float
    pass_wait_ms: float
    pin_s: float
    max_pins: int
    untested: bool
    #: What has set ``host``, for error texts.
    host_source: str = "pegaflow.host"

    def link_options(self) -> dict[str, float]:
        """The deadlines in seconds, as keyword arguments of the native classes."""
        return {
            "connect_deadline": self.connect_deadline_ms / 1e3,
            "lookup_deadline": self.lookup_deadline_ms / 1e3,
            "open_deadline": self.open_deadline_ms / 1e3,
            "reserve_deadline": self.reserve_deadline_ms / 1e3,
        }

    def mover_options(self) -> dict[str, Any]:
        """Those of link_options(), and the time that a load may take."""
        return {
            **self.link_options(),
            "load_patience": self.load_patience_ms / 1e3,
            "load_bytes_per_second": self.load_bytes_per_second,
            "verify": self.verify,
        }


def read(extra: Mapping[str, Any] | None, environ: Mapping[str, str] = os.environ) -> Settings:
    """The options in SGLang's extra configuration and in the environment, which wins.

    Raises:
        ConfigError: an unknown ``pegaflow.`` key, or a value that its option does not take.
    """
    extra = {} if extra is None else extra
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"the extra configuration {shown_value(extra)} is not a mapping of options to values, "
            'such as {"pegaflow.port": 50055}'
        )
    known = {option.key: option for option in SGLANG_OPTIONS}
    for key in extra:
        if isinstance(key, str) and key not in known:
            refuse_unknown(key, known)
    return Settings(**read_values(SGLANG_OPTIONS, extra, environ))


def address_only(extra: Any) -> dict[str, Any]:
    """The options that name the server, for a report about an invalid other one."""
    keys = {option.key for option in SGLANG_OPTIONS if option.name in ("host", "port")}
    return {key: extra[key] for key in keys & extra.keys()} if isinstance(extra, Mapping) else {}


def instance(role: str, rank: int, environ: Mapping[str, str] = os.environ) -> str:
    """The name of this engine's rank in the server's /instances.

    Args:
        role: "hicache" or "linker".
        rank: The rank's number in its engine.
    """
    from pegaflow import _native

    name = environ.get(INSTANCE_ENV) or f"sglang-{os.getpid()}-{_native.random_id().hex()[:8]}"
    return f"{name}-{role}-{rank}"
