"""A drafter that costs time: asked where its tokens outweigh it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from forerun.core.draft import NO_DRAFT, SLACK, Draft
from forerun.drafters.base import DraftRequest
from forerun.drafters.guard import GuardedDrafter
from forerun.drafters.priced import FORGOTTEN_AFTER, Guessed, PricedDrafter, _Pending
from tests.drafters.texts import VOCAB_SIZE, sequence

STEP = 0.010  # seconds


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self):
        return self.now


@dataclass
class Costly:
    """Drafts the token 7 and takes its time."""

    clock: Clock
    seconds: float
    needs: frozenset = frozenset()
    asked: list = field(default_factory=list)

    def start(self, sequence):
        pass

    def stop(self, sequence):
        pass

    def propose(self, context):
        self.clock.now += self.seconds
        self.asked.append([(request.sequence.seq_id, request.max_tokens) for request in context.requests])
        return [Draft((7,) * request.max_tokens) for request in context.requests]


def make(*, seconds):
    clock = Clock()
    drafter = Costly(clock, seconds)
    return PricedDrafter("model", GuardedDrafter(drafter, vocab_size=VOCAB_SIZE), max_depth=4, clock=clock), drafter


def free_draft(token_ids=(), chance=0.9):
    """A chain for nothing; each of its tokens is said to stand with this chance."""
    return Draft(token_ids, survival=tuple(chance for _ in token_ids))


def write(priced, drafter, sequences, *, tokens, num_steps, free=NO_DRAFT):
    """Steps in which each sequence gets `tokens`; the drafts."""
    drafts = []
    for _ in range(num_steps):
        requests = [DraftRequest(one, 8, 8) for one in sequences]
        drafts = priced.propose(requests, [free] * len(sequences), {})
        drafter.clock.now += STEP
        for one in sequences:
            one.output_ids += tokens
    return drafts


def started(priced, count=1):
    sequences = [sequence([1, 2, 3], seq_id=i) for i in range(count)]
    for one in sequences:
        priced.start(one)
    return sequences


def test_an_unknown_drafter_is_tried_and_kept_while_it_is_right():
    priced, drafter = make(seconds=0.001)
    (draft,) = write(priced, drafter, started(priced), tokens=[7, 7, 7], num_steps=60)
    assert len(drafter.asked) == 60
    assert set(draft.token_ids) == {7}


def test_it_is_left_out_when_it_is_wrong_and_tried_again_later():
    priced, drafter = make(seconds=0.004)
    sequences = started(priced)
    drafts = write(priced, drafter, sequences, tokens=[5], num_steps=120)
    assert drafts == [NO_DRAFT]
    num_asked = len(drafter.asked)
    assert num_asked < 100
    write(priced, drafter, sequences, tokens=[5], num_steps=FORGOTTEN_AFTER + 1)
    assert len(drafter.asked) > num_asked


def test_it_is_left_out_where_verifying_costs_as_much_as_its_tokens_bring():
    """One token of three stands: enough for a time of its own that is next to nothing, not for a row of the target's too."""

    def num_asked_of_last_steps(least_chance):
        priced, drafter = make(seconds=0.00001)
        (one,) = started(priced)
        for step in range(FORGOTTEN_AFTER - 1):
            if step == FORGOTTEN_AFTER - 51:
                drafter.asked.clear()
            priced.propose([DraftRequest(one, 8, 8, min_survival=least_chance)], [NO_DRAFT], {})
            drafter.clock.now += STEP
            one.output_ids += [7, 5] if step % 3 == 0 else [5]
        return len(drafter.asked)

    assert num_asked_of_last_steps(0.02) == 50
    assert num_asked_of_last_steps(0.5) == 0


