"""How often drafts stand at each depth, for drafters that do not say how likely their nodes are."""

from __future__ import annotations

from collections import Counter

from forerun.core.draft import Draft

PRIOR_RATE, PRIOR_WEIGHT = 0.6, 4.0
DISCOUNT = 0.998
"""Weight of all earlier drafts with each new one, so that a change of the texts shows after a few hundred."""


class DepthRates:
    """How often a draft's token at each depth stood, given that those before it did, for each drafter."""

    def __init__(self) -> None:
        self._counts: dict[str | None, list[tuple[float, float]]] = {}
        self._of_chains: dict[tuple[str | None, int], tuple[float, ...]] = {}  # until something is learnt

    def observe(self, source: str | None, *, depth: int, num_stood: int) -> None:
        """Count the fate of a draft of that depth: depths up to `num_stood` stood, the next did not, deeper ones tell nothing."""
        self._of_chains.clear()
        counts = self._counts.setdefault(source, [])
        num_known = min(num_stood + 1, depth)
        counts.extend([(0.0, 0.0)] * (num_known - len(counts)))
        for i in range(num_known):
            stood, reached = counts[i]
            counts[i] = (stood * DISCOUNT + (i < num_stood), reached * DISCOUNT + 1.0)

    def chances(self, source: str | None, depth: int) -> list[float]:
        """The chance that a path of each length from 0 to `depth` stands, all of it."""
        counts = self._counts.get(source, [])
        chances, chance = [1.0], 1.0
        for i in range(depth):
            stood, reached = counts[i] if i < len(counts) else (0.0, 0.0)
            chance *= (stood + PRIOR_RATE * PRIOR_WEIGHT) / (reached + PRIOR_WEIGHT)
            chances.append(chance)
        return chances

    def survival(self, draft: Draft) -> tuple[float, ...]:
        """The chance of each node of a draft, by its depth alone; falling, since only a beginning of it can be verified.

        The nodes of a depth share its chance evenly, as no more than one of them can stand.
        """
        if draft.parents is None:
            key = draft.source, len(draft.token_ids)
            if key not in self._of_chains:
                self._of_chains[key] = tuple(self.chances(*key)[1:])
            return self._of_chains[key]
        chances = self.chances(draft.source, draft.depth)
        depths = draft.depths()
        num_at = Counter(depths)
        lowest, in_order = 1.0, []
        for depth in depths:
            lowest = min(lowest, chances[depth] / num_at[depth])
            in_order.append(lowest)
        return tuple(in_order)
