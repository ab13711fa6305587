"""One request's sampling rules, and the token or the distribution they give for a row of logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from forerun.core.random_bits import Stream, exponential, exponential_row
from forerun.core.sampling_params import SamplingParams
from forerun.core.step import RowLogprobs
from forerun.errors import ModelError, RequestError
from forerun.ops.grammar import Grammar
from forerun.ops.penalties import LogitBias, Penalties, penalises
from forerun.ops.processors import as_processors
from forerun.ops.truncation import Candidates, truncate

_GREEDY_BELOW = 1e-5  # a lower temperature is greedy, as in vLLM


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
        self.is_greedy = params.temperature < _GREEDY_BELOW
        self.grammar = grammar
        self._params = params
        self._bad_words = [tuple(word) for word in bad_words_ids]
        self._longest_bad_word = max(map(len, self._bad_words), default=0)
        # A stop token beyond the vocabulary (of a padded tokenizer) cannot come; nothing to forbid.
        self._stop_token_ids = sorted(t for t in stop_token_ids if 0 <= t < vocab_size)
        self._num_forbidding_stop = params.min_tokens if self._stop_token_ids else 0
        self._allowed = (
            None if params.allowed_token_ids is None else torch.tensor(sorted(set(params.allowed_token_ids)))
        )
        self._bias = LogitBias(params.logit_bias) if params.logit_bias else None
        self._processors = as_processors(params.logits_processors, prompt_ids=prompt_ids)
        self._penalties = Penalties(params, prompt_ids=prompt_ids, vocab_size=vocab_size) if penalises(params) else None
        self._leaves_few = self._allowed is not None or grammar is not None
        edits = (grammar, self._allowed, self._bias, self._penalties)
        self._always_changes_logits = bool(self._bad_words or self._processors) or any(e is not None for e in edits)

    def is_plain_greedy_at(self, num_output: int) -> bool:
        """Whether, from `num_output` generated tokens on, the answer is the argmax of the raw logits."""
        return self.is_greedy and not self._changes_logits_at(num_output)

    def shape(self, row: Tensor, output_ids: list[int], path: Sequence[int] = ()) -> Tensor:
        """Return the logits of the next token after prompt + `output_ids` + `path`, all rules applied.

        Args:
            row: [vocab_size] raw logits; not changed, though it may be what is returned.
            output_ids: tokens generated so far.
            path: drafted tokens after them.

        Returns:
            [vocab_size] fp32, -inf where a token is out; a greedy request's argmax is its next token.

        Raises:
            RequestError: a logits processor failed, or the rules forbid every token.
            ModelError: `row` holds NaN or +inf.
        """
        if self.is_greedy:
            return self._adjusted(row, output_ids, path)
        kept = self.candidates(row, output_ids, path)
        return kept.spread(kept.logits, vocab_size=self.vocab_size, fill=-math.inf)

    def candidates(self, row: Tensor, output_ids: list[int], path: Sequence[int] = ()) -> Candidates:
        """Like `shape`, but only the tokens that are left; a greedy request leaves exactly one."""
        logits = self._adjusted(row, output_ids, path)
        if self.is_greedy:
            return Candidates(torch.tensor([greedy_token(logits)], device=logits.device), logits.new_zeros(1))
        params = self._params
        logits = (logits - _checked_largest(logits)) / params.temperature
        kept = truncate(logits, min_p=params.min_p, top_k=max(params.top_k, 0), top_p=params.top_p)
        return kept.without_forbidden() if self._leaves_few else kept

    def _changes_logits_at(self, num_output: int) -> bool:
        return self._always_changes_logits or num_output < self._num_forbidding_stop

    def _adjusted(self, row: Tensor, output_ids: list[int], path: Sequence[int]) -> Tensor:
        """Logits after all rules that can change the most likely token."""
        num_output = len(output_ids) + len(path)
        if not self._changes_logits_at(num_output):
            return row.float()
        logits = self._keep_allowed(row)
        if self.grammar is not None:
            grammatical = self.grammar.allowed(output_ids, path).to(logits.device)
            logits = logits.where(grammatical, -math.inf)
        self._forbid_bad_words(logits, output_ids, path)
        if num_output < self._num_forbidding_stop:
            logits[self._stop_token_ids] = -math.inf
        if self._bias is not None:
            self._bias.apply(logits)
        if self._processors:
            output_and_path = [*output_ids, *path]
            for processor in self._processors:
                logits = processor(output_and_path, logits)
            if self.grammar is not None:  # no processor may bring back what cannot be
                logits = logits.where(grammatical, -math.inf)
        if self._penalties is not None:
            self._penalties.apply(logits, output_ids, path)
        return logits

    def _keep_allowed(self, row: Tensor) -> Tensor:
        """A copy of `row`, -inf at all tokens that are not allowed."""
        if self._allowed is None:
            return row.to(torch.float32, copy=True)
        allowed = self._allowed.to(row.device)
        return torch.full_like(row, -math.inf, dtype=torch.float32).index_copy_(0, allowed, row[allowed].float())

    def _forbid_bad_words(self, logits: Tensor, output_ids: list[int], path: Sequence[int]) -> None:
        """Forbid the last token of each bad word whose other tokens end the output."""
        if not self._bad_words:
            return
        num_before = self._longest_bad_word - 1
        ending = (*output_ids[max(0, len(output_ids) - num_before) :], *path)
        for word in self._bad_words:
            start = len(ending) - len(word) + 1
            if start >= 0 and ending[start:] == word[:-1]:
                logits[word[-1]] = -math.inf


def target_token(
    rules: SamplingRules, row: Tensor, output_ids: list[int], path: Sequence[int] = (), *, seed: int, position: int
) -> int:
    """Sample the target's own token, by the exponential race (the Gumbel-max trick).

    The token minimising noise / probability is drawn with exactly its probability, and keyed noise
    makes it a function of (seed, position, logits), whatever was drafted.

    Args:
        rules: the request's rules.
        row: [vocab_size] raw logits.
        output_ids: tokens generated so far.
        path: drafted tokens after them.
        seed: the sequence's seed.
        position: index in the sequence of the token to sample.

    Raises:
        RequestError: as `SamplingRules.shape`.
        ModelError: as `SamplingRules.shape`.
    """
    if rules.is_greedy:
        return greedy_token(rules.shape(row, output_ids, path))
    kept = rules.candidates(row, output_ids, path)
    winner = _argmax(_target_race(kept, seed, position, vocab_size=len(row)))
    return winner if kept.token_ids is None else int(kept.token_ids[winner])


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
    """The first `count` of the race that `target_token` gives the winner of; fewer where fewer are possible.

    A drafter that runs the race on its own logits bets on what the target would draw if it agreed.
    """
    kept = rules.candidates(row, output_ids, path)
    race = _target_race(kept, seed, position, vocab_size=len(row))
    speeds, winners = race.topk(min(count, len(race)))
    winners = winners[speeds > 0]
    ids: list[int] = (winners if kept.token_ids is None else kept.token_ids[winners]).tolist()
    return ids


def _target_race(kept: Candidates, seed: int, position: int, *, vocab_size: int) -> Tensor:
    """Speed of each candidate in the target's race; 0 for those that are out."""
    weights = kept.logits.exp()
    if kept.token_ids is None:
        noise = exponential_row(seed, position, Stream.TARGET, vocab_size=vocab_size)
    else:
        noise = exponential(seed, position, Stream.TARGET, token_ids=kept.token_ids.numpy(force=True))
    return weights / torch.from_numpy(noise).to(weights.device)


