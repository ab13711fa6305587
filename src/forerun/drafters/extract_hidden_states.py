"""vLLM's method of this name: no drafts, but hidden states of the target are saved when a sequence ends.

Drafters such as EAGLE are trained on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.core.integers import is_integer
from forerun.drafters.base import Drafter, NoDrafter, TargetInfo
from forerun.errors import ConfigError, refuse_unknown_keys

LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractHiddenStatesConfig:
    """vLLM's keys: `draft_model_config` {"hf_config": {"eagle_aux_hidden_state_layer_ids": [N, ...]}}, and a K of 1.

    N is the residual stream before layer N: 0 the embeddings, the number of layers the stream's end.

    Raises:
        ConfigError: the layers are missing, repeated or no layers, or K is not 1.
    """

    draft_model_config: Any = None
    num_speculative_tokens: int | None = 1

    def __post_init__(self) -> None:
        if self.num_speculative_tokens not in (None, 1):
            raise ConfigError(
                f"num_speculative_tokens: got {self.num_speculative_tokens!r}; method 'extract_hidden_states' drafts "
                "nothing and takes 1 only"
            )
        given = _value(_value(self.draft_model_config, "draft_model_config", "hf_config"), "hf_config", LAYERS_KEY)
        if not isinstance(given, (list, tuple)) or not given:
            raise ConfigError(f"{LAYERS_KEY}: got {given!r:.80}; must be a list of layers, e.g. [2, 18, 34]")
        for layer in given:
            if not is_integer(layer) or layer < 0:
                raise ConfigError(f"{LAYERS_KEY}: got layer {layer!r:.80}; must be an integer of 0 or more")
        if len(set(given)) < len(given):
            raise ConfigError(f"{LAYERS_KEY}: got {given!r:.80}; each layer may be named once only")

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers, in the order that they have in the files."""
        return tuple(self.draft_model_config["hf_config"][LAYERS_KEY])

    @property
    def exported(self) -> tuple[str, ...]:
        """The layers by the names that `Drafter.needs` has for them."""
        return tuple(f"hidden.{layer}" for layer in self.layer_ids)

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """1, which vLLM's users must give."""
        return 1

    def build(self, target: TargetInfo) -> Drafter:
        """Make a drafter that drafts nothing but `needs` the hidden states, so that they are kept.

        Raises:
            ConfigError: the target has not so many layers.
        """
        num_layers = target.itself.model.num_layers
        if max(self.layer_ids) > num_layers:
            raise ConfigError(
                f"{LAYERS_KEY}: got layer {max(self.layer_ids)}; may be 0 (the embeddings) to {num_layers} (after this "
                "target's last layer)"
            )
        return NoDrafter(frozenset(self.exported))


def _value(given: Any, name: str, key: str) -> Any:
    """The value under the only key of the dict `given`."""
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            f"{name}: got {given!r:.80}; method 'extract_hidden_states' needs "
            f"'draft_model_config': {{'hf_config': {{'{LAYERS_KEY}': [2, 18, 34]}}}}"
        )
    refuse_unknown_keys(given, (key,), where=name)
    return given[key]
