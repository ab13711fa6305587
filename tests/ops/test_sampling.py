"""Sampling rules keep vLLM's order and meaning, and the token drawn follows their distribution."""

import math

import numpy as np
import pytest
import torch

from forerun.core.random_bits import Stream
from forerun.core.sampling_params import SamplingParams
from forerun.errors import ModelError, RequestError
from forerun.ops.sampling import SamplingRules, draw_token, target_probs, target_tokens, token_logprobs

VOCAB_SIZE = 8
ROW = torch.tensor([0.5, 3.0, -1.0, 2.0, 2.5, 0.0, -2.0, 1.0])


def rules_of(*, prompt_ids=(0,), stop_ids=frozenset(), bad_words_ids=(), vocab_size=VOCAB_SIZE, grammar=None, **params):
    return SamplingRules(
        SamplingParams(**params),
        prompt_ids=prompt_ids,
        vocab_size=vocab_size,
        stop_token_ids=stop_ids,
        bad_words_ids=bad_words_ids,
        grammar=grammar,
    )


class OddAndEven:
    """Allows the tokens 1, 3 and 5 after text of odd length, 0 and 2 after others."""

    def allowed(self, output_ids, path=()):
        allowed = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        allowed[[1, 3, 5] if (len(output_ids) + len(path)) % 2 else [0, 2]] = True
        return allowed


def shaped_by(rules, output_ids=(), path=()):
    """The logits of ROW that the rules leave to draw from, after the last of them."""
    kept = rules.kept(ROW, list(output_ids), path)
    return torch.from_numpy(kept.spread(kept.logits, vocab_size=VOCAB_SIZE, fill=-math.inf))


def target_token(*given, seed, position):
    return target_tokens(*given, seed=seed, position=position, count=1)[0]


def forbidden(shaped):
    return [token_id for token_id, logit in enumerate(shaped.tolist()) if logit == -math.inf]


def test_allowed_token_ids_forbid_all_others():
    assert forbidden(shaped_by(rules_of(allowed_token_ids=[1, 3, 3]))) == [0, 2, 4, 5, 6, 7]


def test_all_texts_of_a_request_share_its_allowed_token_ids():
    params = SamplingParams(allowed_token_ids=[3, 1, 3])
    one, other = (SamplingRules(params, prompt_ids=(0,), vocab_size=VOCAB_SIZE).edits([]).allowed for _ in range(2))
    assert one is other
    assert one.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("output_ids", "path", "expected"),
    [([], (), []), ([4], (), []), ([4, 5], (), [6]), ([4], (5,), [6]), ([], (4, 5), [6]), ([5, 4], (), [])],
)
def test_the_last_token_of_a_bad_word_is_forbidden_after_the_others(output_ids, path, expected):
    assert forbidden(shaped_by(rules_of(bad_words_ids=[[4, 5, 6]]), output_ids, path)) == expected


def test_a_bad_word_of_one_token_is_always_forbidden():
    assert forbidden(shaped_by(rules_of(bad_words_ids=[[4, 5], [2]]))) == [2]


def test_a_bad_word_is_not_matched_against_the_prompt():
    assert forbidden(shaped_by(rules_of(prompt_ids=[4], bad_words_ids=[[4, 5]]))) == []


@pytest.mark.parametrize(("num_path", "expected"), [(0, [6, 7]), (1, [6, 7]), (2, []), (3, [])])
@pytest.mark.parametrize("others", [{}, {"logit_bias": {0: 1.0}}], ids=["alone", "with another rule"])
def test_min_tokens_forbid_stop_tokens_until_enough_with_the_path(num_path, expected, others):
    rules = rules_of(min_tokens=3, stop_ids=frozenset({6, 7}), **others)
    assert forbidden(shaped_by(rules, [1], [1] * num_path)) == expected


def test_logit_bias_is_added():
    edited = rules_of(temperature=0, logit_bias={2: 10.0, 1: -math.inf}).edited(ROW, [], ())
    assert edited[[1, 2]].tolist() == [-math.inf, 9.0]


def test_penalties_act_after_bias_and_processors():
    rules = rules_of(
        temperature=0,
        prompt_ids=[1],
        repetition_penalty=2.0,
        logit_bias={1: 1.0},
        logits_processors=[lambda output_ids, logits: logits + 1.0],
    )
    assert rules.edited(ROW, [], ())[1] == (3.0 + 1.0 + 1.0) / 2.0


def test_processors_see_output_and_path_and_what_came_before():
    seen = []

    def note(output_ids, logits):
        seen.append((output_ids, logits[1].item()))
        return logits

    rules_of(temperature=0, logit_bias={1: 1.0}, logits_processors=[note]).kept(ROW, [3], [4, 5])
    assert seen == [([3, 4, 5], 4.0)]


