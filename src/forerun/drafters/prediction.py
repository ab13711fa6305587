"""Drafts from a prediction: the text that a client expects back, as OpenAI's `prediction` gives it.

No method that is chosen: where a request brings a prediction it is drafted first, whatever the method.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Listing
from functools import cache
from itertools import accumulate
from operator import mul

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sequence import Sequence
from forerun.core.stats import PREDICTION
from forerun.drafters.base import DraftContext, DraftRequest
from forerun.drafters.confidence import DEFAULT_THRESHOLD, discount

FIRST_MATCH = 8
"""Before the first token the client's word for it counts like a match of so many tokens."""
LONGEST_MATCH = 32  # tokens; longer matches count as this long
SURE_MATCH = 2  # tokens: where the text has parted from its prediction, a shorter match shows the place only nearby
NEARBY = 8  # tokens ahead
MOST_PLACES = 32  # that are looked at on each side of a departure; a frequent token has many more
MOST_TOKENS = 128  # of a draft


class PredictionDrafter:
    """Follows each text in its prediction, and drafts what comes next there.

    Sequences without a prediction get no draft, and cost nothing.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._places: dict[int, PredictionPlace] = {}  # by seq_id

    def start(self, sequence: Sequence) -> None:
        """Note the prediction, if there is one."""
        if sequence.prediction_ids:
            self._places.setdefault(sequence.seq_id, PredictionPlace(sequence.prediction_ids))

    def propose(self, context: DraftContext) -> list[Draft]:
        """Return a chain per request; empty where there is no prediction, or the text is nowhere in it."""
        if not self._places:
            return [NO_DRAFT] * len(context.requests)
        return [self._draft(request) for request in context.requests]

    def stop(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._places.pop(sequence.seq_id, None)

    def _draft(self, request: DraftRequest) -> Draft:
        place = self._places.get(request.sequence.seq_id)
        if place is None:
            return NO_DRAFT
        place.read(request.sequence.output_ids)
        most = min(request.max_tokens, request.max_depth)
        token_ids = place.ahead(most, min_survival=request.min_survival or DEFAULT_THRESHOLD)
        if not token_ids:
            return NO_DRAFT
        return Draft(token_ids, source=PREDICTION, survival=survival(place.match_length)[: len(token_ids)])


class PredictionPlace:
    """Where a growing text stands in its prediction.

    While the text does what was predicted, the place moves on with it. Where it departs, the place is
    found again by the longest match of its last tokens with what comes before a place, first among the
    places after the departure (so replaced and inserted text is passed), then among all before it (text
    that is repeated). Of equally long matches the one nearest to the departure wins.
    """

    def __init__(self, token_ids: Listing[int]) -> None:
        self._token_ids = tuple(token_ids)
        self._place: int | None = 0  # of the token that is expected next; None: nowhere
        self._departure = 0  # the place of the first token that did not come
        self._num_read = 0  # tokens of the text
        self._places_after: dict[int, list[int]] | None = None  # token -> rising places behind it; made when needed
        self.match_length = FIRST_MATCH
        """The number of tokens before the place that equal the text's last ones."""

    def read(self, output_ids: Listing[int]) -> None:
        """Go on to the end of a text that begins with what was read before."""
        predicted = self._token_ids
        for num_read in range(self._num_read, len(output_ids)):
            place, token_id = self._place, output_ids[num_read]
            if place is None or place >= len(predicted) or predicted[place] != token_id:
                self._find(output_ids, num_read + 1)
                continue
            self._place = place + 1
            self.match_length = min(self.match_length + 1, LONGEST_MATCH)
            if self.match_length >= SURE_MATCH:
                self._departure = place + 1
        self._num_read = max(self._num_read, len(output_ids))

    def ahead(self, most: int, *, min_survival: float) -> tuple[int, ...]:
        """The next tokens of the prediction, at most `most`, while all of them stand with a chance of `min_survival`."""
        if self._place is None:
            return ()
        num_likely = sum(chance >= min_survival for chance in survival(self.match_length)[: max(0, most)])
        return self._token_ids[self._place : self._place + num_likely]

    def _find(self, text: Listing[int], end: int) -> None:
        """Find the place again after the first `end` tokens of the text."""
        if self._places_after is None:
            self._places_after = {}
            for place, token_id in enumerate(self._token_ids, start=1):
                self._places_after.setdefault(token_id, []).append(place)
        places = self._places_after.get(text[end - 1], [])
        first = bisect_left(places, self._departure + 1)
        later, earlier = places[first : first + MOST_PLACES], places[max(0, first - MOST_PLACES) : first]
        self._place, self.match_length = self._best(later, text, end)
        if self._place is None or (self.match_length < SURE_MATCH and self._place - self._departure > NEARBY):
            self._place, self.match_length = self._best(reversed(earlier), text, end)
            if self.match_length < SURE_MATCH:
                self._place, self.match_length = None, 0

    def _best(self, places: Iterable[int], text: Listing[int], end: int) -> tuple[int | None, int]:
        """The first of the places with the longest match, and its length."""
        best, longest = None, 0
        for place in places:
            length = self._match_length(place, text, end)
            if length > longest:
                best, longest = place, length
                if length == LONGEST_MATCH:
                    break
        return best, longest

    def _match_length(self, place: int, text: Listing[int], end: int) -> int:
        """The number of tokens (at most `LONGEST_MATCH`) before `place` that equal those before `end` of the text."""
        most = min(place, end, LONGEST_MATCH)
        for length in range(most):
            if self._token_ids[place - 1 - length] != text[end - 1 - length]:
                return length
        return most


@cache
def survival(match_length: int) -> tuple[float, ...]:
    """For each token of a draft after a match of `match_length` tokens, the chance that it and those before it stand."""
    return tuple(accumulate((1.0 - discount(match_length + i) for i in range(MOST_TOKENS)), mul))
