"""Where checkpoints store multi-token prediction (MTP) layers, and in what these layers differ between families.

The facts are from vLLM's deepseek_mtp.py, glm4_moe_mtp.py, qwen3_next_mtp.py and mimo_mtp.py, and from its
models whose hidden states these layers read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from forerun.errors import ModelError
from forerun.models.config import MEND, MOST_LAYERS, HFConfig

COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # DeepSeek, GLM and MiMo; Qwen3.5
BLOCK = "layers.0."  # prefix of the decoder layer's tensors in `MTPLayout.own_names`


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPLayout:
    """How one family's first MTP layer is stored and computed.

    hidden = projection([embedding_norm(embedding); state_norm(state)]), then a decoder layer, then
    output_norm and a head.

    Attributes:
        prefix: of all tensors of the layer.
        block: follows `prefix` in the names of the decoder layer's tensors.
        embedding_first: whether the embedding comes first in the projection's input.
        zeroes_first: whether the embedding is zero at position 0.
        takes_normed: whether it reads the target's states after the final norm.
        recycles_normed: whether its own next state is the output after `output_norm`.
        zero_centred: whether norms multiply by 1 + weight.
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
        """Map names to stored names of the layer's tensors: the decoder layer's names begin with "layers.0.", others are kept."""
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
# SGLang and transformers recycle GLM's normed states too; drafts may differ from the second token on
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
# vLLM's MiMo recycles the residual stream, and norms it only to compute logits
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
    """Return how many MTP layers the configuration names.

    Raises:
        ModelError: it names something else than a number of layers.
    """
    content = hf.get_text_config().to_dict()
    for key in COUNT_KEYS:
        count = content.get(key) or 0
        if type(count) is not int or not 0 <= count <= MOST_LAYERS:
            raise ModelError(f"{key}: got {count!r}; must be a whole number from 0 to {MOST_LAYERS}; {MEND}")
        if count:
            return count
    return 0


def mtp_prefixes(hf: HFConfig) -> tuple[str, ...]:
    """Return the prefixes that tensors of MTP layers may have in any layout; empty if the configuration names no MTP layers."""
    count, first = num_mtp_layers(hf), hf.get_text_config().num_hidden_layers
    if not count:
        return ()
    return (*(f"model.layers.{first + i}." for i in range(count)), "mtp.", "model.mtp_layers.")


def find_layout(hf: HFConfig, stored_names: Iterable[str]) -> MTPLayout | None:
    """Find the layout of a checkpoint's MTP layers; None if it has no MTP layers, or none of a known layout."""
    names, text = set(stored_names), hf.get_text_config()
    deepseek = GLM4 if text.model_type.startswith("glm4_moe") else DEEPSEEK
    layouts = [replace(deepseek, prefix=deepseek.prefix.format(num_layers=text.num_hidden_layers)), MIMO]
    if text.model_type.startswith("qwen3"):  # other families store the same names, but may centre their norms on 1
        layouts.append(QWEN3)
    return next((one for one in layouts if f"{one.prefix}{one.projection}.weight" in names), None)
