"""Load tests of services that are known to be slower than profiled, or to accept less: the factors are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ConfigError
from forerun.plan.corrections import AppliedCorrections
from forerun.plan.deployment_planner import corrected
from forerun.plan.load import Load
from forerun.plan.observed_service import learn_corrections, read_load_test
from forerun.plan.profile import Profile
from forerun.plan.simulation.profiled import profiled_engine
from forerun.plan.simulation.requests import synthetic_requests
from tests.plan.profiles import fake_profile, tree_profile

LOAD = Load(rate=12, isl=100, osl=30, osl_cv=0.4)
NUM_REQUESTS = 80


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return fake_profile(tmp_path_factory.mktemp("profile"))


def load_test(
    folder: Path, profile: Profile, config: str, *, seed: int = 5, name: str = "test.json", **changes: Any
) -> Path:
    """What a load test of a service that is as a profile says would save."""
    requests = synthetic_requests(LOAD, NUM_REQUESTS, seed=seed)
    served = profiled_engine(profile, config).simulate(requests, seed=seed, keeps_chunks=True)
    records = served.to_json() | served.records_to_json() | {"start_times": [100.0 + one.arrival for one in requests]}
    if not records["spec_decode_num_drafts"]:
        records = {key: value for key, value in records.items() if not key.startswith("spec_decode_")}
    path = folder / name
    path.write_text(json.dumps(records | changes))
    return path


def learnt(profile: Profile, *paths: Path, **options: Any) -> AppliedCorrections:
    return learn_corrections(profile, [read_load_test(path) for path in paths], **options)


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.6])
def test_a_slower_machine_is_seen_in_time_alone(profile: Profile, tmp_path: Path, factor: float) -> None:
    path = load_test(tmp_path, corrected(profile, time_factor=factor, acceptance_factor=1.0), "plain")
    found = learnt(profile, path)
    assert found.time_factor == pytest.approx(factor, rel=0.01)
    assert found.acceptance_factor == 1.0
    assert found.learnt_from == ("test.json",)


@pytest.mark.parametrize(("config", "tolerance"), [("recycle", 0.05), ("auto", 0.4)])
def test_steps_with_trees_are_compared_with_steps_of_as_many_rows(
    config: str, tolerance: float, tmp_path: Path
) -> None:
    """By rates alone a simulated step would have a chain's rows, and the observed ones would seem slower than they are.

    A slower engine runs more sequences at once, where "auto" drafts less, so that its drafts add less to a step.
    """
    trees = tree_profile(tmp_path / "trees")
    path = load_test(tmp_path, corrected(trees, time_factor=1.3, acceptance_factor=1.0), config)
    found = learnt(trees, path, config=config)
    assert found.time_factor == pytest.approx(1.3, rel=0.03)
    assert found.acceptance_factor == pytest.approx(1.0, rel=tolerance)


def test_worse_drafts_are_seen_in_acceptance_alone(profile: Profile, tmp_path: Path) -> None:
    served = corrected(profile, time_factor=1.0, acceptance_factor=0.8, methods=("head",))
    found = learnt(profile, load_test(tmp_path, served, "head"), config="head")
    assert found.acceptance_factor == pytest.approx(0.8, rel=0.03)
    assert found.time_factor == pytest.approx(1.0, rel=0.03)


def test_drafts_of_which_none_stood_are_drafts(profile: Profile, tmp_path: Path) -> None:
    counts = {"spec_decode_num_drafts": 100, "spec_decode_draft_tokens": 300, "spec_decode_accepted_tokens": 0}
    path = load_test(tmp_path, profile, "plain", **counts)
    assert read_load_test(path).has_drafts
    assert learnt(profile, path, config="head").acceptance_factor < 0.5
    with pytest.raises(ConfigError, match=r"got 'plain', and test\.json counts drafts"):
        learnt(profile, path, config="plain")


def test_both_are_told_apart(profile: Profile, tmp_path: Path) -> None:
    served = corrected(profile, time_factor=1.4, acceptance_factor=0.75, methods=("head",))
    found = learnt(profile, load_test(tmp_path, served, "head"), config="head")
    assert found.acceptance_factor == pytest.approx(0.75, rel=0.03)
    assert found.time_factor == pytest.approx(1.4, rel=0.03)


def test_of_several_tests_a_running_mean_is_taken(profile: Profile, tmp_path: Path) -> None:
    paths = [
        load_test(
            tmp_path, corrected(profile, time_factor=factor, acceptance_factor=1.0), "plain", name=f"{factor}.json"
        )
        for factor in (1.2, 1.0)
    ]
    assert learnt(profile, *paths).time_factor == pytest.approx(1.2 - 0.3 * 0.2, rel=0.01)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_service_that_is_something_else_is_refused(profile: Profile, tmp_path: Path, factor: float) -> None:
    path = load_test(tmp_path, corrected(profile, time_factor=factor, acceptance_factor=1.0), "plain")
    with pytest.raises(ConfigError, match=r"step time: .* must be from 0.5 to 2: profile again"):
        learnt(profile, path)


def test_the_service_must_be_named_where_it_drafted_and_the_profile_has_several(
    profile: Profile, tmp_path: Path
) -> None:
    drafted, plain = (load_test(tmp_path, profile, config, name=f"{config}.json") for config in ("head", "plain"))
    with pytest.raises(ConfigError, match=r"2 configurations .* --observed-config"):
        learnt(profile, drafted)
    with pytest.raises(ConfigError, match=r"got 'plain', and head.json counts drafts"):
        learnt(profile, drafted, config="plain")
    with pytest.raises(ConfigError, match=r"got 'head', and plain.json has no spec_decode_draft_tokens"):
        learnt(profile, plain, config="head")
    with pytest.raises(ConfigError, match="did you mean 'suffix'"):
        learnt(profile, drafted, config="suffx")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"start_times": None}, "has no start_times; save a load test with --save-detailed"),
        ({"ttfts": [0.1]}, "80 start_times, .* 1 ttfts, .*; must be as many of each"),
        ({"errors": ["", "timeout"] * (NUM_REQUESTS // 2)}, r"request 1 \(from 0\): failed \('timeout'\)"),
        ({"interrupted": True, "unfinished": 2}, "was interrupted with requests under way"),
        ({"itls": [["a"]] * NUM_REQUESTS}, r"request 0 \(from 0\): has a time or a length"),
        ({"errors": 3}, "got errors=3; must be a list"),
        ({"start_times": [10**400] * NUM_REQUESTS}, r"request 0 \(from 0\): has a time or a length"),
        ({"output_lens": [0] * NUM_REQUESTS}, "each must be a whole number, 1"),
        ({"output_lens": [1.5] * NUM_REQUESTS}, "each must be a whole number, 1"),
        ({"spec_decode_accepted_tokens": "12"}, "got spec_decode_accepted_tokens='12'; must be a whole number"),
        ({"spec_decode_accepted_tokens": 1.5}, "got spec_decode_accepted_tokens=1.5"),
        ({"output_lens": [1] * NUM_REQUESTS, "itls": [[]] * NUM_REQUESTS}, "test with longer answers"),
        ({"spec_decode_accepted_tokens": 10**9}, "test with longer answers"),
    ],
)
def test_a_load_test_that_cannot_be_is_refused(
    profile: Profile, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_load_test(load_test(tmp_path, profile, "plain", **changes))


@pytest.mark.parametrize(("text", "said"), [("{", "not JSON"), ("{}", "has no start_times"), (None, "give the result")])
def test_a_file_that_is_no_load_test_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "no.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_load_test(path)