def test_temperature_divides_before_min_p_top_k_and_top_p():
    # At temperature 2 the likeliest three have probabilities in ratio 1 : exp(-0.25) : exp(-0.5).
    assert forbidden(shaped_by(rules_of(temperature=2.0, min_p=0.6))) == [0, 2, 5, 6, 7]
    assert forbidden(shaped_by(rules_of(temperature=1.0, min_p=0.6))) == [0, 2, 3, 5, 6, 7]


def test_top_k_of_minus_one_keeps_everything():
    assert forbidden(shaped_by(rules_of(top_k=-1))) == []


EVERY_RULE = {
    "allowed_token_ids": [0, 1, 2, 3, 4, 6],
    "logit_bias": {2: 5.0},
    "min_tokens": 5,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "temperature": 0.7,
    "min_p": 0.01,
    "top_k": 4,
    "top_p": 0.9,
}


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, EVERY_RULE, {**EVERY_RULE, "temperature": 0}])
def test_the_row_is_never_changed(params):
    row = ROW.clone()
    rules = rules_of(stop_ids=frozenset({6}), bad_words_ids=[[3]], **params)
    target_probs(rules, row, [1], [4])
    target_token(rules, row, [1], [4], seed=0, position=3)
    assert torch.equal(row, ROW)


def test_greedy_takes_the_lowest_of_equal_tokens():
    row = torch.zeros(40_000)
    row[[39_999, 123, 20_000]] = 1.0
    assert target_token(rules_of(temperature=0, vocab_size=40_000), row, [], seed=0, position=0) == 123


@pytest.mark.parametrize(
    ("params", "num_output", "expected"),
    [
        ({}, 0, False),
        ({"temperature": 0}, 0, True),
        ({"temperature": 1e-6}, 0, True),
        ({"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, 0, True),
        ({"temperature": 0, "min_tokens": 2}, 1, False),
        ({"temperature": 0, "min_tokens": 2}, 2, True),
        ({"temperature": 0, "logit_bias": {1: 1.0}}, 9, False),
        ({"temperature": 0, "presence_penalty": 0.1}, 9, False),
        ({"temperature": 0, "allowed_token_ids": [1]}, 9, False),
        ({"temperature": 0, "logits_processors": [lambda output_ids, logits: logits]}, 9, False),
    ],
)
def test_plain_greedy_is_recognised(params, num_output, expected):
    assert rules_of(stop_ids=frozenset({7}), **params).is_plain_greedy_at(num_output) is expected


@pytest.mark.parametrize(("output_ids", "path", "expected"), [([], (), 0), ([4], (), 1), ([4], (4,), 0), ([], (4,), 1)])
def test_a_grammar_sees_output_and_path(output_ids, path, expected):
    rules = rules_of(temperature=0, grammar=OddAndEven())
    assert not rules.is_plain_greedy_at(0)
    assert target_token(rules, ROW, output_ids, path, seed=0, position=0) == expected


def test_a_grammar_is_obeyed_whatever_other_rules_add():
    def prefer_six(output_ids, logits):
        assert forbidden(logits) == [0, 2, 4, 6, 7]
        return torch.zeros_like(logits).index_fill(0, torch.tensor([6]), 50.0)

    rules = rules_of(grammar=OddAndEven(), logit_bias={4: 99.0}, repetition_penalty=2.0, logits_processors=[prefer_six])
    probs = target_probs(rules, ROW, [4])
    assert probs.nonzero().flatten().tolist() == [1, 3, 5]


def test_a_grammar_leaves_few_candidates():
    assert rules_of(grammar=OddAndEven()).kept(ROW, [4]).token_ids.tolist() == [1, 3, 5]


@pytest.mark.parametrize(
    "others", [{"allowed_token_ids": [1]}, {"min_tokens": 3, "stop_ids": {0, 2}}, {"bad_words_ids": [[0], [2]]}]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_other_rules_contradict_is_an_error(others, temperature):
    with pytest.raises(RequestError, match="the rules forbid every token; loosen structured_outputs"):
        target_token(rules_of(grammar=OddAndEven(), temperature=temperature, **others), ROW, [], seed=0, position=0)


def test_min_tokens_without_stop_tokens_cost_nothing():
    assert rules_of(temperature=0, min_tokens=5).is_plain_greedy_at(0)


def test_target_probs_of_a_greedy_request_are_one_hot():
    probs = target_probs(rules_of(temperature=0, logit_bias={6: 9.0}), ROW, [])
    assert probs.tolist() == [0, 0, 0, 0, 0, 0, 1, 0]


def test_target_probs_are_the_softmax_of_the_shaped_row():
    rules = rules_of(temperature=0.5, top_k=3)
    assert torch.allclose(target_probs(rules, ROW, []), shaped_by(rules).softmax(-1))


@pytest.mark.parametrize("temperature", [2e-5, 1e6])
def test_extreme_temperatures_give_a_distribution(temperature):
    probs = target_probs(rules_of(temperature=temperature), ROW * 1e30, [])
    assert probs.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.9, "temperature": 1.5}])
