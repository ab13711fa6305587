"""The bar while weights are loaded: what it shows, when, and that it changes no weight."""

import time

import torch

from forerun.models import loading_progress
from forerun.models.checkpoint import StateDict
from forerun.models.loader import load_model
from tests.models.test_loader import CPU, LLAMA, save

WEIGHTS = StateDict({"a": torch.ones(3, 5), "b": torch.ones(7)})


def test_a_slow_load_shows_how_many_weights_are_read(monkeypatch, capsys):
    monkeypatch.setattr(loading_progress, "SHOWN_AFTER_S", 0.0)
    with loading_progress.shown_loading(WEIGHTS) as checkpoint:
        assert checkpoint.names() == WEIGHTS.names()
        for name in sorted(checkpoint.names()):
            time.sleep(0.15)  # a bar is drawn anew ten times a second
            assert checkpoint.load(name) is WEIGHTS.load(name)
    shown = capsys.readouterr().err
    assert "Loading weights" in shown
    assert "15.0/22.0" in shown


def test_a_fast_load_shows_nothing(capsys):
    with loading_progress.shown_loading(WEIGHTS) as checkpoint:
        for name in checkpoint.names():
            checkpoint.load(name)
    assert capsys.readouterr().err == ""


def test_a_model_loaded_with_a_bar_is_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loading_progress, "SHOWN_AFTER_S", 0.0)
    folder = save(LLAMA, tmp_path)
    capsys.readouterr()
    plain = load_model(folder, dtype=None, device=CPU)
    assert capsys.readouterr().err == ""
    shown = load_model(folder, dtype=None, device=CPU, shows_progress=True)
    assert "Loading weights" in capsys.readouterr().err
    token_ids = torch.arange(LLAMA.vocab_size)
    assert torch.equal(plain.embed(token_ids), shown.embed(token_ids))
    assert torch.equal(plain.head_rows(token_ids), shown.head_rows(token_ids))
