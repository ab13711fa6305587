"""A decoder's pass in one call: the bits of its parts one by one, and the features that they would keep."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch

from forerun.kv.cache import KVCache
from forerun.ops.native.attention import NativeAttention
from tests.models.random_decoders import native_decoder
from tests.models.test_families import VARIANTS
from tests.native import BF16_CODED, FP32, KERNELS, every_level
from tests.ops.native.passes import CPU, random_batch, source

NUM_CANDIDATES = 3
FEATURES = [  # a variant or two of each: what a call is made of, whose parts a level has versions of
    *("LlamaForCausalLM tied", "Llama biases", "Llama gelu", "Llama own head_dim", "Llama head_dim 32", "Llama MHA"),
    *("MistralForCausalLM", "Qwen3 biases", "SmolLM3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    *("GraniteForCausalLM", "Olmo2 llama3", "Phi3 partial rotary", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"),
]


def whole_passes(best, others):
    """Every variant at the best level, and at the others those of `others`; the rest is slow."""
    return pytest.mark.parametrize(
        ("kernels", "variant"),
        [
            pytest.param(
                kernels,
                variant,
                marks=() if level == best or variant in others else pytest.mark.slow,
                id=f"{variant}-{level}",
            )
            for level, kernels in KERNELS.items()
            for variant in VARIANTS
        ],
    )


every_pass = whole_passes(next(iter(KERNELS), None), FEATURES)

LENGTHS = [(0, 20), (37, 1), (270, 5), (8, 9)]
"""Context and rows of the sequences of a pass; rows 0 to 19 are a prompt's, 20 another text's."""


def random_pass(decoder, seed, *, features=frozenset(), judged=None):
    """A pass over random tokens of prompts, chains and trees; `judged` rows, or some, have logits."""
    rng = source(seed)
    batch, num_blocks = random_batch(rng, LENGTHS, block_size=16)
    num_rows = len(batch.positions)
    generator = torch.Generator().manual_seed(seed)
    judged = sorted(rng.sample(range(num_rows), 17)) if judged is None else judged
    batch = replace(
        batch,
        token_ids=torch.randint(3, decoder.vocab_size, [num_rows], generator=generator),
        logits_rows=torch.tensor(judged, dtype=torch.int64),
        num_candidates=NUM_CANDIDATES,
        features=features,
    )
    return batch, num_blocks


def run(kernels, decoder, batch, num_blocks):
    """Logits, candidates, and the whole cache after a pass over a cache of random keys and values."""
    widths = dict.fromkeys(sorted(batch.features), decoder.hidden_size)
    cache = KVCache(
        decoder.kv_specs, num_blocks=num_blocks, block_size=16, dtype=decoder.dtype, device=CPU, feature_widths=widths
    )
    generator = torch.Generator().manual_seed(1)
    for stack in cache.stacks:
        stack.copy_(torch.randn(stack.shape, generator=generator))
    found = decoder.forward(batch, NativeAttention(kernels).begin(batch, cache))
    return found.logits, found.candidates.token_ids, found.candidates.logits, *cache.stacks


@pytest.mark.parametrize("weight_format", [FP32, BF16_CODED], ids=["fp32", "bf16"])
@every_pass
def test_a_pass_in_one_call_has_the_bits_of_its_parts(kernels, variant, weight_format):
    decoder = native_decoder(kernels, variant, weight_format=weight_format)
    assert decoder._whole is not None
    batch, num_blocks = random_pass(decoder, 3, features=frozenset({"hidden.0", f"hidden.{decoder.num_layers}"}))
    found = run(kernels, decoder, batch, num_blocks)
    decoder._whole = None
    for one, expected in zip(found, run(kernels, decoder, batch, num_blocks), strict=True):
        assert torch.equal(one, expected)


JUDGED = {"each": [19, 20, 22, 26, 34], "one": [20], "between": [0, 25, 30, 33], "none": []}
"""Which rows of a pass have logits: of each sequence one or more, of one alone, some not the last, none at all."""


@pytest.mark.parametrize("weight_format", [FP32, BF16_CODED], ids=["fp32", "bf16"])
@every_pass
def test_rows_without_logits_change_no_bit_of_the_others_and_leave_their_keys(kernels, variant, weight_format):
    whole, one_by_one = (native_decoder(kernels, variant, weight_format=weight_format) for _ in range(2))
    assert whole._whole is not None
    one_by_one._whole = None
    for seed, (which, judged) in enumerate(JUDGED.items()):  # in each other sequences are trees
        batch, num_blocks = random_pass(whole, seed, features=frozenset({"hidden.0"}), judged=judged)
        found = run(kernels, whole, batch, num_blocks)
        for one, expected in zip(found, run(kernels, one_by_one, batch, num_blocks), strict=True):
            assert torch.equal(one, expected), which


@every_level
def test_the_first_layers_alone_are_a_pass_of_their_own(kernels):
    decoder = native_decoder(kernels, "LlamaForCausalLM", weight_format=FP32).first_layers(1)
    batch, num_blocks = random_pass(decoder, 5)
    found = run(kernels, decoder, batch, num_blocks)
    decoder._whole = None
    assert torch.equal(found[0], run(kernels, decoder, batch, num_blocks)[0])


@every_level
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.full([35], 10**6)}, "a token has no embedding"),
        ({"positions": torch.full([35], -1)}, "a position has no rotation"),
        ({"logits_rows": torch.tensor([35])}, "a row with logits is none of the pass"),
        ({"token_ids": torch.zeros(35, dtype=torch.int32)}, "must be contiguous int64"),
        ({"slot_mapping": torch.zeros(35, dtype=torch.int32)}, "must be contiguous int64"),
    ],
)
def test_a_pass_that_does_not_fit_is_refused(kernels, change, message):
    decoder = native_decoder(kernels, "LlamaForCausalLM", weight_format=FP32)
    batch, num_blocks = random_pass(decoder, 3)
    with pytest.raises(ValueError, match=message):
        run(kernels, decoder, replace(batch, **change), num_blocks)


@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_move_as_the_cache_itself_moves_them(kernels, dtype):
    decoder = native_decoder(kernels, "LlamaForCausalLM", weight_format=FP32)
    caches = [
        KVCache(decoder.kv_specs, num_blocks=2, block_size=16, dtype=dtype, device=CPU, feature_widths={"hidden.1": 6})
        for _ in range(2)
    ]
    for cache in caches:
        generator = torch.Generator().manual_seed(1)
        for stack in cache.stacks:
            stack.copy_(torch.randn(stack.shape, generator=generator))
    sources, destinations = [5, 3, 31, 4], [4, 5, 6, 7]  # some are both
    NativeAttention(kernels).move(caches[0], sources, array("q", destinations))
    caches[1].move(torch.tensor(sources), torch.tensor(destinations))
    for moved, expected in zip(caches[0].stacks, caches[1].stacks, strict=True):
        assert torch.equal(moved, expected)
    with pytest.raises(ValueError, match="a slot is none of the cache"):
        NativeAttention(kernels).move(caches[0], [32], [0])
    with pytest.raises(ValueError, match="must be as many"):
        NativeAttention(kernels).move(caches[0], [1, 2], [0])
