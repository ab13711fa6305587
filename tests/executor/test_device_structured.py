"""With device_step=True grammars and bad words reach the device as masks of rows; the text is the ordinary engine's."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from forerun import SamplingParams
from tests.contract.drafters import CASES, SUFFIX, oracle
from tests.contract.test_contract import PROMPTS, TIGHT, assert_nothing_is_held
from tests.contract.test_structured import KINDS
from tests.engine.test_engine_machine import run_machine
from tests.engines import tiny_llm
from tests.executor.test_device import DeviceMachine
from tests.grammars import encode, text_target
from tests.native import needs_kernels

pytestmark = needs_kernels

EXTRAS = (
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.5},
    {"temperature": 1.0, "min_tokens": 2, "bad_words": ["e", "ab", "se"]},
)
COUNT = 12
SAMPLING = [
    SamplingParams(seed=i, max_tokens=20, structured_outputs=KINDS[i % len(KINDS)], **EXTRAS[i % len(EXTRAS)])
    for i in range(COUNT)
] + [SamplingParams(seed=i, max_tokens=20, temperature=1.0, bad_words=["e", "th", "x y"]) for i in range(3)]


def texts(llm, sampling=SAMPLING):
    outputs = llm.generate(PROMPTS[: len(sampling)], sampling, use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].finish_reason, one.error) for one in outputs]


@pytest.fixture(scope="module")
def plain_texts():
    return texts(tiny_llm(target=text_target(), enable_prefix_caching=False))


def test_the_texts_of_these_tests_are_complete_or_cut(plain_texts):
    assert Counter(reason for _, reason, _ in plain_texts[:COUNT]) > Counter(stop=COUNT // 2)


@pytest.mark.parametrize("case", ["suffix-tree", "oracle-tree"])
def test_texts_equal_plain_decoding_by_the_host(case, plain_texts):
    answers = {tuple(prompt): ids for prompt, (ids, _, _) in zip(PROMPTS, plain_texts, strict=False)}
    trees = {"method": oracle(answers, wrong_every=5), "num_speculative_tokens": 9}
    llm = tiny_llm(CASES.get(case, trees), target=text_target(), device_step=True, **TIGHT)
    assert texts(llm) == plain_texts
    assert llm.stats.speculation.by_drafter["grammar"].num_accepted_tokens > 10
    assert_nothing_is_held(llm)


def test_what_the_host_knows_of_a_text_is_drafted_there_and_ngrams_beside_it_on_the_device(plain_texts):
    """Grammars, predictions, both, and requests with neither."""
    llm = tiny_llm(CASES["ngram"], target=text_target(), device_step=True, verifies_all=True)
    sampling = [
        replace(one, prediction=ids) if i % 2 else one
        for i, (one, (ids, _, _)) in enumerate(zip(SAMPLING, plain_texts, strict=True))
    ]
    asked = []
    propose = llm.executor.drafting.propose
    llm.executor.drafting.propose = lambda requests, features: (
        asked.extend(request.sequence.seq_id for request in requests) or propose(requests, features)
    )
    assert texts(llm, sampling) == plain_texts
    by_drafter = llm.stats.speculation.by_drafter
    assert by_drafter["prediction"].num_accepted_tokens > 20
    assert by_drafter["grammar"].num_accepted_tokens > 10
    known = {i for i, one in enumerate(sampling) if one.structured_outputs or one.prediction}
    assert 0 < len(set(asked)) <= len(known) < len(sampling)
    assert_nothing_is_held(llm)


class TextMachine(DeviceMachine):
    """The random machine with grammars, bad words and stop strings among the requests."""

    num_structured = 0

    def __init__(self):
        super().__init__()
        self.target = {"target": text_target()}

    def sampling_of(self, option):
        kind, contrary = option["seed"], {"allowed_token_ids", "ignore_eos", "logit_bias"}  # to what a text must be
        if kind % 3 == 2:
            return replace(super().sampling_of(option), stop=["e", "a "])
        sampling = super().sampling_of({name: value for name, value in option.items() if name not in contrary})
        if kind % 3 == 1:
            return replace(sampling, bad_words=["e", "th"])
        type(self).num_structured += 1
        return replace(sampling, structured_outputs=KINDS[kind % len(KINDS)])


def test_whatever_happens_each_request_with_a_grammar_gives_what_it_gives_alone():
    TextMachine.num_structured = 0
    run_machine(TextMachine, examples=6, steps=10)
    assert TextMachine.num_structured > 5


def run(kinds, config, **others):
    """Requests beside each other, on the device."""
    llm = tiny_llm(config, target=text_target(), device_step=True)
    sampling = [SamplingParams(temperature=0, structured_outputs=kind, **others) for kind in kinds]
    return llm.generate(PROMPTS[: len(kinds)], sampling, use_tqdm=False)


def test_a_contradiction_ends_its_request_alone_with_an_error():
    bad, good = run([{"choice": ["ab"]}, {"choice": ["xy"]}], SUFFIX, allowed_token_ids=encode("xy"), max_tokens=2)
    assert "the rules forbid every token" in bad.error
    assert (good.error, good.outputs[0].text) == (None, "xy")


def test_a_grammar_that_takes_too_much_work_ends_its_request_alone_with_an_error():
    heavy = {"regex": "[x-z]{3}" + "(.?a?)" * 300 + "(.?b?)" * 300}
    bad, good = run([heavy, {"choice": ["abcdef"]}], CASES["random-tree"])
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error.startswith("structured_outputs: the grammar takes too much work here")
    assert re.fullmatch("[x-z]{3}", bad.outputs[0].text)
    assert (good.outputs[0].text, good.outputs[0].finish_reason) == ("abcdef", "stop")
