"""Compares layers on the device with torch's before an engine relies on them: one short pass of each."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.errors import DeviceLostError, one_line
from forerun.executor.host_copies import as_current
from forerun.models.base import LoadedTarget
from forerun.ops.cuda.failures import device_failure

NUM_ROWS = 24  # of one text, if there is room for one: more than a tile of 16 rows, and more than a block of places
BLOCK_SIZE = 16

LARGEST_DIFFERENCE = 0.1
"""Of two passes' logits, as a share of what they differ from their row's mean; rounding to bf16 in each layer gives 0.01 to 0.03."""


def layers_differ(plain: LoadedTarget, on_device: LoadedTarget) -> str | None:
    """Why layers on the device cannot be relied on here: they fail, or give other logits than torch's; None where they agree.

    Args:
        plain: a target that torch computes.
        on_device: the same with layers and attention by `ops.cuda`.
    """
    assert on_device.on_device is not None, "its layers are computed there"
    num_rows = min(NUM_ROWS, on_device.on_device.max_length)
    try:
        with as_current(plain.model.device):
            expected, found = _logits(plain, num_rows), _logits(on_device, num_rows)
    except Exception as error:  # whatever a compiler or a driver says
        failure = device_failure(error)
        if isinstance(failure, DeviceLostError):  # with which torch could not compute either
            raise failure from error
        return f"they fail ({one_line(error)})"
    expected, found = (logits - logits.mean(-1, keepdim=True) for logits in (expected, found))
    difference = float((found - expected).norm() / expected.norm())
    if difference <= LARGEST_DIFFERENCE:
        return None
    return f"their logits differ from torch's by {difference:.2g} of their size"


def _logits(target: LoadedTarget, num_rows: int) -> Tensor:
    """The logits of the first tokens of a text [num_rows, vocab_size] whose tokens are spread over the vocabulary."""
    model = target.model
    num_blocks = -(-num_rows // BLOCK_SIZE)
    cache = target.make_cache(
        model.kv_specs, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device
    )
    places = torch.arange(num_rows, device=model.device)
    batch = ForwardBatch(
        token_ids=places * 7919 % model.vocab_size,
        positions=places,
        slot_mapping=places,
        sequences=[
            SequenceRows(num_context=0, num_rows=num_rows, block_ids=np.arange(num_blocks, dtype=np.int32)),
        ],
        block_size=BLOCK_SIZE,
        logits_rows=places,
    )
    with torch.inference_mode():
        return model.forward(batch, target.attention.begin(batch, cache)).logits.double()
