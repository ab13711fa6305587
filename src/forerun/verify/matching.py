"""Matching: the target samples its own token at every place, and drafted tokens stand while they equal it.

Lossless for every sampling rule, since every token of the output is the target's own sample; with
keyed noise the text is a function of the seed, whatever was drafted (compare arXiv 2408.07978).
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.draft import Draft
from forerun.verify.base import Verdict, Verifier
from forerun.verify.judging import IndependentVerifier, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchingConfig:
    """`rejection_sample_method: "matching"`, the default; it has no settings."""

    def build(self, _num_speculative_tokens: int, /) -> Verifier:
        """Make the verifier; drafts may have any size."""
        return IndependentVerifier(lambda draft, target, _: match(draft, target), is_lossless=True)


def match(draft: Draft, target: Target) -> Verdict:
    """Walk down from the root while some child is the target's own token."""
    return _match_chain(draft.token_ids, target) if draft.parents is None else _match_tree(draft, target)


def _match_chain(token_ids: tuple[int, ...], target: Target) -> Verdict:
    for node, drafted in enumerate(token_ids):
        token_id = target.token(node - 1)
        if token_id != drafted:
            return Verdict(tuple(range(node)), token_id)
    return Verdict(tuple(range(len(token_ids))), target.token(len(token_ids) - 1))


def _match_tree(draft: Draft, target: Target) -> Verdict:
    accepted: list[int] = []
    node = -1
    while True:
        token_id = target.token(node)
        node = draft.child(node, token_id)
        if node < 0:
            return Verdict(tuple(accepted), token_id)
        accepted.append(node)


def is_settled_by_matching(draft: Draft, target: Target) -> bool:
    """Whether matching is all there is to do: nothing was drafted, or the target is certain.

    Verifiers that accept by probability then agree with it, at a much higher cost.
    """
    return target.is_greedy or not len(draft)
