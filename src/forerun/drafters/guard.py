"""Asks a drafter for bets and lets none of its faults out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from typing import Protocol, runtime_checkable

from torch import Tensor

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, DraftRequest
from forerun.errors import DraftError

logger = logging.getLogger(__name__)


@runtime_checkable
class GuardsMembers(Protocol):
    """A drafter made of drafters, each behind a guard of its own."""

    @property
    def num_member_failures(self) -> int:
        """What their guards have caught."""
        ...


class GuardedDrafter:
    """A drafter behind a guard: a failure or an impossible draft costs the draft, never the text.

    A drafter may be a third party's, so whatever it raises is caught here. It is told of each
    sequence once, and of its end if it was told of its beginning; saying so again does nothing.
    The first failure is logged with its cause.
    """

    def __init__(self, drafter: Drafter, *, vocab_size: int) -> None:
        self.drafter = drafter
        # asked once: whether it fits a protocol takes long to find out, and the engine counts in each step
        self._group = drafter if isinstance(drafter, GuardsMembers) else None
        self._num_caught = 0
        self._vocab_size = vocab_size
        self._started: set[int] = set()  # seq_ids

    @property
    def num_failures(self) -> int:
        """What was caught so far, here and by the guards of the drafter's members."""
        return self._num_caught + (0 if self._group is None else self._group.num_member_failures)

    def start(self, sequence: Sequence) -> None:
        """Tell the drafter of a new sequence."""
        if sequence.seq_id in self._started:
            return
        self._started.add(sequence.seq_id)
        try:
            self.drafter.start(sequence)
        except Exception as error:
            self._note_failure(error)

    def stop(self, sequence: Sequence) -> None:
        """Tell the drafter that a sequence has ended."""
        if sequence.seq_id not in self._started:
            return
        self._started.remove(sequence.seq_id)
        try:
            self.drafter.stop(sequence)
        except Exception as error:
            self._note_failure(error)

    def propose(self, requests: Listing[DraftRequest], features: Mapping[str, Tensor]) -> list[Draft]:
        """One valid draft per request, within its limits; empty where the drafter fails."""
        if not requests:
            return []
        try:
            drafts = self.drafter.propose(DraftContext(requests=requests, features=features))
            if len(drafts) != len(requests):
                raise DraftError(f"propose returned {len(drafts)} drafts for {len(requests)} requests; return one each")
        except Exception as error:
            self._note_failure(error)
            return [NO_DRAFT] * len(requests)
        return [self._checked(draft, request) for draft, request in zip(drafts, requests, strict=True)]

    def _checked(self, draft: Draft, request: DraftRequest) -> Draft:
        try:
            check_draft(draft, vocab_size=self._vocab_size)
            return cut_draft(draft, max_tokens=request.max_tokens, max_depth=request.max_depth)
        except Exception as error:
            self._note_failure(error)
            return NO_DRAFT

    def _note_failure(self, error: Exception) -> None:
        self._num_caught += 1
        if self._num_caught == 1:
            name = type(self.drafter).__name__
            logger.warning(
                "drafter %s failed (%s); its drafts are dropped, the text is not affected; further failures are only counted",
                name,
                error,
                exc_info=error,
            )


def check_draft(draft: Draft, *, vocab_size: int) -> None:
    """Raise `DraftError` unless `draft` is a draft and every token and parent of it is possible."""
    if not isinstance(draft, Draft):
        raise DraftError(f"drafted {draft!r}; must be a Draft; return NO_DRAFT where there is no bet")
    if not draft.token_ids:
        return
    for token_id in draft.token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise DraftError(f"drafted token id {token_id!r}; must be an int from 0 to {vocab_size - 1}")
    if draft.parents is not None:
        _check_parents(draft.parents, num_nodes=len(draft))
    if draft.source is not None and not isinstance(draft.source, str):
        raise DraftError(f"source {draft.source!r}; must be the drafter's name or None")
    if draft.probs is not None and tuple(draft.probs.shape) != (len(draft), vocab_size):
        raise DraftError(f"probs of shape {tuple(draft.probs.shape)}; must be ({len(draft)}, {vocab_size})")


def _check_parents(parents: Listing[int], *, num_nodes: int) -> None:
    if len(parents) != num_nodes:
        raise DraftError(f"{len(parents)} parents for {num_nodes} nodes; give one parent per node")
    for node, parent in enumerate(parents):
        if type(parent) is not int or not -1 <= parent < node:
            raise DraftError(f"parent of node {node} is {parent!r}; must be -1 (the root) or an earlier node")


def cut_draft(draft: Draft, *, max_tokens: int, max_depth: int) -> Draft:
    """The part of `draft` within both limits; still a draft, since ancestors are never deeper."""
    if draft.is_chain:
        return draft.first(min(max_tokens, max_depth))
    depths = draft.depths()
    if max(depths) <= max_depth:
        return draft.first(max_tokens)
    return draft.only([node for node in range(len(draft)) if depths[node] <= max_depth][:max_tokens])
