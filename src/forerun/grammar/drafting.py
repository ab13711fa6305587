"""Drafts the tokens that a grammar forces, and cuts drafts where it forbids them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Listing

from torch import Tensor

from forerun.core.draft import NO_DRAFT, Draft
from forerun.drafters.base import DraftRequest
from forerun.drafters.guard import GuardedDrafter
from forerun.ops.grammar import Grammar

SOURCE = "grammar"
"""The `source` of drafts of forced tokens."""


def propose(drafting: GuardedDrafter, requests: Listing[DraftRequest], features: Mapping[str, Tensor]) -> list[Draft]:
    """Return one draft per request: the tokens that its grammar forces, or the drafter's as far as it is allowed.

    The drafter is not asked where forced tokens fill the draft, nor where the grammar takes no drafts.
    """
    forced = [_forced(request) for request in requests]
    is_asked = [_takes_drafts(r) and len(draft) < _room(r) for r, draft in zip(requests, forced, strict=True)]
    asked = [request for request, asks in zip(requests, is_asked, strict=True) if asks]
    answers: Iterator[Draft] = iter(drafting.propose(asked, features))
    return [
        _chosen(free, next(answers), request) if asks else free
        for request, free, asks in zip(requests, forced, is_asked, strict=True)
    ]


def _grammar(request: DraftRequest) -> Grammar | None:
    return None if request.rules is None else request.rules.grammar


def _takes_drafts(request: DraftRequest) -> bool:
    grammar = _grammar(request)
    return grammar is None or grammar.takes_drafts


def _room(request: DraftRequest) -> int:
    """The longest chain that may be drafted."""
    return min(request.max_tokens, request.max_depth)


def _forced(request: DraftRequest) -> Draft:
    grammar = _grammar(request)
    token_ids = grammar.forced(request.sequence.output_ids)[: _room(request)] if grammar is not None else ()
    return Draft(tuple(token_ids), source=SOURCE) if token_ids else NO_DRAFT


def _chosen(forced: Draft, drafted: Draft, request: DraftRequest) -> Draft:
    """The drafter's draft where it holds the forced tokens and more, else the forced tokens.

    A draft sampled with known odds never replaces forced tokens: verifying it is exact only if the
    choice between the two does not depend on what was drawn.
    """
    grammar = _grammar(request)
    if grammar is None:
        return drafted
    if forced.token_ids and (drafted.probs is not None or not goes_beyond(drafted, forced.token_ids)):
        return forced
    return within(drafted, grammar, request.sequence.output_ids)


def goes_beyond(draft: Draft, token_ids: Listing[int]) -> bool:
    """Return whether a path of `draft` begins with `token_ids` and is longer."""
    children, ends = draft.children(), [-1]
    for token_id in token_ids:
        ends = [child for end in ends for child in children[end + 1] if draft.token_ids[child] == token_id]
    return any(children[end + 1] for end in ends)


def within(draft: Draft, grammar: Grammar, output_ids: Listing[int]) -> Draft:
    """Return the part of `draft` that the grammar allows.

    Of a draft sampled with known odds the first forbidden token of each path stays: the verifier must
    see what was drawn. It is rejected for sure, and nothing after it could be accepted.
    """
    possible = _possible_nodes(draft, grammar, output_ids)
    if draft.probs is None:
        return draft.only(sorted(possible))
    return draft.only([node for node in range(len(draft)) if draft.parent(node) in possible or draft.parent(node) < 0])


def _possible_nodes(draft: Draft, grammar: Grammar, output_ids: Listing[int]) -> set[int]:
    """The nodes whose paths the grammar allows."""
    ends = [len(draft) - 1] if draft.is_chain else [i for i, below in enumerate(draft.children()[1:]) if not below]
    possible: set[int] = set()
    for end in ends:
        nodes = draft.path(end)
        possible.update(nodes[: grammar.num_possible(output_ids, [draft.token_ids[node] for node in nodes])])
    return possible
