"""Suffix decoding (arXiv 2411.04975): draft what most often followed the text's ending before.

It looks for the ending in the request's own prompt and output and in a pool of past responses.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from operator import itemgetter
from sys import getsizeof

import numpy as np

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.finite_numbers import is_number
from forerun.core.integers import check_integer
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, DraftRequest, Pool, PoolArrays, TargetInfo
from forerun.drafters.confidence import DEFAULT_THRESHOLD, check_threshold
from forerun.drafters.suffix_tree import BREAK, GRAM_SIZES, NO_TREE, Limits, SpeculationTree, SuffixIndex, grow
from forerun.errors import ConfigError

MAX_OCCURRENCES = 64
"""The number of a match's latest occurrences that are counted; it bounds the time of a step."""

MOST_DRAFT_TOKENS = 128
"""What `num_speculative_tokens` may be, at most."""

OBJECTS_OF_A_POOL = 2048  # bytes besides its arrays, measured and rounded up
BYTES_OF_A_RESPONSE = 128  # in the list of responses, measured and rounded up
MOST_BYTES_PER_TOKEN = 32  # of arrays that are as badly filled as they can be


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixConfig:
    """vLLM's keys of suffix decoding, and four more: the pools' tokens and bytes, drafts as trees, and how far to trust a match.

    `suffix_decoding_max_tree_depth` bounds match and draft together; a match of m tokens earns at
    most `suffix_decoding_max_spec_factor` * m draft tokens; a drafted path is at least
    `suffix_decoding_min_token_prob` likely. The pools keep the latest responses, at most
    `suffix_decoding_max_cached_requests` of them with at most `suffix_decoding_max_cached_tokens` tokens
    together, in at most `suffix_decoding_max_bytes` of memory; 0 of any keeps none. With `suffix_decoding_tree` a draft is the likeliest tree instead
    of the likeliest chain. A path goes on while the chance that all of it is accepted is
    `draft_confidence_threshold` or more; unlike the probabilities, this chance also counts how often
    the path was seen and after how long a match. 0 turns this off.

    Raises:
        ConfigError: a value is out of range.
    """

    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10000
    suffix_decoding_max_cached_tokens: int = 2_000_000
    suffix_decoding_max_bytes: int = 64 << 20
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_tree: bool = False
    draft_confidence_threshold: float = DEFAULT_THRESHOLD

    def __post_init__(self) -> None:
        check_integer("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, least=1)
        check_integer("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, least=0)
        check_integer("suffix_decoding_max_cached_tokens", self.suffix_decoding_max_cached_tokens, least=0)
        check_integer("suffix_decoding_max_bytes", self.suffix_decoding_max_bytes, least=0)
        _check_number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, most=math.inf)
        _check_number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, most=1.0)
        check_threshold(self.draft_confidence_threshold)
        if not isinstance(self.suffix_decoding_tree, bool):
            raise ConfigError(
                f"suffix_decoding_tree: got {self.suffix_decoding_tree!r}; may be True or False; leave it out for False"
            )

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """The tree's depth, as in vLLM, so that the match alone decides the length of a draft; no more than any draft may have."""
        return min(self.suffix_decoding_max_tree_depth, MOST_DRAFT_TOKENS)

    def build(self, target: TargetInfo) -> Drafter:
        """Make the drafter."""
        return SuffixDrafter(target, self)


def _check_number(name: str, value: float, *, most: float) -> None:
    if not is_number(value) or not 0 <= value <= most:
        may_be = "a finite number of 0 or more" if math.isinf(most) else f"a number from 0 to {most:g}"
        raise ConfigError(f"{name}: got {value!r}; must be {may_be}; leave it out for the default")


