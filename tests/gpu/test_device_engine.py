"""On a GPU an engine with device_step=True gives the texts and the drafts of one whose host draws, matches and drafts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="needs triton: pip install 'forerun[cuda]'")
pytest.importorskip("transformers", reason="makes the tiny model")

DEVICE = "cuda"
VOCAB_SIZE = 264
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
TREES = {"method": "recycle", "draft_confidence_threshold": 0.0}
SELF = {"method": "self", "exit_layer": 2, "num_speculative_tokens": 3}
MODEL = {"method": "draft_model", "num_speculative_tokens": 3, "draft_sample_method": "coupled"}
PARD = {"method": "pard", "num_speculative_tokens": 3}
PEAGLE = {"method": "peagle", "num_speculative_tokens": 4}
DFLASH = {"method": "dflash", "num_speculative_tokens": 5, "draft_sample_method": "coupled"}
MEDUSA = {"method": "medusa", "num_speculative_tokens": 4, "draft_sample_method": "coupled"}
MLP = {"method": "mlp_speculator", "num_speculative_tokens": 4}
AT_ONCE = {"pard": PARD, "peagle": PEAGLE, "dflash": DFLASH, "medusa": MEDUSA, "mlp_speculator": MLP}
"""Drafters that predict all tokens at once, or keep no KV."""

SELF_TREE = {"method": "self", "exit_layer": 2, "draft_tree": [3, 2, 1], "draft_sample_method": "coupled"}
DYNAMIC = {
    "method": "self",
    "exit_layer": 2,
    "draft_tree": {"top_k": 3, "depth": 4},
    "num_speculative_tokens": 8,
}
AT_ONCE_TREES = {
    "pard, tree": PARD | {"draft_tree": [3, 2, 1], "num_speculative_tokens": 15},
    "peagle, dynamic tree": PEAGLE | {"draft_tree": {"top_k": 3, "depth": 4}, "num_speculative_tokens": 8},
    "dflash, coupled tree": DFLASH | {"draft_tree": [3, 2, 1], "num_speculative_tokens": 15},
    "medusa, dynamic tree": {
        "method": "medusa",
        "draft_tree": {"top_k": 4, "depth": 4},
        "num_speculative_tokens": 12,
    },
    "mlp_speculator, tree": MLP | {"draft_tree": [3, 2, 1], "num_speculative_tokens": 15},
}
SAMPLING = [
    {"temperature": 0, "allowed_token_ids": [3, 4, 5]},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.2},
    {"temperature": 1.2, "logit_bias": {3: 2.0}, "min_tokens": 6, "stop_token_ids": [1, 2, 3]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.tiny_models import save_tiny_model
    from tests.tiny_tokenizer import save_tiny_tokenizer

    folder = save_tiny_model(tmp_path_factory.mktemp("model"), seed=1, vocab_size=VOCAB_SIZE)
    save_tiny_tokenizer(folder, vocab_size=VOCAB_SIZE)
    return folder


def complete(config, folder):
    """A config with the folder of its draft model, the target's twin, or of its random head for the target in `folder`."""
    from tests import heads_eagle, heads_medusa
    from tests.engines import with_config
    from tests.heads_dflash import tiny_dflash
    from tests.tiny_models import COMMON

    target = SimpleNamespace(model=SimpleNamespace(hidden_size=COMMON["hidden_size"], vocab_size=VOCAB_SIZE))
    heads = {"peagle": heads_eagle.peagle, "medusa": heads_medusa.medusa, "mlp_speculator": heads_medusa.mlp_speculator}
    method = config["method"] if isinstance(config, dict) else None
    if method == "draft_model":
        model = folder
    elif method == "pard":
        model = with_config(folder, {"pard_token": 11})
    elif method == "dflash":
        model = tiny_dflash(VOCAB_SIZE)
    elif method in heads:
        model = heads_eagle.save(folder.parent / method, *heads[method](target))
    else:
        return config
    return config | {"model": str(model)}


def outcome(folder, config, *, dtype="float32", **settings):
    from forerun import LLM, SamplingParams

    llm = LLM(
        str(folder),
        speculative_config=complete(config, folder),
        device=DEVICE,
        dtype=dtype,
        max_model_len=128,
        num_gpu_blocks_override=512,
        **settings,
    )
    requests = [SamplingParams(seed=i, max_tokens=24, **SAMPLING[i % len(SAMPLING)]) for i in range(16)]
    prompts = [[i, i + 1, i + 2] * (1 + i % 5) for i in range(16)]
    outputs = llm.generate(prompts, requests, use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].finish_reason) for one in outputs], llm


