"""Checks of arguments. Each error names the argument, its value and what is possible."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: The longest time in seconds that the native module takes.
LONGEST_S = 8e5
HIGHEST_RATE = 1e15
MAX_KEY_BYTES = 32
#: The server's limits of the factors of a namespace; the layout of the blocks is one of them.
MAX_FACTORS, MAX_FACTOR_BYTES = 256, 64 * 1024

#: The deadlines and other options of a cache by name, with the range of their values.
SECONDS = (
    "connect_deadline",
    "lookup_deadline",
    "open_deadline",
    "reserve_deadline",
    "load_patience",
    "reconnect_interval",
    "refused_interval",
    "breaker_window",
    "breaker_probe_interval",
)
COUNTS = ("breaker_failures", "max_jobs", "sample_one_in")
RATES = ("load_bytes_per_second",)
_OTHERS = (
    "factors",
    "block_axis",
    "kinds",
    "unit_tokens",
    "alignment_tokens",
    "endpoint",
    "instance",
    "copy_threads",
    "verify",
    "raise_errors",
)


def shown(value: Any) -> str:
    """A value for an error text, cut if it is long."""
    try:
        text = " ".join(repr(value).split())  # an array's has several lines
    except Exception:  # that of a class of the program
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def whole(name: str, value: Any, low: int, high: int) -> int:
    """A whole number of any integer type.

    Raises:
        ValueError: another type, also a boolean, or out of bounds.
    """
    number = None
    if not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            pass  # reported below
    if number is None or not low <= number <= high:
        raise ValueError(f"{name}={shown(value)} is not a whole number from {low:,} to {high:,}")
    return number


def _number(value: Any) -> float:
    """NaN for anything else than a number."""
    if isinstance(value, bool | str | bytes):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def seconds(name: str, value: Any, *, zero: bool = True) -> float:
    """A time.

    Raises:
        ValueError: another type, not finite, negative, or too long.
    """
    number = _number(value)
    if not 0 <= number <= LONGEST_S or (number == 0 and not zero):
        least = "from 0" if zero else "above 0"
        raise ValueError(f"{name}={shown(value)} is not a number of seconds {least} to 800,000")
    return number


def text(name: str, value: Any) -> str:
    """
    Raises:
        ValueError: another type, or empty.
    """
    if not isinstance(value, str) or not value or "\0" in value or not _is_encodable(value):
        raise ValueError(f"{name}={shown(value)} is not a text, or is empty")
    return value


def boolean(name: str, value: Any) -> bool:
    """
    Raises:
        ValueError: another type.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} is not True or False")
    return value


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """
    Raises:
        ValueError: none of the choices.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={shown(value)} is not {', '.join(choices[:-1])} or {choices[-1]}")
    return value


def listed(name: str, value: Any, of: str) -> list[Any]:
    """A list of the elements of a list, tuple, range, array or other sequence.

    Raises:
        ValueError: a text, a mapping, or not a sequence.
    """
    no_sequence = isinstance(value, str | bytes | bytearray | memoryview | Mapping | set)
    if no_sequence or not hasattr(value, "__len__") or not isinstance(value, Iterable):
        raise ValueError(f"{name}={shown(value)} is not a sequence of {of}")
    as_numbers = getattr(value, "tolist", None)  # of arrays: Python's own numbers
    return list(as_numbers() if as_numbers is not None else value)


def options(named: Mapping[str, Any]) -> None:
    """Checks the deadlines and the other options of a cache.

    Raises:
        ValueError: an unknown one, or an invalid value.
    """
    for name, value in named.items():
        if name in SECONDS:
            seconds(name, value, zero=name == "load_patience")
        elif name in COUNTS:
            whole(name, value, 1, (1 << 31) - 1)
        elif name in RATES:
            rate(name, value)
        else:
            known = (*SECONDS, *COUNTS, *RATES, *_OTHERS)
            (near,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(f"unknown option {name}; the nearest is {near}")


def rate(name: str, value: Any) -> None:
    """
    Raises:
        ValueError: another type, not positive, or too large.
    """
    if not 0 < _number(value) <= HIGHEST_RATE:
        raise ValueError(f"{name}={shown(value)} is not a number of bytes above 0 to 1e15")


def factor_list(factors: Any, layout: str) -> list[tuple[str, str]]:
    """The namespace's sorted list, with the format of its blocks.

    Raises:
        ValueError: not a mapping of names to texts or numbers, empty, too large, or with a layout
            of its own.
    """
    if not isinstance(factors, Mapping):
        raise ValueError(
            f"factors={shown(factors)} is not a mapping, such as {{'model': 'my-model@3f2a'}}"
        )
    if not factors:
        raise ValueError("factors: the model's name is missing")
    made = {}
    for name, value in factors.items():
        text("factors: the name", name)
        if not isinstance(value, str | int | float) or not _is_encodable(str(value)):
            # The text of another object may have its address in it.
            raise ValueError(f"factors[{name!r}]={shown(value)} is neither a text nor a number")
        made[name] = str(value)
    if "layout" in made:
        raise ValueError("factors: `layout` is reserved; it is derived from the arrays")
    made["layout"] = layout
    size = sum(len(name.encode()) + len(value.encode()) for name, value in made.items())
    if len(made) > MAX_FACTORS or size > MAX_FACTOR_BYTES:
        raise ValueError(
            f"factors: {len(made)} of {size:,} bytes with the layout; at most {MAX_FACTORS} of "
            f"{MAX_FACTOR_BYTES:,} bytes are possible. Use a digest of long values"
        )
    return sorted(made.items())


def _is_encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a character
        return False
    return True


def key_list(keys: Any, most: int) -> list[bytes]:
    """
    Raises:
        ValueError: not a sequence of bytes of one length, a key has none or more than 32 bytes, or
            there are more than ``most``.
    """
    made = listed("keys", keys, "bytes")
    if len(made) > most:
        raise ValueError(f"{len(made)} keys in one call; {most} are possible")
    for number, key in enumerate(made):
        if not isinstance(key, bytes):
            raise ValueError(f"keys[{number}]={shown(key)} is not bytes")
    if made and not 1 <= len(made[0]) <= MAX_KEY_BYTES:
        raise ValueError(f"keys[0] is a key of {len(made[0])} bytes; 1 to 32 are possible")
    for number, key in enumerate(made):
        if len(key) != len(made[0]):
            raise ValueError(f"keys[{number}] has {len(key)} bytes and keys[0] has {len(made[0])}")
    return made


def block_list(name: str, blocks: Any, counts: Sequence[int], *, distinct: bool) -> list[int]:
    """The blocks of all members for the first key, then for the next one.

    Args:
        counts: The number of blocks of each member.
        distinct: Refuse a block that is named twice: two keys cannot be loaded into it.

    Raises:
        ValueError: a value is not the number of a block, or comes twice.
    """
    made = listed(name, blocks, "whole numbers")
    seen: dict[tuple[int, int], int] = {}
    for place, block in enumerate(made):
        member = place % len(counts)
        if type(block) is not int:
            block = made[place] = whole(f"{name}[{place}]", block, 0, counts[member] - 1)
        if not 0 <= block < counts[member]:
            raise ValueError(
                f"{name}[{place}]: block {block} of {counts[member]}, which are numbered from 0"
            )
        if distinct and (first := seen.setdefault((member, block), place)) != place:
            raise ValueError(
                f"{name}[{place}] is block {block}, as {name}[{first}]: a load needs one for each "
                "key"
            )
    return made
