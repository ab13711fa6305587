"""Predictors on series of which the next value is known."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.plan import predictors
from forerun.plan.predictors import (
    MOST_VALUES,
    AutoregressivePredictor,
    HarmonicPredictor,
    KalmanPredictor,
    Predictor,
    make_predictor,
)

BUILT_IN = ("constant", "ar", "kalman", "harmonic")


def fed(predictor: Predictor, values: list[float]) -> Predictor:
    for value in values:
        predictor.add(value)
    return predictor


@pytest.mark.parametrize("name", BUILT_IN)
def test_nothing_is_predicted_of_nothing_and_a_constant_of_a_constant(name: str) -> None:
    predictor = make_predictor(name)
    assert predictor.predict() == 0.0
    fed(predictor, [3.0] * 20)
    assert predictor.predict() == pytest.approx(3.0)
    assert predictor.predict(5) == pytest.approx(3.0)


@pytest.mark.parametrize("name", BUILT_IN)
@given(values=st.lists(st.floats(0.0, 1e9), max_size=40), steps=st.integers(1, 5))
def test_predictions_are_finite_and_not_negative(name: str, values: list[float], steps: int) -> None:
    assert 0.0 <= fed(make_predictor(name), values).predict(steps) < math.inf


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_value_that_no_load_has_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        make_predictor(name).add(value)


def test_kalman_follows_a_trend() -> None:
    predictor = fed(KalmanPredictor(), [10.0 + 2.0 * time for time in range(60)])
    assert predictor.predict() == pytest.approx(130.0, rel=0.01)
    assert predictor.predict(3) == pytest.approx(134.0, rel=0.01)


@given(st.floats(1e-3, 1e6))
def test_the_unit_of_a_series_does_not_matter(unit: float) -> None:
    values = [5.0 + math.sin(time) for time in range(30)]
    for name in BUILT_IN:
        plain = fed(make_predictor(name), values).predict()
        assert fed(make_predictor(name), [unit * value for value in values]).predict() == pytest.approx(unit * plain)


def test_autoregression_finds_the_recurrence() -> None:
    values = [5.0, 6.0]
    for _ in range(60):
        values.append(2.0 + 1.5 * values[-1] - 0.8 * values[-2])
    expected = 2.0 + 1.5 * values[-1] - 0.8 * values[-2]
    assert fed(AutoregressivePredictor(), values).predict() == pytest.approx(expected, rel=1e-6)


def test_autoregression_sees_no_pattern_in_noise() -> None:
    randomness = random.Random(3)
    values = [max(0.0, randomness.gauss(100.0, 10.0)) for _ in range(200)]
    assert fed(AutoregressivePredictor(), values).predict() == pytest.approx(np.mean(values), rel=0.06)


def test_harmonics_know_the_hour_from_the_day_before() -> None:
    def at(hour: float) -> float:
        return 20.0 + 10.0 * math.sin(2 * math.pi * hour / 24) + 4.0 * math.cos(4 * math.pi * hour / 24)

    predictor = HarmonicPredictor(period=24)
    fed(predictor, [at(hour) for hour in range(23)])
    assert predictor.predict() == at(22)  # not yet a day: the last value
    fed(predictor, [at(hour) for hour in range(23, 60)])
    for ahead in (1, 6, 12):
        assert predictor.predict(ahead) == pytest.approx(at(59 + ahead), rel=1e-6)


def test_a_day_of_traffic_is_predicted_better_by_its_pattern_than_by_its_last_value() -> None:
    randomness = random.Random(5)
    day = [30 + 25 * math.sin(2 * math.pi * hour / 24) for hour in range(24)]
    values = [max(0.0, value + randomness.gauss(0, 1)) for value in day * 5]

    def error(predictor: Predictor) -> float:
        errors = []
        for number, value in enumerate(values):
            if number >= 48:
                errors.append(abs(predictor.predict() - value))
            predictor.add(value)
        return float(np.mean(errors))

    last, harmonic = error(make_predictor("constant")), error(HarmonicPredictor(24))
    assert harmonic < last / 2
    assert error(make_predictor("ar")) < last / 2


def test_harmonics_of_a_period_of_many_intervals_have_two_of_them_to_learn_from() -> None:
    period = 3 * MOST_VALUES
    predictor = fed(
        HarmonicPredictor(period), [20.0 + 10.0 * math.sin(2 * math.pi * n / period) for n in range(period)]
    )
    assert predictor.predict(period // 4) == pytest.approx(30.0, rel=1e-3)


def test_an_unknown_predictor_and_a_missing_package_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must be one of constant, ar"):
        make_predictor("lstm")

    def missing(module: str) -> None:
        raise ImportError(module)

    monkeypatch.setattr(predictors.importlib, "import_module", missing)
    for name, package in (("arima", "pmdarima"), ("prophet", "prophet")):
        with pytest.raises(ConfigError, match=f"pip install {package}"):
            make_predictor(name)
    with pytest.raises(ConfigError, match="at least 2"):
        HarmonicPredictor(period=1)
