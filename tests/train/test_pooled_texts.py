"""Answers that a server kept are trained on, but for those under a cache salt."""

from __future__ import annotations

import pytest

from forerun import LLM, SamplingParams
from forerun.drafters.pool_files import ModelIdentity
from forerun.errors import ConfigError
from forerun.models.fingerprint import fingerprint_of_files
from forerun.train.pooled_texts import NUM_READ, read_pooled_texts
from tests.native import needs_kernels
from tests.train.target_folder import chat_model_folder

pytestmark = needs_kernels


def identity():
    return ModelIdentity(fingerprint=fingerprint_of_files(chat_model_folder()), name="small")


def answer(folder, prompts):
    """Let an engine with pools answer, and return the answers' tokens."""
    config = {"method": "auto", "auto_memory": 100}
    llm = LLM(str(chat_model_folder()), max_model_len=128, speculative_config=config, pools_folder=str(folder))
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.executor.pools.save()
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_answers_are_read_from_a_folder_and_salted_ones_are_not(tmp_path):
    prompts = [
        {"prompt_token_ids": [5, 6, number], "cache_salt": "mine" if number == 8 else None} for number in (7, 8, 9)
    ]
    first, _, last = answer(tmp_path, prompts)
    texts = read_pooled_texts(tmp_path, identity(), most_tokens=40)
    assert {tuple(text.token_ids.tolist()) for text in texts if text.spans} == {first, last}
    assert all(text.spans == ((NUM_READ, 40),) for text in texts if text.spans)


def test_long_answers_are_cut(tmp_path):
    (whole,) = answer(tmp_path, [[5, 6, 7]])
    (text,) = (text for text in read_pooled_texts(tmp_path, identity(), most_tokens=30) if text.spans)
    assert tuple(text.token_ids.tolist()) == whole[:30]
    assert text.spans == ((NUM_READ, 30),)


def test_pools_without_answers_are_refused(tmp_path):
    answer(tmp_path, [{"prompt_token_ids": [5, 6, 7], "cache_salt": "mine"}])
    with pytest.raises(ConfigError, match="has no answer of more than 17 tokens of a request without cache_salt"):
        read_pooled_texts(tmp_path, identity(), most_tokens=40)
    with pytest.raises(ConfigError, match="pools of another model"):
        read_pooled_texts(
            next(tmp_path.glob("*.pools")), ModelIdentity(fingerprint="other", name="other"), most_tokens=40
        )
    with pytest.raises(ConfigError, match="there is no such file"):
        read_pooled_texts(tmp_path / "absent.pools", identity(), most_tokens=40)
