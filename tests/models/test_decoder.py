"""What the decoder gives back, and what it refuses to load."""

import math

import pytest
import torch
import transformers

from forerun.errors import ModelError
from forerun.models.decoder import build_decoder
from forerun.models.families import FAMILIES
from forerun.models.loader import DummyCheckpoint
from forerun.ops.attention.naive import NaiveAttention
from forerun.ops.candidates import find_candidates
from tests.models.paged_run import PagedRun
from tests.models.state_dict import read_checkpoint
from tests.tiny_models import save_tiny_model, tiny_config

TOKEN_IDS = [5, 9, 17, 3, 44, 12, 99, 7, 31]
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.layers.1.input_layernorm.weight"


def load(folder, *, dtype=torch.float32, checkpoint=None):
    config = transformers.AutoConfig.from_pretrained(folder)
    return build_decoder(config, checkpoint or read_checkpoint(folder), dtype=dtype, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tied"), "LlamaForCausalLM", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def decoder(folder):
    return load(folder)


def test_logits_come_for_the_wanted_rows_only(decoder):
    everywhere = PagedRun(decoder).feed(TOKEN_IDS).logits
    wanted = PagedRun(decoder).feed(TOKEN_IDS, logits_rows=[2, 8]).logits
    torch.testing.assert_close(wanted, everywhere[[2, 8]])


def test_chunk_without_wanted_rows_gives_no_logits(decoder):
    assert PagedRun(decoder).feed(TOKEN_IDS, logits_rows=[]).logits.shape == (0, decoder.vocab_size)


def test_candidates_come_for_the_wanted_rows_where_the_batch_asks_for_them(decoder):
    found = PagedRun(decoder).feed(TOKEN_IDS, logits_rows=[2, 8], num_candidates=4)
    expected = find_candidates(found.logits, 4)
    assert torch.equal(found.candidates.token_ids, expected.token_ids)
    assert torch.equal(found.candidates.logits, expected.logits)
    assert PagedRun(decoder).feed(TOKEN_IDS).candidates is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_are_fp32_whatever_the_model_is(folder, dtype):
    decoder = load(folder, dtype=dtype)
    assert decoder.dtype == dtype
    assert PagedRun(decoder).feed(TOKEN_IDS).logits.dtype == torch.float32


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM"])
def test_bf16_stays_near_fp32(tmp_path, architecture):
    save_tiny_model(tmp_path, architecture, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    exact = PagedRun(load(tmp_path)).feed(TOKEN_IDS).logits
    rounded = PagedRun(load(tmp_path, dtype=torch.bfloat16)).feed(TOKEN_IDS).logits
    assert (rounded - exact).square().mean().sqrt() < 0.05 * exact.std()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_weight_bytes_are_all_matrices_but_an_embedding_that_is_only_looked_up(architecture, tied):
    hf_config = tiny_config(architecture, tie_word_embeddings=tied)
    checkpoint = DummyCheckpoint(hf_config, dtype=torch.bfloat16)
    matrices = {
        name: math.prod(checkpoint.shape(name)) for name in checkpoint.names() if len(checkpoint.shape(name)) > 1
    }
    decoder = build_decoder(hf_config, checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"))
    looked_up = 0 if decoder.config.tied else matrices[f"{decoder.config.root}embed_tokens.weight"]
    biases = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names() if name.endswith(".bias"))
    assert decoder.weight_bytes == 2 * (sum(matrices.values()) - looked_up + biases)


def test_features_come_only_when_asked_for(decoder):
    assert PagedRun(decoder).feed(TOKEN_IDS).features == {}


def test_hidden_features_are_those_of_transformers(decoder, folder):
    names = frozenset({"hidden.0", "hidden.2", "hidden.3", "last_hidden"})
    features = PagedRun(decoder).feed(TOKEN_IDS, logits_rows=[8], features=names).features
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        # transformers gives embeddings, then each layer's output, the last one after the final norm.
        expected = model(torch.tensor([TOKEN_IDS]), output_hidden_states=True).hidden_states
        final_norm = model.model.norm(features["hidden.3"])
    assert features.keys() == names
    for name, reference in [("hidden.0", expected[0]), ("hidden.2", expected[2]), ("last_hidden", expected[3])]:
        torch.testing.assert_close(features[name], reference[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(features["last_hidden"], final_norm, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["hidden.4", "hidden.-1", "logits"])
def test_unknown_feature_is_named(decoder, name):
    with pytest.raises(ModelError, match=name):
        PagedRun(decoder).feed(TOKEN_IDS, features=frozenset({name}))


def test_naive_attention_gives_the_same_logits(decoder):
    naive = PagedRun(decoder, attention=NaiveAttention()).feed(TOKEN_IDS).logits
    torch.testing.assert_close(PagedRun(decoder).feed(TOKEN_IDS).logits, naive, atol=1e-4, rtol=0)


def test_single_layer_runs_by_itself(decoder):
    calls = []

    def attend(layer, query, key, value, **options):
        calls.append((layer, query.shape, key.shape, value.shape))
        return torch.zeros_like(query)

    rotations = decoder.rotations(torch.tensor([0, 1]))
    hidden = decoder.layers(torch.randn(2, decoder.hidden_size), rotations, attend, 1, 2)
    assert hidden.shape == (2, decoder.hidden_size)
    assert calls == [(1, (2, 6, 8), (2, 2, 8), (2, 2, 8))]


def test_missing_tensor_is_named_with_its_shape(folder):
    checkpoint = read_checkpoint(folder)
    del checkpoint.tensors[NORM]
    with pytest.raises(ModelError, match=rf"{NORM}.*missing.*\[48\]"):
        load(folder, checkpoint=checkpoint)


def test_surplus_tensor_is_named(folder):
    checkpoint = read_checkpoint(folder)
    checkpoint.tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    with pytest.raises(ModelError, match=r"surplus.*q_proj\.bias"):
        load(folder, checkpoint=checkpoint)


def test_wrong_shape_is_named_with_what_was_expected(folder):
    checkpoint = read_checkpoint(folder)
    checkpoint.tensors[NORM] = torch.zeros(49)
    with pytest.raises(ModelError, match=rf"{NORM}.*\[49\].*\[48\]"):
        load(folder, checkpoint=checkpoint)


def test_inverse_frequencies_of_old_checkpoints_are_harmless(folder):
    checkpoint = read_checkpoint(folder)
    checkpoint.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    assert load(folder, checkpoint=checkpoint).num_layers == 3


def test_stored_copy_of_a_tied_head_is_accepted(tied_folder):
    checkpoint = read_checkpoint(tied_folder)
    checkpoint.tensors[HEAD] = checkpoint.tensors[EMBEDDING].clone()
    tied = load(tied_folder, checkpoint=checkpoint)
    assert tied._parts.head.linear.weight is tied._parts.embedding.table


def test_stored_head_that_differs_from_what_it_is_tied_to_is_refused(tied_folder):
    checkpoint = read_checkpoint(tied_folder)
    checkpoint.tensors[HEAD] = checkpoint.tensors[EMBEDDING] + 1
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load(tied_folder, checkpoint=checkpoint)


def test_untied_model_without_a_head_is_refused(folder):
    checkpoint = read_checkpoint(folder)
    del checkpoint.tensors[HEAD]
    with pytest.raises(ModelError, match=HEAD):
        load(folder, checkpoint=checkpoint)


def test_model_says_what_the_engine_must_know(decoder):
    assert (decoder.vocab_size, decoder.hidden_size, decoder.num_layers) == (128, 48, 3)
    assert decoder.max_model_len == 512
    assert [(spec.num_kv_heads, spec.key_dim, spec.value_dim) for spec in decoder.kv_specs] == [(2, 8, 8)] * 3
