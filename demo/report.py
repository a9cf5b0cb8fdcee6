"""The report: a table as text, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim of the demo about PegaFlow, and whether it held in this run."""

    name: str
    held: bool
    detail: str


class Checks:
    """Collects failed checks. A claim without a single check does not hold."""

    def __init__(self) -> None:
        self.count = 0
        self.failures: list[str] = []

    def equal(self, what: str, got: object, expected: object) -> None:
        self.require(got == expected, f"{what}: {got}, expected {expected}")

    def none(self, what: str, differences: Sequence[str]) -> None:
        self.require(not differences, f"{what}: {'; '.join(differences)}")

    def require(self, condition: bool, otherwise: str) -> None:
        self.count += 1
        if not condition:
            self.failures.append(otherwise)

    def claim(self, name: str, detail: str) -> Claim:
        """The claim, with ``detail`` if it held and with the failures otherwise."""
        if self.count == 0:
            return Claim(name, False, "nothing was checked")
        return Claim(name, not self.failures, "; ".join(self.failures) or detail)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and range of some samples."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def __str__(self) -> str:
        return f"{self.median:.2f} s ({min(self.samples):.2f} to {max(self.samples):.2f})"

    def as_json(self) -> dict[str, Any]:
        return {
            "median": self.median,
            "min": min(self.samples),
            "max": max(self.samples),
            "n": len(self.samples),
            "samples": list(self.samples),
        }


@dataclasses.dataclass
class PromptRow:
    """One prompt's line in the table: seconds to the first token, and the blocks loaded."""

    name: str
    tokens: int
    cold_s: float | None = None
    local_s: float | None = None
    loaded_s: float | None = None
    blocks: int | None = None
    expected_blocks: int | None = None


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def prompt_table(rows: Sequence[PromptRow]) -> str:
    lines = [
        f"  {'prompt (tokens)':<28} {'cold':>8} {'local hit':>10} {'loaded':>8}   blocks loaded",
        f"  {'-' * 28} {'-' * 8} {'-' * 10} {'-' * 8}   {'-' * 14}",
    ]
    for row in rows:
        blocks = "-" if row.blocks is None else f"{row.blocks} of {row.expected_blocks}"
        lines.append(
            f"  {row.name:<28} {_seconds(row.cold_s):>8} {_seconds(row.local_s):>10} "
            f"{_seconds(row.loaded_s):>8}   {blocks}"
        )
    lines.append("  (seconds to the first token; one sample each, not a measurement)")
    return "\n".join(lines)


def claim_table(claims: Sequence[Claim], width: int = 100) -> str:
    lines = ["  held  claim", "  ----  " + "-" * (width - 8)]
    for claim in claims:
        lines.append(f"  {'yes ' if claim.held else ' NO '}  {claim.name}")
        lines += textwrap.wrap(
            claim.detail, width, initial_indent=" " * 10, subsequent_indent=" " * 10
        )
    return "\n".join(lines)


def write_json(file: Path, claims: Sequence[Claim], figures: dict[str, Any]) -> None:
    document = {"claims": [dataclasses.asdict(claim) for claim in claims], **figures}
    file.write_text(json.dumps(document, indent=2) + "\n")
