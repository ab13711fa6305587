"""Exact output distributions of verifiers: every branch of every random choice, added up.

A verifier draws its chances through the `Target` and `Chance` seams. `Branch` plays both from a
script; wherever the script ends, it takes the first possible choice and notes the others as
scripts still to run. Nothing is sampled, so losslessness can be claimed to rounding.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.core.draft import Draft
from forerun.verify.base import Verdict
from forerun.verify.judging import Judge

Path = tuple[int, ...]
Model = Callable[[Path], list[float]]
"""Tokens so far -> distribution of the next."""


def random_model(name: str, *, vocab_size: int) -> Model:
    """A model with a random distribution after every path, the same for the same name."""

    @functools.cache
    def probs(path: Path) -> list[float]:
        source = random.Random(f"{name}{path}")
        weights = [source.expovariate(1.0) + 0.01 for _ in range(vocab_size)]
        return [w / sum(weights) for w in weights]

    return probs


def reversed_model(model: Model) -> Model:
    """An adversary: likely where `model` is unlikely."""
    return lambda path: model(path)[::-1]


@dataclass(eq=False)
class Branch:
    """One run of a verifier, as its target and its chance."""

    draft: Draft
    model: Model
    script: tuple[int, ...]
    is_greedy: bool = False
    weight: float = 1.0
    unexplored: list[tuple[int, ...]] = field(default_factory=list)
    taken: tuple[int, ...] = ()

    def probs(self, node: int) -> Tensor:
        path = tuple(self.draft.token_ids[n] for n in self.draft.path(node))
        return torch.tensor(self.model(path), dtype=torch.float64)

    def token(self, of: int | Tensor) -> int:
        """As a target: a sample after a node. As a chance: a draw from probabilities."""
        return self._choose((self.probs(of) if isinstance(of, int) else of).tolist())

    def accepts(self, node: int, probability: float) -> bool:
        assert probability >= 0.0
        accepted = min(probability, 1.0)
        return self._choose([accepted, 1.0 - accepted]) == 0

    def _choose(self, weights: Sequence[float]) -> int:
        possible = [choice for choice, weight in enumerate(weights) if weight > 0.0]
        step = len(self.taken)
        if step < len(self.script):
            choice = self.script[step]
        else:
            choice = possible[0]
            self.unexplored += [(*self.taken, other) for other in possible[1:]]
        self.taken += (choice,)
        self.weight *= weights[choice]
        return choice


def outcomes(judge: Judge, draft: Draft, model: Model) -> Iterator[tuple[Verdict, float]]:
    """Every verdict on `draft`, with its probability."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        branch = Branch(draft, model, scripts.pop())
        verdict = judge(draft, branch, branch)
        scripts += branch.unexplored
        yield verdict, branch.weight


def sampled_drafts(
    parents: Sequence[int], model: Model, *, vocab_size: int, replacement: bool
) -> Iterator[tuple[Draft, float]]:
    """Every draft of one shape that a drafter with `model` may draw, with its probability."""
    for token_ids in itertools.product(range(vocab_size), repeat=len(parents)):
        bare = Draft(token_ids, tuple(parents))
        rows = [_row(bare, node, model, replacement=replacement) for node in range(len(parents))]
        weight = 1.0
        for token_id, row in zip(token_ids, rows, strict=True):
            weight *= row[token_id]
        if weight > 0.0:
            yield Draft(token_ids, tuple(parents), torch.tensor(rows, dtype=torch.float64)), weight


def _row(draft: Draft, node: int, model: Model, *, replacement: bool) -> list[float]:
    parent = draft.parent(node)
    row = model(tuple(draft.token_ids[n] for n in draft.path(parent)))
    if replacement:
        return row
    gone = {draft.token_ids[n] for n in draft.children()[parent + 1] if n < node}
    left = [0.0 if token_id in gone else prob for token_id, prob in enumerate(row)]
    return [prob / (sum(left) or 1.0) for prob in left]


def output_distribution(
    judge: Judge, drafts: Sequence[tuple[Draft, float]], model: Model, *, length: int
) -> dict[Path, float]:
    """Probability of each first `length` tokens: a verdict's, then the target's own."""
    found: dict[Path, float] = {}
    for draft, draft_weight in drafts:
        for verdict, weight in outcomes(judge, draft, model):
            tokens = (*(draft.token_ids[n] for n in verdict.accepted), verdict.token_id)
            for path, rest in continuations(model, tokens[:length], length=length):
                found[path] = found.get(path, 0.0) + draft_weight * weight * rest
    return found


def continuations(model: Model, start: Path, *, length: int) -> Iterator[tuple[Path, float]]:
    """Every path of `length` tokens that begins with `start`, with its probability after it."""
    if len(start) == length:
        yield start, 1.0
        return
    for token_id, prob in enumerate(model(start)):
        for path, rest in continuations(model, (*start, token_id), length=length):
            yield path, prob * rest


def mean_accepted(judge: Judge, drafts: Sequence[tuple[Draft, float]], model: Model) -> float:
    """Expected number of accepted tokens."""
    return sum(
        draft_weight * weight * len(verdict.accepted)
        for draft, draft_weight in drafts
        for verdict, weight in outcomes(judge, draft, model)
    )


def largest_error(judge: Judge, drafts: Sequence[tuple[Draft, float]], model: Model, *, length: int) -> float:
    """Largest difference between the output's distribution and the target's own."""
    found = output_distribution(judge, drafts, model, length=length)
    return max(abs(found.get(path, 0.0) - prob) for path, prob in continuations(model, (), length=length))
