"""What stands after a step: tokens, text, KV, and nothing past the end."""

from __future__ import annotations

import pytest

from forerun.core.draft import Draft
from forerun.core.outputs import Origin
from forerun.core.step import PlannedSequence, SequenceResult, SequenceSpec
from forerun.engine.commit import commit
from forerun.engine.text import CompletionText
from forerun.kv.block_pool import BlockPool
from tests.engine.generations import generation_of

CHAIN = Draft((10, 11, 12))
TREE = Draft((10, 20, 21, 30, 22), (-1, -1, 1, 0, 2))  # 10 -> 30, and 20 -> 21 -> 22
NEXT = Draft((60,))


class Letters:
    """Token i is the i-th lower-case letter, from 10 on; below that a capital one."""

    def push(self, token_id):
        return chr(ord("a") + token_id - 10) if token_id >= 10 else chr(ord("A") + token_id)


def stopping_at(*stop, include_stop=False):
    return CompletionText(Letters(), stop=stop, include_stop=include_stop)


def commit_result(result, *, draft=CHAIN, reaches_end=True, **settings):
    """Commit one step of a sequence of five prompt tokens whose whole prompt was computed in it."""
    generation = generation_of(BlockPool(8), range(5), draft=draft, **{"max_tokens": 50} | settings)
    generation.table.allocate(5 + len(draft))
    planned = PlannedSequence(seq_id=0, start=0, num_tail=5, num_draft=len(draft), reaches_end=reaches_end)
    return commit(generation, planned, result, token_text=str), generation


def judged(accepted, token_id, *, draft=CHAIN):
    """What an executor reports of a sequence whose draft was judged."""
    return SequenceResult(
        accepted=accepted, token_ids=[*(draft.token_ids[node] for node in accepted), token_id], draft=NEXT
    )


def test_an_accepted_chain_and_the_bonus_token_stand():
    done, generation = commit_result(judged((0, 1, 2), 7))
    assert generation.output_ids == done.token_ids == [10, 11, 12, 7]
    assert done.origins == [Origin.ACCEPTED] * 3 + [Origin.BONUS]
    assert generation.table.num_computed == 8


def test_rejected_drafts_leave_no_kv_and_no_block_behind():
    done, generation = commit_result(judged((), 7))
    assert (done.token_ids, done.origins) == ([7], [Origin.RECOVERED])
    assert generation.table.num_computed == 5
    assert len(generation.table.block_ids) == 2


def test_blocks_that_a_later_step_in_flight_may_write_are_kept():
    generation = generation_of(BlockPool(8), range(5), draft=CHAIN, max_tokens=50)
    generation.table.allocate(16)
    planned = PlannedSequence(seq_id=0, start=0, num_tail=5, num_draft=3, reaches_end=True)
    generation.in_flight = PlannedSequence(seq_id=0, start=5, num_tail=1, reaches_end=True, is_pending=True, end=14)
    commit(generation, planned, judged((), 7), token_text=str)
    assert generation.table.num_computed == 5
    assert len(generation.table.block_ids) == 4


def test_a_sequence_preempted_before_its_result_came_keeps_its_tokens_and_gets_no_block():
    generation = generation_of(BlockPool(8), range(5), draft=CHAIN, max_tokens=50)
    planned = PlannedSequence(seq_id=0, start=0, num_tail=5, num_draft=3, reaches_end=True)
    done = commit(generation, planned, judged((0,), 7), token_text=str)
    assert generation.output_ids == done.token_ids == [10, 7]
    assert generation.table.num_blocks == generation.table.num_computed == 0


def test_the_executors_next_draft_takes_the_place_of_the_one_that_was_verified():
    assert commit_result(judged((0,), 7))[1].draft is NEXT


def test_an_empty_draft_gives_a_bonus_token():
    done, _ = commit_result(judged((), 7), draft=Draft())
    assert done.origins == [Origin.BONUS]


def test_a_path_that_ends_above_a_leaf_ends_with_a_recovered_token():
    for accepted, own in (((1, 2), Origin.RECOVERED), ((0, 3), Origin.BONUS)):
        done, _ = commit_result(judged(accepted, 7, draft=TREE), draft=TREE)
        assert done.origins[-1] is own


