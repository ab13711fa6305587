"""What the target has said last of each text."""

from __future__ import annotations

from collections.abc import Sequence as Listing

import torch
from torch import Tensor

from forerun.drafters.base import DraftRequest


def last_features(features: Tensor, requests: Listing[DraftRequest], *, block_size: int) -> Tensor:
    """The rows of `features` [num_slots, width] at each request's last computed token: [R, width]"""
    slots = []
    for request in requests:
        block, offset = divmod(request.num_computed - 1, block_size)
        slots.append(int(request.block_ids[block]) * block_size + offset)
    return features.index_select(0, torch.tensor(slots, device=features.device))