def test_it_is_asked_where_some_of_its_tokens_bring_more_than_their_rows_cost_and_margins_say_which():
    """Half of its tokens stand, and a row costs six tenths of a token: too much for the mean of them, not for the sure ones."""

    def num_asked_of_last_steps(margins):
        clock = Clock()
        drafter = Margined(clock, 0.0001)
        guarded = GuardedDrafter(drafter, vocab_size=VOCAB_SIZE)
        priced = PricedDrafter("model", guarded, max_depth=1, num_runners_up=1, clock=clock)
        (one,) = started(priced)
        for step in range(FORGOTTEN_AFTER - 1):
            if step == FORGOTTEN_AFTER - 51:
                drafter.asked.clear()
            is_right = step % 2 == 0
            drafter.margin = margins[is_right]
            priced.propose([DraftRequest(one, 8, 8, min_survival=0.6 * SLACK)], [NO_DRAFT], {})
            clock.now += STEP
            one.output_ids.append(7 if is_right else 5)
        return len(drafter.asked)

    assert num_asked_of_last_steps(margins=(0.1, 5.0)) == 50
    assert num_asked_of_last_steps(margins=(1.2, 1.2)) == 0


class Margined(Costly):
    """Drafts 7 with a runner-up and a margin."""

    margin = 0.0

    def propose(self, context):
        super().propose(context)
        return [Draft((7, 6), (-1, -1), margins=(self.margin,)) for _ in context.requests]


def test_it_is_left_out_when_it_becomes_slow():
    priced, drafter = make(seconds=0.001)
    sequences = started(priced)
    write(priced, drafter, sequences, tokens=[7, 7, 7], num_steps=50)
    drafter.seconds = 0.5
    num_asked = len(drafter.asked)
    write(priced, drafter, sequences, tokens=[7], num_steps=100)
    assert len(drafter.asked) - num_asked < 30


@pytest.mark.parametrize("stall", [0.1, 0.5, 5.0, 100.0])
@pytest.mark.parametrize("num_before", [0, 1, 2, 50])
def test_one_call_that_is_interrupted_changes_nothing(stall, num_before):
    priced, drafter = make(seconds=0.001)
    sequences = started(priced)
    write(priced, drafter, sequences, tokens=[7, 7, 7], num_steps=num_before)
    drafter.seconds = stall
    write(priced, drafter, sequences, tokens=[7, 7, 7], num_steps=1)
    drafter.seconds = 0.001
    drafter.asked.clear()
    write(priced, drafter, sequences, tokens=[7, 7, 7], num_steps=100)
    assert len(drafter.asked) == 100


def write_sevens(priced, drafter, one, *, num_steps):
    """Steps of a text of nothing but 7: all that is drafted stands; how often the drafter was asked."""
    num_asked = len(drafter.asked)
    for _ in range(num_steps):
        (draft,) = priced.propose([DraftRequest(one, 8, 8)], [NO_DRAFT], {})
        drafter.clock.now += STEP
        one.output_ids += [7] * (1 + len(draft.token_ids))
    return len(drafter.asked) - num_asked


def test_it_comes_back_when_it_is_as_fast_as_it_was():
    priced, drafter = make(seconds=0.001)
    (one,) = started(priced)
    assert write_sevens(priced, drafter, one, num_steps=50) == 50
    drafter.seconds = 0.1  # for four tokens, which ten steps bring as well
    write_sevens(priced, drafter, one, num_steps=100)
    assert write_sevens(priced, drafter, one, num_steps=100) == 0
    drafter.seconds = 0.001
    write_sevens(priced, drafter, one, num_steps=4000)
    assert write_sevens(priced, drafter, one, num_steps=100) == 100


def test_a_slow_drafter_is_tried_again_in_a_hundredth_of_the_time():
    priced, drafter = make(seconds=0.5)
    (one,) = started(priced)
    assert write_sevens(priced, drafter, one, num_steps=100) < 10
    before = drafter.clock.now
    num_asked = write_sevens(priced, drafter, one, num_steps=50_000)
    assert 0 < num_asked * drafter.seconds < 0.02 * (drafter.clock.now - before)


