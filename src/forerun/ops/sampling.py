"""One request's sampling rules, and the token or the distribution they give for a row of logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.core.exact_math import Float32s
from forerun.core.random_bits import Stream, key_of
from forerun.core.sampling_params import GREEDY_BELOW, SamplingParams
from forerun.core.step import RowLogprobs
from forerun.errors import ModelError, RequestError
from forerun.ops.edits import RowEdits
from forerun.ops.grammar import Grammar
from forerun.ops.penalties import Int32s, LogitBias, Penalties, penalises
from forerun.ops.processors import as_processors
from forerun.ops.race import first_of_weights, race
from forerun.ops.truncation import KeptTokens, truncate


class SamplingRules:
    """All rules of one request, in vLLM's order and meaning.

    Grammar, allowed token ids, bad words, min_tokens, logit bias, logits processors, penalties; then,
    unless the request is greedy, temperature, min-p, top-k, top-p. One object serves one sequence: it
    keeps running counts of a list of output ids that only grows.

    Args:
        params: the request's settings.
        prompt_ids: tokens of the prompt.
        vocab_size: width of the logits.
        stop_token_ids: tokens that end the text, which `min_tokens` forbids at first.
        bad_words_ids: the token ids of each bad word.
        grammar: what the text must match; of this sequence alone.

    Raises:
        RequestError: a token id is outside the vocabulary, or a processor cannot be called.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        vocab_size: int,
        stop_token_ids: frozenset[int] = frozenset(),
        bad_words_ids: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
    ) -> None:
        _check_token_ids(params, bad_words_ids, vocab_size=vocab_size)
        self.vocab_size = vocab_size
        self.is_greedy = params.temperature < GREEDY_BELOW
        self.grammar = grammar
        self.params = params
        self.in_kernels: object = None  # what `ops.native.sampling` keeps with these rules
        self._bad_words = [tuple(word) for word in bad_words_ids]
        self._longest_bad_word = max(map(len, self._bad_words), default=0)
        # A stop token beyond the vocabulary (of a padded tokenizer) cannot come; nothing to forbid.
        forbidden_first = stop_token_ids if params.min_tokens else ()
        self._stop_token_ids = sorted(t for t in forbidden_first if 0 <= t < vocab_size)
        self._num_forbidding_stop = params.min_tokens if self._stop_token_ids else 0
        self._allowed: Int32s | None = params.allowed_ascending
        self._bias = LogitBias(params.logit_bias) if params.logit_bias else None
        self._processors = as_processors(params.logits_processors, prompt_ids=prompt_ids)
        self._penalties = Penalties(params, prompt_ids=prompt_ids) if penalises(params) else None
        self._leaves_few = self._allowed is not None or grammar is not None
        edits = (grammar, self._allowed, self._bias, self._penalties)
        self._always_changes_logits = bool(self._bad_words or self._processors) or any(e is not None for e in edits)

    def is_plain_greedy_at(self, num_output: int) -> bool:
        """Whether, from `num_output` generated tokens on, the answer is the argmax of the raw logits."""
        return self.is_greedy and not self.changes_logits_at(num_output)

    def changes_logits_at(self, num_output: int) -> bool:
        """Whether rules other than temperature, min-p, top-k and top-p change logits from `num_output` generated tokens on."""
        return self._always_changes_logits or num_output < self._num_forbidding_stop

    @property
    def has_processors(self) -> bool:
        """Whether a user's own functions change the logits."""
        return bool(self._processors)

    @property
    def has_masks(self) -> bool:
        """Whether `mask` forbids anything."""
        return self.grammar is not None or bool(self._bad_words)

    def kept(self, row: Tensor, output_ids: list[int], path: Sequence[int] = ()) -> KeptTokens:
        """The tokens that may come after prompt + `output_ids` + `path`, all rules applied; of a greedy request exactly one.

        Args:
            row: [vocab_size] raw logits; not changed.
            output_ids: tokens generated so far.
            path: drafted tokens after them.

        Raises:
            RequestError: a logits processor failed, or the rules forbid every token.
            ModelError: `row` holds NaN or +inf.
        """
        logits = self.edited(row, output_ids, path)
        if self.is_greedy:
            return KeptTokens(np.array([_greedy_token(logits)]), np.zeros(1, dtype=np.float32))
        params = self.params
        largest = logits.max()
        check_largest(float(largest))
        with np.errstate(over="ignore"):
            logits = (logits - largest) / np.float32(params.temperature)
        kept = truncate(logits, min_p=params.min_p, top_k=max(params.top_k, 0), top_p=params.top_p)
        return kept.without_forbidden() if self._leaves_few else kept

    def edits(self, output_ids: Sequence[int], path: Sequence[int] = ()) -> RowEdits | None:
        """What the rules other than processors change in the row after `output_ids` + `path`; None: nothing.

        Raises:
            RequestError: the grammar has no answer, or none yet.
        """
        num_output = len(output_ids) + len(path)
        if not self.changes_logits_at(num_output):
            return None
        forbidden = self._ends_of_bad_words(output_ids, path)
        if num_output < self._num_forbidding_stop:
            forbidden += self._stop_token_ids
        return RowEdits(
            allowed=self._allowed,
            mask=None if self.grammar is None else self.grammar.allowed(output_ids, path).numpy(force=True),
            forbidden=np.array(forbidden, dtype=np.int32) if forbidden else None,
            bias=self._bias,
            penalised=None if self._penalties is None else self._penalties.at(output_ids, path),
        )

    def mask(self, output_ids: Sequence[int], path: Sequence[int] = ()) -> npt.NDArray[np.bool_]:
        """Which tokens grammar and bad words leave after `output_ids` + `path`: [vocab_size].

        Raises:
            RequestError: the grammar has no answer, or none yet.
        """
        if self.grammar is None:
            mask = np.ones(self.vocab_size, dtype=np.bool_)
        else:
            mask = self.grammar.allowed(output_ids, path).numpy(force=True).copy()  # theirs is not to be changed
        mask[self._ends_of_bad_words(output_ids, path)] = False
        return mask

    def edited(self, row: Tensor, output_ids: list[int], path: Sequence[int]) -> Float32s:
        """The logits after all rules that can change the most likely token; `row` itself, on the host, where none does."""
        logits: Float32s = row.float().numpy(force=True)
        edits = self.edits(output_ids, path)
        if edits is None:
            return logits
        with np.errstate(over="ignore", invalid="ignore"):
            if not self._processors:
                return edits.apply(logits)
            logits = self._processed(edits.before_penalties(logits), row.device, [*output_ids, *path])
            edits.keep_mask(logits)  # no processor may bring back what cannot be
            if edits.penalised is not None:
                edits.penalised.apply(logits)
        return logits

    def _processed(self, logits: Float32s, device: torch.device, output_and_path: list[int]) -> Float32s:
        """What the user's own functions, which get tensors on the target's device, make of `logits`; a copy."""
        shaped = torch.from_numpy(logits).to(device)
        for processor in self._processors:
            shaped = processor(output_and_path, shaped)
        processed: Float32s = shaped.numpy(force=True).copy()
        return processed

    def _ends_of_bad_words(self, output_ids: Sequence[int], path: Sequence[int]) -> list[int]:
        """The last token of each bad word whose other tokens end the output."""
        if not self._bad_words:
            return []
        num_before = self._longest_bad_word - 1
        ending = (*output_ids[max(0, len(output_ids) - num_before) :], *path)
        return [
            word[-1]
            for word in self._bad_words
            if (start := len(ending) - len(word) + 1) >= 0 and ending[start:] == word[:-1]
        ]


