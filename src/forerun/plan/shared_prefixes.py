"""What the prompts of a trace begin with in common, by the names of their pieces: what prefix caches find of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from forerun.plan.simulation.requests import SimulatedRequest

LEAST_SHARE = 0.5
"""Of the prompts that must begin with a piece for it to be part of the common beginning."""


def common_beginning(requests: Sequence[SimulatedRequest]) -> tuple[int, ...]:
    """The names of the pieces that at least half of the prompts begin with; none where so many have nothing in common."""
    beginning: list[int] = []
    alike = [one.piece_hashes for one in requests]
    while True:
        at = len(beginning)
        alike = [pieces for pieces in alike if len(pieces) > at]
        counted = Counter(pieces[at] for pieces in alike).most_common(1)
        if not counted or counted[0][1] < max(2, LEAST_SHARE * len(requests)):
            return tuple(beginning)
        beginning.append(counted[0][0])
        alike = [pieces for pieces in alike if pieces[at] == beginning[at]]


def share_of_beginning(requests: Sequence[SimulatedRequest], beginning: Sequence[int]) -> float:
    """The share of the prompts' tokens that are in a common beginning, each prompt's last token left out: it is always computed."""
    num_shared = 0
    for one in requests:
        num_pieces = 0
        for piece, wanted in zip(one.piece_hashes, beginning, strict=False):
            if piece != wanted:
                break
            num_pieces += 1
        num_shared += min(num_pieces * one.piece_size, one.num_prompt_tokens - 1)
    return num_shared / sum(one.num_prompt_tokens for one in requests)


def repeated_share(requests: Sequence[SimulatedRequest]) -> float:
    """The share of the prompts' tokens that an earlier prompt has begun with too: what one cache without limit would find."""
    seen: set[int] = set()
    num_repeated = 0
    for one in requests:
        key, num_pieces, is_repeated = 0, 0, True
        for piece in one.piece_hashes:
            key = hash((key, piece))
            is_repeated = is_repeated and key in seen
            num_pieces += is_repeated
            seen.add(key)
        num_repeated += min(num_pieces * one.piece_size, one.num_prompt_tokens - 1)
    return num_repeated / sum(one.num_prompt_tokens for one in requests)
