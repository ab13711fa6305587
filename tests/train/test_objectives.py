"""Losses equal their formulas, computed with the oracles of the heads."""

from __future__ import annotations

import functools

import pytest
import torch

from forerun.models.checkpoint import StateDict, renamed
from forerun.models.heads.eagle import EagleHead
from forerun.models.heads.eagle3 import Eagle3Head, canonical_name
from forerun.models.heads.reader import HeadReader
from forerun.train.objectives import eagle_loss, pard_loss, unrolled_loss
from forerun.train.recipes import RECIPES
from forerun.train.target import observe
from forerun.train.trainer import TrainSettings, train_head
from tests import heads_eagle
from tests.engines import tiny_target
from tests.models.heads import dense
from tests.models.paged_run import PagedRun

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8]]


def read(head, made):
    config, tensors = made
    return head(HeadReader(config, renamed(StateDict(tensors), canonical_name), tiny_target()))


def soft_cross_entropy(logits, wanted):
    """Over the tokens that can be drafted, whose logits are finite."""
    drafted = logits.isfinite()
    return -(wanted[drafted].softmax(-1) * logits[drafted].log_softmax(-1)).sum()


def forced(twin, states, text, root, count):
    """Outputs of a draft from `root` that is made to take the text's own tokens, one for each of `count` passes."""
    states = states[: root + 1]
    for index in range(count):
        (output,) = twin.outputs(torch.tensor(text[1 : root + 2 + index]), states)[-1:]
        yield output
        states = torch.cat([states, twin.states(output[None])])


@pytest.mark.parametrize("num_draft", [40, 97])
@pytest.mark.parametrize("flags", [{}, {"norm_output": True}, {"num_layers": 2}])
def test_the_unrolled_loss_is_that_of_forced_drafts_from_every_place(num_draft, flags):
    made = heads_eagle.eagle3(tiny_target(), num_draft=num_draft, **flags)
    head = read(Eagle3Head, made)
    batch = observe(tiny_target(), TEXTS, frozenset(head.needs))
    twin = dense.DenseEagle3(*made, embed=tiny_target().model.embed(torch.arange(97)))
    losses = [[] for _ in range(3)]
    for row, text in enumerate(TEXTS):
        states = twin.fuse({name: feature[row] for name, feature in batch.features.items()})
        for root in range(len(text) - 1):
            count = min(3, len(text) - 1 - root)
            for index, output in enumerate(forced(twin, states, text, root, count)):
                logits, wanted = twin.logits(output[None])[0], batch.logits[row, root + 1 + index]
                if logits[wanted.argmax()].isfinite():
                    losses[index].append(soft_cross_entropy(logits, wanted))
    expected = sum(0.8**index * torch.stack(of_pass).mean() for index, of_pass in enumerate(losses))
    torch.testing.assert_close(unrolled_loss(head, batch, num_passes=3, decay=0.8), expected, rtol=1e-4, atol=1e-4)


def test_feature_regression_is_smooth_l1_to_the_next_state_and_cross_entropy():
    made = heads_eagle.eagle(tiny_target())
    head = read(EagleHead, made)
    batch = observe(tiny_target(), TEXTS, frozenset(head.needs))
    model = tiny_target().model
    ids = torch.arange(97)
    twin = dense.DenseEagle(*made, embed=model.embed(ids), head=model.head_rows(ids))
    distances, losses = [], []
    for row, text in enumerate(TEXTS):
        states = batch.features["last_hidden"][row, : len(text)]
        outputs = twin.outputs(torch.tensor(text[1:]), states[:-1])
        gap = (outputs - states[1:]).abs()
        distances += torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean(-1)
        pairs = zip(twin.logits(outputs), batch.logits[row, 1:], strict=False)
        losses += [soft_cross_entropy(logits, wanted) for logits, wanted in pairs]
    expected = torch.stack(distances).mean() + 0.1 * torch.stack(losses).mean()
    torch.testing.assert_close(eagle_loss(head, batch, token_weight=0.1), expected, rtol=1e-4, atol=1e-4)


def test_pards_is_cross_entropy_after_every_text_and_so_many_masks():
    made = train_head("pard", tiny_target(), TEXTS, TrainSettings(num_steps=1))
    drafter = RECIPES["pard"].build(made.config, StateDict(made.tensors), tiny_target())
    batch = observe(tiny_target(), TEXTS, frozenset())
    losses = [[] for _ in range(3)]
    for row, text in enumerate(TEXTS):
        for end in range(1, len(text) + 1):
            count = min(3, len(text) - end + 1)
            read = [*text[:end], *[drafter.mask.token_id] * (count - 1)]
            logits = PagedRun(drafter.model).feed(read, logits_rows=range(end - 1, len(read))).logits
            for index in range(count):
                losses[index].append(soft_cross_entropy(logits[index], batch.logits[row, end - 1 + index]))
    expected = sum(torch.stack(of_depth).mean() for of_depth in losses)
    torch.testing.assert_close(pard_loss(drafter, batch, num_tokens=3), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("objective", [functools.partial(unrolled_loss, num_passes=5, decay=0.8)])
def test_a_text_shorter_than_the_passes_still_teaches(objective):
    head = read(Eagle3Head, heads_eagle.eagle3(tiny_target(), num_draft=97))
    assert objective(head, observe(tiny_target(), [[1, 2]], frozenset(head.needs))) > 0