class ResponsePools:
    """Past responses, in one pool per cache salt.

    All pools together hold at most `max_responses` responses and `max_tokens` tokens, and take at most
    `max_bytes` of memory. The oldest response of all is dropped first; of one that is too long its end is kept.
    """

    def __init__(self, *, max_responses: int, max_tokens: int, max_bytes: int, vocab_size: int) -> None:
        self.num_tokens = 0
        self.num_bytes = 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_tokens = min(max_tokens, max(0, max_bytes - OBJECTS_OF_A_POOL - 200) // MOST_BYTES_PER_TOKEN)
        self._vocab_size = vocab_size
        self._pools: dict[str | None, SuffixIndex] = {}
        self._responses: deque[tuple[str | None, int]] = deque()  # (salt, number of tokens), oldest first

    @property
    def keeps_any(self) -> bool:
        """Whether the limits let it keep a response at all."""
        return self._max_responses > 0 and self._max_tokens > 0

    def pool(self, cache_salt: str | None) -> SuffixIndex | None:
        """The responses that sequences of this salt may see, or None if there are none."""
        return self._pools.get(cache_salt)

    def add(self, response: Listing[int], cache_salt: str | None) -> None:
        """Keep a response for sequences of the same salt."""
        kept = response[max(0, len(response) - self._max_tokens) :]
        if not kept or not self._max_responses or self._bytes_alone(len(kept), cache_salt) > self._max_bytes:
            return  # the last: a salt of that length, or a budget that is too small for anything
        while len(self._responses) >= self._max_responses or self.num_tokens + len(kept) > self._max_tokens:
            self._drop_oldest()
        while self.num_bytes + self._most_more_bytes(len(kept), cache_salt) > self._max_bytes:
            self._drop_oldest()
        pool = self._pools.get(cache_salt)
        if pool is None:
            pool = self._pools[cache_salt] = SuffixIndex(vocab_size=self._vocab_size)
            self.num_bytes += pool.num_bytes + OBJECTS_OF_A_POOL + getsizeof(cache_salt)
        before = pool.num_bytes
        pool.extend(kept)
        pool.end_text()
        self._responses.append((cache_salt, len(kept)))
        self.num_tokens += len(kept)
        self.num_bytes += pool.num_bytes - before + BYTES_OF_A_RESPONSE

    def to_arrays(self) -> dict[str | None, PoolArrays]:
        """Each salt's responses: `tokens` with a `BREAK` behind each, and the `ages` of each among all salts' (0: oldest)."""
        ages: dict[str | None, list[int]] = {}
        for age, (salt, _) in enumerate(self._responses):
            ages.setdefault(salt, []).append(age)
        return {
            salt: {
                "tokens": np.array(pool.ended_texts(), dtype=np.int32),
                "ages": np.array(ages[salt], dtype=np.int32),
            }
            for salt, pool in self._pools.items()
        }

    def from_arrays(self, saved: Mapping[str | None, PoolArrays]) -> None:
        """Add the responses of `to_arrays`, the oldest first.

        Raises:
            ValueError: the arrays are none that `to_arrays` gives for this vocabulary.
        """
        responses: list[tuple[int, str | None, Listing[int]]] = []
        for salt, arrays in saved.items():
            tokens, ages = arrays["tokens"], arrays["ages"]
            if any(array.ndim != 1 or array.dtype != np.int32 for array in (tokens, ages)):
                raise ValueError("responses and their ages must be rows of int32")
            ends = np.flatnonzero(tokens == BREAK)
            if len(ends) != len(ages) or (len(tokens) and ends[-1] != len(tokens) - 1):
                raise ValueError("responses and their ages do not agree")
            if ((tokens < BREAK) | (tokens >= self._vocab_size)).any():
                raise ValueError(f"token ids are not all from 0 to {self._vocab_size - 1}")
            starts = [0, *(ends + 1).tolist()]
            for age, start, end in zip(ages.tolist(), starts, ends.tolist(), strict=False):
                responses.append((age, salt, tokens[start:end].tolist()))
        for _, salt, response in sorted(responses, key=itemgetter(0)):
            self.add(response, salt)

    def _most_more_bytes(self, num_tokens: int, salt: str | None) -> int:
        """The most memory that a response of so many tokens may add."""
        pool = self._pools.get(salt)
        if pool is None:
            return self._bytes_alone(num_tokens, salt)
        return pool.most_bytes_with(num_tokens) - pool.num_bytes + BYTES_OF_A_RESPONSE

    def _bytes_alone(self, num_tokens: int, salt: str | None) -> int:
        """The most memory that a salt takes whose only response has so many tokens."""
        empty = SuffixIndex(vocab_size=self._vocab_size)
        return empty.most_bytes_with(num_tokens) + OBJECTS_OF_A_POOL + getsizeof(salt) + BYTES_OF_A_RESPONSE

    def _drop_oldest(self) -> None:
        cache_salt, num_tokens = self._responses.popleft()
        pool = self._pools[cache_salt]
        before = pool.num_bytes
        pool.drop_oldest_text()
        if pool.num_ended_texts == 0:
            del self._pools[cache_salt]
            self.num_bytes -= before + OBJECTS_OF_A_POOL + getsizeof(cache_salt)
        else:
            self.num_bytes += pool.num_bytes - before
        self.num_bytes -= BYTES_OF_A_RESPONSE
        self.num_tokens -= num_tokens


@dataclass(frozen=True, slots=True)
class _Candidate:
    """The tree grown below a match of `match_length` tokens."""

    tree: SpeculationTree = NO_TREE
    match_length: int = 0

    @property
    def rank(self) -> tuple[float, int]:
        """What candidates are compared by: the score, and of equal scores the length of the match."""
        return self.tree.score, self.match_length


class SuffixDrafter:
    """Drafts the continuation with the highest score, over all match lengths and over the own text and the pool.

    For every m, the last m tokens are matched, and each match is continued by what followed it most
    often (`suffix_tree.grow`). Of equal scores the longer match wins, then the request's own text.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, target: TargetInfo, config: SuffixConfig) -> None:
        self._vocab_size = target.vocab_size
        self._config = config
        self._pools = ResponsePools(
            max_responses=config.suffix_decoding_max_cached_requests,
            max_tokens=config.suffix_decoding_max_cached_tokens,
            max_bytes=config.suffix_decoding_max_bytes,
            vocab_size=target.vocab_size,
        )
        self._texts: dict[int, SuffixIndex] = {}

    @property
    def pools(self) -> Mapping[str, Pool]:
        """See `KeepsPools`; none where nothing may be kept."""
        return {"suffix": self._pools} if self._pools.keeps_any else {}

    def start(self, sequence: Sequence) -> None:
        """Index the prompt."""
        text = SuffixIndex(vocab_size=self._vocab_size)
        text.extend(sequence.tokens_from(0))
        self._texts[sequence.seq_id] = text

    def propose(self, context: DraftContext) -> list[Draft]:
        """Return a chain or a tree per request; its match decides its length."""
        return [self._draft(request) for request in context.requests]

    def stop(self, sequence: Sequence) -> None:
        """Forget the sequence, but keep its response for later sequences of the same salt."""
        self._texts.pop(sequence.seq_id, None)
        self._pools.add(sequence.output_ids, sequence.cache_salt)

    def _draft(self, request: DraftRequest) -> Draft:
        sequence = request.sequence
        text = self._texts[sequence.seq_id]
        text.extend(sequence.tokens_from(text.text_length))
        longest = min(self._config.suffix_decoding_max_tree_depth - 1, text.text_length)
        suffix = text.tokens[len(text.tokens) - longest :].tolist()
        limits = [self._limits(match_length, request) for match_length in range(longest + 1)]
        best = self._best(text, suffix, limits, _Candidate())
        pool = self._pools.pool(sequence.cache_salt)
        if pool is not None:
            best = self._best(pool, suffix, limits, best)
        tree = best.tree
        if not tree.token_ids:
            return NO_DRAFT
        return Draft(tree.token_ids, tree.parents if self._config.suffix_decoding_tree else None)

    def _best(self, index: SuffixIndex, suffix: list[int], limits: list[Limits], best: _Candidate) -> _Candidate:
        """Return `best`, or a better continuation from the matches in `index`, of any length."""
        longer = len(limits)
        for size in reversed(GRAM_SIZES):
            lengths = range(size, longer)
            longer = min(longer, size)
            if not any(_may_beat(limits[length], length, best) for length in lengths):
                continue
            matches = _matches(index, suffix, lengths)
            for length in sorted(matches, key=lambda length: (limits[length].max_score, length), reverse=True):
                if _may_beat(limits[length], length, best):
                    candidate = _Candidate(grow(index.tokens, matches[length], limits[length]), length)
                    best = max(best, candidate, key=lambda one: one.rank)
        return best

    def _limits(self, match_length: int, request: DraftRequest) -> Limits:
        """The limits for continuing a match of `match_length` tokens."""
        config = self._config
        max_nodes = int(min(request.max_tokens, config.suffix_decoding_max_spec_factor * match_length))
        return Limits(
            max_nodes=max_nodes,
            max_depth=min(request.max_depth, config.suffix_decoding_max_tree_depth - match_length),
            max_children=max_nodes if config.suffix_decoding_tree else 1,
            min_prob=config.suffix_decoding_min_token_prob,
            min_confidence=config.draft_confidence_threshold,
            match_length=match_length,
        )


def _may_beat(limits: Limits, match_length: int, best: _Candidate) -> bool:
    """Whether a tree within `limits` can outrank `best`."""
    return (limits.max_score, match_length) > best.rank


def _matches(index: SuffixIndex, suffix: list[int], lengths: range) -> dict[int, list[int]]:
    """Match length -> places after the last that many tokens of `suffix`, latest first; none is empty.

    The first of `lengths` is looked up; the longer ones are those of its places that match further.
    """
    found: dict[int, list[int]] = {}
    if not lengths:
        return found
    tokens = index.tokens
    places = index.places(suffix[-lengths.start :], limit=MAX_OCCURRENCES)
    for length in lengths:
        if length > lengths.start:
            wanted = suffix[-length]
            places = [place for place in places if tokens[place - length] == wanted]
        if not places:
            break
        found[length] = places
    return found
