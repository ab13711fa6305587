"""The worker as Dynamo drives it: what it registers, how it fails, and that it ends in order."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
from dataclasses import replace

import pytest

from forerun.deploy.dynamo.options import WorkerOptions
from forerun.deploy.dynamo.worker_group import WorkerGroup, text_configuration
from forerun.errors import ConfigError, ModelError
from tests.contract.drafters import NGRAM
from tests.contract.test_contract import assert_nothing_is_held
from tests.deploy.dynamo import fake_dynamo
from tests.deploy.dynamo.fake_dynamo import Context, EngineShutdown, InvalidArgument, Runtime, Unknown
from tests.deploy.dynamo.sent import sent
from tests.engines import tiny_llm

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Dynamo runs on Linux only")


@pytest.fixture
def folder(tmp_path):
    """A model's folder, as far as the frontend needs it."""
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.fixture
def serve(folder, monkeypatch):
    """Runs a worker over a model while a scenario lasts; what the runtime saw."""

    def run(load, scenario=None, **options):
        async def nothing(engine):
            pass

        runtime = Runtime(scenario or nothing)
        fake_dynamo.install(monkeypatch, runtime)
        worker = importlib.import_module("forerun.deploy.dynamo.worker")
        given = WorkerOptions(**({"workers_folder": folder / "workers"} | options))
        try:
            worker.run_worker(load, path=folder, name="tiny", options=given)
        finally:
            sys.modules.pop("forerun.deploy.dynamo.worker", None)
        return runtime

    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    return run


async def answer(engine, request, request_id="some-id"):
    chunks = [chunk async for chunk in engine.generate(request, Context(request_id))]
    return [token_id for chunk in chunks for token_id in chunk["token_ids"]]


def test_the_router_is_told_of_the_kv_memory_and_of_the_drafts(serve, folder):
    llm = tiny_llm(NGRAM, max_num_seqs=8, max_num_batched_tokens=64)
    runtime = serve(lambda: llm, namespace="here", tool_call_parser="hermes", kv_events=False)
    registered, settings = runtime.registration, runtime.registration.llm
    assert (registered.model, registered.served_model_name) == (str(folder), "tiny")
    assert registered.runtime_data == {"spec_decode": {"nextn": llm.speculative.num_speculative_tokens}}
    assert (settings.context_length, settings.kv_cache_block_size, settings.total_kv_blocks) == (128, 4, 512)
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (8, 64)
    config = runtime.config
    assert (config.namespace, config.component, config.endpoint) == ("here", "backend", "generate")
    assert (config.discovery_backend, config.request_plane, config.event_plane) == ("file", "tcp", "zmq")
    assert (config.tool_call_parser, config.enable_kv_routing) == ("hermes", False)
    assert runtime.prefixes == ["vllm:", "forerun:"]
    assert serve(tiny_llm).registration.runtime_data is None


def test_requests_events_and_load_go_through(serve):
    async def scenario(engine):
        assert len(await answer(engine, sent(list(range(20, 60)), stop={"max_tokens": 5}))) == 5
        assert len(await answer(engine, await engine.health_check_payload())) == 1

    runtime = serve(tiny_llm, scenario)
    assert runtime.stored[0]["token_ids"][:40] == list(range(20, 60))
    assert {rank for rank, _ in runtime.snapshots} == {0}
    assert runtime.snapshots[0][1].gpu_cache_usage == runtime.snapshots[0][1].kv_used_blocks / 512


def test_errors_are_told_apart_by_whose_mistake_they_are(serve, monkeypatch):
    llm = tiny_llm()

    def lacks_a_package(*_request):
        raise ConfigError("structured_outputs: llguidance is not installed")

    async def scenario(engine):
        with pytest.raises(InvalidArgument, match=r"sampling_options\.n"):
            await answer(engine, sent(sampling={"n": 2}))
        with monkeypatch.context() as patch:
            patch.setattr(type(llm.engine), "accept", lacks_a_package)
            with pytest.raises(Unknown, match="is not installed"):
                await answer(engine, sent(stop={"max_tokens": 3}))
        with monkeypatch.context() as patch:
            patch.setattr(type(llm.engine), "step", lambda self: (_ for _ in ()).throw(RuntimeError("boom")))
            with pytest.raises(Unknown, match="failed on a step"):
                await answer(engine, sent(stop={"max_tokens": 3}))
        assert len(await answer(engine, sent(stop={"max_tokens": 3}))) == 3

    serve(lambda: llm, scenario)
    assert_nothing_is_held(llm)


