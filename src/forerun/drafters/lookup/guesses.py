"""What may come next, each guess given that those before it are wrong: a computed token, copies, runners-up, recycled candidates.

These functions define what is guessed and learnt; `ops.native.lookup` has them compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forerun.drafters.lookup.hit_rates import (
    AFTER_COMPUTED,
    AFTER_COPY,
    AMONG,
    COPIED,
    COPIED_OTHER,
    NO_GUESS,
    NONE,
    NOT_COPIED,
    OTHER,
    SAME,
    HitRates,
    candidate_class,
    computed_class,
    copy_class,
    runner_up_class,
)
from forerun.drafters.lookup.live_text import LiveText
from forerun.drafters.lookup.text_index import BREAK, LONGEST_MATCH, TextIndex
from forerun.drafters.recycle_table import GAP_WEIGHTS, Found

OWN, PAST, TABLE, COMPUTED = range(4)
"""Where a guess is from: the text itself, past answers, the recycle table, a drafter that computes."""

LEFT = -1
"""In place of the computed token that is next: the path has left them."""

MAX_CANDIDATES = 4
"""The most candidates of the recycle table that are looked at for one place."""

LEAST_LOST = 4
"""Tokens of the match that a copy must have had, for it to be looked for again behind an edit."""

LONGEST_EDIT = 8  # tokens of the copied text that an edit leaves out
LONGEST_INSERTION = 12  # tokens that an edit writes instead

PSEUDO_COUNT = 4.0  # hits, and as many expected ones, that a sequence starts with
SEQUENCE_DECAY = 0.95  # of a sequence's counts, per token of its text
HIGHEST_RATE = 0.995


class Copy(NamedTuple):
    """A copy that goes on at `place` (0: there is none) after a match of `match` tokens."""

    place: int = 0
    match: int = 0


class Guess(NamedTuple):
    """A token that may come next."""

    token_id: int
    guess_class: int
    source: int


def copied_token(index: TextIndex, copy: Copy, path: Sequence[int], *, is_own: bool) -> int:
    """The token that a copy predicts, or `BREAK`; past the own text's end it goes on with the drafted path."""
    if not copy.place:
        return BREAK
    end: int = index.struct.end
    if is_own and copy.place >= end:
        return path[copy.place - end]
    return index.token_at(copy.place)


def find_copy(index: TextIndex, ending: Sequence[int]) -> Copy:
    """The latest place behind the longest gram that ends the text."""
    place = index.look_up(ending)
    return Copy(place, index.match_length(place, ending)) if place else Copy()


def go_on(copy: Copy, predicted: int, token_id: int) -> Copy:
    """The copy behind `token_id`: none if it predicted another token."""
    if predicted != token_id:
        return Copy()
    return Copy(copy.place + 1, min(copy.match + 1, LONGEST_MATCH))


class Place:
    """A place in a text or after a drafted path: the tokens before it, and what is copied and computed there."""

    __slots__ = ("copies", "ending", "next_computed", "path", "predicted", "text")

    def __init__(
        self, text: LiveText, ending: Sequence[int], path: Sequence[int], copies: Sequence[Copy], next_computed: int
    ) -> None:
        """`ending` holds the last tokens of the text and then `path`; copies that are none are looked up."""
        self.text, self.ending, self.path = text, ending, path
        self.next_computed = next_computed
        self.copies: list[Copy] = []
        self.predicted: list[int] = []
        for source, copy in enumerate(copies):
            index = text.index if source == OWN else text.past
            if index is None:
                self.copies.append(Copy())
                self.predicted.append(BREAK)
                continue
            found = copy if copy.place else find_copy(index, ending)
            self.copies.append(found)
            self.predicted.append(copied_token(index, found, path, is_own=source == OWN))

    def behind(self, token_id: int) -> list[Copy]:
        """The copies that predicted `token_id`, behind it."""
        return [go_on(copy, predicted, token_id) for copy, predicted in zip(self.copies, self.predicted, strict=True)]

    @property
    def computed(self) -> int:
        """The token that was computed for this place, or `BREAK`."""
        struct = self.text.struct
        if 0 <= self.next_computed < struct.num_computed:
            token_id: int = struct.computed[self.next_computed]
            return token_id
        return BREAK

    @property
    def margin_class(self) -> int:
        """That of the computed token."""
        found: int = self.text.struct.margin_classes[self.next_computed]
        return found

    def runners_up(self, found: Found | None, before: Sequence[Guess]) -> list[Guess]:
        """Those of the computed token that were not guessed before."""
        guesses: list[Guess] = []
        for rank, token_id in enumerate(self.text.struct.runners_up[self.next_computed]):
            if token_id != BREAK and all(guess.token_id != token_id for guess in (*before, *guesses)):
                guess_class = runner_up_class(self.next_computed, self.margin_class, rank, agreement(found, token_id))
                guesses.append(Guess(token_id, guess_class, COMPUTED))
        return guesses

    def computed_behind(self, token_id: int) -> int:
        """Which computed token is next behind `token_id`."""
        return self.next_computed + 1 if token_id == self.computed else LEFT

    def guesses(self) -> list[Guess]:
        """What may come next, in the order in which it is tried."""
        found = self._look_up()
        guesses: list[Guess] = []
        computed = self.computed
        if computed != BREAK:
            is_copied = COPIED if computed in self.predicted else COPIED_OTHER
            if all(token_id == BREAK for token_id in self.predicted):
                is_copied = NOT_COPIED
            guess_class = computed_class(self.next_computed, self.margin_class, is_copied, agreement(found, computed))
            guesses.append(Guess(computed, guess_class, COMPUTED))
        first = PAST if self.copies[PAST].match > self.copies[OWN].match else OWN
        for source in (first, 1 - first):
            token_id = self.predicted[source]
            if token_id == BREAK or any(guess.token_id == token_id for guess in guesses):
                continue
            guess_class = copy_class(
                source,
                self.copies[source].match,
                agreement(found, token_id),
                after_computed=computed != BREAK,
            )
            guesses.append(Guess(token_id, guess_class, source))
        if computed != BREAK:
            guesses += self.runners_up(found, guesses)
        after = AFTER_COMPUTED if computed != BREAK else AFTER_COPY if guesses else NO_GUESS
        return guesses + candidates(found, guesses, after)

    def _look_up(self) -> Found | None:
        contexts, ending = self.text.contexts, self.ending
        if contexts is None or not ending:
            return None
        return contexts.look_up(ending[-2] if len(ending) > 1 else -1, ending[-1])


