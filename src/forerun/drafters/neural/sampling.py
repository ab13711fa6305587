"""How a neural drafter picks its tokens from logits, and the keys by which users choose that."""

from __future__ import annotations

import math
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from forerun.core.integers import is_integer
from forerun.core.random_bits import Stream, key_of
from forerun.drafters.base import DraftRequest
from forerun.drafters.neural.tree import DraftedTokens, DraftPosition, DynamicTree, StaticTree, parse_tree
from forerun.errors import ConfigError, ForerunError, RequestError
from forerun.ops.draws import Draw, Drawn
from forerun.ops.native.sampling import choose_sampler
from forerun.ops.race import lead
from forerun.ops.sampling import draw_token, target_probs

SAMPLE_METHODS = ("greedy", "probabilistic", "coupled")


class DraftSampler:
    """Picks draft tokens; `target_ids` [V] maps logits of a reduced vocabulary to the target's of `vocab_size` tokens.

    "greedy" takes the likeliest tokens. "probabilistic" draws by the request's sampling rules, several
    tokens without replacement, and returns the probabilities, for verifiers that use them. "coupled"
    draws with the noise that the target will draw with, so that the two agree as often as their
    distributions overlap (compare arXiv 2408.07978), for the matching verifier. Greedy requests always
    get the likeliest tokens.
    """

    def __init__(self, method: str, *, vocab_size: int, target_ids: Tensor | None) -> None:
        self._method = method
        self._vocab_size = vocab_size
        self.target_ids = target_ids
        self._sampler = choose_sampler()

    def sample(self, logits: Tensor, positions: Listing[DraftPosition]) -> list[DraftedTokens]:
        """Pick tokens for each position by its row of `logits` [len(positions), V].

        A position gets no tokens where its request's rules forbid all that can be drafted there.
        """
        likeliest = self._likeliest(logits, max(position.num_tokens for position in positions))
        draw = self._draw_coupled if self._method == "coupled" else self._draw_alone
        drawn = iter(draw(logits, positions))
        return [
            best.first(position.num_tokens) if self.is_greedy(position.request) else next(drawn)
            for position, best in zip(positions, likeliest, strict=True)
        ]

    @property
    def takes_likeliest(self) -> bool:
        """Whether every request's tokens are the likeliest ones."""
        return self._method == "greedy"

    def is_greedy(self, request: DraftRequest) -> bool:
        """Whether a request's tokens are the likeliest ones, whatever was drafted before them."""
        return self._method == "greedy" or request.rules is None or request.rules.is_greedy

    def may_draft_on_device(self, request: DraftRequest) -> bool:
        """Whether a request's tokens are the likeliest, or those of the target's races with logits that no rule changes."""
        return self.takes_likeliest or (
            self._method == "coupled" and (self.is_greedy(request) or self.may_race(request))
        )

    def may_race(self, request: DraftRequest) -> bool:
        """Whether a request's tokens are those of the target's races, with logits that no rule changes."""
        rules, num_output = request.rules, len(request.sequence.output_ids)
        return self._method == "coupled" and rules is not None and not rules.changes_logits_at(num_output)

    def _likeliest(self, logits: Tensor, num_tokens: int) -> list[DraftedTokens]:
        """The likeliest tokens of each row, the likeliest first."""
        margins = [math.nan if num_tokens == 1 else math.inf] * len(logits)
        if num_tokens == 1:
            found = logits.argmax(-1, keepdim=True)
        else:
            values, found = logits.topk(min(num_tokens, logits.shape[1]))
            if values.shape[1] > 1:
                margins = (values[:, 0] - values[:, 1]).tolist()
        ids_of = self.in_target(found).tolist()
        return [DraftedTokens(ids, margin=margin) for ids, margin in zip(ids_of, margins, strict=True)]

    def _draw_coupled(self, logits: Tensor, positions: Listing[DraftPosition]) -> list[DraftedTokens]:
        """The first tokens of the races that the target will run, for each position that is not greedy."""
        asked: list[DraftPosition] = []
        draws: list[Draw] = []
        for row, position in enumerate(positions):
            sequence, rules = position.request.sequence, position.request.rules
            if rules is None or self.is_greedy(position.request):
                continue
            asked.append(position)
            place = len(sequence) + len(position.path)
            draws.append(Draw(row, rules, sequence.output_ids, position.path, sequence.seed, place))
        if not draws:
            return []
        count = max(position.num_tokens for position in asked)
        wide = self.spread(logits)
        found = self._sampler.draw(wide, draws, count=count)
        margins = self._margins(wide, asked, draws, found)
        return [_drafted(*one) for one in zip(found, asked, margins, strict=True)]

    def _margins(
        self, logits: Tensor, positions: Listing[DraftPosition], draws: Listing[Draw], found: Listing[Drawn]
    ) -> list[float]:
        """Between the first two of the tokens `found` for each position, where more than one was asked for and no rule changes logits."""
        margins = [math.nan] * len(positions)
        both: list[tuple[int, list[int]]] = []  # positions and the tokens to compare
        for i, (position, drawn) in enumerate(zip(positions, found, strict=True)):
            if position.num_tokens == 1 or not isinstance(drawn, list) or not self.may_race(position.request):
                continue
            if len(drawn) > 1:
                both.append((i, drawn[:2]))
            else:
                margins[i] = math.inf
        if not both:
            return margins
        rows = logits[[draws[i].row for i, _ in both]]
        token_ids = torch.tensor([pair for _, pair in both], device=logits.device)
        below = (rows.gather(1, token_ids) - rows.amax(1, keepdim=True)).numpy(force=True)
        for (i, pair), of_pair in zip(both, below, strict=True):
            draw = draws[i]
            key = key_of(draw.seed, draw.position, Stream.TARGET, 0)
            margins[i] = lead(of_pair / np.float32(draw.rules.params.temperature), np.array(pair), key=key)
        return margins

    def _draw_alone(self, logits: Tensor, positions: Listing[DraftPosition]) -> list[DraftedTokens]:
        """Tokens with the probabilities that they were drawn from, for each position that is not greedy."""
        return [
            self._draw(row, position)
            for row, position in zip(logits, positions, strict=True)
            if not self.is_greedy(position.request)
        ]

    def _draw(self, row: Tensor, position: DraftPosition) -> DraftedTokens:
        sequence, rules = position.request.sequence, position.request.rules
        assert rules is not None, "a request without rules is greedy"
        try:
            probs = target_probs(rules, self.spread(row), sequence.output_ids, position.path)
        except RequestError:  # the rules forbid all that can be drafted here
            return DraftedTokens([])
        return self._without_replacement(probs, position)

    def _without_replacement(self, probs: Tensor, position: DraftPosition) -> DraftedTokens:
        """Draw until there are enough tokens or none is left."""
        sequence = position.request.sequence
        token_ids: list[int] = []
        drawn_from: list[Tensor] = []
        for index in range(position.noise_index, position.noise_index + position.num_tokens):
            # keyed by the draft's first position: the noise of a rejected path is never used again
            token = draw_token(probs, seed=sequence.seed, position=len(sequence), stream=Stream.DRAFT, index=index)
            token_ids.append(token)
            drawn_from.append(probs)
            probs = probs.clone()
            probs[token] = 0.0
            total = probs.sum()
            if not total > 0:
                break
            probs /= total
        return DraftedTokens(token_ids, drawn_from)

    def in_target(self, found: Tensor) -> Tensor:
        """The target's tokens of logits with these numbers, int64 of any shape."""
        return found if self.target_ids is None else self.target_ids[found]

    def spread(self, logits: Tensor) -> Tensor:
        """Logits [..., V] over the target's vocabulary; -inf for tokens that the drafter does not have."""
        if self.target_ids is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self._vocab_size), -torch.inf)
        wide[..., self.target_ids] = logits
        return wide


