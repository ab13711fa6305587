"""The offline API: prompts in every form, streams, failures that leave the engine usable."""

from __future__ import annotations

import gc
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
from tqdm.auto import tqdm

from forerun import SamplingParams
from forerun.engine import engine as engine_module
from forerun.engine.generation import Generation
from forerun.errors import ConfigError, RequestError, UnknownKeyError
from forerun.models.base import LoadedTarget
from forerun.models.loader import load_model
from forerun.models.tokenizer import load_tokenizer
from tests.contract.drafters import NGRAM, oracle
from tests.contract.test_contract import assert_nothing_is_held
from tests.engines import engine_of, tiny_llm, tiny_target
from tests.stand_in import save_stand_in

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def chat_target():
    """A tiny random model that writes text."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_stand_in(Path(folder))
        model = load_model(path, dtype=torch.float32, device=torch.device("cpu"))
        return LoadedTarget(model=model, tokenizer=load_tokenizer(path), eos_token_ids=frozenset({2}))


def token_ids(llm, prompt, sampling=GREEDY):
    return llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0].token_ids


def know_all(target, prompt, sampling):
    """A config whose drafter drafts what the target alone will write, beside wrong branches."""
    llm = tiny_llm(target=target)
    ids = llm.get_tokenizer().encode(prompt)
    plain = token_ids(llm, prompt, sampling)
    return {"method": oracle({tuple(ids): plain}, wrong_every=99), "num_speculative_tokens": 12}


# --- prompts and settings -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt", [[PROMPT], [tuple(PROMPT)], np.array(PROMPT), [np.array(PROMPT)], {"prompt_token_ids": PROMPT}]
)
def test_token_ids_may_come_in_any_form(prompt):
    llm = tiny_llm()
    assert token_ids(llm, prompt) == token_ids(llm, PROMPT)


@pytest.mark.parametrize(
    ("prompt", "hint"),
    [
        ([[1.5, 2]], "list of token ids"),
        ([[1, "two"]], "list of token ids"),
        ([None], "list of token ids"),
        ({"cache_salt": "x"}, "neither"),
        ({"prompt_token_ids": [1], "cache_salt": 5}, "cache_salt"),
        ("text", "without one"),
    ],
)
def test_a_prompt_that_is_none_is_refused_in_one_line(prompt, hint):
    llm = tiny_llm()
    with pytest.raises(RequestError, match=hint) as caught:
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert "\n" not in str(caught.value)
    assert_nothing_is_held(llm)


def test_an_unknown_key_of_a_prompt_is_refused():
    with pytest.raises(UnknownKeyError, match="prompt_token_ids"):
        tiny_llm().generate({"prompt_token_id": [1]}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("sampling", [[GREEDY] * 3, 5, [{"temperature": 0}] * 2, {"temperature": 0}])
def test_sampling_params_that_do_not_go_with_the_prompts_are_refused(sampling):
    with pytest.raises(RequestError, match="sampling_params"):
        tiny_llm().generate([PROMPT, PROMPT], sampling, use_tqdm=False)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_tokens_are_refused_before_anything_runs(name):
    llm = tiny_llm()
    with pytest.raises(RequestError, match=f"^{name}: got 98; must be at most"):
        llm.generate([PROMPT], SamplingParams(**{name: 98}), use_tqdm=False)
    assert_nothing_is_held(llm)


def test_logprobs_of_the_whole_vocabulary_are_given():
    (output,) = tiny_llm().generate([PROMPT], SamplingParams(logprobs=-1, max_tokens=1, temperature=0), use_tqdm=False)
    assert len(output.outputs[0].logprobs[0]) == 97


@pytest.mark.parametrize("messages", [[], {"role": "user", "content": "hello"}, "hello", [["hello"]]])
def test_messages_that_are_none_are_refused_in_one_line(chat_target, messages):
    with pytest.raises(RequestError, match=r"^messages: ") as caught:
        tiny_llm(target=chat_target).chat(messages, GREEDY, use_tqdm=False)
    assert "\n" not in str(caught.value)


HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_tokens": 2}, r"max_tokens.* put it into SamplingParams\(max_tokens=...\)"),
        ({"params": GREEDY}, "unknown key 'params'"),
        ({"documents": [{}]}, "unknown key 'documents'"),
        ({"add_generation_promt": True}, "did you mean 'add_generation_prompt'"),
        ({"chat_template_kwargs": {"enable_thinkin": False}}, "no variable 'enable_thinkin'; it has: none"),
        ({"chat_template_kwargs": {"max_tokens": 2}}, "no variable 'max_tokens'"),
        ({"chat_template_kwargs": 5}, "must be a dict"),
        ({"lora_request": "mine"}, "lora_request: got 'mine'; forerun has nothing of this"),
        ({"add_generation_prompt": "no"}, "must be True or False"),
        ({"continue_final_message": 1}, "must be True or False"),
        ({"chat_template": 5}, "chat_template: got 5; must be a template's text"),
        ({"chat_template_content_format": "openai"}, "may be 'auto' or 'string'"),
        ({"tools": "wait"}, "tools: got 'wait'; must be a list"),
    ],
)
def test_what_chat_cannot_use_is_refused_in_one_line(chat_target, arguments, said):
    llm = tiny_llm(target=chat_target)
    for call in (
        lambda: llm.chat(HELLO, GREEDY, use_tqdm=False, **arguments),
        lambda: llm.stream_chat(HELLO, **arguments),
    ):
        with pytest.raises((RequestError, UnknownKeyError), match=said) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_variables_of_the_template_come_by_name_or_in_a_dict(chat_target):
    llm, template = tiny_llm(target=chat_target), "{{ mood }} {{ messages[0].content }}"
    (by_name,) = llm.chat(HELLO, GREEDY, False, chat_template=template, mood="oh")
    (in_a_dict,) = llm.chat(HELLO, GREEDY, False, chat_template=template, chat_template_kwargs={"mood": "oh"})
    assert by_name.prompt == in_a_dict.prompt == "oh hello"


def test_a_chat_gives_the_prompt_that_the_template_made(chat_target):
    (output,) = tiny_llm(target=chat_target).chat(HELLO, GREEDY, False, lora_request=None, chat_template_kwargs=None)
    assert output.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == chat_target.tokenizer.encode(output.prompt, add_special_tokens=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lora_request": "mine"}, "lora_request: got 'mine'; forerun has nothing of this; leave it out"),
        ({"temperature": 0}, r"put it into SamplingParams\(temperature=...\)"),
        ({"sampling_parms": GREEDY}, "did you mean 'sampling_params'"),
    ],
)
def test_what_generate_cannot_use_is_refused(arguments, said):
    llm = tiny_llm()
    with pytest.raises((RequestError, UnknownKeyError), match=said):
        llm.generate(PROMPT, GREEDY, use_tqdm=False, **arguments)
    (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=None, priority=None)
    assert output.finished


def test_a_bar_is_made_by_what_is_given():
    totals = []

    def bar(*, total, **more):
        totals.append(total)
        return tqdm(total=total, disable=True)

    tiny_llm().generate([PROMPT, PROMPT], GREEDY, use_tqdm=bar)
    assert totals == [2]


def test_a_prefix_is_read_anew_after_the_cache_is_reset():
    llm, prompt = tiny_llm(), PROMPT * 8

    def num_cached():
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert not num_cached()
    assert num_cached()
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    assert not llm.reset_prefix_cache()
    stream.close()
    assert llm.reset_prefix_cache()
    assert not num_cached()


def test_requests_without_sampling_params_have_the_default_ones():
    llm = tiny_llm()
    assert llm.get_default_sampling_params() == SamplingParams()


def test_requests_without_sampling_params_have_those_of_the_models_generation_config(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 3}')
    llm = tiny_llm(target=replace(tiny_target(), path=tmp_path))
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3)
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)[0].outputs[0]
    assert llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].token_ids == expected.token_ids
    assert [token for delta in llm.stream(PROMPT) for token in delta.token_ids] == expected.token_ids
    assert len(llm.generate(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids) == 5


def test_the_settings_say_what_of_the_generation_config_counts(tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 9}')
    target = replace(tiny_target(), path=tmp_path)
    for source, overrides, expected in (
        ("vllm", None, SamplingParams()),
        ("auto", {"top_k": 2}, SamplingParams(temperature=0.5, top_k=2)),
        (str(tmp_path), None, SamplingParams(temperature=0.5, top_k=9)),
    ):
        llm = tiny_llm(target=target, generation_config=source, override_generation_config=overrides)
        assert llm.get_default_sampling_params() == expected
    assert "temperature 0.5, top_k 9 (generation_config.json)" in caplog.text


def test_who_gives_all_parameters_does_not_need_a_generation_config(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    llm = tiny_llm(target=replace(tiny_target(), path=tmp_path))
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)
    with pytest.raises(ConfigError, match="temperature: got 'hot'"):
        llm.generate(PROMPT, use_tqdm=False)


def test_a_bad_word_of_nothing_but_space_is_refused(chat_target):
    with pytest.raises(RequestError, match="bad_words: got ' ', which has no tokens"):
        tiny_llm(target=chat_target).generate("hello", SamplingParams(bad_words=[" "]), use_tqdm=False)


# --- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [lambda stream: stream.close(), lambda stream: None], ids=["closed", "dropped"])
def test_a_stream_that_nobody_reads_leaves_nothing_behind(end):
    llm = tiny_llm(NGRAM)
    stream = llm.stream([PROMPT, PROMPT[::-1]], GREEDY)
    end(stream)
    del stream
    assert_nothing_is_held(llm)
    assert not llm._deltas


def test_a_stream_that_the_garbage_collector_drops_in_the_midst_of_a_step_harms_no_other_call(monkeypatch):
    llm, commit = tiny_llm(NGRAM), engine_module.commit
    held = [llm.stream(PROMPT, GREEDY)]
    next(held[0])
    held.append(held)  # as a traceback holds its frame: only the collector finds it
    del held

    def collecting(*args, **kwargs):
        gc.collect()
        return commit(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "commit", collecting)
        found = token_ids(llm, PROMPT[::-1])
    assert found == token_ids(tiny_llm(), PROMPT[::-1])
    assert_nothing_is_held(llm)
    assert not llm._deltas


def test_generate_may_be_called_while_a_stream_is_open():
    llm = tiny_llm(NGRAM)
    expected = token_ids(llm, PROMPT)
    stream = llm.stream(PROMPT, GREEDY)
    first = next(stream).token_ids
    assert token_ids(llm, PROMPT[::-1]) == token_ids(tiny_llm(), PROMPT[::-1])
    assert first + [t for delta in stream for t in delta.token_ids] == expected
    assert_nothing_is_held(llm)


def test_a_stream_names_prompts_by_their_place_in_the_call():
    llm = tiny_llm()
    token_ids(llm, PROMPT)
    sampling = SamplingParams(n=2, max_tokens=2, ignore_eos=True)
    deltas = list(llm.stream([PROMPT, PROMPT[::-1]], sampling))
    assert {(delta.request_id, delta.index) for delta in deltas} == {("0", 0), ("0", 1), ("1", 0), ("1", 1)}


def test_streamed_text_is_the_whole_text(chat_target):
    sampling = SamplingParams(temperature=1.5, seed=1, max_tokens=40, stop=["e", "\x01"])
    llm = tiny_llm(NGRAM, target=chat_target)
    whole = llm.generate("hello hello", sampling, use_tqdm=False)[0].outputs[0].text
    assert "".join(delta.text for delta in llm.stream("hello hello", sampling)) == whole


# --- the end of a text, inside an accepted run --------------------------------------------------


def test_a_stop_string_inside_an_accepted_run_cuts_as_it_does_without_drafts(chat_target):
    free = SamplingParams(temperature=1.0, seed=4, max_tokens=24, ignore_eos=True)
    config = know_all(chat_target, "hello", free)
    plain, drafted = tiny_llm(target=chat_target), tiny_llm(config, target=chat_target)
    text = plain.generate("hello", free, use_tqdm=False)[0].outputs[0].text
    for start in range(1, len(text) - 2):
        stop = text[start : start + 2]
        for include in (False, True):
            sampling = SamplingParams(
                temperature=1.0,
                seed=4,
                max_tokens=24,
                ignore_eos=True,
                stop=stop,
                include_stop_str_in_output=include,
                logprobs=0,
            )
            one, other = (llm.generate("hello", sampling, use_tqdm=False)[0].outputs[0] for llm in (plain, drafted))
            assert (one.text, one.token_ids, one.stop_reason) == (other.text, other.token_ids, stop)
            assert one.text == text[: text.index(stop) + len(stop) * include]
            assert len(other.logprobs) == len(other.origins) == len(other.token_ids)
    assert drafted.stats.speculation.num_accepted_tokens > 0


def test_a_text_ends_at_max_model_len_inside_an_accepted_run():
    plain = token_ids(
        tiny_llm(max_model_len=20), PROMPT, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    )
    llm = tiny_llm(
        {"method": oracle({tuple(PROMPT): plain + [0] * 9}, wrong_every=99), "num_speculative_tokens": 16},
        max_model_len=20,
        num_gpu_blocks_override=5,
    )
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == plain
    assert len(plain) == 12
    assert output.outputs[0].finish_reason == "length"
    assert_nothing_is_held(llm)


# --- failures -----------------------------------------------------------------------------------


class FailingModel:
    """A target whose forward pass fails at the given calls."""

    def __init__(self, model, calls):
        self._model, self._calls, self._num_calls = model, calls, 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, batch, attend):
        self._num_calls += 1
        if self._num_calls in self._calls:
            raise RuntimeError("the pass failed")
        return self._model.forward(batch, attend)


def failing_llm(*calls):
    target = tiny_target()
    model = FailingModel(target.model, calls)
    return tiny_llm(NGRAM, target=LoadedTarget(model=model, tokenizer=None, eos_token_ids=target.eos_token_ids))


@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_failing_forward_pass_is_raised_and_the_engine_stays_usable(call):
    llm = failing_llm(call)
    with pytest.raises(RuntimeError, match="the pass failed"):
        llm.generate([PROMPT, PROMPT[::-1]], GREEDY, use_tqdm=False)
    assert_nothing_is_held(llm)
    assert token_ids(llm, PROMPT) == token_ids(tiny_llm(), PROMPT)


def test_an_open_stream_survives_a_failing_forward_pass_of_another_call():
    llm = failing_llm(2)
    stream = llm.stream(PROMPT, GREEDY)
    first = next(stream).token_ids
    with pytest.raises(RuntimeError, match="the pass failed"):
        llm.generate([PROMPT[::-1]], GREEDY, use_tqdm=False)
    assert first + [t for delta in stream for t in delta.token_ids] == token_ids(tiny_llm(), PROMPT)
    assert_nothing_is_held(llm)


# --- memory and sharing -------------------------------------------------------------------------


def num_generations():
    gc.collect()
    return sum(type(thing) is Generation for thing in gc.get_objects())


def test_requests_leave_no_object_behind():
    llm = tiny_llm(NGRAM, max_num_seqs=8)
    before = num_generations()
    for _ in range(3):
        llm.generate([PROMPT] * 20, SamplingParams(n=2, max_tokens=3, logprobs=1), use_tqdm=False)
        list(llm.stream([PROMPT] * 3, GREEDY))
    assert num_generations() == before
    assert not llm._finished
    assert not llm._deltas
    assert not engine_of(llm).drafting._started


def test_two_engines_may_share_weights_and_run_in_turn():
    plain = tiny_llm()
    drafted = plain.with_speculation(NGRAM)
    streams = [llm.stream(PROMPT, GREEDY) for llm in (plain, drafted)]
    tokens = [[], []]
    while any(deltas := [next(stream, None) for stream in streams]):
        for known, delta in zip(tokens, deltas, strict=True):
            known += delta.token_ids if delta is not None else []
    assert tokens[0] == tokens[1] == token_ids(tiny_llm(), PROMPT)


def test_threads_that_share_one_take_turns():
    llm, prompts = tiny_llm(NGRAM), [PROMPT[place:] + PROMPT[:place] for place in range(8)]
    expected = [token_ids(tiny_llm(), prompt) for prompt in prompts]
    start = Barrier(len(prompts))

    def write(place):
        start.wait()
        if place % 2:
            return token_ids(llm, prompts[place])
        return [token for delta in llm.stream(prompts[place], GREEDY) for token in delta.token_ids]

    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(write, range(len(prompts)))) == expected
    assert_nothing_is_held(llm)
    assert not llm._deltas


@pytest.fixture
def ctrl_c(monkeypatch):
    """An LLM whose steps are interrupted by signals, so many in the one whose number is given; and where it says so."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where a shell started the tests
    llm, interrupts, steps = tiny_llm(), {}, []
    step = llm.engine.step

    def interrupted():
        steps.append("begun")
        for _ in range(interrupts.get(len(steps), 0)):
            signal.raise_signal(signal.SIGINT)
        found = step()
        steps[-1] = "whole"
        return found

    monkeypatch.setattr(llm.engine, "step", interrupted)
    yield llm, interrupts, steps
    signal.signal(signal.SIGINT, handler)


