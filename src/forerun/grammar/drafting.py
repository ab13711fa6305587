"""Drafts what requests know of their own texts before the drafter is asked, and cuts drafts where a grammar forbids them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Listing

from torch import Tensor

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, DraftRequest
from forerun.drafters.guard import GuardedDrafter
from forerun.drafters.prediction import PredictionDrafter
from forerun.ops.grammar import Grammar

SOURCE = "grammar"
"""The `source` of drafts of forced tokens."""


class KnownTexts:
    """Drafts what requests know of their texts before a drafter is asked: forced tokens first, then predictions."""

    def __init__(self) -> None:
        self._predictions = PredictionDrafter()

    def start(self, sequence: Sequence) -> None:
        """Note what the client expects of a sequence; doing so again changes nothing."""
        self._predictions.start(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._predictions.stop(sequence)

    def propose(
        self, requests: Listing[DraftRequest], drafting: GuardedDrafter, features: Mapping[str, Tensor]
    ) -> list[Draft]:
        """Return one draft per request: its grammar's forced tokens, else what its prediction says, else the drafter's.

        Of the last two only what the grammar allows. The drafter is not asked where the prediction has a
        draft or forced tokens fill it, nor where the grammar takes no drafts.
        """
        if not any(_knows_its_text(request) for request in requests):
            return drafting.propose(requests, features)
        forced = [_forced(request) for request in requests]
        predicted = self._predictions.propose(DraftContext(requests=requests))
        known = [_chosen(*line) for line in zip(forced, predicted, requests, strict=True)]
        is_asked = [_asks_drafter(request, draft) for request, draft in zip(requests, known, strict=True)]
        asked = [request for request, asks in zip(requests, is_asked, strict=True) if asks]
        answers: Iterator[Draft] = iter(drafting.propose(asked, features))
        return [
            _chosen(draft, next(answers), request) if asks else draft
            for request, draft, asks in zip(requests, known, is_asked, strict=True)
        ]


def _knows_its_text(request: DraftRequest) -> bool:
    return bool(request.sequence.prediction_ids) or _grammar(request) is not None


def _asks_drafter(request: DraftRequest, known: Draft) -> bool:
    """Whether the drafter may know better than what is known of the text."""
    if not _takes_drafts(request):
        return False
    return not known.token_ids or (known.source == SOURCE and len(known) < _room(request))


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
    return NO_DRAFT if grammar is None else forced_draft(grammar, request.sequence.output_ids, most=_room(request))


def forced_draft(grammar: Grammar, output_ids: Listing[int], *, most: int) -> Draft:
    """Return the tokens that must come next, at most `most` of them; empty where there is a choice."""
    token_ids = grammar.forced(output_ids)[: max(0, most)]
    return Draft(tuple(token_ids), source=SOURCE) if token_ids else NO_DRAFT


def _chosen(forced: Draft, drafted: Draft, request: DraftRequest) -> Draft:
    """What was drafted, as far as the grammar allows it, where it holds the forced tokens and more, else these.

    A draft sampled with known odds never replaces forced tokens: verifying it is exact only if the
    choice between the two does not depend on what was drawn.
    """
    grammar = _grammar(request)
    if grammar is None:
        return drafted
    if not drafted.token_ids or not grammar.takes_drafts:
        return forced
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
