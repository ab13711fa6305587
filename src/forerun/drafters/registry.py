"""The drafting methods: a row for each, with its settings, its checkpoints' names and what users ask before choosing it.

Importing this module imports neither torch nor any drafter, so that `forerun --help` is quick.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.drafters.base import DrafterConfig

MODEL_METHOD = "draft_model"
"""The method of a model whose name says nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodInfo:
    """What a user asks before choosing a drafter."""

    bets_on: str
    training: str  # what must be trained for the target
    trees: str  # whether it drafts trees
    files: str  # what it loads besides the target
    paper: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterMethod:
    """A drafting method.

    `config` is its settings class, as "module.Class" of this package; the module is imported when the
    method is first used. A checkpoint whose name contains `checkpoint_name` is of this method.
    `former_names` is a pattern of names that vLLM once had for it.
    """

    config: str
    info: MethodInfo
    checkpoint_name: str | None = None
    former_names: str | None = None

    @property
    def config_class(self) -> type[DrafterConfig]:
        """The class of the method's settings, which build the drafter."""
        module, _, name = self.config.rpartition(".")
        found: type[DrafterConfig] = getattr(importlib.import_module(f"forerun.drafters.{module}"), name)
        return found


DRAFTERS: dict[str, DrafterMethod] = {
    "auto": DrafterMethod(
        config="auto.AutoConfig",
        info=MethodInfo(
            bets_on="all that is at hand: copies, past answers, what the target held likely, a model where it pays",
            training="none; it learns while it runs",
            trees="always",
            files="what --for shows for a model: a head that comes with forerun or is given, MTP layers, the target in fewer bits",
            paper="none; Token Recycling, arXiv 2408.08696, and prompt lookup are part of it",
        ),
    ),
    "ngram": DrafterMethod(
        config="ngram.NgramConfig",
        info=MethodInfo(
            bets_on="what followed the last tokens earlier in this text",
            training="none",
            trees="no",
            files="none",
            paper="prompt lookup, github.com/apoorvumang/prompt-lookup-decoding",
        ),
    ),
    "suffix": DrafterMethod(
        config="suffix.SuffixConfig",
        info=MethodInfo(
            bets_on="what most often followed the text's ending, here and in past answers",
            training="none",
            trees="suffix_decoding_tree",
            files="none",
            paper="SuffixDecoding, arXiv 2411.04975",
        ),
    ),
    "recycle": DrafterMethod(
        config="recycle.RecycleConfig",
        info=MethodInfo(
            bets_on="what the target held likely when it last met these two tokens, in any text",
            training="none; learns while it runs",
            trees="recycle_tree",
            files="none",
            paper="Token Recycling, arXiv 2408.08696",
        ),
    ),
    "draft_model": DrafterMethod(
        config="draft_model.DraftModelConfig",
        info=MethodInfo(
            bets_on="what a smaller model writes, best of the same vocabulary",
            training="none, if there is such a model",
            trees="draft_tree: static, dynamic",
            files="a causal language model: safetensors folder, .gguf",
            paper="speculative decoding, arXiv 2211.17192 and 2302.01318; other vocabularies 2502.05202",
        ),
    ),
    "pard": DrafterMethod(
        config="draft_model.PardConfig",
        checkpoint_name="pard",
        info=MethodInfo(
            bets_on="what a model that was trained to guess several tokens at once writes in one pass",
            training="a model for each family of targets",
            trees="draft_tree: static, dynamic",
            files="a causal language model whose config.json names a mask token",
            paper="PARD, arXiv 2504.18583",
        ),
    ),
    "self": DrafterMethod(
        config="self_draft.SelfConfig",
        info=MethodInfo(
            bets_on="what the target itself writes in int4 or int8, or after its first layers",
            training="none",
            trees="draft_tree: static, dynamic",
            files="the target's own",
            paper="LayerSkip, arXiv 2404.16710 (early exit)",
        ),
    ),
    "eagle": DrafterMethod(
        config="eagle.EagleConfig",
        checkpoint_name="eagle",
        info=MethodInfo(
            bets_on="what a one-layer head makes of the target's last hidden state",
            training="a head for each target",
            trees="draft_tree: static, dynamic",
            files="an EAGLE-1 or -2 head: config.json, safetensors",
            paper="EAGLE, arXiv 2401.15077; EAGLE-2, 2406.16858",
        ),
    ),
    "eagle3": DrafterMethod(
        config="eagle.Eagle3Config",
        checkpoint_name="eagle3",
        info=MethodInfo(
            bets_on="what a one-layer head makes of three of the target's hidden states",
            training="a head for each target",
            trees="draft_tree: static, dynamic",
            files="an EAGLE-3 head: the authors', SpecForge's or speculators' layout",
            paper="EAGLE-3, arXiv 2503.01840",
        ),
    ),
    "peagle": DrafterMethod(
        config="eagle.PEagleConfig",
        checkpoint_name="peagle",
        info=MethodInfo(
            bets_on="what such a head makes of them for all tokens in one pass",
            training="a head for each target",
            trees="draft_tree: static, dynamic",
            files="an EAGLE-3 head with mask_hidden: speculators' layout or vLLM's",
            paper="P-EAGLE, arXiv 2602.01469",
        ),
    ),
    "medusa": DrafterMethod(
        config="medusa.MedusaConfig",
        checkpoint_name="medusa",
        info=MethodInfo(
            bets_on="what small heads, one for each token ahead, make of the target's last hidden state",
            training="heads for each target",
            trees="draft_tree: static, dynamic",
            files="Medusa heads: config.json, safetensors; the authors' or vLLM's layout",
            paper="Medusa, arXiv 2401.10774",
        ),
    ),
    "mtp": DrafterMethod(
        config="mtp.MTPConfig",
        former_names=r"\w+_mtp",  # vLLM once had a method for each family: "deepseek_mtp", "glm4_moe_mtp" ...
        info=MethodInfo(
            bets_on="what the layer that the target was trained with for this predicts from its hidden states",
            training="none, if the target has such a layer",
            trees="draft_tree",
            files="the target's own",
            paper="multi-token prediction, arXiv 2412.19437 (DeepSeek-V3)",
        ),
    ),
    "mlp_speculator": DrafterMethod(
        config="mlp_speculator.MLPSpeculatorConfig",
        checkpoint_name="mlpspeculator",
        info=MethodInfo(
            bets_on="what an MLP makes of the target's last hidden state and each token drafted",
            training="a speculator for each target",
            trees="draft_tree: static, dynamic",
            files="an MLP speculator: config.json, safetensors",
            paper="MLP speculator, arXiv 2404.19124",
        ),
    ),
    "dflash": DrafterMethod(
        config="dflash.DFlashConfig",
        checkpoint_name="dflash",
        info=MethodInfo(
            bets_on="what a small diffusion head on the target's hidden states fills a block of masks with, in one pass",
            training="a head for the target",
            trees="draft_tree: static, dynamic",
            files="a DFlash head: safetensors folder",
            paper="DFlash, arXiv 2602.06036",
        ),
    ),
    "hybrid": DrafterMethod(
        config="hybrid.HybridConfig",
        info=MethodInfo(
            bets_on="what the first of its drafters with a long enough draft bets on",
            training="as its drafters",
            trees="as its drafters",
            files="as its drafters",
            paper="SuffixDecoding, arXiv 2411.04975 (with a model behind it)",
        ),
    ),
    "extract_hidden_states": DrafterMethod(
        config="extract_hidden_states.ExtractHiddenStatesConfig",
        info=MethodInfo(
            bets_on="nothing: saves the target's hidden states, to train drafters with",
            training="none",
            trees="no",
            files="none",
            paper="none",
        ),
    ),
}
"""The methods that `speculative_config["method"]` can name."""


def method_of_checkpoint(name: str) -> str:
    """The method of a checkpoint by the name of its folder or repository (vLLM's rule); without one it is a draft model.

    Of several methods in a name the longest counts, so that an "eagle3" head is not taken for "eagle";
    of equally long ones the later in the table, which builds on the earlier.
    """
    plain = name.lower().replace("-", "").replace("_", "")
    named = {method: row.checkpoint_name for method, row in DRAFTERS.items() if row.checkpoint_name}
    found = [method for method in reversed(named) if named[method] in plain]
    return max(found, key=lambda method: len(named[method]), default=MODEL_METHOD)


def renamed_method(name: str) -> str | None:
    """Today's name of a method that vLLM once called `name`; None for any other name."""
    return next(
        (method for method, row in DRAFTERS.items() if row.former_names and re.fullmatch(row.former_names, name)), None
    )
