"""A figure beside its bound from the same run, for people and for machines."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured number, the number that it is held against, and how far it may go.

    Less is better, but for what is a rate (``at_least``).
    """

    run: str
    params: Mapping[str, Any]
    figure: float
    unit: str
    bound: float
    bound_name: str
    #: The ratio may be this at most, or at least.
    reach: float
    #: Samples, or rounds.
    n: int
    #: How they spread, in words.
    spread: str
    at_least: bool = False

    @property
    def ratio(self) -> float:
        return self.figure / self.bound

    @property
    def reached(self) -> bool:
        return self.ratio >= self.reach if self.at_least else self.ratio <= self.reach

    @property
    def side(self) -> str:
        return "at least" if self.at_least else "at most"

    def line(self) -> str:
        word = "reached" if self.reached else "MISSED"
        return (
            f"{self.run}: {self.figure:.4g} {self.unit} beside {self.bound:.4g} ({self.bound_name})"
            f": {self.ratio:.3f} x, {self.side} {self.reach:g} x: {word}; n={self.n}, {self.spread}"
        )

    def json(self) -> str:
        """One object, with the fields that pegaflow-perf prints."""
        return json.dumps(
            {
                "run": self.run,
                "params": dict(self.params),
                "figure": self.figure,
                "unit": self.unit,
                "bound": self.bound,
                "bound_name": self.bound_name,
                "ratio": self.ratio,
                "reach": self.reach,
                "reach_is": self.side,
                "held": self.reached,
                "n": self.n,
                "spread": self.spread,
                "load_average": os.getloadavg()[0],
                "cores": os.cpu_count(),
            }
        )


def note(text: str) -> None:
    """Says how far a run is, on standard error: standard output is for the figures alone."""
    print(text, file=sys.stderr, flush=True)


def publish(figures: Sequence[Figure], as_json: bool) -> bool:
    """Prints the figures, one a line; returns whether all were reached."""
    for figure in figures:
        print(figure.json() if as_json else figure.line(), flush=True)
    return all(figure.reached for figure in figures)


def student_t_975(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, within 0.001 from 8 degrees of freedom on.

    Source: the asymptotic expansion in Abramowitz and Stegun, 26.7.5.
    """
    if degrees < 8:
        raise ValueError(f"{degrees} degrees of freedom are too few for the expansion")
    z = statistics.NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def mean_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the lower and upper end of its 95 % interval, for at least 9 samples."""
    mean = statistics.fmean(samples)
    half = student_t_975(len(samples) - 1) * statistics.stdev(samples) / math.sqrt(len(samples))
    return mean, mean - half, mean + half
