"""Every method in the registry keeps the drafters' contract, and is found by its names."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.draft import NO_DRAFT
from forerun.drafters.base import DraftContext, DraftRequest
from forerun.drafters.registry import DRAFTERS, method_of_checkpoint, renamed_method
from tests.drafters.texts import TARGET, assert_valid, propose, sequence

FREE = ("ngram", "suffix")  # those with models are tried out on engines: tests/contract, test_draft_model.py

lives = st.lists(
    st.tuples(
        st.lists(st.integers(0, 4), max_size=20),
        st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), max_size=8),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("method", FREE)
@settings(deadline=None, max_examples=50)
@given(lives=lives, max_tokens=st.integers(0, 9), max_depth=st.integers(0, 9))
def test_drafts_are_valid_all_through_a_sequence(method, lives, max_tokens, max_depth):
    drafter = DRAFTERS[method].config_class().build(TARGET)
    for seq_id, (prompt, steps) in enumerate(lives):
        growing = sequence(prompt, seq_id=seq_id)
        drafter.start(growing)
        for tokens in steps:
            growing.output_ids.extend(tokens)
            assert_valid(
                propose(drafter, growing, max_tokens=max_tokens, max_depth=max_depth),
                max_tokens=max_tokens,
                max_depth=max_depth,
            )
        drafter.stop(growing)


@pytest.mark.parametrize("method", FREE)
def test_skipped_sequence_is_drafted_as_if_it_had_never_been_skipped(method):
    drafter = DRAFTERS[method].config_class().build(TARGET)
    attended, skipped = sequence([1, 2, 3], seq_id=1), sequence([1, 2, 3], seq_id=2)
    drafter.start(attended)
    drafter.start(skipped)
    for token_id in [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5]:
        attended.output_ids.append(token_id)
        skipped.output_ids.append(token_id)
        propose(drafter, attended)
    expected = propose(drafter, attended, max_tokens=4)
    assert len(expected) > 0
    assert propose(drafter, skipped, max_tokens=4) == expected


@pytest.mark.parametrize("method", FREE)
def test_drafts_come_in_the_order_of_the_requests(method):
    drafter = DRAFTERS[method].config_class().build(TARGET)
    repeating, fresh = sequence([1, 2, 3, 4, 5, 6] * 3, seq_id=1), sequence([1, 2, 3], seq_id=2)
    for one in (repeating, fresh):
        drafter.start(one)
    requests = [DraftRequest(one, 3, 3) for one in (fresh, repeating)]
    first, second = drafter.propose(DraftContext(requests=requests))
    assert first == NO_DRAFT
    assert second.token_ids == (1, 2, 3)


@pytest.mark.parametrize("method", DRAFTERS)
def test_every_row_names_settings_that_can_build_a_drafter(method):
    assert callable(DRAFTERS[method].config_class.build)


def test_the_table_and_the_interfaces_are_read_without_torch():
    modules = ", ".join(f"forerun.drafters.{name}" for name in ("registry", "base", "guard"))
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("EAGLE-Llama-3-8B", "eagle"),
        ("EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("gpt-oss-20b-p-eagle", "peagle"),
        ("p-eagle3-head", "peagle"),
        ("medusa-vicuna-7b", "medusa"),
        ("Qwen3-8B-DFlash-b16", "dflash"),
        ("PARD-Llama-3.2-1B", "pard"),
        ("llama3-8b-mlp-speculator", "mlp_speculator"),
        ("SmolLM2-135M", "draft_model"),
    ],
)
def test_a_checkpoints_name_tells_its_method(name, method):
    assert method_of_checkpoint(name) == method


def test_names_that_vllm_once_had_lead_to_todays():
    assert renamed_method("deepseek_mtp") == "mtp"
    assert [renamed_method(name) for name in ("mtp", "_mtp", "eagle")] == [None, None, None]
