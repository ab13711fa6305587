"""The second worker of a request learns from the first where its prompt ends."""

from __future__ import annotations

import os
import time

import pytest

from forerun.deploy.dynamo import prompt_lengths
from forerun.deploy.dynamo.prompt_lengths import PromptLengths
from forerun.errors import ConfigError

PROMPT, LONGER = range(8), range(31)


def test_the_first_worker_notes_and_the_second_finds(tmp_path):
    first, second = PromptLengths(tmp_path / "notes"), PromptLengths(tmp_path / "notes")
    assert first.find_or_note("a", PROMPT) == 8
    assert second.find_or_note("a", LONGER) == 8
    assert second.find_or_note("b", LONGER) == 31


def test_another_prompt_under_the_same_id_is_another_request(tmp_path):
    lengths = PromptLengths(tmp_path)
    assert lengths.find_or_note("a", PROMPT) == 8
    assert lengths.find_or_note("a", range(100, 120)) == 20
    assert lengths.find_or_note("a", range(100, 105)) == 5
    assert lengths.find_or_note("a", range(100, 120)) == 5  # whose last fifteen another worker has written
    assert len(list(tmp_path.iterdir())) == 1


def test_the_note_of_a_request_that_comes_again_under_its_id_outlives_the_first(tmp_path, monkeypatch):
    lengths = PromptLengths(tmp_path)
    for _ in range(2):
        lengths.find_or_note("a", PROMPT)
        time.sleep(0.02)  # longer than the clock of files stands
        lengths.forget_soon("a")
    time.sleep(0.02)
    lengths.find_or_note("a", PROMPT)
    monkeypatch.setattr(prompt_lengths, "KEPT_AFTER_END_S", -1.0)
    lengths.find_or_note("b", PROMPT)
    assert lengths.find_or_note("a", LONGER) == 8


def test_a_note_that_nobody_needs_any_more_is_not_found_even_where_nothing_came_meanwhile(tmp_path, monkeypatch):
    lengths = PromptLengths(tmp_path)
    lengths.find_or_note("a", PROMPT)
    time.sleep(0.02)
    lengths.forget_soon("a")
    monkeypatch.setattr(prompt_lengths, "KEPT_AFTER_END_S", -1.0)
    assert lengths.find_or_note("a", LONGER) == 31


def test_an_id_is_no_path(tmp_path):
    lengths = PromptLengths(tmp_path / "notes")
    assert lengths.find_or_note("../../outside", PROMPT) == 8
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_an_ended_request_is_forgotten_when_its_last_tokens_must_have_arrived(tmp_path, monkeypatch):
    lengths = PromptLengths(tmp_path)
    lengths.find_or_note("a", PROMPT)
    lengths.forget_soon("a")
    assert lengths.find_or_note("a", LONGER) == 8  # a moment later it may still be asked for
    time.sleep(0.02)
    lengths.forget_soon("a")
    monkeypatch.setattr(prompt_lengths, "KEPT_AFTER_END_S", -1.0)
    lengths.find_or_note("b", [1])
    assert lengths.find_or_note("a", LONGER) == 31


def test_notes_of_workers_that_died_do_not_pile_up(tmp_path):
    PromptLengths(tmp_path).find_or_note("a", PROMPT)
    (note,) = tmp_path.iterdir()
    old = time.time() - 2 * prompt_lengths.KEPT_S
    os.utime(note, (old, old))
    PromptLengths(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_worker_that_runs_for_long_removes_old_notes_too(tmp_path, monkeypatch):
    lengths = PromptLengths(tmp_path)
    lengths.find_or_note("a", PROMPT)
    (note,) = tmp_path.iterdir()
    old = time.time() - 2 * prompt_lengths.KEPT_S
    os.utime(note, (old, old))
    lengths.find_or_note("b", [1])
    assert note.exists(), "they are sought now and then, not for each request"
    monkeypatch.setattr(prompt_lengths, "OLD_SOUGHT_EVERY_S", -1.0)
    lengths.find_or_note("c", [1])
    assert not note.exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--workers-folder: cannot make"):
        PromptLengths(tmp_path / "file" / "notes")
