"""The contract without a model: policy alone decides no text, leaves nothing behind, and needs no torch."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest

from forerun import SamplingParams
from forerun.engine.engine import Engine
from forerun.engine.regret import ChoiceAccount
from forerun.engine.speculation import FixedLength
from forerun.engine.stats import Gauge
from forerun.errors import RequestError
from tests.contract.test_contract import PROMPTS
from tests.executor.simulations import assert_nothing_is_held, drain, run, simulated_engine

TIGHT = {"num_blocks": 40, "max_num_batched_tokens": 48, "max_num_seqs": 24}
"""So little memory that sequences are preempted, and so small a budget that prompts are chunked."""

SAMPLING = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
RATES = {"plain": None, "good": [0.9, 0.8, 0.8, 0.7], "useless": [0.0, 0.0, 0.0], "perfect": [1.0] * 6}
DELAYS = pytest.mark.parametrize("delay", [0, 1])


def texts(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain_texts():
    return texts(run(simulated_engine(enable_prefix_caching=False), PROMPTS, SAMPLING))


@DELAYS
@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
def test_no_draft_no_delay_and_no_shortage_changes_a_text(rates, delay, plain_texts):
    engine = simulated_engine(rates=rates, delay=delay, **TIGHT)
    assert texts(run(engine, PROMPTS, SAMPLING)) == plain_texts
    assert engine.parts.scheduler.num_preemptions > 0, "the memory was meant to be too small"
    assert engine.parts.scheduler.num_cached_tokens > 0, "prompts were meant to share cached blocks"
    assert_nothing_is_held(engine)


@DELAYS
def test_aborting_at_any_moment_frees_everything_and_disturbs_nobody(delay, plain_texts):
    engine, source = simulated_engine(rates=RATES["good"], delay=delay, **TIGHT), random.Random(3)
    for i, prompt in enumerate(PROMPTS[:40]):
        engine.add_request(str(i), prompt, SAMPLING)
    finished = {}
    while engine.has_work:
        finished |= {output.request_id: output for output in engine.step().finished}
        victim = str(source.randrange(40))
        if source.random() < 0.4 and (output := engine.abort(victim)) is not None:
            finished[victim] = output
    assert {output.outputs[0].finish_reason for output in finished.values()} == {"abort", "length"}
    for i in range(40):
        got = finished[str(i)].outputs[0].token_ids
        assert got == plain_texts[i][0][: len(got)]
    assert_nothing_is_held(engine)


@DELAYS
def test_drafts_stay_within_what_a_request_allows(delay):
    engine = simulated_engine(rates=[1.0] * 6, delay=delay)
    each = [
        SamplingParams(max_tokens=20, seed=1, ignore_eos=True, speculation=speculation)
        for speculation in ("off", {"num_speculative_tokens": 2}, None)
    ]
    off, capped, free = run(engine, PROMPTS[:3], each)
    assert (off.speculation.num_draft_tokens, off.speculation.num_steps) == (0, 20)
    assert len(capped.speculation.reached_per_position) == 2
    assert len(free.speculation.reached_per_position) == 6


@DELAYS
def test_the_sum_of_the_requests_statistics_is_the_engines(delay):
    engine = simulated_engine(rates=RATES["good"], delay=delay)
    outputs = run(engine, PROMPTS[:10], SAMPLING)
    for name in ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(getattr(o.speculation, name) for o in outputs) == getattr(engine.stats.speculation, name)
    assert engine.stats.num_generation_tokens == sum(len(o.outputs[0].token_ids) for o in outputs)
    assert engine.stats.num_prompt_tokens + engine.parts.scheduler.num_cached_tokens == sum(map(len, PROMPTS[:10]))


@DELAYS
def test_tokens_after_the_end_inside_an_accepted_run_are_cut(delay, plain_texts):
    engine = simulated_engine(rates=[1.0] * 12, delay=delay)
    for prompt, (plain,) in zip(PROMPTS[:12], plain_texts[:12], strict=True):
        end = plain.index(plain[9])
        sampling = SamplingParams(seed=7, max_tokens=24, ignore_eos=True, stop_token_ids=[plain[9]])
        output = run(engine, [prompt], sampling)[0].outputs[0]
        assert (output.token_ids, output.finish_reason, output.stop_reason) == (plain[: end + 1], "stop", plain[9])
        output = run(engine, [prompt], SamplingParams(seed=7, max_tokens=7, ignore_eos=True))[0].outputs[0]
        assert (output.token_ids, output.finish_reason) == (plain[:7], "length")
    assert_nothing_is_held(engine)


@DELAYS
def test_prompt_tokens_count_once_however_often_they_are_computed(delay):
    engine = simulated_engine(delay=delay, enable_prefix_caching=False, **TIGHT)
    run(engine, PROMPTS, SAMPLING)
    assert engine.parts.scheduler.num_preemptions > 0
    assert engine.stats.num_prompt_tokens == sum(map(len, PROMPTS))


def test_what_a_control_has_chosen_is_in_the_engines_state_and_metrics_until_the_statistics_are_reset():
    class Choosing(FixedLength):
        account = ChoiceAccount()

        def choices(self):
            self.account.note_step(3, 0.1, plain=0.05)
            self.account.note_choice([[0.5]], [1], cost_with=lambda num_drafted: 1.0 + num_drafted, drafting=0.0)
            return self.account.copy()

    engine = simulated_engine()
    assert engine.state.report is None
    engine = Engine(replace(engine.parts, control=Choosing(num_speculative_tokens=4)), clock=engine._clock)
    values = {metric.name: metric.value for metric in engine.snapshot().metrics() if isinstance(metric, Gauge)}
    assert values["forerun:spec_decode_tokens_per_second"] == pytest.approx(30.0)
    Choosing.account.note_step(1000, 1.0, plain=0.05)
    engine.reset_stats()
    assert engine.state.report.tokens_per_second == pytest.approx(30.0)


def test_the_control_observes_what_each_step_drafted_and_what_stood():
    class Observing(FixedLength):
        def observe(self, record):
            records.append(record)

    records = []
    engine = simulated_engine(rates=RATES["good"])
    parts = replace(engine.parts, control=Observing(num_speculative_tokens=4))
    engine = Engine(parts, clock=engine._clock)
    outputs = run(engine, PROMPTS[:3], SAMPLING)
    drafted = sum(len(draft) for record in records for draft, _ in record.verified)
    accepted = sum(len(stood) for record in records for _, stood in record.verified)
    assert drafted == sum(output.speculation.num_draft_tokens for output in outputs) > 0
    assert accepted == sum(output.speculation.num_accepted_tokens for output in outputs) > 0
    assert sum(record.times.forward for record in records) == pytest.approx(engine.stats.times.forward)
    assert records[0].num_rows == sum(map(len, PROMPTS[:3]))
    assert records[0].num_context_tokens == 0


def test_acceptance_follows_its_profile():
    engine = simulated_engine(rates=[0.8, 0.5, 0.9], max_model_len=600, num_blocks=10000)
    run(engine, PROMPTS[:40], SamplingParams(max_tokens=500, ignore_eos=True))
    assert engine.stats.speculation.conditional_acceptance == pytest.approx([0.8, 0.5, 0.9], abs=0.03)


def test_time_is_what_the_cost_function_says():
    engine = simulated_engine(step_seconds=lambda plan: 0.25)
    (output,) = run(engine, [PROMPTS[0]], SAMPLING)
    assert output.metrics.first_token_time - output.metrics.first_scheduled_time == 0.25
    assert output.metrics.finished_time - output.metrics.arrival_time == 24 * 0.25
    assert engine.stats.times.forward == 24 * 0.25


def test_a_delay_costs_a_step_at_the_end_and_nothing_else():
    for delay, num_steps in ((0, 24), (1, 24)):
        engine = simulated_engine(delay=delay)
        run(engine, [PROMPTS[0]], SAMPLING)
        assert engine.stats.times.num_steps == num_steps, "the last token's length is known before it comes"


@pytest.mark.parametrize("sampling", [{"logprobs": 1}, {"prompt_logprobs": 0}, {"structured_outputs": {"regex": "a"}}])
def test_what_needs_logits_is_refused_by_its_name(sampling):
    engine = simulated_engine()
    with pytest.raises(RequestError, match=f"^{next(iter(sampling))}: a simulation has no logits"):
        engine.add_request("a", [1, 2], SamplingParams(**sampling))
    assert not engine.has_work
    assert not drain(engine)


def test_a_simulation_imports_no_torch():
    code = (
        "import sys\nfrom tests.executor.simulations import run, simulated_engine\n"
        "from forerun import SamplingParams\n"
        "run(simulated_engine(rates=[0.5]), [[1, 2, 3]], SamplingParams(max_tokens=4))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
