"""On the native kernels text and logprobs are the same to the last bit, in bf16 too, whatever the engine does."""

from __future__ import annotations

import functools
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun import SamplingParams
from forerun.build import load_target
from forerun.config.settings import EngineSettings
from forerun.models.loader import load_model
from forerun.models.packing import Packing
from tests.contract.drafters import CASES, SUFFIX, oracle
from tests.contract.test_contract import PROMPTS, TIGHT, assert_nothing_is_held
from tests.engines import engine_of, native_target, tiny_llm
from tests.models.quantized.test_loading import METHODS, SIZES, quantize
from tests.native import needs_kernels, threads
from tests.stand_in import VOCAB_SIZE
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

pytestmark = needs_kernels
BF16 = torch.bfloat16
NUM_BATCHED = 20  # requests of each drafter: any two of what `sampling_of` sets meet in them
NUM_IN_BLOCKS = 20  # of each kind of weights in blocks

KINDS = (
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "logit_bias": {7: 2.0}},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.1, "min_p": 0.02, "presence_penalty": 0.6, "prompt_logprobs": 1},
    {"temperature": 1.0, "stop": [*"aeiou"], "min_tokens": 3},
)


def sampling_of(index):
    """Greedy and seeded requests in turn, with penalties and stop strings; all tell their logprobs."""
    kind = KINDS[index % len(KINDS)]
    return SamplingParams(seed=index, max_tokens=16, logprobs=1 + index % 4, ignore_eos=index % 3 > 0, **kind)


SAMPLING = [sampling_of(index) for index in range(len(PROMPTS))]


def reported(output):
    """All that a request got: text, tokens, how it ended, and every logprob."""
    one = output.outputs[0]
    return (one.text, one.token_ids, one.logprobs, one.finish_reason, one.stop_reason, output.prompt_logprobs)


def run(llm, count=None):
    """What the first `count` requests, or all, get when they share the engine."""
    return [reported(output) for output in llm.generate(PROMPTS[:count], SAMPLING[:count], use_tqdm=False)]


@functools.cache
def plainly(dtype, quantization=None, *, count=None):
    """What each request gets when it is decoded alone, with ample memory and no drafts."""
    llm = tiny_llm(target=native_target(dtype, quantization), enable_prefix_caching=False)
    requests = zip(PROMPTS[:count], SAMPLING[:count], strict=True)
    return [reported(llm.generate([prompt], sampling, use_tqdm=False)[0]) for prompt, sampling in requests]


def test_the_requests_are_mixed():
    reasons = {reason for _, _, _, reason, _, _ in plainly(BF16)}
    assert reasons == {"length", "stop"}
    assert sum(isinstance(stop, str) for _, _, _, _, stop, _ in plainly(BF16)) > 0.05 * len(PROMPTS)
    assert len({tuple(token_ids) for _, token_ids, *_ in plainly(BF16)}) > 0.75 * len(PROMPTS)


@pytest.fixture(params=[*CASES, "oracle-tree"])
def config(request):
    """The speculative_config of each drafter in turn."""
    if request.param == "oracle-tree":
        answers = {tuple(prompt): reported[1] for prompt, reported in zip(PROMPTS, plainly(BF16), strict=True)}
        return {"method": oracle(answers, wrong_every=5), "num_speculative_tokens": 9}
    return CASES[request.param]


def test_any_drafter_batched_preempted_and_chunked_gives_the_bits_of_plain_decoding_alone(config):
    llm = tiny_llm(config, target=native_target(), **TIGHT)
    assert run(llm, NUM_BATCHED) == plainly(BF16)[:NUM_BATCHED]
    scheduler = engine_of(llm).scheduler
    assert scheduler.num_preemptions > 0, "the memory was meant to be too small"
    assert scheduler.num_cached_tokens > 0, "prompts were meant to share cached blocks"
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("weights", [(torch.float32,), (BF16, "int8")], ids=["fp32", "int8"])
def test_weights_of_any_format_give_the_bits_of_plain_decoding_alone(weights):
    llm = tiny_llm(CASES["suffix-tree"], target=native_target(*weights))
    assert run(llm, 40) == plainly(*weights, count=40)


