"""Logits on the kernels are a function of a row's own text, bit for bit, whatever shares the pass."""

from __future__ import annotations

import functools

import pytest
import torch

from forerun.core.batch import SequenceRows
from forerun.kv.cache import KVCache
from forerun.ops.native.attention import NativeAttention
from tests.models.random_decoders import CPU, native_decoder
from tests.native import DENSE, KERNELS, every_format, every_level, generator, threads
from tests.ops.native.passes import deal_blocks, make_batch, source, tree_mask

LENGTH = 310  # more than one tile of 256 keys
FEATURES = {
    "windows, caps, sandwich norms": "Gemma2ForCausalLM",
    "biases, projection norms": "Olmo2 llama3",
    "experts": "Qwen3MoeForCausalLM",
    "heads that fill matrix registers": "Llama head_dim 32",
}
every_variant = pytest.mark.parametrize("variant", FEATURES.values(), ids=FEATURES)


def random_text(seed=0):
    return torch.randint(3, 128, [LENGTH], generator=generator(seed))


class Run:
    """Sequences in one cache, computed in whatever passes a test likes."""

    def __init__(self, kernels, decoder, *, num_sequences=1, block_size=16, seed=0):
        self.decoder, self.block_size = decoder, block_size
        self.blocks, num_blocks = deal_blocks(source(seed), [LENGTH + 16] * num_sequences, block_size=block_size)
        self._attention = NativeAttention(kernels)
        self._cache = KVCache(
            decoder.kv_specs, num_blocks=num_blocks, block_size=block_size, dtype=decoder.dtype, device=CPU
        )

    def forward(self, *parts):
        """One pass over (sequence, first place, token ids, tree mask or None) each; logits of all rows."""
        sequences = [
            SequenceRows(num_context=first, num_rows=len(ids), block_ids=self.blocks[sequence], tree_mask=mask)
            for sequence, first, ids, mask in parts
        ]
        token_ids = torch.cat([ids for _, _, ids, _ in parts])
        batch = make_batch(sequences, block_size=self.block_size, token_ids=token_ids)
        with torch.inference_mode():
            return self.decoder.forward(batch, self._attention.begin(batch, self._cache)).logits

    def feed(self, text, bounds):
        """Logits of a text in passes that end at `bounds`."""
        starts = [0, *bounds]
        return torch.cat(
            [self.forward((0, start, text[start:end], None)) for start, end in zip(starts, bounds, strict=False)]
        )


def num_threads_of(kernels, weight_format, variant):
    """One to three, so that each number meets every level, every format and every variant."""
    places = [*KERNELS.values()].index(kernels), DENSE.index(weight_format), [*FEATURES.values()].index(variant)
    return 1 + sum(places) % 3


@functools.cache
def decoder_of(kernels, variant, weight_format):
    return native_decoder(kernels, variant, weight_format=weight_format)


@functools.cache
def token_by_token(kernels, variant, weight_format):
    """Logits [LENGTH, vocab_size] of a text that is fed one token at a time, alone."""
    return Run(kernels, decoder_of(kernels, variant, weight_format)).feed(random_text(), range(1, LENGTH + 1))


@every_level
@every_format
@every_variant
def test_chunks_of_any_size_give_the_bits_of_single_tokens(kernels, weight_format, variant):
    for bounds in ([240, *range(240 + size, LENGTH, size), LENGTH] for size in (2, 5, 8, 16, 60)):
        found = Run(kernels, decoder_of(kernels, variant, weight_format)).feed(random_text(), bounds)
        assert torch.equal(found, token_by_token(kernels, variant, weight_format)), bounds


@every_level
@every_format
@every_variant
def test_a_prompt_in_one_pass_gives_the_bits_of_single_tokens(kernels, weight_format, variant):
    found = Run(kernels, decoder_of(kernels, variant, weight_format)).feed(random_text(), [300, LENGTH])
    assert torch.equal(found, token_by_token(kernels, variant, weight_format))


@every_level
@every_format
@every_variant
def test_block_layout_and_size_change_no_bit(kernels, weight_format, variant):
    for block_size in (1, 7, 64):
        run = Run(kernels, decoder_of(kernels, variant, weight_format), block_size=block_size, seed=block_size)
        assert torch.equal(run.feed(random_text(), [LENGTH]), token_by_token(kernels, variant, weight_format)), (
            block_size
        )


@every_level
@every_format
@every_variant
@pytest.mark.parametrize("first", [20, 252])
def test_a_path_of_a_tree_gives_the_bits_of_single_tokens(kernels, weight_format, variant, first):
    text, run = random_text(), Run(kernels, decoder_of(kernels, variant, weight_format))
    parents = [-1, 0, 0, 1, 2, 4, 4, 6, 7, 7]
    chain = [0, 2, 4, 6, 7, 9]
    nodes = torch.randint(3, 128, [len(parents)], generator=generator(1))
    nodes[chain] = text[first : first + len(chain)]
    run.feed(text[:first], [first])
    found = run.forward((0, first, nodes, tree_mask(parents)))[chain]
    assert torch.equal(found, token_by_token(kernels, variant, weight_format)[first : first + len(chain)])


@every_level
@every_format
@every_variant
def test_other_sequences_and_threads_change_no_bit(kernels, weight_format, variant):
    num_threads = num_threads_of(kernels, weight_format, variant)
    text, other = random_text(), random_text(seed=1)
    run = Run(kernels, decoder_of(kernels, variant, weight_format), num_sequences=3)
    found = []
    with threads(kernels, num_threads):
        for start, end in ((0, 290), (290, 291), (291, 299), (299, LENGTH)):
            mask = tree_mask([-1, *range(6), 2])
            logits = run.forward(
                (1, 0, other[: 1 + start % 50], None), (0, start, text[start:end], None), (2, 9, other[:8], mask)
            )
            found.append(logits[1 + start % 50 : -8])
    assert torch.equal(torch.cat(found), token_by_token(kernels, variant, weight_format))


@every_level
@every_format
@pytest.mark.parametrize("variant", ["Qwen3 biases", "SmolLM3ForCausalLM", "Gemma3ForCausalLM", "GraniteForCausalLM"])
def test_every_kind_of_layer_gives_the_bits_of_single_tokens(kernels, weight_format, variant):
    decoder, text = native_decoder(kernels, variant, weight_format=weight_format), random_text()[:40]
    alone = Run(kernels, decoder).feed(text, range(1, 41))
    assert torch.equal(Run(kernels, decoder).feed(text, [17, 22, 40]), alone)
