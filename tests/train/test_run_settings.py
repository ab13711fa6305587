"""A run goes on with the settings that it was begun with, and with the same chat template."""

from __future__ import annotations

import json
import shutil

import pytest

from forerun.errors import ConfigError
from forerun.train.run import TrainingRun
from forerun.train.run_settings import RunSettings
from tests.train.target_folder import chat_model_folder


def begin(tmp_path, model):
    asked = RunSettings(model=str(model), output=tmp_path / "head", magpie=1000, epochs=8.0, draft_vocab_size=240)
    return TrainingRun(asked, lambda found: None)


def test_a_run_does_not_go_on_under_another_chat_template(tmp_path):
    begin(tmp_path, chat_model_folder())
    same, other = tmp_path / "same", tmp_path / "other"
    for copy in (same, other):
        shutil.copytree(chat_model_folder(), copy)
    begin(tmp_path, same)
    (other / "chat_template.jinja").write_text(
        "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    with pytest.raises(ConfigError, match=r"is of a run with chat_template '\w+' instead of '\w+'"):
        begin(tmp_path, other)


def test_a_run_of_before_which_did_not_note_its_chat_template_goes_on(tmp_path):
    begin(tmp_path, chat_model_folder())
    file = tmp_path / "head" / "training" / "settings.json"
    noted = json.loads(file.read_text())
    del noted["chat_template"]
    file.write_text(json.dumps(noted))
    begin(tmp_path, chat_model_folder())
