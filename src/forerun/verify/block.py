"""Block verification of chains and its generalisation to trees, traversal verification.

Judging from the leaf to the root accepts at least as many tokens as rejection, in expectation: a
path may stand as a whole although one of its tokens alone would not (block: arXiv 2403.10444;
traversal: arXiv 2505.12398). On a chain the two are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.draft import Draft
from forerun.verify.base import Verdict, Verifier
from forerun.verify.judging import Chance, IndependentVerifier, Target, probs_where_rules_hold
from forerun.verify.matching import is_settled_by_matching, match
from forerun.verify.rejection import acceptance_ratio, excess


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """`rejection_sample_method: "block"`; it has no settings."""

    def build(self, _num_speculative_tokens: int, /) -> Verifier:
        """Make the verifier; drafts may have any size."""
        return IndependentVerifier(traverse, is_lossless=True)


@dataclass(slots=True)
class _Place:
    """A node on the path under judgement.

    `reach` is the probability that the path stands at least up to here, given its tokens and what
    was rejected before; `left` is what the target still wants after it [vocab_size], nothing where the rules fail there.
    """

    node: int
    reach: float
    left: Tensor
    untried: list[int]

    def reach_of(self, child: int, draft: Draft) -> float:
        return min(self.reach * acceptance_ratio(self.left, draft, child), 1.0)

    def reject(self, child: int, draft: Draft) -> None:
        """Take away what `child`, with all below it, has served.

        With S = sum(max(reach * target - draft, 0)), the place still has to end the path, or go on
        through another child, with probability S / (S + 1 - reach), and its next token then comes
        from that excess, normalised.
        """
        left = excess(self.reach * self.left, draft, child)
        mass = float(left.sum())
        if mass > 0.0:
            self.left = left / mass
            self.reach = mass / (mass + (1.0 - self.reach))
        elif self.reach < 1.0:
            self.reach = 0.0
            self.untried.clear()
        # else target and draft are equal up to rounding, and the place stands whatever comes next


def traverse(draft: Draft, target: Target, chance: Chance) -> Verdict:
    """Accept or delete leaves, the leftmost deepest first, until one stands; its path is accepted.

    The root always stands. A child that cannot be reached is deleted unseen.
    """
    if is_settled_by_matching(draft, target):
        return match(draft, target)
    children = draft.children()

    def enter(node: int, reach: float) -> _Place:
        left = probs_where_rules_hold(target, node)
        if left is None:
            return _Place(node, reach, torch.empty(0), [])
        return _Place(node, reach, left, children[node + 1])

    path = [enter(-1, 1.0)]
    while True:
        place = path[-1]
        if place.untried:
            child = place.untried.pop(0)
            reach = place.reach_of(child, draft)
            if reach > 0.0:
                path.append(enter(child, reach))
            else:
                place.reject(child, draft)
        elif chance.accepts(place.node, place.reach):
            accepted = tuple(p.node for p in path[1:])
            if not len(place.left):
                return Verdict(accepted[:-1], draft.token_ids[place.node])
            return Verdict(accepted, chance.token(place.left))
        else:
            path.pop()
            path[-1].reject(place.node, draft)
