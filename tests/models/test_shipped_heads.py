"""A head that comes with forerun is found for its target, in whatever bits, and for no other."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from forerun.build import load_target
from forerun.config.settings import EngineSettings
from forerun.models.shipped_heads import FOLDER, TARGET_FILE, HeadTarget, ShippedHead, find_shipped_head
from forerun.ops.native.formats import WEIGHT_FORMATS
from tests.native import needs_kernels
from tests.stand_in import save_stand_in


def load(folder, **settings):
    return load_target(folder, EngineSettings(model=str(folder), device="cpu", **settings), torch.device("cpu"))


def keep(folder, made_for):
    """Keep a head's description as it is shipped."""
    (folder / "one").mkdir(parents=True)
    (folder / "one" / TARGET_FILE).write_text(json.dumps(made_for.to_json()))
    (folder / "one" / "config.json").write_text(json.dumps({"draft_vocab_size": 10, "hidden_size": 32}))
    (folder / "one" / "model.safetensors").write_bytes(bytes(960))


@needs_kernels
def test_a_target_is_known_again_in_fewer_bits(tmp_path):
    folder = save_stand_in(tmp_path / "model")
    keep(tmp_path / "heads", HeadTarget.of(load(folder), title="Small"))
    for quantization in (None, "int8"):
        found = find_shipped_head(load(folder, quantization=quantization), within=tmp_path / "heads")
        assert (found.title, found.num_weights, found.num_output_weights) == ("Small", 960, 320)


def test_the_output_of_a_head_in_4_bits_takes_8():
    head = ShippedHead(folder=FOLDER, num_weights=9600, num_output_weights=3200, title="Small")
    assert head.num_bytes(WEIGHT_FORMATS["int8"]) == 9600
    assert head.num_bytes(WEIGHT_FORMATS["int4"]) == 6400 * 5 / 8 + 3200 * 8.5 / 8


def test_another_target_gets_none(tmp_path):
    target = load(save_stand_in(tmp_path / "model"), dtype="float32")
    made_for = HeadTarget.of(target, title="Small")
    keep(tmp_path / "heads", replace(made_for, rows=[[-value for value in row] for row in made_for.rows]))
    keep(tmp_path / "others", replace(made_for, num_layers=made_for.num_layers + 1))
    assert find_shipped_head(target, within=tmp_path / "heads") is None
    assert find_shipped_head(target, within=tmp_path / "others") is None
    assert find_shipped_head(target) is None


def test_what_is_shipped_is_small_and_says_where_it_comes_from():
    for folder in FOLDER.glob("*/"):
        if (folder / TARGET_FILE).exists():
            assert (folder / "model.safetensors").stat().st_size < 12_000_000
            assert "Apache-2.0" in (folder / "README.md").read_text()


def test_whatever_is_shipped_may_be_kept_in_4_bits():
    """They take 32 inputs together; `auto` falls back to them."""
    for folder in FOLDER.glob("*/"):
        if (folder / TARGET_FILE).exists():
            config = json.loads((folder / "config.json").read_text())
            heads = config["num_attention_heads"] * config["head_dim"]
            assert all(width % 32 == 0 for width in (config["hidden_size"], config["intermediate_size"], heads))
