"""Token embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of a table [vocab_size, hidden_size], times `scale`, which is rounded to the table's dtype as Gemma's is.

    `dtype`: of what comes out; None: the table's.
    """

    table: Tensor
    scale: float = 1.0
    dtype: torch.dtype | None = None

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size]"""
        hidden = F.embedding(token_ids, self.table).to(self.dtype or self.table.dtype)
        return hidden if self.scale == 1.0 else hidden * self.table.new_tensor(self.scale)
