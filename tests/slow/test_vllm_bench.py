"""`vllm bench serve`, vLLM's own load generator, against a server that drafts and against replicas on Ray.

Needs vLLM and Ray in environments of their own: python -m benchmarks.peers install vllm ray
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from benchmarks.serving import serving
from tests.slow.environments import interpreter_of
from tests.slow.ray_services import needs_two_cores
from tests.slow.ray_services import serving as ray_serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "smollm2-135m"
NUM_PROMPTS, OUTPUT_LEN = 12, 32
OPTIONS = ("--max-model-len=1024", "--speculative-config.method=suffix")
# `vllm bench serve` without vLLM's other commands, which ask for the name of the distribution built for GPUs.
CODE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.fixture(scope="module")
def vllm():
    """The interpreter of vLLM's environment."""
    return interpreter_of("vllm")


@pytest.fixture(scope="module")
def server(vllm, tmp_path_factory):
    with serving(MODEL, *OPTIONS, log=tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def replicas(vllm):
    """Two replicas; where there is no client none is started."""
    with ray_serving("--replicas", 2, *OPTIONS) as service:
        yield service


both_endpoints = pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)


@both_endpoints
def test_every_request_is_completed_and_the_drafts_are_counted(vllm, server, backend, endpoint, tmp_path):
    check(bench(vllm, server.url, backend, endpoint, tmp_path))


@needs_two_cores
@both_endpoints
def test_replicas_on_ray_complete_every_request_and_the_drafts_of_both_are_counted(
    vllm, replicas, backend, endpoint, tmp_path
):
    before = replicas.metric("vllm:spec_decode_num_drafts_total")
    result = bench(vllm, replicas.url.removesuffix("/v1"), backend, endpoint, tmp_path)
    after = replicas.metric("vllm:spec_decode_num_drafts_total")
    check(result)
    drafts = {engine: after[engine] - before.get(engine, 0.0) for engine in after}
    assert result["spec_decode_num_drafts"] == sum(drafts.values())
    assert all(drafts.values()), drafts


def bench(vllm, url, backend, endpoint, folder):
    """What `vllm bench serve` reports of a server."""
    options = {
        "--backend": backend,
        "--base-url": url,
        "--endpoint": endpoint,
        "--dataset-name": "random",
        "--random-input-len": 48,
        "--random-output-len": OUTPUT_LEN,
        "--num-prompts": NUM_PROMPTS,
        "--max-concurrency": 4,
        "--temperature": 0,
        "--result-dir": folder,
        "--result-filename": "result.json",
    }
    words = [str(word) for option in options.items() for word in option]
    subprocess.run(
        [str(vllm), "-c", CODE, *words, "--ignore-eos", "--save-result"],
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
    )
    return json.loads((folder / "result.json").read_text())


def check(result):
    """Every request was completed, and tokens were drafted and accepted."""
    assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0)
    assert result["total_output_tokens"] == NUM_PROMPTS * OUTPUT_LEN
    assert result["output_throughput"] > 0
    assert result["mean_ttft_ms"] > 0
    assert 0 < result["spec_decode_acceptance_rate"] <= 100
    assert result["spec_decode_acceptance_length"] > 1
    assert result["spec_decode_num_drafts"] > 0
    assert result["spec_decode_accepted_tokens"] <= result["spec_decode_draft_tokens"]
    assert result["spec_decode_per_position_acceptance_rates"]
