"""The image and the services around it: what they build from, run, publish and mount."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from forerun.cli.app import build_app
from forerun.server.options import ServerOptions
from tests.server.served import chat_llm, served

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())


def instructions(name):
    """The arguments of an instruction in the last stage, in order."""
    last = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    return re.findall(rf"^{name} (.+)$", last, re.M)


def environment():
    return dict(pair.split("=", 1) for line in instructions("ENV") for pair in line.split())


def filled(text):
    """A value of compose.yaml with the defaults of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


# --- the image ------------------------------------------------------------------------------------


def test_nobody_runs_as_root():
    (user,) = instructions("USER")
    assert int(user.split(":")[0]) > 0
    assert DOCKERFILE.index("\nUSER ") < DOCKERFILE.index("\nENTRYPOINT ")


def test_what_is_copied_is_there_and_let_through():
    sources = [path for line in re.findall(r"^COPY ([^-].*)$", DOCKERFILE, re.M) for path in line.split()[:-1]]
    let_through = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {"src", "pyproject.toml"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in let_through


def test_the_torch_that_is_pinned_is_the_one_installed():
    (pinned,) = re.findall(r"^torch==[\d.]+$", (ROOT / "constraints.txt").read_text(), re.M)
    (line,) = re.findall(r"^RUN pip install (.*torch.*)$", DOCKERFILE, re.M)
    shown = subprocess.run(["sh", "-c", f"printf '%s\\n' {line}"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == f"{pinned}+cpu"


@pytest.mark.parametrize("arguments", ["image", "compose"])
def test_the_command_is_one_that_forerun_takes(arguments):
    (entry,) = map(json.loads, instructions("ENTRYPOINT"))
    (default,) = map(json.loads, instructions("CMD"))
    command = default if arguments == "image" else [filled(word) for word in SERVICES["forerun"]["command"]]
    assert entry == ["forerun"]
    build_app().parse_args(command, exit_on_error=False, print_error=False)


def test_options_in_the_environment_are_the_servers():
    names = {f"FORERUN_{field.name.upper()}" for field in fields(ServerOptions)} | {"FORERUN_CACHE"}
    assert {name for name in environment() if name.startswith("FORERUN_")} <= names
    assert environment()["FORERUN_CACHE"] in instructions("VOLUME")
    assert environment()["FORERUN_PORT"] in instructions("EXPOSE")


def test_the_health_check_tells_a_server_that_serves_from_one_that_does_not():
    (check,) = instructions("HEALTHCHECK")
    command = json.loads(check[check.index("CMD ") + 4 :])
    assert command[0] == "python"

    def run(port):
        variables = os.environ | {"FORERUN_PORT": str(port)}
        return subprocess.run([sys.executable, *command[1:]], env=variables, capture_output=True, timeout=60).returncode

    with served(chat_llm()) as server:
        assert run(server.server.port) == 0
    assert run(server.server.port) != 0


# --- the services ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_reachable_from_this_machine_only_and_has_no_more_rights_than_it_needs(name):
    service = SERVICES[name]
    assert service["ports"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"])


def test_what_is_mounted_is_there():
    for service in SERVICES.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith("./") else source in COMPOSE["volumes"]
    build = SERVICES["forerun"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_the_services_know_each_other_by_name():
    (job,) = PROMETHEUS["scrape_configs"]
    assert job["job_name"] == "forerun"
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": [f"forerun:{environment()['FORERUN_PORT']}"]}]
    (source,) = yaml.safe_load((DEPLOY / "grafana/datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert SERVICES["prometheus"]["ports"][0].endswith(":9090")


def test_grafana_reads_the_dashboard_from_where_it_is_mounted():
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in SERVICES["grafana"]["volumes"]}
    (provider,) = yaml.safe_load((DEPLOY / "grafana/dashboards.yaml").read_text())["providers"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounted[home] == "./grafana/forerun.json"
    assert Path(home).parent == Path(provider["options"]["path"])


def test_running_requests_get_their_time_when_the_container_stops():
    assert int(SERVICES["forerun"]["stop_grace_period"].removesuffix("s")) > ServerOptions().shutdown_timeout
    assert instructions("STOPSIGNAL") == ["SIGTERM"]
