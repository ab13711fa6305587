"""Small real engines for tests: a tiny random Llama, of torch calls in fp32 unless the native kernels are asked for."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import resolve_speculative
from forerun.drafters.guard import GuardedDrafter
from forerun.engine.scheduler import Scheduler
from forerun.executor.hidden_states import HiddenStatesExporter
from forerun.executor.local import LocalExecutor
from forerun.kv.block_pool import BlockPool
from forerun.llm import LLM
from forerun.models.base import LoadedTarget
from forerun.models.loader import load_model
from forerun.models.packing import Packing
from forerun.models.tokenizer import load_tokenizer
from forerun.ops.native.attention import NativeAttention
from tests import heads_eagle, heads_medusa
from tests.foreign import few_tokens, save_foreign_twin
from tests.heads_dflash import tiny_dflash
from tests.heads_mtp import add_mtp_layers
from tests.native import KERNELS
from tests.stand_in import save_stand_in
from tests.tiny_models import save_tiny_model

VOCAB_SIZE = 97
EOS = 5


@functools.cache
def tiny_target(architecture="LlamaForCausalLM"):
    """A tiny random model, loaded once per test process."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_model(Path(folder), architecture, seed=1, vocab_size=VOCAB_SIZE)
        model = load_model(path, dtype=torch.float32, device=torch.device("cpu"))
    return LoadedTarget(model=model, tokenizer=None, eos_token_ids=frozenset({EOS}))


@functools.cache
def native_target(dtype=torch.bfloat16, quantization=None):
    """A tiny random chat model on the best native kernels."""
    kernels = next(iter(KERNELS.values()))
    with tempfile.TemporaryDirectory() as folder:
        path = save_stand_in(Path(folder))
        packing = Packing.choose(kernels, dtype=dtype, quantization=quantization)
        model = load_model(path, dtype=dtype, device=torch.device("cpu"), packing=packing)
        tokenizer = load_tokenizer(path)
    return LoadedTarget(
        model=model,
        attention=NativeAttention(kernels),
        tokenizer=tokenizer,
        eos_token_ids=frozenset({EOS}),
        kernels=kernels,
    )


@functools.cache
def tiny_drafter(vocab_size, noise=0.1):
    """A folder with the model behind `tiny_target` (vocabulary of 97) or `native_target` (264), its matrices disturbed."""
    folder = Path(_scratch().name) / f"{vocab_size}-{noise}"
    if vocab_size == VOCAB_SIZE:
        save_tiny_model(folder, seed=1, vocab_size=VOCAB_SIZE)
    else:
        save_stand_in(folder)
    weights = load_file(folder / "model.safetensors")
    source = torch.Generator().manual_seed(0)
    for weight in weights.values():
        if weight.ndim == 2:
            weight += noise * weight.std() * torch.randn(weight.shape, generator=source)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@functools.cache
def foreign_drafter(vocab_size, noise=0.1, num_missing=15):
    """A folder with `tiny_drafter`'s model behind another tokenizer, which lacks some of the target's tokens."""
    folder = Path(_scratch().name) / f"foreign-{vocab_size}-{noise}-{num_missing}"
    tokenizer = few_tokens() if vocab_size == VOCAB_SIZE else native_target().tokenizer
    return save_foreign_twin(folder, tiny_drafter(vocab_size, noise), tokenizer, num_missing=num_missing)


@functools.cache
def pard_drafter(vocab_size, noise=0.1, **changes):
    """A folder with `tiny_drafter`'s model, whose configuration names a mask token, and with `changes` of it."""
    return with_config(tiny_drafter(vocab_size, noise), {"pard_token": 11} | changes)


def with_config(original, changes):
    """A copy of a folder with some values of config.json changed."""
    folder = Path(tempfile.mkdtemp(dir=_scratch().name))
    shutil.copytree(original, folder, dirs_exist_ok=True)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))
    return folder


