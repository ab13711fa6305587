"""MLP speculator: a small recurrent network on the target's last hidden state (arXiv 2404.19124)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from forerun.core.draft import Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, DraftRequest, TargetInfo
from forerun.drafters.device_chains import DeviceChains
from forerun.drafters.neural.device_hidden import LastHidden, RecurrentChains, RecurrentTrees
from forerun.drafters.neural.device_trees import tree_grower
from forerun.drafters.neural.forward import DraftSequence, Prediction, QueryRows, last_hidden_states
from forerun.drafters.neural.head_config import TrainedHeadConfig
from forerun.drafters.neural.writers import ChainWriter, Writer, make_writer
from forerun.models.heads.mlp_speculator import MLPSpeculator, load_mlp_speculator
from forerun.models.store import resolve_model
from forerun.ops.cuda.table import DeviceTable, RuleTable
from forerun.ops.native.attention import block_table


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpeculatorConfig(TrainedHeadConfig):
    """vLLM's keys: the speculator's checkpoint, and those of `TrainedHeadConfig`.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str

    may_be_shared_out: ClassVar[bool] = False

    def build(self, target: TargetInfo) -> Drafter:
        """Load the speculator.

        Raises:
            ConfigError: drafts could be deeper than it has steps, or the tree is too large.
            ModelError: it cannot be loaded or was not made for this target.
        """
        speculator = load_mlp_speculator(resolve_model(str(self.model)), target.itself, quantization=self.quantization)
        self.sampling.check_depth(target.num_speculative_tokens, deepest=speculator.num_steps)
        writer = make_writer(self.sampling, target, speculator)
        return MLPSpeculatorDrafter(SpeculatorPasses(speculator, block_size=target.block_size), writer)


class SpeculatorPasses:
    """Passes of a speculator, which has no KV: its first state is the target's hidden state at the text's end."""

    def __init__(self, speculator: MLPSpeculator, *, block_size: int) -> None:
        self.needs = frozenset(speculator.needs)
        self.speculator = speculator
        self.block_size = block_size

    def sequence(self, request: DraftRequest) -> DraftSequence:
        """The sequence of one request."""
        return DraftSequence(
            request=request,
            num_read=len(request.sequence) - 1,
            block_table=block_table(request.block_ids),
            max_tokens=request.max_tokens,
            max_depth=request.max_depth,
        )

    def draft_chains(
        self,
        sequences: Listing[DraftSequence],
        is_greedy: Listing[bool],
        hidden_states: Mapping[str, Tensor],
        *,
        num_runners_up: int,
    ) -> None:
        """Return None: each step has weights of its own."""

    def read(self, sequence: DraftSequence, hidden_states: Mapping[str, Tensor]) -> QueryRows:
        """The row of the last committed token, with the state of the token before it."""
        (name,) = self.needs
        hidden = last_hidden_states(hidden_states[name], [sequence.request], block_size=self.block_size)
        return QueryRows(
            sequence=sequence,
            token_ids=sequence.request.sequence.tokens_from(sequence.num_read),
            start=sequence.num_read,
            num_predicted=1,
            states=self.speculator.begin(hidden),
        )

    def forward(self, all_rows: Listing[QueryRows]) -> Prediction:
        """Compute one step of the speculator; all rows have the same depth, as writers go depth by depth."""
        first = all_rows[0]
        depth = (first.positions[0] if first.positions else first.start) - first.sequence.num_read
        token_ids = [token for rows in all_rows for token in rows.token_ids]
        states = torch.cat([rows.states for rows in all_rows if rows.states is not None])
        return Prediction(*self.speculator.step(depth, torch.tensor(token_ids, device=states.device), states))


class MLPSpeculatorDrafter:
    """Drafts from the target's hidden state at each sequence's last computed token; keeps no state."""

    def __init__(self, passes: SpeculatorPasses, writer: Writer) -> None:
        self.needs = passes.needs
        self._passes = passes
        self._writer = writer

    def start(self, sequence: Sequence) -> None:
        """Do nothing: no state is kept."""

    def num_unread(self, request: DraftRequest) -> int:  # noqa: ARG002 - nothing is read for any
        """See `ReadsTexts`: only the target does."""
        return 0

    def propose(self, context: DraftContext) -> list[Draft]:
        """Draft for all sequences together, a pass for each depth."""
        sequences = [self._passes.sequence(request) for request in context.requests]
        return self._writer.write(self._passes, sequences, context.features)

    def on_device(self, table: DeviceTable, rules: RuleTable, sample: Callable[..., None]) -> DeviceChains | None:
        """See `DraftsOnDevice`."""
        (name,) = self.needs
        network, writer = self._passes.speculator, self._writer
        last_hidden = LastHidden(name, self._passes.block_size)
        if isinstance(writer, ChainWriter) and not writer.num_runners_up:
            parts = (network, writer.sampler, table, rules, sample, last_hidden)
            return RecurrentChains(*parts, depth=writer.num_places)
        grower = tree_grower(writer, table, rules)
        return None if grower is None else RecurrentTrees(network, grower, table, last_hidden)

    def stop(self, sequence: Sequence) -> None:
        """Do nothing: no state was kept."""
