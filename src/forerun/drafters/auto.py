"""Method "auto": whatever is at hand drafts, look-ups for nothing first, a model where it is worth its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forerun.core.draft import Draft
from forerun.core.finite_numbers import is_number
from forerun.core.sequence import Sequence
from forerun.drafters.base import (
    MATCHING,
    BlockKV,
    Choice,
    DraftContext,
    Drafter,
    DrafterConfig,
    DrafterResolver,
    ExportsHiddenStates,
    KeepsKV,
    KeepsPools,
    MovesKV,
    Pool,
    TargetInfo,
    VerifiedRows,
)
from forerun.drafters.eagle import Eagle3Config, EagleConfig
from forerun.drafters.guard import GuardedDrafter
from forerun.drafters.lookup.drafter import LookupDrafter
from forerun.drafters.neural.sampling import DraftSamplingConfig, TooDeepError
from forerun.drafters.neural.tree import StaticTree
from forerun.drafters.ngram import NgramConfig
from forerun.drafters.priced import PricedDrafter
from forerun.errors import ConfigError, ModelError
from forerun.models.base import LoadedTarget, TargetModel
from forerun.models.checkpoint import open_checkpoint
from forerun.models.config_file import read_config
from forerun.models.decoder import Decoder
from forerun.models.model_folder import find_gguf
from forerun.models.mtp_layout import find_layout
from forerun.models.packing import can_be_rounded, fits_blocks
from forerun.models.shipped_heads import ShippedHead, find_shipped_head
from forerun.ops.native.formats import WEIGHT_FORMATS
from forerun.ops.native.structs import MOST_RUNNERS_UP

if TYPE_CHECKING:
    from forerun.kv.cache import KVCache

DEFAULT_MEMORY = 0.1
"""Extra memory, as a share of the target's weights."""

MOST_DRAFTED = 24
"""Nodes of a draft: more gain nothing, not even where the text is an edited copy and matrix registers make rows cheap."""

MOST_PASSES = 5
"""The deepest draft of a model."""

MOST_BYTES_OF_LOOK_UPS = 64_000_000
"""Of the table, and as many of past answers."""

FOREIGN_SHARE = 0.75
"""Memory of a target in int8 as a share of its weights, where transformers' code computes it."""

MOST_SHARE = 0.8
"""A draft by the target itself reads at most this share of its weights: one that reads more costs as much as it brings."""

DEVICE_NGRAMS = NgramConfig(prompt_lookup_min=1, prompt_lookup_max=16, draft_confidence_threshold=0.05)
"""What a GPU looks up in its own table of texts: long drafts of short matches, too, since its rows cost next to nothing."""

HEAD = "trained head"
LOOK_UPS = ("copy", "pool", "recycle")
IN_MEMORY = "the target was made in memory"
WAITS_FOR_HOST = "the GPU would wait for the host in each step; a head, MTP layers or the target itself drafts there as a method of its own"

COUPLED = "coupled"
"""Drafts that are made of the target's own draws, as the verifier `MATCHING` judges by."""

