"""The pictures of a comparison and of a load test."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("matplotlib")

from forerun.bench.outcomes import Comparison, Outcome
from forerun.bench.picture import PHASE_COLOURS, draw_comparison
from forerun.core.stats import PHASES, SpeculationStats


def outcome(kind, name):
    return Outcome(
        kind=kind,
        name=name,
        speculative=name,
        num_prompts=1,
        tokens_per_second=10.0,
        speed_up=1.5,
        decode_tokens_per_second=None,
        decode_speed_up=None,
        all_tokens_per_second=[10.0],
        all_speed_ups=[1.5],
        milliseconds_per_step=dict.fromkeys(PHASES, 1.0) if name == "ngram" else {},
        speculation=SpeculationStats(),
        num_failed_drafts=0,
        num_differing=0,
        num_near_ties=0,
        is_lossless=True,
        must_be_identical=True,
    )


def comparison():
    return Comparison(
        model="m",
        dtype="bfloat16",
        device="cpu",
        kernels="torch",
        machine="a machine",
        repeats=1,
        max_tokens=1,
        batch_size=1,
        temperature=0.0,
        gigabytes_per_second=1.0,
        all_gigabytes_per_second=[1.0],
        configs={"ngram": {}},
        outcomes=[outcome(kind, name) for kind in ("code", "chat") for name in ("plain", "ngram")],
        reports={},
    )


def test_every_kind_and_configuration_is_drawn(tmp_path):
    draw_comparison(comparison(), tmp_path / "picture.svg")
    drawn = (tmp_path / "picture.svg").read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("code: tokens/s", "chat: tokens/s", "plain", "ngram", *PHASES))


def test_every_phase_has_a_colour():
    assert tuple(PHASE_COLOURS) == PHASES


def test_a_load_test_is_drawn_without_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from forerun.bench.picture import draw_load; "
        f"draw_load([], 'nothing was answered', Path({str(tmp_path / 'load.svg')!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert "nothing was answered" in (tmp_path / "load.svg").read_text()
