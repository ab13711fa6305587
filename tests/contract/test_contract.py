"""What holds whatever the drafter: the text is the target's, and no trace of a draft remains."""

from __future__ import annotations

import random

import pytest

from forerun import SamplingParams
from forerun.engine.engine import Engine
from tests.contract.drafters import CASES, oracle, usually
from tests.engines import VOCAB_SIZE, engine_of, tiny_llm

TIGHT = {"num_gpu_blocks_override": 36, "max_num_batched_tokens": 48, "max_num_seqs": 24}
"""So little memory that sequences are preempted, and so small a budget that prompts are chunked."""

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def mixed_prompts(count):
    """Prompts of 1 to 60 tokens; many share beginnings, many repeat themselves."""
    source = random.Random(7)
    beginnings = [[source.randrange(VOCAB_SIZE) for _ in range(n)] for n in (8, 17, 30)]
    prompts = []
    for i in range(count):
        own = [source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, 20))]
        prompts.append((beginnings[i % 3] if i % 4 else []) + own * source.randint(1, 1 + (i % 2)))
    return prompts


PROMPTS = mixed_prompts(120)
SAMPLED = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 40,
    "min_p": 0.01,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "max_tokens": 16,
}
SAMPLING = [SamplingParams(seed=i, **SAMPLED) if i % 2 else GREEDY for i in range(16)]
"""Greedy and seeded requests in turn."""
ASKED = PROMPTS[: len(SAMPLING)]


@pytest.fixture(scope="module")
def plain_outputs():
    """Each prompt decoded alone, with ample memory and no drafts."""
    llm = tiny_llm(enable_prefix_caching=False)
    requests = zip(ASKED, SAMPLING, strict=True)
    return [llm.generate([prompt], own, use_tqdm=False)[0].outputs[0].token_ids for prompt, own in requests]


def config_of(case, plain_outputs):
    """The speculative_config of a case, or of the oracle that knows the plain outputs."""
    if case == "oracle-tree":
        answers = {tuple(p): o for p, o in zip(ASKED, plain_outputs, strict=True)}
        return {"method": oracle(answers, wrong_every=5), "num_speculative_tokens": 9}
    return CASES[case]


every_case = pytest.mark.parametrize("case", [*CASES, "oracle-tree"])
usual_cases = pytest.mark.parametrize("case", usually([*CASES, "oracle-tree"]))


def assert_nothing_is_held(llm):
    """No sequence, no block and no drafter state is left behind."""
    parts = engine_of(llm)
    assert not [*parts.scheduler.waiting, *parts.scheduler.running]
    assert parts.pool.num_free == parts.pool.num_blocks
    parts.pool.check_integrity()


@every_case
def test_greedy_and_seeded_text_is_that_of_plain_decoding_alone(case, plain_outputs):
    llm = tiny_llm(config_of(case, plain_outputs), **TIGHT)
    outputs = llm.generate(ASKED, SAMPLING, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == plain_outputs
    scheduler = engine_of(llm).scheduler
    assert scheduler.num_preemptions > 0, "the memory was meant to be too small"
    assert scheduler.num_cached_tokens > 0, "prompts were meant to share cached blocks"
    assert_nothing_is_held(llm)
    fails = case in ("moody", "hybrid-self", "auto-moody")
    assert (engine_of(llm).drafting.num_failures > 0) == fails, "a failure costs speed only and would not be seen"
    assert_the_requests_statistics_sum_to_the_engines(outputs, llm.stats)


def assert_the_requests_statistics_sum_to_the_engines(outputs, stats):
    for name in ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(getattr(output.speculation, name) for output in outputs) == getattr(stats.speculation, name), name
    assert stats.num_generation_tokens == sum(len(output.outputs[0].token_ids) for output in outputs)


@usual_cases
def test_results_applied_a_step_late_change_no_text(case, plain_outputs):
    """As where a device must not wait for its host: each step is planned before the last one's result is known."""
    llm = tiny_llm(config_of(case, plain_outputs), **TIGHT)
    engine, finished, count = Engine(llm.engine.parts, delay=1), {}, 8
    for i, (prompt, sampling) in enumerate(zip(ASKED[:count], SAMPLING[:count], strict=True)):
        engine.add_request(str(i), prompt, sampling)
    while engine.has_work:
        finished |= {output.request_id: output for output in engine.step().finished}
    assert [finished[str(i)].outputs[0].token_ids for i in range(count)] == plain_outputs[:count]
    assert_nothing_is_held(llm)


@usual_cases
def test_aborting_at_any_moment_frees_everything_and_disturbs_nobody(case, plain_outputs):
    llm = tiny_llm(config_of(case, plain_outputs), **TIGHT)
    source = random.Random(3)
    engine = llm._engine
    for i, (prompt, sampling) in enumerate(zip(ASKED, SAMPLING, strict=True)):
        engine.add_request(str(i), prompt, sampling)
    finished = {}
    while engine.has_work:
        for output in engine.step().finished:
            finished[output.request_id] = output
        victim = str(source.randrange(len(ASKED)))
        if source.random() < 0.4 and (output := engine.abort(victim)) is not None:
            finished[victim] = output
    assert len(finished) == len(ASKED)
    reasons = {output.outputs[0].finish_reason for output in finished.values()}
    assert {"abort", "length"} <= reasons <= {"abort", "length", "stop"}
    for i, plain in enumerate(plain_outputs):
        got = finished[str(i)].outputs[0].token_ids
        assert got == plain[: len(got)]
    assert_nothing_is_held(llm)


@every_case
def test_drafts_stay_within_what_a_request_allows(case, plain_outputs):
    llm = tiny_llm(config_of(case, plain_outputs))
    prompts = [PROMPTS[3], PROMPTS[7], PROMPTS[11]]
    sampling = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculation=speculation)
        for speculation in ("off", {"num_speculative_tokens": 2}, None)
    ]
    off, capped, free = llm.generate(prompts, sampling, use_tqdm=False)
    assert off.speculation.num_draft_tokens == 0
    assert off.speculation.num_steps == 20
    assert len(capped.speculation.reached_per_position) <= 2
    assert free.speculation.num_draft_tokens <= free.speculation.num_steps * llm.speculative.num_speculative_tokens


def test_tokens_after_the_end_inside_an_accepted_run_are_cut(plain_outputs):
    answers = {tuple(p): o for p, o in zip(ASKED, plain_outputs, strict=True)}
    llm = tiny_llm({"method": oracle(answers, wrong_every=99), "num_speculative_tokens": 12})
    for prompt, plain in zip(ASKED[::2], plain_outputs[::2], strict=True):  # the greedy ones
        end = plain.index(plain[9])
        by_token = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[plain[9]])
        output = llm.generate([prompt], by_token, use_tqdm=False)[0].outputs[0]
        assert (output.token_ids, output.finish_reason, output.stop_reason) == (plain[: end + 1], "stop", plain[9])
        by_length = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
        output = llm.generate([prompt], by_length, use_tqdm=False)[0].outputs[0]
        assert (output.token_ids, output.finish_reason) == (plain[:7], "length")
    assert llm.stats.speculation.num_accepted_tokens > 0
    assert_nothing_is_held(llm)


def test_an_oracle_gains_what_it_drafts_right(plain_outputs):
    answers = {tuple(p): o for p, o in zip(ASKED, plain_outputs, strict=True)}
    llm = tiny_llm({"method": oracle(answers, wrong_every=99), "num_speculative_tokens": 8})
    output = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)[0]
    assert output.speculation.acceptance_length >= 4  # 4 of 8 nodes are right, plus the bonus token
