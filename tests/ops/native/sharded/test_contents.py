"""A part of a drafter arrives at another rank as it was, and brings no more of its memory along than it shows."""

from __future__ import annotations

import pytest
import torch

from forerun.models.packing import Packing
from forerun.ops.native.formats import WEIGHT_FORMATS
from forerun.ops.native.formats.joined import JOINED
from forerun.ops.native.layers import PackedLinear
from forerun.ops.native.memory import Arena
from forerun.ops.native.sharded.contents import from_bytes, to_bytes
from forerun.ops.native.sharded.layers import HeadPart
from tests.native import KERNELS, needs_kernels

pytestmark = needs_kernels


def packed(name, *, outputs=70):
    kernels = next(iter(KERNELS.values()))
    weight = torch.randn(outputs, 64, generator=torch.Generator().manual_seed(1))
    return Packing(kernels, WEIGHT_FORMATS[name]).linear(weight, torch.arange(float(outputs)))


@pytest.mark.parametrize("name", sorted(WEIGHT_FORMATS))
def test_a_weight_of_every_format_gives_the_same_products(name):
    sent = packed(name)
    content = to_bytes(HeadPart(sent.weight, first_output=64, vocab_size=300, factor=0.5, cap=3.0))
    assert len(content) < 2 * sent.weight.num_bytes + 4096
    arrived = from_bytes(content, Arena().empty)
    rows = torch.randn(3, 64)
    assert torch.equal(PackedLinear(sent.kernels, arrived.weight)(rows), sent(rows))
    assert (arrived.first_output, arrived.vocab_size, arrived.factor, arrived.cap) == (64, 300, 0.5, 3.0)


def test_a_weight_of_several_parts_gives_the_same_products():
    whole = packed("bf16", outputs=64)
    joined = PackedLinear(whole.kernels, JOINED.join([whole.weight, packed("int8").weight]))
    content = to_bytes(HeadPart(joined.weight, first_output=0, vocab_size=134, factor=1.0, cap=0.0))
    arrived = PackedLinear(whole.kernels, from_bytes(content, Arena().empty).weight)
    rows = torch.randn(3, 64)
    assert torch.equal(arrived(rows), joined(rows))
