"""Writes all tokens of a draft in one forward pass (PARD, arXiv 2504.18583; P-EAGLE, arXiv 2602.01469)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from forerun.core.draft import NO_DRAFT, Draft
from forerun.drafters.independent import IndependentWriter
from forerun.drafters.passes import Line, Rows
from forerun.drafters.writers import ForwardPasses
from forerun.errors import ConfigError
from forerun.models.mask_token import MaskToken


def check_parallel_drafting(value: object) -> None:
    """Raise `ConfigError` unless `parallel_drafting` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"parallel_drafting: got {value!r}; may be True or False")


class ParallelWriter:
    """A draft from one pass: the text's last token predicts the first depth, and each mask after it one more.

    A prediction knows nothing of the tokens drafted before it, so the branches of a tree share those of their
    depth; only the request's rules look at the path.
    """

    def __init__(self, words: IndependentWriter, mask: MaskToken) -> None:
        self.num_places = words.depth
        self._words = words
        self._mask = mask

    def write(self, passes: ForwardPasses, lines: Listing[Line], features: Mapping[str, Tensor]) -> list[Draft]:
        """See `Writer`."""
        rows = [self._masked(passes.read(line, features)) for line in lines if line.is_wanted]
        return write_at_once(self._words, passes, lines, rows)

    def _masked(self, rows: Rows) -> Rows:
        """Unread text with the masks behind it."""
        num_wanted = depth_of(rows.line, self._words)
        states = rows.states
        if states is not None:
            assert self._mask.state is not None, "what reads states has one for masks"
            states = torch.cat([states, self._mask.state.expand(num_wanted - 1, -1)])
        token_ids = rows.token_ids + [self._mask.token_id] * (num_wanted - 1)
        return replace(rows, token_ids=token_ids, num_wanted=num_wanted, states=states)


def depth_of(line: Line, words: IndependentWriter) -> int:
    """How many predictions a line's draft can use."""
    return min(line.max_tokens, line.max_depth, words.depth)


def write_at_once(
    words: IndependentWriter, passes: ForwardPasses, lines: Listing[Line], rows: Listing[Rows]
) -> list[Draft]:
    """A draft for each line; those that want one have `rows`, which predict it depth by depth."""
    if not rows:
        return [NO_DRAFT] * len(lines)
    logits = passes.forward(rows).logits
    requests = [replace(own.line.request, max_depth=own.num_wanted) for own in rows]
    counts = np.array([own.num_wanted for own in rows])
    first = np.cumsum(counts) - counts
    deepest = int(counts.max())  # of a line that ends before, the last prediction stands in and goes unused
    by_depth = (logits[first + np.minimum(depth, counts - 1)] for depth in range(deepest))
    drafts = iter(words.write(requests, by_depth))
    return [next(drafts) if line.is_wanted else NO_DRAFT for line in lines]
