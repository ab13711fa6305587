"""A sequence's place in its grammar is a function of the text, wherever the matcher was sent before."""

from __future__ import annotations

import json
import random
import re
import threading
import time

import pytest
import torch

from forerun import SamplingParams
from forerun.core.structured_outputs import StructuredOutputs
from forerun.errors import RequestError
from forerun.grammar.compiler import CompiledGrammar, Compiler
from forerun.grammar.sequence import SequenceGrammar
from forerun.ops.grammar import GrammarNotReadyError
from tests.engines import tiny_llm
from tests.grammars import EOS, SCHEMA, begin, encode, text_target, tokenizer
from tests.native import needs_kernels
from tests.stand_in import VOCAB_SIZE

HEAVY = {"regex": "[x-z]{3}" + "(.?a?)" * 300 + "(.?b?)" * 300}
"""Takes more work than a grammar may after three characters."""


SPECIAL = {0, 1, 2}
"""Tokens of the tiny tokenizer that spell no text."""


def spelled(text):
    """Token ids of a text, none of them special."""
    return [token_id for part in re.split(r"(?<=<)", text) for token_id in encode(part)]


def allowed(grammar, output_ids, path=()):
    """Ids of the tokens that may follow; asked again until the grammar is ready."""
    while True:
        try:
            return grammar.allowed(output_ids, path).nonzero().flatten().tolist()
        except GrammarNotReadyError:
            time.sleep(0.001)


@pytest.mark.parametrize(
    ("text", "following"),
    [("", "ab"), ("a", "ab"), ("aa", "ab"), ("b", "c"), ("bc", "")],
)
def test_only_tokens_that_lead_on_are_allowed(text, following):
    ends = [EOS] if text == "bc" else []
    assert allowed(begin(regex="a*bc"), encode(text)) == sorted(encode(following) + ends)


def test_the_end_is_allowed_where_the_text_is_complete():
    grammar = begin(regex="ab?")
    assert allowed(grammar, encode("")) == encode("a")
    assert allowed(grammar, encode("a")) == sorted([EOS, *encode("b")])
    assert allowed(grammar, encode("a"), encode("b")) == [EOS]


def test_after_the_end_comes_only_the_end():
    grammar = begin(regex="ab?")
    assert allowed(grammar, encode("a"), [EOS]) == [EOS]
    assert allowed(grammar, encode("a"), [EOS, *encode("b")]) == [EOS]
    assert allowed(grammar, encode("a"), encode("b")) == [EOS]


def test_nothing_is_allowed_after_what_cannot_be():
    grammar = begin(regex="abc")
    assert allowed(grammar, encode("a"), encode("xy")) == []
    assert allowed(grammar, encode("a"), encode("b")) == encode("c")


def test_a_walk_along_drafts_and_back_is_as_good_as_a_fresh_start():
    source, walked, output_ids = random.Random(0), begin(json=SCHEMA), []
    for _ in range(40):
        choices = [t for t in allowed(walked, output_ids) if t != EOS]
        if not choices:
            break
        for _ in range(3):  # questions about drafts, right and wrong
            path = []
            for _ in range(source.randrange(4)):
                following = allowed(walked, output_ids, path)
                assert following == allowed(begin(json=SCHEMA), output_ids, path)
                path.append(source.choice(following) if source.random() < 0.8 and following else source.randrange(264))
            fresh = begin(json=SCHEMA)
            assert walked.num_possible(output_ids, path) == fresh.num_possible(output_ids, path)
            assert walked.forced(output_ids) == fresh.forced(output_ids)
        output_ids = [*output_ids, source.choice(choices)]
    assert len(output_ids) > 20


def test_drafts_are_possible_as_far_as_they_lead():
    grammar, start = begin(regex="abc|abe"), encode("a")
    assert grammar.num_possible(start, encode("bcx")) == 2
    assert grammar.num_possible(start, [*encode("bc"), EOS, EOS]) == 3
    assert grammar.num_possible(start, encode("x")) == 0
    assert grammar.num_possible(start, [EOS]) == 0
    assert grammar.num_possible(start, []) == 0


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "grammar",
    [
        'start: /b+/ "b"',
        'start: /a|b/ /b+/ "b"',
        '%llguidance {"no_forcing": false}\nstart: /b+/ "b"',
        'root ::= "b"+ "b"',
    ],
)
def test_bytes_that_must_come_for_ever_hold_nothing_up(grammar):
    sequence = begin(grammar=grammar)
    for _ in range(3):
        assert sequence.forced(encode("b")) == []
        assert encode("b")[0] in allowed(sequence, encode("b"))


