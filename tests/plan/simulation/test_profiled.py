"""An engine that is made of a profile takes the profile's times, and drafts as its traces and rates say."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from forerun.engine.adaptive import AdaptiveLength
from forerun.engine.speculation import FixedLength
from forerun.errors import ConfigError
from forerun.executor.simulated_text import ConditionalAcceptance
from forerun.plan.load import Load
from forerun.plan.simulation.fleet import Fleet
from forerun.plan.simulation.profiled import ServingCost, control_of, profiled_engine, recorded_requests
from forerun.plan.simulation.requests import SimulatedRequest, synthetic_requests
from tests.plan.simulation.profiles import STEP_TIMES, K, a_profile


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    return a_profile(tmp_path_factory.mktemp("profile"))


LOAD = synthetic_requests(Load(rate=10, isl=30, osl=60), 40)


def test_without_drafts_a_request_takes_the_profiles_seconds(profile):
    engine = profiled_engine(profile)
    (record,) = engine.simulate([SimulatedRequest(arrival=0, num_prompt_tokens=30, num_output_tokens=3)]).requests
    assert record.ttft == pytest.approx(STEP_TIMES.ttft_seconds(30))
    steps = [STEP_TIMES.seconds(num_rows=1, num_sequences=1, num_context_tokens=n) for n in (30, 31)]
    assert record.e2el == pytest.approx(record.ttft + sum(steps))


def test_the_limits_are_the_profiles_unless_others_are_given(profile):
    settings = profiled_engine(profile).settings
    assert (settings.max_num_seqs, settings.max_num_batched_tokens, settings.num_blocks) == (8, 128, 200)
    settings = profiled_engine(profile, max_num_seqs=2, max_num_batched_tokens=64).settings
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (2, 64)


def test_with_half_the_memory_bandwidth_decoding_takes_twice_as_long_and_a_prompt_hardly_longer(profile):
    slow, usual = profiled_engine(profile, gigabytes_per_second=20.0), profiled_engine(profile)
    decoding = [SimulatedRequest(arrival=0, num_prompt_tokens=30, num_output_tokens=30)]
    assert 1.9 < slow.simulate(decoding).seconds / usual.simulate(decoding).seconds < 2
    prompt = [SimulatedRequest(arrival=0, num_prompt_tokens=400, num_output_tokens=1)]
    assert 1 < slow.simulate(prompt).seconds / usual.simulate(prompt).seconds < 1.5


def test_a_server_takes_its_time_for_each_request_each_step_that_writes_and_each_chunk(profile):
    serving = ServingCost(seconds_per_request=0.5, seconds_per_step=0.15, seconds_per_chunk=0.1)
    request = [SimulatedRequest(arrival=0, num_prompt_tokens=300, num_output_tokens=30)]  # read in three steps
    alone, served = (
        profiled_engine(profile, serving=one).simulate(request).requests[0] for one in (ServingCost(), serving)
    )
    assert served.ttft - alone.ttft == pytest.approx(0.5 + 0.25)
    assert served.e2el - alone.e2el == pytest.approx(0.5 + 30 * 0.25)


def test_a_request_that_comes_while_nothing_is_computed_takes_a_server_less(profile):
    serving = ServingCost(seconds_per_request=0.5, seconds_per_idle_request=0.125)
    first = SimulatedRequest(arrival=0, num_prompt_tokens=30, num_output_tokens=100)
    second = replace(first, arrival=0.001)  # while the first one's prompt is read
    alone, served = (
        profiled_engine(profile, serving=one).simulate([first, second]).requests for one in (ServingCost(), serving)
    )
    assert served[0].ttft - alone[0].ttft == pytest.approx(0.125)
    assert served[1].ttft - alone[1].ttft == pytest.approx(0.125 + 0.5)


@pytest.mark.parametrize(
    "name", ["seconds_per_request", "seconds_per_step", "seconds_per_chunk", "seconds_per_idle_request"]
)
@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_server_takes_no_time_that_is_not_a_number(name, seconds):
    with pytest.raises(ConfigError, match=f"{name}: got"):
        ServingCost(**{name: seconds})


def test_a_request_that_repeats_a_recorded_text_takes_just_the_steps_that_its_drafts_leave(profile):
    engine = profiled_engine(profile, "suffix")
    trace = engine.trace
    result = engine.simulate(recorded_requests(trace, np.arange(6.0)))
    for record in result.requests:
        text = record.num_prompt_tokens - 20  # each text has a prompt of its own length
        end, place, num_steps = trace.num_answer_tokens(text), 1, 1
        while place < end:
            depth = min(K, end - place - 1)
            place += 1 + len(trace.draft(text, place).within(limit=K, depth=depth).right_nodes if depth else ())
            num_steps += 1
        assert record.num_chunks == num_steps


def test_traced_drafts_of_other_requests_stand_as_often_as_in_the_texts(profile):
    engine = profiled_engine(profile, "suffix")
    result = engine.simulate(synthetic_requests(Load(rate=10, isl=30, osl=400), 40))
    expected = engine.trace.acceptance().expected(K)
    assert result.speculation.acceptance_length == pytest.approx(expected, rel=0.1)
    code = profiled_engine(profile, "suffix", kind="code").simulate(LOAD).speculation.acceptance_length
    chat = profiled_engine(profile, "suffix", kind="chat").simulate(LOAD).speculation.acceptance_length
    assert chat < result.speculation.acceptance_length < code


def test_each_request_meets_the_drafts_of_its_own_class(profile):
    engine = profiled_engine(profile, "suffix")
    mixed = engine.simulate([replace(one, kind=("code", "chat")[number % 2]) for number, one in enumerate(LOAD)])
    code, chat = (
        [one.num_chunks / one.num_output_tokens for one in mixed.requests if one.number % 2 == number]
        for number in (0, 1)
    )
    assert fmean(code) < 0.8 * fmean(chat)
    with pytest.raises(ConfigError, match="has no text of class 'poems'"):
        engine.simulate([replace(LOAD[0], kind="poems")])


def test_a_request_meets_at_each_place_the_drafts_of_that_place(profile):
    engine = profiled_engine(profile, "suffix")
    trace = engine.trace
    lengths = sorted(trace.num_answer_tokens(text) for text in range(trace.num_texts))
    request = [SimulatedRequest(arrival=0, num_prompt_tokens=30, num_output_tokens=lengths[0])]
    alike = {
        engine.simulate([replace(request[0], text=text)]).requests[0].num_chunks for text in range(trace.num_texts)
    }
    assert engine.simulate(request).requests[0].num_chunks in alike


def test_an_adaptive_configuration_leaves_out_what_the_trace_says_will_not_stand(profile):
    fixed, auto = (
        profiled_engine(profile, name, kind="chat").simulate(LOAD).speculation for name in ("suffix", "auto")
    )
    assert auto.num_draft_tokens < 0.7 * fixed.num_draft_tokens
    assert auto.acceptance_rate > fixed.acceptance_rate


def test_without_a_trace_drafts_stand_and_are_made_at_the_profiles_rates(profile):
    result = profiled_engine(profile, "rates").simulate(synthetic_requests(Load(rate=10, isl=30, osl=400), 40))
    assert result.speculation.acceptance_length == pytest.approx(profile.acceptance["rates"].expected(3), rel=0.05)
    per_step = result.speculation.num_draft_tokens / result.speculation.num_steps
    assert per_step == pytest.approx(profile.acceptance["rates"].mean_draft_tokens(3), rel=0.1)


def test_energy_is_power_over_busy_and_idle_time(profile):
    result = profiled_engine(profile).simulate(LOAD, fleet=Fleet(replicas=2))
    busy = sum(one.busy_seconds for one in result.replicas)
    assert result.energy_joules == pytest.approx(50 * busy + 10 * (2 * result.seconds - busy))


def test_without_a_counter_there_is_no_energy(tmp_path):
    assert profiled_engine(a_profile(tmp_path, watts=None)).simulate(LOAD[:2]).energy_joules is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, FixedLength(num_speculative_tokens=0)),
        ({"method": "ngram", "num_speculative_tokens": 3}, FixedLength(num_speculative_tokens=3)),
        ({"method": "ngram", "num_speculative_tokens": 9}, FixedLength(num_speculative_tokens=5)),
        ({"method": "suffix"}, FixedLength(num_speculative_tokens=5)),
        (
            {"method": "ngram", "num_speculative_tokens_per_batch_size": [[4, 9, 1], [1, 3, 5]]},
            FixedLength(num_speculative_tokens=5, schedule=((1, 3, 5), (4, 9, 1))),
        ),
    ],
)
def test_a_control_is_what_the_configuration_asks_for(config, expected):
    assert control_of(config, 5) == expected


@pytest.mark.parametrize("config", [{"method": "auto"}, {"method": "eagle", "enable_adaptive_verification": True}])
def test_an_adaptive_control_belongs_to_one_engine(config):
    assert isinstance(control_of(config, 5), AdaptiveLength)
    assert control_of(config, 5) is not control_of(config, 5)


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_is_never_shorter_than_what_of_it_is_right(seed):
    from forerun.core.sampling_params import SamplingParams
    from forerun.core.step import SequenceSpec

    drafting = ConditionalAcceptance((0.7, 0.6, 0.6), (0.8, 0.75, 0.3))
    spec = SequenceSpec(seq_id=0, prompt_ids=[1], sampling=SamplingParams(), seed=seed, max_length=99)
    for position in range(50):
        shape, right = drafting.draft(spec, position, limit=3, depth=3, min_survival=0.0)
        assert right == tuple(range(len(right)))
        assert len(right) <= shape.num_nodes <= 3


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda profile: profiled_engine(profile, "suffxi"), "config: got 'suffxi'; did you mean 'suffix'"),
        (lambda profile: profiled_engine(profile, "suffix", kind="cod"), "no text of class 'cod'; did you mean 'code'"),
        (lambda profile: profiled_engine(profile, "rates", kind="chat"), "no acceptance of 'rates/chat'"),
        (lambda _: ServingCost(seconds_per_chunk=-1.0), "seconds_per_chunk: got -1"),
        (lambda profile: profiled_engine(profile, gigabytes_per_second=0.0), "gigabytes_per_second: got 0"),
        (
            lambda profile: recorded_requests(profile.trace("suffix"), np.zeros(1), kind="cod"),
            "got class 'cod'; did you mean 'code'",
        ),
    ],
)
def test_what_the_profile_does_not_have_is_said(profile, make, problem):
    with pytest.raises(ConfigError, match=problem):
        make(profile)


def test_a_profile_that_was_not_probed_cannot_be_scaled(tmp_path):
    with pytest.raises(ConfigError, match="the profile has None"):
        profiled_engine(a_profile(tmp_path, gigabytes_per_second=None), gigabytes_per_second=40.0)
