"""`make head` goes through all of its rounds and ships the last one's head, here with a tiny model and few texts."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from forerun.build import load_target
from forerun.config.settings import EngineSettings
from forerun.models.shipped_heads import find_shipped_head
from tests.native import needs_kernels
from tests.stand_in import NAME, make_stand_in_cache

pytestmark = [pytest.mark.slow, needs_kernels]

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_head.py"
ROUNDS = ["round-0", "round-1", "again", "last-0", "last-1", "large-0", "large-1"]
FEW = {
    "CONVERSATIONS": 400,
    "LAST_CONVERSATIONS": 400,
    "ONCE": ("--epochs", "3.5", "--keep-features"),
    "LARGE_SETS": (
        ("--magpie", "400", "--epochs", "3.5", "--batch-tokens", "2048"),
        ("--magpie", "400", "--epochs", "3.5", "--batch-tokens", "2048", "--learning-rate", "0.0035"),
    ),
}


@pytest.fixture
def script(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("make_head", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in FEW.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    make_stand_in_cache(tmp_path / "cache")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return module


@pytest.mark.timeout(900)
def test_the_recipe_ends_in_a_head_that_ships(script, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["make_head", "--folder", str(tmp_path / "head"), "--rounds", "2"])
    script.main()
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == sorted(ROUNDS)
    cards = {name: (tmp_path / "head" / name / "README.md").read_text() for name in ROUNDS}
    assert "begun with" not in cards["round-0"]
    assert all("begun with" in cards[name] for name in ROUNDS[1:])
    shipped = tmp_path / "shipped" / NAME
    config = json.loads((shipped / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "Apache-2.0" in (shipped / "README.md").read_text()
    model = script.resolve_model(NAME)
    settings = EngineSettings(model=NAME, device="cpu")
    target = load_target(model, settings, settings.torch_device)
    found = find_shipped_head(target, within=tmp_path / "shipped")
    assert found is not None
    assert found.folder == shipped
