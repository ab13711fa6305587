"""GGUF files of architectures outside the table: read by transformers, unless they promise more than they hold."""

import gguf
import pytest
import torch
from transformers import Starcoder2Config, Starcoder2ForCausalLM
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

from forerun.errors import ModelError
from forerun.models.gguf import with_transformers
from forerun.models.loader import load_model
from tests.models.paged_run import PagedRun
from tests.tiny_gguf import VOCAB, add_tiny_tokenizer

TOKEN_IDS = [5, 9, 17, 3, 44]
SIZES = {
    "context_length": 128,
    "embedding_length": 32,
    "block_count": 2,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}


def save(path, **changes):
    """A tiny StarCoder 2 in a file; `changes` are sizes that the file says it has. Return transformers' model."""
    config = Starcoder2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=None,
    )
    model = Starcoder2ForCausalLM(config).eval()
    names = {own: stored for stored, own in get_gguf_hf_weights_map(model, TensorProcessor()).items()}
    writer = gguf.GGUFWriter(str(path), "starcoder2")
    for name, size in (SIZES | changes).items():
        writer.add_uint32(f"starcoder2.{name}", size)
    writer.add_layer_norm_eps(config.norm_epsilon)
    add_tiny_tokenizer(writer, path.parent / "words", pre="starcoder")
    for name, tensor in model.state_dict().items():
        writer.add_tensor(names[name], tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def load(path):
    return load_model(path, dtype=torch.float32, device=torch.device("cpu"))


def test_a_model_outside_the_table_computes_what_transformers_does(tmp_path):
    expected = save(tmp_path / "x.gguf")(torch.tensor([TOKEN_IDS])).logits[0]
    found = PagedRun(load(tmp_path / "x.gguf")).feed(TOKEN_IDS).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_count": 1 << 20}, "promises 1048576 layers; may have at most 1024"),
        ({"block_count": 1000}, "weights, but holds"),
        ({"feed_forward_length": 1 << 22}, "weights, but holds"),
        ({"embedding_length": 1 << 22}, "weights, but holds"),
    ],
)
def test_what_promises_more_than_it_holds_is_refused_before_memory_is_taken(tmp_path, changes, said):
    save(tmp_path / "x.gguf", **changes)
    with pytest.raises(ModelError) as found:
        load(tmp_path / "x.gguf")
    assert said in str(found.value)
    assert str(found.value).startswith(f"{tmp_path / 'x.gguf'} (GGUF: ")


def test_more_elements_than_transformers_reader_has_room_for_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(with_transformers, "MOST_ELEMENTS", 100)
    save(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match=r"promises [0-9]+ elements of arrays; may have at most 100"):
        load(tmp_path / "x.gguf")
