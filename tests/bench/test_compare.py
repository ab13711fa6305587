"""Comparisons: order of configurations and rounds, texts, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.bench import compare, instruments
from forerun.bench.compare import measure_comparison
from forerun.bench.instruments import Interrupted
from forerun.bench.workloads import ComparisonWorkload
from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError, UnknownKeyError
from tests.bench.clocks import TickingClock
from tests.bench.interruptions import interrupt
from tests.contract.drafters import BadDrafter, MoodyDrafter
from tests.engines import tiny_target

SETTINGS = EngineSettings(model="tiny", block_size=4)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
CONFIGS = {"ngram": NGRAM, "bad": {"method": BadDrafter, "num_speculative_tokens": 4}}
PROMPTS = {"loops": [[7, 8, 9] * 4, [11, 12] * 5, [20, 21, 22, 23]], "other": [[1, 2, 3]]}
WORKLOAD = ComparisonWorkload(max_tokens=12, repeats=2)


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    monkeypatch.setitem(instruments.BUFFER_BYTES, "cpu", 1 << 16)


def measure(configs=CONFIGS, workload=WORKLOAD, *, settings=SETTINGS, prompts=PROMPTS, **options):
    return measure_comparison(tiny_target(), settings, configs, prompts, workload, **options)


@pytest.fixture
def answered(monkeypatch):
    """(number of the engine, prompts, salt) of every batch, in order."""
    seen, engines = [], []

    def note(llm, prompts, params, *, salt, **options):
        if llm not in engines:
            engines.append(llm)
        seen.append((engines.index(llm), prompts, salt))
        return answer(llm, prompts, params, salt=salt, **options)

    answer = compare.answer
    monkeypatch.setattr(compare, "answer", note)
    return seen


def test_plain_decoding_comes_first_for_each_kind_and_is_the_base():
    outcomes = measure().outcomes
    names = ["plain", "ngram", "bad"]
    assert [(one.kind, one.name) for one in outcomes] == [(kind, name) for kind in PROMPTS for name in names]
    assert all(one.all_speed_ups == [1.0, 1.0] for one in outcomes if one.name == "plain")


def test_each_batch_is_answered_by_all_in_turn_there_and_back(answered):
    measure(prompts={"loops": PROMPTS["loops"][:2]})
    warm_up, rounds = answered[:3], answered[3:]
    assert [engine for engine, _, _ in warm_up] == [0, 1, 2]
    assert [engine for engine, _, _ in rounds] == [0, 1, 2, 0, 1, 2, 2, 1, 0, 2, 1, 0]


def test_no_round_finds_what_another_left_in_the_prefix_cache(answered):
    measure()
    assert {salt for _, _, salt in answered} == {"warm-up", "round 0", "round 1"}


def test_prompts_are_given_in_batches(answered):
    measure(workload=replace(WORKLOAD, batch_size=2, repeats=1))
    assert [len(prompts) for engine, prompts, salt in answered if engine == 0] == [2, 2, 1, 1]


def test_num_prompts_is_of_each_kind():
    outcomes = measure(workload=replace(WORKLOAD, num_prompts=2)).outcomes
    assert [one.num_prompts for one in outcomes if one.name == "plain"] == [2, 1]


def test_lossless_drafts_leave_the_texts_as_they_are():
    outcomes = measure().outcomes
    assert {one.texts for one in outcomes} == {"identical"}
    assert all(one.speculation.num_draft_tokens for one in outcomes if one.name == "bad")


def test_sampled_texts_are_the_same_under_the_matching_verifier():
    outcomes = measure(workload=replace(WORKLOAD, temperature=1.0)).outcomes
    assert {one.texts for one in outcomes} == {"identical"}


def test_a_lossy_configuration_is_called_so_and_no_near_tie_is_looked_for():
    lossy = {**CONFIGS["bad"], "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    outcome = measure({"lossy": lossy}, judge=lambda *_: pytest.fail("looked for")).outcomes[1]
    assert outcome.texts.endswith("of 3 differ (lossy)")


def test_a_drafter_that_fails_is_counted():
    outcome = measure({"moody": {"method": MoodyDrafter, "num_speculative_tokens": 3}}).outcomes[1]
    assert outcome.num_failed_drafts > 0


def test_steps_that_read_prompts_are_not_counted():
    plain = measure({}, replace(WORKLOAD, repeats=1)).outcomes[0]
    assert plain.speculation.num_steps == 3 * (WORKLOAD.max_tokens - 1)


def test_speeds_are_of_tokens_and_the_clocks_seconds():
    plain = measure({}, replace(WORKLOAD, repeats=1), clock=TickingClock()).outcomes[0]  # a look before, between, after
    assert plain.tokens_per_second == WORKLOAD.max_tokens / 2
    assert plain.decode_tokens_per_second == WORKLOAD.max_tokens - 1


def test_texts_of_one_token_have_no_decoding():
    outcome = measure(workload=replace(WORKLOAD, max_tokens=1)).outcomes[1]
    assert (outcome.decode_tokens_per_second, outcome.decode_speed_up, outcome.milliseconds_per_step) == (
        None,
        None,
        {},
    )


def test_kv_memory_is_for_one_batch_unless_it_is_given(monkeypatch):
    built = []
    from_target = compare.LLM.from_target
    monkeypatch.setattr(compare.LLM, "from_target", lambda *given: built.append(from_target(*given)) or built[-1])
    measure({}, replace(WORKLOAD, batch_size=2, repeats=1))
    measure({}, replace(WORKLOAD, repeats=1), settings=replace(SETTINGS, kv_cache_memory_bytes=1 << 20))
    small, large = (llm.engine.parts.pool.num_blocks for llm in built)
    assert small == 2 * (-(-(12 + 12) // 4) + 1)
    assert large > 2 * small


def test_a_configuration_that_does_not_fit_the_target_is_named():
    with pytest.raises(ConfigError, match="early: exit_layer: got 99"):
        measure({"early": {"method": "self", "exit_layer": 99, "num_speculative_tokens": 2}})


def test_an_unknown_key_names_its_configuration():
    with pytest.raises(UnknownKeyError, match=r"typo: speculative_config: unknown key 'lookup'"):
        measure({"typo": {**NGRAM, "lookup": 3}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"settings": replace(SETTINGS, max_model_len=20)},
            r"prompt 1 of 'loops' has 12 tokens, and its answer 12; .* 20",
        ),
        ({"settings": replace(SETTINGS, max_num_seqs=2), "workload": ComparisonWorkload(batch_size=3)}, "batch_size"),
        ({"prompts": {"none": []}}, "prompts: got none"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        measure(**options)


def test_ctrl_c_leaves_whole_rounds(monkeypatch):
    num_batches = len(CONFIGS | {"plain": None}) * (1 + 4)  # a warm-up, and the prompts of the first round, one by one
    interrupt(monkeypatch, compare, "answer", at=num_batches + 2)
    with pytest.raises(Interrupted, match="1 of 2 rounds") as caught:
        measure()
    found = caught.value.found
    assert (found.repeats, len(found.all_gigabytes_per_second)) == (1, 1)
    assert {len(one.all_tokens_per_second) for one in found.outcomes} == {1}
    assert {one.texts for one in found.outcomes} == {"identical"}


def test_ctrl_c_while_texts_are_judged_leaves_all_that_was_measured(monkeypatch):
    """To judge one takes a pass of the target over it."""
    answer, judged = compare.answer, iter([True])

    def answer_otherwise(llm, *given, **options):
        found = answer(llm, *given, **options)
        if llm.speculative.num_speculative_tokens:
            found.texts[0][-1] += 1
        return found

    def judge(*_):
        for is_near_tie in judged:
            return is_near_tie
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "answer", answer_otherwise)
    with pytest.raises(Interrupted, match="2 of 2 rounds, and not all texts that differ were looked at") as caught:
        measure({"one": NGRAM, "other": NGRAM}, prompts={"loops": PROMPTS["loops"][:1]}, judge=judge)
    plain, one, other = caught.value.found.outcomes
    assert (plain.num_near_ties, one.num_near_ties, other.num_near_ties) == (0, 1, None)
    assert (one.texts, other.texts) == ("1 of 1 differ, 1 by near-ties", "1 of 1 differ")


def test_ctrl_c_before_a_whole_round_leaves_nothing(monkeypatch):
    interrupt(monkeypatch, compare, "answer", at=5)
    with pytest.raises(KeyboardInterrupt) as caught:
        measure()
    assert not isinstance(caught.value, Interrupted)
