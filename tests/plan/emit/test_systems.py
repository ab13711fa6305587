"""What is emitted is what the systems accept, and says what the plan says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError
from forerun.ops.native.formats import WEIGHT_FORMATS
from forerun.plan.emit.emission import FORERUN_FORMATS
from forerun.plan.emit.forerun_server import resources_of
from forerun.plan.emit.systems import SYSTEMS, emit
from forerun.plan.profile import Profile
from forerun.plan.sla import Sla
from tests.plan.emit import resources, schemas
from tests.plan.emit.plans import APART, EAGLE3, NGRAM, PLAN, SCHEDULE, WINDOW, request, with_engine, write_profile

OWN = [name for name, system in SYSTEMS.items() if system.is_own]


@pytest.fixture
def profile_folder(tmp_path):
    return write_profile(tmp_path)


def asked_of(system, profile_folder, *plan, **changes):
    """A request with the profile's folder for a system that reads it."""
    return request(*plan, **changes, profile_folder=profile_folder if SYSTEMS[system].reads_profile else None)


def commands(text):
    """The commands of a script, as lists of words, without what the shell does itself."""
    joined = text.replace("\\\n", " ")
    lines = [re.sub("^([A-Z_]+=[^ ]* )+", "", line.removeprefix("exec ")) for line in joined.splitlines()]
    words = [shlex.split(line.removesuffix(" &")) for line in lines]
    return [one for one in words if one[0] in ("python", "vllm", "trtllm-serve", "forerun")]


def options(words):
    return {word for word in words if word.startswith("--")}


def value(words, option):
    return words[words.index(option) + 1]


@pytest.mark.parametrize(
    ("model", "name"),
    [("org/Some_Model-1B", "some-model-1b"), ("/models/llama/", "llama"), ("Q4.gguf", "q4-gguf"), ("__", "model")],
)
def test_deployments_are_named_after_the_model(model, name):
    assert replace(request(), model=model).name == name


@pytest.mark.parametrize("system", SYSTEMS)
def test_files_are_the_same_each_time_and_scripts_are_valid(system, profile_folder):
    asked = asked_of(system, profile_folder)
    files = emit(system, asked).files
    assert files == emit(system, asked).files
    for name, text in files.items():
        if name.endswith(".sh"):
            subprocess.run(["sh", "-n"], input=text, text=True, check=True)
        else:
            assert all(yaml.safe_load_all(text))


@pytest.mark.parametrize(
    "plan", [PLAN, replace(PLAN, speculative_config=None), replace(PLAN, speculative_config=NGRAM | SCHEDULE)]
)
def test_forerun_serves_the_plan(plan):
    settings = yaml.safe_load(emit("forerun", request(plan)).files["serve.yaml"])
    assert settings["model"] == plan.model
    assert settings["max-num-seqs"] == plan.engine.max_num_seqs
    assert settings.get("speculative-config") == plan.speculative_config
    assert settings.get("no-speculation", False) is (plan.speculative_config is None)


def test_forerun_serve_reads_what_is_emitted(tmp_path, monkeypatch):
    from forerun.cli import serve

    changes = {"quantization": "int8", "tensor_parallel_size": 2, "block_size": 32, "device": "cpu"}
    kernels = {
        "activation_dtype": "int8",
        "device_step": False,
        "cudagraph_capture_sizes": [1, 2],
        "kernel_table": "t.json",
    }
    files = emit("forerun", request(with_engine(PLAN, **changes, kernel_settings=kernels))).files
    (tmp_path / "serve.yaml").write_text(files["serve.yaml"])
    _, bound, _ = serve.serve.parse_args(["--config", str(tmp_path / "serve.yaml")], exit_on_error=False)
    assert bound.args == (PLAN.model,)
    engine = bound.kwargs["engine"]
    assert (engine.max_num_seqs, engine.quantization, engine.speculative_config) == (32, "int8", NGRAM)
    asked = EngineSettings.from_keywords(PLAN.model, engine.plain_settings())
    assert {name: getattr(asked, name) for name in changes} == changes
    assert asked.kernel_settings == kernels


def test_compose_and_kubernetes_run_the_replicas_with_health_checks():
    service = yaml.safe_load(emit("compose", request()).files["compose.yaml"])["services"]["forerun"]
    assert service["deploy"] == {"replicas": 3}
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    config, deployment, served = yaml.safe_load_all(emit("kubernetes", request()).files["forerun.yaml"])
    assert deployment["spec"]["replicas"] == 3
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} == {
        "/health"
    }
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"] == served["spec"]["selector"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["spec"]["volumes"]}
    (mounted,) = [one["configMap"]["name"] for one in pod["spec"]["volumes"] if "configMap" in one]
    assert mounted == config["metadata"]["name"]
    assert all(
        re.fullmatch("[a-z0-9]([a-z0-9-]*[a-z0-9])?", one["metadata"]["name"]) for one in (config, deployment, served)
    )


