"""Runs any other causal architecture, or one layer of it: transformers' own modelling code with forerun's attention in it.

This is slower than forerun's decoder. When a model is loaded it is probed and compared with transformers'
eager attention, so that it is refused rather than run wrong.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from forerun.core.batch import ForwardBatch, ForwardResult
from forerun.errors import DraftError, ModelError, one_line
from forerun.models.checkpoint import open_checkpoint
from forerun.models.config import longest_text
from forerun.models.gguf.file import open_gguf
from forerun.models.gguf.with_transformers import load_transformers_gguf
from forerun.models.model_folder import find_gguf
from forerun.models.mtp_layout import mtp_prefixes
from forerun.models.packing import PackedModule, Packing, pack_modules
from forerun.models.transformers_attention import (
    CHECKED_TOKENS,
    EAGER,
    PAGED,
    PROBE,
    PagedHandler,
    ProbedLayer,
    ProbeHandler,
    UnsupportedAttentionError,
    check_logits,
    register,
    with_attention,
)
from forerun.models.transformers_logging import quiet_transformers
from forerun.ops.attention import Attend
from forerun.ops.candidates import find_candidates

STAND_IN_TOKENS = 32  # of a single layer's model
LISTS_BY_LAYER = ("layer_types", "mlp_layer_types")
BATCH_ROPES = ("dynamic", "longrope")  # their frequencies depend on the longest sequence of the batch
FIXED_BY_ALPHA = ("hunyuan_v1_dense", "hunyuan_v1_moe")  # model types whose dynamic rope is none where it has an alpha


class TransformersModel:
    """A `TargetModel` around a transformers causal language model."""

    def __init__(self, model: Any, layers: Mapping[int, ProbedLayer], *, vocab_size: int) -> None:
        """Wrap a model that calls forerun's attention; `layers` are as `ProbeHandler` found them."""
        config = model.config.get_text_config()
        self.vocab_size = vocab_size
        self.hidden_size: int = config.hidden_size
        self.num_layers = len(layers)
        self.max_model_len = longest_text(
            config.max_position_embeddings, getattr(config, "rope_parameters", None) or {}
        )
        self.kv_specs = [layer.spec for layer in layers.values()]
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.is_batch_invariant = False  # transformers' own operations promise nothing
        self.finds_candidates = False
        self._model = model
        self._layers = layers
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, and of what was packed in their place."""
        packed = [module.linear.num_bytes for module in self._model.modules() if isinstance(module, PackedModule)]
        stored: list[int] = [weight.nbytes for weight in self._model.parameters()]
        return sum(packed) + sum(stored)

    def forward(self, batch: ForwardBatch, attend: Attend) -> ForwardResult:
        """Compute logits at `batch.logits_rows`, their candidates, and the hidden states that `batch.features` names.

        Raises:
            DraftError: this model does not have these hidden states.
        """
        rows = {"logits_to_keep": batch.logits_rows} if self._takes_rows else {}
        with self._keeping(batch.features) as features:
            output = self._model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                handler=PagedHandler(attend, self._layers),
                **rows,
            )
        logits = output.logits[0] if self._takes_rows else output.logits[0, batch.logits_rows]
        logits = logits.float()
        candidates = find_candidates(logits, batch.num_candidates) if batch.num_candidates else None
        return ForwardResult(logits=logits, candidates=candidates, features=features)

    @property
    def wrapped(self) -> Any:
        """transformers' model."""
        return self._model

    def run_layers(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the layers on [T, hidden_size] in place of embeddings -> the residual stream before the final norm."""
        last = f"hidden.{self.num_layers}"
        with self._keeping(frozenset({last})) as features:
            self._model.get_decoder()(
                inputs_embeds=hidden.to(self.dtype)[None],
                position_ids=positions[None],
                use_cache=False,
                handler=PagedHandler(attend, self._layers),
            )
        return features[last]

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `TargetModel`."""
        hidden: Tensor = self._model.get_input_embeddings()(token_ids[None])[0]
        return hidden

    def logits(self, normed: Tensor) -> Tensor:
        """See `TargetModel`; without the scale or the soft cap that some architectures apply."""
        head = self._model.get_output_embeddings()
        rows = normed if isinstance(head, PackedModule) else normed.to(head.weight.dtype)
        logits: Tensor = head(rows).float()
        return logits

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """See `TargetModel`."""
        head = self._model.get_output_embeddings()
        rows: Tensor = head.linear.rows(token_ids) if isinstance(head, PackedModule) else head.weight[token_ids]
        return rows

    @contextmanager
    def _keeping(self, names: frozenset[str]) -> Iterator[dict[str, Tensor]]:
        """Collect the named hidden states of passes inside the block in a dict."""
        features: dict[str, Tensor] = {}
        with ExitStack() as hooks:
            for name in sorted(names):
                hooks.enter_context(self._hook(name, features))
            yield features

    def _hook(self, name: str, features: dict[str, Tensor]) -> Any:
        """Hook the module whose input or output the hidden states are."""

        def keep(hidden: Any) -> None:
            features[name] = (hidden if isinstance(hidden, Tensor) else hidden[0])[0]

        if name == "last_hidden":
            return self._model.get_decoder().register_forward_hook(lambda _module, _args, output: keep(output[0]))
        layers, number = self._decoder_layers(), name.removeprefix("hidden.")
        if not number.isdecimal() or not name.startswith("hidden.") or int(number) > len(layers):
            raise DraftError(
                f"feature {name!r}: this model has last_hidden and hidden.0 to hidden.{len(layers)}; use another drafter"
            )
        if int(number) == len(layers):
            return layers[-1].register_forward_hook(lambda _module, _args, output: keep(output))
        return layers[int(number)].register_forward_pre_hook(
            lambda _module, args, kwargs: keep(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )

    def _decoder_layers(self) -> list[nn.Module]:
        """Return the layers of the residual stream, whatever the architecture calls them."""
        for module in self._model.get_decoder().modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers:
                return list(module)
        raise DraftError(f"{type(self._model).__name__}: its layers cannot be found for features; use another drafter")


def load_transformers_model(
    path: Path,
    config: PretrainedConfig,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    packing: Packing | None = None,
) -> TransformersModel:
    """Load a model folder or .gguf file into transformers' own modelling code.

    Args:
        path: the folder or file.
        config: its configuration.
        dtype: of weights, activations and KV, or None for the checkpoint's.
        device: where it computes.
        packing: packs the linear layers for the native kernels, or None for torch.

    Raises:
        ModelError: weights and architecture do not fit, or the architecture cannot run over a paged cache.
    """
    _refuse_batch_ropes(path, config)
    if packing is not None and packing.format.weighs_inputs:
        raise ModelError(
            f"quantization: got {packing.format.name!r}, which is for forerun's own decoder alone; "
            f"{config.model_type!r} runs through transformers' code; use int8"
        )
    model = _load_transformers(path, config, dtype).to(device).eval().requires_grad_(False)
    try:
        return wrap_model(model, packing)
    except UnsupportedAttentionError as error:
        raise ModelError(
            f"{path}: attention of {type(model).__name__} cannot be replaced by forerun's: {error}; "
            "use a model of another architecture"
        ) from error


def load_one_layer(
    like: TransformersModel, weights: Mapping[str, Tensor], packing: Packing | None
) -> TransformersModel:
    """Load a model of one layer like another model's last, for `TransformersModel.run_layers`.

    transformers converts the weights as it converts a whole checkpoint's (it stacks experts, for one).
    Embedding, final norm and head are random: `wrap_model` needs them to check the layer's attention.

    Args:
        like: the other model.
        weights: the layer's, "layers.0.self_attn.o_proj.weight" and so on, as checkpoints store them.
        packing: packs the linear layers for the native kernels, or None for torch.

    Raises:
        ModelError: a tensor is missing, surplus or of another shape.
    """
    config = _one_layer_config(like.wrapped.config.get_text_config())
    state = {f"model.{name}": weight for name, weight in weights.items()} | _stand_ins(config.hidden_size)
    try:
        with quiet_transformers():
            model, info = type(like.wrapped).from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=like.dtype,
                attn_implementation=EAGER,
                output_loading_info=True,
            )
    except Exception as error:
        raise ModelError(f"transformers cannot load it ({one_line(error)}); download the model again") from error
    wrong = _mismatch(model, info)
    if wrong is not None:
        raise ModelError(wrong)
    try:
        return wrap_model(model.to(like.device).eval().requires_grad_(False), packing)
    except UnsupportedAttentionError as error:
        raise ModelError(f"its attention cannot be replaced by forerun's: {error}; use another method") from error


def wrap_model(model: Any, packing: Packing | None = None) -> TransformersModel:
    """Put forerun's attention, and packed linear layers, into a transformers model, and check that its logits stay.

    Raises:
        UnsupportedAttentionError: they do not, or the model keeps more than keys and values of past tokens.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    if model._is_stateful:
        raise UnsupportedAttentionError(
            "it keeps a state that is not keys and values (Mamba, linear attention or a hybrid)"
        )
    register()
    tokens = torch.randint(
        model.get_input_embeddings().num_embeddings, [CHECKED_TOKENS], generator=torch.Generator().manual_seed(0)
    )
    tokens = tokens.to(model.device)
    reference = with_attention(model, EAGER, lambda: model(input_ids=tokens[None], use_cache=False).logits[0])
    probe = ProbeHandler()
    with_attention(
        model,
        PROBE,
        lambda: model(input_ids=tokens[None, :1], position_ids=tokens.new_zeros(1, 1), use_cache=False, handler=probe),
    )
    if probe.num_calls != num_layers or len(probe.layers) != num_layers:
        raise UnsupportedAttentionError(
            f"{num_layers} layers call attention {probe.num_calls} times; must be once each"
        )
    plugged = TransformersModel(model, probe.layers, vocab_size=reference.shape[1])
    with_attention(model, PAGED, lambda: check_logits(plugged, tokens, reference.float()))
    if packing is not None:
        pack_modules(model, packing)
        with_attention(model, PAGED, lambda: check_logits(plugged, tokens, reference.float()))
    return plugged


def _load_transformers(path: Path, config: PretrainedConfig, dtype: torch.dtype | None) -> Any:
    """Load transformers' model, and check that each weight was in the checkpoint.

    Raises:
        ModelError: a tensor is missing, surplus or of another shape.
    """
    gguf = find_gguf(path)
    if gguf is not None:
        model, info = load_transformers_gguf(open_gguf(gguf), config, dtype=dtype)
    else:
        open_checkpoint(path)  # its errors say better than transformers' what is wrong with the files
        try:
            with quiet_transformers():
                from_pretrained: Any = AutoModelForCausalLM.from_pretrained
                model, info = from_pretrained(
                    path.absolute(),
                    config=config,
                    dtype=dtype or "auto",
                    attn_implementation=EAGER,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    output_loading_info=True,
                )
        except Exception as error:
            raise ModelError(
                f"{path}: transformers cannot load the model ({one_line(error)}); download it again"
            ) from error
    info["unexpected_keys"] = {key for key in info["unexpected_keys"] if not key.startswith(mtp_prefixes(config))}
    wrong = _mismatch(model, info)
    if wrong is not None:
        raise ModelError(f"{path}: {wrong}")
    return model


def _mismatch(model: Any, info: Mapping[str, Any]) -> str | None:
    """Return which tensors were missing or surplus by transformers' loading info, and what to do; None if none."""
    for what, names in (("lacks", info["missing_keys"]), ("has the unknown", info["unexpected_keys"])):
        if names:
            return (
                f"the checkpoint {what} tensor {min(names)!r} ({len(names)} such) for {type(model).__name__}; "
                "config.json and weights must be of one model; download it again"
            )
    return None


def _refuse_batch_ropes(path: Path, config: PretrainedConfig) -> None:
    """Refuse rotary embeddings that would make a sequence's text depend on the other sequences of its batch."""
    rope: Any = getattr(config.get_text_config(), "rope_parameters", None) or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in per_layer_type or [rope]:
        is_fixed = parameters.get("alpha") and config.model_type in FIXED_BY_ALPHA
        if parameters.get("rope_type") in BATCH_ROPES and not is_fixed:
            raise ModelError(
                f"{path}: rope_type {parameters['rope_type']!r} changes with the longest sequence of a batch, "
                f"which would change texts; not supported for {config.model_type!r}, use another model"
            )


def _one_layer_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the same model with its last layer only."""
    one = copy.deepcopy(config)
    content = config.to_dict()
    changes = {name: content[name][-1:] for name in LISTS_BY_LAYER if content.get(name)}
    if "first_k_dense_replace" in content:
        changes["first_k_dense_replace"] = 0  # the last layer has experts
    changes |= {"num_hidden_layers": 1, "vocab_size": STAND_IN_TOKENS, "tie_word_embeddings": False}
    for name, value in (changes | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))).items():
        setattr(one, name, value)
    return one


def _stand_ins(width: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(0)
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: torch.randn(STAND_IN_TOKENS, width, generator=source) for name in tables} | {
        "model.norm.weight": torch.ones(width)
    }
