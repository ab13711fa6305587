"""`forerun serve` from the command line: sources of options, mistakes, and the end."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import FORERUN
from forerun.cli import loading
from forerun.cli.app import main
from forerun.cli.options import EngineOptions, ServingEngineOptions
from forerun.cli.serve import replica_spec
from forerun.deploy.disaggregated.options import PrefillOptions
from forerun.errors import ConfigError, ModelError
from forerun.server.options import ServerOptions
from tests.stand_in import save_stand_in


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a server would have been started with."""
    seen = SimpleNamespace(model=None, server=None, engine=None)

    class FakeServer:
        def __init__(self, load: Any, options: ServerOptions, *, report: Any) -> None:
            seen.server = options
            load()

        is_working = False

        def run(self) -> None:
            pass

    def load_llm(model: str, engine: EngineOptions) -> None:
        seen.model, seen.engine = model, engine

    monkeypatch.setattr("forerun.server.serve.Server", FakeServer)
    monkeypatch.setattr("forerun.server.serve.log_stats", lambda: None)
    monkeypatch.setattr(loading, "load_llm", load_llm)
    for name in [name for name in os.environ if name.startswith("FORERUN_")]:
        monkeypatch.delenv(name)
    return seen


def test_defaults(started: SimpleNamespace) -> None:
    assert main(["serve", "some-model"]) == 0
    assert started.model == "some-model"
    assert started.server == ServerOptions()
    assert started.engine == ServingEngineOptions()
    assert (started.server.host, started.server.port) == ("127.0.0.1", 8000)


def test_a_process_that_reads_prompts_is_started_where_it_is_asked_for(
    started: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    monkeypatch.setattr(loading, "load_disaggregated", lambda *given: loaded.append(given))
    assert main(["serve", "some-model", "--prefill-threads", "3", "--max-local-prefill-length", "0"]) == 0
    prefill = PrefillOptions(prefill_threads=3, max_local_prefill_length=0)
    assert loaded == [("some-model", ServingEngineOptions(), prefill)]
    assert started.model is None


def test_replicas_have_no_process_that_reads_prompts(
    started: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "some-model", "--prefill-threads", "1", "--replicas", "2"]) == 2
    assert "leave out --prefill-threads or --replicas" in capsys.readouterr().err
    assert started.server is None