def test_servers_get_the_memory_and_cores_of_the_profile(profile_folder):
    profile = Profile.load(profile_folder)
    kv_bytes = profile.num_blocks * profile.block_size * profile.kv_bytes_per_token
    files = emit("kubernetes", request(profile_folder=profile_folder)).files
    config, deployment, _ = yaml.safe_load_all(files["forerun.yaml"])
    assert yaml.safe_load(config["data"]["serve.yaml"])["kv-cache-memory-bytes"] == kv_bytes
    resources = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["cpu"] == "2", "as many as threads computed, of 4 cores of the machine"
    assert int(resources["limits"]["memory"].removesuffix("Mi")) * 2**20 > kv_bytes + profile.weight_bytes
    without = emit("kubernetes", request())
    assert any("--profile" in note for note in without.notes)
    on_cpu, on_gpu = (
        resources_of(request(with_engine(PLAN, device=device), profile_folder=profile_folder))
        for device in ("cpu", "cuda")
    )
    assert on_cpu.memory_mib - on_gpu.memory_mib == kv_bytes / 2**20, "a GPU's KV lies in its own memory"


@pytest.mark.parametrize("system", [*OWN, "dynamo"])
def test_a_profile_of_another_model_machine_or_way_to_compute_is_refused(system, profile_folder):
    with pytest.raises(ConfigError, match="another model"):
        emit(system, request(model="org/Other", profile_folder=profile_folder))
    for name in ("machine", "kernels", "dtype", "version"):
        other = request(profile=PLAN.profile | {name: "other"}, profile_folder=profile_folder)
        with pytest.raises(ConfigError, match=f"another {name}"):
            emit(system, other)


def test_the_planned_engine_is_started_whole():
    """Processes, blocks, device and kernels as they were profiled."""
    plan = with_engine(
        PLAN, tensor_parallel_size=2, block_size=32, device="cpu", kernel_settings={"activation_dtype": "int8"}
    )
    settings = yaml.safe_load(emit("forerun", request(plan)).files["serve.yaml"])
    found = {name: settings[name] for name in ("tensor-parallel-size", "block-size", "device", "activation-dtype")}
    assert found == {"tensor-parallel-size": 2, "block-size": 32, "device": "cpu", "activation-dtype": "int8"}
    (words,) = commands(
        emit("sglang", request(with_engine(PLAN, tensor_parallel_size=2, block_size=32))).files["serve.sh"]
    )
    assert (value(words, "--tp-size"), value(words, "--page-size")) == ("2", "32")


@pytest.mark.parametrize(
    ("kernels", "device", "ranks", "cpu"),
    [
        ("native avx512bf16, int8 weights, 4 threads", "cpu", 1, "4"),
        ("native avx2, 4 threads", "cpu", 2, "8"),
        ("Triton kernels", "cuda", 1, None),
        ("a server's own", None, 1, None),
        (None, "cpu", 1, None),
    ],
)
def test_a_pod_asks_for_a_core_for_each_thread_and_leaves_them_out_beside_a_gpu(kernels, device, ranks, cpu):
    profile = {"machine": "a machine, 64 cores"} | ({} if kernels is None else {"kernels": kernels})
    plan = with_engine(replace(PLAN, profile=profile), device=device, tensor_parallel_size=ranks)
    emission = emit("kubernetes", request(plan))
    _, deployment, _ = yaml.safe_load_all(emission.files["forerun.yaml"])
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    needed = container.get("resources", {"requests": {}, "limits": {}})
    assert (needed["requests"].get("cpu"), needed["limits"].get("cpu")) == (cpu, cpu)
    said = "cores are not limited" if cpu is None else f"each pod takes {cpu} cores"
    assert any(said in note for note in emission.notes)


def test_a_service_that_spreads_at_random_is_said_where_there_are_several_servers():
    for count in (1, 3):
        notes = emit("kubernetes", request(replicas=count)).notes
        assert any("--routing random" in note for note in notes) == (count > 1)


def test_a_container_gives_requests_in_flight_until_just_before_it_is_killed():
    """Whose server would else end them after 30 s."""
    composed = emit("compose", request()).files
    config, deployment, _ = yaml.safe_load_all(emit("kubernetes", request()).files["forerun.yaml"])
    servers = [yaml.safe_load(text) for text in (composed["serve.yaml"], config["data"]["serve.yaml"])]
    grace = yaml.safe_load(composed["compose.yaml"])["services"]["forerun"]["stop_grace_period"]
    pod = deployment["spec"]["template"]["spec"]
    assert [one["shutdown-timeout"] for one in servers] == [120, 120]
    assert 120 < int(grace.removesuffix("s")) == pod["terminationGracePeriodSeconds"]
    assert "shutdown-timeout" not in yaml.safe_load(emit("forerun", request()).files["serve.yaml"])


