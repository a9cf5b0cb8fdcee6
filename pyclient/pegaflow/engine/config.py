"""Every option of the connector, in one table, and the path of the server's socket.

Options come from ``kv_connector_extra_config`` as ``pegaflow.NAME``. If the table names an
environment variable, that wins: one launch script can then serve several machines.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "pegaflow."
#: All factors of a namespace together have at most 64 KiB.
MAX_TEXT = 4096


class ConfigError(ValueError):
    """The configuration is invalid; the text has the fix."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One row of the table."""

    name: str
    default: Any  #: Its type is the option's type.
    sentence: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    bounds: tuple[float, float] | None = None  #: Of the value; of a text's length.
    env: str = ""

    @property
    def key(self) -> str:
        return PREFIX + self.name

    def plain(self, number: float) -> str:
        """A number in plain notation: 0.5, 65535 without a unit, 1,000,000,000 with one."""
        return f"{number:,.0f}" if self.unit and number >= 1e4 else f"{number:.10g}"

    @property
    def accepted(self) -> str:
        """The values that the option takes, for error texts."""
        kind = type(self.default)
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if kind is bool:
            return "true or false"
        if kind is str and self.bounds:
            return f"a text of at most {self.plain(self.bounds[1])} printable ASCII characters"
        if kind is str:
            return f"a text of at most {MAX_TEXT:,} bytes"
        if kind is tuple:
            return f"a list of whole numbers{self._range()}, such as 1,2,4"
        return f"{'a whole number' if kind is int else 'a number'}{self._range()}"

    def _range(self) -> str:
        if not self.bounds:
            return ""
        low, high = self.bounds
        return f" between {self.plain(low)} and {self.plain(high)} {self.unit}".rstrip()

    def read(self, value: Any, source: str) -> Any:
        """Converts a configured value to this option's type.

        Raises:
            ConfigError: wrong type, out of bounds, or not among the choices.
        """
        try:
            return self._convert(value)
        except (TypeError, ValueError, OverflowError):
            shown = shown_value(value)
            raise ConfigError(f"{source}={shown} is not {self.accepted}") from None

    def _convert(self, value: Any) -> Any:
        """
        Raises:
            TypeError, ValueError, OverflowError: the option does not take the value.
        """
        kind = type(self.default)
        if kind is bool:
            return _to_bool(value)
        if kind is str:
            return self._to_text(value)
        if kind is tuple:
            return self._to_numbers(value)
        return self._in_bounds(_to_int(value) if kind is int else _to_float(value))

    def _to_text(self, value: Any) -> str:
        if not isinstance(value, str) or "\0" in value or len(value.encode()) > MAX_TEXT:
            raise TypeError
        if self.choices and value not in self.choices:
            raise ValueError
        if self.bounds:
            self._in_bounds(len(value))
            if not (value.isascii() and value.isprintable()):
                raise ValueError
        return value

    def _to_numbers(self, value: Any) -> tuple[int, ...]:
        """Different numbers in rising order, of a text with commas, a list or one number."""
        if value == "":
            return ()
        parts = value.split(",") if isinstance(value, str) else value
        parts = parts if isinstance(parts, list | tuple) else [parts]
        if any(isinstance(part, float) for part in parts):
            raise TypeError
        return tuple(sorted({self._in_bounds(_to_int(part)) for part in parts}))

    def _in_bounds(self, number: Any) -> Any:
        if self.bounds and not self.bounds[0] <= number <= self.bounds[1]:  # NaN is in no bounds
            raise ValueError
        return number


