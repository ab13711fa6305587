"""The texts of a run are the same however often it was interrupted, and spans are what the target wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import SpeculativeConfig
from forerun.core.outputs import CompletionOutput
from forerun.core.sampling_params import SamplingParams
from forerun.llm import LLM
from forerun.train.conversations import ChatMarks, GivenConversations, InventedConversations, Plan
from forerun.train.texts import TextFile
from forerun.train.writing import LEAST_QUESTION, WritingLimits, converse, write_texts
from tests.native import needs_kernels
from tests.train.target_folder import chat_model

LIMITS = WritingLimits(most_conversation=256, most_question=40, most_answer=12, num_at_once=3)


class TornDownError(Exception):
    pass


def write(path, plans, *, stop_after=None, limits=LIMITS):
    """Write texts; after so many calls of `goes_on` the run is torn down."""
    calls = iter(range(10**9))

    def goes_on(num_running):
        if stop_after is not None and next(calls) >= stop_after:
            raise TornDownError
        return True

    settings = EngineSettings(model="tiny", max_model_len=256, num_gpu_blocks_override=64)
    llm = LLM.from_target(chat_model(), settings, SpeculativeConfig())
    with TextFile(path) as file:
        try:
            write_texts(llm.engine, chat_model().tokenizer, plans, file, seed=1, limits=limits, goes_on=goes_on)
        except TornDownError:
            assert not llm.engine.has_work
            return False
    return True


def read(path):
    with TextFile(path) as file:
        return {one.number: (one.temperature, one.token_ids.tolist(), one.spans) for one in file.texts}


PLANS = GivenConversations(
    prompts=[(None, ("Hello?",)), ("Be kind.", ("One?", "Two?", "Three?")), (None, ("Why?", "How?")), (None, ("x",))]
    * 2
)


@needs_kernels
def test_interruptions_change_no_text(tmp_path):
    assert write(tmp_path / "whole", PLANS)
    expected = read(tmp_path / "whole")
    assert expected.keys() == set(range(8))
    count = 0
    # a piece that is too short for any conversation gets nowhere, as it should
    while not write(tmp_path / "pieces", PLANS, stop_after=9 + 4 * count):
        count += 1
    assert count > 1
    assert read(tmp_path / "pieces") == expected


@needs_kernels
def test_what_is_written_at_once_changes_no_text(tmp_path):
    write(tmp_path / "few", PLANS, limits=WritingLimits(most_conversation=256, most_answer=12, num_at_once=1))
    write(tmp_path / "many", PLANS, limits=WritingLimits(most_conversation=256, most_answer=12, num_at_once=8))
    assert read(tmp_path / "few") == read(tmp_path / "many")


@needs_kernels
def test_a_prompt_without_room_for_an_answer_spends_its_number_and_others_are_answered(tmp_path):
    plans = GivenConversations(
        prompts=[(None, ("too long " * 200,)), (None, ("Hello?",)), (None, ("too long " * 200,))]
    )
    assert write(tmp_path / "texts", plans, limits=replace(LIMITS, num_at_once=1))
    assert {number: len(spans) for number, (_, _, spans) in read(tmp_path / "texts").items()} == {0: 0, 1: 1, 2: 0}


def reply(tokenizer, text, *, finish_reason="stop"):
    ids = tokenizer.encode(text + ("<|im_end|>" if finish_reason == "stop" else ""), add_special_tokens=False)
    return CompletionOutput(index=0, text="", token_ids=ids, finish_reason=finish_reason)


def had(plan, replies, *, limits=LIMITS):
    """The text of a conversation with these replies, and what was asked for."""
    tokenizer = chat_model().tokenizer
    conversation = converse(plan, ChatMarks.read(tokenizer, system=plan.system), tokenizer, limits, seed=0)
    asked = [next(conversation)]
    try:
        for one in replies:
            asked.append(conversation.send(one))
    except StopIteration as ended:
        return ended.value, asked
    raise AssertionError("the conversation asks on")


def test_a_conversation_is_what_the_template_makes_of_its_messages():
    tokenizer = chat_model().tokenizer
    plan = Plan(number=3, questions=("Hi?", None), temperature=0.7)
    answers = ["Yes.", "What now?", "Nothing."]
    text, asked = had(plan, [reply(tokenizer, one) for one in answers])
    messages = [
        {"role": role, "content": content}
        for role, content in zip(("user", "assistant") * 2, ["Hi?", *answers], strict=True)
    ]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert text.token_ids.tolist() == expected[: len(text.token_ids)]
    written = [tokenizer.decode(text.token_ids[start:end], skip_special_tokens=False) for start, end in text.spans]
    assert written == ["Yes.<|im_end|>", "Nothing.<|im_end|>"]
    assert [ask.sampling.temperature for ask in asked] == [0.7, 0.8, 0.7]
    assert len({ask.sampling.seed for ask in asked}) == 3
    assert asked[1].prompt_ids == text.token_ids[: len(asked[1].prompt_ids)].tolist()


@pytest.mark.parametrize(("first", "length"), [("What", "length"), ("", "stop")])
def test_a_question_without_end_or_words_spends_the_number(first, length):
    tokenizer = chat_model().tokenizer
    text, _ = had(Plan(number=3, questions=(None,), temperature=0.0), [reply(tokenizer, first, finish_reason=length)])
    assert (text.number, len(text.token_ids), text.spans) == (3, 0, ())


def test_an_answer_without_end_is_the_last():
    tokenizer = chat_model().tokenizer
    cut = reply(tokenizer, "On and on", finish_reason="length")
    text, asked = had(Plan(number=0, questions=("Hi?", "More?"), temperature=0.0), [cut])
    assert len(asked) == 1
    assert len(text.spans) == 1


def test_a_conversation_stays_within_its_limits():
    tokenizer = chat_model().tokenizer
    limits = WritingLimits(most_conversation=60, most_question=40, most_answer=12)
    first = len(tokenizer.encode(ChatMarks.read(tokenizer).begin + "Hi?" + ChatMarks.read(tokenizer).answer))
    answer = reply(tokenizer, "Yes.")
    text, asked = had(Plan(number=0, questions=("Hi?", "x" * 60), temperature=0.0), [answer], limits=limits)
    assert asked[0].sampling == SamplingParams(
        temperature=0.0, max_tokens=min(12, 60 - first), seed=asked[0].sampling.seed, detokenize=False
    )
    assert len(text.token_ids) <= 60


@pytest.mark.parametrize("room", [0, 1, 3])
def test_no_question_is_asked_for_where_a_conversation_has_no_room_for_one(room):
    tokenizer = chat_model().tokenizer
    plan = Plan(number=0, questions=("Hi?", None), temperature=0.0)
    answer = reply(tokenizer, "Yes.")
    _, (_, asked) = had(plan, [answer, reply(tokenizer, "")])
    limits = replace(LIMITS, most_conversation=len(asked.prompt_ids) + room)
    text, asks = had(plan, [answer, reply(tokenizer, "")], limits=limits)
    assert len(text.spans) == 1
    assert [ask.sampling.max_tokens for ask in asks[1:]] == [room] * (room >= LEAST_QUESTION)


def test_invented_conversations_end_when_time_is_up(tmp_path):
    settings = EngineSettings(model="tiny", max_model_len=256, num_gpu_blocks_override=64)
    llm = LLM.from_target(chat_model(), settings, SpeculativeConfig())
    calls = iter(range(10**9))
    with TextFile(tmp_path / "texts") as file:
        write_texts(
            llm.engine,
            chat_model().tokenizer,
            InventedConversations(count=None, seed=0),
            file,
            seed=0,
            limits=LIMITS,
            goes_on=lambda num_running: next(calls) < 30,
        )
        assert sorted(one.number for one in file.texts) == list(range(len(file.texts)))
        assert file.texts