def agreement(found: Found | None, token_id: int) -> int:
    """What the recycle table says of a copied token."""
    if found is None:
        return NONE
    if token_id == found.token_ids[0]:
        return SAME
    return AMONG if token_id in found.token_ids else OTHER


def candidates(found: Found | None, before: Sequence[Guess], after: int) -> list[Guess]:
    """The table's candidates that were not guessed before, each with its share of the probability that is left."""
    if found is None:
        return []
    guessed = [guess.token_id for guess in before]
    weights = [GAP_WEIGHTS[gap] for gap in found.gaps]
    total = 0.0
    for weight in weights:  # not `sum`, whose order of additions is its own
        total += weight
    likeliest = [(token_id, weight / total) for token_id, weight in zip(found.token_ids, weights, strict=True)]
    del likeliest[MAX_CANDIDATES:]
    left = 1.0
    for token_id, prob in likeliest:
        if token_id in guessed:
            left -= prob
    guesses = []
    for token_id, prob in likeliest:
        if token_id in guessed:
            continue
        share = min(1.0, prob / max(left, 1e-6))
        guess_class = candidate_class(found.context_length, share, after=after)
        guesses.append(Guess(token_id, guess_class, TABLE))
        left -= prob
    return guesses


def place_at_end(text: LiveText) -> Place:
    """The place behind the committed text."""
    copies = [Copy(copy.place, copy.match) for copy in text.struct.copies]
    return Place(text, text.ending(), (), copies, text.struct.next_computed)


def take(text: LiveText, token_ids: Sequence[int], rates: HitRates) -> None:
    """Learn from newly committed tokens, and append them.

    Each token says which of the guesses before it would have been right, whether they were drafted or not.
    """
    for token_id in token_ids:
        place = place_at_end(text)
        learn(text, place.guesses(), token_id, rates)
        copies = place.behind(token_id)
        text.struct.next_computed = place.computed_behind(token_id)
        note_edit(text, place, token_id)
        text.index.extend([token_id])
        settle(text, copies)


def note_edit(text: LiveText, place: Place, token_id: int) -> None:
    """Remember where a long copy of the own text went wrong, until another one goes right, or for a few tokens."""
    struct, copy = text.struct, place.copies[OWN]
    is_long = copy.match >= LEAST_LOST and copy.place < text.index.struct.end
    if is_long and place.predicted[OWN] != token_id:
        struct.lost_place, struct.num_since = copy.place, 0
    elif is_long or struct.num_since == LONGEST_INSERTION:
        struct.lost_place = 0
    else:
        struct.num_since += 1


def find_behind_edit(text: LiveText, ending: Sequence[int]) -> Copy:
    """Where the copy that went wrong goes on: behind the first of its next tokens that is the last one of the text."""
    index, lost = text.index, text.struct.lost_place
    if lost:
        for place in range(lost, min(lost + LONGEST_EDIT, index.struct.end - 1)):
            if index.token_at(place) == ending[-1]:
                return Copy(place + 1, index.match_length(place + 1, ending))
    return Copy()


def settle(text: LiveText, copies: Sequence[Copy] = (Copy(), Copy())) -> None:
    """Set where the copies go on at the end of the text: where they did, unless a longer match is found.

    A copy of the own text that an edit broke off is preferred to a match elsewhere of the same length.
    """
    ending = text.ending()
    for source, index in enumerate((text.index, text.past)):
        kept = copies[source]
        if index is not None:
            found = find_copy(index, ending)
            if found.match > kept.match:
                kept = found
        if source == OWN:
            found = find_behind_edit(text, ending)
            if found.place and found.match >= kept.match:
                kept = found
        text.struct.copies[source].place, text.struct.copies[source].match = kept


def learn(text: LiveText, guesses: Sequence[Guess], token_id: int, rates: HitRates) -> None:
    """Count the guesses up to the one that was right."""
    hits, expected = 0.0, 0.0
    for guess in guesses:
        is_hit = guess.token_id == token_id
        expected += rates.rate(guess.guess_class)
        rates.count(guess.guess_class, is_hit=is_hit)
        if is_hit:
            hits = 1.0
            break
    struct = text.struct
    struct.hits = struct.hits * SEQUENCE_DECAY + hits
    struct.expected = struct.expected * SEQUENCE_DECAY + expected


def adjusted(rate: float, ratio: float) -> float:
    """A rate for a sequence whose guesses were right `ratio` times as often as expected.

    Where they were right more often its odds are so many times as high, which leaves high rates below 1; else it is itself.
    """
    scaled = rate * ratio
    return min(HIGHEST_RATE, scaled if ratio < 1.0 else scaled / (1.0 - rate + scaled))