def target_tokens(
    rules: SamplingRules,
    row: Tensor,
    output_ids: list[int],
    path: Sequence[int] = (),
    *,
    seed: int,
    position: int,
    count: int,
) -> list[int]:
    """Draw the target's own token and its runners-up: the first ones of the exponential race (the Gumbel-max trick).

    The token minimising noise / probability is drawn with exactly its probability, and keyed noise makes it a function of
    (seed, position, logits), whatever was drafted. A drafter that runs the race on its own logits bets on what the target
    would draw if it agreed.

    Args:
        rules: the request's rules.
        row: [vocab_size] raw logits.
        output_ids: tokens generated so far.
        path: drafted tokens after them.
        seed: the sequence's seed.
        position: index in the sequence of the token to draw.
        count: tokens to return; fewer come where fewer are possible.

    Raises:
        RequestError: as `SamplingRules.kept`.
        ModelError: as `SamplingRules.kept`.
    """
    kept = rules.kept(row, output_ids, path)
    return race(kept.logits, kept.token_ids, key=key_of(seed, position, Stream.TARGET, 0), count=count)


def target_probs(rules: SamplingRules, row: Tensor, output_ids: list[int], path: Sequence[int] = ()) -> Tensor:
    """The distribution that `target_tokens` draws the first token from: [vocab_size] fp32 on the CPU, one-hot for greedy requests."""
    kept = rules.kept(row, output_ids, path)
    probs = torch.from_numpy(kept.logits).softmax(-1).numpy()
    return torch.from_numpy(kept.spread(probs, vocab_size=rules.vocab_size, fill=0.0))


