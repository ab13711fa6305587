"""A verifier that judges each sequence alone, from the target's distributions and keyed random choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from forerun.core.batch import Candidates
from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.random_bits import Stream, uniform
from forerun.errors import ForerunError
from forerun.ops.draws import Draw, Drawn, RowSampler
from forerun.ops.grammar import GrammarNotReadyError
from forerun.ops.native.sampling import choose_sampler
from forerun.ops.sampling import check_largest, draw_token, target_probs
from forerun.verify.base import Verdict, VerifyRequest


class Target(Protocol):
    """The target's tokens and distributions after each node of one draft; node -1 is the last committed token."""

    @property
    def is_greedy(self) -> bool:
        """Whether every distribution is certain."""
        ...

    def token(self, node: int) -> int:
        """The target's own token after `node`, sampled."""
        ...

    def probs(self, node: int) -> Tensor:
        """Distribution of the target's token after `node`: [vocab_size]."""
        ...


class Chance(Protocol):
    """The random choices of one judgement; each is asked for at most once."""

    def accepts(self, node: int, probability: float) -> bool:
        """True with `probability`, always for 1 or more; independent for each node."""
        ...

    def token(self, probs: Tensor) -> int:
        """A token drawn from `probs` [vocab_size]."""
        ...


def probs_where_rules_hold(target: Target, node: int) -> Tensor | None:
    """The target's distribution after `node`; None where the sampling rules fail after a drafted token.

    Once chance has accepted that token it stands, and ends the step: the next one meets the failure where plain decoding
    does. To judge again without the draft would make the token rarer than the target has it.
    """
    try:
        return target.probs(node)
    except GrammarNotReadyError:
        raise
    except ForerunError:
        if node < 0:
            raise
        return None


Judge = Callable[[Draft, Target, Chance], Verdict]
"""Decides which path of one draft stands, and the token after it; of an empty draft, what is left is the target's own token."""


@dataclass(slots=True)
class IndependentVerifier:
    """A verifier that judges each sequence of a step alone, with `judge`.

    Where `judge` lets an error of the sampling rules at some node of a draft pass, the sequence is judged again without the
    draft, so that its text goes on as in plain decoding; an error there ends the request.
    """

    judge: Judge
    is_lossless: bool
    sampler: RowSampler = field(default_factory=choose_sampler)

    def verify(
        self, logits: Tensor, judged: Sequence[VerifyRequest], candidates: Candidates | None = None
    ) -> list[Verdict | None]:
        """Judge every sequence; one whose rules raise gets an error verdict or none yet (see `Verifier`)."""
        most_likely, sampled = MostLikely(logits, candidates), SampledTokens(logits, judged, self.sampler, candidates)
        return [self._verdict(logits, one, most_likely, sampled) for one in judged]

    def _verdict(
        self, logits: Tensor, one: VerifyRequest, most_likely: MostLikely, sampled: SampledTokens
    ) -> Verdict | None:
        try:
            if not one.draft.token_ids:  # every judge takes the target's own token
                is_plain_greedy = one.rules.is_plain_greedy_at(len(one.output_ids))
                return Verdict((), most_likely.token(one.first_row) if is_plain_greedy else sampled.token(one, -1))
            target = SequenceTarget(logits, one, most_likely, sampled)
            chance = SeededChance(one.seed, one.position)
            return self.judge(one.draft, target, chance)
        except GrammarNotReadyError:
            return None
        except ForerunError as error:
            if not len(one.draft):
                return Verdict((), 0, error=str(error), error_kind=error.kind)
            return self._verdict(logits, replace(one, draft=NO_DRAFT), most_likely, sampled)


class MostLikely:
    """The most likely token of each row of a step's logits; the lowest id where several are.

    It is the row's first candidate where the target found any. Else, on CPU, a row costs microseconds
    when it is asked for, so rows beyond the accepted path cost nothing; elsewhere all rows are done in
    one call at the first question.
    """

    def __init__(self, logits: Tensor, candidates: Candidates | None = None) -> None:
        self._logits = logits
        self._candidates = candidates
        self._rows: npt.NDArray[np.float32] | None = logits.numpy() if candidates is None and logits.is_cpu else None

    def token(self, row: int) -> int:
        """Return the argmax of row `row`; `ModelError` where it is not finite."""
        if self._rows is None:
            token_ids, values = self._all
            check_largest(values[row])
            return token_ids[row]
        logits = self._rows[row]
        token_id = int(logits.argmax())
        check_largest(float(logits[token_id]))
        return token_id

    @cached_property
    def _all(self) -> tuple[list[int], list[float]]:
        if self._candidates is not None:
            return self._candidates.first()
        largest = self._logits.max(dim=-1)
        return largest.indices.tolist(), largest.values.tolist()