BUDGET_WITHOUT_TARGET = 32_000_000  # bytes, where a drafter is built without an engine


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConfig:
    """How much memory "auto" may take, and a drafter of the user's own that it may use as well.

    `auto_memory` is extra memory as a share of the target's weights: for a drafter that auto finds itself, and for the tables
    and past answers, which share what that leaves; 0 keeps none of them, so that drafts come from the text itself alone.
    `drafter`, if given, is a dict such as {"method": "eagle3", "model": PATH}; its memory does not count.
    `rejection_sample_method` is the verifier's, by which a head's tokens are picked.

    Raises:
        ConfigError: a value is out of range, or the drafter is coupled to the target's draws where the verifier is another
            than matching.
    """

    auto_memory: float = DEFAULT_MEMORY
    drafter: tuple[str, DrafterConfig] | None = None  # its method and settings
    rejection_sample_method: str = MATCHING

    def __post_init__(self) -> None:
        value = self.auto_memory
        if not is_number(value) or not 0.0 <= value <= 100.0:
            raise ConfigError(
                f"auto_memory: got {value!r}; must be a share of the target's weights, from 0 to 100; "
                f"leave it out for {DEFAULT_MEMORY}"
            )
        own = None if self.drafter is None else self.drafter[1]
        if isinstance(own, DraftSamplingConfig) and own.draft_sample_method == COUPLED and not self._may_couple:
            raise ConfigError(
                f"draft_sample_method: got {COUPLED!r} for auto's drafter, which goes with rejection_sample_method {MATCHING!r} "
                f"only and not with {self.rejection_sample_method!r}; may be 'greedy' or 'probabilistic' there; leave it out"
            )

    @classmethod
    def from_keys(cls, keys: Mapping[str, Any], resolver: DrafterResolver) -> AutoConfig:
        """Resolve the dict under "drafter", a small `speculative_config`.

        Raises:
            ConfigError: it is no dict, or wrong.
        """
        given = dict(keys)
        if given.get("drafter") is not None:
            if not isinstance(given["drafter"], Mapping):
                raise ConfigError(
                    f"speculative_config: drafter: got {given['drafter']!r:.80}; must be a dict such as "
                    "{'method': 'eagle3', 'model': PATH}; leave it out for what auto finds itself"
                )
            own = resolver.read_keys(given["drafter"])
            if own.get("method") in ("auto", "hybrid") or "num_speculative_tokens" in own:
                raise ConfigError(
                    "speculative_config: drafter: must be one drafter without num_speculative_tokens, "
                    "as auto chooses how much it drafts"
                )
            if own.get("draft_tree") is not None:
                raise ConfigError(
                    "draft_tree: is given for auto's drafter; auto makes trees of its chains and of look-ups; leave it out"
                )
            given["drafter"] = method, drafter = resolver.resolve(own, other_keys=())
            if isinstance(drafter, ExportsHiddenStates):
                raise ConfigError(
                    f"speculative_config: drafter: {method!r} drafts nothing, and beside auto saves nothing; make it the only method"
                )
        return cls(**given)

    @property
    def _may_couple(self) -> bool:
        """Whether drafts may be made of the target's own draws: under matching alone, which decides by nothing else.

        How much of a draft is verified depends on its tokens and margins. Where nothing is, every verifier takes the
        target's own draw, which would then no longer be independent of that choice.
        """
        return self.rejection_sample_method == MATCHING

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """As much as ever pays; how much of it is verified is chosen step by step."""
        return MOST_DRAFTED

    def build(self, target: TargetInfo) -> Drafter:
        """Make the drafters that are at hand."""
        if self._drafts_on_device(target):
            return DEVICE_NGRAMS.build(target)
        budget = self._budget(target)
        chosen = _first_used(self._model_choices(target, budget))
        model = None if chosen is None else _priced(chosen.method, self._model_config(chosen.method, target), target)
        room = _room_of_look_ups(budget, chosen)
        return AutoDrafter(LookupDrafter(target, table_bytes=room, pool_bytes=room), model)

    def check_has_head(self, drafter: Drafter) -> None:
        """See `BuildsWithHead`."""
        name = drafter.model_name if isinstance(drafter, AutoDrafter) else None
        has_head = name == HEAD if self.drafter is None else isinstance(self.drafter[1], EagleConfig)
        if not has_head:
            raise ConfigError(
                f"head: auto drafts with {name or 'look-ups alone'} here, so the hidden states that a head reads "
                "are not kept; name a head to begin with, as its drafter: "
                '{"method": "auto", "drafter": {"method": "eagle3", "model": FOLDER}}'
            )

    def build_with_head(self, folder: Path, target: TargetInfo, *, before: Drafter) -> Drafter:
        """See `BuildsWithHead`."""
        assert isinstance(before, AutoDrafter), "the drafter before was built from these settings"
        own = None if self.drafter is None else self.drafter[1]
        bits = "int8" if _computes_few_bits(target.itself) else None
        config = replace(own, model=str(folder)) if isinstance(own, EagleConfig) else self._head_config(folder, bits)
        return AutoDrafter(before.lookup, _priced(HEAD, config, target))

    def choices(self, target: TargetInfo) -> list[Choice]:
        """What is used for a target, what not, and why; of drafters that compute the first that can be is used."""
        if self._drafts_on_device(target):
            return [
                Choice("ngram", True, "what followed the last tokens earlier in the text, looked up by the GPU itself"),
                *(Choice(method, False, WAITS_FOR_HOST) for method in (*LOOK_UPS, HEAD, "mtp", "self")),
            ]
        budget = self._budget(target)
        models = self._model_choices(target, budget)
        chosen = _first_used(models)
        room = _room_of_look_ups(budget, chosen)
        within = f", in at most {room / 1e6:.3g} MB" if room else ": auto_memory leaves no room for it"
        return [
            Choice("copy", True, "what followed the last tokens earlier in the text"),
            Choice("pool", room > 0, f"past answers{within}"),
            Choice("recycle", room > 0, f"what the target held likely{within}"),
            *models,
        ]

    def _model_choices(self, target: TargetInfo, budget: int) -> list[Choice]:
        """The drafters that compute, or the one that is given: the first that can be is used, and no memory is asked for others."""
        found: list[Choice] = []
        for choice in (
            self._head_choice(target, budget),
            self._mtp_choice(target, budget),
            self._self_choice(target, budget),
        ):
            is_late = choice.num_bytes > 0 and _first_used(found) is not None
            found.append(replace(choice, is_used=False, why="a drafter before it is used") if is_late else choice)
        return found

    def _drafts_on_device(self, target: TargetInfo) -> bool:
        """Whether a GPU computes whole steps, which would wait for any draft of the host, and no drafter is given."""
        return self.drafter is None and target.loaded is not None and target.loaded.on_device is not None

    def _head_choice(self, target: TargetInfo, budget: int) -> Choice:
        if self.drafter is not None:
            return Choice(self.drafter[0], True, "given as 'drafter'")
        shipped = None if target.loaded is None else find_shipped_head(target.loaded)
        if target.loaded is None or shipped is None:
            return Choice(HEAD, False, "none is known for this target; name one with the key 'drafter'")
        bits, need = _bits_of_head(shipped, target.loaded, budget)
        what = f"the head for {shipped.title} that comes with forerun{', in 4 bits' if bits == 'int4' else ''}"
        return self._affordable(HEAD, need, budget, what, target.loaded.model.weight_bytes)

    def _mtp_choice(self, target: TargetInfo, budget: int) -> Choice:
        loaded = target.loaded
        if loaded is None or loaded.path is None:
            return Choice("mtp", False, IN_MEMORY)
        if not _has_mtp_layers(loaded.path):
            return Choice("mtp", False, "the checkpoint has no MTP layers that can be read")
        weights = loaded.model.weight_bytes
        need = 2 * weights // max(1, loaded.model.num_layers)  # a layer, and what goes before it
        return self._affordable("mtp", need, budget, "a layer of the checkpoint", weights)

    def _self_choice(self, target: TargetInfo, budget: int) -> Choice:
        loaded = target.loaded
        if loaded is None or loaded.path is None:
            return Choice("self", False, IN_MEMORY)
        if loaded.kernels is None:
            return Choice("self", False, "the target in fewer bits needs the native CPU kernels")
        if not _can_be_rounded(loaded.model):
            return Choice("self", False, "many of its weights are in no linear layer, and would stay as they are")
        weights, bits = loaded.model.weight_bytes, _bits_of_self(loaded)
        need = _bytes_of_self(loaded, bits)
        if need > MOST_SHARE * weights:
            return Choice("self", False, f"the target in {bits} is hardly smaller: its weights are in few bits already")
        return self._affordable("self", need, budget, f"the target in {bits}", weights)

    def _affordable(self, method: str, need: int, budget: int, what: str, weights: int) -> Choice:
        if need <= budget:
            return Choice(method, True, what, num_bytes=need)
        why = (
            f"{what} takes {need / 1e6:.3g} MB of {budget / 1e6:.3g}; allow it with "
            f"auto_memory={math.ceil(100 * need / weights) / 100:g}"
        )
        return Choice(method, False, why, num_bytes=need)

    def _model_config(self, method: str, target: TargetInfo) -> DrafterConfig:
        from forerun.drafters.mtp import MTPConfig
        from forerun.drafters.self_draft import SelfConfig

        if self.drafter is not None:
            return self.drafter[1]
        if method == HEAD:
            shipped = find_shipped_head(target.itself)
            assert shipped is not None, "its choice found one"
            return self._head_config(shipped.folder, _bits_of_head(shipped, target.itself, self._budget(target))[0])
        return MTPConfig() if method == "mtp" else SelfConfig(quantization=_bits_of_self(target.itself))

    def _head_config(self, folder: Path, quantization: str | None) -> DrafterConfig:
        """A head of `forerun train`, as it drafts best: in few bits, and with the target's own draws where it may."""
        method = COUPLED if self._may_couple else "greedy"
        return Eagle3Config(model=str(folder), quantization=quantization, draft_sample_method=method)

    def _budget(self, target: TargetInfo) -> int:
        """Bytes of extra memory."""
        if not self.auto_memory:
            return 0
        if target.loaded is None:
            return BUDGET_WITHOUT_TARGET
        return int(self.auto_memory * target.loaded.model.weight_bytes)


