"""What all verifiers share: errors stay with their sequence, chance is keyed, greedy is matching."""

import math

import pytest
import torch

from forerun.core.draft import Draft
from forerun.errors import ErrorKind, ModelError, RequestError
from forerun.ops.candidates import find_candidates
from forerun.ops.grammar import GrammarNotReadyError
from forerun.verify import VERIFIERS
from forerun.verify.base import Verdict
from forerun.verify.judging import MostLikely, SampledTokens, SeededChance, SequenceTarget
from forerun.verify.synthetic import SyntheticConfig
from tests.verify.judged import VOCAB_SIZE, judged_of, random_rows, rows_preferring

NUM_TOKENS = 3
VERIFIERS_BUILT = {
    name: (config() if config is not SyntheticConfig else config(synthetic_acceptance_length=1.5)).build(NUM_TOKENS)
    for name, config in VERIFIERS.items()
}
every_verifier = pytest.mark.parametrize("verifier", VERIFIERS_BUILT.values(), ids=VERIFIERS_BUILT)
every_honest_verifier = pytest.mark.parametrize(
    "verifier",
    [v for n, v in VERIFIERS_BUILT.items() if n != "synthetic"],
    ids=[n for n in VERIFIERS if n != "synthetic"],
)
SAMPLED = torch.full((3, VOCAB_SIZE), 1 / VOCAB_SIZE)


def failing(output_ids, logits):
    raise RuntimeError("no")


@every_verifier
@pytest.mark.parametrize(
    "draft", [Draft(), Draft((1, 2, 3)), Draft((1, 2, 3), None, SAMPLED)], ids=["empty", "certain", "sampled"]
)
def test_a_failing_rule_ends_its_own_sequence_only(verifier, draft):
    logits = random_rows(6)
    broken, sound = judged_of(draft, logits_processors=[failing]), judged_of(first_row=4, seed=9)
    verdicts = verifier.verify(logits, [sound, broken, sound])
    alone = verifier.verify(logits, [sound])[0]
    assert verdicts[1].error == "logits_processors: failing raised RuntimeError: no"
    assert verdicts[1].error_kind is ErrorKind.REQUEST
    assert [verdicts[0], verdicts[2]] == [alone, alone]


class Preparing:
    """A grammar that allows everything, once it is ready."""

    takes_drafts = True

    def __init__(self):
        self.is_ready = False

    def allowed(self, output_ids, path=()):
        if not self.is_ready and path:
            raise GrammarNotReadyError("not yet")
        return torch.ones(VOCAB_SIZE, dtype=torch.bool)


@every_verifier
@pytest.mark.parametrize("probs", [None, SAMPLED], ids=["certain", "sampled"])
def test_a_sequence_whose_grammar_is_not_ready_is_decided_later_as_if_it_had_been(verifier, probs):
    logits, grammar, num_undecided = rows_preferring(1, 2, 3, 4), Preparing(), 0
    for seed in range(20):
        waiting = judged_of(Draft((1, 2, 3), None, probs), seed=seed, grammar=grammar)
        grammar.is_ready = True
        ready = verifier.verify(logits, [waiting])
        grammar.is_ready = False
        (early,) = verifier.verify(logits, [waiting])
        grammar.is_ready = True
        assert early is None or [early] == ready
        assert verifier.verify(logits, [waiting]) == ready
        num_undecided += early is None
    assert num_undecided


@every_verifier
@pytest.mark.parametrize("probs", [None, SAMPLED], ids=["certain", "sampled"])
def test_a_rule_that_fails_along_a_draft_gives_the_token_of_plain_decoding(verifier, probs):
    def fails_after_five(output_ids, logits):
        if output_ids:
            raise RuntimeError("no")
        return logits.index_fill(0, torch.tensor([5]), 50.0)

    logits = random_rows(4)
    plain, drafted = (
        judged_of(d, logits_processors=[fails_after_five]) for d in (Draft(), Draft((5, 1, 2), None, probs))
    )
    verdicts = verifier.verify(logits, [plain, drafted])
    assert verdicts == [Verdict((), 5), Verdict((), 5)]