def draw_token(probs: Tensor, *, seed: int, position: int, stream: Stream, index: int = 0) -> int:
    """Draw a token from `probs` ([vocab_size], need not be normalised) with keyed noise."""
    return first_of_weights(probs.double().numpy(force=True), key=key_of(seed, position, stream, index))


def _greedy_token(logits: Float32s) -> int:
    """The most likely token of `logits` [vocab_size]; the lowest id where several are."""
    token_id = int(logits.argmax())
    check_largest(float(logits[token_id]))
    return token_id


def check_largest(logit: float) -> None:
    """Raise unless `logit`, the largest of a row (NaN where the row holds any), is finite."""
    if -math.inf < logit < math.inf:
        return
    if logit == -math.inf:
        raise RequestError(
            "sampling: the rules forbid every token; loosen structured_outputs, allowed_token_ids, bad_words, "
            "min_tokens, bias or processors"
        )
    raise ModelError(f"logits: the largest is {logit}; must be finite; check the weights and the dtype")


def token_logprobs(rows: Tensor, token_ids: Sequence[int], k: int) -> RowLogprobs:
    """Log probabilities from raw logits, before any rule (vLLM's `raw_logprobs`).

    A row's result does not depend on the rows beside it, nor on the number of threads.

    Args:
        rows: [R, vocab_size] raw logits.
        token_ids: the token taken at each row.
        k: how many of the most likely tokens to report; -1 for the whole vocabulary.
    """
    logits = rows.float()
    # Not logsumexp: it shares a single row among threads, which changes the order of its sum.
    logprobs = logits.log_softmax(-1)
    ids = torch.tensor(list(token_ids), dtype=torch.int64, device=rows.device).unsqueeze(-1)
    chosen = logits.gather(-1, ids)
    top = logits.topk(logits.shape[-1] if k < 0 else k, dim=-1)
    return RowLogprobs(
        chosen=logprobs.gather(-1, ids).squeeze(-1).tolist(),
        ranks=((logits > chosen).sum(-1) + 1).tolist(),
        top_ids=top.indices.tolist(),
        top_values=logprobs.gather(-1, top.indices).tolist(),
    )


def _check_token_ids(params: SamplingParams, bad_words_ids: Sequence[Sequence[int]], *, vocab_size: int) -> None:
    """Raise `RequestError` for the first token id outside the vocabulary."""

    def check(name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{name}: got token id {token_id}; must be from 0 to {vocab_size - 1}; check it against the tokenizer"
                )

    if params.allowed_ascending is not None:
        check("allowed_token_ids", params.allowed_ascending[[0, -1]])  # the ends tell of all
    check("stop_token_ids", params.stop_token_ids or ())
    check("logit_bias", params.logit_bias or ())
    for word in bad_words_ids:
        check("bad_words", word)
        if not word:
            raise RequestError("bad_words: a word has no tokens; it cannot be forbidden; drop it")