def test_an_abort_ends_the_request(serve):
    llm = tiny_llm()

    async def scenario(engine):
        stream = engine.generate(sent(stop={"max_tokens": 100, "ignore_eos": True}), Context("some-id"))
        await anext(stream)
        await engine.abort(Context("some-id"))
        assert [chunk async for chunk in stream][-1]["finish_reason"] == "cancelled"

    serve(lambda: llm, scenario)
    assert_nothing_is_held(llm)


def test_a_worker_whose_engine_has_ended_sends_its_streams_elsewhere_and_ends(serve, monkeypatch):
    signals = []
    monkeypatch.setattr("os.kill", lambda process, number: signals.append(number))

    async def scenario(engine):
        await asyncio.to_thread(engine._service._engine.stop)
        for _ in range(2):
            with pytest.raises(EngineShutdown):
                await answer(engine, sent())

    with pytest.raises(SystemExit) as ended:
        serve(tiny_llm, scenario)
    assert ended.value.code == 1
    assert signals == [signal.SIGTERM]


def test_a_request_that_comes_too_late_goes_elsewhere(serve):
    kept = []

    async def scenario(engine):
        kept.append(engine)

    serve(tiny_llm, scenario)
    with pytest.raises(EngineShutdown):
        asyncio.run(answer(kept[0], sent()))


def test_a_model_that_cannot_be_loaded_is_reported_as_ever(serve):
    def load():
        raise ModelError("model 'x': there is no such folder")

    with pytest.raises(ModelError, match="no such folder"):
        serve(load)


def test_a_worker_that_would_write_other_texts_does_not_start_beside_others(serve, folder):
    others = WorkerGroup(folder / "workers" / "workers", WorkerOptions().address)
    others.join(text_configuration(tiny_llm(seed=1)))
    with pytest.raises(ConfigError, match="run with seed 1, this one has 0"):
        serve(tiny_llm)
    serve(lambda: tiny_llm(seed=1, max_num_seqs=3))
    serve(tiny_llm, component="another")
    others.leave()
    serve(tiny_llm)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"tool_call_parser": "none"}, "--tool-call-parser: got 'none'; may be hermes"),
        ({"reasoning_parser": "none"}, "--reasoning-parser: got 'none'; may be qwen3"),
    ],
)
def test_parsers_that_dynamo_does_not_have_are_refused(serve, options, hint):
    with pytest.raises(ConfigError, match=hint):
        serve(tiny_llm, **options)


def test_a_model_without_tokenizer_is_refused(serve, folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"Dynamo's frontend reads tokenizer.json"):
        serve(tiny_llm)


def test_where_workers_see_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "found"))
    options = WorkerOptions()
    assert options.shared_folder == tmp_path / "found.forerun"
    assert replace(options, discovery_folder=tmp_path / "mine").shared_folder == tmp_path / "mine.forerun"
    assert replace(options, discovery_backend="etcd").shared_folder is None
    assert replace(options, discovery_backend="etcd", workers_folder=tmp_path).shared_folder == tmp_path


def test_the_folder_of_discovery_is_given_to_dynamos_runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("DYN_FILE_KV", "before")
    WorkerOptions().set_environment()
    assert os.environ["DYN_FILE_KV"] == "before"
    WorkerOptions(discovery_folder=tmp_path).set_environment()
    assert os.environ["DYN_FILE_KV"] == str(tmp_path)


@pytest.mark.parametrize("name", ["namespace", "component", "endpoint_name"])
def test_an_empty_name_is_refused(name):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: got an empty name"):
        WorkerOptions(**{name: ""})