@every_verifier
@pytest.mark.parametrize("temperature", [0, 1])
def test_broken_logits_end_their_own_sequence_only(verifier, temperature):
    logits = rows_preferring(1, 2)
    logits[0, 5] = math.nan
    sequences = [judged_of(first_row=row, temperature=temperature) for row in (0, 1)]
    errors = [verdict.error for verdict in verifier.verify(logits, sequences)]
    assert "must be finite" in errors[0]
    assert errors[1] is None


@every_honest_verifier
@pytest.mark.parametrize("bias", [None, {0: -1.0}], ids=["plain", "with rules"])
def test_greedy_requests_get_the_verdict_of_matching(verifier, bias):
    for seed in range(20):
        logits = random_rows(4, seed=seed)
        likely = logits.argmax(-1).tolist()
        draft = Draft((likely[0], likely[1], (likely[2] + seed) % VOCAB_SIZE), None, SAMPLED)
        judged = judged_of(draft, seed=seed, temperature=0, logit_bias=bias)
        assert verifier.verify(logits, [judged]) == VERIFIERS_BUILT["matching"].verify(logits, [judged])


@every_verifier
def test_without_a_draft_every_verifier_gives_the_text_of_the_seed(verifier):
    logits = random_rows(1)
    for seed in range(30):
        judged = judged_of(seed=seed)
        assert verifier.verify(logits, [judged]) == VERIFIERS_BUILT["matching"].verify(logits, [judged])


@every_verifier
def test_a_verdict_depends_on_nothing_but_its_own_sequence(verifier):
    logits = random_rows(8, seed=2)
    first, second = judged_of(Draft((1, 2, 3), None, SAMPLED), seed=4), judged_of(Draft((3, 2)), first_row=5, seed=4)
    alone = [verifier.verify(logits, [one])[0] for one in (first, second)]
    assert verifier.verify(logits, [second, first]) == alone[::-1]


def test_no_choice_of_a_later_step_repeats_the_noise_of_an_earlier_one():
    choices = [[SeededChance(1, position).accepts(node, 0.5) for node in range(200)] for position in range(6)]
    for earlier in range(6):
        for later in range(earlier + 1, 6):
            # The same place in the text: node n of a step is node n - 1 of the next.
            shift = later - earlier
            agreeing = sum(a == b for a, b in zip(choices[earlier][shift:], choices[later], strict=False))
            assert agreeing < 0.75 * (200 - shift)


@pytest.mark.parametrize(("probability", "expected"), [(0.0, False), (1.0, True), (math.inf, True)])
def test_certain_chances_are_certain(probability, expected):
    assert all(SeededChance(seed, 0).accepts(0, probability) is expected for seed in range(200))


def test_empty_steps_have_no_verdicts():
    assert VERIFIERS_BUILT["matching"].verify(torch.zeros(0, VOCAB_SIZE), []) == []


@every_verifier
def test_greedy_decoding_without_a_draft_is_what_the_judge_itself_says(verifier):
    logits = random_rows(4)
    for row in range(4):
        one = judged_of(first_row=row, temperature=0)
        (verdict,) = verifier.verify(logits, [one])
        target = SequenceTarget(logits, one, MostLikely(logits), SampledTokens(logits, [one], verifier.sampler))
        assert verdict == verifier.judge(one.draft, target, SeededChance(one.seed, one.position))
        assert verdict == Verdict((), int(logits[row].argmax()))


@every_verifier
def test_candidates_say_what_the_logits_say(verifier):
    logits = random_rows(6)
    logits[2, [1, 3]] = logits[2].max() + 1  # a tie
    judged = [judged_of(Draft((1, 2)), temperature=0), judged_of(Draft((3, 0)), first_row=3, temperature=0)]
    for num_candidates in (1, 4):
        candidates = find_candidates(logits, num_candidates)
        assert verifier.verify(logits, judged, candidates) == verifier.verify(logits, judged)


@pytest.mark.parametrize(
    ("value", "error"), [(math.nan, ModelError), (math.inf, ModelError), (-math.inf, RequestError)]
)
def test_a_row_whose_highest_logit_is_not_finite_is_the_same_error_with_candidates(value, error):
    logits = random_rows(2)
    logits[1, slice(None) if value == -math.inf else 3] = value
    for candidates in (None, find_candidates(logits, 2)):
        most_likely = MostLikely(logits, candidates)
        assert most_likely.token(0) == int(logits[0].argmax())
        with pytest.raises(error):
            most_likely.token(1)
