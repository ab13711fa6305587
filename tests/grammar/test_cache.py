"""A grammar is compiled once, and a model that cannot serve any says why."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from forerun import SamplingParams, StructuredOutputs
from forerun.engine.client import EngineRequest
from forerun.errors import ConfigError, RequestError
from forerun.grammar import compiler
from forerun.grammar.cache import MAX_CACHED, GrammarCache
from tests.engines import tiny_llm
from tests.grammars import EOS, begin, encode, grammars, text_target, tokenizer
from tests.native import needs_kernels
from tests.stand_in import VOCAB_SIZE


def test_a_grammar_is_compiled_once(monkeypatch):
    wanted = StructuredOutputs(regex="compiled once")
    first = grammars().prepare(wanted)
    monkeypatch.setattr(compiler.subprocess, "run", None)
    assert grammars().prepare(StructuredOutputs(regex="compiled once")) is first


def test_the_least_recently_used_grammar_is_dropped(monkeypatch):
    monkeypatch.setattr(compiler, "_check_in_sandbox", lambda source, kind: None)
    some = GrammarCache(tokenizer(), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
    first, second = (some.prepare(StructuredOutputs(regex=text)) for text in ("x", "y"))
    for number in range(MAX_CACHED - 1):
        some.prepare(StructuredOutputs(regex=f"a{number}"))
        assert some.prepare(StructuredOutputs(regex="x")) is first
    assert some.prepare(StructuredOutputs(regex="y")) is not second


@needs_kernels
def test_a_grammar_is_compiled_when_its_request_is_accepted_and_not_in_a_step(monkeypatch):
    engine = tiny_llm(target=text_target()).engine
    sampling = SamplingParams(structured_outputs={"choice": ["ahead"]}, temperature=0)
    engine.accept(EngineRequest(request_id="a", prompt_ids=[1], sampling=sampling))
    monkeypatch.setattr(compiler.subprocess, "run", None)
    engine.submit("a")
    texts = [delta.text for _ in range(9) for delta in engine.step().deltas]
    assert "".join(texts) == "ahead"
    assert not engine.has_work


def test_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(RequestError, match="needs a tokenizer"):
        tiny_llm().generate([[1]], SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)


@needs_kernels
def test_a_model_without_an_end_is_refused():
    llm = tiny_llm(target=replace(text_target(), eos_token_ids=frozenset()))
    with pytest.raises(RequestError, match="needs a token that ends the text"):
        llm.generate([[1]], SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)


@needs_kernels
def test_without_llguidance_the_extra_is_named(monkeypatch):
    plain = importlib.util.find_spec
    monkeypatch.setattr("forerun.grammar.cache.find_spec", lambda name: None if name == "llguidance" else plain(name))
    llm = tiny_llm(target=text_target())
    with pytest.raises(ConfigError, match=r"pip install 'forerun\[structured\]'"):
        llm.generate([[1]], SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)
    assert llm.generate([[1]], SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def test_sequences_share_the_mask_of_the_end():
    masks = [begin(regex="a").allowed(encode("a"), [EOS]) for _ in range(2)]
    assert masks[0].data_ptr() == masks[1].data_ptr()
    assert masks[0].nonzero().flatten().tolist() == [EOS]
