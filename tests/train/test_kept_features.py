"""Hidden states on disk are those that would be computed, and whatever is wrong with a file, it is computed again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.train.conversations import GivenConversations
from forerun.train.kept_features import FeaturesInMemory, KeptFeatures
from forerun.train.observer import LAST, Observer
from forerun.train.selection import LearnedText
from forerun.train.texts import TextFile
from forerun.train.writing import WritingLimits, write_texts
from tests.native import needs_kernels
from tests.train.target_folder import chat_model

NAMES = ("hidden.1", LAST)
DRAFT_IDS = torch.arange(0, 264, 2)
LIMITS = WritingLimits(most_conversation=256, most_question=40, most_answer=12, num_at_once=3)
PROMPTS = [(None, ("Hello?",)), ("Be kind.", ("One?", "Two?", "Three?")), (None, ("Why?", "How?"))]


class NeverComputes(Observer):
    def _compute(self, ids):
        raise AssertionError("all was kept")


def written(folder):
    """Texts that an engine wrote, as they are learnt, and what it kept of them."""
    kept = KeptFeatures(folder / "features", NAMES)
    settings = EngineSettings(model="tiny", max_model_len=256, num_gpu_blocks_override=64)
    llm = LLM.from_target(chat_model(), settings, kept.written_by_engine())
    with TextFile(folder / "texts.bin") as file:
        write_texts(
            llm.engine,
            chat_model().tokenizer,
            GivenConversations(prompts=PROMPTS),
            file,
            seed=1,
            limits=LIMITS,
            goes_on=lambda running: True,
            kept=kept,
        )
        texts = [text for text in file.texts if text.spans]
    for text in texts:
        assert llm.executor.exporter.finish(str(kept.path(text.number))) is None
    learned = []
    for text in texts:
        places = torch.cat([torch.arange(first, end - 1) for first, end in text.spans])
        if len(places):
            learned.append(
                LearnedText(number=text.number, token_ids=text.token_ids.astype("int64"), places=places.numpy())
            )
    assert learned
    return learned, kept


@needs_kernels
def test_what_the_engine_kept_while_it_wrote_is_what_would_be_computed_to_the_bit(tmp_path):
    learned, kept = written(tmp_path)
    read = NeverComputes(chat_model(), NAMES[:1], DRAFT_IDS, kept).observe(learned)
    computed = Observer(chat_model(), NAMES[:1], DRAFT_IDS).observe(learned)
    assert torch.equal(read.features["hidden.1"], computed.features["hidden.1"])
    assert torch.equal(read.wanted, computed.wanted)
    assert computed.features["hidden.1"].abs().sum() > 0


@needs_kernels
@pytest.mark.parametrize("fault", ["cut off", "of another text", "missing"])
def test_a_file_with_a_fault_is_computed_and_kept_again(tmp_path, fault):
    learned, kept = written(tmp_path)
    expected = Observer(chat_model(), NAMES[:1], DRAFT_IDS).observe(learned)
    path = kept.path(learned[0].number)
    if fault == "cut off":
        path.write_bytes(path.read_bytes()[:-1])
    elif fault == "missing":
        path.unlink()
    else:
        os.replace(kept.path(learned[1].number), path)
    observed = Observer(chat_model(), NAMES[:1], DRAFT_IDS, kept).observe(learned)
    assert torch.equal(observed.features["hidden.1"], expected.features["hidden.1"])
    again = NeverComputes(chat_model(), NAMES[:1], DRAFT_IDS, kept).observe(learned)
    assert torch.equal(again.wanted, expected.wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_was_kept_on_another_device_is_taken_in_this_ones_dtype(tmp_path, dtype):
    text = LearnedText(number=1, token_ids=torch.arange(8).numpy(), places=torch.arange(3, 6).numpy())
    plain = Observer(chat_model(), NAMES[:1], DRAFT_IDS)
    kept = KeptFeatures(tmp_path, NAMES)
    kept.write(1, torch.arange(7), plain._states([text])[0].to(dtype))
    found, expected = NeverComputes(chat_model(), NAMES[:1], DRAFT_IDS, kept).observe([text]), plain.observe([text])
    assert found.wanted.dtype == expected.wanted.dtype
    torch.testing.assert_close(found.features["hidden.1"], expected.features["hidden.1"], rtol=1e-2, atol=1e-2)


def test_what_was_kept_of_other_hidden_states_is_thrown_away(tmp_path):
    ids, states = torch.arange(3), torch.ones(3, 2, 4)
    KeptFeatures(tmp_path, NAMES).write(7, ids, states)
    assert KeptFeatures(tmp_path, NAMES).read(7, ids).equal(states)
    assert KeptFeatures(tmp_path, ["hidden.0", LAST]).read(7, ids) is None


def test_a_full_disk_is_said_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(tensors, path):
        raise OSError(28, "No space left on device")

    kept = KeptFeatures(tmp_path, NAMES)
    monkeypatch.setattr("forerun.train.kept_features.save_tensors", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*; make room"):
        kept.write(1, torch.arange(3), torch.ones(3, 2, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["names.json"]


def test_a_disk_that_was_full_at_the_beginning_is_begun_again(tmp_path, monkeypatch):
    write_text = Path.write_text

    def full(path, text, **options):
        write_text(path, "", **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        KeptFeatures(tmp_path, NAMES)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    KeptFeatures(tmp_path, NAMES)


@pytest.mark.parametrize("content", [b"", b'["hidd', b"\xff"])
def test_names_that_cannot_be_read_are_as_good_as_none(tmp_path, content):
    ids = torch.arange(3)
    KeptFeatures(tmp_path, NAMES).write(7, ids, torch.ones(3, 2, 4))
    (tmp_path / "names.json").write_bytes(content)
    assert KeptFeatures(tmp_path, NAMES).read(7, ids) is None
    KeptFeatures(tmp_path, NAMES).write(7, ids, torch.ones(3, 2, 4))
    assert KeptFeatures(tmp_path, NAMES).read(7, ids) is not None


def test_in_memory_is_kept_what_there_is_room_for():
    texts = [
        LearnedText(number=number, token_ids=torch.arange(8).numpy() + number, places=torch.arange(3, 6).numpy())
        for number in (4, 7)
    ]
    plain = Observer(chat_model(), NAMES[:1], DRAFT_IDS)
    states = plain._states(texts)
    kept = FeaturesInMemory(NAMES, room=states[0].nbytes + 5)
    for text, own in zip(texts, states, strict=True):
        kept.write(text.number, torch.from_numpy(text.token_ids), own)
    assert kept.room == 5
    assert torch.equal(kept.read(4, torch.arange(7)), states[0])
    assert kept.read(4, torch.arange(9)) is None, "it is longer than what was kept"
    assert kept.read(7, torch.arange(7)) is None
    found = NeverComputes(chat_model(), NAMES[:1], DRAFT_IDS, kept).observe(texts[:1])
    assert torch.equal(found.wanted, plain.observe(texts[:1]).wanted)
