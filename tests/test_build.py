"""Engines from a configuration alone, and what they compute with."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config

from forerun import LLM, SamplingParams, build
from forerun.build import choose_arithmetic, load_target
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import SpeculativeConfig
from forerun.core.cpu_name import describe_processor
from forerun.errors import ConfigError, ModelError, RequestError
from forerun.models.decoder import TorchLayers
from forerun.models.gguf.checkpoint import GGUFCheckpoint
from forerun.ops.attention.paged import PagedAttention
from forerun.ops.native import library
from forerun.ops.native.attention import NativeAttention
from forerun.ops.native.formats.blocks import WORD_LEVELS
from forerun.ops.native.layers import NativeLayers
from forerun.ops.native.library import KERNELS_VARIABLE, LEVELS, load_kernels
from tests.engines import native_target, tiny_llm
from tests.models.test_transformers_model import LATENT, SIZES, make_model
from tests.native import needs_kernels
from tests.stand_in import save_stand_in
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_models import save_tiny_model, tiny_config
from tests.tiny_tokenizer import save_tiny_tokenizer

CPU = torch.device("cpu")
SAMPLING = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def folder(tmp_path):
    tiny_config("LlamaForCausalLM", vocab_size=264).save_pretrained(tmp_path)
    return tmp_path


def test_a_configuration_alone_gives_a_model_that_continues_token_ids(folder):
    (output,) = LLM(folder, load_format="dummy").generate([[1, 2, 3]], SAMPLING, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


@pytest.mark.parametrize("speculative_config", [None, "auto"])
def test_engines_are_built_with_their_gpu_as_the_threads_current_one(folder, speculative_config, monkeypatch):
    """Kernels that look at a target's layers, or prepare a drafter's, are launched there."""
    current, seen = [], {}

    @contextmanager
    def noted(device):
        current.append(device)
        yield
        current.pop()

    def watched(module, name):
        function = getattr(module, name)

        def watching(*args, **options):
            seen[name] = list(current)
            return function(*args, **options)

        monkeypatch.setattr(module, name, watching)

    monkeypatch.setattr(build, "as_current", noted)
    watched(build, "_check_activations")
    watched(build, "steps_on_device")
    watched(SpeculativeConfig, "control")
    LLM(folder, load_format="dummy", speculative_config=speculative_config)
    assert list(seen) == ["_check_activations", "steps_on_device", "control"]
    assert all(devices == [CPU] for devices in seen.values())
    assert current == []


def test_made_up_weights_are_the_same_each_time(folder):
    texts = [LLM(folder, load_format="dummy").generate([[1, 2, 3]], SAMPLING, use_tqdm=False)[0] for _ in range(2)]
    assert texts[0].outputs[0].token_ids == texts[1].outputs[0].token_ids


def test_without_a_tokenizer_a_text_is_refused(folder):
    with pytest.raises(RequestError, match="give token ids instead of text"):
        LLM(folder, load_format="dummy").generate("text", SAMPLING, use_tqdm=False)


def test_a_tokenizer_beside_the_configuration_is_used(folder):
    save_tiny_tokenizer(folder)
    assert LLM(folder, load_format="dummy").get_tokenizer().decode([259]) == "he"


def test_without_load_format_a_configuration_alone_is_refused(folder):
    with pytest.raises(ModelError, match="no tokenizer"):
        LLM(folder)


# --- a rope with other factors for long texts ----------------------------------------------------


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1, 1.5, 2, 4], "long_factor": [1, 3, 8, 20]}


@pytest.fixture
def longrope(tmp_path):
    """A model that was trained on 64 tokens, and can have 512."""
    save_tiny_model(
        tmp_path, "Phi3ForCausalLM", vocab_size=264, original_max_position_embeddings=64, rope_parameters=LONGROPE
    )
    save_tiny_tokenizer(tmp_path)
    return tmp_path


def test_a_model_with_longrope_has_its_trained_length_unless_a_longer_one_is_asked_for(longrope, caplog):
    assert LLM(longrope).max_model_len == 64
    assert "max_model_len is 64, the length that the model was trained on; set it, to 512 at most" in caplog.text
    caplog.clear()
    assert LLM(longrope, max_model_len=200).max_model_len == 200
    assert not caplog.text
    with pytest.raises(ConfigError, match="max_model_len: got 513; the model allows at most 512"):
        LLM(longrope, max_model_len=513)


@pytest.mark.parametrize("max_model_len", [64, 65])
def test_transformers_writes_the_same_with_longrope_where_all_its_texts_take_the_same_factors(longrope, max_model_len):
    prompt = list(range(3, 3 + max_model_len - 1))
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5)
    (output,) = LLM(longrope, dtype="float32", max_model_len=max_model_len).generate([prompt], sampling, use_tqdm=False)
    (found,) = output.outputs[0].logprobs
    reference = AutoModelForCausalLM.from_pretrained(longrope, dtype=torch.float32).eval()
    longest = torch.tensor(
        [prompt + [5] * (max_model_len > 64)]
    )  # of 65 tokens transformers turns all by the long ones
    with torch.inference_mode():
        expected = reference(longest).logits[0, len(prompt) - 1].log_softmax(-1)
    for token, one in found.items():
        assert one.logprob == pytest.approx(expected[token].item(), abs=1e-4)


@needs_kernels
@pytest.mark.parametrize("method", ["self", "draft_model"])
def test_a_drafter_of_the_same_files_has_the_same_factors(longrope, method):
    config = {"method": method, "num_speculative_tokens": 3, "quantization": "int8"}
    config |= {"model": str(longrope)} if method == "draft_model" else {}
    llm = LLM(longrope, max_model_len=200, dtype="bfloat16", speculative_config=config)
    scalings = {rope.scaling for rope in llm.executor.drafting.drafter._predictor._model.config.ropes}
    assert scalings == {rope.scaling for rope in llm._target.model.config.ropes}
    assert all(scaling.is_long for scaling in scalings)


# --- what computes ------------------------------------------------------------------------------


@pytest.fixture
def no_kernels(monkeypatch, tmp_path_factory):
    """As installed where there was no compiler."""
    empty = tmp_path_factory.mktemp("no_kernels")
    monkeypatch.setattr(library, "library_file", lambda level: empty / level)
    monkeypatch.setattr(library, "kernels_of_level", library.kernels_of_level.__wrapped__)
    library.warn_if_not_built.cache_clear()
    yield
    library.warn_if_not_built.cache_clear()


def choose(device=CPU, *, stored_dtype=torch.bfloat16, **settings):
    """The dtype to compute in, and the format to pack weights in, without the number of its bits."""
    dtype, packing = choose_arithmetic(EngineSettings(model="m", **settings), device, stored_dtype=stored_dtype)
    return dtype, None if packing is None else packing.format.name.removesuffix("-12bit")


@needs_kernels
@pytest.mark.parametrize(
    ("stored_dtype", "settings", "computes", "packs"),
    [
        (torch.bfloat16, {}, torch.bfloat16, "bf16"),
        (torch.float32, {}, torch.float32, "fp32"),
        (torch.float16, {}, torch.float32, "fp32"),
        (None, {}, torch.float32, "fp32"),
        (torch.bfloat16, {"dtype": "float32"}, torch.float32, "fp32"),
        (torch.float32, {"dtype": "bfloat16"}, torch.bfloat16, "bf16"),
        (torch.bfloat16, {"dtype": "float16"}, torch.float16, None),
        (torch.bfloat16, {"dtype": "float64"}, torch.float64, None),
        (torch.float32, {"quantization": "int8"}, torch.bfloat16, "int8"),
        (torch.bfloat16, {"quantization": "int8", "dtype": "bfloat16"}, torch.bfloat16, "int8"),
    ],
)
def test_the_kernels_compute_what_they_can(stored_dtype, settings, computes, packs):
    assert choose(stored_dtype=stored_dtype, **settings) == (computes, packs)


@pytest.mark.parametrize(("dtype", "computes"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_without_kernels_torch_computes_in_fp32_unless_told_otherwise(no_kernels, dtype, computes):
    assert choose(dtype=dtype) == (computes, None)


def test_on_a_gpu_torch_computes_in_the_checkpoints_dtype():
    assert choose(torch.device("cuda")) == (None, None)


@pytest.mark.parametrize("name", ["quantization", "activation_dtype"])
def test_int8_without_kernels_is_refused(no_kernels, name):
    with pytest.raises(ConfigError, match=rf"{name}: got 'int8', which the native CPU kernels compute.*leave it out"):
        choose(**{name: "int8"})


@pytest.mark.parametrize("name", ["quantization", "activation_dtype"])
def test_int8_on_a_gpu_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}: got 'int8'"):
        choose(torch.device("cuda"), **{name: "int8"})


@needs_kernels
@pytest.mark.parametrize("name", ["int8", "int16"])
def test_whole_activations_for_a_model_without_blocks_are_refused(tmp_path, name):
    path = save_tiny_model(tmp_path)
    settings = EngineSettings(model=str(path), activation_dtype=name, dtype="bfloat16", load_format="dummy")
    with pytest.raises(
        ConfigError, match=rf"activation_dtype: got '{name}', but no weight of .* is in blocks.*leave it out"
    ):
        load_target(path, settings, CPU)


@needs_kernels
def test_activations_in_bfloat16_for_a_model_that_is_computed_in_float32_are_refused(tmp_path):
    path = save_tiny_model(tmp_path)
    settings = EngineSettings(model=str(path), activation_dtype="bfloat16", load_format="dummy")
    with pytest.raises(
        ConfigError, match=r"activation_dtype: got 'bfloat16', but .* is computed in float32; .*dtype='bfloat16'"
    ):
        load_target(path, settings, CPU)


@needs_kernels
@pytest.mark.parametrize(
    ("asked", "level", "bits"),
    [
        ("auto", "avx512vnni", 16),
        ("auto", "avxvnni", 16),
        *(("auto", level, 0) for level in LEVELS if level not in WORD_LEVELS),
        ("bfloat16", "avx512vnni", 0),
        ("int16", "portable", 16),
        ("int8", "avx512vnni", 8),
    ],
)
def test_blocks_are_multiplied_with_what_was_asked_for_or_is_fast_here(tmp_path, monkeypatch, asked, level, bits):
    path = tmp_path / "tiny.gguf"
    save_tiny_gguf(path, quantized=True)
    kernels = copy.copy(load_kernels())
    kernels.level = level
    monkeypatch.setattr(build, "load_kernels", lambda: kernels)
    settings = EngineSettings(model=str(path), activation_dtype=asked, dtype="bfloat16")
    assert load_target(path, settings, CPU).model.row_bits == bits


def test_a_tokenizer_of_another_kind_is_refused_before_any_weight_is_read(tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    save_tiny_gguf(path)
    path.write_bytes(path.read_bytes().replace(b"gpt2", b"bert"))
    read = []
    monkeypatch.setattr(GGUFCheckpoint, "load", lambda self, name: read.append(name))
    with pytest.raises(ModelError, match="its tokenizer is of the kind 'bert', which cannot be built"):
        load_target(path, EngineSettings(model=str(path)), CPU)
    assert read == []


def test_without_kernels_one_warning_says_what_is_lost(no_kernels, caplog):
    choose()
    choose()
    (record,) = caplog.records
    assert "the native CPU kernels are not built: decoding is slower" in record.message
    assert "reinstall forerun" in record.message


@needs_kernels
@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_where_kernels_are_built_nothing_is_warned_of(caplog, dtype):
    choose(dtype=dtype)
    assert not caplog.records


@needs_kernels
def test_torch_computes_with_one_thread_while_the_kernels_have_theirs(tmp_path):
    seen = []

    def look(_output_ids, logits):
        seen.append(torch.get_num_threads())
        return logits

    llm = LLM(save_stand_in(tmp_path))
    torch.set_num_threads(2)
    try:
        llm.generate("text", SamplingParams(max_tokens=2, logits_processors=[look]), use_tqdm=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert set(seen) == {1}


@needs_kernels
def test_keys_of_nan_end_the_request_in_an_error_instead_of_vanishing(tmp_path):
    folder = save_stand_in(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (output,) = LLM(folder).generate("text", SAMPLING, use_tqdm=False)
    assert output.error == "logits: the largest is nan; must be finite; check the weights and the dtype"


def loaded(folder, **settings):
    """What computes the layers and the attention of a tiny model."""
    target = load_target(save_stand_in(folder), EngineSettings(model="m", **settings), CPU)
    return type(target.model.layers), type(target.attention)


@needs_kernels
@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_a_model_is_loaded_onto_the_kernels(tmp_path, settings):
    assert loaded(tmp_path, **settings) == (NativeLayers, NativeAttention)


def test_without_kernels_a_model_is_loaded_onto_torch(tmp_path, no_kernels):
    assert loaded(tmp_path) == (TorchLayers, PagedAttention)


@needs_kernels
@pytest.mark.parametrize(("sizes", "attention"), [((4, 4), NativeAttention), ((2, 3), PagedAttention)], ids=str)
def test_the_kernels_attend_where_they_take_the_size_of_the_keys(tmp_path, sizes, attention):
    latent = {"qk_rope_head_dim": sizes[0], "head_dim": sizes[0], "qk_nope_head_dim": sizes[1]}
    folder = save_stand_in(tmp_path)  # for its tokenizer
    make_model(DeepseekV3Config(**SIZES | LATENT | latent, rope_interleave=False)).save_pretrained(folder)
    target = load_target(folder, EngineSettings(model="m"), CPU)
    assert type(target.attention) is attention
    assert not target.model.is_batch_invariant


@needs_kernels
def test_the_kernels_give_the_text_of_torch(tmp_path, monkeypatch):
    folder = save_stand_in(tmp_path)
    texts = [LLM(folder, dtype="float32").generate("the sea", SAMPLING, use_tqdm=False)[0].outputs[0].text]
    monkeypatch.setenv(KERNELS_VARIABLE, "off")
    texts.append(LLM(folder, dtype="float32").generate("the sea", SAMPLING, use_tqdm=False)[0].outputs[0].text)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("settings", "name"), [({}, "local"), ({"device_step": True}, "device")])
def test_statistics_say_which_executor_computes_and_with_what(settings, name):
    info = tiny_llm(**settings).engine.state.executor
    assert (info.name, info.kernels) == (name, "torch")
    assert info.device == describe_processor()


@needs_kernels
def test_statistics_name_the_native_kernels():
    llm = tiny_llm(target=native_target())
    assert llm.engine.state.executor.kernels == f"native kernels, {llm.kernels.level}"