def _drafted(drawn: Drawn, position: DraftPosition, margin: float) -> DraftedTokens:
    if isinstance(drawn, RequestError):  # the rules forbid all that can be drafted here
        return DraftedTokens([])
    if isinstance(drawn, ForerunError):
        raise drawn
    return DraftedTokens(drawn[: position.num_tokens], margin=margin)


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """The sampling method (see `DraftSampler`) and the tree shape of drafts; a `tree` of None means a chain.

    Raises:
        ConfigError: there is no such method, or a dynamic tree comes with another method than "greedy".
    """

    method: str = "greedy"
    tree: StaticTree | DynamicTree | None = None

    def __post_init__(self) -> None:
        if self.method not in SAMPLE_METHODS:
            raise ConfigError(f"draft_sample_method: got {self.method!r}; may be {', '.join(SAMPLE_METHODS)}")
        if isinstance(self.tree, DynamicTree) and self.method != "greedy":
            raise ConfigError(
                f"draft_sample_method: got {self.method!r} with a dynamic draft_tree, which takes the likeliest tokens; "
                "must be 'greedy'; or give a static tree"
            )

    def sampler(self, *, vocab_size: int, target_ids: Tensor | None) -> DraftSampler:
        """Make the sampler for a network with these logits."""
        return DraftSampler(self.method, vocab_size=vocab_size, target_ids=target_ids)

    def check_size(self, num_tokens: int) -> None:
        """Raise `ConfigError` if a static tree has more nodes than the `num_tokens` of a draft."""
        if isinstance(self.tree, StaticTree) and self.tree.num_nodes > num_tokens:
            raise ConfigError(
                f"draft_tree: has {self.tree.num_nodes} nodes, num_speculative_tokens allows {num_tokens}; "
                "raise it or leave nodes out"
            )

    def check_depth(self, num_tokens: int, *, deepest: int) -> None:
        """Raise `TooDeepError` if a draft of `num_tokens` can be deeper than the `deepest` that its checkpoint predicts."""
        if self.tree is None and num_tokens > deepest:
            raise TooDeepError(
                f"num_speculative_tokens: got {num_tokens}; the checkpoint predicts {deepest} tokens ahead; lower it, "
                "or give a draft_tree",
                deepest=deepest,
            )
        if self.tree is not None and self.tree.depth > deepest:
            raise TooDeepError(
                f"draft_tree: is {self.tree.depth} levels deep; the checkpoint predicts {deepest} tokens ahead; "
                "leave levels out",
                deepest=deepest,
            )


