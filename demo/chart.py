"""The hit rate over time as a chart: of characters for a terminal, and as SVG."""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Sequence
from html import escape

_ROWS = 8
_UPPER, _LOWER, _EVENT = "+", "#", "|"
_UPPER_COLOR, _LOWER_COLOR, _EVENT_COLOR, _TEXT_COLOR = "#2471a3", "#d68910", "#c0392b", "#333"
_WIDTH, _HEIGHT, _MARGIN, _LEGEND_LINE = 900, 260, 50, 18
#: Pixels of a character, about.
_CHARACTER = 7


@dataclasses.dataclass(frozen=True)
class Sample:
    """One request: two shares of its prompt's blocks, from 0 to 1, one drawn above the other."""

    at_s: float
    upper: float
    lower: float


@dataclasses.dataclass(frozen=True)
class Event:
    """What was done to the server, or which part of the demo begins."""

    at_s: float
    text: str


@dataclasses.dataclass(frozen=True)
class Legend:
    """What the two shares are."""

    title: str
    lower: str
    upper: str


LOADED = Legend("blocks of prompts that were loaded", "from the SSD", "from the pool")


def text_chart(
    samples: Sequence[Sample], events: Sequence[Event], width: int = 100, legend: Legend = LOADED
) -> str:
    """One column for a request, or for several where they do not fit, and one for an event."""
    room = width - len(_axis(0))
    columns = _columns(samples, events, per_column=1)
    per_column = 1
    while len(columns) > room and per_column < len(samples):
        per_column += 1
        columns = _columns(samples, events, per_column)
    lines = []
    for row in range(_ROWS, 0, -1):
        lines.append(_axis(row) + "".join(_cell(column, row) for column in columns).rstrip())
    names = iter(_names(len(events)))
    named = [next(names) if isinstance(one, Event) else " " for one in columns]
    lines.append((" " * len(_axis(0)) + "".join(named)).rstrip())
    each = "a request" if per_column == 1 else f"up to {per_column} requests"
    lines.append(
        f"  {legend.title}: {_LOWER} {legend.lower}, {_UPPER} {legend.upper}; a column is {each}"
    )
    lines += [
        f"  {name}  {event.at_s:6.1f} s  {event.text}"
        for name, event in zip(_names(len(events)), _sorted(events), strict=True)
    ]
    return "\n".join(lines)


def _names(count: int) -> list[str]:
    letters = string.ascii_lowercase
    return [letters[number] if number < len(letters) else "?" for number in range(count)]


def _sorted(events: Sequence[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.at_s)


def _axis(row: int) -> str:
    label = {_ROWS: "100 %", _ROWS // 2: "50 %"}.get(row, "")
    return f"  {label:>5} {_EVENT}"


def _columns(
    samples: Sequence[Sample], events: Sequence[Event], per_column: int
) -> list[Sample | Event]:
    """Requests and events by time; no column has requests from both sides of an event."""
    columns: list[Sample | Event] = []
    group: list[Sample] = []
    for one in sorted([*samples, *events], key=lambda one: one.at_s):
        if group and (isinstance(one, Event) or len(group) == per_column):
            columns.append(_mean(group))
            group = []
        if isinstance(one, Event):
            columns.append(one)
        else:
            group.append(one)
    return [*columns, _mean(group)] if group else columns


def _mean(group: Sequence[Sample]) -> Sample:
    return Sample(
        group[0].at_s,
        math.fsum(one.upper for one in group) / len(group),
        math.fsum(one.lower for one in group) / len(group),
    )


def _cell(column: Sample | Event, row: int) -> str:
    if isinstance(column, Event):
        return _EVENT
    # A share above 0 has a cell, and only a whole one has all.
    lower, both = (_cells(share) for share in (column.lower, column.lower + column.upper))
    return _LOWER if row <= lower else _UPPER if row <= both else " "


def _cells(share: float) -> int:
    if share > 1 - 1e-9:
        return _ROWS
    return min(_ROWS - 1, math.ceil(share * _ROWS - 1e-9))


def svg_chart(samples: Sequence[Sample], events: Sequence[Event], legend: Legend = LOADED) -> str:
    """The same with time as the x axis, in seconds since the start of the demo."""
    first = min((one.at_s for one in [*samples, *events]), default=0.0)
    last = max((one.at_s for one in [*samples, *events]), default=1.0)
    bottom = _HEIGHT - _MARGIN
    height = _HEIGHT + _LEGEND_LINE * (len(events) + 1)

    def x(at_s: float) -> float:
        return _MARGIN + (at_s - first) / max(1e-9, last - first) * (_WIDTH - 2 * _MARGIN)

    def y(share: float) -> float:
        return bottom - share * (bottom - _MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<path d="M{_MARGIN} {_MARGIN}V{bottom}H{_WIDTH - _MARGIN}" fill="none" '
        f'stroke="{_TEXT_COLOR}"/>',
    ]
    for one in samples:
        for low, high, color in (
            (0.0, one.lower, _LOWER_COLOR),
            (one.lower, one.lower + one.upper, _UPPER_COLOR),
        ):
            if high > low:
                parts.append(
                    f'<rect x="{x(one.at_s) - 2:.1f}" y="{y(high):.1f}" width="4" '
                    f'height="{y(low) - y(high):.1f}" fill="{color}"/>'
                )
    for share in (0.0, 0.5, 1.0):
        parts.append(_svg_text(_MARGIN - 6, y(share) + 4, f"{100 * share:.0f} %", "end"))
    for at_s in (first, last):
        parts.append(_svg_text(x(at_s), bottom + 16, f"{at_s:.0f} s", "middle"))
    at = _MARGIN
    for words, color in (
        (f"{legend.title}:", _TEXT_COLOR),
        (legend.lower, _LOWER_COLOR),
        (legend.upper, _UPPER_COLOR),
    ):
        parts.append(_svg_text(at, 16, words, "start", color))
        at += _CHARACTER * (len(words) + 1)
    for place, (name, event) in enumerate(zip(_names(len(events)), _sorted(events), strict=True)):
        at = x(event.at_s)
        line = f"{name}: {event.at_s:.1f} s, {event.text}"
        parts += [
            f'<path d="M{at:.1f} {_MARGIN - 8}V{bottom}" stroke="{_EVENT_COLOR}" '
            'stroke-dasharray="4 3"/>',
            _svg_text(at, _MARGIN - 12, name, "middle", _EVENT_COLOR),
            _svg_text(_MARGIN, _HEIGHT + _LEGEND_LINE * place, line, "start"),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _svg_text(x: float, y: float, words: str, anchor: str, color: str = _TEXT_COLOR) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )
