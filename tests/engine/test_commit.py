"""What stands after a verdict: tokens, text, KV, and nothing past the end."""

from __future__ import annotations

import pytest
import torch

from forerun.core.batch import LayerKVSpec
from forerun.core.draft import Draft
from forerun.core.verdict import Origin, Verdict
from forerun.engine.commit import commit_step
from forerun.engine.generation import Work
from forerun.engine.text import CompletionText
from forerun.kv.block_pool import BlockPool
from forerun.kv.cache import KVCache
from tests.engine.generations import BLOCK, generation_of

CHAIN = Draft((10, 11, 12))
TREE = Draft((10, 20, 21, 30, 22), (-1, -1, 1, 0, 2))  # 10 -> 30, and 20 -> 21 -> 22


class Letters:
    """Token i is the i-th lower-case letter, from 10 on; below that a capital one."""

    def push(self, token_id):
        return chr(ord("a") + token_id - 10) if token_id >= 10 else chr(ord("A") + token_id)


def stopping_at(*stop, include_stop=False):
    return CompletionText(Letters(), stop=stop, include_stop=include_stop)


def commit(verdict, *, draft=CHAIN, first_row=0, num_tail=5, **settings):
    """Commit one step of a sequence of five prompt tokens, of which it computed `num_tail`."""
    pool = BlockPool(8)
    cache = KVCache(
        [LayerKVSpec(num_kv_heads=1, key_dim=1, value_dim=1)],
        num_blocks=8,
        block_size=BLOCK,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    generation = generation_of(pool, range(5), **{"max_tokens": 50} | settings)
    generation.slot.allocate(num_tail + len(draft))
    places = generation.slot.slots(0, num_tail + len(draft))
    cache.layers[0].key[places, 0, 0] = torch.arange(float(len(places)))  # row i wrote i
    (done,) = commit_step([Work(generation, 0, num_tail, draft)], [first_row], [verdict], cache)
    kept = cache.layers[0].key[generation.slot.slots(0, generation.slot.num_computed), 0, 0].tolist()
    return done, generation, kept


def test_an_accepted_chain_and_the_bonus_token_stand():
    done, generation, kept = commit(Verdict((0, 1, 2), 7))
    assert generation.sequence.output_ids == done.token_ids == [10, 11, 12, 7]
    assert done.origins == [Origin.ACCEPTED] * 3 + [Origin.BONUS]
    assert kept == [0, 1, 2, 3, 4, 5, 6, 7]


def test_rejected_drafts_leave_no_kv_and_no_block_behind():
    done, generation, kept = commit(Verdict((), 7))
    assert (done.token_ids, done.origins) == ([7], [Origin.RECOVERED])
    assert kept == [0, 1, 2, 3, 4]
    assert len(generation.slot.block_ids) == 2


def test_an_empty_draft_gives_a_bonus_token():
    done, _, _ = commit(Verdict((), 7), draft=Draft())
    assert done.origins == [Origin.BONUS]


def test_the_accepted_path_of_a_tree_becomes_contiguous():
    done, _, kept = commit(Verdict((1, 2, 4), 7), draft=TREE)
    assert done.token_ids == [20, 21, 22, 7]
    assert kept == [0, 1, 2, 3, 4, 6, 7, 9]


def test_a_path_that_ends_above_a_leaf_ends_with_a_recovered_token():
    assert commit(Verdict((1, 2), 7), draft=TREE)[0].origins[-1] is Origin.RECOVERED
    assert commit(Verdict((0, 3), 7), draft=TREE)[0].origins[-1] is Origin.BONUS


def test_each_token_names_the_row_that_chose_it():
    assert commit(Verdict((0, 1), 7), first_row=3)[0].logits_rows == [3, 4, 5]
    assert commit(Verdict((1, 2, 4), 7), draft=TREE)[0].logits_rows == [0, 2, 3, 5]


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
    done, generation, kept = commit(Verdict((0, 1, 2), 7), **settings)
    assert generation.sequence.output_ids == done.token_ids == kept_ids
    assert len(done.origins) == len(done.logits_rows) == len(kept_ids)
    assert (generation.finish_reason, generation.stop_reason) == reason
    assert len(kept) == 5 + len(kept_ids)


def test_drafts_are_measured_by_what_was_accepted_before_the_cut():
    done, generation, _ = commit(Verdict((0, 1, 2), 7), max_tokens=2)
    assert done.accepted == (0, 1, 2)
    assert generation.stats.reached_per_position == generation.stats.accepted_per_position == [1, 1, 1]


@pytest.mark.parametrize(("include", "text"), [(False, ""), (True, "ab")])
def test_a_stop_string_is_shown_only_on_request(include, text):
    _, generation, _ = commit(Verdict((0, 1, 2), 7), text=stopping_at("ab", include_stop=include))
    assert generation.text.text == text


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_tokens_text_is_shown_only_on_request(include, text):
    _, generation, _ = commit(
        Verdict((0, 1, 2), 7), text=stopping_at(), stop_tokens={11: 11}, include_stop_str_in_output=include
    )
    assert generation.text.text == text


def test_a_stop_string_before_min_tokens_is_text():
    _, generation, _ = commit(Verdict((0, 1, 2), 7), text=stopping_at("b", "c"), min_tokens=3)
    assert (generation.text.text, generation.stop_reason) == ("ab", "c")


def test_a_sequence_that_could_not_be_judged_ends_and_gains_nothing():
    done, generation, kept = commit(Verdict((), 0, error="boom"))
    assert (generation.finish_reason, generation.stop_reason) == ("error", "boom")
    assert (done.token_ids, done.accepted, kept) == ([], None, [])


def test_a_prompt_chunk_keeps_its_kv_and_decides_nothing():
    done, generation, kept = commit(None, draft=Draft(), num_tail=4)
    assert (kept, done.accepted, generation.sequence.output_ids) == ([0, 1, 2, 3], None, [])


def test_an_undecided_sequence_computes_its_last_token_again():
    done, generation, kept = commit(None)
    assert (kept, done.accepted, generation.sequence.output_ids) == ([0, 1, 2, 3], None, [])
    assert (generation.num_uncomputed, generation.finish_reason) == (1, None)
