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
        bets_on="what a smaller model of the same vocabulary writes",
        training="none, if there is such a model",
        trees="no",
        files="a causal language model: safetensors folder, .gguf",
        paper="speculative decoding, arXiv 2211.17192 and 2302.01318",
    ),
    "self": DrafterCard(
        bets_on="what the target itself writes in int8, or after its first layers",
        training="none",
        trees="no",
        files="the target's own",
        paper="LayerSkip, arXiv 2404.16710 (early exit)",
    ),
    "mtp": DrafterCard(
        bets_on="what the layer that the target was trained with for this predicts from its hidden states",
        training="none, if the target has such a layer",
        trees="draft_tree",
        files="the target's own",
        paper="multi-token prediction, arXiv 2412.19437 (DeepSeek-V3)",
    ),
}
"""Method -> its card."""
