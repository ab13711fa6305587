import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV3Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    HunYuanDenseV1Config,
    Llama4TextConfig,
    MambaConfig,
    MiniMaxM3VLTextConfig,
    MixtralConfig,
    Phi3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.errors import DraftError, ModelError
from forerun.kv.cache import KVCache
from forerun.models import transformers_attention
from forerun.models.transformers_attention import UnsupportedAttentionError
from forerun.models.transformers_model import load_transformers_model, wrap_model
from forerun.ops.attention.paged import PagedAttention
from forerun.ops.candidates import find_candidates

CPU = torch.device("cpu")
VOCAB = 97
BLOCK_SIZE = 4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS = {
    "mixture_of_experts": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "experts_and_window": MixtralConfig(**SIZES, **EXPERTS, sliding_window=5),
    "latent_attention": DeepseekV3Config(**SIZES | LATENT),
    "sinks_and_windows": GptOssConfig(**SIZES, **EXPERTS, sliding_window=5, rope_parameters=YARN),
    "learned_positions": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "parallel_residual": GPTNeoXConfig(**SIZES),
}
REFUSED = {
    "mamba": (MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2), "keeps a state"),
    "hybrid": (Qwen3NextConfig(**SIZES, **EXPERTS), "keeps a state"),
    "bidirectional": (
        BertConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4),
        "see later ones",
    ),
    "selected_blocks": (
        MiniMaxM3VLTextConfig(
            **SIZES,
            num_local_experts=4,
            num_experts_per_tok=2,
            dense_intermediate_size=16,
            shared_intermediate_size=16,
            rotary_dim=4,
            layer_types=["minimax_m3_sparse"] * 3,
            index_n_heads=2,
            index_head_dim=8,
            index_block_size=16,
            index_topk_blocks=1,
        ),
        "selects",
    ),
    "chunked_attention": (Llama4TextConfig(**SIZES, **EXPERTS, attention_chunk_size=16), "neither causal"),
}


