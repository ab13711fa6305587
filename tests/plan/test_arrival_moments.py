"""Moments at which requests arrive: what stands for a distribution has its mean."""

import numpy as np
import pytest

from forerun.plan.arrival_moments import NUM_MOMENTS, moments, poisson, soon_after


def test_each_circumstance_is_evenly_spread() -> None:
    found = moments()
    evenly = (np.arange(NUM_MOMENTS) + 0.5) / NUM_MOMENTS
    for one in (found.left, found.busy, found.others):
        assert np.sort(one) == pytest.approx(evenly)
    assert sorted(found.length.tolist()) == list(range(NUM_MOMENTS))


@pytest.mark.parametrize("mean", [0.0, 0.3, 2.0, 7.9, 30.0])
def test_counts_have_the_mean_that_is_given(mean: float) -> None:
    assert poisson(np.full((1, NUM_MOMENTS), mean)).mean() == pytest.approx(mean, rel=0.05, abs=0.05)


def test_another_request_comes_the_sooner_the_more_they_clump() -> None:
    times = np.array([[0.01, 0.25, 3.0]])
    evenly, by_chance, clumped = (soon_after(np.array([[cv2]]), times)[0] for cv2 in (0.1, 1.0, 4.0))
    assert by_chance.tolist() == [0.01, 0.25, 1.0]
    assert evenly[0] < by_chance[0] < clumped[0]
