"""`vllm bench serve`, vLLM's own load generator, against a server that drafts.

Needs vLLM in an environment of its own: python -m benchmarks.peers install vllm
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from benchmarks.serving import serving
from tests.slow.environments import interpreter_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "smollm2-135m"
NUM_PROMPTS, OUTPUT_LEN = 12, 32
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
    options = ("--max-model-len=1024", "--speculative-config.method=suffix")
    with serving(MODEL, *options, log=tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_every_request_is_completed_and_the_drafts_are_counted(vllm, server, backend, endpoint, tmp_path):
    options = {
        "--backend": backend,
        "--base-url": server.url,
        "--endpoint": endpoint,
        "--dataset-name": "random",
        "--random-input-len": 48,
        "--random-output-len": OUTPUT_LEN,
        "--num-prompts": NUM_PROMPTS,
        "--max-concurrency": 4,
        "--temperature": 0,
        "--result-dir": tmp_path,
        "--result-filename": "result.json",
    }
    words = [str(word) for option in options.items() for word in option]
    subprocess.run(
        [str(vllm), "-c", CODE, *words, "--ignore-eos", "--save-result"],
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0)
    assert result["total_output_tokens"] == NUM_PROMPTS * OUTPUT_LEN
    assert result["output_throughput"] > 0
    assert result["mean_ttft_ms"] > 0
    assert 0 < result["spec_decode_acceptance_rate"] <= 100
    assert result["spec_decode_acceptance_length"] > 1
    assert result["spec_decode_num_drafts"] > 0
    assert result["spec_decode_accepted_tokens"] <= result["spec_decode_draft_tokens"]
    assert result["spec_decode_per_position_acceptance_rates"]
