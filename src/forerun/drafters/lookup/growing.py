"""Grows a draft best-first: the guess that stands with the highest chance is taken next, wherever it is in the tree."""

from __future__ import annotations

import heapq

from forerun.drafters.lookup.guesses import PSEUDO_COUNT, Copy, Place, adjusted, place_at_end
from forerun.drafters.lookup.hit_rates import HitRates
from forerun.drafters.lookup.live_text import LiveText
from forerun.ops.native.lookup import DraftLimits, GrownTree


def grow(text: LiveText, limits: DraftLimits, rates: HitRates) -> GrownTree:
    """The best tree within `limits`.

    The guesses at a place are tried in their order: each has what those before it leave of the place's chance,
    times its rate. Of equally likely guesses the one that was found first is taken first.
    """
    nodes: list[tuple[int, int, float, int]] = []
    ratio = (text.struct.hits + PSEUDO_COUNT) / (text.struct.expected + PSEUDO_COUNT)
    frontier: list[tuple[float, int, int, int, int, list[int], list[Copy], int]] = []
    num_found = 0
    place, survival, parent = place_at_end(text), 1.0, -1
    while True:
        if len(place.path) < limits.max_depth:
            left = survival
            for guess in place.guesses():
                rate = adjusted(rates.rate(guess.guess_class), ratio)
                chance = left * rate
                if chance >= limits.min_survival:
                    copies = place.behind(guess.token_id)
                    path = [*place.path, guess.token_id]
                    following = place.computed_behind(guess.token_id)
                    offer = (-chance, num_found, guess.token_id, guess.source, parent, path, copies, following)
                    heapq.heappush(frontier, offer)
                    num_found += 1
                left *= 1.0 - rate
                if left < limits.min_survival:
                    break
        if not frontier or len(nodes) >= limits.max_nodes:
            token_ids, parents, chances, sources = zip(*nodes, strict=True) if nodes else ((), (), (), ())
            return GrownTree(token_ids, parents, chances, sources)
        negative_chance, _, token_id, source, node_parent, path, copies, following = heapq.heappop(frontier)
        survival = -negative_chance
        parent = len(nodes)
        nodes.append((token_id, node_parent, survival, source))
        place = Place(text, text.ending() + path, path, copies, following)