def shown_value(value: Any) -> str:
    """A configured value for an error text, cut if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or a nested one
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _to_bool(value: Any) -> bool:
    words = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, bool):
        return value
    if not isinstance(value, str | int):
        raise TypeError
    if str(value).lower() not in words:
        raise ValueError
    return words[str(value).lower()]


def _to_int(value: Any) -> int:
    if isinstance(value, str):
        # int() takes more: 1_000, and digits of other scripts.
        if not re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", value):
            raise ValueError
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    if value != int(value):  # OverflowError or ValueError for an infinite one and NaN
        raise ValueError
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError
    if isinstance(value, str) and ("_" in value or not value.isascii()):
        raise ValueError  # as in _to_int()
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


OPTIONS = (
    Option(
        "host",
        "127.0.0.1",
        "An address of this machine, or `unix:PATH`, the path of the server's socket.",
        env="PEGAFLOW_HOST",
    ),
    Option(
        "port",
        50055,
        "The port in the server's `--addr`, which names the socket.",
        bounds=(1, 65535),
        env="PEGAFLOW_PORT",
    ),
    Option(
        "mode",
        "read_write",
        "`save_only` saves blocks and never loads any.",
        choices=("read_write", "save_only"),
    ),
    Option(
        "weights_id",
        "",
        "Names the weights, also those of a draft model. Engines with equal names share blocks, so "
        "equal names for different weights produce wrong answers. Empty: the SHA-256 digests of "
        "the weight files.",
    ),
    Option(
        "tp_sizes",
        (),
        "The tensor-parallel sizes of the engines that share blocks, such as `1,2,4`: one list for "
        "all of them ([Tensor-parallel sizes](#tensor-parallel-sizes)). Empty: only engines of "
        "equal size share blocks.",
        bounds=(1, 1024),
    ),
    Option(
        "min_load_tokens",
        0,
        "The shortest hit that is loaded; shorter ones are computed. 0 means two blocks.",
        unit="tokens",
        bounds=(0, 1 << 30),
    ),
    Option(
        "keep_failure_policy",
        False,
        "Leaves vLLM's `kv_load_failure_policy` unchanged. Otherwise `fail`, vLLM's default, which "
        "responds with HTTP 500, becomes `recompute`.",
    ),
    Option(
        "max_pinned_percent",
        10,
        "The share of the GPU's blocks that may be pinned for saves at once. Further blocks wait; "
        "those of a finished request are dropped if vLLM reuses them first. Blocks of prompts that "
        "a decode engine waits for may be pinned up to 50 %.",
        unit="%",
        bounds=(1, 50),
    ),
    Option(
        "claim_wait_ms",
        1.0,
        "How long one scheduler call waits for the response to a claim.",
        unit="ms",
        bounds=(0, 100),
    ),
    Option(
        "claim_limit_ms",
        20.0,
        "The prompt is computed after this time without a response.",
        unit="ms",
        bounds=(0, 10_000),
    ),
    Option(
        "handover_wait_ms",
        2000.0,
        "How long a request waits for blocks that a prefill engine saves for it. 0: not at all.",
        unit="ms",
        bounds=(0, 10_000),
    ),
    Option(
        "early_load_percent",
        50,
        "The share of the GPU's blocks that requests may hold for prompts that a prefill engine "
        "still computes: they load each chunk once it is saved. 0: a request loads nothing before "
        "the whole prompt is saved.",
        unit="%",
        bounds=(0, 90),
    ),
    Option(
        "direct_group",
        "",
        "Engines that name the same group read blocks of a prompt out of each other's "
        "memory while these are saved ([Direct reads](prefill_decode.md#direct-reads)). Empty: "
        "blocks are read after they were saved.",
        bounds=(0, 64),
    ),
    Option(
        "direct_nics",
        "",
        "RDMA cards over which engines of other hosts in the same group read blocks out of this "
        "engine's memory, and it out of theirs and of the pools of other nodes: `auto`, or names "
        "as `mlx5_0:1,mlx5_1`. On a GPU this needs cards that read it, and a UCX with CUDA "
        "support. Empty: blocks between hosts go through the pools of both nodes.",
        bounds=(0, 1024),
    ),
    Option(
        "ucx_library",
        "",
        "With `direct_nics`: the file of libucp.so.0 to use. Empty: that of `PEGA_UCX_LIBRARY`, or "
        "the installed one.",
        bounds=(0, 4096),
    ),
    Option(
        "idle_step_ms",
        10.0,
        "The longest time for which a step sleeps in which every request waits for the cache. An "
        "answer of the server and a new request end it. 0: never.",
        unit="ms",
        bounds=(0, 100),
    ),
    Option(
        "miss_ttl_ms",
        100.0,
        "How long a miss is remembered before the next lookup of the same prefix.",
        unit="ms",
        bounds=(0, 60_000),
    ),
    Option(
        "load_policy",
        "auto",
        "`auto` offers a load only if it is predicted to end before the prompt would be computed, "
        "and computes the rest of a load that falls behind. `always` loads all cached blocks.",
        choices=("auto", "always"),
    ),
    Option(
        "load_patience_ms",
        250.0,
        "A load may take this long, and the time that its bytes need. Then the rest is computed.",
        unit="ms",
        bounds=(1, 600_000),
    ),
    Option(
        "load_bytes_per_second",
        1e9,
        "The slowest copy that a load's deadline allows for.",
        unit="B/s",
        bounds=(1e6, 1e13),
    ),
    Option(
        "connect_deadline_ms",
        1000.0,
        "A server that does not respond to `hello` within this time counts as stopped.",
        unit="ms",
        bounds=(1, 60_000),
    ),
    Option(
        "lookup_deadline_ms",
        50.0,
        "The deadline of one lookup or claim. Three misses within a second open the breaker.",
        unit="ms",
        bounds=(1, 60_000),
    ),
    Option(
        "open_deadline_ms",
        50.0,
        "The deadline of the call with which a worker opens a claim.",
        unit="ms",
        bounds=(1, 60_000),
    ),
    Option(
        "reserve_deadline_ms",
        20.0,
        "The deadline of the call that reserves slots, plus 1 ms for each 8 MB to be saved: the "
        "server may have to evict blocks. GPU blocks stay pinned until the response.",
        unit="ms",
        bounds=(1, 60_000),
    ),
    Option(
        "copy_threads",
        1,
        "The number of copy threads, if the KV cache lies in host memory.",
        bounds=(1, 64),
    ),
    Option(
        "verify",
        "off",
        "`all` computes a checksum of each saved page, `sample` of one page in 16. Both compare "
        "loaded pages with their checksums. A wrong page is counted and computed, and the server "
        "removes its block. Engines that share blocks should have the same value.",
        choices=("off", "sample", "all"),
    ),
    Option(
        "window_interval",
        2048,
        "Models with sliding windows or chunks: the cache keeps what a request needs to continue "
        "after each multiple of this many tokens, so that another prompt can branch off there. 0: "
        "only at the ends of prompts and answers.",
        unit="tokens",
        bounds=(0, 1 << 30),
    ),
    Option(
        "untested",
        False,
        "Serves models with kinds of cache groups that were not tested on the engine's kind of "
        "device (docs/models.md). Otherwise these engines run without the cache.",
    ),
    Option(
        "log_interval_s",
        60.0,
        "The interval of the log line that summarizes loads and saves, if there were any. 0: none.",
        unit="s",
        bounds=(0, 86_400),
    ),
)

#: Keys of the older connector without a meaning here; accepted, and reported once.
WITHOUT_MEANING = {
    "pegaflow.transfer_backend": "the copy engine chooses by segment size",
    "pegaflow.wait_for_full_prefix": "a load begins with the blocks that are present",
}

#: One variable for host and port, as `127.0.0.1:50055` or `unix:PATH`; before the two others.
ENDPOINT_ENV = "PEGAFLOW_ENGINE_ENDPOINT"
INSTANCE_ENV = "PEGAFLOW_INSTANCE_ID"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options' values. Immutable."""

    host: str
    port: int
    mode: str
    weights_id: str
    tp_sizes: tuple[int, ...]
    min_load_tokens: int
    keep_failure_policy: bool
    max_pinned_percent: int
    claim_wait_ms: float
    claim_limit_ms: float
    handover_wait_ms: float
    early_load_percent: int
    direct_group: str
    direct_nics: str
    ucx_library: str
    idle_step_ms: float
    miss_ttl_ms: float
    load_policy: str
    load_patience_ms: float
    load_bytes_per_second: float
    connect_deadline_ms: float
    lookup_deadline_ms: float
    open_deadline_ms: float
    reserve_deadline_ms: float
    copy_threads: int
    verify: str
    window_interval: int
    untested: bool
    log_interval_s: float
    #: Remarks about accepted keys, for the log.
    remarks: tuple[str, ...] = ()
    #: What has set ``host``, for error texts.
    host_source: str = "pegaflow.host"

    def link_options(self) -> dict[str, float]:
        """The deadlines, as keyword arguments of the native classes."""
        return {
            "connect_deadline": self.connect_deadline_ms / 1e3,
            "lookup_deadline": self.lookup_deadline_ms / 1e3,
            "open_deadline": self.open_deadline_ms / 1e3,
            "reserve_deadline": self.reserve_deadline_ms / 1e3,
        }

    def network_options(self) -> dict[str, Any]:
        """What native movers need for engines of other hosts; nothing without cards."""
        nics = [name.strip() for name in self.direct_nics.split(",") if name.strip()]
        library = self.ucx_library or os.environ.get("PEGA_UCX_LIBRARY", "")
        return {"direct_nics": nics, "ucx_library": library} if nics else {}


