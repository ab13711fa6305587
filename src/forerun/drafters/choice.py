"""Which tokens a drafter bets on, of those that its model finds likely."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.random_bits import Stream
from forerun.drafters.base import DraftRequest
from forerun.errors import ConfigError, RequestError
from forerun.ops.sampling import draw_token, target_probs, target_tokens

SAMPLE_METHODS = ("greedy", "probabilistic", "coupled")


def check_sample_method(name: str) -> None:
    """Raise `ConfigError` unless `name` is a way to choose drafted tokens."""
    if name not in SAMPLE_METHODS:
        raise ConfigError(f"draft_sample_method: got {name!r}; may be {', '.join(SAMPLE_METHODS)}")


@dataclass(frozen=True, slots=True)
class Spot:
    """A place to bet on: `count` tokens after the text of `request` and the drafted `path`.

    `index` is the first number of these bets in their draft, which keys their noise.
    """

    request: DraftRequest
    path: tuple[int, ...]
    count: int
    index: int


@dataclass(frozen=True, slots=True)
class Bets:
    """The tokens chosen for a spot, the best first, and what each was drawn from ([vocab_size], given those before it); None: certain."""

    token_ids: list[int]
    probs: list[Tensor] | None = None


class Choice:
    """Chooses drafted tokens; `target_ids` [V] maps logits of a reduced vocabulary to the target's of `vocab_size`.

    "greedy" takes the likeliest. "probabilistic" draws by the request's rules, several without
    replacement, and tells the probabilities, for verifiers that use them. "coupled" draws with the
    noise that the target will draw with, so that the two agree as often as their distributions overlap
    (compare arXiv 2408.07978), for the matching verifier. Greedy requests get greedy drafts.
    """

    def __init__(self, method: str, *, vocab_size: int, target_ids: Tensor | None) -> None:
        self._method = method
        self._vocab_size = vocab_size
        self._target_ids = target_ids

    def choose(self, logits: Tensor, spots: Listing[Spot]) -> list[Bets]:
        """Bets on each spot by its row of `logits` [len(spots), V]."""
        likeliest = self._likeliest(logits, max(spot.count for spot in spots))
        return [
            Bets(best[: spot.count]) if self.is_certain(spot.request) else self._draw(row, spot)
            for spot, best, row in zip(spots, likeliest, logits, strict=True)
        ]

    def is_certain(self, request: DraftRequest) -> bool:
        """Whether a request's bets are the likeliest tokens, by their logits alone."""
        return self._method == "greedy" or request.rules is None or request.rules.is_greedy

    def _likeliest(self, logits: Tensor, count: int) -> list[list[int]]:
        """The `count` likeliest tokens of each row."""
        found = logits.argmax(-1, keepdim=True) if count == 1 else logits.topk(min(count, logits.shape[1])).indices
        if self._target_ids is not None:
            found = self._target_ids[found]
        ids: list[list[int]] = found.tolist()
        return ids

    def _draw(self, row: Tensor, spot: Spot) -> Bets:
        sequence, rules, path = spot.request.sequence, spot.request.rules, spot.path
        assert rules is not None, "asked by is_certain"
        row = self._spread(row)
        try:
            if self._method == "coupled":
                seed, position = sequence.seed, len(sequence) + len(path)
                outputs = sequence.output_ids
                return Bets(target_tokens(rules, row, outputs, path, seed=seed, position=position, count=spot.count))
            return self._without_replacement(target_probs(rules, row, sequence.output_ids, path), spot)
        except RequestError:  # the rules forbid all that can be drafted here
            return Bets([])

    def _without_replacement(self, probs: Tensor, spot: Spot) -> Bets:
        """Draw until enough are drawn or none are left."""
        sequence = spot.request.sequence
        token_ids: list[int] = []
        drawn_from: list[Tensor] = []
        for index in range(spot.index, spot.index + spot.count):
            # keyed by the draft's first position: a draw for a path that is thrown away never decides again
            token = draw_token(probs, seed=sequence.seed, position=len(sequence), stream=Stream.DRAFT, index=index)
            token_ids.append(token)
            drawn_from.append(probs)
            probs = probs.clone()
            probs[token] = 0.0
            total = probs.sum()
            if not total > 0:
                break
            probs /= total
        return Bets(token_ids, drawn_from)

    def _spread(self, row: Tensor) -> Tensor:
        """Logits [V] over the target's vocabulary; a token that cannot be drafted is out."""
        if self._target_ids is None:
            return row
        wide = row.new_full((self._vocab_size,), -torch.inf)
        wide[self._target_ids] = row
        return wide
