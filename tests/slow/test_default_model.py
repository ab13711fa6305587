"""The contract on real weights: SmolLM2-135M-Instruct, fp32, 200 prompts in too little memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from forerun import LLM, SamplingParams
from forerun.bench.prompts import WORKLOADS
from forerun.models.store import resolve_model
from tests.contract.drafters import CASES, oracle
from tests.engines import engine_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = "smollm2-135m"
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PIECES = ["<|im_start|>", "<|im_end|>\n", " the", "don't", " \n\n", "12345", "naïve 漢字 🙂", "    return x\n", "\t"]
TIGHT = {
    "block_size": 4,
    "num_gpu_blocks_override": 100,
    "max_model_len": 300,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 256,
}


@pytest.fixture(scope="module")
def target():
    """The model, loaded once."""
    return LLM(MODEL, dtype="float32", max_model_len=1024, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def transformers_tokenizer():
    return AutoTokenizer.from_pretrained(resolve_model(MODEL))


@pytest.fixture(scope="module")
def prompts(target):
    """200 prompts of 3 to about 250 tokens: beginnings of the benchmark's messages, many with the same start."""
    tokenizer = target.get_tokenizer()
    texts = [text for messages in WORKLOADS.values() for text in messages]
    ids = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
    return [ids[i % len(ids)][: 3 + (37 * i) % 250] for i in range(200)]


@pytest.fixture(scope="module")
def plain_outputs(target, prompts):
    """Each prompt decoded alone, with ample memory and no drafts."""
    return [target.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]


def config_of(name, prompts, plain_outputs):
    if name != "oracle-tree":
        return CASES[name]
    answers = {tuple(p): o for p, o in zip(prompts, plain_outputs, strict=True)}
    return {"method": oracle(answers, wrong_every=5), "num_speculative_tokens": 9}


@pytest.mark.parametrize(
    "name", ["plain", "ngram", "suffix", "suffix-tree", "bad", "random-tree", "self-exit", "oracle-tree"]
)
def test_greedy_output_equals_plain_decoding_on_real_weights(name, target, prompts, plain_outputs):
    llm = LLM.from_target(
        target._target,
        type(target.settings)(model=MODEL, dtype="float32", **TIGHT),
        target.with_speculation(config_of(name, prompts, plain_outputs)).speculative,
    )
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    different = [
        i for i, (o, plain) in enumerate(zip(outputs, plain_outputs, strict=True)) if o.outputs[0].token_ids != plain
    ]
    assert different == []
    scheduler = engine_of(llm).scheduler
    assert scheduler.num_preemptions > 0
    assert scheduler.num_cached_tokens > 0


def test_seeded_text_is_the_same_with_drafts_and_without(target, prompts):
    sampling = [SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=24) for i in range(16)]
    plain = target.generate(prompts[:16], sampling, use_tqdm=False)
    for name in ("ngram", "suffix-tree", "random-tree"):
        drafted = target.with_speculation(CASES[name]).generate(prompts[:16], sampling, use_tqdm=False)
        assert [o.outputs[0].text for o in drafted] == [o.outputs[0].text for o in plain]


def test_a_known_question_gets_its_answer(target):
    output = target.chat(
        [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0, max_tokens=16)
    )[0]
    assert "Paris" in output.outputs[0].text


def test_greedy_text_equals_transformers(target, prompts):
    path = resolve_model(MODEL)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for prompt in prompts[:: len(prompts) // 6]:
        ids = torch.tensor([prompt])
        # The mask is given because the pad token is the end-of-turn token, which transformers would mask.
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None
        )[0, len(prompt) :]
        ours = target.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert ours == expected.tolist()


@settings(deadline=None, max_examples=1000)
@given(text=st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join)))
def test_any_text_has_the_ids_that_transformers_gives(target, transformers_tokenizer, text):
    ids = target.get_tokenizer().encode(text)
    assert ids == transformers_tokenizer.encode(text)
    assert target.get_tokenizer().decode(ids) == transformers_tokenizer.decode(ids, skip_special_tokens=True)