def test_the_memory_of_a_server_has_room_for_the_drafters_part_of_each_block(profile_folder):
    profile = Profile.load(profile_folder)
    replace(profile, drafter_block_bytes={"head": 10_000}).save(profile_folder)
    head = profile.configs["head"]
    plain, drafting, shorter, other = (
        resources_of(request(with_engine(PLAN, device="cpu"), profile_folder=profile_folder, speculative_config=config))
        for config in (None, head, head | {"num_speculative_tokens": 1}, NGRAM)
    )
    assert drafting == shorter
    assert plain == other
    assert drafting.kv_bytes - plain.kv_bytes == profile.num_blocks * 10_000
    assert drafting.memory_mib - plain.memory_mib == pytest.approx(profile.num_blocks * 10_000 / 2**20, abs=1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_memory_of_a_server_has_room_for_the_blocks_that_drafts_alone_are_written_to(device, profile_folder):
    """Which a server has beside the KV memory that it is given, on a GPU in the same memory."""
    drafting, _ = with_head(profile_folder, device)
    profile, without = Profile.load(profile_folder), resources_of(drafting)
    size = 30_000_000
    replace(profile, drafter_scratch_bytes={"head": size}).save(profile_folder)
    with_them = resources_of(drafting)
    assert without.kv_bytes - with_them.kv_bytes == (size if device == "cuda" else 0)
    more = 0 if device == "cuda" else size / 2**20
    assert with_them.memory_mib - without.memory_mib == pytest.approx(more, abs=1)


def with_head(profile_folder, device):
    """A plan on a device that drafts with a head of 20 MB, and the profile's engine without one."""
    profile = Profile.load(profile_folder)
    save_file({"fc.weight": np.zeros((2500, 4000), np.float16)}, profile_folder / "model.safetensors")
    head = profile.configs["head"] | {"model": str(profile_folder)}
    replace(
        profile, device=device, configs=profile.configs | {"head": head}, drafter_block_bytes={"head": 10_000}
    ).save(profile_folder)
    drafting, plain = (
        request(with_engine(PLAN, device=device), profile_folder=profile_folder, speculative_config=config)
        for config in (head, None)
    )
    return drafting, plain


def test_the_memory_of_a_server_has_room_for_the_drafters_weights(profile_folder):
    drafting, plain = with_head(profile_folder, "cpu")
    with_it, without = resources_of(drafting), resources_of(plain)
    more = 20_000_000 + with_it.kv_bytes - without.kv_bytes
    assert with_it.memory_mib - without.memory_mib == pytest.approx(more / 2**20, abs=1)
    assert any("the drafter's 19 MiB" in note for note in emit("kubernetes", drafting).notes)


def test_on_a_gpu_the_drafters_weights_take_of_the_memory_for_kv(profile_folder):
    drafting, plain = with_head(profile_folder, "cuda")
    assert resources_of(plain).kv_bytes - resources_of(drafting).kv_bytes == 20_000_000
    settings = yaml.safe_load(emit("forerun", drafting).files["serve.yaml"])
    assert settings["kv-cache-memory-bytes"] == resources_of(drafting).kv_bytes


def test_a_drafter_that_leaves_too_little_for_the_longest_sequence_is_refused(profile_folder):
    drafting, _ = with_head(profile_folder, "cuda")
    profile = Profile.load(profile_folder)
    replace(profile, num_blocks=PLAN.engine.max_model_len // profile.block_size).save(profile_folder)
    with pytest.raises(ConfigError, match="has KV memory for 3600 tokens, and max_model_len is 4096"):
        emit("forerun", drafting)


@pytest.mark.parametrize("system", OWN)
def test_what_is_not_known_of_a_drafters_memory_is_said(system, profile_folder):
    head = Profile.load(profile_folder).configs["head"]
    notes = emit(system, request(profile_folder=profile_folder, speculative_config=head)).notes
    assert sum("not counted in memory: weights of the drafter 'some/head'" in note for note in notes) == 1
    for known in (NGRAM, {"method": "self", "exit_layer": 2}, None):
        notes = emit(system, request(profile_folder=profile_folder, speculative_config=known)).notes
        assert not any("not counted" in note for note in notes)


def test_the_profiled_kv_memory_is_given_where_weights_are_not_known(profile_folder):
    """Of a model that runs through transformers' own code."""
    profile = Profile.load(profile_folder)
    replace(profile, weight_bytes=None, kv_bytes_per_token=None, kv_cache_memory_bytes=123_456).save(profile_folder)
    emission = emit("kubernetes", request(profile_folder=profile_folder))
    config, _, _ = yaml.safe_load_all(emission.files["forerun.yaml"])
    assert yaml.safe_load(config["data"]["serve.yaml"])["kv-cache-memory-bytes"] == 123_456
    assert any("the profile does not know what weights and KV take" in note for note in emission.notes)


@pytest.mark.parametrize("system", ["vllm", "ray", "dynamo"])
def test_the_format_of_a_servers_weights_is_passed_on_to_vllm(system, profile_folder):
    plan = with_engine(PLAN, quantization="fp8")
    for name, text in emit(system, asked_of(system, profile_folder, plan)).files.items():
        assert "quantization" in text or name == "mocker.sh"
    (words,) = commands(emit("vllm", request(plan)).files["serve.sh"])
    assert value(words, "--quantization") == "fp8"
    assert options(words) <= schemas.VLLM_OPTIONS


@pytest.mark.parametrize("system", [*OWN, "sglang", "trtllm"])
def test_the_format_of_a_servers_weights_is_refused_where_it_cannot_run(system):
    with pytest.raises(ConfigError, match=r"'fp8' is a format of the server that was profiled.*emit to vllm"):
        emit(system, request(with_engine(PLAN, quantization="fp8")))


def test_foreruns_formats_are_those_that_its_kernels_round_to():
    assert [one.name for one in WEIGHT_FORMATS.values() if one.is_quantization] == list(FORERUN_FORMATS)


@pytest.mark.parametrize("length", [None, "4", 0])
def test_dynamo_wants_a_number_of_drafted_tokens(length, profile_folder):
    config = NGRAM | {"num_speculative_tokens": length}
    with pytest.raises(ConfigError, match=f"num_speculative_tokens: got {length!r}; vLLM wants a number from 1"):
        emit("dynamo", request(speculative_config=config, profile_folder=profile_folder))


@pytest.mark.parametrize("system", ["compose", "kubernetes"])
def test_a_note_names_each_path_that_a_container_lacks(system, tmp_path):
    (tmp_path / "head").mkdir()
    config = {"method": "hybrid", "drafters": [{"method": "ngram"}, EAGLE3 | {"model": str(tmp_path / "head")}]}
    plan = with_engine(replace(PLAN, model="./model.gguf"), kernel_settings={"kernel_table": "tuned.json"})
    notes = emit(system, request(plan, speculative_config=config)).notes
    named = [note.partition(" is a path")[0] for note in notes if "is a path" in note]
    assert named == ["./model.gguf", str(tmp_path / "head"), "tuned.json"]
    hub = emit(system, request(speculative_config=EAGLE3)).notes
    own = {"method": "auto", "drafter": {"method": "eagle3", "model": str(tmp_path / "head")}}
    assert any(str(tmp_path / "head") in note for note in emit(system, request(speculative_config=own)).notes)
    assert not any("is a path" in note for note in hub)


def test_an_engine_that_was_profiled_on_a_gpu_gets_one():
    plan = with_engine(PLAN, device="cuda", tensor_parallel_size=2)
    service = yaml.safe_load(emit("compose", request(plan)).files["compose.yaml"])["services"]["forerun"]
    (gpus,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (gpus["count"], gpus["capabilities"]) == (2, ["gpu"])
    emission = emit("kubernetes", request(plan))
    _, deployment, _ = yaml.safe_load_all(emission.files["forerun.yaml"])
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert any("CUDA" in note for note in emission.notes)


@pytest.mark.parametrize("system", [one for one in SYSTEMS if one not in OWN])
def test_settings_of_foreruns_kernels_are_refused_elsewhere(system, profile_folder):
    plan = with_engine(PLAN, kernel_settings={"activation_dtype": "int8"})
    with pytest.raises(ConfigError, match="activation_dtype"):
        emit(system, asked_of(system, profile_folder, plan))


@pytest.mark.parametrize("system", SYSTEMS)
def test_speculation_without_a_method_is_refused(system, profile_folder):
    plan = replace(PLAN, speculative_config={"num_speculative_tokens": 3})
    with pytest.raises(ConfigError, match="got method None"):
        emit(system, asked_of(system, profile_folder, plan))


def test_ray_serves_the_replicas_with_vllm():
    (application,) = yaml.safe_load(emit("ray", request()).files["serve.yaml"])["applications"]
    (engine,) = application["args"]["llm_configs"]
    assert application["import_path"] == "ray.serve.llm:build_openai_app"
    assert engine["deployment_config"]["num_replicas"] == 3
    assert engine["model_loading_config"]["model_source"] == PLAN.model
    assert engine["engine_kwargs"]["speculative_config"] == NGRAM
    assert {f"--{name.replace('_', '-')}" for name in engine["engine_kwargs"]} <= schemas.VLLM_OPTIONS


@pytest.mark.parametrize("model", [PLAN.model, "org/7B_" + "x" * 60])
@pytest.mark.parametrize("image", [None, "registry.example/ray:1"])
def test_kuberay_gets_a_service_that_its_crd_takes(model, image):
    (service,) = yaml.safe_load_all(emit("ray", replace(request(model=model), image=image)).files["rayservice.yaml"])
    assert resources.violations(service, resources.RAY_SERVICE) == []
    cluster = service["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    assert group["minReplicas"] == group["replicas"] == group["maxReplicas"] == 3
    (worker,) = group["template"]["spec"]["containers"]
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["image"] == worker["image"]
    assert ("rayVersion" in cluster, cluster.get("rayVersion", "") in head["image"]) == (image is None, True)


def test_kuberay_serves_the_applications_of_serve_deploy():
    files = emit("ray", request()).files
    service = yaml.safe_load(files["rayservice.yaml"])
    inner, alone = yaml.safe_load(service["spec"]["serveConfigV2"]), yaml.safe_load(files["serve.yaml"])
    assert inner == {"applications": alone["applications"]}  # and listens on all addresses of its pods


@pytest.mark.parametrize("plan", [PLAN, APART])
def test_dynamos_crds_take_both_graphs(plan, profile_folder):
    files = emit("dynamo", request(plan, profile_folder=profile_folder)).files
    for name, schema in (
        ("dynamo.yaml", resources.DYNAMO_GRAPH_V1BETA1),
        ("dynamo-v1alpha1.yaml", resources.DYNAMO_GRAPH_V1ALPHA1),
    ):
        _, graph = yaml.safe_load_all(files[name])
        assert resources.violations(graph, schema) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("spec", "rayClusterConfig", "headGroupSpec", "template"), None, "headGroupSpec: template missing"),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "maxReplicas"), None, "maxReplicas missing"),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "replicas"), "3", "replicas: '3' is no integer"),
        (("spec", "rayClusterConfig", "headGroup"), {}, "unknown headGroup"),
        (("metadata", "name"), "7b", "name: '7b'"),
    ],
)
def test_what_the_crd_refuses_is_found(path, value, said):
    """The check of the two tests above can fail."""
    service = yaml.safe_load(emit("ray", request()).files["rayservice.yaml"])
    *parents, last = path
    place = service
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    (found,) = resources.violations(service, resources.RAY_SERVICE)
    assert said in found


