"""A server's profile: what a client sees of steps and drafts, and servers that cannot be measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from forerun.bench.load.answer import Answer, Chunk, LoadRequest
from forerun.bench.profiling.grid import ProfileGrid
from forerun.bench.profiling.server_profiler import ServerTask, mean_step, profile_server
from forerun.errors import ConfigError
from forerun.plan.dynamo_files import DECODE_FILE, read_decode
from forerun.plan.profile import Profile
from tests.bench.load.fake_server import Script, serving

GRID = ProfileGrid(
    input_lengths=(4, 8, 16),
    num_sequences=(1, 2, 3),
    contexts=(8,),
    draft_lengths=(0,),
    rounds=2,
    num_texts=2,
    max_tokens=16,
)


def task(script: Script, **changes: object) -> ServerTask:
    given = ServerTask(
        url=script.url,
        model="fake",
        prompts={"a": ["hello", "there"]},
        grid=GRID,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_kv_tokens=4096,
    )
    return replace(given, **changes)  # type: ignore[arg-type]


def test_a_servers_profile_has_its_steps_and_the_fate_of_its_drafts(tmp_path: Path) -> None:
    # 6 chunks of two tokens: 11 tokens after the first, in 10 drafts by the counters, of which 20 tokens stood
    with serving(Script(chunks=[2] * 6, delay=0.004, usage="continuous")) as script:
        found = profile_server(task(script), tmp_path / "p")
    assert Profile.load(tmp_path / "p").acceptance == found.acceptance
    assert found.acceptance["server"].marginal == pytest.approx((1.0, 1.0, 0.0))
    assert found.acceptance["server/a"] == found.acceptance["server"]
    assert found.version == '{"version": "fake 1"}'
    assert found.step_times.measured is not None
    assert found.step_times.measured.sequences == 3
    assert len(read_decode(tmp_path / "p" / DECODE_FILE)) == 3


def test_an_interrupted_profile_asks_only_for_what_is_missing(tmp_path: Path) -> None:
    with serving(Script(chunks=[1] * 8, delay=0.001, usage="continuous")) as script:
        profile_server(task(script), tmp_path / "p")
        num_all = len(script.bodies)
        (tmp_path / "p" / "profile.json").unlink()
        (tmp_path / "p" / "stages" / "round-1.json").unlink()
        profile_server(task(script), tmp_path / "p")
        assert 0 < len(script.bodies) - num_all < num_all / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, "has no 'other'; it has fake"),
        ({"num_kv_tokens": None}, "does not say how many tokens"),
        ({"num_kv_tokens": 64}, "leave no more"),
    ],
)
def test_a_server_that_cannot_be_measured_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with serving(Script()) as script, pytest.raises(ConfigError, match=message):
        profile_server(task(script, **changes), tmp_path / "p")


def test_a_failing_request_keeps_what_was_measured(tmp_path: Path) -> None:
    with serving(Script(chunks=[1] * 8, delay=0.001, usage="continuous")) as script:
        script.on_request = lambda: setattr(
            script, "fail_with", (500, "out of luck") if len(script.bodies) > 12 else None
        )
        with pytest.raises(ConfigError, match=r"out of luck.*what was measured is kept"):
            profile_server(task(script), tmp_path / "p")
    assert (tmp_path / "p" / "stages" / "round-0.json").is_file()


def test_no_server_and_no_url_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a URL"):
        task(Script(url="localhost"))
    with pytest.raises(ConfigError, match="no server answers"):
        profile_server(task(Script(url="http://127.0.0.1:9")), tmp_path / "p")


def _answer(times: list[float], started: float = 0.0) -> Answer:
    answer = Answer(LoadRequest("x", 1), started=started)
    answer.chunks = [Chunk(at, True, number + 1) for number, at in enumerate(times)]
    return answer


def test_a_step_is_the_mean_gap_while_all_streams_write() -> None:
    slow_start = _answer([1.0 + 0.1 * number for number in range(20)])
    early = _answer([0.5 * number for number in range(3)] + [1.0 + 0.1 * number for number in range(1, 30)])
    assert mean_step([slow_start, early]) == pytest.approx(0.1)
    assert mean_step([slow_start, _answer([0.1, 0.2, 0.3])]) is None
    assert mean_step([_answer([])]) is None


def test_chunks_that_are_read_together_do_not_shorten_the_step() -> None:
    times = [0.2 * (number // 2) for number in range(41)]
    assert mean_step([_answer(times)]) == pytest.approx(0.1)