@functools.cache
def mtp_folder(vocab_size):
    """A folder with the model behind `tiny_target` or `native_target` and a random MTP layer beside it."""
    folder = Path(_scratch().name) / f"{vocab_size}-mtp"
    if vocab_size == VOCAB_SIZE:
        save_tiny_model(folder, seed=1, vocab_size=VOCAB_SIZE)
    else:
        save_stand_in(folder)
    return add_mtp_layers(folder, "llama")


@functools.cache
def _scratch():
    """Files of this test process."""
    return tempfile.TemporaryDirectory()


def storage(folder=None, **extra):
    """The kv_transfer_config that saves hidden states to `folder`, or where nobody looks."""
    return {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder or _scratch().name)} | extra,
    }


def tiny_llm(speculative_config=None, *, target=None, verifies_all=False, **settings):
    """An LLM over the tiny model, or over `target`; `settings` as for `LLM`. A model may be one of `TINY_CHECKPOINTS`.

    With `verifies_all` no clock decides how much of the drafts is verified.
    """
    target = target or tiny_target()
    if speculative_config and speculative_config.get("model") == "foreign":
        target = replace(target, tokenizer=target.tokenizer or few_tokens())
    speculative_config = _with_folders(speculative_config, target)
    if speculative_config and speculative_config.get("method") == "extract_hidden_states":
        settings.setdefault("kv_transfer_config", storage())
    if speculative_config and speculative_config.get("method") == "mtp" and target.path is None:
        target = replace(target, path=mtp_folder(target.model.vocab_size))
    defaults = {"max_model_len": 128, "num_gpu_blocks_override": 512, "block_size": 4}
    speculative = resolve_speculative(speculative_config, settings.get("kv_transfer_config"))
    if verifies_all:
        speculative = replace(speculative, is_adaptive=False)
    return LLM.from_target(target, EngineSettings(model="tiny", **(defaults | settings)), speculative)


TINY_CHECKPOINTS = {
    "tiny": lambda target: tiny_drafter(target.model.vocab_size),
    "foreign": lambda target: foreign_drafter(target.model.vocab_size),
    "tiny-pard": lambda target: pard_drafter(target.model.vocab_size),
    "tiny-dflash": lambda target: tiny_dflash(target.model.vocab_size),
    "tiny-eagle": lambda target: tiny_head(heads_eagle.eagle, target),
    "tiny-eagle3": lambda target: tiny_head(heads_eagle.eagle3, target),
    "tiny-peagle": lambda target: tiny_head(heads_eagle.peagle, target),
    "tiny-medusa": lambda target: tiny_head(heads_medusa.medusa, target),
    "tiny-mlp-speculator": lambda target: tiny_head(heads_medusa.mlp_speculator, target),
}
"""What a speculative_config may name as its model -> the folder for a target."""


def _with_folders(config, target):
    """The config, or each of a hybrid's, with a folder where it names one of `TINY_CHECKPOINTS`."""
    if not config:
        return config
    config = dict(config)
    if config.get("model") in TINY_CHECKPOINTS:
        config["model"] = str(TINY_CHECKPOINTS[config["model"]](target))
    if "drafter" in config:
        config["drafter"] = _with_folders(config["drafter"], target)
    if "drafters" in config:
        config["drafters"] = [_with_folders(one, target) for one in config["drafters"]]
    return config


def tiny_head(make, target):
    """A folder with the random head that `make(target)` gives as (config, tensors)."""
    folder = Path(_scratch().name) / f"{make.__name__}-{target.model.vocab_size}"
    return folder if folder.exists() else heads_eagle.save(folder, *make(target))


@dataclass(frozen=True)
class Insides:
    """The engine's parts, for white-box claims about memory."""

    scheduler: Scheduler
    pool: BlockPool
    executor: LocalExecutor
    drafting: GuardedDrafter
    exporter: HiddenStatesExporter | None


def engine_of(llm):
    """What is inside an LLM's engine."""
    parts, executor = llm.engine.parts, llm.executor
    return Insides(parts.scheduler, parts.pool, executor, executor.drafting, executor.exporter)
