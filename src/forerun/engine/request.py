"""Requests: checked on the way in, made into generations, and reported on the way out."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from forerun.core.outputs import RequestMetrics, RequestOutput, TokenLogprobs
from forerun.core.random_bits import child_seed
from forerun.core.sampling_params import SamplingParams
from forerun.core.stats import PredictionCounts, SpeculationStats
from forerun.core.step import EndedSequence, SequenceSpec
from forerun.engine.client import EngineRequest
from forerun.engine.generation import Generation
from forerun.engine.text import CompletionText, Detokenizer
from forerun.errors import ErrorKind, RequestError
from forerun.executor.base import Executor
from forerun.kv.block_pool import BlockPool
from forerun.kv.block_table import BlockTable

NUM_CONTEXT_TOKENS = 8  # of a prompt's end, before which nothing changes how a continuation is encoded

BadWords = tuple[tuple[int, ...], ...]
"""The token ids of each."""


class RequestTokenizer(Protocol):
    """What the engine asks of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        ...

    def stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """The text of what follows a prompt, token by token."""
        ...


class HiddenStatesFiles(Protocol):
    """Where hidden states of requests are saved."""

    def check(self, request_id: str, sampling: SamplingParams) -> None:
        """Refuse a request whose file would not lie where it may (`RequestError`)."""
        ...

    def path(self, request_id: str, index: int, sampling: SamplingParams) -> str:
        """The file of completion `index`."""
        ...

    def finish(self, path: str) -> str | None:
        """Wait until the file at `path` is complete; what prevented that, if anything did."""
        ...

    def wait_for_writers(self) -> None:
        """Wait until few files are still to be written."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One prompt and its `n` generations.

    `held` are the generations that wait until the first has computed the prompt, so that they find
    it in the prefix cache. `prompt_logprobs_to_send` go out with the first delta.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    generations: list[Generation]
    held: list[Generation]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs_to_send: list[TokenLogprobs | None] | None = None
    error: str | None = None
    error_kind: ErrorKind | None = None

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(generation.finished for generation in self.generations)

    def output(self) -> RequestOutput:
        """What the request has given so far."""
        total = SpeculationStats()
        for generation in self.generations:
            total.add(generation.stats)
        outputs = [generation.output() for generation in self.generations]
        path = outputs[0].hidden_states_path
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            metrics=self.metrics,
            num_cached_tokens=self.generations[0].num_cached_tokens,
            speculation=total,
            error=self.error,
            error_kind=self.error_kind,
            kv_transfer_params=None if path is None else {"hidden_states_path": path},
        )


@dataclass(slots=True, kw_only=True)
class RequestProcessor:
    """Checks requests against what the model can serve and makes their generations.

    `eos_token_ids` end a text unless the request ignores them. Requests without a seed draw one from
    `random_source`. `files` are where hidden states go, if they are saved. `process` may be called from
    any thread.
    """

    tokenizer: RequestTokenizer | None
    executor: Executor
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    pool: BlockPool
    block_size: int
    random_source: random.Random
    files: HiddenStatesFiles | None = None
    _seq_ids: Iterator[int] = field(default_factory=itertools.count, init=False)
    _token_texts: dict[int, str] = field(default_factory=dict, init=False)  # of the tokens asked for so far
    _last_bad_words: tuple[tuple[str, ...], BadWords] = field(default=((), ()), init=False)

    def process(self, request: EngineRequest, *, arrival_time: float) -> Request:
        """Check a request, make its generations, and let the executor prepare their sampling.

        Raises:
            RequestError: the prompt is empty, too long or holds ids outside the vocabulary, or a
                sampling value does not fit the model or the engine.
            ConfigError: what a sampling value needs is not installed.
        """
        ids = as_token_ids("prompt", request.prompt_ids, "a text or a list of token ids")
        output_ids = tuple(as_token_ids("output_ids", request.output_ids, "a list of token ids"))
        sampling = request.sampling
        self._check(request, ids, output_ids)
        seed = sampling.seed if sampling.seed is not None else self.random_source.getrandbits(63)
        stop_tokens = self._stop_tokens(sampling)
        stop_token_ids = frozenset(stop_tokens)
        bad_words = self._bad_words(sampling)
        prediction = self._prediction(ids, sampling)
        generations: list[Generation] = []
        try:
            for index in range(sampling.n):
                spec = SequenceSpec(
                    seq_id=next(self._seq_ids),
                    prompt_ids=ids,
                    sampling=sampling,
                    seed=child_seed(seed, index),
                    cache_salt=request.cache_salt,
                    max_length=self._max_length(ids, sampling),
                    output_ids=output_ids,
                    stop_token_ids=stop_token_ids,
                    bad_words_ids=bad_words,
                    prediction_ids=prediction,
                )
                generations.append(self._generation(request, index, spec, stop_tokens))
                self.executor.prepare(spec)
            prompt_logprobs: list[TokenLogprobs | None] | None = None
            if sampling.prompt_logprobs is not None:
                prompt_logprobs = [None] * len(ids)
            return Request(
                request_id=request.request_id,
                prompt=request.prompt,
                prompt_ids=ids,
                generations=generations,
                held=generations[1:],
                metrics=RequestMetrics(arrival_time=arrival_time),
                prompt_logprobs=prompt_logprobs,
                prompt_logprobs_to_send=prompt_logprobs,
            )
        except BaseException:
            self.executor.release([EndedSequence(seq_id=g.spec.seq_id, num_output_tokens=0) for g in generations])
            raise

    def token_text(self, token_id: int) -> str | None:
        """The text of one token, for logprobs; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return self._token_texts[token_id]

    def _check(self, request: EngineRequest, prompt_ids: list[int], output_ids: tuple[int, ...]) -> None:
        self._check_prompt(prompt_ids)
        self._check_written(prompt_ids, output_ids, request.sampling)
        self._check_logprobs(request.sampling)
        self._check_kv_transfer(request.request_id, request.sampling)
        if request.cache_salt is not None and not isinstance(request.cache_salt, str):
            raise RequestError(f"cache_salt: got {request.cache_salt!r}; must be a string or None")

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise RequestError("prompt: got no tokens; needs at least one; give some text")
        self._check_vocabulary("prompt", ids)
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"prompt: got {len(ids)} tokens; must be below max_model_len ({self.max_model_len}), which holds the answer "
                "too; shorten it or raise max_model_len"
            )

    def _check_vocabulary(self, name: str, token_ids: Sequence[int]) -> None:
        if not token_ids or 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            return
        bad = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
        raise RequestError(f"{name}: got token id {bad}; must be from 0 to {self.vocab_size - 1}; check the tokenizer")

    def _check_written(self, prompt_ids: list[int], output_ids: tuple[int, ...], sampling: SamplingParams) -> None:
        """Refuse tokens from another engine that no engine of this model can have written, or that leave nothing to do."""
        if not output_ids:
            return
        self._check_vocabulary("output_ids", output_ids)
        if len(prompt_ids) + len(output_ids) >= self._max_length(prompt_ids, sampling):
            raise RequestError(
                f"output_ids: got {len(output_ids)} tokens; must leave room for one more within max_tokens "
                f"({sampling.max_tokens}) and max_model_len ({self.max_model_len}); the text has ended"
            )
        if sampling.n > 1 or sampling.prompt_logprobs is not None:
            raise RequestError(
                "output_ids: got tokens of a text together with n > 1 or prompt_logprobs; a text that goes on is one, "
                "and its prompt was computed before; leave these out"
            )

    def _check_logprobs(self, sampling: SamplingParams) -> None:
        for name, value in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            if value is not None and value > self.vocab_size:
                raise RequestError(
                    f"{name}: got {value}; must be at most the vocabulary size ({self.vocab_size}); use -1 for all tokens"
                )

    def _check_kv_transfer(self, request_id: str, sampling: SamplingParams) -> None:
        if self.files is not None:
            self.files.check(request_id, sampling)
        elif sampling.kv_transfer is not None:
            raise RequestError(
                "extra_args: got 'kv_transfer_params', but this engine saves no hidden states; leave it out, or "
                "load the model with method 'extract_hidden_states' and a kv_transfer_config"
            )

    def _stop_tokens(self, sampling: SamplingParams) -> dict[int, int | None]:
        """Tokens that end a text -> the stop_reason that each gives."""
        stop_tokens: dict[int, int | None] = {t: t for t in sampling.stop_token_ids or ()}
        if not sampling.ignore_eos:
            stop_tokens.update(dict.fromkeys(self.eos_token_ids))
        return stop_tokens

    def _max_length(self, prompt_ids: list[int], sampling: SamplingParams) -> int:
        room = self.max_model_len - len(prompt_ids)
        return len(prompt_ids) + (room if sampling.max_tokens is None else min(sampling.max_tokens, room))

    def _generation(
        self, request: EngineRequest, index: int, spec: SequenceSpec, stop_tokens: dict[int, int | None]
    ) -> Generation:
        sampling = request.sampling
        return Generation(
            spec=spec,
            request_id=request.request_id,
            index=index,
            group=f"request {request.request_id}" if request.group is None else request.group,
            table=BlockTable(self.pool, block_size=self.block_size, cache_salt=request.cache_salt),
            stop_tokens=stop_tokens,
            text=self._text(spec, sampling),
            output_ids=list(spec.output_ids),
            prediction=None if sampling.prediction is None else PredictionCounts(),
            hidden_states_path=None if self.files is None else self.files.path(request.request_id, index, sampling),
        )

    def _text(self, spec: SequenceSpec, sampling: SamplingParams) -> CompletionText | None:
        if not sampling.detokenize or self.tokenizer is None:
            if sampling.stop_strings:
                raise RequestError("stop: stop strings need a tokenizer, but the model was loaded without one")
            return None
        detokenizer = self.tokenizer.stream(spec.prompt_ids, skip_special_tokens=sampling.skip_special_tokens)
        text = CompletionText(detokenizer, stop=sampling.stop_strings, include_stop=sampling.include_stop_str_in_output)
        for token_id in spec.output_ids:
            text.push(token_id, stops_count=False)  # none of them ended it
        text.take_delta(finished=False)  # what was certain has been handed out elsewhere
        return text

    def _bad_words(self, sampling: SamplingParams) -> BadWords:
        """Token ids of each bad word, as a text's beginning and after a space (vLLM's two forms).

        The last ones are kept, as all prompts of a request have the same.
        """
        if not sampling.bad_words:
            return ()
        words, ids = self._last_bad_words  # read and replaced at once, as several threads do
        if words == tuple(sampling.bad_words):
            return ids
        if self.tokenizer is None:
            raise RequestError(
                "bad_words: words need a tokenizer, but the model was loaded without one; use logit_bias"
            )
        found: list[tuple[int, ...]] = []
        for word in sampling.bad_words:
            bare = self.tokenizer.encode(word.lstrip(), add_special_tokens=False)
            if not bare:
                raise RequestError(f"bad_words: got {word!r:.80}, which has no tokens and cannot be forbidden; drop it")
            spaced = self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            found.append(tuple(bare))
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                found.append(tuple(spaced))
        self._last_bad_words = tuple(sampling.bad_words), tuple(found)
        return tuple(found)

    def _prediction(self, prompt_ids: list[int], sampling: SamplingParams) -> tuple[int, ...]:
        """Token ids of the text that the client expects, as they would follow the prompt.

        Raises:
            RequestError: it is longer than any text, holds ids outside the vocabulary, or is a text where
                there is no tokenizer.
        """
        given = sampling.prediction
        if not given:
            return ()
        if not isinstance(given, str):
            ids = [operator.index(token_id) for token_id in given]
        elif self.tokenizer is None:
            raise RequestError(
                "prediction: a text needs a tokenizer, but the model was loaded without one; give token ids"
            )
        else:
            ids = continuation_ids(self.tokenizer, prompt_ids, given)
        if len(ids) > self.max_model_len:
            raise RequestError(
                f"prediction: got {len(ids)} tokens; may be at most max_model_len ({self.max_model_len}), as no text is "
                "longer; cut it to the part that is expected"
            )
        self._check_vocabulary("prediction", ids)
        return tuple(ids)


