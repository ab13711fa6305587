"""The target and the heads of a test run, each trained once."""

from __future__ import annotations

import fcntl
import functools
import json

import torch
from safetensors.torch import load_file

from forerun.models.base import LoadedTarget
from forerun.models.loader import load_model
from forerun.models.packing import Packing
from forerun.ops.native.attention import NativeAttention
from forerun.train.trainer import HeadCheckpoint, train_head
from tests.native import KERNELS
from tests.train import language


class Workshop:
    """Keeps what it trains in `folder`, which all processes of a test run share."""

    def __init__(self, folder):
        self._folder = folder

    @property
    def target(self):
        """The small language's Llama in torch, fp32."""
        return self.target_of(language.write)

    @functools.cache  # noqa: B019 (there is one workshop, to the end)
    def target_of(self, written):
        """The Llama of a language, in torch, fp32."""
        return self._load(written, torch.float32, kernels=None)

    @functools.cache  # noqa: B019
    def native_target_of(self, written):
        """The same on the best native kernels, in bf16."""
        return self._load(written, torch.bfloat16, kernels=next(iter(KERNELS.values())))

    def target_folder(self, written):
        """Its checkpoint."""
        return self._once(f"target-{written.__name__}", lambda folder: language.train_target(folder, written))

    def head(self, kind, settings, config, written=language.write):
        """A head of this kind for it."""

        def make(folder):
            texts = written(2000, seed=1).tolist()
            train_head(kind, self.target_of(written), texts, settings, config=config).save(folder)

        folder = self._once(kind, make)
        return HeadCheckpoint(
            config=json.loads((folder / "config.json").read_text()), tensors=load_file(folder / "model.safetensors")
        )

    def _load(self, written, dtype, *, kernels):
        path = self.target_folder(written)
        packing = Packing.choose(kernels, dtype=dtype) if kernels else None
        parts = {"attention": NativeAttention(kernels), "kernels": kernels} if kernels else {}
        return LoadedTarget(
            model=load_model(path, dtype=dtype, device=torch.device("cpu"), packing=packing),
            tokenizer=None,
            eos_token_ids=frozenset({language.EOS}),
            path=path,
            **parts,
        )

    def _once(self, name, make):
        """The folder of this name; the first process that asks makes it, others wait."""
        folder, unfinished = self._folder / name, self._folder / f"{name}.unfinished"
        with (self._folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                make(unfinished)
                unfinished.rename(folder)
        return folder
