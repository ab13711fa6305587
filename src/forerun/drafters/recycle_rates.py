"""How often candidates of a recycling table are right: learnt from the texts that follow them.

What the target said after the last two tokens of one text is a guess in another. Whether it is right
depends on how much of the context is known, on the candidate's rank and probability then, and on the
texts: so it is counted, over all sequences, instead of assumed.
"""

from __future__ import annotations

from forerun.core.sampling_params import GREEDY_BELOW
from forerun.drafters.recycle_table import Found

NUM_RANKS = 4  # later ranks count as the last of these
NUM_BUCKETS = 12  # of probabilities
PRIOR_WEIGHT = 8.0  # of the first estimate, in observations
MEMORY = 1000.0  # observations; older ones fade, so that rates follow the texts of the day
FIRST_ESTIMATES = {1: 0.5, 2: 0.8}
"""Context length -> the part of a candidate's probability that is its chance, before anything is known."""


class HitRates:
    """The chance that a candidate is the next token of the text, if the text got to its context.

    Counted by context length, rank and probability, apart for greedy requests. A candidate's probability
    is that at the request's temperature; a greedy request's at temperature 1, since it says how sure the
    target was.
    """

    def __init__(self) -> None:
        self._rates: list[float] = []
        for _ in (False, True):
            for length in (1, 2):
                for _ in range(NUM_RANKS):
                    middles = (((bucket + 0.5) / NUM_BUCKETS) ** 2 for bucket in range(NUM_BUCKETS))
                    self._rates += (FIRST_ESTIMATES[length] * middle for middle in middles)
        self._weights = [PRIOR_WEIGHT] * len(self._rates)

    def chances(self, found: Found, temperature: float) -> list[float]:
        """The chance of each candidate, in their order."""
        rates = self._rates
        return [rates[i] for i in self._bins(found, temperature)]

    def count(self, found: Found, temperature: float, token_id: int) -> None:
        """Count which of the candidates was right, if any: `token_id` followed."""
        rates, weights = self._rates, self._weights
        for i, candidate in zip(self._bins(found, temperature), found.token_ids, strict=True):
            weight = weights[i] = min(weights[i] + 1.0, MEMORY)
            rates[i] += ((candidate == token_id) - rates[i]) / weight

    def _bins(self, found: Found, temperature: float) -> list[int]:
        """Where the rate of each candidate is."""
        first = ((temperature >= GREEDY_BELOW) * 2 + found.context_length - 1) * NUM_RANKS * NUM_BUCKETS
        last = NUM_BUCKETS - 1
        return [
            first + min(rank, NUM_RANKS - 1) * NUM_BUCKETS + min(int(prob**0.5 * NUM_BUCKETS), last)
            for rank, prob in enumerate(found.probabilities(temperature))
        ]
