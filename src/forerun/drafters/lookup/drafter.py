"""Drafts for nothing but look-ups: copies from the text, copies from past answers, and recycled candidates, in one tree."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, DraftRequest, Pool, TargetInfo, VerifiedRows
from forerun.drafters.lookup.algorithms import Lookup, best_lookup
from forerun.drafters.lookup.guesses import COMPUTED
from forerun.drafters.lookup.hit_rates import HitRates
from forerun.drafters.lookup.live_text import LiveText
from forerun.drafters.lookup.past_answers import PastAnswers
from forerun.drafters.recycle_table import NUM_CANDIDATES, RecycleTable
from forerun.ops.native.lookup import DraftLimits, GrownTree

LEAST_SURVIVAL = 0.015
"""The least chance of a drafted node where the request names none: a row costs at least so much of a pass."""

SOURCES = ("copy", "pool", "recycle", "computed")
"""What a draft is called whose first node is from the own text, from past answers, from the recycle table, from another
drafter's chain."""


class LookupDrafter:
    """Grows each draft from the likeliest guesses of all three sources, and knows how likely they are.

    Every committed token says which guesses before it were right, also of a sequence for which no drafts were asked.
    Guesses are scored with the table as it was when they were made, so the rows of a step are learnt after its
    tokens are scored; `learn` therefore wants those tokens committed.
    """

    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        target: TargetInfo,
        *,
        table_bytes: int,
        pool_bytes: int,
        num_candidates: int = NUM_CANDIDATES,
        lookup: Lookup | None = None,
    ) -> None:
        """`lookup` is for tests: None takes the best there is."""
        self._lookup = best_lookup() if lookup is None else lookup
        self.table = RecycleTable(
            vocab_size=target.vocab_size,
            max_bytes=table_bytes,
            num_candidates=num_candidates,
            to_store=self._lookup.to_store,
        )
        self.past_answers = PastAnswers(vocab_size=target.vocab_size, max_bytes=pool_bytes, extend=self._lookup.extend)
        self.rates = HitRates()
        self.num_candidates = self.table.num_candidates if table_bytes else 0
        self._computed_by = SOURCES[COMPUTED]  # the drafter whose chains are joined, as long as it is not known
        self._texts: dict[int, LiveText] = {}
        self._pools: dict[str, Pool] = ({"recycle": self.table} if table_bytes else {}) | (
            {"answers": self.past_answers} if pool_bytes else {}
        )

    @property
    def pools(self) -> Mapping[str, Pool]:
        """See `KeepsPools`; without one that may keep nothing."""
        return self._pools

    def start(self, sequence: Sequence) -> None:
        """Index the tokens so far; a sequence that was started before goes on."""
        known = self._texts.get(sequence.seq_id)
        if known is not None and known.sequence is sequence:
            return
        text = LiveText(sequence)
        self._share(text)
        text.reserve(len(sequence) + 1)
        self._lookup.extend(text.index, sequence.tokens_from(0))
        self._lookup.settle(text)
        text.num_outputs = len(sequence.output_ids)
        self._texts[sequence.seq_id] = text

    def learn(self, rows: VerifiedRows) -> None:
        """Learn a step's rows, after the tokens that it committed: those are scored with what was known before."""
        self._take_new_tokens()
        self.table.learn(rows)

    def propose(self, context: DraftContext) -> list[Draft]:
        """Return a tree per request."""
        self._take_new_tokens()
        return self._grow(context.requests)

    def join(
        self,
        requests: Listing[DraftRequest],
        drafts: Listing[Draft],
        chains: Listing[Draft],
        *,
        computed_by: str,
    ) -> list[Draft]:
        """Grow drafts anew where there is a chain that was computed for the text, too.

        Args:
            requests: as in `propose`, which was called before.
            drafts: what it returned.
            chains: one for each request, or none; siblings of its nodes are its runners-up.
            computed_by: what drafted the chains; also those whose rest still stands behind the texts in later steps.
        """
        self._computed_by = computed_by
        joined = [i for i, chain in enumerate(chains) if chain.token_ids]
        for i in joined:
            self._texts[requests[i].sequence.seq_id].guess(chains[i].first_path(), chains[i].margins)
        found = list(drafts)
        for i, draft in zip(joined, self._grow([requests[i] for i in joined]), strict=True):
            found[i] = draft
        return found

    def stop(self, sequence: Sequence) -> None:
        """Forget the sequence, but keep its answer for later sequences of the same salt."""
        if self._texts.pop(sequence.seq_id, None) is not None:
            self.past_answers.add(sequence.output_ids, sequence.cache_salt)
            for text in self._texts.values():  # an index that was replaced or dropped is to be freed now
                self._share(text)

    def _grow(self, requests: Listing[DraftRequest]) -> list[Draft]:
        texts = [self._texts[request.sequence.seq_id] for request in requests]
        limits = [
            DraftLimits(request.max_tokens, request.max_depth, request.min_survival or LEAST_SURVIVAL)
            for request in requests
        ]
        trees = self._lookup.grow(texts, limits, self.rates) if texts else []
        return [as_draft(tree, self._computed_by) for tree in trees]

    def _take_new_tokens(self) -> None:
        """Bring all texts up to what is committed, also those that get no draft in this step."""
        texts: list[LiveText] = []
        new_tokens: list[list[int]] = []
        for text in self._texts.values():
            output_ids = text.sequence.output_ids
            if len(output_ids) == text.num_outputs:
                continue
            self._share(text)
            num_tokens = len(text.sequence)
            if text.reserve(num_tokens + 1):
                num_taken = len(text.sequence.prompt_ids) + text.num_outputs
                self._lookup.extend(text.index, text.sequence.tokens_between(0, num_taken))
            texts.append(text)
            new_tokens.append(output_ids[text.num_outputs :])
            text.num_outputs = len(output_ids)
        if texts:
            self._lookup.take(texts, new_tokens, self.rates)

    def _share(self, text: LiveText) -> None:
        """Let a text see what there is now of its salt."""
        salt = text.sequence.cache_salt
        text.copy_from(self.past_answers.of(salt))
        text.recycle_from(self.table.of(salt))


def as_draft(tree: GrownTree, computed_by: str = SOURCES[COMPUTED]) -> Draft:
    """The tree as a draft; a chain where it has no branches."""
    token_ids, parents, survival, sources = tree
    if not token_ids:
        return NO_DRAFT
    name_of = (*SOURCES[:COMPUTED], computed_by).__getitem__
    is_chain = parents[-1] == len(parents) - 2 and parents == tuple(range(-1, len(parents) - 1))
    first = sources[0]
    names = None if sources.count(first) == len(sources) else tuple([name_of(one) for one in sources])
    return Draft(token_ids, None if is_chain else parents, None, name_of(first), survival, None, names)
