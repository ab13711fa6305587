"""`LLM.replace_head`: another head drafts from the next step on, for running requests too, and no text changes."""

from __future__ import annotations

import pytest

from forerun import LLM, SamplingParams
from forerun.engine.client import EngineRequest
from forerun.errors import ConfigError, ForerunError
from tests.engines import tiny_llm, tiny_target
from tests.heads_eagle import eagle3, save
from tests.native import needs_kernels
from tests.train.target_folder import chat_model_folder
from tests.trained_heads import save_trained_head

PARAMS = {"greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)}
PARAMS["sampled"] = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)


def chat_llm(config):
    return LLM(str(chat_model_folder()), max_model_len=128, speculative_config=config)


def text_of(llm, params):
    return llm.generate([[5, 6, 7, 5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids


def text_with_head_replaced(llm, params, folder, *, after):
    """The tokens of a request in whose middle the head is replaced, and the tokens drafted before and after."""
    llm.engine.add_request("one", [5, 6, 7, 5, 6], params)
    outputs, drafted = [], []
    for step in range(200):
        if step == after:
            drafted.append(llm.stats.speculation.num_draft_tokens)
            llm.replace_head(folder)
        outputs += llm.engine.step().finished
        if outputs:
            break
    return outputs[0].outputs[0].token_ids, drafted[0], llm.stats.speculation.num_draft_tokens - drafted[0]


@pytest.mark.parametrize("sampling", PARAMS)
@pytest.mark.parametrize("method", ["eagle3", pytest.param("auto", marks=needs_kernels)])
def test_a_running_request_goes_on_with_the_new_head(tmp_path, method, sampling):
    folders = [save_trained_head(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    head = {"method": "eagle3", "model": str(folders[0])}
    if method == "auto":
        config = {"method": "auto", "auto_memory": 100, "drafter": head | {"draft_sample_method": "coupled"}}
    else:
        config = head | {"num_speculative_tokens": 3}
    llm = chat_llm(config)
    old = llm.executor.drafting.drafter
    found, before, after = text_with_head_replaced(llm, PARAMS[sampling], folders[1], after=4)
    assert found == text_of(chat_llm(None), PARAMS[sampling])
    assert llm.stats.num_failed_drafts == 0
    assert llm.executor.drafting.drafter is not old
    if method == "eagle3":
        assert before > 0
        assert after > 0
    else:
        assert llm.executor.drafting.drafter.lookup is old.lookup


def test_drafts_after_it_are_those_of_an_engine_that_began_with_the_new_head(tmp_path):
    folders = [save_trained_head(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    llms = [chat_llm({"method": "eagle3", "model": str(f), "num_speculative_tokens": 3}) for f in folders]
    llms[0].replace_head(folders[1])
    for llm in llms:
        text_of(llm, PARAMS["greedy"])
    assert llms[0].stats.speculation.num_accepted_tokens == llms[1].stats.speculation.num_accepted_tokens
    assert llms[0].stats.speculation.num_draft_tokens == llms[1].stats.speculation.num_draft_tokens


def test_a_head_that_reads_other_hidden_states_is_refused_and_the_one_before_drafts_on(tmp_path):
    target = tiny_target()
    heads = []
    for name, layers in (("one", [0, 1, 2]), ("two", [1, 2, 3])):
        config, tensors = eagle3(target, seed=0, eagle_aux_hidden_state_layer_ids=layers)
        heads.append(save(tmp_path / name, config, tensors))
    llm = tiny_llm({"method": "eagle3", "model": str(heads[0]), "num_speculative_tokens": 3})
    with pytest.raises(ConfigError, match=r"reads .* of the target; here are kept"):
        llm.replace_head(heads[1])
    text_of(llm, PARAMS["greedy"])
    assert llm.stats.speculation.num_draft_tokens > 0


def test_what_has_no_head_refuses_one(tmp_path):
    with pytest.raises(ConfigError, match="'ngram' has none that could be replaced"):
        tiny_llm({"method": "ngram", "num_speculative_tokens": 2}).replace_head(tmp_path)
    with pytest.raises(ConfigError, match="has none that could be replaced"):
        tiny_llm().replace_head(tmp_path)


OTHERS = {"look-ups alone": {"auto_memory": 0}, "self": {"auto_memory": 100}, "ngram": {"drafter": {"method": "ngram"}}}


@needs_kernels
@pytest.mark.parametrize("named", OTHERS)
def test_auto_without_a_head_refuses_one_since_it_keeps_nothing_for_it(tmp_path, named):
    llm = chat_llm({"method": "auto", **OTHERS[named]})
    head = save_trained_head(tmp_path, seed=0)
    for refused in (llm.check_replaces_head, lambda: llm.replace_head(head)):
        with pytest.raises(ConfigError, match=rf"auto drafts with {named} here.* name a head to begin with"):
            refused()


def test_a_folder_without_a_head_is_refused(tmp_path):
    head = save_trained_head(tmp_path / "head", seed=0)
    llm = chat_llm({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    with pytest.raises(ForerunError):
        llm.replace_head(tmp_path / "nothing")
    assert text_of(llm, PARAMS["greedy"]) == text_of(chat_llm(None), PARAMS["greedy"])


def test_requests_may_come_while_the_head_is_replaced(tmp_path):
    folders = [save_trained_head(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    llm = chat_llm({"method": "eagle3", "model": str(folders[0]), "num_speculative_tokens": 3})
    states = llm.executor._states

    class Interrupted:
        """A state at whose turn another thread prepares a request."""

        @property
        def sequence(self):
            llm.engine.accept(EngineRequest(request_id="two", prompt_ids=[5, 6], sampling=PARAMS["greedy"]))
            return one.sequence

    llm.engine.accept(EngineRequest(request_id="one", prompt_ids=[5, 6], sampling=PARAMS["greedy"]))
    ((seq_id, one),) = states.items()
    states[seq_id] = Interrupted()
    llm.replace_head(folders[1])
    assert len(states) == 2