#: Keys that are meant for this connector, also if the prefix is misspelled.
_OWN_KEY = re.compile(r"pega[-_]?flow([^a-z]|$)", re.IGNORECASE)


def shown_key(key: str) -> str:
    """A key for an error text, cut if it is long."""
    text = key if key.isprintable() else repr(key)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_settings(extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """Reads the options out of ``kv_connector_extra_config`` and the environment.

    Raises:
        ConfigError: an unknown ``pegaflow.`` key, or a value that its option does not take.
    """
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"kv_connector_extra_config={shown_value(extra)} is not a mapping of options to "
            'values, such as {"pegaflow.port": 50055}'
        )
    known = {option.key: option for option in OPTIONS}
    remarks = []
    for key in extra:
        if not isinstance(key, str) or key in known:
            continue
        if key in WITHOUT_MEANING:
            remarks.append(f"{key} has no meaning here: {WITHOUT_MEANING[key]}")
        else:
            refuse_unknown(key, known)
    return Settings(**read_values(OPTIONS, extra, environ), remarks=tuple(remarks))


def refuse_unknown(key: str, known: Mapping[str, Option]) -> None:
    """
    Raises:
        ConfigError: an unknown key of PegaFlow, also if its prefix is misspelled.
    """
    if _OWN_KEY.match(key):
        near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown option {shown_key(key)}; the nearest is {near}")


