"""Requests: checked on the way in, made into generations, and reported on the way out."""

from __future__ import annotations

import itertools
import operator
import random
import time
from collections.abc import Iterator, Set
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

from forerun.core.outputs import RequestMetrics, RequestOutput, TokenLogprobs
from forerun.core.sampling_params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.core.stats import SpeculationStats
from forerun.engine.generation import Generation
from forerun.engine.hidden_states import HiddenStatesExporter
from forerun.engine.text import CompletionText
from forerun.errors import RequestError
from forerun.grammar.cache import GrammarCache
from forerun.kv.block_pool import BlockPool
from forerun.kv.slots import Slot
from forerun.models.tokenizer import TextStream, Tokenizer
from forerun.ops.noise import child_seed
from forerun.ops.sampling import SamplingRules


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One prompt and its `n` generations.

    `held` are the generations that wait until the first has computed the prompt, so that they find
    it in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    generations: list[Generation]
    held: list[Generation]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(generation.finished for generation in self.generations)

    def output(self) -> RequestOutput:
        """What the request has given so far."""
        total = SpeculationStats()
        for generation in self.generations:
            total.add(generation.stats)
        path = self.generations[0].hidden_states_path
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=[generation.output() for generation in self.generations],
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            metrics=self.metrics,
            num_cached_tokens=self.generations[0].num_cached_tokens,
            speculation=total,
            error=self.error,
            kv_transfer_params=None if path is None else {"hidden_states_path": path},
        )


@dataclass(slots=True, kw_only=True)
class Intake:
    """Checks requests against what the model can serve and makes their generations.

    `grammars` compile what texts must match. `eos_token_ids` end a text unless the request ignores
    them. Requests without a seed draw one from `random_source`. `exporter` saves their hidden states, if there is one. `accept` may be called
    from any thread.
    """

    tokenizer: Tokenizer | None
    grammars: GrammarCache
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    pool: BlockPool
    block_size: int
    random_source: random.Random
    exporter: HiddenStatesExporter | None = None
    _seq_ids: Iterator[int] = field(default_factory=itertools.count, init=False)

    def accept(
        self,
        request_id: str,
        prompt_ids: Listing[int],
        sampling: SamplingParams,
        *,
        prompt: str | None = None,
        cache_salt: str | None = None,
    ) -> Request:
        """Make a request.

        Raises:
            RequestError: the prompt is empty, too long or holds ids outside the vocabulary, or a
                sampling value does not fit the model or the engine.
            ConfigError: what a sampling value needs is not installed.
        """
        ids = _as_token_ids(prompt_ids)
        self._check_prompt(ids)
        self._check_logprobs(sampling)
        self._check_kv_transfer(request_id, sampling)
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt: got {cache_salt!r}; must be a string or None")
        seed = sampling.seed if sampling.seed is not None else self.random_source.getrandbits(63)
        generations = [
            self._generation(request_id, index, ids, sampling, child_seed(seed, index), cache_salt)
            for index in range(sampling.n)
        ]
        return Request(
            request_id=request_id,
            prompt=prompt,
            prompt_ids=ids,
            generations=generations,
            held=generations[1:],
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            prompt_logprobs=None if sampling.prompt_logprobs is None else [None] * len(ids),
        )

    def token_text(self, token_id: int) -> str | None:
        """The text of one token, for logprobs; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode([token_id], skip_special_tokens=False)

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise RequestError("prompt: got no tokens; needs at least one; give some text")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(t for t in ids if not 0 <= t < self.vocab_size)
            raise RequestError(
                f"prompt: got token id {bad}; must be from 0 to {self.vocab_size - 1}; check the tokenizer"
            )
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"prompt: got {len(ids)} tokens; must be below max_model_len ({self.max_model_len}), which holds the answer "
                "too; shorten it or raise max_model_len"
            )

    def _check_logprobs(self, sampling: SamplingParams) -> None:
        for name, value in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            if value is not None and value > self.vocab_size:
                raise RequestError(
                    f"{name}: got {value}; must be at most the vocabulary size ({self.vocab_size}); use -1 for all tokens"
                )

    def _check_kv_transfer(self, request_id: str, sampling: SamplingParams) -> None:
        if self.exporter is not None:
            self.exporter.check(request_id, sampling)
        elif sampling.kv_transfer is not None:
            raise RequestError(
                "extra_args: got 'kv_transfer_params', but this engine saves no hidden states; leave it out, or "
                "load the model with method 'extract_hidden_states' and a kv_transfer_config"
            )

    def _generation(
        self, request_id: str, index: int, prompt_ids: list[int], sampling: SamplingParams, seed: int, salt: str | None
    ) -> Generation:
        stop_tokens: dict[int, int | None] = {t: t for t in sampling.stop_token_ids or ()}
        if not sampling.ignore_eos:
            stop_tokens.update(dict.fromkeys(self.eos_token_ids))
        room = self.max_model_len - len(prompt_ids)
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        return Generation(
            sequence=Sequence(
                seq_id=next(self._seq_ids),
                prompt_ids=prompt_ids,
                output_ids=[],
                sampling=sampling,
                seed=seed,
                cache_salt=salt,
            ),
            request_id=request_id,
            index=index,
            slot=Slot(self.pool, block_size=self.block_size, cache_salt=salt),
            rules=SamplingRules(
                sampling,
                prompt_ids=prompt_ids,
                vocab_size=self.vocab_size,
                stop_token_ids=frozenset(stop_tokens),
                bad_words_ids=self._bad_words(sampling),
                grammar=None if sampling.constraint is None else self.grammars.begin(sampling.constraint),
            ),
            stop_tokens=stop_tokens,
            max_length=len(prompt_ids) + max_tokens,
            text=self._text(prompt_ids, sampling),
        )

    def _text(self, prompt_ids: list[int], sampling: SamplingParams) -> CompletionText | None:
        if not sampling.detokenize or self.tokenizer is None:
            if sampling.stop_strings:
                raise RequestError("stop: stop strings need a tokenizer, but the model was loaded without one")
            return None
        tokens = TextStream(self.tokenizer, prompt_ids, skip_special_tokens=sampling.skip_special_tokens)
        return CompletionText(tokens, stop=sampling.stop_strings, include_stop=sampling.include_stop_str_in_output)

    def _bad_words(self, sampling: SamplingParams) -> list[list[int]]:
        """Token ids of each bad word, as a text's beginning and after a space (vLLM's two forms)."""
        if not sampling.bad_words:
            return []
        if self.tokenizer is None:
            raise RequestError(
                "bad_words: words need a tokenizer, but the model was loaded without one; use logit_bias"
            )
        found: list[list[int]] = []
        for word in sampling.bad_words:
            bare = self.tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            found.append(bare)
            if bare and spaced[0] != bare[0] and len(spaced) == len(bare):
                found.append(spaced)
        return found


def _as_token_ids(prompt_ids: Listing[int]) -> list[int]:
    """The prompt as plain integers (NumPy's and tensors' elements too).

    Raises:
        RequestError: it is not a sequence of integers.
    """
    if isinstance(prompt_ids, (bytes, bytearray, Set)):
        raise RequestError(f"prompt: got {prompt_ids!r:.80}; must be a text or a list of token ids")
    try:
        ids = list(prompt_ids)
        if any(isinstance(token_id, bool) for token_id in ids):
            raise TypeError("True and False are no token ids")
        return [operator.index(token_id) for token_id in ids]
    except TypeError as error:
        raise RequestError(
            f"prompt: got {prompt_ids!r:.80}; must be a text or a list of token ids ({error})"
        ) from error