def test_an_interrupt_waits_for_the_end_of_a_step_and_open_streams_lose_nothing(ctrl_c):
    llm, interrupts, steps = ctrl_c
    stream = llm.stream([[3, 4, 5]], GREEDY)
    interrupts |= {2: 1, 4: 1}
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[6, 7]], GREEDY, use_tqdm=False)
    assert set(steps) == {"whole"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    streamed = [token_id for delta in stream for token_id in delta.token_ids]
    (alone,) = llm.generate([[3, 4, 5]], GREEDY, use_tqdm=False)
    assert streamed == alone.outputs[0].token_ids
    assert_nothing_is_held(llm)


def test_a_second_interrupt_does_not_wait(ctrl_c):
    llm, interrupts, steps = ctrl_c
    interrupts[1] = 2
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[6, 7]], GREEDY, use_tqdm=False)
    assert steps == ["begun"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_while_requests_are_forgotten_leaves_none_of_them(ctrl_c, monkeypatch):
    llm, interrupts, _ = ctrl_c
    interrupts[3] = 1
    abort, aborted = llm.engine.abort, []

    def interrupting(request_id):
        aborted.append(request_id)
        if len(aborted) == 1:
            signal.raise_signal(signal.SIGINT)
        return abort(request_id)

    monkeypatch.setattr(llm.engine, "abort", interrupting)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[6, 7], [8, 9], [3, 4]], GREEDY, use_tqdm=False)
    assert len(aborted) == 3
    assert_nothing_is_held(llm)


def test_a_processor_of_logits_that_asks_its_own_llm_fails_with_the_reason():
    llm = tiny_llm()

    def asks(_ids, logits):
        llm.generate([[3]], GREEDY, use_tqdm=False)
        return logits

    (output,) = llm.generate([[6, 7]], replace(GREEDY, logits_processors=[asks]), use_tqdm=False)
    assert "called within one of its own steps" in output.error
    assert_nothing_is_held(llm)


def test_no_prompt_gives_no_output():
    llm = tiny_llm()
    assert llm.generate([], GREEDY, use_tqdm=False) == list(llm.stream([])) == []


@pytest.mark.parametrize("prompts", [None, 3, b"bytes", 1.5])
def test_what_is_no_prompt_is_refused_in_one_line(prompts):
    with pytest.raises(RequestError, match="prompts: got"):
        tiny_llm().generate(prompts, use_tqdm=False)
