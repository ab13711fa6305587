"""K by batch size: which configurations give one, and that it is the best K of each size."""

from __future__ import annotations

from forerun.config.speculative_config import resolve_speculative
from forerun.plan.draft_lengths import Speculation, as_schedule, steady_lengths, step_table
from forerun.plan.tuning.batch_schedule import DraftingFigures, with_schedule
from forerun.plan.tuning.candidates import BatchLimits, Candidate
from tests.plan.worlds import LinearStepTimes, speculation

LIMITS = BatchLimits(max_num_seqs=32, max_num_batched_tokens=2048)
STEEP = LinearStepTimes(base=0.004, per_row=0.0005)
LENGTHS = (1, 2, 4)


def candidate(name: str, **config: object) -> Candidate:
    return Candidate(name=name, speculative_config={"method": "ngram", **config} if config else None, limits=LIMITS)


NGRAMS = [candidate(f"ngram-{k}", num_speculative_tokens=k, prompt_lookup_max=5) for k in LENGTHS]
WAY = speculation(0.8, 0.7, 0.6, 0.5)


def figures_of(way: Speculation, length: int) -> DraftingFigures:
    return DraftingFigures(
        tokens_per_step=way.acceptance.expected(length),
        draft_tokens_per_step=way.acceptance.mean_draft_tokens(length),
        drafting_seconds_per_step=0.0,
    )


FIGURES = {f"ngram-{k}": figures_of(WAY, k) for k in LENGTHS}


def scheduled(candidates: list[Candidate], *, most: int = 32, step_times: LinearStepTimes = STEEP) -> Candidate | None:
    return with_schedule(candidates, FIGURES, step_times, max_batch_size=most, context=0.0)


def test_each_batch_size_gets_its_best_length() -> None:
    found = scheduled([NGRAMS[1], candidate("plain"), NGRAMS[0], NGRAMS[2]])
    assert found is not None
    assert found.name == "ngram-2, K by batch size"
    config = dict(found.speculative_config or {})
    schedule = config["num_speculative_tokens_per_batch_size"]
    ks = [k for _, _, k in schedule]
    assert ks == sorted(ks, reverse=True)
    assert ks[0] == config["num_speculative_tokens"] == 4
    assert config["prompt_lookup_max"] == 5
    # as the planner's own table has it, among the lengths that were simulated
    table = step_table(STEEP, WAY, max_batch_size=32, context=0.0)
    costs = table.seconds_per_token[:, [0, *LENGTHS]]
    for first, last, k in schedule:
        for size in range(first, last + 1):
            assert costs[size - 1, [0, *LENGTHS].index(k)] <= costs[size - 1].min() / 0.97
    assert schedule[-1][1] == 32
    assert as_schedule(steady_lengths(table))  # the planner has all lengths to choose from
    assert resolve_speculative(config).schedule == tuple(map(tuple, schedule))


def test_drafting_that_takes_time_is_counted() -> None:
    slow = {
        name: DraftingFigures(
            tokens_per_step=one.tokens_per_step,
            draft_tokens_per_step=one.draft_tokens_per_step,
            drafting_seconds_per_step=0.01,
        )
        for name, one in FIGURES.items()
    }
    assert with_schedule(NGRAMS, slow, STEEP, max_batch_size=32, context=0.0) is None  # then nothing pays at any size


def test_auto_ahead_of_it_does_not_matter() -> None:
    auto = Candidate(name="auto", speculative_config={"method": "auto"}, limits=LIMITS)
    assert scheduled([auto, *NGRAMS]) == scheduled(NGRAMS)


def test_where_there_is_nothing_to_choose_there_is_no_schedule() -> None:
    adaptive = candidate("adaptive", num_speculative_tokens=4, enable_adaptive_verification=True)
    assert scheduled([candidate("plain"), *NGRAMS]) is None  # nothing drafts better
    assert scheduled([adaptive, *NGRAMS]) is None  # it chooses for itself
    assert scheduled(NGRAMS[:1]) is None  # one length
    assert scheduled(NGRAMS, most=1) is None  # one sequence at a time
    assert scheduled(NGRAMS, step_times=LinearStepTimes(per_row=0.0)) is None  # rows cost nothing: 4 for all
