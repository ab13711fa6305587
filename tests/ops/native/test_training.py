"""What training takes of the kernels equals its twins, and a row or a head has the same bits whatever is beside it."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

from forerun.ops.native.training import attention_gradients, draft_loss_in_place, drafted_probs
from forerun.train import draft_loss
from tests import conftest as conftest  # which kernels are tested: a process that a test starts asks nobody else
from tests.native import (
    EMULATED,
    KERNELS,
    SANITIZED,
    every_level,
    every_stored_dtype,
    generator,
    needs_kernels,
    threads,
)

SCALE = 0.2


def drawn_rows(num_rows, count, dtype, seed=0):
    """Logits of a head, and what a target gives the drafted part of its vocabulary."""
    source = generator(seed)
    logits = 3 * torch.randn(num_rows, count, generator=source)
    wanted = (3 * torch.randn(num_rows, count + 9, generator=source)).softmax(-1)[:, :count]
    return logits.to(dtype), wanted.to(dtype).contiguous()


@every_level
@every_stored_dtype
@pytest.mark.parametrize("is_hybrid", [False, True])
@pytest.mark.parametrize("count", [1, 16, 45, 1000])
def test_loss_gradient_and_what_is_measured_are_those_of_the_twin(kernels, dtype, is_hybrid, count):
    logits, wanted = drawn_rows(37, count, dtype)
    expected, found = logits.clone(), logits.clone()
    expected_measured, measured = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    expected_losses = draft_loss.loss_in_place(expected, wanted, is_hybrid=is_hybrid, measured=expected_measured)
    losses = draft_loss_in_place(kernels, found, wanted, is_hybrid=is_hybrid, measured=measured)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    # in bf16 they may be rounded to either side
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)
    torch.testing.assert_close(measured, expected_measured, rtol=1e-5, atol=1e-5)


@every_level
def test_equal_first_choices_are_the_first_of_the_highest(kernels):
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 0.0, 1.0]])
    wanted = torch.tensor([[0.1, 0.4, 0.4], [0.2, 0.5, 0.1]])
    measured = torch.zeros(2, dtype=torch.float64)
    draft_loss_in_place(kernels, logits, wanted, is_hybrid=False, measured=measured)
    assert measured[1] == 1


@every_level
def test_a_rows_loss_has_the_same_bits_alone_and_with_any_number_of_threads(kernels):
    logits, wanted = drawn_rows(50, 333, torch.bfloat16)
    together = logits.clone()
    losses = draft_loss_in_place(kernels, together, wanted, is_hybrid=True)
    alone = logits[7:8].clone()
    with threads(kernels, 3):
        assert torch.equal(draft_loss_in_place(kernels, alone, wanted[7:8], is_hybrid=True), losses[7:8])
    assert torch.equal(alone[0], together[7])


@every_level
@every_stored_dtype
@pytest.mark.parametrize("vocab_size", [17, 1000])
def test_drafted_probabilities_are_those_of_the_softmax_of_all_logits(kernels, dtype, vocab_size):
    source = generator(1)
    logits = 4 * torch.randn(21, vocab_size, generator=source)
    draft_ids = torch.randperm(vocab_size, generator=source)[: vocab_size // 2 + 1].sort().values
    found = torch.empty(21, len(draft_ids), dtype=dtype)
    drafted_probs(kernels, logits, draft_ids, out=found)
    expected = draft_loss.drafted_probs(logits.clone(), draft_ids, dtype)
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-7)


@every_level
@pytest.mark.parametrize("token_id", [-1, 10])
def test_a_drafted_token_outside_of_the_vocabulary_is_refused(kernels, token_id):
    with pytest.raises(ValueError, match="an id is no place of the rows"):
        drafted_probs(kernels, torch.zeros(2, 10), torch.tensor([3, token_id]), out=torch.empty(2, 2))


def drawn_heads(num_rows, dim, *, num_texts=2, num_heads=3, seed=0):
    """Queries, keys, values and the gradient by the output, bf16."""
    source = generator(seed)
    return [torch.randn(num_texts, num_heads, num_rows, dim, generator=source).bfloat16() for _ in range(4)]


def attended(query, key, value):
    """Causal attention and its logarithmic sums, [B, heads, R], as written out in fp64."""
    scores = (query @ key.transpose(2, 3)) * SCALE
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@every_level
@pytest.mark.parametrize("dim", [32, 64, 96])
@pytest.mark.parametrize("num_rows", [1, 31, 32, 33, 100])
def test_attention_gradients_are_those_of_the_formula(kernels, num_rows, dim):
    query, key, value, of_out = drawn_heads(num_rows, dim)
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    out, log_sums = attended(*leaves)
    expected = torch.autograd.grad(out, leaves, of_out.double())
    found = attention_gradients(kernels, of_out, query, key, value, out.bfloat16(), log_sums.float(), scale=SCALE)
    for one, other in zip(found, expected, strict=True):
        # weights and the gradients of scores are rounded to bf16 once; of a single key nothing is left but roundings
        error = (one.double() - other).norm() / max(other.norm(), 0.01 * of_out.double().norm())
        assert error < 0.01


@every_level
def test_gradients_of_keys_that_are_not_all_are_their_share(kernels):
    """A later key takes weight from the text's, as the output and the sums say; then the text's gradients are smaller."""
    query, key, value, of_out = drawn_heads(40, 64)
    extra = 2 * torch.randn(2, 3, 40, 64, generator=generator(5), dtype=torch.float64)
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    scores = (leaves[0] @ leaves[1].transpose(2, 3)) * SCALE
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    own = (query.double() * extra).sum(-1, keepdim=True) * SCALE  # that of a key which the queries' gradient leaves out
    both = torch.cat([scores, own], -1)
    weights = both.softmax(-1)
    out = weights[..., :-1] @ leaves[2] + weights[..., -1:] * extra
    expected = torch.autograd.grad(out, leaves, of_out.double())
    found = attention_gradients(
        kernels, of_out, query, key, value, out.bfloat16(), both.logsumexp(-1).float(), scale=SCALE
    )
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() / other.norm() < 0.01


@every_level
def test_a_heads_gradients_have_the_same_bits_alone_and_with_any_number_of_threads(kernels):
    query, key, value, of_out = drawn_heads(70, 64)
    out, log_sums = attended(query.double(), key.double(), value.double())
    parts = [of_out, query, key, value, out.bfloat16(), log_sums.float()]
    together = attention_gradients(kernels, *parts, scale=SCALE)
    with threads(kernels, 3):
        alone = attention_gradients(kernels, *(part[1:, 2:] for part in parts), scale=SCALE)
    assert all(torch.equal(one[1:, 2:], other) for one, other in zip(together, alone, strict=True))


@every_level
def test_heads_that_are_not_whole_blocks_are_refused(kernels):
    parts = [torch.zeros(1, 1, 4, 48, dtype=torch.bfloat16) for _ in range(5)]
    with pytest.raises(ValueError, match="the dimensions of a head are not whole blocks"):
        attention_gradients(kernels, *parts, torch.zeros(1, 1, 4), scale=SCALE)


def compute_without_memory(level):
    """Returns if gradients of more rows than there is memory for raise, and those of few are computed afterwards."""
    import resource

    kernels = KERNELS[level]
    kernels.use_threads(2)
    parts = [torch.zeros(1, 2, 1 << 17, 32, dtype=torch.bfloat16) for _ in range(5)]
    parts.append(torch.zeros(1, 2, 1 << 17))
    few = [part[:, :, :40] for part in parts]
    attention_gradients(kernels, *few, scale=SCALE)  # which starts the other thread
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (64 << 20), resource.RLIM_INFINITY))  # enough for what is returned
    with pytest.raises(MemoryError, match="attention_gradients: there is not memory enough"):
        attention_gradients(kernels, *parts, scale=SCALE)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert not any(part.any() for part in attention_gradients(kernels, *few, scale=SCALE))


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory as Linux has them")
@pytest.mark.skipif(SANITIZED, reason="the sanitizer takes more addresses than the limit leaves")
@pytest.mark.skipif(EMULATED, reason="the emulator does not keep such limits")
def test_gradients_without_memory_enough_raise_though_several_threads_compute():
    """The fault: each thread took its memory while it computed, and one that got none ended the process."""
    child = multiprocessing.get_context("spawn").Process(target=compute_without_memory, args=(next(iter(KERNELS)),))
    child.start()
    try:
        child.join(120)
        assert child.exitcode == 0
    finally:
        child.kill()
