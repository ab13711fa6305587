"""Writes a trained head in a published layout, with a model card that says what it was made from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.models.config_file import read_config
from forerun.models.heads.eagle3 import DRAFTS_BOTH, NUM_INDUCTION_HEADS, canonical_name
from forerun.models.model_folder import CONFIG_FILE
from forerun.ops.block_writing import BLOCK
from forerun.train.kept_files import write_tensors, write_text
from forerun.train.measuring import DRAFTING, NUM_DRAFTED, Measurement

LAYOUTS = ("speculators", "specforge")
STORED_AS = ("bf16", "int8")
"""How a head's matrices can be stored: int8 has a scale for each output, and half of the bytes."""

INT8_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": None,
        }
    },
}
"""The `quantization_config` of matrices in int8, as compressed-tensors writes it."""

OUTSIDE_LAYER = (
    "architectures",
    "draft_vocab_size",
    "norm_before_residual",
    "eagle_aux_hidden_state_layer_ids",
    "mask_token_id",
    DRAFTS_BOTH,
    NUM_INDUCTION_HEADS,
)
"""Keys of config.json that do not describe the head's layer."""


def save_head(
    folder: Path,
    content: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    layout: str,
    target: Path,
    stored_as: str = "bf16",
    verifier: str | None = None,
) -> None:
    """Write config.json and model.safetensors, floats in bf16 but for matrices in int8.

    Args:
        folder: where to; it is made.
        content: config.json in the authors' layout.
        tensors: the head's, in the authors' layout.
        layout: one of `LAYOUTS`.
        target: the target's folder or file.
        stored_as: one of `STORED_AS`.
        verifier: what `vllm serve` loads as the target of a head in the layout of speculators, a hub id or a folder; None:
            where the target lies now.

    Raises:
        ConfigError: the folder cannot be written.
    """
    rounded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if stored_as == "int8" and fits_int8(tensor):
            rounded[name], rounded[f"{name}_scale"] = in_int8(tensor)
        else:
            rounded[name] = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
    if layout == "speculators":
        rounded = {canonical_name(name): tensor for name, tensor in rounded.items()}
        content = _speculators_config(content, target=target, verifier=verifier or str(target.resolve()))
    if stored_as == "int8":
        ignored = [name for name, tensor in rounded.items() if tensor.ndim == 2 and tensor.dtype == torch.bfloat16]
        modules = [name.removesuffix(".weight") for name in sorted(ignored)]
        content = {**content, "quantization_config": {**INT8_CONFIG, "ignore": modules}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output: cannot make {folder} ({error}); give a place that can be written") from error
    write_tensors(folder / "model.safetensors", rounded, {"format": "pt"})
    write_text(folder / CONFIG_FILE, json.dumps(content, indent=2) + "\n")


def fits_int8(tensor: Tensor) -> bool:
    """Whether a tensor is a matrix of whole blocks of inputs, which all readers of int8 take."""
    return tensor.is_floating_point() and tensor.ndim == 2 and tensor.shape[1] % BLOCK == 0


def in_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [outputs, inputs] to codes, int8 of that shape, and scales, fp16 [outputs, 1]: value = scale * code."""
    scales = (matrix.float().abs().amax(1, keepdim=True) / 127).half()
    codes = (matrix.float() / scales.float().clamp(min=torch.finfo(torch.float16).tiny)).round().clamp(-127, 127)
    return codes.to(torch.int8), scales


def _speculators_config(content: Mapping[str, Any], *, target: Path, verifier: str) -> dict[str, Any]:
    """Return config.json in speculators' layout."""
    architectures = list(read_config(target).architectures or [])
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": NUM_DRAFTED,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        **{name: content[name] for name in OUTSIDE_LAYER[1:] if name in content},
        "target_hidden_size": None,
        "norm_before_fc": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformer_layer_config": {name: value for name, value in content.items() if name not in OUTSIDE_LAYER},
    }


def model_card(
    *,
    target: str,
    command: str,
    facts: Mapping[str, object],
    measured: Measurement | None,
    curve: Sequence[Measurement] = (),
) -> str:
    """Write the model card: what the head is for, how it came to be, what it was measured to be worth.

    `curve` are measurements of the head on the way, by the tokens that it had been trained on.
    """
    drafting = " ".join(
        f"--speculative-config.{name.replace('_', '-')} {value}"
        for name, value in {**DRAFTING, "model": "FOLDER"}.items()
    )
    lines = [
        f"# EAGLE-3 head for {target}",
        "",
        f"It drafts for {target} only. Made by `{command}` of forerun; use it with",
        f"`{drafting}`,",
        "or in bf16 and the layout of speculators with `vllm serve`.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
        "",
    ]
    if measured is not None:
        lines += [
            f"Drafts of {NUM_DRAFTED} tokens, so drafted, for conversations that were held out:",
            "",
            "| temperature | acceptance length | accepted at each position |",
            "|---|---|---|",
            *(
                f"| {one.temperature:g} | {one.length:.2f} | {' '.join(f'{share:.0%}' for share in one.per_position)} |"
                for one in measured.at
            ),
            "",
        ]
        if measured.speed_up is not None:
            cost = "" if measured.draft_ms is None else f"a drafted token took {measured.draft_ms:.2f} ms, and "
            lines += [
                f"On the machine of the training {cost}greedy text of one sequence came "
                f"{measured.speed_up:.2f} times as fast as without drafts.",
                "",
            ]
    if len(curve) > 1:
        temperatures = [one.temperature for one in curve[0].at]
        lines += [
            "On the way there:",
            "",
            f"| trained on | {' | '.join(f'length at temperature {temperature:g}' for temperature in temperatures)} |",
            "|---" * (1 + len(temperatures)) + "|",
            *(
                f"| {one.num_tokens / 1e6:.2f}M tokens | {' | '.join(f'{at.length:.2f}' for at in one.at)} |"
                for one in curve
            ),
            "",
        ]
    return "\n".join(lines)
