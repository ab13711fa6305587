"""A server's profile: what a client sees of steps and drafts, and servers that cannot be measured."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

pytest.importorskip("aiohttp")

import aiohttp

from forerun.bench.load import client
from forerun.bench.load.answer import Answer, Chunk, LoadRequest
from forerun.bench.profiling import server_profiler
from forerun.bench.profiling.grid import ProfileGrid
from forerun.bench.profiling.server_profiler import ServerTask, mean_step, profile_server
from forerun.core.held_folder import held_folder
from forerun.errors import ConfigError
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.deployment_plan import DeploymentPlan
from forerun.plan.deployment_planner import PlanningOptions, plan_deployment
from forerun.plan.dynamo_files import DECODE_FILE, DECODE_KEYS, read_arrays
from forerun.plan.emit.emission import EmitRequest
from forerun.plan.emit.systems import emit
from forerun.plan.load import Load
from forerun.plan.merged_profile import merged_profile
from forerun.plan.profile import Profile
from forerun.plan.simulation.profiled import profiled_engine
from forerun.plan.sla import Sla
from forerun.plan.step_times import DraftingCost
from tests.bench.load import fake_server
from tests.bench.load.fake_server import Script
from tests.contract.drafters import NGRAM
from tests.plan.profiles import fake_profile
from tests.server.served import chat_llm, served

GRID = ProfileGrid(
    input_lengths=(4, 8, 16),
    num_sequences=(1, 2, 3),
    contexts=(8,),
    draft_lengths=(0,),
    rounds=2,
    num_texts=2,
    max_tokens=16,
)

SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}


@contextmanager
def serving(script: Script) -> Iterator[Script]:
    """The fake server, whose chunks the client sees at the script's own times, however busy the cores are."""

    async def ask_steadily(
        session: aiohttp.ClientSession, endpoint: client.Endpoint, request: LoadRequest, request_id: str
    ) -> Answer:
        answer = await client.ask(session, endpoint, request, request_id)
        answer.started, reading = 0.0, 1e-4 * len(request.prompt)
        answer.chunks = [
            chunk._replace(seconds=reading + script.delay * number) for number, chunk in enumerate(answer.chunks, 1)
        ]
        return answer

    with fake_server.serving(script), pytest.MonkeyPatch.context() as patched:
        patched.setattr(server_profiler, "ask", ask_steadily)
        yield script


