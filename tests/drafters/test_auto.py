"""What "auto" drafts with."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PhimoeConfig

from forerun import LLM
from forerun.build import load_target
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import resolve_speculative
from forerun.core.sampling_params import SamplingParams
from forerun.drafters.auto import DEFAULT_MEMORY
from forerun.drafters.eagle import Eagle3Config
from forerun.drafters.guard import GuardedDrafter
from forerun.drafters.priced import HOPE
from forerun.errors import ConfigError
from forerun.models import shipped_heads
from forerun.models.shipped_heads import TARGET_FILE, HeadTarget, find_shipped_head
from forerun.ops.native.formats import WEIGHT_FORMATS
from forerun.train.copied_block import begin_from_block
from forerun.train.packaging import save_head
from tests.contract.drafters import BadDrafter
from tests.contract.test_contract import PROMPTS
from tests.engines import storage, tiny_llm
from tests.native import needs_kernels
from tests.stand_in import VOCAB_SIZE
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

IN_BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
EXTRACT = {
    "method": "extract_hidden_states",
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}},
}
PROMPT = {"prompt_token_ids": [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]}


def choices(config, **settings):
    return {choice.method: choice for choice in tiny_llm(config, **settings).drafter_choices()}


def test_it_says_what_it_uses_and_why_not_the_rest():
    found = choices({"method": "auto"})
    assert [method for method, choice in found.items() if choice.is_used] == ["copy", "pool", "recycle"]
    assert "in memory" in found["self"].why
    assert "drafter" in found["trained head"].why


def test_without_memory_it_copies_from_the_text_alone():
    found = choices({"method": "auto", "auto_memory": 0})
    assert [method for method, choice in found.items() if choice.is_used] == ["copy"]
    assert found["recycle"].why.endswith("auto_memory leaves no room for it")
    llm = tiny_llm({"method": "auto", "auto_memory": 0})
    llm.generate(PROMPT, SamplingParams(max_tokens=8), use_tqdm=False)
    lookup = llm.executor.drafting.drafter.lookup
    assert lookup.num_candidates == 0
    assert lookup.past_answers.num_bytes == 0


def test_a_drafter_of_the_users_own_is_used():
    found = choices({"method": "auto", "drafter": {"method": "draft_model", "model": "tiny"}})
    assert found["draft_model"].is_used


def test_a_drafter_that_is_no_dict_is_refused_by_its_key():
    with pytest.raises(ConfigError, match="drafter: got 'eagle3'; must be a dict such as"):
        resolve_speculative({"method": "auto", "drafter": "eagle3"})


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator", "ngram"])
def test_a_drafter_of_the_users_own_is_asked_as_deep_as_it_predicts(method):
    keys = {} if method == "ngram" else {"model": f"tiny-{method.replace('_', '-')}"}
    llm = tiny_llm({"method": "auto", "drafter": {"method": method, **keys}})
    llm.generate(PROMPT, SamplingParams(max_tokens=8), use_tqdm=False)
    assert llm.executor.drafting.drafter._model.max_depth == (5 if method == "ngram" else 4)
    assert llm.stats.num_failed_drafts == 0


class Learning(BadDrafter):
    """Counts the rows that it is shown."""

    num_candidates = 2
    num_rows = 0

    def learn(self, rows):
        assert rows.candidate_ids.shape[1] >= self.num_candidates
        self.num_rows += len(rows)


@pytest.mark.parametrize("auto_memory", [0, 1])
def test_a_drafter_of_the_users_own_is_shown_what_the_target_found_if_it_learns_from_that(auto_memory):
    llm = tiny_llm({"method": "auto", "auto_memory": auto_memory, "drafter": {"method": Learning}})
    llm.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert llm.executor.drafting.drafter._model.guarded.drafter.num_rows > 2
    assert llm.stats.num_failed_drafts == 0


@pytest.mark.parametrize("method", ["ngram", "suffix", "recycle"])
def test_a_drafter_of_the_users_own_is_used_whatever_its_method_and_its_pools_are_kept(method):
    drafter = tiny_llm({"method": "auto", "drafter": {"method": method}}).executor.drafting.drafter
    assert drafter.model_name == method
    assert set(drafter.pools) == {"recycle", "answers"} | ({"suffix"} if method == "suffix" else set())


@pytest.fixture
def folder(tmp_path):
    """A model whose sizes int4 takes."""
    folder = save_tiny_model(tmp_path, seed=3, vocab_size=VOCAB_SIZE, **IN_BLOCKS)
    save_tiny_tokenizer(folder, vocab_size=VOCAB_SIZE)
    return folder


def auto(folder, *, auto_memory, **settings):
    config = {"method": "auto", "auto_memory": auto_memory}
    return LLM(folder, speculative_config=config, max_model_len=128, **({"dtype": "bfloat16"} | settings))


SAMPLED = [
    [SamplingParams(max_tokens=40, temperature=0.0)] * 8,
    [SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=seed, logprobs=1) for seed in range(8)],
]


@needs_kernels
@pytest.mark.parametrize("sampling", SAMPLED, ids=["greedy", "seeded"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_where_memory_allows_the_target_drafts_for_itself_in_four_bits_and_what_is_accepted_is_measured(
    folder, quantization, sampling
):
    llm = auto(folder, auto_memory=1, quantization=quantization)
    chosen = {choice.method: choice for choice in llm.drafter_choices()}["self"]
    assert (chosen.is_used, chosen.why) == (True, "the target in int4")
    plain = LLM(folder, dtype="bfloat16", quantization=quantization, speculative_config=None, max_model_len=128)
    found, expected = (
        [
            (one.outputs[0].token_ids, one.outputs[0].logprobs)
            for one in each.generate(PROMPTS[:8], sampling, use_tqdm=False)
        ]
        for each in (llm, plain)
    )
    assert found == expected
    assert llm.executor.drafting.drafter._model._added.expected(0.0, 0.0)[0].gain != pytest.approx(HOPE)


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_default_memory_has_no_room_for_the_target_itself_and_says_how_much_has(folder, quantization):
    def choice(auto_memory):
        llm = auto(folder, auto_memory=auto_memory, quantization=quantization)
        return {choice.method: choice for choice in llm.drafter_choices()}["self"]

    refused = choice(DEFAULT_MEMORY)
    assert not refused.is_used
    assert choice(float(re.search(r"allow it with auto_memory=([\d.]+)", refused.why)[1])).is_used


@needs_kernels
def test_the_memory_that_it_says_the_target_needs_is_enough(folder):
    def why(auto_memory):
        return {choice.method: choice for choice in auto(folder, auto_memory=auto_memory).drafter_choices()}["self"]

    refused = why(0.01)
    needed = re.search(r"allow it with auto_memory=([\d.]+)", refused.why)
    assert not refused.is_used
    assert why(float(needed[1])).is_used
    assert not why(float(needed[1]) - 0.02).is_used


@needs_kernels
def test_a_drafter_that_auto_finds_and_the_tables_share_the_memory_and_it_says_how_much_is_whose(folder):
    llm = auto(folder, auto_memory=1)
    found = {choice.method: choice for choice in llm.drafter_choices()}
    chosen = found["self"]
    drafter = llm.executor.drafting.drafter
    budget = llm.executor.model.weight_bytes
    assert chosen.num_bytes > 0
    assert chosen.num_bytes + drafter.lookup.table.max_bytes + drafter.lookup.past_answers.max_bytes <= budget
    assert drafter.lookup.table.max_bytes == (budget - chosen.num_bytes) // 2
    said = f", in at most {drafter.lookup.table.max_bytes / 1e6:.3g} MB"
    assert found["pool"].why.endswith(said)
    assert found["recycle"].why.endswith(said)


@needs_kernels
def test_a_target_in_few_bits_does_not_draft_for_itself(folder):
    found = {choice.method: choice for choice in auto(folder, auto_memory=2, quantization="int4").drafter_choices()}
    assert not found["self"].is_used
    assert "its weights are in few bits already" in found["self"].why


@needs_kernels
@pytest.mark.parametrize(("architecture", "is_used"), [(PhimoeConfig, False), (GPTNeoXConfig, True)])
def test_a_target_whose_weights_are_beside_linear_layers_does_not_draft_for_itself(tmp_path, architecture, is_used):
    config = architecture(vocab_size=VOCAB_SIZE, num_hidden_layers=2, num_local_experts=4, **IN_BLOCKS)
    save_tiny_tokenizer(tmp_path, vocab_size=VOCAB_SIZE)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    llm = auto(tmp_path, auto_memory=10)
    found = {choice.method: choice for choice in llm.drafter_choices()}["self"]
    assert found.is_used is is_used, found.why
    if not is_used:
        assert "in no linear layer" in found.why
    assert llm.generate(PROMPT, SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids


def test_where_drafts_might_change_texts_nothing_is_drafted_and_the_log_says_how_to_turn_them_on(
    folder, monkeypatch, caplog
):
    monkeypatch.setattr("forerun.build.load_kernels", lambda: None)
    with caplog.at_level("INFO", logger="forerun"):
        llm = LLM(folder, dtype="bfloat16", max_model_len=128)
    assert llm.speculative.describe() == LLM(folder, speculative_config=None, max_model_len=128).speculative.describe()
    (line,) = [record.getMessage() for record in caplog.records if "nothing is drafted" in record.getMessage()]
    assert "turn them on with speculative_config='auto'" in line


def test_another_method_chooses_nothing():
    with pytest.raises(ConfigError, match="it is 'auto' that chooses"):
        tiny_llm({"method": "ngram", "num_speculative_tokens": 2}).drafter_choices()


def test_a_failing_model_costs_its_drafts_only():
    class Failing(BadDrafter):
        def propose(self, context):
            raise RuntimeError("not today")

    llm = tiny_llm({"method": "auto", "drafter": {"method": Failing}})
    plain = tiny_llm().generate(PROMPT, SamplingParams(max_tokens=40), use_tqdm=False)[0]
    output = llm.generate(PROMPT, SamplingParams(max_tokens=40), use_tqdm=False)[0]
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert llm.stats.num_failed_drafts > 0


@pytest.mark.parametrize("own", [{"method": "draft_model", "model": "tiny"}, {"method": "self", "exit_layer": 1}])
def test_a_prompt_that_was_read_for_another_sequence_is_not_to_be_read_again(own, monkeypatch):
    unread = []
    num_unread = GuardedDrafter.num_unread

    def noted(self, request):
        unread.append(num_unread(self, request))
        return unread[-1]

    monkeypatch.setattr(GuardedDrafter, "num_unread", noted)
    llm = tiny_llm({"method": "auto", "drafter": own})
    found = []
    for _ in range(2):
        unread.clear()
        llm.generate({"prompt_token_ids": list(range(6, 86))}, SamplingParams(max_tokens=6), use_tqdm=False)
        found.append(unread[0])
    if own["method"] == "draft_model":
        assert found[0] == 80
    assert found[1] < 16


def test_hidden_states_are_not_saved_by_the_way():
    with pytest.raises(ConfigError, match="extract_hidden_states"):
        resolve_speculative("auto", storage())
    with pytest.raises(ConfigError, match="'extract_hidden_states' drafts nothing, and beside auto saves nothing"):
        resolve_speculative({"method": "auto", "drafter": EXTRACT})


@pytest.fixture
def shipped(folder, monkeypatch, tmp_path):
    """A head that comes with forerun, for the model in `folder`."""
    heads = tmp_path / "heads"
    target = load_target(folder, EngineSettings(model=str(folder), dtype="float32"), torch.device("cpu"))
    content, tensors = begin_from_block(target, torch.arange(0, VOCAB_SIZE, 2), seed=0)
    save_head(heads / "one", content, tensors, layout="specforge", target=folder, stored_as="int8")
    made_for = HeadTarget.of(target, title="Small")
    (heads / "one" / TARGET_FILE).write_text(json.dumps(made_for.to_json()))
    monkeypatch.setattr(shipped_heads, "FOLDER", heads)
    return find_shipped_head(target)


def head_choice(llm):
    return {choice.method: choice for choice in llm.drafter_choices()}["trained head"]


@needs_kernels
@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", "int8"), ("bfloat16", "int4"), ("float32", None)])
def test_a_head_that_comes_with_forerun_drafts_unasked_in_the_bits_that_memory_has_room_for(
    shipped, folder, dtype, bits
):
    need = shipped.num_bytes(WEIGHT_FORMATS[bits]) if bits else 4 * shipped.num_weights
    plain = LLM(folder, dtype=dtype, max_model_len=128, speculative_config=None)
    llm = auto(folder, auto_memory=(need + 1) / plain.executor.model.weight_bytes, dtype=dtype)
    chosen = head_choice(llm)
    said = f"the head for Small that comes with forerun{', in 4 bits' if bits == 'int4' else ''}"
    assert (chosen.is_used, chosen.why, chosen.num_bytes) == (True, said, need)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40)
    found, expected = (
        one.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids for one in (llm, plain)
    )
    assert found == expected
    model = llm.executor.drafting.drafter._model
    assert model._added.expected(0.0, 0.0)[0].gain != pytest.approx(HOPE), "it was compared with the text"
    if bits:
        (layer,) = model.guarded.drafter._predictor._head._layers.layers
        assert {weight.format.name for weight in layer.weights.values()} == {"Q4_1" if bits == "int4" else bits}


OTHER_VERIFIERS = ["standard", "block", "typical"]


@needs_kernels
@pytest.mark.parametrize("method", ["matching", *OTHER_VERIFIERS])
def test_a_head_drafts_by_the_targets_draws_only_where_the_verifier_decides_by_them(
    shipped, folder, method, monkeypatch
):
    built = []
    build = Eagle3Config.build
    monkeypatch.setattr(Eagle3Config, "build", lambda self, target: built.append(self) or build(self, target))
    config = {"method": "auto", "auto_memory": 100, "rejection_sample_method": method}
    llm = LLM(folder, speculative_config=config, max_model_len=128)
    assert head_choice(llm).is_used
    llm.replace_head(shipped.folder)
    expected = "coupled" if method == "matching" else "greedy"
    assert [one.draft_sample_method for one in built] == [expected] * 2


@pytest.mark.parametrize("method", OTHER_VERIFIERS)
def test_a_drafter_that_is_coupled_to_the_targets_draws_is_refused_where_another_verifier_decides(method):
    own = {"method": "self", "quantization": "int8", "draft_sample_method": "coupled"}
    config = {"method": "auto", "drafter": own}
    assert resolve_speculative(config).drafter.drafter[1].draft_sample_method == "coupled"
    with pytest.raises(
        ConfigError, match=f"'matching' only and not with '{method}'; may be 'greedy' or 'probabilistic'"
    ):
        resolve_speculative(config | {"rejection_sample_method": method})
    resolve_speculative(
        {"method": "auto", "drafter": own | {"draft_sample_method": "greedy"}, "rejection_sample_method": method}
    )


@needs_kernels
def test_a_head_that_no_bits_make_small_enough_is_refused_with_the_memory_that_it_takes(shipped, folder):
    refused = head_choice(auto(folder, auto_memory=0.01))
    assert not refused.is_used
    allowed = float(re.search(r"allow it with auto_memory=([\d.]+)", refused.why)[1])
    assert head_choice(auto(folder, auto_memory=allowed)).is_used
    assert not head_choice(auto(folder, auto_memory=allowed - 0.02)).is_used


@needs_kernels
def test_no_memory_is_asked_for_where_the_drafter_would_not_be_used_with_it(shipped, folder):
    need = shipped.num_bytes(WEIGHT_FORMATS["int8"])
    weights = LLM(folder, dtype="bfloat16", max_model_len=128).executor.model.weight_bytes
    found = {choice.method: choice for choice in auto(folder, auto_memory=(need + 1) / weights).drafter_choices()}
    assert found["trained head"].is_used
    assert found["self"].num_bytes > need
    assert (found["self"].is_used, found["self"].why) == (False, "a drafter before it is used")