def test_vllm_gets_options_that_it_has():
    (words,) = commands(emit("vllm", request(speculative_config=NGRAM | SCHEDULE)).files["serve.sh"])
    assert words[:3] == ["vllm", "serve", PLAN.model]
    assert options(words) <= schemas.VLLM_OPTIONS
    assert json.loads(value(words, "--speculative-config")) == NGRAM | SCHEDULE
    notes = emit("vllm", request(speculative_config=NGRAM | SCHEDULE)).notes
    assert any("--data-parallel-size" in note for note in notes)


def test_sglang_gets_options_that_it_has():
    (words,) = commands(emit("sglang", request(speculative_config=EAGLE3)).files["serve.sh"])
    assert options(words) <= schemas.SGLANG_OPTIONS
    assert value(words, "--speculative-num-steps") == "3"


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "chunk"), [(1000, 16, 992), (1024, 16, 1024), (8, 16, 16), (1000, 1, 1000)]
)
def test_sglang_computes_prompts_in_whole_blocks_and_a_note_says_of_another_budget(num_tokens, block_size, chunk):
    """Its check_server_args refuses another --chunked-prefill-size."""
    emission = emit("sglang", request(with_engine(PLAN, max_num_batched_tokens=num_tokens, block_size=block_size)))
    (words,) = commands(emission.files["serve.sh"])
    assert (value(words, "--chunked-prefill-size"), value(words, "--page-size")) == (str(chunk), str(block_size))
    assert any("whole blocks" in note for note in emission.notes) == (chunk != num_tokens)