@pytest.mark.parametrize(
    ("settings", "kept_ids", "reason"),
    [
        ({"stop_tokens": {11: 11}}, [10, 11], ("stop", 11)),
        ({"stop_tokens": {11: None}}, [10, 11], ("stop", None)),
        ({"max_tokens": 2}, [10, 11], ("length", None)),
        ({"max_tokens": 1}, [10], ("length", None)),
        ({"stop_tokens": {11: 11}, "max_tokens": 2}, [10, 11], ("stop", 11)),
        ({"stop_tokens": {10: 10, 12: 12}, "min_tokens": 2}, [10, 11, 12], ("stop", 12)),
        ({"text": stopping_at("ab")}, [10, 11], ("stop", "ab")),
    ],
)
def test_what_follows_the_end_inside_an_accepted_run_is_cut(settings, kept_ids, reason):
    done, generation = commit_result(judged((0, 1, 2), 7), **settings)
    assert generation.output_ids == done.token_ids == kept_ids
    assert len(done.origins) == len(kept_ids)
    assert (generation.finish_reason, generation.stop_reason) == reason
    assert generation.table.num_computed == 5 + len(kept_ids)


@pytest.mark.parametrize("accepted", [(), (0, 1), (0, 1, 2)])
def test_tokens_that_cannot_end_a_text_are_appended_at_once_as_they_are_one_by_one(accepted, monkeypatch):
    found = []
    for may_end in (False, True):
        monkeypatch.setattr(SequenceSpec, "may_end", lambda *_, quick_look=may_end: quick_look)
        done, generation = commit_result(judged(accepted, 7), stop_tokens={50: 50})
        found.append((done.token_ids, done.origins, generation.output_ids, generation.finish_reason, generation.stats))
    assert found[0] == found[1]
    assert len(found[0][0]) == 1 + len(accepted)


def test_drafts_are_measured_by_what_was_accepted_before_the_cut():
    done, generation = commit_result(judged((0, 1, 2), 7), max_tokens=2)
    assert done.accepted == (0, 1, 2)
    assert generation.stats.reached_per_position == generation.stats.accepted_per_position == [1, 1, 1]


@pytest.mark.parametrize(("include", "text"), [(False, ""), (True, "ab")])
def test_a_stop_string_is_shown_only_on_request(include, text):
    _, generation = commit_result(judged((0, 1, 2), 7), text=stopping_at("ab", include_stop=include))
    assert generation.text.text == text


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_tokens_text_is_shown_only_on_request(include, text):
    _, generation = commit_result(
        judged((0, 1, 2), 7), text=stopping_at(), stop_tokens={11: 11}, include_stop_str_in_output=include
    )
    assert generation.text.text == text


def test_a_stop_string_before_min_tokens_is_text():
    _, generation = commit_result(judged((0, 1, 2), 7), text=stopping_at("b", "c"), min_tokens=3)
    assert (generation.text.text, generation.stop_reason) == ("ab", "c")


def test_a_sequence_that_could_not_be_judged_ends_and_gains_nothing():
    done, generation = commit_result(SequenceResult(error="boom"))
    assert (generation.finish_reason, generation.stop_reason) == ("error", "boom")
    assert done is None
    assert generation.output_ids == []
    assert generation.table.num_computed == 0


def test_a_prompt_chunk_keeps_its_kv_and_decides_nothing():
    done, generation = commit_result(SequenceResult(), reaches_end=False)
    assert (done, generation.output_ids, generation.table.num_computed) == (None, [], 5)
    assert generation.draft is CHAIN, "it is verified when the prompt's end is computed"


def test_an_undecided_sequence_computes_its_last_token_again_with_the_same_draft():
    done, generation = commit_result(SequenceResult())
    assert (done, generation.output_ids, generation.table.num_computed) == (None, [], 4)
    assert (generation.draft, generation.finish_reason) == (CHAIN, None)


def test_a_drafter_that_bears_the_name_of_predictions_harms_no_text_without_one():
    draft = Draft((10, 11), source="prediction")
    done, generation = commit_result(judged((0,), 7, draft=draft), draft=draft)
    assert done.token_ids == [10, 7]
    assert generation.prediction is None