def test_what_must_come_is_forced():
    grammar = begin(choice=["yes please", "yes sir"])
    assert grammar.forced([]) == encode("yes ")
    assert grammar.forced(encode("yes ")) == []
    assert grammar.forced(encode("yes s")) == encode("ir")
    assert grammar.forced(encode("yes sir")) == []


QUOTED = {"type": "object", "properties": {"<|im_end|>": {"const": "<|im_start|>"}}, "required": ["<|im_end|>"]}


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"choice": ["<|im_end|>"]}, "<|im_end|>"),
        ({"choice": ["a<|im_start|>b", "a<|im_start|>c"]}, "a<|im_start|>b"),
        ({"choice": ["né<|im_end|>né"]}, "né<|im_end|>né"),
        ({"regex": r"<\|im_start\|>"}, "<|im_start|>"),
        ({"regex": r"[ab]<\|im_start\|>{2}"}, "a<|im_start|>>"),
        ({"json": QUOTED | {"additionalProperties": False}}, '{"<|im_end|>": "<|im_start|>"}'),
        ({"grammar": 'start: "<|im_end|>"'}, "<|im_end|>"),
        ({"grammar": 'root ::= "<|im_start|>"'}, "<|im_start|>"),
        (
            {
                "structural_tag": {
                    "type": "structural_tag",
                    "format": {"type": "regex", "pattern": r"<\|im_start\|>"},
                }
            },
            "<|im_start|>",
        ),
    ],
)
def test_ordinary_tokens_spell_the_text_of_a_special_one(wanted, text):
    grammar, token_ids = begin(**wanted), spelled(text)
    for place, token_id in enumerate(token_ids):
        following = allowed(grammar, token_ids[:place])
        assert token_id in following
        assert SPECIAL.isdisjoint(following)
        assert SPECIAL.isdisjoint(grammar.forced(token_ids[:place]))
        assert allowed(begin(**wanted), [], token_ids[:place]) == following
    assert allowed(grammar, token_ids) == [EOS]


def with_end(kind):
    """The tokenizer's definition with an end named "END": special, ordinary, or a mere word of the vocabulary."""
    described = json.loads(tokenizer().definition.replace("<|im_end|>", "END"))
    others = [token for token in described["added_tokens"] if token["id"] != EOS]
    end = next(token for token in described["added_tokens"] if token["id"] == EOS)
    described["added_tokens"] = others if kind == "word" else [*others, end | {"special": kind == "special"}]
    return json.dumps(described)


