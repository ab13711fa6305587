"""Files of a run are whole or as they were before, and those of a head are for whoever may read what its folder's owner makes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from forerun.errors import ConfigError
from forerun.train.kept_files import unfinished, write_tensors, write_text


def test_what_a_killed_process_left_is_written_over(tmp_path):
    path = tmp_path / "model.safetensors"
    unfinished(path).write_bytes(b"a part")
    write_tensors(path, {"one": torch.ones(2, 3).T}, {"step": "1"})
    assert load_file(path)["one"].equal(torch.ones(3, 2))
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_may_be_read_by_whoever_may_read_a_text_beside_them(tmp_path):
    write_tensors(tmp_path / "model.safetensors", {"one": torch.ones(2)}, {})
    write_text(tmp_path / "config.json", "{}")
    tensors, text = ((tmp_path / name).stat().st_mode for name in ("model.safetensors", "config.json"))
    assert tensors == text


def test_a_text_that_does_not_fit_on_the_disk_leaves_the_one_before(tmp_path):
    path = tmp_path / "progress.json"
    write_text(path, "before")
    with pytest.raises(
        ConfigError, match=r"cannot write .*progress.json .*; make room and give the same command again"
    ):
        write_text(path, "half of a pair: \ud800")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