def test_a_first_call_that_sets_things_up_for_long_delays_no_later_trial():
    priced, drafter = make(seconds=100.0)
    (one,) = started(priced)
    write_sevens(priced, drafter, one, num_steps=1)
    drafter.seconds = 0.1
    assert write_sevens(priced, drafter, one, num_steps=100) < 5
    drafter.seconds = 0.001
    write_sevens(priced, drafter, one, num_steps=4000)
    assert write_sevens(priced, drafter, one, num_steps=100) == 100


def test_it_is_not_asked_where_free_drafts_bring_the_same_tokens():
    """Where they are expected to bring nothing it still is."""
    priced, drafter = make(seconds=0.001)
    (one,) = started(priced)
    same = free_draft((7, 7, 7, 7))
    write(priced, drafter, [one], tokens=[7, 7, 7, 7], num_steps=100, free=same)
    drafter.asked.clear()
    write(priced, drafter, [one], tokens=[7, 7, 7, 7], num_steps=20, free=same)
    assert not drafter.asked
    write(priced, drafter, [one], tokens=[7, 7, 7, 7], num_steps=20)
    assert len(drafter.asked) == 20


def test_it_is_asked_where_free_drafts_promise_much_but_other_tokens():
    priced, drafter = make(seconds=0.001)
    sequences = started(priced)
    write(priced, drafter, sequences, tokens=[7, 7, 7], num_steps=60, free=free_draft((5, 5, 5, 5)))
    assert len(drafter.asked) == 60


class Branching(Costly):
    """Drafts 7 and then 9, with the runner-up 8 beside the 7."""

    def propose(self, context):
        super().propose(context)
        self.requests = context.requests
        return [Draft((7, 8, 9), (-1, -1, 0)) for _ in context.requests]


def branching(*, num_runners_up=1):
    clock = Clock()
    drafter = Branching(clock, 0.001)
    guarded = GuardedDrafter(drafter, vocab_size=VOCAB_SIZE)
    return PricedDrafter("model", guarded, max_depth=4, num_runners_up=num_runners_up, clock=clock), drafter


def test_a_chain_with_runners_up_is_asked_for_by_its_depth():
    priced, drafter = branching(num_runners_up=2)
    (draft,) = write(priced, drafter, started(priced), tokens=[7], num_steps=1)
    (request,) = drafter.requests
    assert request.max_tokens == 3 * request.max_depth > 0
    assert draft.first_path() == [[7, 8], [9]]


def gains(expected):
    """Of each depth its own."""
    so_far = [one.gain for one in expected]
    return [one - before for one, before in zip(so_far, [0.0, *so_far], strict=False)]


@pytest.mark.parametrize(("text", "added"), [([7, 9], 2), ([7, 5], 1), ([8, 5], 1), ([5, 9], 0)])
def test_a_runner_up_that_the_text_takes_counts_as_a_token_of_the_chain(text, added):
    priced, _ = branching()
    (one,) = started(priced)
    for _ in range(20):  # so that what is hoped for no longer counts
        priced._added.observe(0.0, [[Guessed(0.5, False)], [Guessed(0.5, False)]], num_known=2)
    before = priced._added.expected(0.0, 0.0)
    one.output_ids.extend(text)
    priced._label(_Pending([[7, 8], [9]], (0.3, 0.3), 2, NO_DRAFT, 0.0, len(one) - len(text)), one)
    after = priced._added.expected(0.0, 0.0)
    assert [now > then for now, then in zip(gains(after), gains(before), strict=True)][:2] == [
        depth < added for depth in range(2)
    ]


@dataclass
class Ending(Costly):
    """Drafts one token and no more, whatever is asked for, which takes a call's time for one pass."""

    least_chances: list = field(default_factory=list)

    def propose(self, context):
        super().propose(context)
        self.least_chances += [request.early_stop.least_chance for request in context.requests]
        return [Draft((7,)) for _ in context.requests]