def read_values(
    options: Sequence[Option], extra: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, Any]:
    """The value of each option by its name, and ``host_source``. The environment wins.

    Raises:
        ConfigError: a value that its option does not take.
    """
    values: dict[str, Any] = {}
    for option in options:
        values[option.name] = option.default
        if option.key in extra:
            values[option.name] = option.read(extra[option.key], option.key)
        if option.env and environ.get(option.env):
            values[option.name] = option.read(environ[option.env], option.env)
    if endpoint := environ.get(ENDPOINT_ENV):
        source = ENDPOINT_ENV
        host = next(option for option in options if option.name == "host")
        values["host"] = host.read(endpoint, source)
    else:
        source = "PEGAFLOW_HOST" if environ.get("PEGAFLOW_HOST") else "pegaflow.host"
    return {**values, "host_source": source}


#: The longest path of a socket: the kernel's limit, without the byte behind it.
MAX_SOCKET_PATH = 107


def socket_path(settings: Settings) -> str:
    """The path of the server's socket.

    Raises:
        ConfigError: the host is another machine, or the path is invalid.
    """
    stated = f"{settings.host_source}={shown_value(settings.host)}"
    host, port = settings.host, settings.port
    if host.startswith("unix:"):
        path = host.removeprefix("unix:")
        if not os.path.isabs(path):
            raise ConfigError(f"{stated}: a socket needs an absolute path, as unix:/run/x.sock")
        if (size := len(os.fsencode(path))) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"{stated}: the path of a socket has at most {MAX_SOCKET_PATH} bytes, not {size}"
            )
        return path
    # Launch scripts of the older connector write http://HOST.
    host = host.split("://", 1)[-1].rstrip("/")
    if host.count(":") == 1:
        host, _, text = host.partition(":")
        port_option = next(option for option in OPTIONS if option.name == "port")
        port = port_option.read(text, f"{stated}: port")
    if not host.strip("[]"):
        raise ConfigError(f"{stated} is neither an address of this machine nor unix:/PATH")
    if not is_this_machine(host.strip("[]")):
        raise ConfigError(
            f"{stated}: {shown_key(host)} is not this machine. An engine shares memory with its "
            "server, so it needs a pegaflow-server on its own machine; servers connect to each "
            "other"
        )
    from pegaflow import _native

    return _native.default_socket_path(port)


def is_this_machine(host: str) -> bool:
    """Whether a name or address is this machine's: loopback, its host name, or a bindable one."""
    if host in ("localhost", "0.0.0.0", "::", socket.gethostname()):
        return True
    try:
        if ipaddress.ip_address(host).is_loopback:
            return True
    except ValueError:
        pass  # a name; it is looked up below
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False  # an unknown or impossible name is not this machine's
    return any(_can_bind(family, address) for family, _, _, _, address in addresses)


def _can_bind(family: int, address: tuple) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False  # the kernel binds own addresses only
    return True


def options_markdown(options: Sequence[Option] = OPTIONS) -> str:
    """The table of docs/connector.md, or of the options of another engine."""
    lines = ["| option | default | takes | meaning |", "|---|---|---|---|"]
    for option in options:
        if option.default in ("", ()) or isinstance(option.default, bool):
            default = "" if option.default == () else str(option.default).lower()
            default = default or "empty"
        else:
            default = option.plain(option.default) if option.unit else str(option.default)
        if option.choices:
            takes = ", ".join(f"`{choice}`" for choice in option.choices)
        elif isinstance(option.default, tuple):
            takes = "numbers with commas"
        elif option.bounds and not isinstance(option.default, str):
            low, high = option.bounds
            takes = f"{option.plain(low)} to {option.plain(high)} {option.unit}".strip()
        else:
            takes = {bool: "`true`, `false`", str: "text"}[type(option.default)]
        meaning = option.sentence + (f" Environment: `{option.env}`." if option.env else "")
        lines.append(f"| `{option.key}` | {default} | {takes} | {meaning} |")
    return "\n".join(lines)
