"""How much memory the default model takes, resident at the worst, beyond what nobody can do without."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from forerun.drafters.auto import DEFAULT_MEMORY
from forerun.ops.native.formats import lossless_format
from forerun.ops.native.library import load_kernels
from tests.native import needs_kernels

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PEAK = "print(next(int(line.split()[1]) * 1024 for line in open('/proc/self/status') if line.startswith('VmHWM')))"
GENERATE = """
from forerun import LLM, SamplingParams
llm = LLM("smollm2-135m", dtype="bfloat16", max_model_len=512, max_num_seqs=8, enable_prefix_caching=False)
sampling = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
llm.generate({"prompt_token_ids": list(range(100, 196))}, sampling, use_tqdm=False)
"""
PLAIN = GENERATE.replace("max_model_len", "speculative_config=None, max_model_len")
CONTINUE = """
from forerun import LLM, SamplingParams
llm = LLM(path)
llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
"""
NUM_WEIGHTS = 134_515_008  # the head is the embedding
KV = (96 + 256) * 30 * 3 * (64 + 64) * 2  # bytes: tokens, layers, heads, key and value, bf16
GEMMA3_KV = 12 * 18 * 1 * (256 + 256) * 2


def peak(code):
    """Bytes resident at the worst in a process that runs this."""
    ended = subprocess.run([sys.executable, "-c", code + PEAK], capture_output=True, text=True, check=True)
    return int(ended.stdout.split()[-1])


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("code", "drafters"),
    [(GENERATE, DEFAULT_MEMORY * 2 * NUM_WEIGHTS), (PLAIN, 0)],
    ids=["with drafts", "without drafts"],
)
def test_the_default_model_takes_a_tenth_more_than_weights_kv_torch_and_what_drafters_may(code, drafters):
    kernels = load_kernels()
    weights = NUM_WEIGHTS * lossless_format(torch.bfloat16, level=kernels.level).bytes_per_weight
    peak(code)  # packs the weights, which takes more, where no start has kept them yet
    assert peak(code) < 1.1 * (weights + KV + peak("import torch\n") + drafters)


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_every_start_of_a_gguf_model_takes_a_quarter_more_than_its_file_kv_and_torch(gemma3, tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    most = 1.25 * (gemma3.stat().st_size + GEMMA3_KV + peak("import torch\n"))
    first = peak(f"path = {str(gemma3)!r}" + CONTINUE)
    assert list(tmp_path.glob("packed/*bf16*"))
    second = peak(f"path = {str(gemma3)!r}" + CONTINUE)
    assert max(first, second) < most
