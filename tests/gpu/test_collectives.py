"""Ranks on GPUs exchange what they shall, and write the texts of one."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_a_group_of_one_gpu_gathers_and_broadcasts_what_it_has():
    from forerun.ops.collectives import TorchCollectives

    device = torch.device("cuda", 0)
    alone = TorchCollectives(device, rank=0, num_ranks=1)
    alone.connect()
    rows = torch.randn(3, 5, device=device, dtype=torch.bfloat16)
    assert torch.equal(alone.gather(rows, [5]), rows)
    assert torch.equal(alone.broadcast(rows.clone()), rows)
    alone.finish()
    alone.abort()


@several
@pytest.mark.parametrize("method", ["none", "ngram"])
def test_two_gpus_write_the_texts_of_one(tmp_path, method):
    from forerun import LLM, SamplingParams
    from tests.tensor_parallel import save_model

    path = save_model(tmp_path)
    config = {"method": "ngram", "num_speculative_tokens": 4} if method == "ngram" else None
    prompts, sampling = [[7, 8, 9], list(range(20, 80))], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    texts = [
        [
            output.outputs[0].token_ids
            for output in LLM(
                str(path), device="cuda", dtype="float64", tensor_parallel_size=size, speculative_config=config
            ).generate(prompts, sampling, use_tqdm=False)
        ]
        for size in (1, 2)
    ]
    assert texts[0] == texts[1]