def target_probs(rules: SamplingRules, row: Tensor, output_ids: list[int], path: Sequence[int] = ()) -> Tensor:
    """The distribution that `target_token` samples from: [vocab_size] fp32, one-hot for greedy requests."""
    kept = rules.candidates(row, output_ids, path)
    return kept.spread(kept.logits.softmax(-1), vocab_size=rules.vocab_size, fill=0.0)


def draw_token(probs: Tensor, *, seed: int, position: int, stream: Stream, index: int = 0) -> int:
    """Draw a token from `probs` ([vocab_size], need not be normalised) with keyed noise."""
    noise = exponential_row(seed, position, stream, vocab_size=len(probs), index=index)
    return _argmax(probs / torch.from_numpy(noise).to(probs.device))


def greedy_token(logits: Tensor) -> int:
    """The most likely token of `logits` [vocab_size]; the lowest id where several are.

    Raises:
        RequestError: every token is forbidden.
        ModelError: the logits hold NaN or +inf.
    """
    token_id = _argmax(logits)
    check_largest(logits[token_id].item())
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


def _checked_largest(logits: Tensor) -> float:
    largest = logits.max().item()
    check_largest(largest)
    return largest


def _argmax(values: Tensor) -> int:
    # On CPU NumPy's argmax is an order of magnitude faster than torch's; both take the first of ties.
    return int(values.detach().numpy().argmax()) if values.is_cpu else int(values.argmax())


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
    """Raise `RequestError` for the first token id outside the vocabulary, or a bias that cannot be added."""

    def check(name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{name}: got token id {token_id}; must be from 0 to {vocab_size - 1}; check it against the tokenizer"
                )

    check("allowed_token_ids", params.allowed_token_ids or ())
    check("stop_token_ids", params.stop_token_ids or ())
    check("logit_bias", params.logit_bias or ())
    for word in bad_words_ids:
        check("bad_words", word)
        if not word:
            raise RequestError("bad_words: a word has no tokens; it cannot be forbidden; drop it")
    for token_id, bias in (params.logit_bias or {}).items():
        if not bias < math.inf:
            raise RequestError(
                f"logit_bias: got {bias} for token {token_id}; must be finite, or -inf to forbid the token"
            )
