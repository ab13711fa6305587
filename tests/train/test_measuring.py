"""Drafts are compared with plain decoding by tokens a second, as texts need not be of one length everywhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forerun.config.settings import EngineSettings
from forerun.core.stats import StepTimes
from forerun.train.measuring import NUM_TIMED, Measurement, measure_times


class Writer:
    """Stands for an LLM that answers each prompt with so many tokens in so many seconds."""

    def __init__(self, clock, *, num_tokens, seconds, launch):
        self._clock, self._num_tokens, self._seconds = clock, num_tokens, seconds
        speculation = SimpleNamespace(num_draft_tokens=8)
        self.stats = SimpleNamespace(speculation=speculation, times=StepTimes(draft=0.004, launch=launch))

    def generate(self, prompts, params, use_tqdm):
        self._clock.now += self._seconds
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * self._num_tokens)])]


@pytest.fixture
def times(tmp_path, monkeypatch):
    """What is measured where drafts write 40 tokens in a second, and plain decoding 100 in five."""

    def measured(*, launch=0.0):
        clock = SimpleNamespace(now=0.0)
        writers = iter(
            Writer(clock, num_tokens=num_tokens, seconds=seconds, launch=launch)
            for num_tokens, seconds in ((40, 1.0), (100, 5.0))
        )
        monkeypatch.setattr("forerun.train.measuring.LLM", SimpleNamespace(from_target=lambda *_: next(writers)))
        monkeypatch.setattr("forerun.train.measuring.time", SimpleNamespace(perf_counter=lambda: clock.now))
        of_head = Measurement(num_tokens=1, at=[])
        prompts, settings = [[5, 6, 7]] * NUM_TIMED, EngineSettings(model="tiny")
        return measure_times(None, tmp_path, prompts, of_head, settings=settings)

    return measured


def test_texts_of_other_lengths_are_compared_by_their_tokens(times):
    assert times().speed_up == pytest.approx(2.0)


@pytest.mark.parametrize(("launch", "draft_ms"), [(0.0, 0.5), (0.001, None)])
def test_the_hosts_share_of_what_a_gpu_drafts_is_not_taken_for_the_whole(times, launch, draft_ms):
    assert times(launch=launch).draft_ms == draft_ms