def _priced(name: str, config: DrafterConfig, target: TargetInfo) -> PricedDrafter:
    """Build a drafter that is asked where it is worth its time, as deep as its checkpoint predicts."""
    max_depth = min(MOST_PASSES, target.num_speculative_tokens)
    try:
        return _priced_to_depth(max_depth, name, config, target)
    except TooDeepError as error:
        return _priced_to_depth(error.deepest, name, config, target)


def _priced_to_depth(max_depth: int, name: str, config: DrafterConfig, target: TargetInfo) -> PricedDrafter:
    """Build it for chains so deep, with runners-up if it can draft trees."""
    num_runners_up = 0
    if isinstance(config, DraftSamplingConfig) and max_depth:
        num_runners_up = MOST_RUNNERS_UP
        config = replace(config, draft_tree=[list(path) for path in StaticTree.chain(max_depth, num_runners_up).paths])
    drafter = config.build(replace(target, num_speculative_tokens=max_depth * (1 + num_runners_up)))
    guarded = GuardedDrafter(drafter, vocab_size=target.vocab_size)
    return PricedDrafter(name, guarded, max_depth=max_depth, num_runners_up=num_runners_up)


def _first_used(choices: Listing[Choice]) -> Choice | None:
    return next((choice for choice in choices if choice.is_used), None)