@pytest.mark.parametrize(
    "config",
    [None, NGRAM, SELF, SELF_TREE, DYNAMIC, *AT_ONCE.values(), *AT_ONCE_TREES.values()],
    ids=["plain", "ngram", "self", "tree", "dynamic tree", *AT_ONCE, *AT_ONCE_TREES],
)
def test_in_the_steady_state_the_host_waits_for_nothing_but_results(folder, config):
    """torch raises wherever it would wait for the device; an event, by which a result is awaited, is no such place."""
    from forerun import LLM, SamplingParams

    config = complete(config, folder)
    llm = LLM(
        str(folder),
        speculative_config=config,
        device=DEVICE,
        device_step=True,
        max_model_len=256,
        num_gpu_blocks_override=512,  # as the engine of the test before may not be gone yet
    )
    if llm.executor.computation.needs_host_rows:
        pytest.skip("the layers need the host to lay out rows")
    sampling = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, allowed_token_ids=[3, 4, 5])
    for i in range(4):
        llm.engine.add_request(str(i), [i, i + 1, i + 2], sampling)
    for _ in range(24):
        llm.engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):  # also over the end of a block
            llm.engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert llm.engine.state.num_running == 4
    assert llm.stats.times.idle > 0


@pytest.mark.parametrize("config", [None, NGRAM, TREES], ids=["plain", "ngram", "trees"])
def test_texts_equal_those_of_the_host(folder, config):
    """In fp32, where torch's sums hardly depend on the rows beside a row."""
    assert outcome(folder, config, device_step=True)[0] == outcome(folder, config, device_step=False)[0]


@pytest.mark.parametrize(
    "config",
    [NGRAM, TREES, SELF, MODEL, SELF_TREE, DYNAMIC, *AT_ONCE.values(), *AT_ONCE_TREES.values()],
    ids=["ngram", "trees", "self", "draft model", "tree", "dynamic tree", *AT_ONCE, *AT_ONCE_TREES],
)
def test_in_bf16_drafts_change_no_text(folder, config):
    texts, llm = outcome(folder, config, dtype="bfloat16")
    assert llm.is_batch_invariant
    assert llm.stats.speculation.num_draft_tokens > 50
    assert texts == outcome(folder, None, dtype="bfloat16")[0]


def test_drafts_change_no_text_of_several_chunks(folder):
    """Attention sums in chunks of 256 places; how long a text there is room for is asked in `tests/ops/cuda/test_attention.py`."""
    from forerun import LLM, SamplingParams

    def text(config, max_model_len):
        llm = LLM(
            str(folder),
            speculative_config=config,
            device=DEVICE,
            dtype="bfloat16",
            max_model_len=max_model_len,
            num_gpu_blocks_override=512,
        )
        prompt = [(7 * i) % 40 + 3 for i in range(400)]
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
        return output.outputs[0].token_ids

    plain = text(None, 470)
    assert text(NGRAM, 470) == text(NGRAM, 512) == plain


def test_verify_finds_no_text_that_drafts_change(folder):
    from forerun.proof.run import prove

    settings = {"device": DEVICE, "dtype": "bfloat16", "max_model_len": 128}
    report = prove(str(folder), speculative_config=NGRAM, settings=settings)
    assert report.passed
    assert report.is_bit_identical


def test_kernels_compute_and_auto_drafts_where_nobody_says_otherwise(folder):
    _, llm = outcome(folder, "default", dtype="bfloat16")
    assert llm.has_device_layers
    assert llm.speculative.method == "auto"


@pytest.mark.parametrize(
    "config", [SELF_TREE, DYNAMIC, *AT_ONCE_TREES.values()], ids=["tree", "dynamic tree", *AT_ONCE_TREES]
)
def test_trees_that_the_device_drafts_stand_as_often_as_the_hosts(folder, config):
    """In fp32 they are the same, but where logits are as good as tied."""
    (texts, on_device), (expected, by_host) = (
        outcome(folder, config, device_step=device_step) for device_step in (True, False)
    )
    assert texts == expected
    assert on_device.executor.computation.drafts_trees
    accepted = [llm.stats.speculation.num_accepted_tokens for llm in (on_device, by_host)]
    assert accepted[0] > 0
    assert accepted[0] == pytest.approx(accepted[1], rel=0.1)


@pytest.mark.parametrize(
    "config",
    [None, NGRAM, TREES, SELF_TREE, DYNAMIC, *AT_ONCE.values(), *AT_ONCE_TREES.values()],
    ids=["plain", "ngram", "trees", "tree of a network", "dynamic tree", *AT_ONCE, *AT_ONCE_TREES],
)
def test_texts_of_graphs_are_those_of_eager_steps(folder, config):
    assert outcome(folder, config)[0] == outcome(folder, config, enforce_eager=True)[0]


def test_most_steps_are_graphs(folder):
    from forerun import LLM, SamplingParams

    llm = LLM(
        str(folder),
        device=DEVICE,
        device_step=True,
        max_model_len=128,
        num_gpu_blocks_override=512,
        speculative_config=NGRAM,
    )
    if llm.executor.computation.needs_host_rows:
        pytest.skip("the layers need the host to lay out rows")
    llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=40, ignore_eos=True), use_tqdm=False)
    assert llm.stats.times.num_replayed_steps > 0.8 * llm.stats.times.num_steps
