"""`speculative_config`, checked and resolved into the drafter, the verifier and the number of draft tokens."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

from forerun.config.cost_profile import NOTHING_KEPT, CostProfile
from forerun.config.drafter_config import KeyResolver, field_names, pick, read_keys, resolve_drafter
from forerun.core.integers import check_integer, is_integer
from forerun.core.sampling_params import GREEDY_BELOW
from forerun.drafters.base import DrafterConfig, ExportsHiddenStates, NoDrafterConfig, RunsOnRanks
from forerun.engine.adaptive import AdaptiveLength
from forerun.engine.speculation import FixedLength, Schedule, SpeculationControl
from forerun.errors import ConfigError, did_you_mean, refuse_unknown_keys
from forerun.executor.hidden_states import HiddenStatesStorage
from forerun.verify import VERIFIER_KEYS, VERIFIERS
from forerun.verify.base import VerifierConfig
from forerun.verify.matching import MatchingConfig

MAX_SPECULATIVE_TOKENS = 128

AUTO = "auto"
"""The method that chooses by itself; as a value of `speculative_config` short for {"method": "auto"}."""

DEFAULT = "default"
"""The value of `speculative_config` that stands for "auto" where no draft can change the text, and for None elsewhere."""

REMOVED_SAMPLE_METHODS = {
    "strict": "standard",
    "probabilistic": "standard",
    "rejection": "standard",
    "rejection_sampler": "standard",
    "typical_acceptance_sampler": "typical",
}

KV_TRANSFER_REQUIRED = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
KV_TRANSFER_EXTRA = "kv_connector_extra_config"

_COMMON_KEYS = (
    *("num_speculative_tokens", "num_speculative_tokens_per_batch_size", "enable_adaptive_verification"),
    "rejection_sample_method",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """A resolved `speculative_config`: the drafter, the verifier, the number of draft tokens, where hidden states are saved.

    With `is_adaptive` each step verifies as much of the drafts as pays. `needs_exact_target`: where a draft
    can change the text, nothing is drafted.
    """

    method: str = "none"
    drafter: DrafterConfig = field(default_factory=NoDrafterConfig)
    verifier: VerifierConfig = field(default_factory=MatchingConfig)
    num_speculative_tokens: int = 0
    schedule: Schedule = ()
    is_adaptive: bool = False
    needs_exact_target: bool = False
    storage: HiddenStatesStorage | None = None  # without it no hidden states are saved

    @property
    def exported(self) -> tuple[str, ...]:
        """The hidden states that are saved when a sequence ends."""
        return self.drafter.exported if isinstance(self.drafter, ExportsHiddenStates) else ()

    @property
    def num_draft_ranks(self) -> int:
        """The processes that compute the drafter."""
        return self.drafter.draft_tensor_parallel_size if isinstance(self.drafter, RunsOnRanks) else 1

    def control(self, profile: CostProfile = NOTHING_KEPT, *, most_rows: int | None = None) -> SpeculationControl:
        """The rule that says how many tokens are drafted and verified; an adaptive one begins with the profile's costs.

        It verifies no drafts beyond `most_rows`, see `AdaptiveLength`.
        """
        if self.is_adaptive and self.num_speculative_tokens:
            return AdaptiveLength(
                self.num_speculative_tokens, costs=profile.load(), on_fit=profile.save, most_rows=most_rows
            )
        return FixedLength(num_speculative_tokens=self.num_speculative_tokens, schedule=self.schedule)

    @property
    def is_lossless(self) -> bool:
        """Whether the verifier keeps the target's distribution."""
        return self.verifier.build(self.num_speculative_tokens).is_lossless

    def goes_by_text(self, temperature: float) -> bool:
        """Whether the target's text alone decides what stands of a draft.

        It does under matching, and under any lossless verifier where the text is greedy, since a greedy text can go on in one
        way only.
        """
        return isinstance(self.verifier, MatchingConfig) or (self.is_lossless and temperature < GREEDY_BELOW)

    def describe(self) -> str:
        """One phrase for banners and reports."""
        if not self.num_speculative_tokens:
            return "no speculation"
        lossy = "" if self.is_lossless else ", lossy"
        length = f"at most {self.num_speculative_tokens}" if self.is_adaptive else f"K={self.num_speculative_tokens}"
        return f"{self.method}, {length}{lossy}"