def test_the_command_line_comes_before_the_environment_before_the_file(
    started: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model: of-file\nport: 1\nhost: 1.1.1.1\nmax_queue: 1\nmax-num-seqs: 1\ndtype: float32\n")
    monkeypatch.setenv("FORERUN_PORT", "2")
    monkeypatch.setenv("FORERUN_HOST", "2.2.2.2")
    monkeypatch.setenv("FORERUN_MAX_NUM_SEQS", "2")
    assert main(["serve", "--config", str(file), "--port", "3"]) == 0
    assert started.model == "of-file"
    assert (started.server.port, started.server.host, started.server.max_queue) == (3, "2.2.2.2", 1)
    assert (started.engine.max_num_seqs, started.engine.dtype) == (2, "float32")
    assert main(["serve", "of-command-line", "--config", str(file)]) == 0
    assert started.model == "of-command-line"
    monkeypatch.setenv("FORERUN_MODEL", "of-environment")
    assert main(["serve", "--config", str(file)]) == 0
    assert started.model == "of-environment"


def test_a_file_may_hold_everything(started: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "speculative_config: {method: ngram, num_speculative_tokens: 4}\n"
        "api_key: [one, two]\n"
        "enable_tokenizer_info_endpoint: true\n"
        "per_request_spec_decode_metrics: detailed\n"
        "shutdown_timeout: 2\n"
        "served_model_name: null\n"
    )
    assert main(["serve", "m", "--config", str(file)]) == 0
    assert started.engine.speculative_config == {"method": "ngram", "num_speculative_tokens": 4}
    assert started.server.api_key == ("one", "two")
    assert started.server.enable_tokenizer_info_endpoint is True
    assert started.server.per_request_spec_decode_metrics == "detailed"
    assert started.server.shutdown_timeout == 2


def test_sampling_defaults_reach_the_engine(started: SimpleNamespace, tmp_path: Path) -> None:
    main(["serve", "m", "--generation-config", "vllm", "--override-generation-config.max-new-tokens", "9"])
    settings = started.engine.settings()
    assert settings["generation_config"] == "vllm"
    assert settings["override_generation_config"] == {"max_new_tokens": 9}
    file = tmp_path / "server.yaml"
    file.write_text("generation_config: some/folder\noverride_generation_config: {top_p: 0.9, top_k: null}\n")
    main(["serve", "m", "--config", str(file)])
    assert started.engine.generation_config == "some/folder"
    assert started.engine.override_generation_config == {"top_p": 0.9, "top_k": None}


def test_keys_may_be_given_in_the_environment_and_several_times(
    started: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["serve", "m", "--api-key", "one", "--api-key", "two"])
    assert started.server.api_key == ("one", "two")
    monkeypatch.setenv("FORERUN_API_KEY", "secret")
    main(["serve", "m"])
    assert started.server.api_key == ("secret",)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("", "api_key: got an empty one; give a key"),
        (" ", "api_key: got an empty one; give a key"),
        ("secret\n", "begins or ends with white space"),
        (" secret", "begins or ends with white space"),
        ("sécret", "other characters than printable ASCII"),
        ("a\tb", "other characters than printable ASCII"),
    ],
)
def test_a_key_that_no_request_can_bear_does_not_open_the_server_and_is_not_shown(
    key: str,
    said: str,
    started: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FORERUN_API_KEY", key)
    assert main(["serve", "m"]) == 2
    assert said in (error := capsys.readouterr().err)
    assert "secret" not in error
    assert started.server is None


def test_a_key_in_the_environment_may_have_spaces(started: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_API_KEY", "my secret key")
    assert main(["serve", "m"]) == 0
    assert started.server.api_key == ("my secret key",)


def test_no_replica_watches_a_head(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"watch_head: replicas keep their heads; .* leave out --watch-head"):
        replica_spec("m", ServerOptions(watch_head=tmp_path), EngineOptions())


@pytest.mark.parametrize("name", ["max_connections", "client_timeout"])
def test_connections_of_replicas_are_those_of_rays_proxy(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: got 7, and connections are those of Ray's proxy"):
        replica_spec("m", ServerOptions(**{name: 7}), EngineOptions())


def test_options_of_replicas_are_refused_where_there_are_none(
    started: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "m", "--routing", "round-robin"]) == 2
    error = capsys.readouterr().err
    assert "routing: got round-robin, which is for replicas, and there are none; give --replicas 1 or more" in error
    assert error.count("\n") == 1
    assert started.server is None


def test_speculation_may_be_given_in_the_environment(started: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_SPECULATIVE_CONFIG", '{"method": "ngram", "num_speculative_tokens": 3}')
    main(["serve", "m"])
    assert started.engine.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prot: 8001\n", "unknown key 'prot'; did you mean 'port'?"),
        ("config: other.yaml\n", "unknown key 'config'"),
        ("chat: 1\n", "unknown key 'chat'"),  # a command's name
        ("port: 1.5\n", "--port: got 1.5; must be a whole number"),
        ("- port\n", "holds no options"),
        ("port: many\n", "many"),
        ("port: 1\nport: 2\n", "twice"),
        ("max_queue: 1\nmax-queue: 2\n", "has max-queue twice, with hyphens and with underscores"),
        ("port: [\n", "neither YAML nor JSON"),
        ("port: 70000\n", "must be from 0"),
        ("api_key: ['']\n", "got an empty one"),
    ],
)
def test_a_bad_file_is_reported_in_one_line(
    text: str, expected: str, started: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    assert main(["serve", "m", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert expected in error


def test_a_model_of_nothing_in_the_file_is_none(
    started: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "server.yaml").write_text("model: null\n")
    assert main(["serve", "--config", str(tmp_path / "server.yaml")]) == 2
    assert "MODEL" in capsys.readouterr().err
    assert started.model is None


def test_a_missing_file_is_reported_in_one_line(started: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--config", "nowhere.yaml"]) == 2
    assert "cannot read nowhere.yaml" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install() -> None:
    code = f"import sys; sys.modules['fastapi'] = None; {FORERUN[-1]}"
    program = subprocess.run([sys.executable, "-c", code, "serve", "m"], capture_output=True, text=True, timeout=60)
    assert program.returncode == 2
    assert program.stderr.count("\n") == 1
    assert "pip install 'forerun[serve]'" in program.stderr


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def test_a_port_that_is_reserved_is_one_line_and_exit_code_2(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--port", str(taken)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"--port {taken}" in error
    assert "give another --port" in error


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.name.invalid", "no..name", "a" * 64])
def test_an_address_of_another_machine_is_not_blamed_on_the_port(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--host", host, "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert f"--host {host}" in error
    assert error.endswith("; give an address of this machine as --host, or 0.0.0.0 for all of them\n")


def test_a_port_for_which_rights_lack_is_advised_against(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_socket: socket.socket, _address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    assert main(["serve", "m", "--port", "80"]) == 2
    assert capsys.readouterr().err.endswith("(Permission denied); give a --port above 1023\n")


def test_a_model_without_a_name_is_not_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--served-model-name", ""]) == 2
    assert "served_model_name: got an empty one; give a name" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(model: str, options: object) -> None:
        raise ModelError(f"model {model!r}: there is no such folder")

    monkeypatch.setattr(loading, "load_llm", fail)
    assert main(["serve", "./nowhere", "--port", "0", "--disable-log-stats"]) == 2
    assert capsys.readouterr().err == "error: model './nowhere': there is no such folder\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_finish_and_ends_with_0(number: signal.Signals, tmp_path: Path) -> None:
    model = save_stand_in(tmp_path)
    program = subprocess.Popen(
        [*FORERUN, "serve", str(model), "--port", "0", "--max-model-len", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    url = next(line for line in program.stdout if line.startswith("ready: ")).split()[1]
    body = b'{"prompt": "hello", "max_tokens": 900, "ignore_eos": true, "stream": true}'
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.readline()
        program.send_signal(number)
        lines = answer.read().decode().strip().split("\n\n")
    _, errors = program.communicate(timeout=30)
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in lines[-2]
    assert program.returncode == 0
    assert "Traceback" not in errors


HANGING = """
import threading
from forerun.cli import loading
from forerun.server import engine_thread

def load(*arguments, load=loading.load_llm):
    llm = load(*arguments)
    llm.engine.step = threading.Event().wait
    return llm

loading.load_llm, engine_thread.LAST_STEP_S = load, 0.1
"""


def test_a_step_that_hangs_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    program = subprocess.Popen(
        [
            *(sys.executable, "-c", HANGING + FORERUN[-1]),
            *("serve", str(save_stand_in(tmp_path)), "--port", "0", "--shutdown-timeout", "0"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    url = next(line for line in program.stdout if line.startswith("ready: ")).split()[1]
    body = b'{"prompt": "hello", "stream": true}'
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        program.send_signal(signal.SIGTERM)
        assert answer.read().decode().endswith("data: [DONE]\n\n")
    try:
        _, errors = program.communicate(timeout=20)
    finally:
        program.kill()
    assert program.returncode == 0
    assert "has not ended within 0.1 s" in errors
    assert "Traceback" not in errors
