"""A head is trained further if it was made for this target and by this trainer; any other is refused before there is a folder."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from forerun.errors import ConfigError, ModelError
from forerun.models.heads.eagle3 import DRAFTS_BOTH
from forerun.train.run import TrainingRun
from forerun.train.run_settings import RunSettings
from forerun.train.trained_head import begin_from_head
from tests.heads_eagle import eagle3, peagle, save_damaged
from tests.train.target_folder import chat_model, chat_model_folder

LAYERS = "eagle_aux_hidden_state_layer_ids"


def target_of(**sizes):
    """Stands for another target, by its sizes."""
    model = chat_model().model
    own = {name: getattr(model, name) for name in ("hidden_size", "vocab_size", "num_layers")}
    return SimpleNamespace(model=SimpleNamespace(**(own | sizes)))


@pytest.mark.parametrize(
    ("head", "options", "error", "message"),
    [
        (eagle3, {"width": 64}, ModelError, "of width 48, does not fit a head of hidden_size 64"),
        (
            eagle3,
            {"target": target_of(hidden_size=64)},
            ModelError,
            r"'fc.weight' has shape \[64, 192\], expected \[64, 144\]",
        ),
        (
            eagle3,
            {"target": target_of(vocab_size=300)},
            ModelError,
            "must be from 0 to 263; use a head that was trained",
        ),
        (
            eagle3,
            {"config": {"target_hidden_size": 64}},
            ModelError,
            "is for a target of hidden_size 64, this one has 48",
        ),
        (eagle3, {"config": {LAYERS: [0, 1, 9]}}, ModelError, "got 9; must be from 0 to 3 for this target"),
        (eagle3, {"num_layers": 2}, ConfigError, "has 2 layers .*; must be one of forerun train"),
        (
            eagle3,
            {"num_draft": 264},
            ConfigError,
            "must be one of forerun train: of one layer, with fc, lm_head and d2t",
        ),
        (peagle, {}, ModelError, "set method='peagle'"),
        (
            peagle,
            {"add": {"mask_hidden": torch.ones(1, 96)}, "config": {DRAFTS_BOTH: True}},
            ModelError,
            r"mask_hidden has shape \[1, 96\], the 3 features of the target are 144 wide",
        ),
    ],
)
def test_a_head_that_is_not_this_targets_or_not_this_trainers_is_refused(tmp_path, head, options, error, message):
    options = {"target": chat_model(), **options}
    folder = save_damaged(tmp_path / "other", head, options.pop("target"), **options)
    with pytest.raises(error, match=message):
        begin_from_head(folder, chat_model())
    asked = RunSettings(
        model=str(chat_model_folder()), output=tmp_path / "head", magpie=2000, epochs=1.0, begin_with=folder
    )
    with pytest.raises(error, match=message):
        TrainingRun(asked, lambda found: None)
    assert not asked.output.exists()
