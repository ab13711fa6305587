"""The trainer of `forerun train` learns what it is shown: a head that saw a few texts often drafts them almost without fault."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forerun import SamplingParams
from forerun.train.copied_block import begin_from_block
from forerun.train.eagle3_trainer import Eagle3Trainer, Eagle3TrainSettings
from forerun.train.packaging import save_head
from forerun.train.selection import LearnedText
from tests.engines import tiny_llm
from tests.native import needs_kernels
from tests.train.language import LENGTH, write
from tests.train.workshop import Workshop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

K = 3
PROMPT_LENGTH = 8


@needs_kernels
def test_texts_that_were_learnt_by_heart_are_drafted_almost_without_fault(tmp_path):
    (tmp_path / "workshop").mkdir()
    target = Workshop(tmp_path / "workshop").native_target_of(write)
    params = SamplingParams(temperature=0, max_tokens=LENGTH - PROMPT_LENGTH, ignore_eos=True)
    prompts = write(8, length=PROMPT_LENGTH, seed=5).tolist()
    outputs = tiny_llm(None, target=target).generate(prompts, params, use_tqdm=False)
    written = [np.array([*one.prompt_token_ids, *one.outputs[0].token_ids]) for one in outputs]
    texts = [
        LearnedText(number=i, token_ids=text, places=np.arange(PROMPT_LENGTH - 1, LENGTH - 1))
        for i, text in enumerate(written)
    ]
    settings = Eagle3TrainSettings(num_steps=200, batch_tokens=8 * LENGTH, learning_rate=4e-3, hybrid_share=0.0)
    draft_ids = torch.from_numpy(np.unique(written))
    trainer = Eagle3Trainer(target, *begin_from_block(target, draft_ids, seed=0), texts, settings)
    for _ in range(settings.num_steps):
        trainer.run_step()
    save_head(tmp_path / "head", trainer.content, trainer.tensors(), layout="speculators", target=target.path)
    config = {"method": "eagle3", "num_speculative_tokens": K, "model": str(tmp_path / "head")}
    drafting = tiny_llm(config, target=target)
    drafting.generate(prompts, params, use_tqdm=False)
    assert drafting.stats.speculation.acceptance_rate > 0.9
