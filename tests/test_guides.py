"""Scripts written for vLLM's offline API run with the import and the model's path changed."""

from __future__ import annotations

import tempfile

import pytest
from safetensors import safe_open

from forerun import LLM, SamplingParams
from forerun.engine.stats import Counter, Vector
from tests.stand_in import save_stand_in


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_stand_in(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}},
        {"enforce_eager": True, "speculative_config": {"method": "suffix", "num_speculative_tokens": 15}},
    ],
    ids=["ngram", "suffix"],
)
def test_the_guides_offline_script(model, settings, capsys):
    prompts = ["The future of AI is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=model, tensor_parallel_size=1, **settings)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
    assert "Prompt: 'The future of AI is', Generated text: " in capsys.readouterr().out


def test_the_guides_script_that_extracts_hidden_states(model, capsys):
    with tempfile.TemporaryDirectory() as tmpdirname:
        llm = LLM(
            model=model,
            tensor_parallel_size=1,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
            },
            kv_transfer_config={
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": tmpdirname},
            },
        )
        prompts = ["Hello, how are you?", "What is machine learning?"]
        sampling_params = SamplingParams(max_tokens=1)
        outputs = llm.generate(prompts, sampling_params)
        for output in outputs:
            hidden_states_path = output.kv_transfer_params.get("hidden_states_path")
            print("Hidden states saved to:", hidden_states_path)
            with safe_open(hidden_states_path, "pt") as f:
                token_ids = f.get_tensor("token_ids")
                hidden_states = f.get_tensor("hidden_states")
                print("Shape:", hidden_states.shape)
            assert token_ids.tolist() == output.prompt_token_ids
            assert hidden_states.shape == (len(token_ids), 3, 48)
    assert capsys.readouterr().out.count("Shape: torch.Size(") == 2


def test_the_older_arguments_run_with_a_warning(model):
    with pytest.warns(FutureWarning, match="speculative_config="):
        llm = LLM(model=model, speculative_model="[ngram]", num_speculative_tokens=5)
    assert llm.speculative.describe() == "ngram, K=5"


def test_acceptance_can_be_read_from_the_metrics(model):
    llm = LLM(
        model=model,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        },
    )
    llm.generate(["a b a b a b a b"], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    num_drafts, per_position = 0, [0] * 3
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            assert isinstance(metric, Counter)
            num_drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            assert isinstance(metric, Vector)
            per_position = [a + b for a, b in zip(per_position, metric.values, strict=True)]
    assert num_drafts == llm.stats.speculation.num_drafts > 0
    assert sum(per_position) == llm.stats.speculation.num_accepted_tokens