def _room_of_look_ups(budget: int, model: Choice | None) -> int:
    """The most bytes of the table, and of past answers: each has half of what the model leaves."""
    left = budget - (0 if model is None else model.num_bytes)
    return min(left // 2, MOST_BYTES_OF_LOOK_UPS)


def _computes_few_bits(target: LoadedTarget) -> bool:
    """Whether a head's matrices stay in few bits."""
    return target.kernels is not None and target.model.dtype == torch.bfloat16


def _bits_of_head(head: ShippedHead, target: LoadedTarget, budget: int) -> tuple[str | None, int]:
    """The format of a head's matrices, and the bytes that they take: as it is kept, or in 4 bits where there is no room for that."""
    if not _computes_few_bits(target):
        return None, head.num_weights * target.model.dtype.itemsize
    need = {bits: head.num_bytes(WEIGHT_FORMATS[bits]) for bits in ("int8", "int4")}
    bits = "int8" if need["int8"] <= budget else "int4"
    return bits, need[bits]


def _can_be_rounded(model: TargetModel) -> bool:
    """Whether a target loads in fewer bits."""
    if isinstance(model, Decoder):
        return True
    from forerun.models.transformers_model import TransformersModel

    return not isinstance(model, TransformersModel) or can_be_rounded(model.wrapped)


def _bits_of_self(target: LoadedTarget) -> str:
    """The format in which a target drafts for itself: the cheaper one, where its sizes allow that.

    How much of what it writes is accepted differs between models, and is measured while it drafts (`PricedDrafter`).
    """
    model = target.model
    return "int4" if isinstance(model, Decoder) and fits_blocks(model.config) else "int8"


def _bytes_of_self(target: LoadedTarget, bits: str) -> int:
    """Memory of a target's matrices in a format of fewer bits."""
    model, stored = target.model, WEIGHT_FORMATS[bits]
    if not isinstance(model, Decoder):
        return int(FOREIGN_SHARE * model.weight_bytes)
    config = model.config
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.inner_size * config.num_mlps)
    head = config.vocab_size * config.hidden_size
    return int(config.num_layers * layer * stored.bytes_per_weight + head * stored.bytes_per_head_weight)