@pytest.mark.parametrize("kind", ["special", "ordinary", "word"])
@pytest.mark.parametrize(
    "wanted",
    [
        {"choice": ["aENDb"]},
        {"regex": "aENDb"},
        {"grammar": 'start: "aENDb"'},
        {"structural_tag": {"format": {"type": "const_string", "value": "aENDb"}}},
        {"structural_tag": {"format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": "ENDb"}}},
    ],
)
def test_ordinary_tokens_spell_the_text_of_an_end_whatever_the_tokenizer_calls_it(kind, wanted):
    compiler = Compiler(with_end(kind), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
    mask = torch.arange(VOCAB_SIZE) == EOS
    compiled = compiler.compile(StructuredOutputs(**wanted))
    grammar = SequenceGrammar(compiled, eos_mask=mask, eos_token_ids=frozenset({EOS}))
    token_ids = encode("aENDb")
    for place, token_id in enumerate(token_ids):
        following = allowed(grammar, token_ids[:place])
        assert token_id in following
        assert EOS not in following
        assert EOS not in grammar.forced(token_ids[:place])
    assert allowed(grammar, token_ids) == [EOS]


def test_a_special_token_that_is_meant_is_the_token():
    tag = {"type": "const_string", "value": "<|im_start|>a"}
    grammar = begin(structural_tag={"type": "structural_tag", "format": tag})
    assert allowed(grammar, []) == encode("<|im_start|>")
    assert grammar.forced([]) == encode("<|im_start|>a")


@needs_kernels
@pytest.mark.parametrize("config", [None, {"method": "ngram", "num_speculative_tokens": 4}], ids=["plain", "drafts"])
def test_a_text_that_spells_a_special_token_is_written_whole(config):
    wanted = SamplingParams(temperature=0, max_tokens=40, structured_outputs={"choice": ["<|im_start|>, <|im_end|>"]})
    (output,) = tiny_llm(config, target=text_target()).generate([encode("xyz xyz")], wanted, use_tqdm=False)
    assert (output.error, output.outputs[0].finish_reason) == (None, "stop")
    assert output.outputs[0].text == "<|im_start|>, <|im_end|>"


def write(grammar, output_ids):
    """Write tokens that are allowed, at random."""
    source = random.Random(0)
    while len(output_ids) < 100:
        output_ids.append(source.choice([t for t in allowed(grammar, output_ids) if t != EOS]))


def last_words(grammar):
    """What is written before the grammar gives up."""
    output_ids = []
    with pytest.raises(RequestError, match=r"^structured_outputs: the grammar takes too much work here \(lexer error"):
        write(grammar, output_ids)
    return output_ids


def test_what_one_sequence_wears_out_the_next_gets_anew():
    assert last_words(begin(**HEAVY)) == last_words(begin(**HEAVY)) != []


def test_a_sequence_that_meets_another_ones_limit_goes_on_without_drafts():
    first, second = begin(**HEAVY), begin(**HEAVY)
    last_words(first)
    assert second.num_possible([], encode("zzzz")) == 0
    assert allowed(second, encode("zz")) == allowed(begin(**HEAVY), encode("zz")) == encode("xyz")
    assert not second.takes_drafts
    assert second.num_possible([], encode("x")) == 0
    assert begin(**HEAVY).num_possible([], encode("x")) == 1


def test_a_draft_that_takes_too_much_work_costs_only_drafts():
    grammar = begin(**HEAVY)
    assert grammar.num_possible(encode("x"), encode("yz..............")) < 16
    assert allowed(grammar, encode("x")) == encode("xyz")
    assert grammar.num_possible(encode("x"), encode("yz")) == 0


def test_no_draft_uses_up_the_work_that_the_text_needs():
    grammar = begin(**HEAVY)
    for _ in range(2):  # with a shared matcher, then with the first private one
        with pytest.raises(GrammarNotReadyError):
            grammar.allowed([], encode("xyz"))
        allowed(grammar, [])
    with pytest.raises(RequestError, match="a draft takes too much work"):
        grammar.allowed([], encode("xyz"))
    assert allowed(grammar, encode("xy")) == encode("xyz")


@pytest.fixture
def held(monkeypatch):
    """Holds back private matchers until it is set."""
    event, compiled = threading.Event(), CompiledGrammar._compile

    def compile_late(grammar):
        if threading.current_thread().name.startswith("forerun-grammar"):
            event.wait(60)
        return compiled(grammar)

    monkeypatch.setattr(CompiledGrammar, "_compile", compile_late)
    yield event
    event.set()


def test_a_grammar_is_not_ready_while_it_compiles_on_another_thread(held):
    grammar = begin(**HEAVY)
    grammar.num_possible([], encode("xyz" + "." * 16))
    for _ in range(3):
        with pytest.raises(GrammarNotReadyError):
            grammar.allowed([])
    assert not grammar.takes_drafts
    held.set()
    assert allowed(grammar, []) == encode("xyz")


@needs_kernels
@pytest.mark.parametrize("config", [None, {"method": "ngram", "num_speculative_tokens": 4}], ids=["plain", "drafts"])
def test_other_sequences_go_on_while_a_grammar_compiles(held, config):
    llm = tiny_llm(config, target=text_target())
    engine, repeat = llm.engine, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    heavy = SamplingParams(temperature=0, logprobs=1, structured_outputs={"regex": HEAVY["regex"]})
    engine.add_request("heavy", encode("xyz xyz"), heavy)
    engine.add_request("other", encode("xyz xyz"), repeat)
    finished = {}
    while "other" not in finished:
        finished |= {output.request_id: output for output in engine.step().finished}
    assert "heavy" not in finished
    held.set()
    while engine.has_work:
        finished |= {output.request_id: output for output in engine.step().finished}
    alone = tiny_llm(config, target=text_target()).generate([encode("xyz xyz")], heavy, use_tqdm=False)[0]
    assert finished["heavy"].outputs[0].text == alone.outputs[0].text
    assert finished["heavy"].outputs[0].logprobs == alone.outputs[0].logprobs
    assert finished["heavy"].error == alone.error
    assert len(finished["other"].outputs[0].token_ids) == 40