def make_model(config, *, dtype=torch.float32):
    """A random model whose attention is not close to uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.ndim > 1 else 1)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def references():
    """Token ids and eager logits of each architecture, with the original attention."""
    found = {}
    for name, config in CONFIGS.items():
        model = make_model(config)
        tokens = torch.randint(VOCAB, [20], generator=torch.Generator().manual_seed(1))
        output = model(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
        found[name] = (tokens, output.logits[0], output.hidden_states, wrap_model(model))
    return found


def run(model, cache, tokens, chunk, *, logits_rows=None, features=frozenset(), num_candidates=0):
    """One pass over rows [start, end) of a sequence in the blocks of `cache`."""
    start, end = chunk
    positions = torch.arange(start, end)
    block_ids = np.arange(-(-end // BLOCK_SIZE), dtype=np.int32)
    batch = ForwardBatch(
        token_ids=tokens[start:end],
        positions=positions,
        slot_mapping=positions,
        sequences=[SequenceRows(num_context=start, num_rows=end - start, block_ids=block_ids)],
        block_size=BLOCK_SIZE,
        logits_rows=torch.arange(end - start) if logits_rows is None else logits_rows,
        features=features,
        num_candidates=num_candidates,
    )
    return model.forward(batch, PagedAttention().begin(batch, cache))


def make_cache(model):
    return KVCache(model.kv_specs, num_blocks=8, block_size=BLOCK_SIZE, dtype=model.dtype, device=CPU)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "bounds", [[0, 20], [0, 7, 13, 20], [0, 12, *range(13, 21)]], ids=["prefill", "chunked", "decode"]
)
def test_logits_equal_those_of_transformers(references, name, bounds):
    tokens, expected, _, model = references[name]
    cache = make_cache(model)
    chunks = zip(bounds, bounds[1:], strict=False)
    found = torch.cat([run(model, cache, tokens, chunk).logits for chunk in chunks])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mixture_of_experts", "learned_positions"])
def test_logits_are_computed_at_the_rows_asked_for(references, name):
    tokens, expected, _, model = references[name]
    rows = torch.tensor([2, 19])
    found = run(model, make_cache(model), tokens, (0, 20), logits_rows=rows).logits
    torch.testing.assert_close(found, expected[rows], atol=1e-4, rtol=1e-4)


def test_candidates_are_those_of_the_logits(references):
    tokens, *_, model = references["mixture_of_experts"]
    found = run(model, make_cache(model), tokens, (0, 20), logits_rows=torch.tensor([3, 19]), num_candidates=5)
    expected = find_candidates(found.logits, 5)
    assert torch.equal(found.candidates.token_ids, expected.token_ids)
    assert torch.equal(found.candidates.logits, expected.logits)


def test_a_pass_without_logits_still_fills_the_cache(references):
    tokens, expected, _, model = references["mixture_of_experts"]
    cache = make_cache(model)
    none = run(model, cache, tokens, (0, 12), logits_rows=torch.zeros(0, dtype=torch.int64)).logits
    assert none.shape == (0, VOCAB)
    torch.testing.assert_close(run(model, cache, tokens, (12, 20)).logits, expected[12:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_features_are_the_hidden_states_of_transformers(references, name):
    tokens, _, hidden, model = references[name]
    wanted = frozenset({"last_hidden", "hidden.0", "hidden.2", "hidden.3"})
    features = run(model, make_cache(model), tokens, (0, 20), features=wanted).features
    assert features.keys() == wanted
    for feature, expected in (("hidden.0", hidden[0]), ("hidden.2", hidden[2]), ("last_hidden", hidden[3])):
        torch.testing.assert_close(features[feature], expected[0], atol=1e-4, rtol=1e-4)


def test_the_hidden_state_after_the_last_layer_is_not_normed(references):
    tokens, _, hidden, model = references["mixture_of_experts"]
    found = run(model, make_cache(model), tokens, (0, 20), features=frozenset({"hidden.3"})).features["hidden.3"]
    normed = model._model.model.norm(found)
    torch.testing.assert_close(normed, hidden[3][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("feature", ["hidden.4", "hidden.-1", "hidden", "logits"])
def test_an_unknown_feature_is_a_draft_error_that_lists_the_known(references, feature):
    tokens, _, _, model = references["mixture_of_experts"]
    with pytest.raises(DraftError, match=r"hidden\.0 to hidden\.3"):
        run(model, make_cache(model), tokens, (0, 1), features=frozenset({feature}))


def test_kv_shapes_and_sizes_are_those_of_the_model(references):
    model = references["latent_attention"][3]
    assert [(spec.num_kv_heads, spec.key_dim, spec.value_dim) for spec in model.kv_specs] == [(4, 12, 6)] * 3
    assert (model.vocab_size, model.hidden_size, model.num_layers, model.max_model_len) == (VOCAB, 32, 3, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_passes_its_own_check(dtype):
    assert wrap_model(make_model(CONFIGS["experts_and_window"], dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_paged_cache_cannot_serve_is_refused_with_the_reason(name):
    config, reason = REFUSED[name]
    with pytest.raises(UnsupportedAttentionError, match=reason):
        wrap_model(make_model(config))


def test_attention_that_computes_something_else_is_refused(monkeypatch):
    class Deaf:
        """Attention that sees no context."""

        def begin(self, batch, cache):
            return lambda layer, query, key, value, **_: value.repeat_interleave(query.shape[1] // value.shape[1], 1)

    monkeypatch.setattr(transformers_attention, "PagedAttention", Deaf)
    with pytest.raises(UnsupportedAttentionError, match="logits differ from eager"):
        wrap_model(make_model(CONFIGS["mixture_of_experts"]))


@pytest.fixture
def folder(tmp_path):
    make_model(CONFIGS["experts_and_window"]).save_pretrained(tmp_path)
    return tmp_path


def load(folder, config=CONFIGS["experts_and_window"], dtype=None):
    return load_transformers_model(folder, config, dtype=dtype, device=CPU)


def test_a_saved_model_computes_what_it_did_before(folder, references):
    tokens, expected, _, _ = references["experts_and_window"]
    model = load(folder)
    torch.testing.assert_close(run(model, make_cache(model), tokens, (0, 20)).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_saved_model_takes_the_dtype_asked_for(folder):
    assert load(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_refused_model_is_a_model_error_that_names_path_and_architecture(tmp_path):
    config, _ = REFUSED["mamba"]
    make_model(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"MambaForCausalLM cannot be replaced.*another architecture") as error:
        load(tmp_path, config)
    assert str(tmp_path) in str(error.value)


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_tensor_is_a_model_error_that_names_it(folder):
    change_weights(folder, lambda tensors: tensors.pop("model.layers.1.input_layernorm.weight"))
    with pytest.raises(ModelError, match=r"lacks tensor 'model\.layers\.1\.input_layernorm\.weight'"):
        load(folder)


def test_a_surplus_tensor_is_a_model_error_that_names_it(folder):
    change_weights(folder, lambda tensors: tensors.update(surplus=torch.ones(1)))
    with pytest.raises(ModelError, match="has the unknown tensor 'surplus'"):
        load(folder)


def test_a_tensor_of_another_shape_is_a_model_error(folder):
    change_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(ModelError, match="cannot load the model"):
        load(folder)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_batch_are_refused(tmp_path, rope_type):
    config = Phi3Config(**SIZES)
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4}
    with pytest.raises(ModelError, match="changes with the longest sequence"):
        load(tmp_path, config)


def test_a_rotary_embedding_that_is_called_dynamic_but_is_fixed_is_computed(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
    config = HunYuanDenseV1Config(**SIZES, rope_parameters=rope)
    theirs = make_model(config)
    theirs.save_pretrained(tmp_path)
    tokens = torch.arange(3, 23)
    model = load(tmp_path, config)
    found = run(model, make_cache(model), tokens, (0, 20)).logits
    torch.testing.assert_close(found, theirs(input_ids=tokens[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_loading_prints_nothing(folder, capfd):
    load(folder)
    assert capfd.readouterr() == ("", "")
