"""The functions that compute a decoder's layers: by formula (`ops.cuda`), or as Triton kernels (`ops.cuda.kernels`)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from forerun.errors import ConfigError
from forerun.ops.cuda import torch_matmul


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
    """Those of `layers`, `matmul` and `attention`."""

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
    are_batch_invariant: bool  # no bit of a row depends on the rows beside it

    @classmethod
    def choose(cls, device: torch.device, *, matmul: str = "kernels") -> LayerFunctions:
        """The kernels on a GPU, the formulas elsewhere.

        Args:
            device: that of the weights.
            matmul: "torch" has torch compute the products (`ops.cuda.torch_matmul`).

        Raises:
            ConfigError: triton is not installed.
        """
        attention, layers, products = modules_for(device, "attention", "layers", "matmul")
        if matmul == "torch":
            products = torch_matmul
        elif device.type == "cuda":
            products.wide_tiles(device, torch.bfloat16)  # here, where it may wait for the device
        return cls.of(attention=attention, layers=layers, matmul=products, are_kernels=device.type == "cuda")

    @classmethod
    def of(cls, *, attention: Any, layers: Any, matmul: Any, are_kernels: bool) -> LayerFunctions:
        """Those of three modules, the first two of one kind."""
        return cls(
            *(layers.embed, layers.rms_norm, layers.add_normed, layers.rotate_and_write, layers.keep),
            *(matmul.linear, matmul.capped_linear, matmul.add_linear, matmul.gated_linear),
            attention.attend,
            are_kernels,
            matmul is not torch_matmul,
        )
