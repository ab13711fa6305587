"""N-gram drafts, or prompt lookup: draft what followed the last tokens where they occurred before.

The idea is that of LLMA (arXiv 2304.04487) and of Prompt Lookup Decoding (github.com/apoorvumang).
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.integers import check_integer
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, DraftRequest, NgramLookup, TargetInfo
from forerun.drafters.confidence import DEFAULT_THRESHOLD, check_threshold, confident_length
from forerun.errors import ConfigError

DEFAULT_LENGTH = 5  # vLLM's, where neither bound is given
LONGEST_MATCH = 32  # tokens; longer matches count as this long, and longer n-grams are not looked up


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """The lengths (tokens) of the n-grams to look up, with vLLM's keys and rules, and how far to trust a match.

    Where one bound is unset it equals the other; where both are unset they are 5. A draft goes on while
    the chance that all of it is accepted is `draft_confidence_threshold` or more; 0 always drafts K
    tokens.

    Raises:
        ConfigError: a bound is not an integer from 1 to 32, or the lower one is above the upper one, or
            the threshold is no probability.
    """

    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    draft_confidence_threshold: float = DEFAULT_THRESHOLD

    def __post_init__(self) -> None:
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if (length := getattr(self, name)) is not None:
                other = f"leave it out for {DEFAULT_LENGTH} or the other bound"
                check_integer(name, length, least=1, most=LONGEST_MATCH, do=other)
        check_threshold(self.draft_confidence_threshold)
        if self.shortest > self.longest:
            raise ConfigError(
                f"prompt_lookup_min: got {self.shortest}; may be at most prompt_lookup_max ({self.longest}); "
                "lower it or raise prompt_lookup_max"
            )

    @property
    def shortest(self) -> int:
        """The shortest n-gram that counts as a match."""
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_LENGTH

    @property
    def longest(self) -> int:
        """The longest n-gram that is looked up."""
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LENGTH

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """None, as the best length depends on the text, so the user must give it."""
        return None

    def build(self, target: TargetInfo) -> Drafter:
        """Make the drafter."""
        return NgramDrafter(target, self)


class NgramIndex:
    """Where each n-gram of a growing text was last followed by a token.

    One table per n-gram length keeps the latest place only, so a new token costs one write per
    length and a look-up one read per length, however long the text is.
    """

    def __init__(self, *, shortest: int, longest: int, vocab_size: int) -> None:
        self.tokens: list[int] = []
        self._bits = vocab_size.bit_length()  # per token, so that an n-gram packs into one integer exactly
        self._packed_tail = 0  # the last `longest` tokens
        self._tables = [_Table(length, self._bits) for length in range(shortest, longest + 1)]
        self._mask = self._tables[-1].mask

    def extend(self, token_ids: list[int]) -> None:
        """Add the tokens that follow the text so far."""
        for token_id in token_ids:
            # Now that a token follows it, the tail may be found; so the suffix never matches itself.
            place = len(self.tokens)
            for table in self._tables:
                if place >= table.length:
                    table.latest[self._packed_tail & table.mask] = place
            self.tokens.append(token_id)
            self._packed_tail = (self._packed_tail << self._bits | token_id) & self._mask

    def lookup(self) -> int | None:
        """The place behind the latest occurrence of the text's longest suffix that occurred before, or None."""
        for table in reversed(self._tables):
            if len(self.tokens) > table.length:
                place = table.latest.get(self._packed_tail & table.mask)
                if place is not None:
                    return place
        return None


class _Table:
    """Packed n-gram of one length -> index of the token after its latest occurrence."""

    __slots__ = ("latest", "length", "mask")

    def __init__(self, length: int, bits: int) -> None:
        self.length = length
        self.mask = (1 << length * bits) - 1
        self.latest: dict[int, int] = {}


class NgramDrafter:
    """Copies what followed the latest occurrence of the longest matching n-gram.

    The last n tokens are looked up in prompt and output, longest n first; of equally long matches the
    latest wins. The tokens after it are the draft; its length grows with that of the whole match, which
    may be longer than n. Where the copy reaches the end of the text it goes on with the tokens just
    drafted, as LZ77 does with a match that overlaps its own output: a text of period d is drafted with
    period d.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, target: TargetInfo, config: NgramConfig) -> None:
        self._vocab_size = target.vocab_size
        self._config = config
        threshold, most = config.draft_confidence_threshold, target.num_speculative_tokens
        self.ngram_lookup = NgramLookup(
            shortest=config.shortest,
            longest=config.longest,
            draft_lengths=tuple(confident_length(1 + i, threshold=threshold, most=most) for i in range(LONGEST_MATCH)),
        )
        self._indexes: dict[int, NgramIndex] = {}

    def start(self, sequence: Sequence) -> None:
        """Index the prompt."""
        config = self._config
        index = NgramIndex(shortest=config.shortest, longest=config.longest, vocab_size=self._vocab_size)
        index.extend(sequence.tokens_from(0))
        self._indexes[sequence.seq_id] = index

    def propose(self, context: DraftContext) -> list[Draft]:
        """Return a chain per request; its match decides its length, and without one it is empty."""
        return [self._draft(request) for request in context.requests]

    def stop(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._indexes.pop(sequence.seq_id, None)

    def _draft(self, request: DraftRequest) -> Draft:
        index = self._indexes[request.sequence.seq_id]
        index.extend(request.sequence.tokens_from(len(index.tokens)))
        place = index.lookup()
        if place is None:
            return NO_DRAFT
        length = self.ngram_lookup.draft_lengths[match_length(index.tokens, place, most=LONGEST_MATCH) - 1]
        num_tokens = min(length, request.max_tokens, request.max_depth)
        return Draft(copy_from(index.tokens, place, num_tokens=num_tokens)) if num_tokens else NO_DRAFT


def match_length(tokens: list[int], place: int, *, most: int) -> int:
    """The number of tokens (at most `most`) before `place` that equal those before the end."""
    offset = len(tokens) - place
    first = max(place - most, 0)
    at = place
    while at > first and tokens[at - 1] == tokens[at - 1 + offset]:
        at -= 1
    return place - at


def copy_from(tokens: list[int], place: int, *, num_tokens: int) -> tuple[int, ...]:
    """Copy `num_tokens` tokens from `place` on; past the end of the text, from the copy itself."""
    copied = tokens[place : place + num_tokens]
    period = len(tokens) - place
    while len(copied) < num_tokens:
        copied.append(copied[len(copied) - period])
    return tuple(copied)