@pytest.mark.parametrize(("block_size", "emitted"), [(8, 16), (16, 16), (24, 32), (64, 64)])
@pytest.mark.parametrize("plan", [PLAN, APART])
def test_a_block_size_that_trtllm_lacks_is_rounded_up_and_a_note_says_so(plan, block_size, emitted):
    emission = emit("trtllm", request(with_engine(plan, block_size=block_size)))
    name = "config.yaml" if plan is PLAN else "decode.yaml"
    assert yaml.safe_load(emission.files[name])["kv_cache_config"]["tokens_per_block"] == emitted
    assert any(f"{emitted} tokens each" in note for note in emission.notes) == (emitted != block_size)


def test_trtllm_gets_a_schedule_up_to_the_planned_batch_size():
    config = NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 4, 2]]}
    settings = yaml.safe_load(emit("trtllm", request(speculative_config=config)).files["config.yaml"])
    assert settings["speculative_config"]["draft_len_schedule"] == {2: 4, settings["max_batch_size"]: 2}


def test_trtllm_gets_keys_that_it_has_and_three_files_where_phases_are_apart():
    files = emit("trtllm", request()).files
    assert set(yaml.safe_load(files["config.yaml"])) <= schemas.TRTLLM_KEYS
    apart = {name: yaml.safe_load(text) for name, text in emit("trtllm", request(APART)).files.items()}
    assert apart["instances.yaml"] == {"prefill": 1, "decode": 2}
    assert apart["prefill.yaml"]["speculative_config"] == apart["decode.yaml"]["speculative_config"]
    assert apart["prefill.yaml"]["disable_overlap_scheduler"]
    assert {*apart["prefill.yaml"], *apart["decode.yaml"]} <= schemas.TRTLLM_KEYS


