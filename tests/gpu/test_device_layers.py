"""On a GPU whole layers give the logits of the formulas, a row's bits are its own, and a pass waits for nothing."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="needs triton: pip install 'forerun[cuda]'")
pytest.importorskip("transformers", reason="makes the tiny models")

from forerun.core.batch import ForwardBatch  # noqa: E402
from forerun.kv.cache import KVCache  # noqa: E402
from forerun.models.decoder import build_decoder  # noqa: E402
from forerun.models.on_device import DeviceParts  # noqa: E402
from forerun.ops.cuda.functions import LayerFunctions  # noqa: E402
from forerun.ops.cuda.table import StepRows  # noqa: E402
from tests.tiny_models import DENSE_FAMILIES  # noqa: E402

DEVICE, CPU = torch.device("cuda"), torch.device("cpu")
BLOCK_SIZE, MAX_LENGTH = 16, 512


class Passes:
    """Texts of one model, in passes whose rows lie on the device, as a step's do."""

    def __init__(self, architecture, *, device=DEVICE, dtype=torch.bfloat16, num_sequences=1):
        from tests.models.random_decoders import random_source

        model = build_decoder(*random_source(architecture, dtype), dtype=dtype, device=device)
        self.parts = DeviceParts(LayerFunctions.choose(device), max_length=MAX_LENGTH)
        self.model, self.device = self.parts.decoder(model), device
        blocks = MAX_LENGTH // BLOCK_SIZE
        self.cache = KVCache(
            model.kv_specs, num_blocks=num_sequences * blocks, block_size=BLOCK_SIZE, dtype=dtype, device=device
        )
        order = torch.randperm(num_sequences * blocks, generator=torch.Generator().manual_seed(0))
        self.block_table = order.view(num_sequences, blocks).int().to(device)

    def batch(self, token_ids, slots, positions):
        rows = StepRows.empty(len(token_ids), 1, longest_path=1, device=self.device)
        for name, values in (("tokens", token_ids), ("slots", slots), ("positions", positions)):
            getattr(rows, name).copy_(torch.tensor(values))
        rows.num_linear.copy_(rows.positions + 1)
        at = rows.positions.long()
        blocks = self.block_table[rows.slots.long(), at // BLOCK_SIZE].long()
        rows.kv_slots.copy_(blocks * BLOCK_SIZE + at % BLOCK_SIZE)
        batch = ForwardBatch(
            token_ids=rows.tokens.long(),
            positions=at,
            slot_mapping=rows.kv_slots,
            sequences=[],
            block_size=BLOCK_SIZE,
            logits_rows=torch.arange(len(token_ids), device=self.device),
        )
        return rows, batch

    def forward(self, rows, batch):
        with torch.inference_mode():
            return self.model.forward(
                batch, self.parts.attention().begin_step(rows, self.block_table, self.cache)
            ).logits

    def logits(self, token_ids, slots, positions):
        return self.forward(*self.batch(token_ids, slots, positions))


def text(count, seed=0):
    return torch.randint(3, 128, [count], generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("architecture", DENSE_FAMILIES)
def test_logits_are_those_of_the_formulas(architecture):
    step = (text(40), [0] * 40, list(range(40)))
    expected, found = (
        Passes(architecture, device=device, dtype=torch.float32).logits(*step) for device in (CPU, DEVICE)
    )
    torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("architecture", DENSE_FAMILIES)
def test_rows_one_by_one_have_the_bits_of_hundreds_in_one_pass(architecture):
    """Also of more than one launch takes."""
    count = 300
    passes = Passes(architecture, num_sequences=2)
    tokens, positions = text(count), list(range(count))
    together = passes.logits(tokens * 2, [0] * count + [1] * count, positions * 2)
    assert torch.equal(together[:count], together[count:])
    alone = Passes(architecture, num_sequences=2)
    for i in range(count):
        assert torch.equal(alone.logits(tokens[i : i + 1], [0], [i])[0], together[i]), i


def test_a_pass_waits_for_nothing_and_can_be_held_in_a_graph():
    passes = Passes("Gemma2ForCausalLM")
    rows, batch = passes.batch(text(8), [0] * 8, list(range(8)))
    expected = passes.forward(rows, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert passes.forward(rows, batch).shape == expected.shape
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = passes.forward(rows, batch)
    graph.replay()
    assert torch.equal(found, expected)
