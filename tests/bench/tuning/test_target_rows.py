"""What the target said after drafted tokens: noted, kept in a file, found again; and what it is good for."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.bench.energy import EnergyMeter
from forerun.bench.recording import record
from forerun.bench.tuning.real_runs import RealRuns
from forerun.bench.tuning.requests import KIND
from forerun.bench.tuning.simulated_runs import SimulatedRuns
from forerun.bench.tuning.target_rows import NUM_DRAFTED, TargetRows, noting_drafter
from forerun.config.speculative_config import resolve_speculative
from forerun.drafters.base import VerifiedRows
from forerun.errors import ConfigError
from forerun.llm import LLM
from tests.bench.tuning.workloads import SETTINGS, candidate, recorded, workload
from tests.engines import tiny_target

RECYCLE = {"method": "recycle", "num_speculative_tokens": 7}


def rows(*pairs):
    """Rows of (token before, token), whose first candidate is their number."""
    return VerifiedRows(
        previous_ids=np.array([pair[0] for pair in pairs]),
        token_ids=np.array([pair[1] for pair in pairs]),
        candidate_ids=np.array([[number, 50] for number in range(len(pairs))], dtype=np.int32),
        candidate_logits=np.zeros((len(pairs), 2), dtype=np.float32),
        salts=[(0, len(pairs), None)],
    )


def noted(*pairs):
    found = TargetRows()
    found.note(rows(*pairs))
    return found


def first_after(found, *pair):
    one = found.after(*pair)
    return None if one is None else int(one.ids[0])


def test_a_row_is_found_by_both_tokens_else_by_its_own():
    found = noted((1, 2), (3, 2), (1, 4))
    assert [first_after(found, *pair) for pair in ((1, 2), (3, 2), (9, 2), (9, 4), (1, 9))] == [0, 1, 1, 2, None]


def test_of_the_same_tokens_the_last_row_is_kept():
    assert first_after(noted((1, 2), (1, 2)), 1, 2) == 1


def test_a_file_brings_all_rows_back(tmp_path):
    noted((1, 2), (3, 2)).save(tmp_path / "rows.npz")
    found = TargetRows.load(tmp_path / "rows.npz")
    assert [first_after(found, *pair) for pair in ((1, 2), (3, 2), (9, 2))] == [0, 1, 1]


def test_no_rows_are_a_file_too(tmp_path):
    TargetRows().save(tmp_path / "rows.npz")
    assert not TargetRows.load(tmp_path / "rows.npz").found


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def full(path, **arrays):
        path.write_bytes(b"PK")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="No space left"):
        noted((1, 2)).save(tmp_path / "rows.npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "damage", [lambda _: b"no rows", lambda whole: whole[:-40], lambda whole: whole[:60] + bytes(9) + whole[69:]]
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    noted((1, 2), (3, 2)).save(tmp_path / "rows.npz")
    (tmp_path / "rows.npz").write_bytes(damage((tmp_path / "rows.npz").read_bytes()))
    with pytest.raises(ConfigError, match="cannot be read"):
        TargetRows.load(tmp_path / "rows.npz")


def test_noting_changes_no_text_and_what_was_noted_makes_simulated_learning_real():
    of, target, found = workload(max_tokens=64), tiny_target(), TargetRows()
    noting = {"method": noting_drafter(found), "num_speculative_tokens": NUM_DRAFTED}
    texts = record(
        LLM.from_target(target, SETTINGS, resolve_speculative(noting)), {KIND: of.prompts}, max_tokens=64
    ).texts
    assert [one.answer_ids for one in texts] == [one.answer_ids for one in recorded(target, of).texts]
    real = RealRuns(target=target, settings=SETTINGS, workload=of, texts=texts, meter=EnergyMeter([]))
    ran = real.run(candidate(RECYCLE), 0).acceptance_length
    assert ran is not None

    def off(known):
        simulated = SimulatedRuns(
            target=target,
            settings=SETTINGS,
            workload=of,
            texts=texts,
            rows=known,
            step_seconds=lambda _: 0.01,
            trace=None,
            probe=None,
        )
        return abs(simulated.simulate(candidate(RECYCLE)).acceptance_length / ran - 1.0)

    assert off(found) <= off(TargetRows())
    assert off(found) < 0.05
