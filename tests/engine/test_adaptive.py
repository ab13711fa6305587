"""How much of each draft is verified: as much as pays."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sampling_params import SamplingParams
from forerun.core.stats import SpeculationStats, StepTimes
from forerun.core.step import LateDraft, StepRecord, unknown_draft
from forerun.engine.adaptive import AVERAGED_OVER, FIRST_PAUSE, LOST_SHARE, MOST_LOST, AdaptiveLength
from forerun.engine.costs import JUMPS, KINKS, NUM_FIRST_STEPS, PRIOR, StepCosts
from forerun.engine.engine import Engine
from forerun.engine.speculation import FixedLength
from tests.executor.simulations import run, simulated_engine

SAMPLING = SamplingParams(max_tokens=400, ignore_eos=True, seed=3)


def draft_of(chances):
    return Draft(tuple(range(len(chances))), survival=tuple(chances)) if chances else NO_DRAFT


chances = st.lists(st.floats(0.0, 1.0), max_size=5).map(lambda found: sorted(found, reverse=True))


@given(st.lists(chances, min_size=1, max_size=4), st.integers(0, 40))
def test_no_other_choice_has_more_tokens_for_its_cost(survivals, num_prompt_rows):
    control = AdaptiveLength(16)
    num_sequences = len(survivals)
    num_rows = num_sequences + num_prompt_rows
    costs = control.costs
    plain = costs.of_rows(num_sequences) + costs.beside_rows(num_sequences, 100)  # without the prompts

    def worth(lengths):
        tokens = num_sequences + sum(sum(one[:length]) for one, length in zip(survivals, lengths, strict=True))
        return tokens / (plain + costs.of_rows(num_rows + sum(lengths)) - costs.of_rows(num_rows))

    chosen = control.choose(
        [draft_of(one) for one in survivals],
        num_rows=num_rows,
        num_sequences=num_sequences,
        num_context_tokens=100,
    )
    best = max(map(worth, product(*(range(len(one) + 1) for one in survivals))))
    assert worth(chosen) == pytest.approx(best, rel=1e-9)


@given(st.lists(chances, min_size=1, max_size=4), st.integers(100, 300), st.integers(1, 300))
def test_prompts_that_are_read_beside_them_make_no_drafts_longer(survivals, num_sequences, num_prompt_rows):
    def number_of_nodes(num_rows):
        control = AdaptiveLength(16)
        drafts = [draft_of(one) for one in survivals]
        return sum(control.choose(drafts, num_rows=num_rows, num_sequences=num_sequences, num_context_tokens=100))

    costs = AdaptiveLength(16).costs
    first, last = (costs.of_rows(num_rows + 1) - costs.of_rows(num_rows) for num_rows in (num_sequences, 600))
    assert first == pytest.approx(last), "where each further row costs as much"
    assert number_of_nodes(num_sequences + num_prompt_rows) == number_of_nodes(num_sequences)


def simulate(control, *, rates, batch_size, row_seconds, learns=False):
    """Tokens a second of virtual time, of four texts at least, as one says little; who `learns` has seen what steps cost in a first batch."""
    engine = simulated_engine(
        rates=rates,
        num_blocks=10000,
        max_model_len=512,
        step_seconds=lambda plan: 0.004 + row_seconds * len(plan.rows.token_ids),
    )
    clock = engine._clock
    engine = Engine(replace(engine.parts, control=control), clock=clock)
    if learns:
        run(engine, [[1, 2, 3]] * batch_size, SAMPLING)
    started = clock()
    outputs = []
    for number in range(max(1, 4 // batch_size)):
        outputs += run(engine, [[1, 2, 3]] * batch_size, replace(SAMPLING, seed=SAMPLING.seed + number))
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (clock() - started)


RATES, BATCH_SIZES, ROW_SECONDS = [(0.9,), (0.6, 0.4), (0.1,)], [1, 8, 32], [0.00004, 0.0004, 0.002]
LOADS = [
    pytest.param(
        RATES[i], BATCH_SIZES[j], ROW_SECONDS[k], marks=() if k == (i + j) % 3 else pytest.mark.slow
    )  # of those that always run, each two of the three meet once
    for i in range(3)
    for j in range(3)
    for k in range(3)
]


@pytest.mark.parametrize(("rates", "batch_size", "row_seconds"), LOADS)
def test_it_keeps_up_with_the_best_fixed_length(rates, batch_size, row_seconds):
    load = {"rates": rates, "batch_size": batch_size, "row_seconds": row_seconds}
    best = max(simulate(FixedLength(num_speculative_tokens=k), **load) for k in (0, 1, 2, 4, 8))
    assert simulate(AdaptiveLength(8), **load, learns=True) >= 0.97 * best


def straight(of_step, of_row, **jumps):
    """Costs without kinks; `at_16` and `at_32` is what the row behind these takes besides."""
    weights = [of_step, of_row, *[0.0] * (len(PRIOR) - 2)]
    for jump, weight in jumps.items():
        weights[2 + len(KINKS) + JUMPS.index(int(jump.removeprefix("at_")))] = weight
    return StepCosts(weights)


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_a_row_behind_a_jump_is_verified_where_those_behind_it_pay_for_it(num_sequences):
    def chosen(chance):
        control = AdaptiveLength(40, costs=straight(1.0, 0.05, at_16=1.0))
        drafts = [draft_of([chance] * (36 // num_sequences))] * num_sequences
        lengths = control.choose(drafts, num_rows=num_sequences, num_sequences=num_sequences, num_context_tokens=0)
        return num_sequences + sum(lengths), control

    rows, control = chosen(0.15)
    assert rows == 16
    control.draft_limit(num_sequences)
    assert control.min_survival < 0.15  # such nodes are drafted again, though the next row is dear
    assert chosen(0.9)[0] == num_sequences + 36


def test_no_drafter_is_asked_where_another_row_costs_as_much_as_it_can_bring():
    steep = straight(0.0, 1.0)
    assert AdaptiveLength(8, costs=steep).draft_limit(4) == 0
    assert AdaptiveLength(8).draft_limit(4) == 8


@pytest.mark.parametrize("num_sequences", [16, 32])
def test_drafters_are_asked_where_many_rows_share_what_the_first_one_is_dearer(num_sequences):
    jump = {f"at_{num_sequences}": 0.3}  # so that the next row alone would have to bring five tokens or more
    control = AdaptiveLength(8, costs=straight(1.0, 0.001, **jump))
    assert control.draft_limit(num_sequences) == 8
    assert control.min_survival < 0.2
    drafts = [draft_of([0.8, 0.5])] * num_sequences
    chosen = {"num_rows": num_sequences, "num_sequences": num_sequences, "num_context_tokens": 0}
    assert control.choose(drafts, **chosen) == [2] * num_sequences
    # Too few stood to pay for the jump: drafters are asked again, for what pays for it once more.
    assert control.choose([draft_of([0.05])] * num_sequences, **chosen) == [0] * num_sequences
    assert control.draft_limit(num_sequences) == 8
    assert control.min_survival < 0.2


def test_no_drafter_is_asked_where_a_jump_costs_more_than_all_rows_can_bring():
    control = AdaptiveLength(1, costs=straight(1.0, 0.001, at_16=1.1))
    assert control.draft_limit(16) == 0
    assert control.draft_limit(15) == 1  # one row, before the jump


def test_drafters_are_asked_where_rows_are_cheap_beside_what_the_sequences_cost_anyway():
    weights = [1.0, 0.06, *[0.0] * (len(PRIOR) - 4), 0.0, 0.001]
    control = AdaptiveLength(8, costs=StepCosts(weights))
    assert control.draft_limit(32) == 8  # nothing is in the KV cache
    steep = AdaptiveLength(8, costs=StepCosts([0.0, *weights[1:]]))
    assert steep.draft_limit(32) == 0  # rows alone: each has to bring as much as it costs
    steep.observe(replace(record(num_accepted=0, draft_seconds=0.0, num_drafted=0), num_context_tokens=400))
    assert steep.draft_limit(32) == 8
    assert steep.min_survival < 0.2
    drafts = [draft_of([0.8])] * 32
    assert steep.choose(drafts, num_rows=32, num_sequences=32, num_context_tokens=32 * 400) == [1] * 32


def test_rare_chances_are_not_drafted_where_rows_are_dear():
    control = AdaptiveLength(8, costs=straight(1.0, 0.25))
    control.choose([draft_of([0.9, 0.2])] * 8, num_rows=8, num_sequences=8, num_context_tokens=0)
    assert control.draft_limit(8) == 8
    assert control.min_survival > 0.2
    assert control.draft_limit(1) == 8
    assert control.min_survival < 0.2  # though no draft came that could have been chosen from
    free = AdaptiveLength(8, costs=straight(1.0, 0.0))
    free.choose([draft_of([0.9, 0.2])] * 8, num_rows=8, num_sequences=8, num_context_tokens=0)
    assert free.draft_limit(8) == 8
    assert free.min_survival < 0.05


def record(*, num_accepted, draft_seconds, num_drafted=4, seconds=0.005):
    draft = Draft(tuple(range(num_drafted)), survival=(0.5,) * num_drafted)
    return StepRecord(
        num_rows=1 + num_drafted,
        num_context_tokens=100,
        num_asked=1,
        verified=[(draft, tuple(range(num_accepted)))],
        times=StepTimes(forward=seconds, draft=draft_seconds, num_steps=1),
    )


def test_a_drafter_that_becomes_slow_is_left_out_and_comes_back_when_it_is_well():
    control = AdaptiveLength(8)
    for _ in range(300):
        control.observe(record(num_accepted=2, draft_seconds=0.0001))
    assert control.draft_limit(1) == 8
    num_asked = 0
    for _ in range(600):
        asked = control.draft_limit(1) > 0
        num_asked += asked
        slow = record(num_accepted=2, draft_seconds=0.05)
        control.observe(slow if asked else replace(slow, num_asked=0))
    assert num_asked < 400
    for _ in range(5 * FIRST_PAUSE):
        control.observe(replace(record(num_accepted=0, draft_seconds=0.0, num_drafted=0), num_asked=0))
        if control.draft_limit(1):
            break
    for _ in range(300):
        assert control.draft_limit(1) == 8
        control.observe(record(num_accepted=2, draft_seconds=0.0001))


FOUR = draft_of([0.5] * 4)


def priced_control(*, draft_seconds):
    """A control that knows what drafts of four nodes cost, and that price in tokens."""
    control = AdaptiveLength(8)
    for _ in range(300):
        control.observe(record(num_accepted=2, draft_seconds=draft_seconds, seconds=0.006))
        control.observe(record(num_accepted=0, draft_seconds=0.0, num_drafted=0))
    control.draft_limit(1)
    one = SpeculationStats()
    one.record(FOUR, ())
    return control, control._prices.lost_to(one, NO_DRAFT)


@given(st.lists(st.integers(0, 4), max_size=150), st.sampled_from([0.0, 0.0005, 0.003]))
def test_drafts_cost_no_sequence_more_than_a_small_share_of_its_time(num_stood, draft_seconds):
    control, price = priced_control(draft_seconds=draft_seconds)
    assert price > 0.0
    sequence, draft = SpeculationStats(), NO_DRAFT
    for count in num_stood:
        limit = control.limit_of(sequence, 8, verifying=draft)
        sequence.record(draft, tuple(range(count)) if draft.token_ids else ())
        draft = FOUR if limit else NO_DRAFT
        lost = sequence.num_drafts * price - sequence.num_accepted_tokens
        num_tokens = sequence.num_steps + sequence.num_accepted_tokens
        assert (
            lost <= MOST_LOST + LOST_SHARE * num_tokens + 2 * price + 1e-9
        )  # one was verified when the last was begun


def test_a_draft_that_is_verified_holds_up_the_next_one_unless_it_promises_less_than_it_costs():
    control, price = priced_control(draft_seconds=0.003)
    assert MOST_LOST + LOST_SHARE < price < sum(FOUR.survival)
    for draft, limit in ((FOUR, 8), (draft_of([0.01] * 4), 0), (Draft(FOUR.token_ids), 0), (NO_DRAFT, 8)):
        assert control.limit_of(SpeculationStats(), 8, verifying=draft) == limit


def test_a_sequence_that_lost_by_drafts_gets_none_until_its_text_has_grown_and_others_go_on():
    control, price = priced_control(draft_seconds=0.002)
    unlucky, lucky = SpeculationStats(), SpeculationStats()
    for _ in range(round(2 / price)):
        unlucky.record(FOUR, ())
        lucky.record(FOUR, (0, 1))
    assert control.limit_of(unlucky, 8, verifying=NO_DRAFT) == 0
    assert control.limit_of(lucky, 8, verifying=FOUR) == 8
    unlucky.record(NO_DRAFT, (), times=round(2 / LOST_SHARE))
    assert control.limit_of(unlucky, 8, verifying=NO_DRAFT) == 8


def test_what_drafts_cost_in_a_large_batch_is_not_held_against_a_text_that_is_alone_again():
    def observe(control, num_sequences, num_drafted):
        draft = draft_of([0.5] * num_drafted)
        num_rows = num_sequences * (1 + num_drafted)
        control.observe(
            StepRecord(
                num_rows=num_rows,
                num_context_tokens=0,
                num_asked=num_sequences,
                verified=[(draft, ())] * num_sequences,
                times=StepTimes(forward=0.005 * (1.0 + 0.05 * num_rows), num_steps=1),
            )
        )

    control, alone = AdaptiveLength(8, costs=straight(1.0, 0.05)), SpeculationStats()
    for _ in range(100):
        observe(control, 1, 4)
        alone.record(FOUR, (0,))  # a fourth of the nodes, of which each costs a twentieth of a token
    for _ in range(100):
        observe(control, 32, 1)  # two thirds of a token
    control.draft_limit(1)
    assert control.limit_of(alone, 8, verifying=NO_DRAFT) == 8


def beside_prompts(step):
    """A step that reads a chunk of a prompt as well."""
    return replace(step, num_rows=step.num_rows + 100, times=replace(step.times, forward=0.02))


def test_drafting_pauses_where_it_does_not_pay_beside_prompts_too_and_is_tried_again():
    control, plain = AdaptiveLength(8), record(num_accepted=0, draft_seconds=0.0, num_drafted=0)
    for _ in range(20):
        control.observe(replace(plain, num_asked=0))
    assert control.draft_limit(1) == 8
    for _ in range(AVERAGED_OVER):
        control.observe(beside_prompts(record(num_accepted=0, draft_seconds=0.001)))
    assert control.draft_limit(1) == 0
    for _ in range(FIRST_PAUSE):
        control.observe(beside_prompts(replace(plain, num_asked=0)))
    assert control.draft_limit(1) == 8


def test_a_pause_is_none_for_a_text_with_a_prediction():
    control = AdaptiveLength(8)
    for _ in range(NUM_FIRST_STEPS + AVERAGED_OVER + 1):
        control.observe(record(num_accepted=0, draft_seconds=0.001))
    assert control.draft_limit(1) == 0
    assert control.limit_of(SpeculationStats(), 0, verifying=NO_DRAFT) == 0
    assert control.limit_of(SpeculationStats(), 0, verifying=NO_DRAFT, has_prediction=True) == 8
    dear = AdaptiveLength(8, costs=straight(0.0, 1.0))
    assert dear.draft_limit(1) == 0
    assert dear.limit_of(SpeculationStats(), 0, verifying=NO_DRAFT, has_prediction=True) == 0


def test_what_a_grammar_forces_is_drafted_in_a_pause_and_for_a_sequence_that_lost_by_drafts():
    control, unlucky = AdaptiveLength(8), SpeculationStats()
    for _ in range(NUM_FIRST_STEPS + AVERAGED_OVER + 1):
        control.observe(record(num_accepted=0, draft_seconds=0.001))
        unlucky.record(FOUR, ())
    limit = control.draft_limit(1)
    assert (limit, control.limit_of(unlucky, 8, verifying=NO_DRAFT), control.limit_of_forced(limit)) == (0, 0, 8)
    dear = AdaptiveLength(8, costs=straight(0.0, 1.0))
    assert dear.limit_of_forced(dear.draft_limit(1)) == 0, "no row can pay"
    assert FixedLength(num_speculative_tokens=3).limit_of_forced(2) == 2


def test_no_rows_are_tried_beside_prompts_as_such_a_step_teaches_nothing():
    control = AdaptiveLength(8, costs=straight(1.0, 0.001))
    for _ in range(100):
        control.observe(record(num_accepted=4, draft_seconds=0.0))

    def chosen(num_rows):
        (length,) = control.choose([draft_of([0.9] * 4)], num_rows=num_rows, num_sequences=1, num_context_tokens=100)
        return length

    assert chosen(50) == 4
    assert chosen(1) == 0, "a plain step was never seen"


def test_each_sequence_is_drafted_for_by_what_its_own_drafts_have_come_to():
    class ThreeDrafts(FixedLength):
        def limit_of(self, sequence, limit, *, verifying, has_prediction):
            return limit if sequence.num_drafts + bool(verifying.token_ids) < 3 else 0

    engine = simulated_engine(rates=(0.5,), num_blocks=10000, max_model_len=512)
    engine = Engine(replace(engine.parts, control=ThreeDrafts(num_speculative_tokens=2)), clock=engine._clock)
    for output in run(engine, [[1, 2, 3]] * 4, SAMPLING):
        assert output.speculation.num_drafts == 3
        assert output.speculation.num_steps > 3


def test_the_report_says_what_the_choice_was_worth():
    control = AdaptiveLength(8)
    assert control.choices().report() is None
    load = {"rates": (0.9,), "batch_size": 1, "row_seconds": 0.0004}
    measured = simulate(control, **load, learns=True)
    plain = simulate(FixedLength(num_speculative_tokens=0), **load)
    report = control.choices().report()
    assert report.tokens_per_second == pytest.approx(measured, rel=0.1)
    assert report.plain_tokens_per_second == pytest.approx(plain, rel=0.15)
    assert report.regret < 0.05


def write_steps(control, *, chances, num_stood, num_steps=400):
    """Steps of one sequence whose drafts promise so much, and of which so many nodes stand where they are verified."""
    for _ in range(num_steps):
        draft = draft_of(chances)
        (length,) = control.choose([draft], num_rows=1, num_sequences=1, num_context_tokens=100)
        control.observe(
            StepRecord(
                num_rows=1 + length,
                num_context_tokens=100,
                num_asked=1,
                verified=[(draft.first(length), tuple(range(min(length, num_stood))))],
                times=StepTimes(forward=0.005 + 0.0005 * length, draft=0.0001, num_steps=1),
            )
        )
    return control.choices().report()


def test_what_interrupts_a_step_is_held_against_no_draft():
    control, nothing = AdaptiveLength(8), record(num_accepted=0, draft_seconds=0.0, num_drafted=0)
    for number in range(2000):
        control.choose([draft_of([0.02])], num_rows=1, num_sequences=1, num_context_tokens=100)
        control.observe(replace(nothing, times=StepTimes(forward=0.1 if number % 50 == 9 else 0.005, num_steps=1)))
    report = control.choices().report()
    assert report.tokens_per_second == pytest.approx(report.plain_tokens_per_second, rel=0.02)


def test_drafts_that_never_stand_are_regretted():
    report = write_steps(AdaptiveLength(8), chances=[0.8, 0.7, 0.6, 0.5], num_stood=0)
    assert report.best_static_length == 0
    assert report.regret > 0.2
    assert report.tokens_per_second < report.plain_tokens_per_second


def test_the_fixed_length_in_hindsight_is_that_of_the_nodes_that_stood():
    report = write_steps(AdaptiveLength(8), chances=[0.8, 0.7, 0.6, 0.5, 0.4, 0.3], num_stood=2)
    assert report.best_static_length == 2
    assert report.regret > 0.05


def test_promises_that_are_kept_leave_nothing_to_regret():
    report = write_steps(AdaptiveLength(8), chances=[1.0, 1.0, 1.0], num_stood=3)
    assert report.best_static_length == 3
    assert report.regret == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("seconds", [60.0, 1e9, float("inf"), float("nan"), -5.0])
@pytest.mark.parametrize("phase", ["draft", "forward"])
@pytest.mark.parametrize("num_before", [0, 1, 100])
def test_a_clock_that_jumps_changes_no_choice_for_long(seconds, phase, num_before):
    control, calm = AdaptiveLength(16), AdaptiveLength(16)
    drafts = [draft_of([0.5, 0.3, 0.2, 0.1])] * 8
    step = record(num_accepted=1, draft_seconds=0.0002)
    for _ in range(num_before):
        control.observe(step)
        calm.observe(step)
    control.observe(replace(step, times=replace(step.times, **{phase: seconds})))
    for _ in range(60):
        control.observe(step)
        calm.observe(step)
    where = {"num_rows": 8, "num_sequences": 8, "num_context_tokens": 100}
    assert abs(sum(control.choose(drafts, **where)) - sum(calm.choose(drafts, **where))) <= 1
    assert control.draft_limit(8) == 16
    for _ in range(16):
        control.choose(drafts, **where)
    assert control.choices().report().tokens_per_second > 50


def choose_unknown(control, *, limit=8):
    """How much is verified of a draft that is not known when its step is planned; at times more is, to see what that costs."""
    (length,) = control.choose([unknown_draft(limit)], num_rows=1, num_sequences=1, num_context_tokens=100)
    return length


def observe_late(control, draft, token_ids, *, num_verified, limit=8):
    num_stood = min(num_verified, len(token_ids) - 1)
    control.observe(
        StepRecord(
            num_rows=1 + num_verified,
            num_context_tokens=100,
            num_asked=1,
            verified=[(unknown_draft(num_verified), tuple(range(num_stood)))],
            times=StepTimes(forward=0.005 + 0.0002 * num_verified, num_steps=1),
            late=[LateDraft(draft, limit, token_ids)],
        )
    )


def test_drafts_that_are_known_too_late_are_judged_by_the_text_verified_or_not():
    control = AdaptiveLength(8)
    for _ in range(600):
        observe_late(control, Draft((1, 2, 3)), [7], num_verified=0)
    assert min(choose_unknown(control) for _ in range(2)) == 0
    for _ in range(2000):  # the text says that they would have stood, so that in time they are verified
        num_verified = choose_unknown(control)
        observe_late(control, Draft((1, 2, 3)), [1, 2, 3, 4][: num_verified + 1], num_verified=num_verified)
    assert min(choose_unknown(control) for _ in range(2)) == 3, "a fourth token was never drafted"


def test_where_the_executor_found_nothing_to_draft_rows_are_not_spent():
    control = AdaptiveLength(8)
    assert choose_unknown(control) > 0
    for _ in range(200):
        observe_late(control, NO_DRAFT, [7], num_verified=choose_unknown(control))
    assert min(choose_unknown(control) for _ in range(2)) == 0


def test_costs_are_learnt_of_steps_whose_drafts_were_shorter_than_planned():
    control = AdaptiveLength(8)
    for _ in range(20):
        observe_late(control, Draft((1,)), [1, 2], num_verified=4)
    assert control.costs.num_steps == 20 - NUM_FIRST_STEPS


@given(st.lists(chances, min_size=1, max_size=4), st.integers(1, 12))
def test_a_step_with_drafts_fits_into_the_largest_graph_by_the_likeliest_nodes(survivals, most_rows):
    control = AdaptiveLength(16, costs=straight(1.0, 0.0), most_rows=most_rows)
    num_rows = len(survivals)
    lengths = control.choose(
        [draft_of(one) for one in survivals], num_rows=num_rows, num_sequences=num_rows, num_context_tokens=0
    )
    if num_rows > most_rows:  # it does not fit without drafts either
        return
    assert num_rows + sum(lengths) <= most_rows
    left = [chance for one, length in zip(survivals, lengths, strict=True) for chance in one[length:] if chance > 1e-9]
    verified = [chance for one, length in zip(survivals, lengths, strict=True) for chance in one[:length]]
    if num_rows + sum(lengths) < most_rows:
        assert not left
    assert not left or not verified or max(left) <= min(verified)