def task(script: Script, **changes: object) -> ServerTask:
    given = ServerTask(
        url=script.url,
        model="fake",
        prompts={"a": ["hello", "there"]},
        grid=GRID,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        speculative_config=SUFFIX,
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
    assert len(read_arrays(tmp_path / "p" / DECODE_FILE, DECODE_KEYS)["z_itl"]) == 3
    steps = [*csv.DictReader((tmp_path / "p" / "sweep.csv").open())]
    seconds = [float(step["seconds"]) for step in steps if step["sweep"] == "decode"]
    assert seconds == pytest.approx([script.delay] * 6), "three batches in each of two rounds"


def test_a_class_that_the_server_drafts_nothing_for_counts_as_one_where_nothing_stands(tmp_path: Path) -> None:
    with serving(Script(chunks=[2] * 6, delay=0.002, usage="continuous")) as script:
        script.on_request = lambda: setattr(script, "drafts", "quiet" not in str(script.bodies[-1]))
        given = task(script, prompts={"a": ["hello", "there"], "b": ["quiet"]}, grid=replace(GRID, rounds=1))
        found = profile_server(given, tmp_path / "p")
    assert found.acceptance["server/a"].marginal == pytest.approx((1.0, 1.0, 0.0))
    assert found.acceptance["server/b"].marginal == (0.0, 0.0, 0.0)
    # 20 drafts for the two prompts of one class, and 11 tokens without any of the other
    assert found.acceptance["server"].marginal == pytest.approx((20 / 31, 20 / 31, 0.0))


def planned(profile: Profile, **options: object) -> DeploymentPlan:
    load, sla = Load(rate=20, isl=12, osl=12), Sla(ttft=1.0, tpot=0.1)
    return plan_deployment(profile, load, sla, PlanningOptions(**options))[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("drafts", [True, False])
def test_the_plan_of_a_servers_profile_starts_the_server_as_it_was(tmp_path: Path, *, drafts: bool) -> None:
    """No other draft length, schedule or plain decoding is made of steps in which the server drafted as it does."""
    config = SUFFIX if drafts else None
    with serving(Script(chunks=[2] * 6, delay=0.004, usage="continuous", drafts=drafts)) as script:
        started = task(script, speculative_config=config, dtype="bfloat16", tensor_parallel_size=2)
        plan = planned(profile_server(started, tmp_path / "p"))
    assert (plan.speculative_config, plan.engine.dtype) == (config, "bfloat16")
    words = emit("vllm", EmitRequest(plan=plan, model="org/fake")).files["serve.sh"]
    assert "--dtype bfloat16" in words
    assert "--tensor-parallel-size 2" in words
    settings = yaml.safe_load(emit("forerun", EmitRequest(plan=plan, model="fake")).files["serve.yaml"])
    assert settings.get("speculative-config") == config
    assert settings.get("no-speculation", False) is not drafts


def test_steps_of_a_drafting_server_are_no_plain_ones(tmp_path: Path) -> None:
    with serving(Script(chunks=[2] * 6, delay=0.004, usage="continuous")) as script:
        found = profile_server(task(script), tmp_path / "p")
    assert not Profile.load(tmp_path / "p").has_plain_steps
    with pytest.raises(ConfigError, match="nothing is known of steps without drafts"):
        profiled_engine(found)
    engine = profiled_engine(found, "server")
    assert engine.make_control().draft_limit(64) == 3  # at any batch size


def test_profiles_of_one_server_are_put_together(tmp_path: Path) -> None:
    """Each configuration keeps its own step times, and a plan chooses between what was measured."""
    with serving(Script(usage="continuous")) as script:
        for name, config, chunks in (("plain", None, [1] * 8), ("slow", SUFFIX, [2] * 6), ("quick", SUFFIX, [2] * 6)):
            script.chunks, script.drafts = chunks, config is not None
            script.delay = {"plain": 0.01, "slow": 0.02, "quick": 0.002}[name]
            profile_server(task(script, speculative_config=config), tmp_path / name)
    parts = {name: Profile.load(tmp_path / name) for name in ("plain", "slow", "quick")}
    both = merged_profile(parts)
    both.save(tmp_path / "both")
    found = Profile.load(tmp_path / "both")
    assert found == both
    assert list(found.configs) == ["slow", "quick"]
    assert found.acceptance["slow/a"] == parts["slow"].acceptance["server/a"]
    assert found.step_times == parts["plain"].step_times
    assert {name: found.steps_of(name) for name in found.configs} == {
        name: parts[name].step_times for name in found.configs
    }
    plan, _ = plan_deployment(found, Load(rate=20, isl=12, osl=12), Sla(ttft=1.0, tpot=0.1))
    assert plan.speculative_config == SUFFIX
    assert any("quick is planned as the server ran it" in line for line in plan.warnings)


def _put_together(plain: Profile) -> Profile:
    """A profile of a server that was started without drafts and then with some, each of whose step times are its own."""
    drafting = replace(
        plain,
        has_plain_steps=False,
        configs={"server": SUFFIX},
        served_steps={"server": plain.step_times.scaled(memory=2.0)},
        drafting={"server": DraftingCost()},
        acceptance={"server": AcceptanceProfile(method="suffix", conditional=(0.5,))},
    )
    return merged_profile({"plain": plain, "suffix": drafting})


def test_profiles_that_are_not_of_one_server_are_not_put_together(tmp_path: Path) -> None:
    with serving(Script(chunks=[1] * 8, delay=0.001, usage="continuous", drafts=False)) as script:
        plain = profile_server(task(script, speculative_config=None), tmp_path / "p")
    for parts, said in (
        ({"a": plain}, "got 1 profile"),
        ({"a": plain, "b": plain}, "both have no speculation"),
        ({"a": plain, "b": replace(plain, max_num_seqs=9)}, "another max_num_seqs"),
        ({"a": plain, "b": fake_profile()}, "b is no profile of a server"),
        ({"a": plain, "b": _put_together(plain)}, "b is no profile of a server that was started once.*give the parts"),
    ):
        with pytest.raises(ConfigError, match=said):
            merged_profile(parts)


def test_a_server_that_does_not_count_its_drafts_cannot_say_how_they_fare(tmp_path: Path) -> None:
    with (
        serving(Script(counts_drafts=False)) as script,
        pytest.raises(ConfigError, match="by which acceptance is measured"),
    ):
        profile_server(task(script), tmp_path / "p")
    with serving(Script(drafts=False)) as script, pytest.raises(ConfigError, match="drafted nothing for these prompts"):
        profile_server(task(script), tmp_path / "p")


def test_the_estimate_comes_first_and_the_share_that_is_done_rises_to_all(tmp_path: Path) -> None:
    said: list[str] = []
    shares: list[float] = []
    with serving(Script(chunks=[2] * 6, delay=0.002, usage="continuous")) as script:
        profile_server(task(script), tmp_path / "p", announce=said.append, advance=shares.append)
    assert re.fullmatch(r"about \d+ s", said[0])
    assert shares == sorted(shares)
    assert len(set(shares)) == 1 + GRID.rounds * len(GRID.jobs())
    assert shares[-1] == pytest.approx(1.0)


def test_no_batch_asks_for_more_tokens_than_fit_behind_its_context(tmp_path: Path) -> None:
    listed = [{"id": "fake", "max_model_len": 200}]
    with serving(Script(chunks=[1] * 8, delay=0.001, usage="continuous", listed=listed)) as script:
        grid = replace(GRID, rounds=1, contexts=(150,), input_lengths=(4, 8, 190))
        profile_server(task(script, grid=grid), tmp_path / "p")
    asked = [body for body in script.bodies if len(body.get("prompt", ())) == 150]
    assert len(asked) == sum(GRID.num_sequences)
    assert {body["max_tokens"] for body in asked} == {50}
    assert max(body["max_tokens"] for body in script.bodies if len(body.get("prompt", ())) == 190) == 10


def test_foreruns_own_server_is_profiled_planned_and_started_again(tmp_path: Path) -> None:
    llm = chat_llm(NGRAM, max_num_seqs=4)  # type: ignore[no-untyped-call]
    grid = replace(GRID, rounds=1, num_sequences=(1, 2), contexts=(8, 24))
    with served(llm) as server:  # type: ignore[no-untyped-call]
        own = {"url": server.url, "model": "tiny", "num_kv_tokens": None, "vocab_size": 200, "max_num_seqs": 4}
        given = task(Script(url=server.url), speculative_config=NGRAM, grid=grid, max_num_batched_tokens=2048, **own)
        found = profile_server(given, tmp_path / "p")
        with pytest.raises(ConfigError, match="drafts, by its own counters"):
            profile_server(replace(given, speculative_config=None), tmp_path / "other")
        with pytest.raises(ConfigError, match=r"--num-kv-tokens: got 64, and .*/metrics says \d+; leave it out"):
            profile_server(replace(given, num_kv_tokens=64), tmp_path / "other")
    parts = llm.engine.parts
    assert (found.num_blocks, found.block_size) == (parts.pool.num_blocks, parts.block_size)
    assert found.max_model_len == llm.max_model_len
    plan = planned(found)
    assert plan.speculative_config == NGRAM
    settings = yaml.safe_load(emit("forerun", EmitRequest(plan=plan, model="tiny")).files["serve.yaml"])
    assert settings["speculative-config"] == NGRAM
    steps = [*csv.DictReader((tmp_path / "p" / "sweep.csv").open())]
    drafted = [int(step["num_draft_tokens"]) for step in steps if step["sweep"] == "decode"]
    assert max(drafted) > 0, "prompts that repeat themselves let look-ups draft"


def test_an_interrupted_profile_asks_only_for_what_is_missing(tmp_path: Path) -> None:
    with serving(Script(chunks=[1] * 8, delay=0.001, usage="continuous")) as script:
        profile_server(task(script), tmp_path / "p")
        num_all = len(script.bodies)
        (tmp_path / "p" / "profile.json").unlink()
        (tmp_path / "p" / "stages" / "round-1.json").unlink()
        (tmp_path / "p" / "stages" / "seconds.json").write_text('{"seconds": 1e6}')
        assert profile_server(task(script), tmp_path / "p").conditions["seconds"] > 1e6, "both pieces count"
        assert 0 < len(script.bodies) - num_all < num_all / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, "has no 'other'; it has fake"),
        ({"num_kv_tokens": None}, "does not say how many tokens"),
        ({"num_kv_tokens": 64}, "leave no more"),
        ({"speculative_config": None}, r"drafts, by its own counters; say what it was started with"),
    ],
)
def test_a_server_that_cannot_be_measured_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with serving(Script()) as script, pytest.raises(ConfigError, match=message):
        profile_server(task(script, **changes), tmp_path / "p")


