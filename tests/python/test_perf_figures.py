"""The arithmetic of the Python benchmarks."""

import dataclasses
import json
import statistics

import pytest

from perf.support.figure import Figure, mean_interval, publish, student_t_975


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(8, 2.306), (9, 2.262), (19, 2.093), (99, 1.984)]
)
def test_the_t_quantile_is_that_of_the_tables(degrees: int, quantile: float) -> None:
    assert student_t_975(degrees) == pytest.approx(quantile, abs=1e-3)


def test_too_few_samples_for_the_quantile_are_rejected() -> None:
    with pytest.raises(ValueError, match="too few"):
        mean_interval([1.0] * 8)


def test_the_interval_lies_around_the_mean() -> None:
    samples = [0.01, 0.03, 0.02, 0.02, 0.04, 0.0, 0.01, 0.03, 0.02, 0.02]
    mean, low, high = mean_interval(samples)
    assert mean == pytest.approx(0.02)
    # 2.262 x the standard deviation / sqrt(10)
    assert high - mean == pytest.approx(2.2622 * statistics.stdev(samples) / 10**0.5, abs=1e-5)
    assert mean - low == pytest.approx(high - mean)


def figure(value: float) -> Figure:
    return Figure("a run", {"n": 3}, value, "s", 2.0, "the same by hand", 1.1, 3, "all alike")


@pytest.mark.parametrize(("value", "held"), [(2.1, True), (2.3, False)])
def test_a_figure_is_compared_with_its_bound(
    value: float, held: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish([figure(2.0), figure(value)], as_json=True) is held

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["ratio"] for line in lines] == [1.0, value / 2]
    assert [line["held"] for line in lines] == [True, held]
    assert {"run", "params", "figure", "unit", "bound", "bound_name", "ratio"} <= lines[0].keys()
    assert ("MISSED" in figure(value).line()) is not held


@pytest.mark.parametrize(("value", "held"), [(2.3, True), (2.1, False)])
def test_a_rate_must_be_above_its_bound(value: float, held: bool) -> None:
    rate = dataclasses.replace(figure(value), at_least=True)
    assert rate.held is held
    assert "at least 1.1 x" in rate.line()
    assert json.loads(rate.json())["target_is"] == "at least"