def resolve_speculative(
    given: Mapping[str, Any] | str | None, kv_transfer_config: Mapping[str, Any] | None = None
) -> SpeculativeConfig:
    """Resolve a vLLM-style dict, "auto", "default" or None, and the `kv_transfer_config` that goes with one method.

    Raises:
        ConfigError: a key or value that does not exist, is out of range, or does not fit the others.
    """
    if given is None:
        return SpeculativeConfig(storage=_storage(kv_transfer_config, NoDrafterConfig()))
    if given == DEFAULT:
        return replace(resolve_speculative(AUTO, kv_transfer_config), needs_exact_target=True)
    if given == AUTO:
        given = {"method": AUTO}
    elif isinstance(given, str):
        raise ConfigError(
            f"speculative_config: got {given!r:.80}; may be 'auto', a dict such as {{'method': 'ngram', ...}}, or None for no drafts"
        )
    keys = read_keys(given)
    given_tokens = keys.get("num_speculative_tokens")
    if given_tokens is not None:
        most = MAX_SPECULATIVE_TOKENS
        check_integer("num_speculative_tokens", given_tokens, least=0, most=most, do="0 turns drafting off")
    verifier_class = VERIFIERS[_sample_method(keys.get("rejection_sample_method", "matching"))]
    verifier_keys = field_names(verifier_class)
    resolver = KeyResolver(
        max_draft_tokens=given_tokens or MAX_SPECULATIVE_TOKENS,
        shared_keys=(*VERIFIER_KEYS, "num_speculative_tokens_per_batch_size"),
    )
    method, drafter = resolve_drafter(keys, other_keys=(*_COMMON_KEYS, *verifier_keys), resolver=resolver)
    num_tokens = drafter.default_num_speculative_tokens if given_tokens is None else given_tokens
    if num_tokens is None:
        raise ConfigError(
            f"num_speculative_tokens: method {method!r} has no default; give an integer from 0 to {MAX_SPECULATIVE_TOKENS}, e.g. 5"
        )
    return SpeculativeConfig(
        method=method,
        drafter=drafter if num_tokens else NoDrafterConfig(),  # with K = 0 no drafter reads the prompts in vain
        verifier=verifier_class(**pick(keys, verifier_keys)),
        num_speculative_tokens=num_tokens,
        schedule=_schedule(keys.get("num_speculative_tokens_per_batch_size")),
        is_adaptive=_is_adaptive(method, keys),
        storage=_storage(kv_transfer_config, drafter),
    )


def _is_adaptive(method: str, keys: Mapping[str, Any]) -> bool:
    """Whether the verified part of each draft is chosen step by step: always with "auto", else where it is asked for."""
    name = "enable_adaptive_verification"
    asked = keys.get(name, method == AUTO)
    if not isinstance(asked, bool):
        raise ConfigError(f"{name}: got {asked!r}; may be True or False; leave it out for the method's default")
    if method == AUTO and not asked:
        raise ConfigError(f"{name}: method 'auto' always chooses by itself; leave it out, or name another method")
    if asked and keys.get("num_speculative_tokens_per_batch_size") is not None:
        raise ConfigError(
            "num_speculative_tokens_per_batch_size: lengths are chosen step by step here; give a fixed table or "
            f"{'another method' if method == AUTO else name}, not both"
        )
    return asked


