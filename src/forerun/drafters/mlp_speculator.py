"""MLP speculator: a small recurrent network on the target's last hidden state (arXiv 2404.19124)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.draft import Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, DraftRequest, TargetInfo
from forerun.drafters.features import last_features
from forerun.drafters.passes import Line, Rows
from forerun.drafters.predictor import Prediction
from forerun.drafters.wording import WordedConfig
from forerun.drafters.writers import Writer
from forerun.models.heads.mlp_speculator import MLPSpeculator, load_mlp_speculator
from forerun.models.store import resolve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpeculatorConfig(WordedConfig):
    """vLLM's keys: the speculator's checkpoint, and how its tokens are chosen (`Wording`).

    Raises:
        ConfigError: a value is out of range.
    """

    model: str

    def build(self, target: TargetInfo) -> Drafter:
        """Load the speculator.

        Raises:
            ConfigError: drafts could be deeper than it has steps, or the tree is too large.
            ModelError: it cannot be loaded or was not made for this target.
        """
        speculator = load_mlp_speculator(resolve_model(str(self.model)), target.itself)
        wording = self.wording
        wording.check_depth(target.num_speculative_tokens, deepest=speculator.num_steps)
        writer = wording.writer(target, speculator)
        return MLPSpeculatorDrafter(StepPasses(speculator, block_size=target.block_size), writer)


class StepPasses:
    """Passes of a speculator: no KV, and the state of the text's end is the target's own feature."""

    def __init__(self, speculator: MLPSpeculator, *, block_size: int) -> None:
        self.needs = frozenset(speculator.needs)
        self._speculator = speculator
        self._block_size = block_size

    def line(self, request: DraftRequest) -> Line:
        """One sequence to draft for."""
        return Line(
            request=request,
            start=len(request.sequence) - 1,
            table=request.block_ids,
            max_tokens=request.max_tokens,
            max_depth=request.max_depth,
        )

    def read(self, line: Line, features: Mapping[str, Tensor]) -> Rows:
        """The last committed token, with the state of the token before it."""
        (name,) = self.needs
        hidden = last_features(features[name], [line.request], block_size=self._block_size)
        return Rows(
            line=line,
            token_ids=line.request.sequence.tokens_from(line.start),
            start=line.start,
            num_wanted=1,
            states=self._speculator.begin(hidden),
        )

    def forward(self, listed: Listing[Rows]) -> Prediction:
        """One step of the speculator; writers go through all lines depth by depth."""
        first = listed[0]
        place = first.positions[0] if first.positions else first.start
        token_ids = [token for rows in listed for token in rows.token_ids]
        states = torch.cat([rows.states for rows in listed if rows.states is not None])
        return Prediction(
            *self._speculator.step(place - first.line.start, torch.tensor(token_ids, device=states.device), states)
        )


class MLPSpeculatorDrafter:
    """Reads one feature of each text, that of its last computed token, and keeps nothing."""

    def __init__(self, passes: StepPasses, writer: Writer) -> None:
        self.needs = passes.needs
        self._passes = passes
        self._writer = writer

    def start(self, sequence: Sequence) -> None:
        """Nothing to know."""

    def propose(self, context: DraftContext) -> list[Draft]:
        """Draft for all sequences together, a pass for each depth."""
        lines = [self._passes.line(request) for request in context.requests]
        return self._writer.write(self._passes, lines, context.features)

    def stop(self, sequence: Sequence) -> None:
        """Nothing to forget."""
