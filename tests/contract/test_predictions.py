"""A prediction costs or saves time: the text is plain decoding's, be it right, wrong, half right, empty or huge."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from forerun import SamplingParams
from forerun.core.stats import PredictionCounts, SpeculationStats
from forerun.engine.engine import Engine
from tests.contract.drafters import CASES, NGRAM, usually
from tests.contract.test_contract import GREEDY, PROMPTS, TIGHT, assert_nothing_is_held
from tests.engines import VOCAB_SIZE, engine_of, native_target, tiny_llm
from tests.grammars import SCHEMA, text_target
from tests.native import needs_kernels

COUNT = 16
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5, "max_tokens": 24, "ignore_eos": True}
KINDS = {"greedy": [GREEDY] * COUNT, "sampled": [SamplingParams(seed=i, **SAMPLED) for i in range(COUNT)]}
LONGEST = 128  # max_model_len of these engines


@functools.cache
def plainly(kind):
    """The tokens of each prompt decoded alone, with ample memory and no drafts."""
    llm = tiny_llm(enable_prefix_caching=False)
    return [
        llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids
        for prompt, sampling in zip(PROMPTS[:COUNT], KINDS[kind], strict=True)
    ]


PREDICTIONS = {
    "right": lambda text: text,
    "wrong": lambda text: [(token_id + 1) % VOCAB_SIZE for token_id in text],
    "half right": lambda text: text[:8] + [(token_id + 1) % VOCAB_SIZE for token_id in text[8:14]] + text[10:],
    "the beginning missing": lambda text: text[5:],
    "empty": lambda _: [],
    "one token": lambda _: [3],
    "huge": lambda text: (text[:4] * LONGEST)[:LONGEST],
}


def predicting(kind, name):
    """The sampling parameters of each prompt, with a prediction made of its plain text."""
    return [
        replace(sampling, prediction=PREDICTIONS[name](text))
        for sampling, text in zip(KINDS[kind], plainly(kind), strict=True)
    ]


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "greedy") for name in PREDICTIONS), *((name, "sampled") for name in ("right", "wrong", "half right"))],
)
def test_no_prediction_changes_the_text(name, kind):
    llm = tiny_llm(NGRAM, **TIGHT)
    outputs = llm.generate(PROMPTS[:COUNT], predicting(kind, name), use_tqdm=False)
    assert tokens_of(outputs) == plainly(kind)
    assert engine_of(llm).scheduler.num_preemptions > 0, "the memory was meant to be too small"
    assert_nothing_is_held(llm)
    assert not llm.executor._known._predictions._places


@pytest.mark.parametrize("case", usually(CASES))
def test_it_is_drafted_first_whatever_the_method(case):
    llm = tiny_llm(CASES[case], **TIGHT)
    outputs = llm.generate(PROMPTS[:COUNT], predicting("greedy", "half right"), use_tqdm=False)
    assert tokens_of(outputs) == plainly("greedy")
    counts = llm.stats.speculation.by_drafter.get("prediction")
    if llm.speculative.num_speculative_tokens:
        assert counts.num_accepted_tokens > 5 * COUNT
    else:
        assert counts is None
    assert_nothing_is_held(llm)


def test_it_is_drafted_too_where_other_drafts_have_not_paid_and_pause():
    llm = tiny_llm(CASES["auto"])
    llm.engine.parts.control._pause.num_left = 1000
    outputs = llm.generate(PROMPTS[:COUNT], predicting("greedy", "right"), use_tqdm=False)
    assert tokens_of(outputs) == plainly("greedy")
    assert llm.stats.speculation.by_drafter["prediction"].num_accepted_tokens > 5 * COUNT


def test_a_right_prediction_is_accepted_to_its_end():
    outputs = tiny_llm(NGRAM).generate(PROMPTS[:COUNT], predicting("greedy", "right"), use_tqdm=False)
    for output in outputs:
        counts, by_drafter = output.outputs[0].prediction, output.speculation.by_drafter
        assert counts.num_rejected_tokens == 0
        assert output.speculation.num_steps == 6  # a step without a draft, then four drafted tokens and one more
        assert counts.num_accepted_tokens == by_drafter["prediction"].num_accepted_tokens == 24 - 6


def test_accepted_and_rejected_tokens_are_what_was_drafted():
    for name in PREDICTIONS:
        for output in tiny_llm(NGRAM).generate(PROMPTS[:COUNT], predicting("greedy", name), use_tqdm=False):
            (one,) = output.outputs
            drafted = one.speculation.by_drafter.get("prediction", SpeculationStats())
            assert one.prediction.num_accepted_tokens == drafted.num_accepted_tokens
            assert one.prediction.num_rejected_tokens == drafted.num_draft_tokens - drafted.num_accepted_tokens


def test_tokens_that_a_stop_string_cuts_are_rejected_as_they_do_not_stand_in_the_text():
    llm = tiny_llm(NGRAM, target=native_target())
    free = llm.generate(["hello hello"], GREEDY, use_tqdm=False)[0].outputs[0]
    stop = free.text[6:8]
    sampling = replace(GREEDY, prediction=free.token_ids)
    whole = llm.generate(["hello hello"], sampling, use_tqdm=False)[0].outputs[0]
    cut = llm.generate(["hello hello"], replace(sampling, stop=stop), use_tqdm=False)[0].outputs[0]
    assert whole.prediction.num_rejected_tokens == 0
    assert cut.finish_reason == "stop"
    assert cut.prediction.num_accepted_tokens == cut.origins.count("accepted") < len(cut.token_ids)


def test_without_drafts_a_prediction_is_not_verified():
    off = [SamplingParams(temperature=0, max_tokens=8, prediction=[1, 2], speculation=off) for off in ("off", None)]
    for llm, sampling in ((tiny_llm(NGRAM), off[0]), (tiny_llm(), off[1])):
        one = llm.generate([PROMPTS[0]], sampling, use_tqdm=False)[0].outputs[0]
        assert one.speculation.num_draft_tokens == 0
        assert one.prediction == PredictionCounts(0, 0)


def test_requests_without_a_prediction_have_no_counts_of_one():
    assert tiny_llm(NGRAM).generate([PROMPTS[0]], GREEDY, use_tqdm=False)[0].outputs[0].prediction is None


def test_all_completions_of_a_prompt_follow_its_prediction():
    sampling = SamplingParams(n=3, seed=1, **SAMPLED)
    plain = tiny_llm().generate([PROMPTS[5]], sampling, use_tqdm=False)[0].outputs
    llm = tiny_llm(NGRAM)
    drafted = llm.generate([PROMPTS[5]], replace(sampling, prediction=plain[1].token_ids), use_tqdm=False)[0].outputs
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert drafted[1].prediction.num_rejected_tokens == 0
    assert drafted[0].prediction.num_rejected_tokens > 0


def test_results_applied_a_step_late_change_no_text():
    llm = tiny_llm(NGRAM, **TIGHT)
    engine, finished = Engine(llm.engine.parts, delay=1), {}
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, predicting("greedy", "half right"), strict=False)):
        engine.add_request(str(i), prompt, sampling)
    while engine.has_work:
        finished |= {output.request_id: output for output in engine.step().finished}
    assert tokens_of(finished[str(i)] for i in range(COUNT)) == plainly("greedy")
    assert engine.stats.speculation.by_drafter["prediction"].num_accepted_tokens > 0


@pytest.mark.parametrize("method", ["standard", "block"])
def test_greedy_text_is_the_same_under_other_verifiers(method):
    llm = tiny_llm(NGRAM | {"rejection_sample_method": method}, **TIGHT)
    outputs = llm.generate(PROMPTS[:COUNT], predicting("greedy", "half right"), use_tqdm=False)
    assert tokens_of(outputs) == plainly("greedy")


@needs_kernels
def test_in_bf16_on_the_native_kernels_text_and_logprobs_are_the_same_bits():
    sampling = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=16, logprobs=2)
        for i, temperature in enumerate([0.0, 0.8, 1.2, 0.8] * 4)
    ]
    plain = tiny_llm(target=native_target()).generate(PROMPTS[:COUNT], sampling, use_tqdm=False)
    predictions = [
        replace(one, prediction=PREDICTIONS["half right"](output.outputs[0].token_ids))
        for one, output in zip(sampling, plain, strict=True)
    ]
    drafted = tiny_llm(NGRAM, target=native_target()).generate(PROMPTS[:COUNT], predictions, use_tqdm=False)
    assert [(o.outputs[0].text, o.outputs[0].logprobs) for o in drafted] == [
        (o.outputs[0].text, o.outputs[0].logprobs) for o in plain
    ]
    assert sum(o.outputs[0].prediction.num_accepted_tokens for o in drafted) > 2 * COUNT


@needs_kernels
def test_under_a_grammar_forced_tokens_come_first_and_a_prediction_is_cut_where_it_is_forbidden():
    wanted = {"json": SCHEMA, "disable_any_whitespace": True}
    sampling = SamplingParams(temperature=0.9, seed=4, max_tokens=60, structured_outputs=wanted)
    plain = tiny_llm(target=text_target()).generate([PROMPTS[4]], sampling, use_tqdm=False)[0].outputs[0]
    config = NGRAM | {"num_speculative_tokens": 12}
    for prediction, most_rejected in ((plain.token_ids, 0), (plain.text + "not JSON", 0), ("not JSON at all", 12)):
        llm = tiny_llm(config, target=text_target())
        predicted = replace(sampling, prediction=prediction)
        one = llm.generate([PROMPTS[4]], predicted, use_tqdm=False)[0].outputs[0]
        assert (one.text, one.token_ids) == (plain.text, plain.token_ids)
        assert one.prediction.num_rejected_tokens <= most_rejected
        assert (one.prediction.num_accepted_tokens > 0) == (most_rejected == 0)