MTP = {"method": "mtp", "num_speculative_tokens": 2}


@pytest.mark.parametrize("plan", [PLAN, APART])
@pytest.mark.parametrize("config", [None, NGRAM | WINDOW | SCHEDULE, EAGLE3, MTP])
def test_the_sections_of_trtllms_files_have_keys_and_types_that_it_has(plan, config):
    files = emit("trtllm", request(plan, speculative_config=config)).files
    for name in ("config.yaml",) if plan is PLAN else ("prefill.yaml", "decode.yaml"):
        settings = yaml.safe_load(files[name])
        sections = {key: value for key, value in settings.items() if isinstance(value, dict)}
        assert sections.keys() <= schemas.TRTLLM_SECTIONS.keys()
        for section, values in sections.items():
            for key, value in values.items():
                assert type(value) is schemas.TRTLLM_SECTIONS[section][key], f"{section}.{key}"
        if "speculative_config" in sections:
            assert sections["speculative_config"]["decoding_type"] in schemas.TRTLLM_DECODING_TYPES
        if plan is APART:
            assert sections["cache_transceiver_config"]["backend"] in schemas.TRTLLM_BACKENDS


def test_the_host_drafters_of_trtllm_cannot_overlap_steps():
    plain, eagle = (
        yaml.safe_load(emit("trtllm", request(speculative_config=config)).files["config.yaml"])
        for config in (NGRAM, EAGLE3)
    )
    assert plain["disable_overlap_scheduler"]
    assert "disable_overlap_scheduler" not in eagle


@pytest.mark.parametrize("plan", [PLAN, APART])
def test_dynamo_gets_the_graph_in_both_versions(plan, profile_folder):
    files = emit("dynamo", request(plan, profile_folder=profile_folder)).files
    config_map, newer = yaml.safe_load_all(files["dynamo.yaml"])
    assert (newer["apiVersion"], newer["kind"]) == ("nvidia.com/v1beta1", "DynamoGraphDeployment")
    components = {one["name"]: one for one in newer["spec"]["components"]}
    _, older = yaml.safe_load_all(files["dynamo-v1alpha1.yaml"])
    assert older["apiVersion"] == "nvidia.com/v1alpha1"
    services = older["spec"]["services"]
    assert services.keys() == components.keys()
    for name, one in components.items():
        (container,) = one["podTemplate"]["spec"]["containers"]
        other = services[name]["extraPodSpec"]["mainContainer"]
        assert (container["command"], container["args"]) == (other["command"], other["args"])
        assert one["replicas"] == services[name]["replicas"]
        if name.startswith("Vllm"):
            assert options(container["args"]) <= schemas.DYNAMO_WORKER_OPTIONS
            assert json.loads(value(container["args"], "--speculative-config")) == NGRAM
            assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    workers = {name: one["replicas"] for name, one in components.items() if name.startswith("Vllm")}
    assert workers == ({"VllmWorker": 3} if plan is PLAN else {"VllmPrefillWorker": 1, "VllmDecodeWorker": 2})
    assert config_map["metadata"]["name"] == "planner-profile-data"


def test_dynamos_planner_may_scale_the_workers_alone(profile_folder):
    _, graph = yaml.safe_load_all(emit("dynamo", request(profile_folder=profile_folder)).files["dynamo.yaml"])
    scaled = {one["name"]: one["type"] for one in graph["spec"]["components"] if "scalingAdapter" in one}
    assert scaled == {"VllmWorker": "decode"}


@pytest.mark.parametrize("plan", [PLAN, APART])
def test_dynamo_runs_on_one_machine_with_an_engine_of_each_kind(plan, profile_folder):
    frontend, *workers = commands(emit("dynamo", request(plan, profile_folder=profile_folder)).files["launch.sh"])
    assert frontend[:3] == ["python", "-m", "dynamo.frontend"]
    assert all(options(words) <= schemas.DYNAMO_WORKER_OPTIONS for words in workers)
    modes = [value(words, "--disaggregation-mode") for words in workers if "--disaggregation-mode" in words]
    assert (len(workers), modes) == ((1, []) if plan is PLAN else (2, ["prefill", "decode"]))