def verifier_part(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a `speculative_config` that choose and set the verifier."""
    return pick(given, VERIFIER_KEYS)


def merge_deprecated(
    given: Mapping[str, Any] | str | None,
    *,
    speculative_model: str | None,
    speculative_method: str | None,
    num_speculative_tokens: int | None,
) -> Mapping[str, Any] | str | None:
    """Fold the arguments that older vLLM took into `speculative_config`, with a warning that shows it."""
    old = {"model": speculative_model, "method": speculative_method, "num_speculative_tokens": num_speculative_tokens}
    old = {key: value for key, value in old.items() if value is not None}
    if not old:
        return given
    if given not in (None, DEFAULT):
        raise ConfigError(
            f"speculative_config and the older argument(s) for {sorted(old)} are both given; keep speculative_config only"
        )
    warnings.warn(
        f"speculative_model, speculative_method and num_speculative_tokens are deprecated; write speculative_config={old!r}",
        FutureWarning,
        stacklevel=4,
    )
    return old


def _sample_method(name: Any) -> str:
    today = REMOVED_SAMPLE_METHODS.get(str(name))
    if today is not None:
        raise ConfigError(f"rejection_sample_method: {name!r} is no longer a value; write {today!r}")
    if not isinstance(name, str) or name not in VERIFIERS:
        raise ConfigError(f"rejection_sample_method: got {name!r:.80}{did_you_mean(str(name), VERIFIERS)}")
    return name


def _schedule(given: Any) -> Schedule:
    """Check vLLM's [(first, last, K), ...]: rising, not overlapping, starting at batch size 1."""
    if given is None:
        return ()
    name = "num_speculative_tokens_per_batch_size"
    if not isinstance(given, (list, tuple)) or not given:
        raise ConfigError(f"{name}: got {given!r}; must be a non-empty list of [first, last, K]")
    entries: list[tuple[int, int, int]] = []
    for entry in given:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3 or not all(map(is_integer, entry)):
            raise ConfigError(f"{name}: got {entry!r}; each entry must be three integers [first, last, K]")
        first, last, num_tokens = entry
        if first < 1 or last < first or num_tokens < 0:
            raise ConfigError(f"{name}: got {entry!r}; needs 1 <= first <= last and K >= 0")
        entries.append((first, last, num_tokens))
    entries.sort()
    if entries[0][0] != 1:
        raise ConfigError(f"{name}: the first range starts at {entries[0][0]}; must start at batch size 1")
    for before, after in pairwise(entries):
        if after[0] <= before[1]:
            raise ConfigError(
                f"{name}: ranges {before[:2]} and {after[:2]} overlap; each batch size may be in one range only"
            )
    return tuple(entries)


def _storage(given: Mapping[str, Any] | None, drafter: DrafterConfig) -> HiddenStatesStorage | None:
    """Where hidden states go, if the method saves them: one without the other is a mistake."""
    if given is None and isinstance(drafter, ExportsHiddenStates):
        raise ConfigError(
            "kv_transfer_config: method 'extract_hidden_states' needs one; give {'kv_connector': "
            "'ExampleHiddenStatesConnector', 'kv_role': 'kv_producer', 'kv_connector_extra_config': "
            "{'shared_storage_path': folder}}"
        )
    if given is not None and not isinstance(drafter, ExportsHiddenStates):
        raise ConfigError(
            "kv_transfer_config: goes with speculative_config method 'extract_hidden_states' only; leave it out"
        )
    return None if given is None else _resolve_kv_transfer(given)


def _resolve_kv_transfer(given: Mapping[str, Any]) -> HiddenStatesStorage:
    """Resolve vLLM's `kv_transfer_config`, of which forerun has one connector: the one that saves hidden states.

    Raises:
        ConfigError: a key or value that does not exist, or is out of range.
    """
    _refuse_other_than_dict("kv_transfer_config", given)
    refuse_unknown_keys(given, (*KV_TRANSFER_REQUIRED, KV_TRANSFER_EXTRA), where="kv_transfer_config")
    for key, only in KV_TRANSFER_REQUIRED.items():
        if given.get(key) != only:
            raise ConfigError(f"{key}: got {given.get(key)!r:.80}; must be {only!r}")
    extra = given.get(KV_TRANSFER_EXTRA, {})
    _refuse_other_than_dict(KV_TRANSFER_EXTRA, extra)
    refuse_unknown_keys(extra, [f.name for f in fields(HiddenStatesStorage)], where=KV_TRANSFER_EXTRA)
    return HiddenStatesStorage(**extra)


def _refuse_other_than_dict(name: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}: got {given!r:.80}; must be a dict")
