"""The guard around a drafter: its failures and impossible drafts cost the draft, never the text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import replace
from operator import le, lt
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from forerun.core.draft import NO_DRAFT, Draft
from forerun.drafters.base import (
    DraftContext,
    Drafter,
    DraftRequest,
    GoesByClock,
    LearnsFromTarget,
    ReadsTexts,
    VerifiedRows,
)
from forerun.errors import DraftError

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.core.sequence import Sequence

logger = logging.getLogger(__name__)

ROUNDING = 1e-3  # of the sum of a distribution in fp32


@runtime_checkable
class GuardsMembers(Protocol):
    """A drafter made of drafters, each behind a guard of its own."""

    @property
    def num_member_failures(self) -> int:
        """The number of failures that their guards have caught."""
        ...


class GuardedDrafter:
    """A drafter whose exceptions are caught and whose drafts are checked, as it may be a third party's.

    A failure costs the drafts of that call only: the drafter is asked again in the next step. A
    sequence that it failed to start gets no drafts, holds up no other one, and is started again before
    its next draft. The first failure of each drafter is logged with its cause; all are counted.

    `start` and `stop` may be called repeatedly; the drafter's are called once for each sequence.
    `source` is put on drafts that do not say who made them.
    """

    def __init__(self, drafter: Drafter, *, vocab_size: int, source: str | None = None) -> None:
        self._vocab_size = vocab_size
        self.source = source
        self._started: dict[int, bool] = {}  # by seq_id; False where the drafter's `start` failed
        self._num_earlier_failures = 0  # of the drafters whose place this one has taken
        self._use(drafter)

    def _use(self, drafter: Drafter) -> None:
        self.drafter = drafter
        # checked once: whether an object fits a protocol takes long to find out, and the engine counts in each step
        self._group = drafter if isinstance(drafter, GuardsMembers) else None
        self._learner = drafter if isinstance(drafter, LearnsFromTarget) else None
        self._reader = drafter if isinstance(drafter, ReadsTexts) else None
        self._num_caught = 0
        # looked at token by token, which takes too long for drafters of this package: tests say that these change no text
        self._is_others = type(drafter).__module__.partition(".")[0] != __name__.partition(".")[0]

    @property
    def num_failures(self) -> int:
        """The number of failures caught so far, here and by the guards of the drafter's members; those of drafters before it too."""
        of_members = 0 if self._group is None else self._group.num_member_failures
        return self._num_earlier_failures + self._num_caught + of_members

    @property
    def num_candidates(self) -> int:
        """The likeliest next tokens of each row that the drafter learns from; 0 where it does not learn."""
        return 0 if self._learner is None else min(self._learner.num_candidates, self._vocab_size)

    def replace(self, drafter: Drafter, running: Iterable[Sequence]) -> None:
        """Let another drafter take the place of this one, with all running sequences; the old one is not asked again."""
        self._num_earlier_failures = self.num_failures
        self._use(drafter)
        self._started = {
            sequence.seq_id: self._try_start(sequence) for sequence in running if sequence.seq_id in self._started
        }

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Let a drafter whose drafts depend on how long things take go by this clock from now on."""
        if isinstance(self.drafter, GoesByClock):
            self.drafter.use_clock(clock)

    def learn(self, rows: VerifiedRows) -> None:
        """Let the drafter learn from a step's rows, if it asks for any candidates."""
        if self._learner is None or not self.num_candidates:
            return
        try:
            self._learner.learn(rows)
        except Exception as error:
            self._note_failure(error)

    def start(self, sequence: Sequence) -> None:
        """Start a sequence in the drafter."""
        if sequence.seq_id not in self._started:
            self._started[sequence.seq_id] = self._try_start(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Stop a sequence in the drafter."""
        if self._started.pop(sequence.seq_id, None) is None:
            return
        try:
            self.drafter.stop(sequence)
        except Exception as error:
            self._note_failure(error)

    def num_unread(self, request: DraftRequest) -> int | None:
        """See `ReadsTexts`; None where the drafter does not say, or has not taken in the sequence."""
        if self._reader is None or not self._started.get(request.sequence.seq_id):
            return None
        try:
            return max(0, int(self._reader.num_unread(request)))
        except Exception as error:
            self._note_failure(error)
            return None

    def propose(self, requests: Listing[DraftRequest], features: Mapping[str, Tensor]) -> list[Draft]:
        """Return one valid draft per request, within its limits; empty where the drafter fails."""
        ready = tuple([request for request in requests if self._is_ready(request.sequence)])  # no drafter can sort it
        if not ready:
            return [NO_DRAFT] * len(requests)
        lengths = [len(request.sequence.output_ids) for request in ready]
        texts = [_text_of(request.sequence) for request in ready] if self._is_others else None
        try:
            drafts = list(self.drafter.propose(DraftContext(requests=ready, features=features)))
            if len(drafts) != len(ready):
                raise DraftError(f"propose returned {len(drafts)} drafts for {len(ready)} requests; return one each")
            if lengths != [len(request.sequence.output_ids) for request in ready] or (
                texts is not None and texts != [_text_of(request.sequence) for request in ready]
            ):
                raise DraftError(
                    "propose changed the prompt_ids or output_ids of a sequence; draft in a list of its own"
                )
        except Exception as error:
            for request, length in zip(ready, lengths, strict=True):
                del request.sequence.output_ids[length:]
            if texts is not None:
                for request, text in zip(ready, texts, strict=True):
                    request.sequence.prompt_ids[:], request.sequence.output_ids[:] = text
            self._note_failure(error)
            return [NO_DRAFT] * len(requests)
        checked = [self._checked(draft, request) for draft, request in zip(drafts, ready, strict=True)]
        if len(ready) == len(requests):
            return checked
        by_id = {request.sequence.seq_id: draft for request, draft in zip(ready, checked, strict=True)}
        return [by_id.get(request.sequence.seq_id, NO_DRAFT) for request in requests]

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether the drafter knows the sequence; start it again if that failed before."""
        if self._started.get(sequence.seq_id, True):
            return True
        self._started[sequence.seq_id] = self._try_start(sequence)
        return self._started[sequence.seq_id]

    def _try_start(self, sequence: Sequence) -> bool:
        text = _text_of(sequence) if self._is_others else None
        try:
            self.drafter.start(sequence)
            if text is not None and text != _text_of(sequence):
                raise DraftError("start changed the prompt_ids or output_ids of a sequence; keep a list of your own")
        except Exception as error:
            if text is not None:
                sequence.prompt_ids[:], sequence.output_ids[:] = text
            self._note_failure(error)
            return False
        return True

    def _checked(self, draft: Draft, request: DraftRequest) -> Draft:
        try:
            check_draft(draft, vocab_size=self._vocab_size)
            cut = cut_draft(draft, max_tokens=request.max_tokens, max_depth=request.max_depth)
            if not cut.token_ids:  # whatever else it says is not looked at
                return NO_DRAFT
            return replace(cut, source=self.source) if cut.source is None and self.source is not None else cut
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


def _text_of(sequence: Sequence) -> tuple[list[int], list[int]]:
    """A copy of a sequence's prompt and of what follows it."""
    return list(sequence.prompt_ids), list(sequence.output_ids)


def check_draft(draft: Draft, *, vocab_size: int) -> None:
    """Raise `DraftError` unless `draft` is a draft and every token and parent of it is possible."""
    if not isinstance(draft, Draft):
        raise DraftError(f"drafted {draft!r}; must be a Draft; return NO_DRAFT where there is nothing to draft")
    _check_token_ids(draft.token_ids, vocab_size=vocab_size)
    if not draft.token_ids:
        return
    if draft.parents is not None:
        _check_parents(draft.parents, num_nodes=len(draft))
    _check_sources(draft)
    if draft.survival is not None and not _is_survival(draft.survival, num_nodes=len(draft)):
        raise DraftError(
            f"survival {draft.survival!r:.80}; must be {len(draft)} floats from 1.0 down to 0.0, none above the one before"
        )
    if draft.margins is not None and not (
        isinstance(draft.margins, tuple) and all(isinstance(margin, float) for margin in draft.margins)
    ):
        raise DraftError(f"margins {draft.margins!r:.80}; must be a tuple of numbers, or None")
    if draft.probs is not None:
        if draft.survival is not None:
            raise DraftError(
                "survival beside probs; leave it out: what was drawn from probs is verified whatever it is"
            )
        _check_probs(draft.probs, draft.token_ids, vocab_size=vocab_size)


def _check_token_ids(token_ids: tuple[int, ...], *, vocab_size: int) -> None:
    if not isinstance(token_ids, tuple):
        raise DraftError(f"token_ids are a {type(token_ids).__name__}; must be a tuple")
    if token_ids and (not _are_ints(token_ids) or min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(one for one in token_ids if type(one) is not int or not 0 <= one < vocab_size)
        raise DraftError(f"drafted token id {wrong!r}; must be an int from 0 to {vocab_size - 1}")


def _check_sources(draft: Draft) -> None:
    if draft.source is not None and not isinstance(draft.source, str):
        raise DraftError(f"source {draft.source!r}; must be the drafter's name or None")
    if draft.sources is not None and not (
        len(draft.sources) == len(draft) and all(isinstance(source, str) for source in draft.sources)
    ):
        raise DraftError(f"sources {draft.sources!r:.80}; must be {len(draft)} drafters' names")


def _check_parents(parents: tuple[int, ...], *, num_nodes: int) -> None:
    if not isinstance(parents, tuple):
        raise DraftError(f"parents are a {type(parents).__name__}; must be a tuple")
    if len(parents) != num_nodes:
        raise DraftError(f"{len(parents)} parents for {num_nodes} nodes; give one parent per node")
    if _are_ints(parents) and min(parents) >= -1 and all(map(lt, parents, range(num_nodes))):
        return
    for node, parent in enumerate(parents):
        if type(parent) is not int or not -1 <= parent < node:
            raise DraftError(f"parent of node {node} is {parent!r}; must be -1 (the root) or an earlier node")


def _is_survival(survival: object, *, num_nodes: int) -> bool:
    """Whether it has a chance for each node, in falling order (which a NaN never is)."""
    if not isinstance(survival, tuple) or len(survival) != num_nodes:
        return False
    if not all(isinstance(chance, float) for chance in survival):
        return False
    return all(map(le, (*survival, 0.0), (1.0, *survival)))


def _check_probs(probs: Tensor, token_ids: tuple[int, ...], *, vocab_size: int) -> None:
    """Raise unless each row is a distribution, up to rounding, that its token can be drawn from: with others no verifier is exact."""
    import torch  # here: drafts of look-ups have none

    if not isinstance(probs, torch.Tensor):
        raise DraftError(f"probs are a {type(probs).__name__}; must be a torch tensor")
    shape = len(token_ids), vocab_size
    if tuple(probs.shape) != shape:
        raise DraftError(f"probs of shape {tuple(probs.shape)}; must be {shape}")
    is_distribution = (probs.amin(-1) >= 0.0) & ((probs.sum(-1) - 1.0).abs() < ROUNDING)  # False where there is a NaN
    can_be_drawn = probs.gather(-1, torch.tensor(token_ids, device=probs.device)[:, None])[:, 0] > 0.0
    if not (is_distribution & can_be_drawn).all():
        raise DraftError(
            "probs: a row is no distribution that its token was drawn from; must be chances of 0 or more that add up to 1, "
            "the drawn token's own above 0"
        )


def _are_ints(values: Listing[object]) -> bool:
    """Whether all are ints and nothing else, found out without a turn of Python for each."""
    return set(map(type, values)) == {int}


def cut_draft(draft: Draft, *, max_tokens: int, max_depth: int) -> Draft:
    """Cut `draft` to both limits; what remains is a draft, as a node's ancestors are never deeper than itself."""
    if len(draft.token_ids) <= min(max_tokens, max_depth):  # no node is deeper than there are nodes
        return draft
    if draft.is_chain:
        return draft.first(min(max_tokens, max_depth))
    depths = draft.depths()
    if max(depths) <= max_depth:
        return draft.first(max_tokens)
    return draft.only([node for node in range(len(draft)) if depths[node] <= max_depth][:max_tokens])
