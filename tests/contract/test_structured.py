"""Under a grammar the text is plain decoding's, whatever the drafter, and matches what it must."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from dataclasses import replace

import pytest

from forerun import SamplingParams
from forerun.engine.adaptive import AdaptiveLength
from forerun.engine.engine import Engine
from tests.contract.drafters import CASES, SUFFIX, oracle, usually
from tests.contract.test_contract import PROMPTS, TIGHT, assert_nothing_is_held
from tests.engines import engine_of, tiny_llm
from tests.grammars import SCHEMA, encode, text_target
from tests.native import needs_kernels

pytestmark = needs_kernels

CHOICES = ["north", "north-east", "no idea", "südlich"]
KINDS = (
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"regex": "[a-f]{3,9}-[0-9]{2}(-he(he)*)?"},
    {"choice": CHOICES},
    {"grammar": 'start: "<" (start | WORD) ">"\nWORD: /[a-z]{1,6}/'},
)
EXTRAS = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {67: 2.0}},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.02, "presence_penalty": 0.5, "logprobs": 2},
    {"temperature": 1.0, "min_tokens": 2, "top_k": 40, "n": 2},
)
COUNT = 20  # each kind with each of the extras
SAMPLING = [
    SamplingParams(seed=i, max_tokens=60, structured_outputs=KINDS[i % len(KINDS)], **EXTRAS[i % len(EXTRAS)])
    for i in range(COUNT)
]


def matches(text, kind):
    """Whether a complete text is what `structured_outputs` asks for, judged without the grammar."""
    if "json" in kind:
        value = json.loads(text)
        return (
            list(value) == ["kind", "size", "tags"]
            and value["kind"] in ("circle", "square")
            and 0 <= value["size"] <= 40
            and len(value["tags"]) <= 2
            and all(isinstance(tag, str) and len(tag) <= 3 for tag in value["tags"])
        )
    if "regex" in kind:
        return re.fullmatch(kind["regex"], text) is not None
    return text in CHOICES if "choice" in kind else re.fullmatch("(<+)[a-z]{1,6}(>+)", text) is not None


def reported(output):
    """All that a request got."""
    return [(one.text, one.token_ids, one.logprobs, one.finish_reason, one.stop_reason) for one in output.outputs]


@functools.cache
def plainly():
    """What each request gets when it is decoded alone, with ample memory and no drafts."""
    llm = tiny_llm(target=text_target(), enable_prefix_caching=False)
    return [reported(llm.generate([p], s, use_tqdm=False)[0]) for p, s in zip(PROMPTS[:COUNT], SAMPLING, strict=True)]


def test_complete_texts_match_and_others_are_cut_by_length():
    reasons = Counter()
    for sampling, completions in zip(SAMPLING, plainly(), strict=True):
        for text, token_ids, _, reason, _ in completions:
            reasons[reason] += 1
            assert (reason == "stop") == (len(token_ids) < 60) or token_ids[-1] == 2
            assert reason == "length" or matches(text, sampling.structured_outputs), text
    assert set(reasons) <= {"stop", "length"}
    assert reasons["stop"] > 0.8 * reasons.total()
    assert len({completions[0][0] for completions in plainly()}) > 24 / 36 * COUNT


@pytest.fixture(params=usually([*CASES, "oracle-tree"]))
def config(request):
    """The speculative_config of each drafter in turn."""
    if request.param == "oracle-tree":
        answers = {tuple(p): reported[0][1] for p, reported in zip(PROMPTS, plainly(), strict=False)}
        return {"method": oracle(answers, wrong_every=5), "num_speculative_tokens": 9}
    return CASES[request.param]


def test_any_drafter_gives_the_bits_of_plain_decoding(config):
    llm = tiny_llm(config, target=text_target(), **TIGHT)
    outputs = llm.generate(PROMPTS[:COUNT], SAMPLING, use_tqdm=False)
    assert [reported(output) for output in outputs] == plainly()
    assert engine_of(llm).scheduler.num_preemptions > 0, "the memory was meant to be too small"
    forced = llm.stats.speculation.by_drafter.get("grammar")
    if llm.speculative.num_speculative_tokens:
        assert forced.num_accepted_tokens > 60 / 36 * COUNT
    else:
        assert forced is None
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("method", ["standard", "block", "typical"])
@pytest.mark.parametrize("drafter", ["suffix-tree", "draft-model", "draft-model-tree", "eagle3"])
def test_every_verifier_keeps_to_the_grammar(drafter, method):
    config = CASES[drafter] | {"rejection_sample_method": method}
    if "model" in config:
        config["draft_sample_method"] = "probabilistic"
    llm = tiny_llm(config, target=text_target(), **TIGHT)
    for output, sampling in zip(llm.generate(PROMPTS[:COUNT], SAMPLING, use_tqdm=False), SAMPLING, strict=True):
        for text, _, _, reason, _ in reported(output):
            assert reason == "length" or (reason == "stop" and matches(text, sampling.structured_outputs)), output.error


NUM_SAMPLES = 700


def sampled(llm, first_seed):
    """How often each text of a small grammar comes."""
    few = {"structured_outputs": {"regex": "[a-c]([a-c]|[0-1]{2})?"}, "temperature": 2.0, "detokenize": False}
    sampling = [SamplingParams(seed=first_seed + i, **few) for i in range(NUM_SAMPLES)]
    outputs = llm.generate([PROMPTS[5]] * NUM_SAMPLES, sampling, use_tqdm=False)
    return Counter(tuple(output.outputs[0].token_ids) for output in outputs)


@functools.cache
def sampled_plainly():
    return sampled(tiny_llm(target=text_target()), 0)


@pytest.mark.parametrize(("drafter", "method"), [("draft-model", "block"), ("draft-model-tree", "standard")])
def test_samples_are_distributed_as_without_drafts(drafter, method):
    config = CASES[drafter] | {"rejection_sample_method": method, "draft_sample_method": "probabilistic"}
    llm = tiny_llm(config, target=text_target())
    plain, drafted = sampled_plainly(), sampled(llm, NUM_SAMPLES)
    assert llm.stats.speculation.num_accepted_tokens > NUM_SAMPLES
    likely = [text for text in plain | drafted if plain[text] + drafted[text] >= 10]
    assert len(likely) > 10
    statistic = sum((plain[text] - drafted[text]) ** 2 / (plain[text] + drafted[text]) for text in likely)
    assert statistic < len(likely) + 5 * math.sqrt(2 * len(likely))


def run(sampling, config=SUFFIX, count=1, **settings):
    """The outputs of requests with these settings, `count` prompts each."""
    llm = tiny_llm(config, target=text_target(), **settings)
    outputs = llm.generate(PROMPTS[:count], sampling, use_tqdm=False)
    assert_nothing_is_held(llm)
    return outputs


def test_forced_tokens_save_steps():
    sampling = SamplingParams(temperature=0, structured_outputs={"choice": ["abcdefghij"]})
    (output,) = run(sampling, SUFFIX | {"num_speculative_tokens": 5})
    assert output.outputs[0].text == "abcdefghij"
    counts = output.speculation.by_drafter["grammar"]
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (2, 8, 8)
    assert output.speculation.num_steps == 3


class Pauses(AdaptiveLength):
    """A control that takes every step for one in which drafting does not pay."""

    def draft_limit(self, batch_size):
        super().draft_limit(batch_size)
        return 0


def test_forced_tokens_are_drafted_while_drafting_pauses_and_no_drafter_is_asked():
    llm = tiny_llm(SUFFIX, target=text_target())
    engine = Engine(replace(llm.engine.parts, control=Pauses(8)))
    propose, asked = llm.executor.drafting.propose, []
    llm.executor.drafting.propose = lambda requests, features: asked.extend(requests) or propose(requests, features)
    free, kind = {"temperature": 0, "max_tokens": 12}, {"choice": ["abcdefghij"]}
    for name, more in (
        ("plain", {}),
        ("forced", {"structured_outputs": kind}),
        ("short", {"structured_outputs": kind, "max_tokens": 3}),
        ("none", {"structured_outputs": kind, "speculation": "off"}),
    ):
        engine.add_request(name, PROMPTS[0], SamplingParams(**free | more))
    found = {}
    while engine.has_work:
        found.update((output.request_id, output.outputs[0]) for output in engine.step().finished)
    assert not asked
    assert [found[name].text for name in ("forced", "short", "none")] == ["abcdefghij", "abc", "abcdefghij"]
    accepted = {name: one.speculation.num_accepted_tokens for name, one in found.items()}
    assert accepted["forced"] > 5
    assert (accepted["short"], accepted["none"], accepted["plain"]) == (1, 0, 0)
    assert_nothing_is_held(llm)


def test_stop_strings_and_lengths_end_a_text_before_it_is_complete():
    kind = {"structured_outputs": {"choice": ["abcdefghij"]}, "temperature": 0}
    by_stop, by_length = (
        run(SamplingParams(**kind | more))[0].outputs[0] for more in ({"stop": "ef"}, {"max_tokens": 3})
    )
    assert (by_stop.text, by_stop.finish_reason, by_stop.stop_reason) == ("abcd", "stop", "ef")
    assert (by_length.text, by_length.finish_reason) == ("abc", "length")


@pytest.mark.parametrize("config", [None, SUFFIX, CASES["random-tree"]], ids=["plain", "suffix", "random-tree"])
@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("", {"allowed_token_ids": encode("xy")}),
        ("ab", {"min_tokens": 3}),
        ("a", {"logit_bias": {encode("b")[0]: float("-inf")}}),
    ],
)
def test_a_contradiction_ends_its_request_alone_with_an_error(config, text, others):
    kind = {"structured_outputs": {"choice": ["ab"]}, "temperature": 0}
    bad, good = run([SamplingParams(**kind | others), SamplingParams(**kind)], config, count=2)
    assert (bad.outputs[0].text, bad.outputs[0].finish_reason) == (text, "error")
    assert "the rules forbid every token" in bad.error
    assert (good.outputs[0].text, good.outputs[0].finish_reason) == ("ab", "stop")


@pytest.mark.parametrize("config", [None, SUFFIX, CASES["random-tree"]], ids=["plain", "suffix", "random-tree"])
def test_a_grammar_that_takes_too_much_work_ends_its_request_alone_with_an_error(config):
    heavy = {"regex": "[x-z]{3}" + "(.?a?)" * 300 + "(.?b?)" * 300}
    bad, good = run(
        [SamplingParams(temperature=0, structured_outputs=kind) for kind in (heavy, {"choice": ["abcdef"]})],
        config,
        count=2,
    )
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error.startswith("structured_outputs: the grammar takes too much work here")
    assert re.fullmatch("[x-z]{3}", bad.outputs[0].text)
    assert (good.outputs[0].text, good.outputs[0].finish_reason) == ("abcdef", "stop")