def test_passes_that_a_chain_does_not_take_cost_nothing():
    clock = Clock()
    drafter = Ending(clock, 0.001)
    priced = PricedDrafter("model", GuardedDrafter(drafter, vocab_size=VOCAB_SIZE), max_depth=4, clock=clock)
    write(priced, drafter, started(priced), tokens=[7, 5], num_steps=400)
    expected = priced._added.expected(0.0, 0.0)
    of_first, *of_others = gains(expected)
    assert of_first > 0.9
    assert expected[0].drafted > 0.9
    assert all(gain < 0.05 for gain in of_others)
    assert all(one.drafted < 0.05 for one in expected[1:])
    assert priced._row_seconds == pytest.approx(
        0.001 / (2 + 1 + 16), rel=0.1
    )  # two tokens to catch up with, one drafted


def test_a_chain_goes_on_while_its_chance_times_what_a_next_token_brings_pays_for_a_pass():
    """17 rows, of which 19 take 0.001 s, are worth so many of the two tokens that a step brings in 0.011 s."""
    clock = Clock()
    drafter = Ending(clock, 0.001)
    priced = PricedDrafter("model", GuardedDrafter(drafter, vocab_size=VOCAB_SIZE), max_depth=4, clock=clock)
    write(priced, drafter, started(priced), tokens=[7, 5], num_steps=200)
    pass_price = (1 + 16) * 0.001 / (2 + 1 + 16) * 2 / 0.011
    assert drafter.least_chances[-1] == pytest.approx(pass_price / priced._chances.mean, rel=0.1)
    assert priced._chances.mean > 0.8  # of the first tokens, which all stand


class Sure(Costly):
    """Drafts one token with a runner-up, then two more where it may, which cost a pass each; margins say how it will go."""

    def propose(self, context):
        self.asked.append([request.max_depth for request in context.requests])
        self.clock.now += self.seconds
        return [Draft((7, 6), (-1, -1), margins=(0.1,)) for _ in context.requests]


def test_chains_whose_margins_are_known_are_asked_for_as_deep_as_they_may_be():
    """What ends them is their margins, so that deep ones are found again when they pay."""
    clock = Clock()
    drafter = Sure(clock, 0.0005)
    guarded = GuardedDrafter(drafter, vocab_size=VOCAB_SIZE)
    priced = PricedDrafter("model", guarded, max_depth=4, num_runners_up=1, clock=clock)
    write(priced, drafter, started(priced), tokens=[7, 5], num_steps=300)
    assert drafter.asked[-1] == [4]
    assert priced._chances.chances[0] > 0.9  # margins of 0.1 mean much here


def test_a_drafter_that_ends_its_chains_is_asked_where_chains_of_full_length_would_not_pay():
    """Each adds a token to a step of two; four passes of 0.004 s would take longer than a step."""
    clock = Clock()
    drafter = Sure(clock, 0.004)
    guarded = GuardedDrafter(drafter, vocab_size=VOCAB_SIZE)
    priced = PricedDrafter("model", guarded, max_depth=4, num_runners_up=1, clock=clock)
    sequences = started(priced)
    write(priced, drafter, sequences, tokens=[7, 5], num_steps=100)
    drafter.asked.clear()
    write(priced, drafter, sequences, tokens=[7, 5], num_steps=20)
    assert len(drafter.asked) == 20


def test_time_is_worth_the_tokens_of_those_sequences_too_that_are_not_drafted_for():
    priced, drafter = make(seconds=0.001)
    one, other = started(priced, 2)
    for _ in range(100):
        priced.propose([DraftRequest(one, 8, 8)], [NO_DRAFT], {})
        drafter.clock.now += STEP
        one.output_ids += [7, 7, 7]
        other.output_ids += [5]
    assert priced._tokens_per_second == pytest.approx(4 / 0.011, rel=0.01)


