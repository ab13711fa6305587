"""The fused loss and its gradient equal those of the formula, written out and differentiated by torch."""

from __future__ import annotations

import pytest
import torch

from forerun.train.draft_loss import HYBRID_DECAY, ROWS_AT_ONCE, draft_loss


def written_out(normed, weight, wanted, *, is_hybrid):
    log_odds = (normed @ weight.T).log_softmax(-1)
    losses = -(wanted * log_odds).sum(-1)
    if is_hybrid:
        accepted = torch.minimum(wanted, log_odds.exp()).sum(-1)
        share = (-HYBRID_DECAY * accepted.detach()).exp()
        losses = share * losses + (1 - share) * (1 - accepted)
    return losses.sum()


def drawn(num_rows, seed=0):
    source = torch.Generator().manual_seed(seed)
    normed = torch.randn(num_rows, 8, generator=source, dtype=torch.float64)
    weight = torch.randn(11, 8, generator=source, dtype=torch.float64)
    # of what the target gives the whole vocabulary a part lies outside of the drafted one
    wanted = (2 * torch.randn(num_rows, 15, generator=source, dtype=torch.float64)).softmax(-1)[:, :11]
    return normed, weight, wanted


@pytest.mark.parametrize("num_rows", [1, ROWS_AT_ONCE["cpu"], 2 * ROWS_AT_ONCE["cpu"] + 3])
@pytest.mark.parametrize("is_hybrid", [False, True])
def test_loss_and_gradients_are_those_of_the_formula(num_rows, is_hybrid):
    normed, weight, wanted = drawn(num_rows)
    leaves = normed.requires_grad_(), weight.requires_grad_()
    expected = written_out(*leaves, wanted, is_hybrid=is_hybrid)
    narrow = [leaf.detach().float().requires_grad_() for leaf in leaves]
    found = draft_loss(*narrow, wanted.float(), is_hybrid=is_hybrid)
    torch.testing.assert_close(found, expected.float())
    for one, other in zip(
        torch.autograd.grad(3 * found, narrow), torch.autograd.grad(3 * expected, leaves), strict=True
    ):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)


def test_a_frozen_lm_head_gets_no_gradient():
    normed, weight, wanted = (tensor.float() for tensor in drawn(5))
    loss = draft_loss(normed.requires_grad_(), weight, wanted, is_hybrid=False)
    loss.backward()
    assert weight.grad is None
    assert normed.grad.abs().sum() > 0


def test_what_is_measured_is_acceptance_and_equal_first_choices():
    normed, weight, wanted = drawn(300)
    odds = (normed @ weight.T).softmax(-1)
    measured = torch.zeros(2, dtype=torch.float64)
    draft_loss(normed.float(), weight.float(), wanted.float(), is_hybrid=False, measured=measured)
    assert measured[0] == pytest.approx(torch.minimum(odds, wanted).sum().item(), rel=1e-4)
    assert measured[1] == (odds.argmax(-1) == wanted.argmax(-1)).sum()


def test_the_hybrid_loss_of_a_perfect_draft_is_nearly_that_of_acceptance_alone():
    wanted = torch.full((1, 4), 0.25)
    loss = draft_loss(torch.zeros(1, 3), torch.zeros(4, 3), wanted, is_hybrid=True)
    share = torch.tensor(-HYBRID_DECAY).exp()
    torch.testing.assert_close(loss, share * torch.tensor(4.0).log())