def test_sampled_tokens_follow_target_probs(params):
    rules, num_draws = rules_of(**params), 4000
    drawn = [target_token(rules, ROW, [], seed=3, position=i) for i in range(num_draws)]
    expected = target_probs(rules, ROW, []).double().numpy() * num_draws
    counts = np.bincount(drawn, minlength=VOCAB_SIZE)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    degrees = possible.sum() - 1
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < degrees + 10 * math.sqrt(2 * degrees)


def test_the_same_seed_and_position_give_the_same_token():
    rules = rules_of()
    tokens = [[target_token(rules, ROW, [], seed=11, position=i) for i in range(50)] for _ in range(2)]
    assert tokens[0] == tokens[1]


def test_narrowing_the_candidates_does_not_change_a_token_that_survives():
    wide, narrow = rules_of(), rules_of(top_k=4)
    surviving = set(narrow.kept(ROW, []).token_ids.tolist())
    for position in range(100):
        token_id = target_token(wide, ROW, [], seed=0, position=position)
        if token_id in surviving:
            assert target_token(narrow, ROW, [], seed=0, position=position) == token_id


def test_draw_token_needs_no_normalised_weights():
    weights = torch.tensor([0.0, 2.0, 5.0])
    drawn = [
        [draw_token(w, seed=1, position=i, stream=Stream.DRAFT) for i in range(50)] for w in (weights, weights / 7)
    ]
    assert drawn[0] == drawn[1]


def test_a_token_without_probability_is_never_drawn():
    weights = torch.tensor([0.0, 1e-30, 0.0])
    assert {draw_token(weights, seed=1, position=i, stream=Stream.DRAFT) for i in range(50)} == {1}


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_forbidding_every_token_is_an_error(temperature):
    rules = rules_of(temperature=temperature, allowed_token_ids=[2], bad_words_ids=[[2]])
    with pytest.raises(RequestError, match="forbid every token"):
        target_token(rules, ROW, [], seed=0, position=0)


@pytest.mark.parametrize("logit", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_broken_logits_are_an_error(temperature, logit):
    row = ROW.clone()
    row[5] = logit
    with pytest.raises(ModelError, match="must be finite"):
        target_token(rules_of(temperature=temperature), row, [], seed=0, position=0)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"allowed_token_ids": [1, VOCAB_SIZE]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"bad_words_ids": [[1, VOCAB_SIZE]]}, "bad_words"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(params, name):
    with pytest.raises(RequestError, match=f"{name}: got token id"):
        rules_of(**params)


def test_a_bad_word_without_tokens_is_refused():
    with pytest.raises(RequestError, match="has no tokens"):
        rules_of(bad_words_ids=[[]])


def test_logprobs_are_log_softmax_of_the_raw_row():
    found = token_logprobs(ROW.unsqueeze(0), [3], 2)
    expected = ROW.double().log_softmax(-1)
    assert found.chosen == pytest.approx([expected[3].item()], abs=1e-6)
    assert found.top_ids == [[1, 4]]
    assert found.top_values[0] == pytest.approx(expected[[1, 4]].tolist(), abs=1e-6)


def test_ranks_count_the_more_likely_tokens():
    assert token_logprobs(ROW.expand(3, -1), [1, 3, 6], 0).ranks == [1, 3, 8]


def test_no_top_logprobs_leaves_empty_rows():
    assert token_logprobs(ROW.expand(2, -1), [1, 3], 0).top_ids == [[], []]


def test_the_first_of_ties_has_rank_one():
    row = torch.tensor([0.0, 1.0, 1.0])
    assert token_logprobs(row.unsqueeze(0), [1], 0).ranks == [1]


def test_logprobs_of_a_row_depend_neither_on_other_rows_nor_on_threads():
    rows = 4 * torch.randn(64, 49152, generator=torch.Generator().manual_seed(0))
    together = token_logprobs(rows, [0] * 64, 1)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        alone = [token_logprobs(row.unsqueeze(0), [0], 1) for row in rows]
    finally:
        torch.set_num_threads(num_threads)
    assert together.chosen == [one.chosen[0] for one in alone]
    assert together.top_values == [one.top_values[0] for one in alone]
