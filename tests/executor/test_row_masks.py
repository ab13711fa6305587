"""Each row to be judged gets the mask of its own path; what cannot be known forbids everything there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forerun import SamplingParams
from forerun.core.draft import NO_DRAFT, Draft
from forerun.errors import RequestError
from forerun.executor.row_masks import JudgedSequence, packed, row_masks
from forerun.ops.sampling import SamplingRules

VOCAB_SIZE = 40
TREE = Draft((1, 2, 3, 33), (-1, -1, 0, 2))


class After:
    """A grammar that allows what `follows` says of the text's last token; `fails` are paths without an answer."""

    takes_drafts = True

    def __init__(self, follows, fails=()):
        self.follows = follows
        self.fails = fails

    def allowed(self, output_ids, path=()):
        if tuple(path) in self.fails:
            raise RequestError(f"no answer at {list(path)}")
        mask = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        mask[self.follows[([*output_ids, *path] or [None])[-1]]] = True
        return mask


def judged(draft, *, grammar=None, bad_words_ids=(), output_ids=()):
    rules = SamplingRules(
        SamplingParams(), prompt_ids=[0], vocab_size=VOCAB_SIZE, grammar=grammar, bad_words_ids=bad_words_ids
    )
    return JudgedSequence(rules, list(output_ids), draft)


def allowed_ids(words):
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def test_no_masks_without_rules_that_need_them():
    assert row_masks([judged(TREE), judged(NO_DRAFT)], vocab_size=VOCAB_SIZE) is None


def test_each_node_has_the_mask_of_its_path_and_one_that_cannot_stand_an_empty_one():
    grammar = After({7: [1, 39], 1: [3, 4], 3: [33, 0], 33: [5]})
    found = row_masks([judged(NO_DRAFT), judged(TREE, grammar=grammar, output_ids=[7])], vocab_size=VOCAB_SIZE)
    assert found.has_mask.tolist() == [0, 1, 1, 1, 1, 1]
    assert [allowed_ids(row) for row in found.masks[1:]] == [[1, 39], [3, 4], [], [0, 33], [5]]
    assert not found.refused


def test_bad_words_are_forbidden_after_their_beginning_alone():
    everything = list(range(VOCAB_SIZE))
    found = row_masks([judged(Draft((4, 5)), bad_words_ids=[[6], [4, 7]])], vocab_size=VOCAB_SIZE)
    forbidden = [sorted({*everything} - {*allowed_ids(row)}) for row in found.masks]
    assert forbidden == [[6], [6, 7], [6]]


@pytest.mark.parametrize(("failing", "refused"), [((), {1}), ((1, 3), set())])
def test_without_an_answer_nothing_is_allowed_there_nor_below(failing, refused):
    grammar = After({None: [1], 1: [3], 3: [33], 33: [5]}, fails=[failing])
    found = row_masks([judged(NO_DRAFT), judged(TREE, grammar=grammar)], vocab_size=VOCAB_SIZE)
    assert set(found.refused) == refused
    assert [allowed_ids(row) for row in found.masks[1:]] == (
        [[], [], [], [], []] if refused else [[1], [3], [], [], []]
    )


def test_bits_are_packed_into_words_lowest_first():
    bits = np.zeros((2, 64), dtype=np.bool_)
    bits[0, [0, 33]] = bits[1, 31] = True
    assert packed(bits).tolist() == [[1, 2], [-(2**31), 0]]
