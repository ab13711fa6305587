"""Synthetic engines of which all is known: what steps take, and how many tokens they yield."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from forerun.plan.draft_lengths import Speculation
from forerun.plan.serving_policies import EngineModel


@dataclass(frozen=True, kw_only=True)
class LinearStepTimes:
    """Seconds of a step as a sum: at all, per row, per token of context, per prompt row."""

    base: float = 0.004
    per_row: float = 0.0001
    per_context_token: float = 0.0
    per_prompt_row: float = 0.0001

    def seconds(
        self,
        *,
        num_rows: int,
        num_sequences: int,
        num_context_tokens: int,
        num_prompt_rows: int = 0,
        num_prompt_context: int = 0,
    ) -> float:
        rows = self.per_row * num_rows + self.per_prompt_row * num_prompt_rows
        return self.base + rows + self.per_context_token * num_context_tokens


@dataclass(frozen=True)
class Rates:
    """Acceptance by conditional rates; exact, by hand."""

    conditional: tuple[float, ...]

    def _reached(self, k: int) -> list[float]:
        chances = [1.0]
        for rate in self.conditional[:k]:
            chances.append(chances[-1] * rate)
        return chances

    def expected(self, k: int) -> float:
        return sum(self._reached(k))

    def variance(self, k: int) -> float:
        reached = [*self._reached(k), 0.0]
        pmf = [(tokens, here - after) for tokens, (here, after) in enumerate(pairwise(reached), start=1)]
        mean = sum(tokens * share for tokens, share in pmf)
        return sum((tokens - mean) ** 2 * share for tokens, share in pmf)


def engine_model(step_times: LinearStepTimes | None = None, **limits: int) -> EngineModel:
    defaults = {
        "num_blocks": 4096,
        "block_size": 16,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_model_len": 8192,
    }
    return EngineModel(step_times=step_times or LinearStepTimes(), **defaults | limits)


def speculation(*rates: float, name: str = "draft", per_step: float = 0.0, per_token: float = 0.0) -> Speculation:
    return Speculation(
        name=name,
        acceptance=Rates(rates),
        max_draft_tokens=len(rates),
        seconds_per_step=per_step,
        seconds_per_draft_token=per_token,
        speculative_config={"method": name, "num_speculative_tokens": len(rates)},
    )
