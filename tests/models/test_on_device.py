"""A decoder by the functions of `ops.cuda` gives the logits of the one in torch, and a row's bits are its own."""

from __future__ import annotations

import functools

import pytest
import torch

from forerun.core.batch import SequenceRows
from forerun.kv.cache import KVCache
from forerun.models.decoder import build_decoder
from forerun.models.on_device import DeviceParts, obstacle
from forerun.ops.cuda.functions import LayerFunctions
from tests.models.paged_run import PagedRun
from tests.models.random_decoders import CPU, random_source
from tests.models.test_families import TOKEN_IDS, TOLERANCE, VARIANTS
from tests.native import generator
from tests.ops.native.passes import deal_blocks, make_batch, source, tree_mask
from tests.tiny_models import DENSE_FAMILIES

PARTS = DeviceParts(LayerFunctions.choose(CPU), max_length=512)
LENGTH = 30


@functools.cache
def decoders(variant, dtype=torch.float32):
    """In torch, and on the device's functions."""
    model = build_decoder(*random_source(variant, dtype), dtype=dtype, device=CPU)
    assert obstacle(model) is None
    return model, PARTS.decoder(model)


def run_of(variant, dtype=torch.float32):
    return PagedRun(decoders(variant, dtype)[1], attention=PARTS.attention())


@pytest.mark.parametrize("variant", [name for name, (family, _) in VARIANTS.items() if family in DENSE_FAMILIES])
def test_logits_are_those_of_torch(variant):
    expected, found = PagedRun(decoders(variant)[0]), run_of(variant)
    start = 0
    for size in (19, 11, 1, 4):
        tokens = TOKEN_IDS[start : start + size]
        torch.testing.assert_close(
            found.feed(tokens).logits, expected.feed(tokens).logits, atol=TOLERANCE, rtol=TOLERANCE
        )
        start += size
    mask = tree_mask([-1, 0, 0, 1, 2, 4])
    torch.testing.assert_close(
        found.try_tree(TOKEN_IDS[:6], mask).logits,
        expected.try_tree(TOKEN_IDS[:6], mask).logits,
        atol=TOLERANCE,
        rtol=TOLERANCE,
    )


@pytest.mark.parametrize("architecture", DENSE_FAMILIES)
def test_bf16_stays_near_fp32(architecture):
    exact = build_decoder(*random_source(architecture, torch.bfloat16), dtype=torch.float32, device=CPU)
    expected = PagedRun(exact).feed(TOKEN_IDS).logits
    found = run_of(architecture, torch.bfloat16).feed(TOKEN_IDS).logits
    assert (found - expected).square().mean().sqrt() < 0.05 * expected.std()


def test_hidden_states_are_those_of_torch():
    names = frozenset({"hidden.0", "hidden.1", "hidden.3", "last_hidden"})
    expected, found = PagedRun(decoders("Gemma2ForCausalLM")[0]), run_of("Gemma2ForCausalLM")
    theirs, ours = (run.feed(TOKEN_IDS, features=names).features for run in (expected, found))
    assert ours.keys() == names
    for name in names:
        assert ours[name].dtype == torch.float32
        torch.testing.assert_close(ours[name], theirs[name], atol=TOLERANCE, rtol=TOLERANCE)


def test_a_chunk_without_wanted_rows_gives_no_logits_and_others_give_their_candidates():
    run = run_of("LlamaForCausalLM")
    assert run.feed(TOKEN_IDS[:9], logits_rows=[]).logits.shape == (0, 128)
    found = run.feed(TOKEN_IDS[:9], logits_rows=[2, 8], num_candidates=3)
    assert torch.equal(found.candidates.token_ids.long(), found.logits.topk(3).indices)


class Run:
    """Sequences in one cache, computed in whatever passes a test likes."""

    def __init__(self, variant, *, num_sequences=1, block_size=16, seed=0):
        _, self.decoder = decoders(variant)
        self.blocks, num_blocks = deal_blocks(source(seed), [LENGTH + 16] * num_sequences, block_size=block_size)
        self._block_size = block_size
        self._cache = KVCache(
            self.decoder.kv_specs, num_blocks=num_blocks, block_size=block_size, dtype=torch.float32, device=CPU
        )

    def forward(self, *parts):
        """One pass over (sequence, first place, token ids, tree mask or None) each; logits of all rows."""
        sequences = [
            SequenceRows(num_context=first, num_rows=len(ids), block_ids=self.blocks[sequence], tree_mask=mask)
            for sequence, first, ids, mask in parts
        ]
        token_ids = torch.cat([ids for _, _, ids, _ in parts])
        batch = make_batch(sequences, block_size=self._block_size, token_ids=token_ids)
        with torch.inference_mode():
            return self.decoder.forward(batch, PARTS.attention().begin(batch, self._cache)).logits


def random_text(seed=0):
    return torch.randint(3, 128, [LENGTH], generator=generator(seed))


@functools.cache
def token_by_token(variant):
    run, text = Run(variant), random_text()
    return torch.cat([run.forward((0, i, text[i : i + 1], None)) for i in range(LENGTH)])


@pytest.mark.parametrize("variant", ["Gemma2ForCausalLM", "Olmo2 llama3", "Llama biases", "Qwen3ForCausalLM"])
def test_chunks_other_sequences_and_blocks_change_no_bit(variant):
    text, other = random_text(), random_text(seed=1)
    assert decoders(variant)[1].is_batch_invariant
    run = Run(variant, num_sequences=3, block_size=7, seed=3)
    found = []
    for start, end in ((0, 17), (17, 18), (18, 22), (22, LENGTH)):
        logits = run.forward(
            (1, 0, other[: 1 + start % 5], None),
            (0, start, text[start:end], None),
            (2, 0, other[:8], tree_mask([-1, *range(6), 2])),
        )
        found.append(logits[1 + start % 5 : -8])
    assert torch.equal(torch.cat(found), token_by_token(variant))


@pytest.mark.parametrize("variant", ["Gemma2ForCausalLM", "Olmo2 llama3"])
def test_a_path_of_a_tree_has_the_bits_of_single_tokens(variant):
    first, text, run = 14, random_text(), Run(variant)
    parents = [-1, 0, 0, 1, 2, 4, 4, 6, 7, 7]
    chain = [0, 2, 4, 6, 7, 9]
    nodes = torch.randint(3, 128, [len(parents)], generator=generator(1))
    nodes[chain] = text[first : first + len(chain)]
    run.forward((0, 0, text[:first], None))
    found = run.forward((0, first, nodes, tree_mask(parents)))[chain]
    assert torch.equal(found, token_by_token(variant)[first : first + len(chain)])


def test_the_first_layers_share_weights_and_compute_alike():
    few, on_device = (model.first_layers(2) for model in decoders("SmolLM3ForCausalLM"))
    found = PagedRun(on_device, attention=PARTS.attention()).feed(TOKEN_IDS).logits
    torch.testing.assert_close(found, PagedRun(few).feed(TOKEN_IDS).logits, atol=TOLERANCE, rtol=TOLERANCE)
    assert on_device.weight_bytes == few.weight_bytes


def test_why_a_model_keeps_its_own_layers_is_said():
    _, on_device = decoders("LlamaForCausalLM")
    double = build_decoder(*random_source("LlamaForCausalLM", torch.float64), dtype=torch.float64, device=CPU)
    for model, reason in ((object(), "transformers"), (on_device, "other kernels"), (double, "float64")):
        assert reason in obstacle(model)
