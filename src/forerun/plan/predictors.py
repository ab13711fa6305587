"""What comes next in a series of loads: requests per second, prompt and answer lengths, interval by interval.

Each predictor is given one number per interval and predicts the next ones. Predictions are of quantities that
cannot be negative, so none is.
"""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from forerun.errors import ConfigError

Floats = npt.NDArray[np.float64]

MOST_VALUES = 4096  # that a predictor keeps: two weeks in intervals of five minutes; of a longer period two
FEWEST_VALUES = 5  # before which a model's prediction is the last value
MOST_LAGS = 8
MOST_HARMONICS = 6
INTERVALS_PER_DAY = 480  # of 180 s, as Dynamo's planner has them
PROPHET_WINDOW = 50  # as Dynamo's planner has it


class Predictor(Protocol):
    """A series, and what it will be."""

    def add(self, value: float) -> None:
        """Note the value of an interval.

        Raises:
            ConfigError: it is negative or not finite.
        """
        ...

    def predict(self, steps: int = 1) -> float:
        """The value of the interval `steps` after the last one; 0 before the first value."""
        ...


class _Series:
    """The newest values, checked: up to `most`."""

    def __init__(self, most: int = MOST_VALUES) -> None:
        self._values: deque[float] = deque(maxlen=most)
        self._num_seen = 0

    def add(self, value: float) -> None:
        """See `Predictor`."""
        if not 0.0 <= value < math.inf:
            raise ConfigError(f"load series: got {value!r}; must be a finite number, at least 0")
        self._values.append(value)
        self._num_seen += 1

    @property
    def _last(self) -> float:
        return self._values[-1] if self._values else 0.0

    @property
    def _array(self) -> Floats:
        return np.array(self._values, dtype=np.float64)


class ConstantPredictor(_Series):
    """The next value is the last one."""

    def predict(self, steps: int = 1) -> float:  # noqa: ARG002 - the signature is that of all predictors
        """See `Predictor`."""
        return self._last


class KalmanPredictor(_Series):
    """A level and a trend, followed by a Kalman filter; the deviations are those of Dynamo's planner.

    Only the ratios of the variances matter, so the unit of the series does not.
    """

    LEVEL_VARIANCE, TREND_VARIANCE, NOISE_VARIANCE, FIRST_VARIANCE = 1.0, 0.1, 10.0, 1000.0

    def __init__(self) -> None:
        super().__init__()
        self._state: Floats = np.zeros(2)  # level, trend per interval
        self._covariance: Floats = np.eye(2) * self.FIRST_VARIANCE

    def add(self, value: float) -> None:
        """See `Predictor`."""
        super().add(value)
        if self._num_seen == 1:
            self._state = np.array([value, 0.0])
            return
        move = np.array([[1.0, 1.0], [0.0, 1.0]])
        state = move @ self._state
        covariance = move @ self._covariance @ move.T + np.diag([self.LEVEL_VARIANCE, self.TREND_VARIANCE])
        gain = covariance[:, 0] / (covariance[0, 0] + self.NOISE_VARIANCE)
        self._state = state + gain * (value - state[0])
        self._covariance = covariance - np.outer(gain, covariance[0])

    def predict(self, steps: int = 1) -> float:
        """See `Predictor`."""
        return max(0.0, float(self._state[0] + steps * self._state[1]))


class AutoregressivePredictor(_Series):
    """The next value is a linear function of the last few; AICc says of how many (Hurvich and Tsai 1989)."""

    def predict(self, steps: int = 1) -> float:
        """See `Predictor`."""
        values = self._array
        if len(values) < FEWEST_VALUES or np.ptp(values) == 0.0:
            return self._last
        weights = _best_autoregression(values)
        recent = list(values[-MOST_LAGS:])
        for _ in range(steps):
            num_lags = len(weights) - 1
            lags = recent[len(recent) - num_lags :][::-1]
            recent.append(float(weights[0] + np.dot(weights[1:], lags)))
        # a fit to few values may run away: nothing is predicted beyond twice what was ever seen
        return float(np.clip(recent[-1], 0.0, 2.0 * values.max()))


