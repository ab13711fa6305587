"""Synthetic engines of which all is known: what steps take, and how many tokens they yield."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.draft_lengths import Speculation, StepSeconds, chain_yields
from forerun.plan.serving_policies import EngineModel
from forerun.plan.step_times import DraftingCost


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


def engine_model(step_times: StepSeconds | None = None, **limits: int) -> EngineModel:
    defaults = {
        "num_blocks": 4096,
        "block_size": 16,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_model_len": 8192,
    }
    return EngineModel(step_times=step_times or LinearStepTimes(), **defaults | limits)


def speculation(*rates: float, name: str = "draft", per_step: float = 0.0, per_token: float = 0.0) -> Speculation:
    acceptance = AcceptanceProfile(method=name, conditional=rates)
    return Speculation(
        name=name,
        acceptance=acceptance,
        yields=chain_yields(acceptance, len(rates)),
        cost=DraftingCost(seconds_per_step=per_step, seconds_per_draft_token=per_token),
        speculative_config={"method": name, "num_speculative_tokens": len(rates)},
    )
