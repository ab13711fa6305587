"""Step times: what was put in comes out, more never takes less, and a planned step is counted as it is measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.step import PlannedSequence, StepPlan, lay_out
from forerun.errors import ConfigError
from forerun.plan.step_times import DraftingCost, DraftingSample, StepSample, StepTimeModel
from tests.plan.profiles import SHAPES, WEIGHTS, samples_of

TRUE = StepTimeModel(WEIGHTS)


def test_a_fit_finds_the_times_of_the_model_that_made_the_samples() -> None:
    found = StepTimeModel.fit(samples_of(TRUE))
    for shape in SHAPES:
        assert found.seconds(**shape) == pytest.approx(TRUE.seconds(**shape), rel=0.03)
    assert found.error is not None
    assert found.error.median < 0.01


def test_noise_of_five_percent_leaves_errors_of_two() -> None:
    found = StepTimeModel.fit(samples_of(TRUE, noise=0.05, repeats=12))
    errors = [abs(found.seconds(**shape) / TRUE.seconds(**shape) - 1.0) for shape in SHAPES]
    assert sum(errors) / len(errors) < 0.02


def test_a_step_that_another_program_interrupted_moves_a_fit_little() -> None:
    samples = samples_of(TRUE, repeats=10)
    slow = StepSample(num_rows=1, num_sequences=1, num_context_tokens=128, seconds=5.0)
    found = StepTimeModel.fit([*samples, slow])
    assert found.seconds(num_rows=1, num_sequences=1, num_context_tokens=128) == pytest.approx(
        TRUE.seconds(num_rows=1, num_sequences=1, num_context_tokens=128), rel=0.15
    )


@given(st.lists(st.floats(1e-4, 1e-1), min_size=len(SHAPES), max_size=len(SHAPES)))
def test_times_that_are_nothing_but_noise_give_a_model_whose_steps_take_time(seconds: list[float]) -> None:
    samples = [StepSample(**shape, seconds=taken) for shape, taken in zip(SHAPES, seconds, strict=True)]
    found = StepTimeModel.fit(samples)
    assert all(found.seconds(**shape) > 0.0 for shape in SHAPES)


@given(
    st.fixed_dictionaries(
        {
            name: st.integers(0, most)
            for name, most in {
                "num_rows": 3000,
                "num_sequences": 256,
                "num_context_tokens": 10**6,
                "num_prompt_rows": 4096,
                "num_prompt_context": 8192,
            }.items()
        }
    ),
    st.sampled_from(["num_rows", "num_sequences", "num_context_tokens", "num_prompt_rows", "num_prompt_context"]),
    st.integers(1, 500),
)
def test_more_of_anything_never_takes_less(shape: dict[str, int], name: str, more: int) -> None:
    model = StepTimeModel.fit(samples_of(TRUE, noise=0.1))
    assert model.seconds(**shape | {name: shape[name] + more}) >= model.seconds(**shape) > 0.0


@given(st.lists(st.floats(1e-4, 1.0), min_size=len(SHAPES), max_size=len(SHAPES)))
def test_any_times_give_a_model_that_rises_from_above_zero(seconds: list[float]) -> None:
    samples = [StepSample(**shape, seconds=taken) for shape, taken in zip(SHAPES, seconds, strict=True)]
    model = StepTimeModel.fit(samples)
    times = [model.seconds(num_rows=rows, num_sequences=1, num_context_tokens=1) for rows in range(1, 400, 7)]
    assert times[0] > 0.0
    assert times == sorted(times)


def _plan(sequences: list[PlannedSequence], drafts: list[Draft]) -> StepPlan:
    tails = [[0] * one.num_tail for one in sequences]
    return StepPlan(sequences=sequences, rows=lay_out(sequences, tails, drafts, block_size=16), block_size=16)


def test_a_planned_step_counts_decoding_sequences_drafts_and_prompts_apart() -> None:
    import numpy as np

    blocks = np.arange(100, dtype=np.int32)
    decoding = PlannedSequence(seq_id=1, start=100, num_tail=1, reaches_end=True, num_draft=3, blocks=blocks)
    plain = PlannedSequence(seq_id=2, start=50, num_tail=1, reaches_end=True, blocks=blocks)
    prompt = PlannedSequence(seq_id=3, start=32, num_tail=64, reaches_end=False, blocks=blocks)
    plan = _plan([decoding, plain, prompt], [Draft((1, 2, 3)), NO_DRAFT, NO_DRAFT])
    assert TRUE.of_plan(plan) == pytest.approx(
        TRUE.seconds(num_rows=5, num_sequences=2, num_context_tokens=150, num_prompt_rows=64, num_prompt_context=32)
    )


def test_a_prompt_in_chunks_takes_a_step_for_each_and_cached_tokens_take_none() -> None:
    whole = TRUE.ttft_seconds(1000)
    assert TRUE.ttft_seconds(1000, max_num_batched_tokens=500) == pytest.approx(
        TRUE.ttft_seconds(500) + TRUE.ttft_seconds(1000, cached=500)
    )
    assert TRUE.ttft_seconds(1000, cached=992) < TRUE.ttft_seconds(1000, cached=500) < whole
    assert TRUE.ttft_seconds(1000, cached=1000) == TRUE.ttft_seconds(1000, cached=999), "the last one is computed"


def test_a_slower_machine_stretches_all_steps_alike() -> None:
    slow = TRUE.scaled(memory=1.5, arithmetic=1.5)
    for shape in SHAPES:
        assert slow.seconds(**shape) == pytest.approx(1.5 * TRUE.seconds(**shape))


def test_a_slower_memory_stretches_what_is_read_once_and_slower_arithmetic_the_rest() -> None:
    memory, arithmetic = TRUE.scaled(memory=1.5), TRUE.scaled(arithmetic=1.5)
    for shape in SHAPES:
        usual = TRUE.seconds(**shape)
        more = memory.seconds(**shape) - usual, arithmetic.seconds(**shape) - usual
        assert min(more) > 0
        assert sum(more) == pytest.approx(0.5 * usual)
    one = {"num_rows": 1, "num_sequences": 1, "num_context_tokens": 100}
    assert memory.seconds(**one) / TRUE.seconds(**one) > 1.4
    with pytest.raises(ConfigError, match="got memory=0"):
        TRUE.scaled(memory=0.0)


def test_a_model_comes_back_from_json() -> None:
    found = StepTimeModel.fit(samples_of(TRUE))
    assert StepTimeModel.from_json(found.to_json()) == found


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="sample 1 took"):
        StepTimeModel.fit(
            [samples_of(TRUE)[0], StepSample(num_rows=1, num_sequences=1, num_context_tokens=1, seconds=seconds)]
        )


def test_one_kind_of_step_is_too_few_and_the_error_says_what_to_add() -> None:
    one = StepSample(num_rows=1, num_sequences=1, num_context_tokens=1, seconds=0.1)
    with pytest.raises(ConfigError, match="different numbers of sequences or of draft tokens"):
        StepTimeModel.fit([one] * 20)


def test_what_is_missing_is_said() -> None:
    """Without prompts their cost would be a guess, which every time to first token is made of."""
    decoding = [one for one in samples_of(TRUE) if not one.num_prompt_rows]
    prompts = [one for one in samples_of(TRUE) if one.num_prompt_rows]
    with pytest.raises(ConfigError, match=r"missing are steps that read a prompt \(got none\): measure more"):
        StepTimeModel.fit(decoding)
    with pytest.raises(ConfigError, match=r"missing are steps without prompts, .* \(got 0\): measure more"):
        StepTimeModel.fit(prompts)
    with pytest.raises(ConfigError, match=r"\(got 1\), and steps that read a prompt"):
        StepTimeModel.fit(decoding[:1])


@pytest.mark.parametrize(
    "broken",
    [
        {"version": 2},
        {"version": True},
        {"weights": [1.0]},
        {"weights": [math.nan] * 11},
        {"measured": 3},
        {"measured": {"rows": None, "sequences": 1, "context_tokens": 1, "prompt_rows": 1}},
        {"measured": {"rows": 1, "sequences": [1], "context_tokens": 1, "prompt_rows": 1}},
    ],
)
def test_a_damaged_record_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="profile again"):
        StepTimeModel.from_json(TRUE.to_json() | broken)


def test_drafting_cost_is_the_plane_through_what_was_measured() -> None:
    sizes = [(1, 1), (1, 4), (4, 4), (4, 20), (16, 30)]
    true = DraftingCost(seconds_per_step=1e-3, seconds_per_sequence=5e-4, seconds_per_draft_token=2e-4)
    cost = DraftingCost.fit([DraftingSample(*size, true.seconds(*size)) for size in sizes])
    assert cost.to_json() == pytest.approx(true.to_json())
    assert cost.seconds(2, 10) == pytest.approx(4e-3)


SAMPLES = st.builds(DraftingSample, st.integers(1, 32), st.integers(0, 50), st.floats(-1.0, 1.0))


@given(st.lists(SAMPLES, min_size=1))
def test_drafting_cost_is_never_negative_and_right_on_average(samples: list[DraftingSample]) -> None:
    cost, total = DraftingCost.fit(samples), sum(one.seconds for one in samples)
    predicted = sum(cost.seconds(one.num_sequences, one.num_draft_tokens) for one in samples)
    assert predicted == pytest.approx(max(0.0, total), abs=1e-9)
    assert DraftingCost.from_json(cost.to_json()) == cost


def test_noise_that_saves_time_is_no_part_of_a_cost() -> None:
    # what falls with the tokens cannot be told by them
    samples = [DraftingSample(1, tokens, 1e-3 - 1e-5 * tokens) for tokens in range(10)]
    cost = DraftingCost.fit(samples)
    assert cost.seconds_per_draft_token == 0.0
    assert cost.seconds(1, 5) == pytest.approx(1e-3 - 4.5e-5)


def test_drafting_that_was_not_measured_or_is_negative_is_refused() -> None:
    with pytest.raises(ConfigError, match="no step drafted"):
        DraftingCost.fit([])
    with pytest.raises(ConfigError, match="at least 0"):
        DraftingCost(seconds_per_step=-1.0)