class Deep(Costly):
    """Drafts three levels of two tokens each, whatever is asked for."""

    def propose(self, context):
        super().propose(context)
        return [Draft((7, 6) * 3, (-1, -1, 0, 0, 2, 2), margins=(5.0, 5.0, 0.1)) for _ in context.requests]


def test_of_a_chain_that_is_cut_the_margins_of_what_is_left_count():
    clock = Clock()
    guarded = GuardedDrafter(Deep(clock, 0.001), vocab_size=VOCAB_SIZE)
    priced = PricedDrafter("model", guarded, max_depth=2, num_runners_up=1, clock=clock)
    before = priced._chances.chance_of(0.1)
    (draft,) = write(priced, guarded.drafter, started(priced), tokens=[7, 7, 7], num_steps=20)
    assert draft.first_path() == [[7, 6]] * 2
    assert priced._chances.chance_of(5.0) > 0.98
    assert priced._chances.chance_of(0.1) == before


def test_answers_that_are_empty_do_not_make_the_drafter_seem_slow():
    clock = Clock()
    drafter = Silent(clock, 0.001)
    priced = PricedDrafter("model", GuardedDrafter(drafter, vocab_size=VOCAB_SIZE), max_depth=4, clock=clock)
    (one,) = started(priced)
    write(priced, drafter, [one], tokens=[7, 7], num_steps=3)
    assert priced._row_seconds < 0.001 / 16
    priced.propose([DraftRequest(one, 8, 8)], [NO_DRAFT], {})  # the text has not grown
    priced.propose([DraftRequest(one, 8, 8)], [NO_DRAFT], {})


class Silent(Costly):
    """Takes its time and drafts nothing."""

    def propose(self, context):
        super().propose(context)
        return [NO_DRAFT for _ in context.requests]


def test_its_drafts_are_as_deep_as_pays():
    priced, drafter = make(seconds=0.003)
    sequences = started(priced)
    write(priced, drafter, sequences, tokens=[7, 5], num_steps=100)  # the first token is right, never the second
    assert {max_tokens for ((_, max_tokens),) in drafter.asked[-10:]} <= {1}


@pytest.mark.parametrize("jump", [-5.0, 1e9, float("nan")])
def test_a_clock_that_jumps_does_no_lasting_harm(jump):
    priced, drafter = make(seconds=0.001)
    sequences = started(priced)
    write(priced, drafter, sequences, tokens=[7, 7, 7], num_steps=30)
    before = drafter.clock.now
    drafter.clock.now += jump
    write(priced, drafter, sequences, tokens=[7, 7, 7], num_steps=1)
    drafter.clock.now = before + 1.0
    drafter.asked.clear()
    write(priced, drafter, sequences, tokens=[7, 7, 7], num_steps=30)
    assert len(drafter.asked) >= 28


def test_a_clock_that_jumps_within_calls_prices_nobody_out():
    priced, drafter = make(seconds=0.001)
    sequences = started(priced)
    write(priced, drafter, sequences, tokens=[7, 7, 7], num_steps=30)
    drafter.seconds = 1e6
    write(priced, drafter, sequences, tokens=[7, 7, 7], num_steps=2)
    drafter.seconds = 0.001
    drafter.asked.clear()
    write(priced, drafter, sequences, tokens=[7, 7, 7], num_steps=30)
    assert len(drafter.asked) >= 28


def test_what_it_kept_of_a_sequence_goes_with_it():
    priced, drafter = make(seconds=0.001)
    sequences = started(priced)
    write(priced, drafter, sequences, tokens=[7], num_steps=3)
    priced.stop(sequences[0])
    assert not priced._pending
    assert not priced._lengths
    assert not priced._num_read


