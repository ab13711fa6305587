"""What users write of how a drafter chooses its words, the same for all that have a model or heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from forerun.drafters.base import TargetInfo
from forerun.drafters.choice import Choice, check_sample_method
from forerun.drafters.independent import BestFirstWriter, IndependentWriter, StaticWriter
from forerun.drafters.tree import DynamicTree, StaticTree, parse_tree
from forerun.drafters.writers import ChainWriter, DynamicTreeWriter, StaticTreeWriter, Writer
from forerun.errors import ConfigError


class DraftVocabulary(Protocol):
    """What has logits of the target's tokens: a `Predictor`, or a network of another kind."""

    target_ids: Tensor | None  # [V] int64, the target's token of each logit; None: V is its vocabulary


@dataclass(frozen=True, slots=True)
class Wording:
    """How a drafter with a predictor chooses its words: `draft_sample_method` (`Choice`) and `draft_tree` (`parse_tree`).

    Raises:
        ConfigError: one is not what it may be, or the two do not fit.
    """

    sample_method: str = "greedy"
    tree: StaticTree | DynamicTree | None = None

    @classmethod
    def parse(cls, sample_method: str, draft_tree: object) -> Wording:
        """Check the user's values."""
        check_sample_method(sample_method)
        tree = parse_tree(draft_tree)
        if isinstance(tree, DynamicTree) and sample_method != "greedy":
            raise ConfigError(
                f"draft_sample_method: got {sample_method!r} with a dynamic draft_tree, which takes the likeliest tokens; "
                "must be 'greedy'; or give a static tree"
            )
        return cls(sample_method, tree)

    @property
    def default_num_tokens(self) -> int | None:
        """K where the user gives none: the size of a static tree."""
        return self.tree.num_nodes if isinstance(self.tree, StaticTree) else None

    def writer(self, target: TargetInfo, predictor: DraftVocabulary) -> Writer:
        """What writes so with `predictor`.

        Raises:
            ConfigError: the tree has more nodes than a draft may have.
        """
        self.check_size(target.num_speculative_tokens)
        choice = Choice(self.sample_method, vocab_size=target.vocab_size, target_ids=predictor.target_ids)
        if self.tree is None:
            return ChainWriter(choice, num_tokens=target.num_speculative_tokens)
        if isinstance(self.tree, DynamicTree):
            return DynamicTreeWriter(self.tree, target_ids=predictor.target_ids)
        return StaticTreeWriter(choice, self.tree)

    def independent_writer(self, target: TargetInfo, network: DraftVocabulary) -> IndependentWriter:
        """What writes so with a network whose predictions do not know the tokens drafted before them.

        Raises:
            ConfigError: the tree has more nodes than a draft may have.
        """
        self.check_size(target.num_speculative_tokens)
        if isinstance(self.tree, DynamicTree):
            return BestFirstWriter(self.tree, target_ids=network.target_ids)
        choice = Choice(self.sample_method, vocab_size=target.vocab_size, target_ids=network.target_ids)
        return StaticWriter(choice, self.tree or StaticTree.chain(target.num_speculative_tokens))

    def check_size(self, num_tokens: int) -> None:
        """Raise `ConfigError` if a static tree has more nodes than the `num_tokens` of a draft."""
        if isinstance(self.tree, StaticTree) and self.tree.num_nodes > num_tokens:
            raise ConfigError(
                f"draft_tree: has {self.tree.num_nodes} nodes, num_speculative_tokens allows {num_tokens}; "
                "raise it or leave nodes out"
            )

    def check_depth(self, num_tokens: int, *, deepest: int) -> None:
        """Raise `ConfigError` if a draft of `num_tokens` can be deeper than the `deepest` that its checkpoint predicts."""
        if self.tree is None and num_tokens > deepest:
            raise ConfigError(
                f"num_speculative_tokens: got {num_tokens}; the checkpoint predicts {deepest} tokens ahead; lower it, "
                "or give a draft_tree"
            )
        if self.tree is not None and self.tree.depth > deepest:
            raise ConfigError(
                f"draft_tree: is {self.tree.depth} levels deep; the checkpoint predicts {deepest} tokens ahead; "
                "leave levels out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WordedConfig:
    """The keys that a `Wording` comes from; the base of configurations that take them.

    Raises:
        ConfigError: a value is out of range.
    """

    draft_sample_method: str = "greedy"
    draft_tree: Any = None

    def __post_init__(self) -> None:
        Wording.parse(self.draft_sample_method, self.draft_tree)

    @property
    def wording(self) -> Wording:
        """How tokens are chosen."""
        return Wording.parse(self.draft_sample_method, self.draft_tree)

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """The size of a static tree; of other drafts the user must say how many."""
        return self.wording.default_num_tokens


def check_longest(asked: int | None) -> None:
    """Raise `ConfigError` unless a drafter's `max_model_len` is a length."""
    if asked is not None and asked < 1:
        raise ConfigError(f"max_model_len (of the drafter): got {asked}; must be 1 or more")


def longest_text(asked: int | None, *, allowed: int) -> int:
    """The length (tokens) beyond which a drafter is silent.

    Raises:
        ConfigError: the user asks for more than its checkpoint allows.
    """
    if asked is not None and asked > allowed:
        raise ConfigError(
            f"max_model_len (of the drafter): got {asked}; its checkpoint allows at most {allowed}; lower it"
        )
    return asked or allowed