def continuation_ids(tokenizer: RequestTokenizer, prompt_ids: Sequence[int], text: str) -> list[int]:
    """Token ids of a text as they would follow a prompt.

    A tokenizer may begin a text of its own otherwise than a continuation (SentencePiece puts a space
    before it), so the text is encoded after the prompt's end. Where it would grow together with the
    prompt's last token, which is fixed, as in the middle of a word, it is encoded alone.
    """
    before = tokenizer.decode(prompt_ids[-NUM_CONTEXT_TOKENS:], skip_special_tokens=False)
    context_ids = tokenizer.encode(before, add_special_tokens=False)
    joined_ids = tokenizer.encode(before + text, add_special_tokens=False)
    if joined_ids[: len(context_ids)] == context_ids:
        return joined_ids[len(context_ids) :]
    return tokenizer.encode(text, add_special_tokens=False)


def as_token_ids(name: str, given: Sequence[int], may_be: str) -> list[int]:
    """What was `given` as plain integers (NumPy's and tensors' elements too).

    Raises:
        RequestError: it is not a sequence of integers; the message has its `name` and what it `may_be`.
    """
    if isinstance(given, (bytes, bytearray, Set)):
        raise RequestError(f"{name}: got {given!r:.80}; must be {may_be}")
    try:
        ids = list(given)
        if any(isinstance(token_id, bool) for token_id in ids):
            raise TypeError("True and False are no token ids")
        return [operator.index(token_id) for token_id in ids]
    except TypeError as error:
        raise RequestError(f"{name}: got {given!r:.80}; must be {may_be} ({error})") from error