def _has_mtp_layers(path: Path) -> bool:
    """Whether the files hold MTP layers of a known layout."""
    if find_gguf(path) is not None:
        return False
    try:
        return find_layout(read_config(path), open_checkpoint(path).names()) is not None
    except ModelError:  # the weights were made up
        return False


class AutoDrafter:
    """Drafts by look-up for all sequences, and by a model for those where that is worth its time.

    Args:
        lookup: drafts for nothing.
        model: drafts at a price; None if there is none.
    """

    def __init__(self, lookup: LookupDrafter, model: PricedDrafter | None) -> None:
        self.lookup = lookup
        self._model = model
        self.num_candidates = max(lookup.num_candidates, 0 if model is None else model.guarded.num_candidates)
        drafter = None if model is None else model.guarded.drafter
        self.needs: frozenset[str] = frozenset() if drafter is None else drafter.needs
        self._keeper = drafter if isinstance(drafter, KeepsKV) else None
        self.kv_bytes_per_block = 0 if self._keeper is None else self._keeper.kv_bytes_per_block
        self.scratch_bytes = 0 if self._keeper is None else self._keeper.scratch_bytes
        self.num_scratch_blocks = 0 if self._keeper is None else self._keeper.num_scratch_blocks

    @property
    def model_name(self) -> str | None:
        """What the model is called; None if there is none."""
        return None if self._model is None else self._model.name

    @property
    def num_member_failures(self) -> int:
        """The number of failures that the model's guard has caught."""
        return 0 if self._model is None else self._model.guarded.num_failures

    def use_clock(self, clock: Callable[[], float]) -> None:
        """See `GoesByClock`: a model is asked for as long as that pays."""
        if self._model is not None:
            self._model.use_clock(clock)

    @property
    def pools(self) -> Mapping[str, Pool]:
        """See `KeepsPools`; of two of one kind the look-ups'."""
        drafter = None if self._model is None else self._model.guarded.drafter
        return {**(drafter.pools if isinstance(drafter, KeepsPools) else {}), **self.lookup.pools}

    def use_kv(self, target_cache: KVCache, *, num_blocks: int) -> None:
        """Let the model take its memory, if it has KV."""
        if self._keeper is not None:
            self._keeper.use_kv(target_cache, num_blocks=num_blocks)

    @property
    def moved_kv(self) -> Listing[BlockKV]:
        """The model's."""
        return self._keeper.moved_kv if isinstance(self._keeper, MovesKV) else ()

    def start(self, sequence: Sequence) -> None:
        """Start the sequence in both."""
        self.lookup.start(sequence)
        if self._model is not None:
            self._model.start(sequence)

    def learn(self, rows: VerifiedRows) -> None:
        """Let the look-ups learn what the target found, and the model if it does."""
        if self.lookup.num_candidates:
            self.lookup.learn(rows)
        if self._model is not None:
            self._model.guarded.learn(rows)

    def propose(self, context: DraftContext) -> list[Draft]:
        """Return for each request the look-ups' draft, joined with the model's where that is worth its time."""
        drafts = self.lookup.propose(context)
        if self._model is None:
            return drafts
        chains = self._model.propose(context.requests, drafts, context.features)
        return self.lookup.join(context.requests, drafts, chains, computed_by=self._model.name)

    def stop(self, sequence: Sequence) -> None:
        """Stop the sequence in both."""
        self.lookup.stop(sequence)
        if self._model is not None:
            self._model.stop(sequence)
