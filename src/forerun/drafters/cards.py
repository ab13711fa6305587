"""What each drafting method is, for people; imports no torch, so that `forerun --help` is quick."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCard:
    """What a user asks before choosing a drafter."""

    bets_on: str
    training: str  # what must be trained for the target
    trees: str  # whether it drafts trees
    files: str  # what it loads besides the target
    paper: str


CARDS: dict[str, DrafterCard] = {
    "ngram": DrafterCard(
        bets_on="what followed the last tokens earlier in this text",
        training="none",
        trees="no",
        files="none",
        paper="prompt lookup, github.com/apoorvumang/prompt-lookup-decoding",
    ),
    "suffix": DrafterCard(
        bets_on="what most often followed the text's ending, here and in past answers",
        training="none",
        trees="suffix_decoding_tree",
        files="none",
        paper="SuffixDecoding, arXiv 2411.04975",
    ),
    "draft_model": DrafterCard(
        bets_on="what a smaller model writes, best of the same vocabulary",
        training="none, if there is such a model",
        trees="draft_tree: static, dynamic",
        files="a causal language model: safetensors folder, .gguf",
        paper="speculative decoding, arXiv 2211.17192 and 2302.01318; other vocabularies 2502.05202",
    ),
    "pard": DrafterCard(
        bets_on="what a model that was trained to guess several tokens at once writes in one pass",
        training="a model for each family of targets",
        trees="draft_tree: static, dynamic",
        files="a causal language model whose config.json names a mask token",
        paper="PARD, arXiv 2504.18583",
    ),
    "self": DrafterCard(
        bets_on="what the target itself writes in int8, or after its first layers",
        training="none",
        trees="draft_tree: static, dynamic",
        files="the target's own",
        paper="LayerSkip, arXiv 2404.16710 (early exit)",
    ),
    "eagle": DrafterCard(
        bets_on="what a one-layer head makes of the target's last hidden state",
        training="a head for each target",
        trees="draft_tree: static, dynamic",
        files="an EAGLE-1 or -2 head: config.json, safetensors",
        paper="EAGLE, arXiv 2401.15077; EAGLE-2, 2406.16858",
    ),
    "eagle3": DrafterCard(
        bets_on="what a one-layer head makes of three of the target's hidden states",
        training="a head for each target",
        trees="draft_tree: static, dynamic",
        files="an EAGLE-3 head: the authors', SpecForge's or speculators' layout",
        paper="EAGLE-3, arXiv 2503.01840",
    ),
    "peagle": DrafterCard(
        bets_on="what such a head makes of them for all tokens in one pass",
        training="a head for each target",
        trees="draft_tree: static, dynamic",
        files="an EAGLE-3 head with mask_hidden: speculators' layout or vLLM's",
        paper="P-EAGLE, arXiv 2602.01469",
    ),
    "medusa": DrafterCard(
        bets_on="what small heads, one for each token ahead, make of the target's last hidden state",
        training="heads for each target",
        trees="draft_tree: static, dynamic",
        files="Medusa heads: config.json, safetensors; the authors' or vLLM's layout",
        paper="Medusa, arXiv 2401.10774",
    ),
    "mtp": DrafterCard(
        bets_on="what the layer that the target was trained with for this predicts from its hidden states",
        training="none, if the target has such a layer",
        trees="draft_tree",
        files="the target's own",
        paper="multi-token prediction, arXiv 2412.19437 (DeepSeek-V3)",
    ),
    "mlp_speculator": DrafterCard(
        bets_on="what an MLP makes of the target's last hidden state and each token drafted",
        training="a speculator for each target",
        trees="draft_tree: static, dynamic",
        files="an MLP speculator: config.json, safetensors",
        paper="MLP speculator, arXiv 2404.19124",
    ),
    "dflash": DrafterCard(
        bets_on="what a small diffusion head on the target's hidden states fills a block of masks with, in one pass",
        training="a head for the target",
        trees="draft_tree: static, dynamic",
        files="a DFlash head: safetensors folder",
        paper="DFlash, arXiv 2602.06036",
    ),
    "hybrid": DrafterCard(
        bets_on="what the first of its drafters with a long enough draft bets on",
        training="as its drafters",
        trees="as its drafters",
        files="as its drafters",
        paper="SuffixDecoding, arXiv 2411.04975 (with a model behind it)",
    ),
    "extract_hidden_states": DrafterCard(
        bets_on="nothing: saves the target's hidden states, to train drafters with",
        training="none",
        trees="no",
        files="none",
        paper="none",
    ),
}
"""Method -> its card."""