class TooDeepError(ConfigError):
    """Drafts would be deeper than the `deepest` that their checkpoint predicts."""

    def __init__(self, message: str, *, deepest: int = 0) -> None:
        super().__init__(message)
        self.deepest = deepest


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSamplingConfig:
    """The keys of a `DraftSampling`, and how many processes compute the drafter; the base of the settings of neural drafters.

    Raises:
        ConfigError: a value is out of range.
    """

    draft_sample_method: str = "greedy"
    draft_tree: Any = None
    draft_tensor_parallel_size: int = 1

    may_be_shared_out: ClassVar[bool] = True
    """Whether several processes can compute the drafter."""

    def __post_init__(self) -> None:
        _ = self.sampling
        size = self.draft_tensor_parallel_size
        if not is_integer(size) or size < 1:
            raise ConfigError(f"draft_tensor_parallel_size: got {size!r}; must be 1 or tensor_parallel_size")
        if size > 1 and not self.may_be_shared_out:
            raise ConfigError(
                f"draft_tensor_parallel_size: got {size}; must be 1 with this method, which one process computes; leave it out"
            )

    @property
    def sampling(self) -> DraftSampling:
        """The checked method and tree shape."""
        return DraftSampling(self.draft_sample_method, parse_tree(self.draft_tree))

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """The size of a static tree; of other drafts the user must give the number of tokens."""
        tree = self.sampling.tree
        return tree.num_nodes if isinstance(tree, StaticTree) else None
