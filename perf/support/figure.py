"""A figure beside its bound from the same run, printed as text or as JSON."""

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
    """One measured number, its bound, and the target of their ratio.

    Less is better, except for rates (``at_least``).
    """

    run: str
    params: Mapping[str, Any]
    figure: float
    unit: str
    bound: float
    bound_name: str
    #: Limit of the ratio: at most this, or at least.
    target: float
    #: Number of samples or rounds.
    n: int
    #: Their spread, in words.
    spread: str
    at_least: bool = False

    @property
    def ratio(self) -> float:
        return self.figure / self.bound

    @property
    def held(self) -> bool:
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target

    @property
    def side(self) -> str:
        return "at least" if self.at_least else "at most"

    def line(self) -> str:
        word = "held" if self.held else "MISSED"
        return (
            f"{self.run}: {self.figure:.4g} {self.unit} beside {self.bound:.4g} ({self.bound_name})"
            f": {self.ratio:.3f} x, {self.side} {self.target:g} x: {word}; n={self.n}, "
            f"{self.spread}"
        )

    def json(self) -> str:
        """One object, with the fields of pegaflow-perf's JSON lines."""
        return json.dumps(
            {
                "run": self.run,
                "params": dict(self.params),
                "figure": self.figure,
                "unit": self.unit,
                "bound": self.bound,
                "bound_name": self.bound_name,
                "ratio": self.ratio,
                "target": self.target,
                "target_is": self.side,
                "held": self.held,
                "n": self.n,
                "spread": self.spread,
                "load_average": os.getloadavg()[0],
                "cores": os.cpu_count(),
            }
        )


def note(text: str) -> None:
    """Prints progress on standard error: standard output is for the figures alone."""
    print(text, file=sys.stderr, flush=True)


def publish(figures: Sequence[Figure], as_json: bool) -> bool:
    """Prints the figures, one per line; returns whether all met their targets."""
    for figure in figures:
        print(figure.json() if as_json else figure.line(), flush=True)
    return all(figure.held for figure in figures)


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
