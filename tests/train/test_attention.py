"""Attention in training attends to the same rows as in drafting."""

from __future__ import annotations

import pytest
import torch

from forerun.ops.attention.paged import attend_dense
from forerun.train.attention import CausalAttention, FlashUnrolledAttention, UnrolledAttention, unrolled_attention

NUM_TEXTS, NUM_ROWS, HEADS, KV_HEADS, DIM = 2, 7, 4, 2, 6
SCALE = DIM**-0.5


def random_pass(source, num_rows=NUM_ROWS):
    """Queries, keys and values of one pass, [B, R, heads, dim]."""
    return [torch.randn(NUM_TEXTS, num_rows, heads, DIM, generator=source) for heads in (HEADS, KV_HEADS, KV_HEADS)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_a_row_sees_what_a_draft_of_its_place_would(window, soft_cap):
    """Row r of pass n: rows up to r of the first pass, then its own of each since, and nothing out of the window."""
    source = torch.Generator().manual_seed(0)
    passes = [random_pass(source, NUM_ROWS - index) for index in range(3)]
    attend = UnrolledAttention(NUM_TEXTS)
    for index, parts in enumerate(passes):
        found = attend(0, *(part.flatten(0, 1) for part in parts), scale=SCALE, window=window, soft_cap=soft_cap)
        found = found.view(NUM_TEXTS, NUM_ROWS - index, HEADS, DIM)
        for row in range(NUM_ROWS - index):
            seen = [
                torch.cat(
                    [
                        passes[0][part][:, : row + 1],
                        *(later[part][:, row : row + 1] for later in passes[1 : index + 1]),
                    ],
                    1,
                )
                for part in (1, 2)
            ]
            key, value = (part[:, -window:] if window else part for part in seen)
            expected = attend_dense(
                parts[0][:, row : row + 1], key, value, mask=None, scale=SCALE, soft_cap=soft_cap, sinks=None
            )
            torch.testing.assert_close(found[:, row : row + 1], expected)


@pytest.mark.parametrize("window", [None, 3, NUM_ROWS])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_whole_texts_attend_as_each_does_alone(window, soft_cap, has_sinks):
    source = torch.Generator().manual_seed(0)
    query, key, value = random_pass(source)
    options = {"scale": SCALE, "soft_cap": soft_cap, "sinks": torch.randn(HEADS) if has_sinks else None}
    parts = (part.flatten(0, 1) for part in (query, key, value))
    found = CausalAttention(NUM_TEXTS)(0, *parts, window=window, **options).view(query.shape)
    for row in range(NUM_ROWS):
        seen = slice(0 if window is None else max(0, row + 1 - window), row + 1)
        expected = attend_dense(query[:, row : row + 1], key[:, seen], value[:, seen], mask=None, **options)
        torch.testing.assert_close(found[:, row : row + 1], expected)


def test_layers_keep_apart():
    source = torch.Generator().manual_seed(0)
    first, second = random_pass(source), random_pass(source)
    attend = UnrolledAttention(NUM_TEXTS)
    attend(0, *(part.flatten(0, 1) for part in first), scale=SCALE)
    found = attend(1, *(part.flatten(0, 1) for part in second), scale=SCALE)
    alone = UnrolledAttention(NUM_TEXTS)(1, *(part.flatten(0, 1) for part in second), scale=SCALE)
    torch.testing.assert_close(found, alone)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("num_passes", [1, 2, 4])
def test_flash_attention_and_its_gradients_are_those_of_its_naive_twin(num_kv_heads, num_passes):
    source = torch.Generator().manual_seed(num_passes)

    def drawn(num_rows, heads):
        return torch.randn(3 * num_rows, heads, 16, generator=source).requires_grad_()

    sizes = [13 - index for index in range(num_passes)]
    passes = [(drawn(size, 6), drawn(size, num_kv_heads), drawn(size, num_kv_heads)) for size in sizes]
    leaves = [tensor for one in passes for tensor in one]
    results = []
    for attention in (UnrolledAttention, FlashUnrolledAttention):
        attend = attention(3)
        outputs = [attend(0, *one, scale=0.3) for one in passes]
        loss = sum((output * output.cos()).sum() for output in outputs)
        results.append([*outputs, *torch.autograd.grad(loss, leaves)])
    for naive, flash in zip(*results, strict=True):
        torch.testing.assert_close(flash, naive, rtol=1e-4, atol=1e-5)


def test_what_is_kept_of_the_first_pass_is_the_same_for_both():
    source = torch.Generator().manual_seed(5)
    passes = [random_pass(source, NUM_ROWS - index) for index in (0, 1, 1)]
    found = []
    for attention in (UnrolledAttention, FlashUnrolledAttention):
        attend = attention(NUM_TEXTS)
        first, second, other = ([part.flatten(0, 1) for part in parts] for parts in passes)
        attend(0, *first, scale=SCALE)
        attend(0, *second, scale=SCALE)
        found.append([*attend.first_pass(0), attend.after_first_pass()(0, *other, scale=SCALE)])
    for naive, flash in zip(*found, strict=True):
        torch.testing.assert_close(flash, naive)


def test_only_a_cpu_has_the_fused_one():
    kinds = {name: type(unrolled_attention(1, torch.device(name))) for name in ("cpu", "cuda")}
    assert kinds == {"cpu": FlashUnrolledAttention, "cuda": UnrolledAttention}
