"""Options of replicas, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.cli.app import main
from forerun.cli.deploy import ClusterOptions
from forerun.deploy.ray.options import ReplicaOptions, threads_per_replica
from forerun.deploy.ray.planned_drafts import planned_methods
from forerun.deploy.ray.replica import ReplicaSpec
from forerun.deploy.ray.service import Placement, deployment_settings
from forerun.errors import ConfigError
from forerun.server.options import ServerOptions
from tests.plan.profiles import fake_profile

SPEC = ReplicaSpec(settings={"model": "m", "max_num_seqs": 8}, options=ServerOptions(max_queue=5), version="1")
PLAIN = replace(SPEC, settings=SPEC.settings | {"speculative_config": None})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "must be 1 or more"),
        ({"replicas": 2, "max_replicas": 4}, "all three"),
        ({"replicas": 2, "sla": "ttft=1s"}, "all three"),
        ({"sla": "ttft=1s"}, "there are none"),
        ({"max_replicas": 2}, "there are none"),
        ({"replicas": 4, "max_replicas": 2, "sla": "ttft=1s", "scaling_profile": "p"}, "at least --replicas, 4"),
        ({"replicas": 1, "scaling_interval": 0}, "above 0"),
        ({"replicas": 1, "scaling_interval": float("nan")}, "above 0"),
        ({"replicas": 1, "scaling_interval": 30}, "scaling_interval: got 30, which is for replicas that scale"),
        ({"replicas": 1, "scaling_predictor": "ar"}, "scaling_predictor: got ar, which is for replicas that scale"),
        ({"scaling_profile": "p"}, "scaling_profile: got p, .* there are none"),
        ({"scaling_interval": 30}, "scaling_interval: got 30, .* there are none"),
        ({"scaling_predictor": "ar"}, "scaling_predictor: got ar, .* there are none"),
        (
            {"routing": "round-robin"},
            "routing: got round-robin, .* there are none; give --replicas 1 or more, or leave",
        ),
        ({"replica_start_timeout": 60}, "replica_start_timeout: got 60, .* there are none"),
        ({"replicas": 1, "replica_start_timeout": 0}, "1 second or more"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ReplicaOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": " "}, "name: got an empty one; give a name, or leave it out"),
        ({"route_prefix": "llm"}, "route_prefix: got 'llm'; must be / or begin with one, not end with one"),
        ({"route_prefix": "/llm/"}, "route_prefix: got '/llm/'; must be / or begin with one, not end with one"),
        ({"route_prefix": "//"}, "route_prefix: got '//'"),
        ({"route_prefix": "/{path}"}, "have no braces"),
        ({"route_prefix": ""}, "route_prefix: got ''"),
        ({"cpus_per_replica": 0}, "above 0"),
        ({"gpus_per_replica": -1}, "0 or more"),
    ],
)
def test_places_on_a_cluster_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ClusterOptions(**options)


@pytest.mark.parametrize("prefix", ["/", "/llm", "/llm/small-1.0"])
def test_a_service_may_answer_below_a_path(prefix):
    assert ClusterOptions(route_prefix=prefix).route_prefix == prefix


def test_cores_are_shared_out_among_all_replicas_that_there_may_be():
    assert threads_per_replica(ReplicaOptions(replicas=2), 8) == 4
    assert threads_per_replica(ReplicaOptions(replicas=3), 8) == 2
    with pytest.raises(ConfigError, match="got 3, and this machine has 2 cores; may be 1 to 2"):
        threads_per_replica(ReplicaOptions(replicas=3), 2)


def test_a_deployment_holds_as_many_requests_as_the_server_alone():
    settings = deployment_settings(SPEC, ReplicaOptions(replicas=2), Placement(num_cpus=3))
    assert settings["max_ongoing_requests"] == 13
    assert settings["num_replicas"] == 2
    assert settings["ray_actor_options"]["runtime_env"]["env_vars"] == {"OMP_NUM_THREADS": "3"}
    assert "placement_group_bundles" not in settings


def test_processes_of_one_replica_are_placed_on_one_machine():
    spec = replace(SPEC, settings={"model": "m", "tensor_parallel_size": 2})
    settings = deployment_settings(spec, ReplicaOptions(replicas=1), Placement(num_cpus=6, num_gpus=1))
    assert settings["placement_group_strategy"] == "STRICT_PACK"
    assert settings["placement_group_bundles"] == [{"CPU": 3.0, "GPU": 1}, {"CPU": 3.0}]
    actor = settings["ray_actor_options"]
    assert (actor["num_cpus"], actor["num_gpus"]) == (3.0, 1), "the actor fits into the first bundle"
    assert actor["runtime_env"]["env_vars"] == {"OMP_NUM_THREADS": "6"}, "which all processes share"


def test_a_replica_of_more_processes_than_threads_is_refused():
    spec = replace(SPEC, settings={"model": "m", "tensor_parallel_size": 3})
    with pytest.raises(ConfigError, match="tensor_parallel_size: got 3, but a replica computes with 2 threads"):
        deployment_settings(spec, ReplicaOptions(replicas=1), Placement(num_cpus=2))


def test_a_service_that_scales_has_the_planner_for_a_policy(tmp_path):
    fake_profile(tmp_path / "p")
    options = ReplicaOptions(replicas=1, max_replicas=4, sla="ttft=1s", scaling_profile=tmp_path / "p")
    scaling = deployment_settings(PLAIN, options, Placement(num_cpus=1))["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (1, 4)
    assert scaling["policy"]["policy_kwargs"]["sla"] == "ttft=1s"
    assert scaling["policy"]["policy_kwargs"]["methods"] == []


def test_the_planner_is_told_which_of_the_profiled_configurations_the_replicas_run():
    profile = fake_profile()
    suffix = {"method": "suffix", "num_speculative_tokens": 4}

    def methods(**settings):
        return planned_methods(profile, settings)

    assert methods(speculative_config=None) == []
    assert methods(speculative_config=suffix | {"num_speculative_tokens": 0}) == []
    assert methods(speculative_config=suffix) == ["suffix"]
    assert methods(speculative_config={"method": "suffix", "num-speculative-tokens": 2}) == ["suffix"]
    longer = replace(
        profile,
        configs=profile.configs | {"longer": suffix | {"num_speculative_tokens": 8}},
        drafting=profile.drafting | {"longer": profile.drafting["suffix"]},
        acceptance=profile.acceptance | {"longer": profile.acceptance["suffix"]},
    )
    assert planned_methods(longer, {"speculative_config": suffix}) == ["suffix"]
    assert planned_methods(longer, {"speculative_config": {"method": "suffix"}}) == ["suffix", "longer"]


@pytest.mark.parametrize("settings", [{}, {"speculative_config": "auto"}, {"speculative_config": {"method": "mtp"}}])
def test_replicas_that_draft_as_nobody_profiled_are_refused(settings):
    with pytest.raises(ConfigError, match=r"what the replicas draft with.*has suffix, head: profile it"):
        planned_methods(fake_profile(), settings)


def test_plain_replicas_are_refused_where_the_profiled_server_always_drafts():
    with pytest.raises(ConfigError, match="nothing is known of steps without drafts"):
        planned_methods(replace(fake_profile(), has_plain_steps=False), {"speculative_config": None})


@pytest.mark.parametrize("changes", [{"sla": "ttft=soon"}, {"scaling_profile": "nowhere"}])
def test_a_profile_or_an_sla_that_cannot_be_read_is_said_before_anything_starts(changes, tmp_path):
    fake_profile(tmp_path / "p")
    given = {"replicas": 1, "max_replicas": 4, "sla": "ttft=1s", "scaling_profile": tmp_path / "p"} | changes
    with pytest.raises(ConfigError):
        deployment_settings(
            PLAIN,
            ReplicaOptions(**given | {"scaling_profile": tmp_path / given["scaling_profile"]}),
            Placement(num_cpus=1),
        )


@pytest.mark.parametrize("words", [["serve", "m", "--replicas", "2"], ["deploy", "ray", "m"], ["deploy", "ray-stop"]])
def test_without_ray_each_command_says_what_to_install(words, monkeypatch, capsys):
    def absent():
        raise ConfigError("ray: is not installed; pip install 'forerun[ray]'")

    monkeypatch.setattr("forerun.deploy.ray.installation.check_ray", absent)
    assert main(words) == 2
    assert "pip install 'forerun[ray]'" in capsys.readouterr().err


def test_a_service_on_a_cluster_has_one_replica_where_nothing_else_is_said(monkeypatch):
    seen = []
    monkeypatch.setattr("forerun.deploy.ray.installation.check_ray", lambda: None)
    monkeypatch.setattr(
        "forerun.deploy.ray.service.deploy_on_cluster", lambda _spec, options, *_, **__: seen.append(options)
    )
    assert main(["deploy", "ray", "m", "--routing", "round-robin"]) == 0
    assert [(one.replicas, one.routing) for one in seen] == [(1, "round-robin")]