class SampledTokens:
    """The target's own token after each node of a step's drafts, drawn by the rules of the node's request.

    Every sequence needs the token after its last committed one, so these are drawn in one call at the first
    question. A token further down a draft is drawn when it is asked for: most drafts end before.
    """

    def __init__(
        self,
        logits: Tensor,
        judged: Sequence[VerifyRequest],
        sampler: RowSampler,
        candidates: Candidates | None = None,
    ) -> None:
        self._logits = logits
        self._judged = judged
        self._sampler = sampler
        self._candidates = candidates

    def token(self, one: VerifyRequest, node: int) -> int:
        """Return the token after `node`, a function of seed, position and text only.

        Raises:
            RequestError: the rules failed, have no answer yet, or forbid every token.
            ModelError: the logits are not finite.
        """
        drawn = self._first.get(one.first_row) if node < 0 else None
        if drawn is None:
            (drawn,) = self._sampler.draw(self._logits, [_draw_after(one, node)], candidates=self._candidates)
        if isinstance(drawn, ForerunError):
            raise drawn
        return drawn[0]

    @cached_property
    def _first(self) -> dict[int, Drawn]:
        """What was drawn at the first row of each sequence; a user's processors are not called before they must be."""
        asked = [
            Draw(one.first_row, one.rules, one.output_ids, (), one.seed, one.position)
            for one in self._judged
            if not one.rules.has_processors and not one.rules.is_plain_greedy_at(len(one.output_ids))
        ]
        drawn = self._sampler.draw(self._logits, asked, candidates=self._candidates)
        return {draw.row: tokens for draw, tokens in zip(asked, drawn, strict=True)}


def _draw_after(one: VerifyRequest, node: int) -> Draw:
    path = one.path(node)
    return Draw(one.first_row + 1 + node, one.rules, one.output_ids, path, one.seed, one.position + len(path))


class SequenceTarget:
    """The target's logits at the places of one sequence's draft, under the request's rules.

    Sampling rules are applied only at the nodes that a verifier asks for.
    """

    __slots__ = ("_is_plain_greedy", "_judged", "_logits", "_most_likely", "_sampled")

    def __init__(self, logits: Tensor, judged: VerifyRequest, most_likely: MostLikely, sampled: SampledTokens) -> None:
        self._logits = logits
        self._judged = judged
        self._most_likely = most_likely
        self._sampled = sampled
        self._is_plain_greedy = judged.rules.is_plain_greedy_at(len(judged.output_ids))

    @property
    def is_greedy(self) -> bool:
        """Whether the request is greedy."""
        return self._judged.rules.is_greedy

    def token(self, node: int) -> int:
        """The target's own token after `node`, a function of seed, position and text only."""
        if self._is_plain_greedy:
            return self._most_likely.token(self._judged.first_row + 1 + node)
        return self._sampled.token(self._judged, node)

    def probs(self, node: int) -> Tensor:
        """Distribution of the target's token after `node`: [vocab_size] fp32 on the CPU."""
        one = self._judged
        return target_probs(one.rules, self._logits[one.first_row + 1 + node], one.output_ids, one.path(node))


@dataclass(slots=True)
class SeededChance:
    """Chance keyed by the seed and by the position of the first token to decide.

    Every step decides at least one token, so no later step sees the same position and no draw
    decides twice, not even one for a node far down a path that was thrown away.
    """

    seed: int
    position: int

    def accepts(self, node: int, probability: float) -> bool:
        """Whether the noise of `node` falls below `probability`."""
        return probability >= 1.0 or uniform(self.seed, self.position, Stream.ACCEPTANCE, index=node + 1) < probability

    def token(self, probs: Tensor) -> int:
        """Draw from `probs` with the noise of this step's recovered token."""
        return draw_token(probs, seed=self.seed, position=self.position, stream=Stream.RECOVERY)
