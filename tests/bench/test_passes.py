"""Single passes are the engine's own and leave no trace in it; their bytes are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun import SamplingParams
from forerun.bench.passes import PassBytes, PassShape, random_sequences
from forerun.errors import ConfigError
from forerun.models.families import decoder_config
from tests.tiny_models import tiny_config

ROWS = PassShape(context=20, num_sequences=1, rows=4)
SEQUENCES = PassShape(context=20, num_sequences=3, rows=1)


def test_rows_of_one_sequence_see_the_context_and_each_other(llm):
    with random_sequences(llm, [ROWS]) as sequences:
        batch = sequences.batch(ROWS)
        together = sequences.forward(batch)
        alone = []
        for row in range(ROWS.rows):
            one = sequences.batch(PassShape(context=ROWS.context + row, num_sequences=1, rows=1))
            alone.append(sequences.forward(replace(one, token_ids=batch.token_ids[row : row + 1])))
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)


def test_every_row_has_logits(llm):
    with random_sequences(llm, [ROWS]) as sequences:
        assert sequences.forward(sequences.batch(ROWS)).shape == (ROWS.rows, 128)


def test_all_sequences_have_the_same_context(llm):
    with random_sequences(llm, [SEQUENCES]) as sequences:
        batch = sequences.batch(SEQUENCES)
        logits = sequences.forward(replace(batch, token_ids=torch.full_like(batch.token_ids, 7)))
    torch.testing.assert_close(logits, logits[:1].expand(3, -1), atol=1e-5, rtol=0)


def test_a_context_computed_in_chunks_is_that_computed_at_once(llm, monkeypatch):
    def logits_after_sevens():
        monkeypatch.setattr(torch, "randint", lambda high, size, **_: torch.full(size, 7))
        with random_sequences(llm, [ROWS]) as sequences:
            return sequences.forward(sequences.batch(ROWS))

    at_once = logits_after_sevens()
    monkeypatch.setattr("forerun.bench.passes.PREFILL_ROWS", 7)
    torch.testing.assert_close(logits_after_sevens(), at_once, atol=1e-5, rtol=0)


def test_memory_is_given_back(llm):
    with random_sequences(llm, [ROWS, SEQUENCES]):
        assert llm.engine.state.kv_usage > 0
    assert llm.engine.state.kv_usage == 0


def test_texts_after_a_measurement_are_those_before(llm):
    prompt, sampling = list(range(3, 60)), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (before,) = llm.generate([prompt], sampling, use_tqdm=False)
    everything = PassShape(context=200, num_sequences=4, rows=1)
    with random_sequences(llm, [everything]) as sequences:
        sequences.forward(sequences.batch(everything))
    (after,) = llm.generate([prompt], sampling, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_sequences_beyond_max_model_len_are_refused(llm):
    with pytest.raises(ConfigError, match="257 tokens in sum; max_model_len is 256"):
        random_sequences(llm, [PassShape(context=250, num_sequences=1, rows=7)]).__enter__()


def test_more_sequences_than_memory_are_refused_and_none_is_kept(llm):
    with pytest.raises(ConfigError, match="KV memory holds 4 of 201 tokens each"):
        random_sequences(llm, [PassShape(context=200, num_sequences=9, rows=1)]).__enter__()
    assert llm.engine.state.kv_usage == 0


def fp32_limit(config):
    return PassBytes(config, torch.float32, weights=0)


def test_kv_is_a_key_and_a_value_per_layer_head_and_token():
    config = decoder_config(tiny_config("LlamaForCausalLM"))  # 3 layers, 2 KV heads of width 8
    assert fp32_limit(config).kv(100) == 100 * 3 * 2 * (8 + 8) * 4


def test_a_layer_with_a_window_reads_no_more_than_that():
    config = decoder_config(tiny_config("LlamaForCausalLM"))
    windowed = replace(config, windows=(10, None, 200))
    assert fp32_limit(windowed).kv(100) == (10 + 100 + 100) * 2 * (8 + 8) * 4
