"""Drawing the target's own token at every row, by formula: the twin of `kernels.sampling`, with the tokens of `ops.sampling`."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core.exact_math import nucleus_weight
from forerun.ops.cuda.noise import log, row_keys, uniform_rows, weights
from forerun.ops.cuda.table import RuleTable, StepRows

NO_TOKEN = -1
"""What is drawn where nothing can be: the row's largest logit is not finite."""


def sample(logits: Tensor, rows: StepRows, rules: RuleTable, token_ids: Tensor, largest: Tensor) -> None:
    """Draw the token after each row by the rules of its sequence; a function of seed, position and logits alone.

    A greedy sequence takes the highest logit, of equal ones the lowest id. Another one divides by the temperature and keeps
    min-p, top-k and top-p, as `ops.truncation` defines them; then the tokens race as in `ops.race`, with noise keyed by the
    position after the row's.

    Args:
        logits: [T, V] fp32, contiguous, all edits made (see `edits`).
        rows: `slots` and `positions` are read.
        rules: of each slot.
        token_ids: [T] int32, written; NO_TOKEN where the largest logit is not finite.
        largest: [T] fp32, written: the largest logit, NaN where the row holds any. Padding rows are left as they are.
    """
    noise = _noise_of_drawn(rows, rules, logits)
    for row, slot in enumerate(rows.slots.tolist()):
        if slot < 0:
            continue
        values = logits[row]
        highest = values.max()
        largest[row] = highest
        if not highest.isfinite():
            token_ids[row] = NO_TOKEN
        elif row in noise:
            token_ids[row] = _scores(values, noise[row], rules, slot).argmax()
        else:
            token_ids[row] = values.argmax()


def sample_first(logits: Tensor, rows: StepRows, rules: RuleTable, token_ids: Tensor) -> None:
    """Find the first tokens of each row's race, the winner first: the token that `sample` draws, and its runners-up.

    Args:
        logits: [T, V] fp32, contiguous; what they hold afterwards means nothing.
        rows: `slots` and `positions` are read.
        rules: of each slot.
        token_ids: [T, count] int32, written; NO_TOKEN where fewer tokens have a chance. A greedy sequence runs no race: what
            its rows get means nothing. Padding rows are left as they are.
    """
    noise = _noise_of_drawn(rows, rules, logits)
    for row, slot in enumerate(rows.slots.tolist()):
        if slot < 0:
            continue
        token_ids[row] = NO_TOKEN
        if row in noise and logits[row].max().isfinite():
            scores, order = _scores(logits[row], noise[row], rules, slot).sort(descending=True, stable=True)
            first = order[scores > -torch.inf][: token_ids.shape[1]]
            token_ids[row, : len(first)] = first.int()


def _noise_of_drawn(rows: StepRows, rules: RuleTable, logits: Tensor) -> dict[int, Tensor]:
    """Row -> [V] fp64, what its tokens' scores get in their race, of the rows whose sequences are not greedy.

    All at once: each number is exact, so the rows beside it do not matter.
    """
    temperatures = rules.temperature.tolist()
    drawn = [row for row, slot in enumerate(rows.slots.tolist()) if slot >= 0 and temperatures[slot] > 0]
    keys = row_keys(rules.seeds[rows.slots[drawn].long()], rows.positions[drawn] + 1)
    uniform = torch.empty((len(drawn), logits.shape[1]), dtype=torch.float64, device=logits.device)
    uniform_rows(keys, uniform)
    return dict(zip(drawn, -log(-log(1.0 - uniform)), strict=True))


def _scores(values: Tensor, noise: Tensor, rules: RuleTable, slot: int) -> Tensor:
    """[V] fp64: what each token of a row scores in its race; -inf where it takes no part."""
    shifted = (values - values.max()) / rules.temperature[slot]
    return (shifted.double() + noise).masked_fill(~_kept(shifted, rules, slot), -torch.inf)


def _kept(shifted: Tensor, rules: RuleTable, slot: int) -> Tensor:
    """[V] bool: the tokens that min-p, then top-k, then top-p leave."""
    kept = shifted >= rules.floor[slot]
    top_k = int(rules.top_k[slot])
    if 0 < top_k < len(shifted):
        kept &= shifted >= shifted.topk(top_k).values[-1]
    top_p = float(rules.top_p[slot])
    if top_p >= 1.0:
        return kept
    weight = weights(shifted) * kept
    order = shifted.argsort(descending=True, stable=True)
    reached = weight[order].cumsum(0)
    num_kept = 1 + int((reached < nucleus_weight(int(weight.sum()), top_p)).sum())
    nucleus = torch.zeros_like(kept)
    nucleus[order[:num_kept]] = True
    return kept & nucleus