@functools.cache
def target_with_experts(architecture, quantization):
    kernels = native_target().kernels
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_model(Path(folder), architecture, seed=1, vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
        packing = Packing.choose(kernels, dtype=BF16, quantization=quantization)
        model = load_model(path, dtype=BF16, device=torch.device("cpu"), packing=packing)
    return replace(native_target(), model=model)


@pytest.mark.parametrize(
    ("architecture", "quantization"),
    [("Qwen3MoeForCausalLM", None), ("Qwen3MoeForCausalLM", "int8"), ("GptOssForCausalLM", None)],
)
def test_experts_give_the_bits_of_plain_decoding_alone(architecture, quantization):
    target = target_with_experts(architecture, quantization)
    alone = tiny_llm(target=target, enable_prefix_caching=False)
    plain = [
        reported(alone.generate([prompt], sampling, use_tqdm=False)[0])
        for prompt, sampling in zip(PROMPTS[:40], SAMPLING[:40], strict=True)
    ]
    assert run(tiny_llm(CASES["suffix-tree"], target=target, **TIGHT), 40) == plain


GGUFS = {
    "GGUF in 8 bits": ["Q8_0"],
    "GGUF in 4 bits": ["Q4_0"],
    "GGUF in 4 and 5 bits with offsets": ["Q4_1", "Q5_1"],
    "GGUF in K": ["Q4_K", "Q6_K", "Q5_K"],
    "GGUF in less than 4 bits": ["Q2_K", "Q3_K", "IQ4_XS"],
}
IN_BLOCKS = [*GGUFS, "int4", *METHODS]


@functools.cache
def target_in_blocks(kind, activation_dtype):
    """A tiny random model whose weights are in blocks, from whatever kind of file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        if kind in GGUFS:
            path = path / "tiny.gguf"
            save_tiny_gguf(path, kinds=GGUFS[kind])
        else:
            save_tiny_model(path, seed=3, vocab_size=VOCAB_SIZE, **SIZES)
            save_tiny_tokenizer(path, vocab_size=VOCAB_SIZE)
        if kind in METHODS:
            quantize(path, *METHODS[kind], symmetric=kind == "compressed-tensors")
        settings = EngineSettings(
            model=str(path),
            dtype="bfloat16",
            quantization="int4" if kind == "int4" else None,
            activation_dtype=activation_dtype,
        )
        return load_target(path, settings, torch.device("cpu"))


@functools.cache
def plainly_in_blocks(kind, activation_dtype):
    """What each of some requests gets when it is decoded alone."""
    alone = tiny_llm(target=target_in_blocks(kind, activation_dtype), enable_prefix_caching=False)
    requests = zip(PROMPTS[:NUM_IN_BLOCKS], SAMPLING[:NUM_IN_BLOCKS], strict=True)
    return [reported(alone.generate([prompt], sampling, use_tqdm=False)[0]) for prompt, sampling in requests]


@pytest.mark.parametrize("activation_dtype", ["bfloat16", "int16", "int8"])
@pytest.mark.parametrize("kind", IN_BLOCKS)
def test_weights_in_blocks_give_the_bits_of_plain_decoding_alone(kind, activation_dtype):
    plain = plainly_in_blocks(kind, activation_dtype)
    answers = {tuple(prompt): one[1] for prompt, one in zip(PROMPTS, plain, strict=False)}
    config = {"method": oracle(answers, wrong_every=5), "num_speculative_tokens": 9}
    llm = tiny_llm(config, target=target_in_blocks(kind, activation_dtype), **TIGHT)
    assert run(llm, NUM_IN_BLOCKS) == plain
    assert llm.stats.speculation.num_accepted_tokens > 0.3 * sum(len(one[1]) for one in plain)


@pytest.mark.parametrize("kind", IN_BLOCKS)
def test_activations_in_int8_round_otherwise(kind):
    assert plainly_in_blocks(kind, "int8") != plainly_in_blocks(kind, "auto")


def test_a_batch_gives_the_bits_of_each_alone():
    assert run(tiny_llm(target=native_target(), enable_prefix_caching=False)) == plainly(BF16)


def test_chunks_of_prompts_give_the_bits_of_whole_ones():
    llm = tiny_llm(target=native_target(), max_num_batched_tokens=7, max_num_seqs=3, enable_prefix_caching=False)
    assert run(llm, 40) == plainly(BF16)[:40]


def test_cached_prefixes_give_the_bits_of_computed_ones():
    llm = tiny_llm(target=native_target())
    run(llm, 40)
    cached = engine_of(llm).scheduler.num_cached_tokens
    assert run(llm, 40) == plainly(BF16)[:40]
    assert engine_of(llm).scheduler.num_cached_tokens > cached + 200


@pytest.mark.parametrize("block_size", [1, 16])
def test_block_size_changes_no_bit(block_size):
    llm = tiny_llm(SUFFIX, target=native_target(), block_size=block_size)
    assert run(llm, 40) == plainly(BF16)[:40]


def test_engines_in_two_threads_over_the_same_weights_give_the_bits_of_each_alone():
    llms = [tiny_llm(config, target=native_target(), max_num_seqs=4) for config in (None, SUFFIX)]
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda llm: run(llm, 40), llms))
    assert texts == [plainly(BF16)[:40]] * 2


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_of_the_kernels_change_no_bit(num_threads):
    expected = plainly(BF16)[:20]
    with threads(native_target().attention.kernels, num_threads):
        assert run(tiny_llm(SUFFIX, target=native_target()), 20) == expected
