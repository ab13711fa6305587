"""`forerun dynamo-worker` from the command line: its options, and what it says where Dynamo is not there."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace

import pytest

from forerun.cli import loading
from forerun.cli.app import main
from forerun.cli.options import ServingEngineOptions
from forerun.deploy.dynamo import installation
from forerun.deploy.dynamo.options import WorkerOptions


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What a worker would have been started with."""
    seen = SimpleNamespace(model=None, engine=None, path=None, name=None, options=None)
    worker = ModuleType("forerun.deploy.dynamo.worker")

    def run_worker(load, *, path, name, options):
        seen.path, seen.name, seen.options = path, name, options
        load()

    def load_llm(model, engine):
        seen.model, seen.engine = model, engine

    worker.run_worker = run_worker
    monkeypatch.setitem(sys.modules, "forerun.deploy.dynamo.worker", worker)
    monkeypatch.setattr(installation, "version", lambda package: "1.6.1")
    monkeypatch.setattr(loading, "load_llm", load_llm)
    for name in ("DYN_NAMESPACE", "DYN_DISCOVERY_BACKEND", "FORERUN_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    seen.folder = str(tmp_path)
    return seen


def test_defaults_need_no_service(started):
    assert main(["dynamo-worker", started.folder]) == 0
    assert (started.model, started.name, str(started.path)) == (started.folder,) * 3
    assert started.engine == ServingEngineOptions()
    assert started.options == WorkerOptions()
    planes = started.options.discovery_backend, started.options.request_plane, started.options.event_plane
    assert planes == ("file", "tcp", "zmq")


def test_engine_and_worker_options(started):
    options = [
        "--served-model-name",
        "m",
        "--speculative-config.method",
        "suffix",
        "--no-kv-events",
        "--max-num-seqs",
        "4",
    ]
    assert main(["dynamo-worker", started.folder, *options]) == 0
    assert (started.name, started.options.kv_events) == ("m", False)
    assert started.engine == ServingEngineOptions(speculative_config={"method": "suffix"}, max_num_seqs=4)


def test_dynamos_own_variables_count(started, monkeypatch):
    monkeypatch.setenv("DYN_NAMESPACE", "theirs")
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "kubernetes")
    assert main(["dynamo-worker", started.folder, "--discovery-backend", "etcd"]) == 0
    assert (started.options.namespace, started.options.discovery_backend) == ("theirs", "etcd")


@pytest.mark.parametrize("found", [None, "1.4.2"])
def test_without_dynamo_or_with_another_one_the_command_says_what_to_install(started, monkeypatch, capsys, found):
    def version(package):
        if found is None:
            raise PackageNotFoundError(package)
        return found

    monkeypatch.setattr(installation, "version", version)
    assert main(["dynamo-worker", started.folder]) == 2
    message = capsys.readouterr().err
    assert f"needs ai-dynamo 1.6.1, got {found or 'none'}; pip install 'forerun[dynamo]'" in message.replace("\n", " ")
    assert started.model is None


def test_a_model_that_is_not_there_is_said_before_dynamo_starts(started, capsys):
    assert main(["dynamo-worker", "./nowhere"]) == 2
    assert "there is no such folder" in capsys.readouterr().err.replace("\n", " ")
    assert started.path is None
