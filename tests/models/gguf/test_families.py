"""A model in a GGUF file computes what the same model in a folder does."""

from dataclasses import replace

import pytest
import torch

from forerun.models.config_file import read_config
from forerun.models.families import decoder_config
from forerun.models.gguf.architectures import ARCHITECTURES
from forerun.models.loader import load_model
from tests.family_gguf import FAMILY_GGUFS, save_family
from tests.models.paged_run import PagedRun

TOKEN_IDS = [5, 9, 17, 3, 44, 12, 99, 7, 31, 200, 131, 64, 8, 9]


def logits(path):
    model = load_model(path, dtype=torch.float32, device=torch.device("cpu"))
    return PagedRun(model).feed(TOKEN_IDS).logits


@pytest.mark.parametrize("kind", FAMILY_GGUFS)
def test_a_model_in_gguf_computes_what_its_folder_does(tmp_path, kind):
    file = save_family(tmp_path, kind)
    torch.testing.assert_close(logits(file), logits(tmp_path), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", FAMILY_GGUFS)
def test_the_configuration_is_resolved_alike(tmp_path, kind):
    file = save_family(tmp_path, kind)
    found, expected = decoder_config(read_config(file)), decoder_config(read_config(tmp_path))
    for name in ("norm_eps", "attention_scale", "residual_scale", "embedding_scale", "logit_scale"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-6)
    if kind == "phi3 longrope":  # whose attention factor a file has in fp32
        (ours,), (theirs,) = set(found.ropes), set(expected.ropes)
        assert ours.scaling.attention_factor == pytest.approx(theirs.scaling.attention_factor)
        attention_factor = theirs.scaling.attention_factor
        assert replace(ours, scaling=replace(ours.scaling, attention_factor=attention_factor)) == theirs
    elif kind != "llama 3.1":  # whose scaling a file has as factors
        assert found.ropes == expected.ropes
    assert (found.windows, found.tied, found.activation) == (expected.windows, expected.tied, expected.activation)


def test_every_architecture_of_the_table_is_tested():
    assert {kind.split()[0] for kind in FAMILY_GGUFS} == set(ARCHITECTURES)
