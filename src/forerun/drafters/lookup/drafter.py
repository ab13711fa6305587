"""Drafts for nothing but look-ups: copies from the text, copies from past answers, and recycled candidates, in one tree."""

from __future__ import annotations

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, DraftRequest, TargetInfo, VerifiedRows
from forerun.drafters.lookup.growing import Limits, Tree, grow
from forerun.drafters.lookup.guesses import settle, take
from forerun.drafters.lookup.hit_rates import HitRates
from forerun.drafters.lookup.live_text import LiveText
from forerun.drafters.lookup.past_answers import PastAnswers
from forerun.drafters.recycle_table import RecycleTable

LEAST_SURVIVAL = 0.015
"""The least chance of a drafted node where the request names none: a row costs at least so much of a pass."""

SOURCES = ("copy", "pool", "recycle")
"""What a draft is called whose first node is from the own text, from past answers, from the recycle table."""


class LookupDrafter:
    """Grows each draft from the likeliest guesses of all three sources, and knows how likely they are.

    Every committed token says which guesses before it were right, also of a sequence for which no drafts were asked.
    Guesses are scored with the table as it was when they were made, so the rows of a step are learnt after its
    tokens are scored; `learn` therefore wants those tokens committed.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, target: TargetInfo, *, table_bytes: int, pool_bytes: int, num_candidates: int = 8) -> None:
        self.table = RecycleTable(vocab_size=target.vocab_size, max_bytes=table_bytes)
        self.past_answers = PastAnswers(max_bytes=pool_bytes)
        self.rates = HitRates()
        self.num_candidates = min(num_candidates, self.table.num_candidates) if table_bytes else 0
        self._texts: dict[int, LiveText] = {}
        self._past_version = 0

    def start(self, sequence: Sequence) -> None:
        """Index the tokens so far."""
        text = LiveText(sequence, salt=0)
        text.copy_from(self.past_answers.of(sequence.cache_salt))
        self._texts[sequence.seq_id] = text
        text.reserve(len(sequence) + 1)
        text.index.extend(sequence.tokens_from(0))
        text.num_taken = len(sequence)
        settle(text)

    def learn(self, rows: VerifiedRows) -> None:
        """Learn a step's rows, after the tokens that it committed: those are scored with what was known before."""
        self._take_new_tokens()
        self.table.learn(rows)

    def propose(self, context: DraftContext) -> list[Draft]:
        """Return a tree per request."""
        self._take_new_tokens()
        return [self._draft(request) for request in context.requests]

    def stop(self, sequence: Sequence) -> None:
        """Forget the sequence, but keep its answer for later sequences of the same salt."""
        if self._texts.pop(sequence.seq_id, None) is not None:
            self.past_answers.add(sequence.output_ids, sequence.cache_salt)

    def _take_new_tokens(self) -> None:
        """Bring all texts up to what is committed."""
        self._find_past_answers()
        for text in self._texts.values():
            new = text.sequence.tokens_from(text.num_taken)
            if not new:
                continue
            text.num_taken += len(new)
            if text.reserve(text.num_taken + 1):
                text.index.extend(text.sequence.tokens_between(0, text.num_taken - len(new)))
            take(text, new, self.rates, self.table)

    def _find_past_answers(self) -> None:
        """Give each text the index of its salt, where indexes were made or dropped."""
        if self._past_version != self.past_answers.version:
            self._past_version = self.past_answers.version
            for text in self._texts.values():
                text.copy_from(self.past_answers.of(text.sequence.cache_salt))

    def _draft(self, request: DraftRequest) -> Draft:
        text = self._texts[request.sequence.seq_id]
        limits = Limits(request.max_tokens, request.max_depth, LEAST_SURVIVAL)
        return as_draft(grow(text, limits, self.rates, self.table))


def as_draft(tree: Tree) -> Draft:
    """The tree as a draft; a chain where it has no branches."""
    if not tree.token_ids:
        return NO_DRAFT
    is_chain = all(parent == node - 1 for node, parent in enumerate(tree.parents))
    return Draft(
        tuple(tree.token_ids),
        None if is_chain else tuple(tree.parents),
        source=SOURCES[tree.sources[0]],
        survival=tuple(tree.survival),
    )
