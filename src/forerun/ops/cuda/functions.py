"""The functions that compute a decoder's layers: by formula (`ops.cuda`), or as Triton kernels (`ops.cuda.kernels`)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from forerun.errors import ConfigError


def modules_for(device: torch.device, *names: str) -> list[Any]:
    """The modules of these names: the kernels on a GPU, the formulas elsewhere.

    Raises:
        ConfigError: triton is not installed.
    """
    package = "forerun.ops.cuda.kernels" if device.type == "cuda" else "forerun.ops.cuda"
    try:
        import_module(package)
        return [import_module(f"{package}.{name}") for name in names]
    except ImportError as error:
        raise ConfigError(
            f"device_step: on a GPU it needs triton ({error}); pip install 'forerun[cuda]', or set it to False"
        ) from None


class LayerFunctions(NamedTuple):
    """Those of `layers`, `matmul` and `attention`, all of one kind."""

    embed: Callable[..., None]
    rms_norm: Callable[..., None]
    add_normed: Callable[..., None]
    rotate_and_write: Callable[..., None]
    keep: Callable[..., None]
    linear: Callable[..., None]
    capped_linear: Callable[..., None]
    add_linear: Callable[..., None]
    gated_linear: Callable[..., None]
    attend: Callable[..., None]
    are_kernels: bool

    @classmethod
    def choose(cls, device: torch.device) -> LayerFunctions:
        """The kernels on a GPU, the formulas elsewhere.

        Raises:
            ConfigError: triton is not installed.
        """
        attention, layers, matmul = modules_for(device, "attention", "layers", "matmul")
        return cls.of(attention=attention, layers=layers, matmul=matmul, are_kernels=device.type == "cuda")

    @classmethod
    def of(cls, *, attention: Any, layers: Any, matmul: Any, are_kernels: bool) -> LayerFunctions:
        """Those of three modules of one kind."""
        return cls(
            *(layers.embed, layers.rms_norm, layers.add_normed, layers.rotate_and_write, layers.keep),
            *(matmul.linear, matmul.capped_linear, matmul.add_linear, matmul.gated_linear),
            attention.attend,
            are_kernels,
        )
