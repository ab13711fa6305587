"""What a server writes to stderr of its engine."""

from __future__ import annotations

import logging

import pytest

from forerun import LLM
from forerun.server.serve import LOGGED, log_stats
from tests.stand_in import save_stand_in


@pytest.fixture
def logged(capsys):
    """What is logged while a server's log is on."""
    loggers = [logging.getLogger(name) for name in LOGGED]
    before = [(logger.level, logger.handlers[:], logger.propagate) for logger in loggers]
    log_stats()
    yield lambda: capsys.readouterr().err
    for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:], logger.propagate = handlers, propagate


def test_the_log_says_why_nothing_is_drafted_and_how_to_turn_it_on(logged, tmp_path):
    LLM(save_stand_in(tmp_path), dtype="float16", device="cpu", max_model_len=64)
    assert "nothing is drafted: on this device drafts might change texts" in logged()