@dataclass
class Reading(Costly):
    """Takes 0.1 ms a row, at most 100 rows of a text in a call, and drafts where it has read all of it; a pass costs 16 rows."""

    num_read: dict = field(default_factory=dict)
    is_broken: bool = False

    def num_unread(self, request):
        return len(request.sequence) - self.num_read.get(request.sequence.seq_id, 0)

    def propose(self, context):
        self.asked.append([request.sequence.seq_id for request in context.requests])
        self.clock.now += 16 * self.seconds
        if self.is_broken:
            raise RuntimeError("not today")
        drafts = []
        for request in context.requests:
            num_rows = min(100, self.num_unread(request))
            self.clock.now += num_rows * self.seconds
            is_done = num_rows == self.num_unread(request)
            self.num_read[request.sequence.seq_id] = len(request.sequence) - self.num_unread(request) + num_rows
            drafts.append(Draft((7,)) if is_done else NO_DRAFT)
        return drafts


def reading(*, num_tokens, **changes):
    """A drafter that reads, and a sequence of that many tokens."""
    drafter = Reading(Clock(), 0.0001, **changes)
    priced = PricedDrafter("model", GuardedDrafter(drafter, vocab_size=VOCAB_SIZE), max_depth=1, clock=drafter.clock)
    one = sequence([1] * num_tokens, seq_id=0)
    priced.start(one)
    return priced, drafter, one


def test_a_text_that_is_read_in_parts_costs_what_its_rows_take():
    priced, drafter, one = reading(num_tokens=1000)
    write(priced, drafter, [one], tokens=[7, 5], num_steps=20)
    assert drafter.num_read[0] >= 1000
    assert priced._row_seconds == pytest.approx(drafter.seconds, rel=0.1)


def test_while_a_text_is_read_its_empty_drafts_say_nothing_of_what_the_drafter_adds():
    priced, drafter, one = reading(num_tokens=1000)
    before = priced._added.expected(0.0, 0.0)
    write(priced, drafter, [one], tokens=[7], num_steps=9)
    assert drafter.num_read[0] < 1000
    assert priced._added.expected(0.0, 0.0) == before
    assert not priced._pending


def test_a_drafter_that_fails_before_it_has_read_a_text_is_left_out_in_the_end():
    priced, drafter, one = reading(num_tokens=1000, is_broken=True)
    write(priced, drafter, [one], tokens=[7], num_steps=120)
    drafter.asked.clear()
    write(priced, drafter, [one], tokens=[7], num_steps=20)
    assert not drafter.asked


@pytest.mark.parametrize("is_known", [True, False])
def test_a_long_text_costs_nothing_where_the_drafter_has_read_it_for_another_one(is_known):
    """A drafter whose tokens stand every other time: worth its passes, but not what it takes to read 40000 tokens."""
    priced, drafter, one = reading(num_tokens=3)
    for _ in range(40):
        write(priced, drafter, [one], tokens=[7, 5], num_steps=1)
        write(priced, drafter, [one], tokens=[5, 5], num_steps=1)
    long = sequence([1] * 40_000, seq_id=1)
    priced.start(long)
    drafter.num_read[1] = 40_000 if is_known else 0
    drafter.asked.clear()
    write(priced, drafter, [one, long], tokens=[7], num_steps=1)
    assert drafter.asked == [[0, 1] if is_known else [0]]


def test_a_long_text_that_comes_back_after_a_preemption_costs_what_it_takes_to_read_it_again():
    priced, drafter, one = reading(num_tokens=3)
    long = sequence([1] * 40_000, seq_id=1)
    priced.start(long)
    drafter.num_read[1] = 40_000
    for _ in range(40):
        write(priced, drafter, [one, long], tokens=[7, 5], num_steps=1)
        write(priced, drafter, [one, long], tokens=[5, 5], num_steps=1)
    assert drafter.asked[-1] == [0, 1]
    write(priced, drafter, [one], tokens=[7], num_steps=1)
    drafter.num_read[1] = 0
    drafter.asked.clear()
    write(priced, drafter, [one, long], tokens=[7], num_steps=1)
    assert drafter.asked == [[0]]
