"""Prompts read by another process: the default model's texts to the bit, and what happens when that process is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest

from forerun import LLM, SamplingParams
from forerun.bench.prompts import WORKLOADS
from forerun.deploy.disaggregated.llm import DisaggregatedLLM
from tests.native import needs_kernels
from tests.tensor_parallel import cores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_kernels]
MODEL = "smollm2-135m"
READER = "forerun.deploy.disaggregated.prefill"
PROMPTS = [text * 3 for texts in WORKLOADS.values() for text in texts]
SAMPLING = [
    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, logprobs=3, ignore_eos=True)
    for i in range(len(PROMPTS))
]


def written(llm):
    outputs = llm.generate(PROMPTS, SAMPLING, use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


def readers():
    """The processes of this one that read prompts."""
    return [
        one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE and READER in one.cmdline()
    ]


@pytest.fixture
def two_cores():
    """At least two threads, whatever the machine has."""
    with cores(2):
        yield


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_config": None},
        {"speculative_config": "auto"},
        {"speculative_config": {"method": "self", "exit_layer": 4, "num_speculative_tokens": 3}},
        {"speculative_config": {"method": "draft_model", "model": MODEL, "num_speculative_tokens": 3}},
        {"dtype": "float32", "speculative_config": None},
        {"quantization": "int8"},
    ],
    ids=str,
)
def test_the_default_model_writes_the_same_in_two_processes(settings):
    expected = written(LLM(MODEL, max_model_len=1024, **settings))
    llm = DisaggregatedLLM(MODEL, max_model_len=1024, max_local_prefill_length=32, **settings)
    assert written(llm) == expected
    assert llm.transfers.num_prompts > len(PROMPTS) // 2
    assert llm.transfers.num_failures == 0
    assert readers()
    llm.close()
    assert not readers()


@pytest.mark.usefixtures("two_cores")
def test_a_process_that_is_killed_while_it_reads_costs_no_request():
    expected = written(LLM(MODEL, max_model_len=1024))
    llm = DisaggregatedLLM(MODEL, max_model_len=1024, max_local_prefill_length=0)
    (reader,) = readers()
    threading.Timer(0.1, os.kill, (reader.pid, signal.SIGKILL)).start()
    assert written(llm) == expected
    assert llm.transfers.num_failures > 0
    assert written(llm) == expected
    llm.close()


def test_a_server_streams_what_one_engine_writes_and_takes_the_reader_with_it_when_it_ends():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    words = [MODEL, "--prefill-threads", "1", "--max-model-len", "1024", "--port", str(port), "--disable-log-stats"]
    program = [sys.executable, "-c", "from forerun.cli.program import program; program()"]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    with subprocess.Popen([*program, "serve", *words], stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert any(line.startswith("ready:") for line in server.stdout)
            (reader,) = [one for one in psutil.Process(server.pid).children() if READER in one.cmdline()]
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            with ThreadPoolExecutor(8) as threads:
                given = {"model": MODEL, "max_tokens": 24, "temperature": 0.8, "seed": 5, "stream": True}
                streams = list(
                    threads.map(
                        lambda text: "".join(streamed(client.completions.create(prompt=text, **given))), PROMPTS[:8]
                    )
                )
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    sampling = SamplingParams(max_tokens=24, temperature=0.8, seed=5)
    expected = LLM(MODEL, max_model_len=1024).generate(PROMPTS[:8], sampling, use_tqdm=False)
    assert streams == [one.outputs[0].text for one in expected]
    assert not reader.is_running()


def streamed(stream):
    """The texts of a stream's chunks."""
    return [chunk.choices[0].text for chunk in stream if chunk.choices]


def test_the_reader_ends_with_the_process_that_answers(tmp_path):
    program = (
        "from forerun.deploy.disaggregated.llm import DisaggregatedLLM\n"
        "import psutil, time, torch\n"
        "torch.set_num_threads(2)\n"
        f"llm = DisaggregatedLLM({MODEL!r}, max_model_len=256)\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        pid = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 2
    while Path("/proc", str(pid), "cwd").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path("/proc", str(pid), "cwd").exists()