def test_a_server_that_hangs_up_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get = aiohttp.ClientSession.get

    def hung_up(session: aiohttp.ClientSession, url: str, **options: object) -> object:
        if url.endswith("/v1/models"):
            raise aiohttp.ServerDisconnectedError
        return get(session, url, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(aiohttp.ClientSession, "get", hung_up)
    with serving(Script()) as script, pytest.raises(ConfigError, match="names no model"):
        profile_server(task(script), tmp_path / "p")


def test_what_of_a_grid_the_server_has_no_room_for_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    with serving(Script(chunks=[2] * 24, delay=0.002, usage="continuous")) as script:
        wide = replace(GRID, rounds=1, num_sequences=(1, 2, 3, 4, 9))
        profile_server(task(script, grid=wide), tmp_path / "p", announce=said.append)
    assert any("no room for num_sequences 9" in line for line in said)


def test_a_server_is_measured_into_a_folder_by_one_process_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    with serving(Script(chunks=[2] * 6, delay=0.001, usage="continuous")) as script:
        with held_folder(tmp_path / "p", "--output-dir", "works"), pytest.raises(ConfigError, match="another process"):
            profile_server(task(script), tmp_path / "p")
        profile_server(task(script), tmp_path / "p")


def test_a_failing_request_keeps_what_was_measured(tmp_path: Path) -> None:
    with serving(Script(chunks=[1] * 8, delay=0.001, usage="continuous")) as script:
        script.on_request = lambda: setattr(
            script, "fail_with", (500, "out of luck") if len(script.bodies) > 12 else None
        )
        with pytest.raises(ConfigError, match=r"out of luck.*what was measured is kept"):
            profile_server(task(script), tmp_path / "p")
    assert (tmp_path / "p" / "stages" / "round-0.json").is_file()


def test_no_server_and_no_url_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got method None"):
        task(Script(url="http://127.0.0.1:9"), speculative_config={"num_speculative_tokens": 3})
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
