"""The whole contract of the drafters over an executor that steps on the device, by formula: results are read a step late."""

from __future__ import annotations

from functools import partial

import pytest

from tests.contract import test_contract as contract
from tests.contract.test_contract import (
    plain_outputs,
    test_aborting_at_any_moment_frees_everything_and_disturbs_nobody,
    test_an_oracle_gains_what_it_drafts_right,
    test_drafts_stay_within_what_a_request_allows,
    test_greedy_and_seeded_text_is_that_of_plain_decoding_alone,
    test_results_applied_a_step_late_change_no_text,
    test_tokens_after_the_end_inside_an_accepted_run_are_cut,
)
from tests.engines import tiny_llm

__all__ = [
    "plain_outputs",
    "test_aborting_at_any_moment_frees_everything_and_disturbs_nobody",
    "test_an_oracle_gains_what_it_drafts_right",
    "test_drafts_stay_within_what_a_request_allows",
    "test_greedy_and_seeded_text_is_that_of_plain_decoding_alone",
    "test_results_applied_a_step_late_change_no_text",
    "test_tokens_after_the_end_inside_an_accepted_run_are_cut",
]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch, plain_outputs):
    monkeypatch.setattr(contract, "tiny_llm", partial(tiny_llm, device_step=True))