@pytest.mark.parametrize("count", [1, 3])
def test_of_several_engines_that_dynamo_is_given_one_runs_on_one_machine(count, profile_folder):
    notes = emit("dynamo", request(profile_folder=profile_folder, replicas=count)).notes
    assert any("launch.sh starts one engine of the 3" in note for note in notes) == (count > 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_dynamos_engines_of_one_machine_share_no_gpu_and_no_port(ranks, profile_folder):
    plan = with_engine(APART, tensor_parallel_size=ranks)
    text = emit("dynamo", request(plan, profile_folder=profile_folder)).files["launch.sh"]
    environments = [
        dict(word.split("=") for word in line.partition(" python ")[0].split())
        for line in text.replace("\\\n", " ").splitlines()
        if "dynamo.vllm" in line
    ]
    prefill, decode = ({*one.get("CUDA_VISIBLE_DEVICES", "").split(",")} for one in environments)
    assert (len(prefill), len(decode), len(prefill | decode)) == (ranks, ranks, 2 * ranks)
    assert [one.get("VLLM_NIXL_SIDE_CHANNEL_PORT") for one in environments] == ["20097", "5600"]


def test_dynamos_planner_gets_the_sla_and_the_measured_latencies(profile_folder):
    config_map, graph = yaml.safe_load_all(emit("dynamo", request(profile_folder=profile_folder)).files["dynamo.yaml"])
    prefill, decode = (json.loads(config_map["data"][f"{phase}_raw_data.json"]) for phase in ("prefill", "decode"))
    assert prefill["prefill_isl"] == [100, 500, 1000]
    assert prefill["prefill_ttft"] == [10, 50, 100]  # ms
    assert decode["max_kv_tokens"] == 10_000
    assert decode["z_itl"] == pytest.approx([11.4, 11.4, 18.4, 18.4])  # ms of whole steps: the planner divides them
    (planner,) = [one for one in graph["spec"]["components"] if one["type"] == "planner"]
    (container,) = planner["podTemplate"]["spec"]["containers"]
    settings = json.loads(value(container["args"], "--config"))
    assert settings.keys() <= schemas.PLANNER_KEYS
    assert (settings["ttft_ms"], settings["itl_ms"], settings["speculative_nextn"]) == (500, 50, 4)
    assert settings["profile_results_dir"] == container["volumeMounts"][0]["mountPath"]


def test_dynamos_planner_is_told_of_as_many_kv_tokens_as_a_drafter_leaves(profile_folder):
    """Of 300 blocks 269, on a GPU: the head and its KV take of the memory that was profiled without it."""
    drafting, plain = with_head(profile_folder, "cuda")
    profile = Profile.load(profile_folder)
    left = (300 * 16 * profile.kv_bytes_per_token - 20_000_000) // (16 * profile.kv_bytes_per_token + 10_000)
    for num_blocks, of_drafting, of_plain in ((300, 16 * left, 4800), (2048, 10_000, 10_000)):
        replace(profile, num_blocks=num_blocks).save(profile_folder)
        for asked, num_tokens in ((drafting, of_drafting), (plain, of_plain)):
            config_map, _ = yaml.safe_load_all(emit("dynamo", asked).files["dynamo.yaml"])
            decode = json.loads(config_map["data"]["decode_raw_data.json"])
            assert decode["max_kv_tokens"] == num_tokens
            assert decode["x_kv_usage"] == pytest.approx([n / num_tokens for n in (200, 800, 1600, 6400)])


def test_dynamos_latencies_are_of_the_plans_draft_length_or_a_note_says_of_which(profile_folder):
    plain = emit("dynamo", request(speculative_config=None, profile_folder=profile_folder))
    config_map, _ = yaml.safe_load_all(plain.files["dynamo.yaml"])
    assert json.loads(config_map["data"]["decode_raw_data.json"])["z_itl"] == pytest.approx([11, 11, 18, 18])
    assert "mocker_k0.npz" in plain.files["mocker.sh"]
    other = emit(
        "dynamo", request(speculative_config=NGRAM | {"num_speculative_tokens": 3}, profile_folder=profile_folder)
    )
    assert "mocker_k4.npz" in other.files["mocker.sh"]
    assert any("those of 4 drafted tokens" in note for note in other.notes)


def test_dynamos_mocker_gets_conditional_rates_and_no_more_than_five(profile_folder):
    emission = emit("dynamo", request(profile_folder=profile_folder))
    (words,) = commands(emission.files["mocker.sh"])
    assert options(words) <= schemas.DYNAMO_MOCKER_OPTIONS
    assert value(words, "--aic-nextn-accept-rates") == "0.7,0.6,0.5,0.4"
    longer = NGRAM | {"num_speculative_tokens": 8}
    rates = {"conditional_accept_rates": [0.5] * 8}
    emission = emit("dynamo", request(speculative_config=longer, acceptance=rates, profile_folder=profile_folder))
    (words,) = commands(emission.files["mocker.sh"])
    assert value(words, "--aic-nextn") == "5"
    assert any("--aic-nextn" in note for note in emission.notes)


def test_what_dynamos_mocker_drafts_is_said_once(profile_folder):
    longer = NGRAM | {"num_speculative_tokens": 8}
    for rates, said in (
        (None, ["mocker.sh drafts nothing: the plan has no acceptance rates; profile the method's acceptance"]),
        ([0.5] * 2, ["mocker.sh drafts 2 tokens, the plan 8: the plan has no more acceptance rates (--aic-nextn)"]),
        ([0.5] * 8, ["mocker.sh drafts 5 tokens, the plan 8: Dynamo's mocker has no more (--aic-nextn)"]),
    ):
        acceptance = None if rates is None else {"conditional_accept_rates": rates}
        asked = request(speculative_config=longer, acceptance=acceptance, profile_folder=profile_folder)
        assert [note for note in emit("dynamo", asked).notes if note.startswith("mocker.sh")] == said


@pytest.mark.parametrize("model", ["org/Qwen3-30B-A3B-Instruct-2507-FP8-dynamic-and-more", "org/7B"])
@pytest.mark.parametrize("plan", [PLAN, APART])
def test_dynamos_names_are_short_enough_for_its_pods_and_begin_with_a_letter(model, plan, profile_folder):
    """The operator refuses more than 45 characters of graph and component together, and makes services of them."""
    asked = replace(request(plan, profile_folder=profile_folder), model=model)
    _, graph = yaml.safe_load_all(emit("dynamo", asked).files["dynamo.yaml"])
    name = graph["metadata"]["name"]
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert max(len(name + one["name"]) for one in graph["spec"]["components"]) <= 45


def test_dynamos_mocker_has_engines_of_both_kinds_where_they_are_apart(profile_folder):
    emission = emit("dynamo", request(APART, profile_folder=profile_folder))
    prefill, decode = commands(emission.files["mocker.sh"])
    assert all(options(words) <= schemas.DYNAMO_MOCKER_OPTIONS for words in (prefill, decode))
    found = [(value(words, "--disaggregation-mode"), value(words, "--num-workers")) for words in (prefill, decode)]
    assert found == [("prefill", "1"), ("decode", "2")]
    assert ["--aic-nextn" in words for words in (prefill, decode)] == [False, True]


def test_what_dynamos_planner_cannot_hold_of_an_sla_is_said(profile_folder):
    """Its settings have ttft_ms and itl_ms alone."""

    def notes(**limits):
        sla = Sla(**{"ttft": 0.5, "tpot": 0.05} | limits)
        return " ".join(emit("dynamo", request(sla=sla, profile_folder=profile_folder)).notes)

    assert "no share of requests, as the plan's 90%" in notes(attainment=0.9)
    assert "as the plan's 99.9%" in notes(attainment=0.999)
    assert "no limit of e2el, as the plan's 9000 ms" in notes(e2el=9.0)
    assert "no limit of 70 ms between two messages (icl)" in notes(icl=0.07)
    assert "itl_ms is the plan's limit of 70 ms between two messages" in notes(tpot=None, icl=0.07)
    assert "e2el" not in notes()
    assert "icl" not in notes()


def test_a_drafter_with_kv_in_two_kinds_of_engines_is_a_known_trap(profile_folder):
    notes = emit("dynamo", request(APART, speculative_config=EAGLE3, profile_folder=profile_folder)).notes
    assert any("same speculative configuration" in note for note in notes)


@pytest.mark.parametrize("system", ["forerun", "compose", "kubernetes", "vllm", "sglang", "ray"])
def test_phases_apart_are_refused_where_a_system_has_none(system):
    with pytest.raises(ConfigError, match="layout"):
        emit(system, request(APART))


@pytest.mark.parametrize("system", [one for one in SYSTEMS if one not in OWN])
def test_what_only_forerun_knows_is_refused_elsewhere(system, profile_folder):
    with pytest.raises(ConfigError, match="--model"):
        emit(system, asked_of(system, profile_folder, model="smollm2-135m"))
    with pytest.raises(ConfigError, match="int8"):
        emit(system, asked_of(system, profile_folder, with_engine(PLAN, quantization="int8")))


def test_dynamo_needs_a_profile_and_an_sla_of_both(profile_folder):
    with pytest.raises(ConfigError, match="--profile"):
        emit("dynamo", request())
    with pytest.raises(ConfigError, match="sla"):
        emit("dynamo", request(sla=replace(PLAN.sla, tpot=None), profile_folder=profile_folder))


def test_an_unknown_system_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'vllm'"):
        emit("vlm", request())
