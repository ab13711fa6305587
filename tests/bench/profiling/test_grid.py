"""Grids: what an engine has no room for is left out, or refused where too little would be left."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from forerun.bench.profiling.grid import GRIDS, MOST_ROWS, ProfileGrid
from forerun.errors import ConfigError
from forerun.plan.step_times import StepTimeModel
from tests.plan.profiles import WEIGHTS

ROOM = {"max_model_len": 4096, "max_num_seqs": 64, "num_slots": 10**6}


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_every_grid_measures_plain_steps_and_fits_an_engine_of_usual_size(grid: ProfileGrid) -> None:
    assert 0 in grid.draft_lengths
    assert grid.within(**ROOM) == grid
    for cell in grid.cells():
        lengths = grid.lengths_for(cell.num_sequences)
        assert lengths[-1] == 0
        assert all(cell.num_sequences * (length + 1) <= MOST_ROWS for length in lengths if length)


def test_grids_come_from_the_quickest_to_the_longest() -> None:
    times = StepTimeModel(WEIGHTS)
    seconds = [grid.seconds_of_rounds(times) for grid in GRIDS.values()]
    assert all(before < after for before, after in pairwise(seconds))


def test_a_drafter_with_a_model_is_estimated_at_a_step_for_each_place_of_eight_texts() -> None:
    grid, times = GRIDS["usual"], StepTimeModel(WEIGHTS)
    free, computed = (
        grid.seconds_of_texts(times, num_kinds=2, num_configs=3, num_with_model=count) for count in (0, 1)
    )
    assert computed - free > grid.max_tokens * times.seconds(num_rows=8, num_sequences=8, num_context_tokens=2048)


def test_a_smaller_engine_leaves_out_what_it_has_no_room_for() -> None:
    grid = GRIDS["usual"].within(max_model_len=1024, max_num_seqs=16, num_slots=20_000)
    assert max(grid.contexts) < 1024
    assert max(grid.input_lengths) < 1024
    assert max(grid.num_sequences) <= 16


def test_what_a_smaller_engine_leaves_out_is_said() -> None:
    grid = replace(GRIDS["quick"], num_sequences=(1, 4, 16, 128), contexts=(128, 1024))
    assert grid.left_out(grid.within(**ROOM)) == "num_sequences 128"
    assert grid.left_out(grid.within(**ROOM | {"max_model_len": 1024})) == (
        "input_lengths 1024; num_sequences 128; contexts 1024"
    )
    assert not GRIDS["quick"].left_out(GRIDS["quick"].within(**ROOM))


def test_an_engine_without_room_is_refused_with_what_is_short() -> None:
    with pytest.raises(ConfigError, match=r"num_sequences: got .* KV memory for 2000 tokens"):
        GRIDS["usual"].within(max_model_len=4096, max_num_seqs=64, num_slots=2000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_lengths": (16, 16)}, "input_lengths: got 1 different value"),
        ({"num_sequences": (4,)}, "num_sequences: got 1"),
        ({"contexts": ()}, "contexts: got 0 different value.*none"),
        ({"contexts": (0,)}, "contexts: got 0; must be 1"),
        ({"draft_lengths": (-1, 0)}, "draft_lengths: got -1"),
        ({"draft_lengths": (0, 200)}, "draft_lengths: got 200; must be 128 or less"),
        ({"rounds": 0}, "rounds: got 0"),
        ({"max_tokens": 2}, "max_tokens: got 2"),
    ],
)
def test_a_grid_that_gives_no_curve_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(GRIDS["quick"], **changes)  # type: ignore[arg-type]
