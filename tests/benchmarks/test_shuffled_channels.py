"""A model with shuffled channels computes what it computed."""

import torch
from safetensors.torch import load_file, save_file

from benchmarks.shuffled_channels import shuffle
from forerun.models.loader import load_model
from tests.models.paged_run import PagedRun
from tests.tiny_models import save_tiny_model


def test_a_shuffled_model_has_the_same_logits_and_other_weights(tmp_path):
    folder = save_tiny_model(tmp_path, vocab_size=97)
    plain = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    expected = PagedRun(plain).feed([3, 4, 5, 6]).logits
    tensors = load_file(folder / "model.safetensors")
    shuffled = shuffle(tensors, num_heads=6, num_kv_heads=2)
    assert all(not torch.equal(shuffled[name], weight) for name, weight in tensors.items())
    save_file(shuffled, folder / "model.safetensors", metadata={"format": "pt"})
    found = PagedRun(load_model(folder, dtype=torch.float32, device=torch.device("cpu"))).feed([3, 4, 5, 6]).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
