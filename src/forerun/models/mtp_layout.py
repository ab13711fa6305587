"""Where checkpoints keep multi-token prediction layers beside the model's own, and in what they differ.

Facts are from vLLM's deepseek_mtp.py, glm4_moe_mtp.py, qwen3_next_mtp.py and mimo_mtp.py, and from the
models there whose hidden states they are given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from forerun.errors import ModelError
from forerun.models.config import HFConfig

COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # DeepSeek, GLM and MiMo; Qwen3.5
BLOCK = "layers.0."  # prefix of the decoder layer's tensors in `MTPLayout.own_names`


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPLayout:
    """How one family's first MTP layer is stored and computed.

    hidden = projection([embedding_norm(embedding); state_norm(state)]), then a decoder layer, then
    output_norm and a head. `prefix` is that of its tensors, `block` follows it in the decoder layer's.

    embedding_first: in the projection's input. zeroes_first: the embedding is zero at position 0.
    takes_normed: the target's states are those after its final norm. recycles_normed: its own next
    state is the output after `output_norm`. zero_centred: norms multiply by 1 + weight.
    """

    prefix: str
    block: str = ""
    embedding_norm: str = "enorm"
    state_norm: str = "hnorm"
    projection: str = "eh_proj"
    output_norm: str = "shared_head.norm"
    head: str = "shared_head.head"
    embedding: str = "embed_tokens"
    embedding_first: bool = True
    zeroes_first: bool = True
    takes_normed: bool = True
    recycles_normed: bool = True
    zero_centred: bool = False

    def own_names(self, stored_names: Iterable[str]) -> dict[str, str]:
        """Name -> stored name of the layer's tensors: the decoder layer's begin with "layers.0.", others stay as they are."""
        parts = {self.embedding_norm, self.state_norm, self.projection, self.output_norm, self.head, self.embedding}
        found: dict[str, str] = {}
        for stored in stored_names:
            rest = stored.removeprefix(self.prefix)
            if rest == stored or self._is_of_another_layer(rest):
                continue
            is_block = rest.rpartition(".")[0] not in parts and rest.startswith(self.block)
            found[BLOCK + rest.removeprefix(self.block) if is_block else stored] = stored
        return found

    def _is_of_another_layer(self, rest: str) -> bool:
        return bool(self.block) and rest.startswith("layers.") and not rest.startswith(self.block)


DEEPSEEK = MTPLayout(prefix="model.layers.{num_layers}.")
# SGLang and transformers recycle GLM's normed states too; from the second drafted token on it may matter.
GLM4 = replace(DEEPSEEK, recycles_normed=False)
QWEN3 = MTPLayout(
    prefix="mtp.",
    block="layers.0.",
    embedding_norm="pre_fc_norm_embedding",
    state_norm="pre_fc_norm_hidden",
    projection="fc",
    output_norm="norm",
    zeroes_first=False,
    zero_centred=True,
)
# vLLM's MiMo hands on the residual stream, and norms it only where it computes logits.
MIMO = MTPLayout(
    prefix="model.mtp_layers.0.",
    embedding_norm="token_layernorm",
    state_norm="hidden_layernorm",
    projection="input_proj",
    output_norm="final_layernorm",
    embedding_first=False,
    takes_normed=False,
)


def num_mtp_layers(hf: HFConfig) -> int:
    """How many MTP layers the configuration names.

    Raises:
        ModelError: what it names is no number of layers.
    """
    content = hf.get_text_config().to_dict()
    for key in COUNT_KEYS:
        count = content.get(key) or 0
        if type(count) is not int or count < 0:
            raise ModelError(f"{key}: got {count!r}; must be a whole number, 0 or more; mend config.json")
        if count:
            return count
    return 0


def mtp_prefixes(hf: HFConfig) -> tuple[str, ...]:
    """What names of tensors begin with that may be MTP layers', in any layout; empty where the configuration names none."""
    count, first = num_mtp_layers(hf), hf.get_text_config().num_hidden_layers
    if not count:
        return ()
    return (*(f"model.layers.{first + i}." for i in range(count)), "mtp.", "model.mtp_layers.")


def find_layout(hf: HFConfig, stored_names: Iterable[str]) -> MTPLayout | None:
    """The layout in which a checkpoint has MTP layers; None: it has none, or of another family than those known."""
    names, text = set(stored_names), hf.get_text_config()
    deepseek = GLM4 if text.model_type.startswith("glm4_moe") else DEEPSEEK
    layouts = [replace(deepseek, prefix=deepseek.prefix.format(num_layers=text.num_hidden_layers)), MIMO]
    if text.model_type.startswith("qwen3"):  # others store the same names, but may centre their norms on 1
        layouts.append(QWEN3)
    return next((one for one in layouts if f"{one.prefix}{one.projection}.weight" in names), None)
