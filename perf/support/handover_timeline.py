"""Where the time of a handover goes, from the notes of both engines.

``tools/vllm-gpu/plugin/pegaflow_timeline`` writes the notes, when ``PEGA_TIMELINE`` names a folder
in the engines' environment.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Note(NamedTuple):
    at: float  #: In seconds, as time.monotonic().
    engine: str
    event: str
    number: float


def read(folder: pathlib.Path) -> list[Note]:
    """All notes, in the order of their time. A line that is being written is left out."""
    notes = []
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("]"):
                notes.append(Note(*json.loads(line)))
    return sorted(notes)


def _last(notes: Iterable[Note], engine: str, event: str, before: float) -> float | None:
    found = [n.at for n in notes if n.engine == engine and n.event == event and n.at <= before]
    return max(found, default=None)


def _first(notes: Iterable[Note], engine: str, event: str, after: float) -> float | None:
    found = [n.at for n in notes if n.engine == engine and n.event == event and n.at >= after]
    return min(found, default=None)


#: The steps of one request after the prefill's last kernel, in the decode engine's order.
DECODE_STEPS = ("loaded", "received", "scheduled", "launched", "computed", "answered")


def _prefill_end(notes: Sequence[Note], tokens: int) -> float | None:
    """When engine "0" had computed the last chunk of a prompt of so many tokens."""
    own = [note for note in notes if note.engine == "0"]
    steps = [note.number for note in own if note.event == "scheduled"]
    # A step is scheduled while the one before it is computed, and several steps may have the same
    # number of tokens: of both, only the order shows which belong together.
    totals = list(itertools.accumulate(steps))
    if tokens not in totals:
        return None
    chunks = steps[: totals.index(tokens) + 1]
    computed = [note for note in own if note.event == "computed"][: len(chunks)]
    if [note.number for note in computed] != chunks:
        return None
    return computed[-1].at


def of_request(
    notes: Sequence[Note], begin: float, end: float, *, tokens: int, is_alone: bool
) -> dict[str, float] | None:
    """Milliseconds between the steps of the one request that was in flight between two times, at
    which its client sent it and had the first token; None if a note is missing.

    Engine "0" computes the prompt, which has so many ``tokens``, none of which it has cached.
    ``is_alone``: it also answers. Otherwise engine "1" does.
    """
    mine = [note for note in notes if begin <= note.at <= end]
    computed = _prefill_end(mine, tokens)
    if computed is None:
        return None
    found = {"prefill": (computed - begin) * 1e3}
    at, engine, names = computed, "0", ("answered",)
    if not is_alone:
        engine, names = "1", DECODE_STEPS
        if (asked := _first(mine, "1", "asked", begin)) is not None:
            found["asked"] = (asked - computed) * 1e3
    for name in names:
        if name == "loaded":  # a part of the load may end before
            received = _last(mine, engine, "received", end)
            after = None if received is None else _last(mine, engine, "loaded", received)
        else:
            after = _first(mine, engine, name, at)
        if after is None:
            return None
        found[name] = (after - at) * 1e3
        at = after
    found["client"] = (end - at) * 1e3
    if not is_alone:
        found |= _calls(mine, computed)
    return found


def _calls(notes: Sequence[Note], begin: float) -> dict[str, float]:
    """The time of the decode engine's functions since ``begin``, by name."""
    took: dict[str, float] = {}
    for note in notes:
        if note.engine == "1" and note.event.endswith("()") and note.at >= begin:
            took[note.event] = took.get(note.event, 0) + note.number
    return took


def table(rows: Sequence[tuple[str, dict[str, float]]]) -> list[str]:
    """Medians by arm, with the least and the largest value."""
    lines = []
    for arm in dict.fromkeys(name for name, _ in rows):
        own = [found for name, found in rows if name == arm]
        parts = []
        for step in dict.fromkeys(step for found in own for step in found):
            values = [found[step] for found in own if step in found]
            parts.append(
                f"{step} {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
            )
        lines.append(f"{arm}, n = {len(own)}, ms after the step before: " + ", ".join(parts))
    return lines