class HarmonicPredictor(_Series):
    """The same hour of earlier days: sines and cosines of a period by least squares, and what remains of the last error.

    AICc says how many harmonics. Before a whole period has been seen the prediction is the last value.

    Args:
        period: intervals of a day, or of whatever repeats; need not be whole.
    """

    def __init__(self, period: float = INTERVALS_PER_DAY) -> None:
        if not 2 <= period < math.inf:
            raise ConfigError(f"harmonic predictor: got a period of {period:g} intervals; must be at least 2")
        super().__init__(max(MOST_VALUES, math.ceil(2 * period)))
        self._period = period

    def predict(self, steps: int = 1) -> float:
        """See `Predictor`."""
        values = self._array
        if len(values) < max(self._period, FEWEST_VALUES):
            return self._last
        num_harmonics = min(MOST_HARMONICS, math.floor((self._period - 1) / 2))
        times = np.arange(len(values), dtype=np.float64)
        fits = [_least_squares(self._waves(times, count), values) for count in range(num_harmonics + 1)]
        best = min(fits, key=lambda fit: fit.aicc)
        count = (len(best.weights) - 1) // 2
        left = values - self._waves(times, count) @ best.weights
        energy = float(left[:-1] @ left[:-1])
        persistence = float(left[1:] @ left[:-1]) / energy if energy > 0.0 else 0.0
        seasonal = float(self._waves(np.array([len(values) - 1.0 + steps]), count)[0] @ best.weights)
        return max(0.0, seasonal + max(0.0, persistence) ** steps * float(left[-1]))

    def _waves(self, times: Floats, count: int) -> Floats:
        angles = 2.0 * math.pi * times[:, None] * np.arange(1, count + 1) / self._period
        return np.concatenate([np.ones((len(times), 1)), np.cos(angles), np.sin(angles)], axis=1)


class ArimaPredictor(_Series):
    """pmdarima's automatic ARIMA; Dynamo's planner has the same."""

    def __init__(self) -> None:
        super().__init__()
        self._library = _import("pmdarima", name="arima")

    def predict(self, steps: int = 1) -> float:
        """See `Predictor`."""
        values = self._array
        if len(values) < FEWEST_VALUES or np.ptp(values) == 0.0:
            return self._last
        model = self._library.auto_arima(values, suppress_warnings=True, error_action="ignore")
        return max(0.0, float(np.asarray(model.predict(n_periods=steps))[-1]))


class ProphetPredictor(_Series):
    """Prophet over the last 50 intervals, as Dynamo's planner has it."""

    def __init__(self) -> None:
        super().__init__()
        self._library = _import("prophet", name="prophet")
        self._pandas = _import("pandas", name="prophet")

    def predict(self, steps: int = 1) -> float:
        """See `Predictor`."""
        values = self._array[-PROPHET_WINDOW:]
        if len(values) < FEWEST_VALUES or np.ptp(values) == 0.0:
            return self._last
        minutes = self._pandas.date_range("2000-01-01", periods=len(values), freq="min")
        model = self._library.Prophet()
        model.fit(self._pandas.DataFrame({"ds": minutes, "y": values}))
        future = model.make_future_dataframe(periods=steps, freq="min", include_history=False)
        return max(0.0, float(model.predict(future)["yhat"].iloc[-1]))


PREDICTORS: dict[str, Callable[[], Predictor]] = {
    "constant": ConstantPredictor,
    "ar": AutoregressivePredictor,
    "kalman": KalmanPredictor,
    "harmonic": HarmonicPredictor,
    "arima": ArimaPredictor,
    "prophet": ProphetPredictor,
}
"""Makes a predictor, by its name."""


class _Fit(NamedTuple):
    weights: Floats
    aicc: float


def _least_squares(features: Floats, values: Floats) -> _Fit:
    weights: Floats = np.linalg.lstsq(features, values, rcond=None)[0].astype(np.float64)
    count, num_weights = features.shape
    if count - num_weights - 2 <= 0:
        return _Fit(weights, math.inf)
    # a perfect fit is not infinitely better than one that is right to fifteen digits
    squares = max(float(np.sum((values - features @ weights) ** 2)), 1e-30 * float(values @ values), 1e-300)
    parameters = num_weights + 1  # the deviation is one too
    correction = 2.0 * parameters * (parameters + 1) / (count - parameters - 1)
    return _Fit(weights, count * math.log(squares / count) + 2.0 * parameters + correction)


def _best_autoregression(values: Floats) -> Floats:
    """Weights of the constant and of the last values, newest first; all orders are compared on the same values."""
    most = min(MOST_LAGS, (len(values) - 3) // 2)
    lags = [values[most - lag : len(values) - lag] for lag in range(most + 1)]
    ones = np.ones_like(lags[0])
    fits = [_least_squares(np.stack([ones, *lags[1 : order + 1]], axis=1), lags[0]) for order in range(most + 1)]
    return min(fits, key=lambda fit: fit.aicc).weights


def _import(module: str, *, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"predictor {name}: needs the package {module}; pip install {module}") from None


def make_predictor(name: str, *, period: float = INTERVALS_PER_DAY) -> Predictor:
    """Make the predictor of a name.

    Args:
        name: one of `PREDICTORS`.
        period: intervals after which the series repeats itself; only `harmonic` uses it.

    Raises:
        ConfigError: there is none, its package is missing, or the period is out of range.
    """
    if name not in PREDICTORS:
        raise ConfigError(f"predictor: got {name!r}; must be one of {', '.join(PREDICTORS)}")
    make = PREDICTORS[name]
    return HarmonicPredictor(period) if make is HarmonicPredictor else make()
