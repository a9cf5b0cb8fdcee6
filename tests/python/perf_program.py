"""`pegaflow-perf` as a program: its output, and the plausibility of its figures."""

import json
import os
import subprocess
from pathlib import Path

import pytest

BUILD = Path(os.environ["PEGA_BUILD_DIR"])
PERF = BUILD / "perf" / "pegaflow-perf"
FIELDS = {
    "run",
    "params",
    "figure",
    "unit",
    "bound",
    "bound_name",
    "ratio",
    "target",
    "target_is",
    "held",
    "n",
    "spread",
    "load_average",
    "cores",
    "realtime",
    "version",
    "seed",
}


def perf(*arguments, timeout_s=120, **options):
    return subprocess.run(
        [PERF, *arguments], capture_output=True, text=True, timeout=timeout_s, **options
    )


def lines_of(*arguments, **options):
    """The figures of one run, each checked for plausibility."""
    done = perf(*arguments, "--json", **options)
    assert done.returncode == 0, done.stderr
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert figures
    for figure in figures:
        assert figure.keys() == FIELDS
        assert figure["n"] >= 1
        assert figure["load_average"] >= 0
        if figure["bound"]:
            assert figure["ratio"] == pytest.approx(figure["figure"] / figure["bound"])
        if figure["held"] is not None and figure["bound"]:
            limit = figure["ratio"] <= figure["target"]
            if figure["target_is"] == "at least":
                limit = figure["ratio"] >= figure["target"]
            assert figure["held"] == limit
    return figures
