"""vLLM's offline API: `LLM.generate`, `chat`, `stream`."""

from __future__ import annotations

import itertools
import logging
import numbers
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from threading import RLock, current_thread, main_thread
from types import FrameType
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from forerun.build import BuiltEngine, assemble, build_engine, profile_of, row_bits_of_model, target_info
from forerun.config.cost_profile import CostProfile
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import SpeculativeConfig, resolve_speculative
from forerun.core.outputs import RequestOutput, StreamDelta
from forerun.core.sampling_params import SamplingParams
from forerun.drafters.base import BuildsWithHead, Choice, ChoosesDrafters
from forerun.engine.client import EngineClient, EngineRequest
from forerun.engine.engine import Engine
from forerun.engine.stats import EngineStats, Metric
from forerun.errors import ConfigError, ModelError, RequestError, UnknownKeyError, did_you_mean, refuse_unknown_keys
from forerun.executor.local import LocalExecutor
from forerun.models.base import LoadedTarget
from forerun.models.generation_config import SamplingDefaults
from forerun.models.store import resolve_model
from forerun.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's {"prompt": text} / {"prompt_token_ids": ids}, with an optional "cache_salt"."""

Message = Mapping[str, Any]

CHAT_ARGUMENTS = (
    *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools"),
    "chat_template_content_format",
)
VLLMS_ARGUMENTS = (
    *("lora_request", "priority", "tokenization_kwargs", "mm_processor_kwargs", "prompt_adapter_request"),
    "guided_options_request",
)
"""What vLLM's `generate` and `chat` take besides; None asks for nothing."""

SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams) if field.init)


class LLM:
    """A model, loaded, with the engine around it.

    Threads may share one: their calls take turns, and streams go on between them.

    Args:
        model: a folder, a .gguf file, a known name (`forerun models list`) or a hub id.
        settings: the fields of `EngineSettings`; among them `speculative_config`, vLLM's dict.

    Raises:
        ForerunError: the model cannot be loaded or a setting is wrong; the message says what to do.
    """

    def __init__(self, model: str | PathLike[str], **settings: Any) -> None:
        if not isinstance(model, (str, PathLike)):
            raise ModelError(
                f"model: got {model!r:.80}; must be a folder, a .gguf file, a known name or a hub id org/name"
            )
        self.settings = EngineSettings.from_keywords(str(model), settings)
        self._adopt(build_engine(self.settings, once_loaded=self._once_loaded))

    def _once_loaded(self, target: LoadedTarget) -> None:
        """Called before the engine is put around the target: nothing is to be done here."""

    def _adopt(self, built: BuiltEngine) -> None:
        self._engine = built.engine
        self._client: EngineClient = built.engine
        self._executor = built.executor
        self._target = built.target
        self._ids = itertools.count()
        self._finished: dict[str, RequestOutput] = {}  # ended, not read yet
        self._deltas: dict[str, deque[StreamDelta]] = {}  # of streamed requests, not read yet
        self._dropped: deque[str] = deque()  # to be forgotten between two steps
        self._is_stepping = False
        self._turn = RLock()  # of the thread that uses the engine
        self.speculative = built.speculative
        self.dtype = built.target.model.dtype
        self.device = built.target.model.device
        self.max_model_len = built.kv.max_model_len
        self.is_batch_invariant = built.target.model.is_batch_invariant
        self.kernels = built.target.kernels
        self.row_bits = row_bits_of_model(built.target.model)
        self.has_device_layers = built.target.on_device is not None

    @classmethod
    def from_target(cls, target: LoadedTarget, settings: EngineSettings, speculative: SpeculativeConfig) -> LLM:
        """An LLM around a target that is loaded already."""
        llm = cls.__new__(cls)
        llm.settings = settings
        llm._adopt(assemble(settings, target, speculative))
        return llm

    def with_speculation(
        self, speculative_config: Mapping[str, Any] | str | None, *, kv_transfer_config: Mapping[str, Any] | None = None
    ) -> LLM:
        """Another LLM over the same weights, with its own KV cache and another way to speculate."""
        settings = replace(self.settings, speculative_config=speculative_config, kv_transfer_config=kv_transfer_config)
        return LLM.from_target(self._target, settings, resolve_speculative(speculative_config, kv_transfer_config))

    @property
    def engine(self) -> Engine:
        """The engine underneath, for benchmarks."""
        return self._engine

    @property
    def client(self) -> EngineClient:
        """How requests reach the engine: what a server puts into a thread of its own."""
        return self._client

    @property
    def executor(self) -> LocalExecutor:
        """What computes the engine's steps, for benchmarks."""
        return self._executor

    @property
    def stats(self) -> EngineStats:
        """Counts and times since the start or the last `reset_stats`."""
        return self._engine.stats

    def replace_head(self, folder: str | PathLike[str]) -> None:
        """Draft with another trained head from the next step on, for running requests too; no text changes.

        To be called between two steps, which wait some tenths of a second for the head to be loaded.

        Args:
            folder: of `forerun train`, or any that `speculative_config` could name.

        Raises:
            ConfigError: the drafter in use has no head that can be replaced, the target is in several processes, or the
                head reads hidden states of the target that are not kept for the one before; that one drafts on then.
            ModelError: the head cannot be loaded or was not made for this target; likewise.
        """
        config = self.check_replaces_head()
        info = target_info(self.settings, self._target, self.speculative)
        drafter = config.build_with_head(resolve_model(str(folder)), info, before=self._executor.drafting.drafter)
        self._executor.replace_drafter(drafter)

    def check_replaces_head(self) -> BuildsWithHead:
        """Return the drafter's settings, if another head could take the place of the one in use.

        Raises:
            ConfigError: none could.
        """
        config = self.speculative.drafter
        if not isinstance(config, BuildsWithHead):
            raise ConfigError(
                f"head: method {self.speculative.method!r} has none that could be replaced; "
                "set speculative_config to 'auto', or to an eagle, eagle3 or peagle head"
            )
        if self._target.ranks is not None:
            raise ConfigError("head: of a target in several processes it cannot be replaced; start them anew with it")
        config.check_has_head(self._executor.drafting.drafter)
        return config

    def drafter_choices(self) -> list[Choice]:
        """What the method "auto" uses for this model, what not, and why.

        Raises:
            ConfigError: the model speculates in another way.
        """
        drafter, method = self.speculative.drafter, self.speculative.method
        if not isinstance(drafter, ChoosesDrafters):
            why = (
                "num_speculative_tokens 0, by which nothing is drafted; leave it out"
                if method == "auto"
                else f"method {method!r}; it is 'auto' that chooses"
            )
            raise ConfigError(f"drafter_choices: speculative_config has {why}")
        return drafter.choices(target_info(self.settings, self._target, self.speculative))

    @property
    def cost_profile(self) -> CostProfile:
        """Where the costs of this model's steps on this machine are kept from one engine to the next."""
        return profile_of(self._target)

    @property
    def path(self) -> Path | None:
        """The folder or file that the model comes from; None if it was made in memory."""
        return self._target.path

    @property
    def vocab_size(self) -> int:
        """Width of the logits; token ids are below it."""
        return self._target.model.vocab_size

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts may be texts."""
        return self._target.tokenizer is not None

    def reset_stats(self) -> None:
        """Count from zero again."""
        self._engine.reset_stats()

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and vectors, under vLLM's names where vLLM has the metric."""
        return self._client.snapshot().metrics()

    def reset_prefix_cache(self) -> bool:
        """Forget the KV that is kept here of earlier texts; False, and nothing done, while a request runs."""
        return self._engine.parts.pool.reset_prefix_cache()

    @cached_property
    def sampling_defaults(self) -> SamplingDefaults:
        """What requests are sampled by where they say nothing, by the settings and the model's generation_config.json."""
        defaults = self.settings.sampling_defaults(self.path)
        if defaults.values:
            logger.info("where requests leave it out: %s", defaults.describe())
        return defaults

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without sampling parameters are sampled by.

        Raises:
            ConfigError: the model's generation_config.json has an impossible value.
        """
        return SamplingParams(**self.sampling_defaults.values)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._target.tokenizer is None:
            raise RequestError("tokenizer: the model was loaded without one; give token ids instead of text")
        return self._target.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        **vllms: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt.

        Args:
            prompts: one prompt or a list of them.
            sampling_params: for all prompts, or one per prompt; None for `get_default_sampling_params()`.
            use_tqdm: show a progress bar, or what makes one as tqdm does.
            vllms: further arguments of vLLM's (lora_request, priority, ...), which must be None.

        Returns:
            One output per prompt, in order. A request that failed while running has `error` set. Files of
            hidden states are complete.

        Raises:
            RequestError: a prompt or sampling value does not fit; nothing has been run then.
            UnknownKeyError: there is no such argument.
        """
        _refuse_unknown(vllms, ("sampling_params", "use_tqdm"), where="generate")
        with self._turn:
            return self._generate(_as_prompts(prompts), sampling_params, use_tqdm=use_tqdm)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        request_ids = self._add(prompts, sampling_params)
        running = set(request_ids)
        try:
            make_bar = use_tqdm if callable(use_tqdm) else tqdm
            bar = make_bar(total=len(request_ids), desc="Processed prompts", disable=not use_tqdm)
            with bar, self._client.stepping(), _Interrupts() as interrupts:
                while running:
                    self._pump()
                    interrupts.let_through()
                    ended = running & self._finished.keys()
                    running -= ended
                    bar.update(len(ended))
            return [self._finished[request_id] for request_id in request_ids]
        finally:
            self._dropped += request_ids
            self._forget_dropped()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, each laid out by the model's chat template.

        `template` says how: add_generation_prompt, continue_final_message, chat_template, tools, and variables that the
        template reads, by their names or in vLLM's `chat_template_kwargs`. Tools that it does not read are described in the
        system message, as the server does.

        Raises:
            RequestError: as `generate`, or the conversation cannot be laid out.
            UnknownKeyError: there is no such argument, and the template has no such variable.
        """
        return self.generate(self._chat_prompts(messages, template), sampling_params, use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[StreamDelta, None, None]:
        """Complete prompts, giving text as it becomes certain.

        Each delta names its prompt by `request_id`: "0" for the first of this call's prompts, and
        so on. Closing or dropping the iterator aborts what is unfinished. Prompts are checked at the
        call, before the first delta is asked for.
        """
        with self._turn:
            request_ids = self._add(_as_prompts(prompts), sampling_params)
            self._deltas.update((request_id, deque()) for request_id in request_ids)
            deltas = self._read_stream(request_ids)
            next(deltas)  # begun, so that closing or dropping it aborts its requests even if nobody ever reads it
            return deltas

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> Generator[StreamDelta, None, None]:
        """Answer conversations, giving text as it becomes certain; see `stream` and `chat`."""
        return self.stream(self._chat_prompts(messages, template), sampling_params)

    def _chat_prompts(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], template: Mapping[str, Any]
    ) -> list[Prompt]:
        """Text and token ids of each conversation; one conversation alone counts as a list of one."""
        from forerun.models.chat.conversation import lay_out  # here: who continues texts need not wait for it

        tokenizer = self.get_tokenizer()
        arguments = _layout_arguments(template, tokenizer)
        texts = [lay_out(tokenizer, conversation, **arguments) for conversation in _as_conversations(messages)]
        return [{"prompt": text, "prompt_token_ids": tokenizer.encode_chat(text)} for text in texts]

    def _add(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[str]:
        """Queue all prompts, or none if one of them does not fit."""
        if self._is_stepping:  # in this thread: others wait for their turn
            raise RequestError(
                "LLM: called within one of its own steps, by a drafter or a logits processor, say; load another one for that"
            )
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_per_prompt(given, len(prompts))
        request_ids: list[str] = []
        try:
            with _Interrupts() as interrupts:
                for prompt, sampling in zip(prompts, params, strict=True):
                    interrupts.let_through()
                    request_id = str(next(self._ids))
                    text, ids, salt = self._tokens(prompt)
                    request_ids.append(request_id)
                    self._client.accept(
                        EngineRequest(
                            request_id=request_id, prompt_ids=ids, sampling=sampling, prompt=text, cache_salt=salt
                        )
                    )
                    self._client.submit(request_id)
        except BaseException:
            self._dropped += request_ids
            self._forget_dropped()
            raise
        return request_ids

    def _tokens(self, prompt: Prompt) -> tuple[str | None, Sequence[int], str | None]:
        """A prompt's text (if given), token ids and cache salt."""
        if isinstance(prompt, str):
            return prompt, self.get_tokenizer().encode(prompt), None
        if isinstance(prompt, Mapping):
            refuse_unknown_keys(prompt, ("prompt", "prompt_token_ids", "cache_salt"), where="prompt")
            salt, text = prompt.get("cache_salt"), prompt.get("prompt")
            if text is not None and not isinstance(text, str):
                raise RequestError(f"prompt: got {text!r:.80} under 'prompt'; must be a text")
            if "prompt_token_ids" in prompt:
                return text, prompt["prompt_token_ids"], salt
            if text is not None:
                return text, self.get_tokenizer().encode(text), salt
            raise RequestError("prompt: the dict has neither 'prompt' nor 'prompt_token_ids'; give one of them")
        return None, prompt, None

    def _pump(self) -> None:
        """Run one step and put what it gave where its reader looks; to be called where interrupts wait."""
        self._client.wait_for_files()
        self._is_stepping = True
        try:
            output = self._client.step()
            for delta in output.deltas:
                if delta.request_id in self._deltas:
                    self._deltas[delta.request_id].append(delta)
            for finished in output.finished:
                self._finished[finished.request_id] = finished
        finally:
            self._is_stepping = False
            self._forget_dropped()

    def _read_stream(self, request_ids: list[str]) -> Generator[StreamDelta, None, None]:
        """Deltas of these requests, as steps give them, after one that says nothing; streams may be read in turn."""
        places = {request_id: str(place) for place, request_id in enumerate(request_ids)}
        try:
            yield StreamDelta(request_id="", index=0, text="", token_ids=[], origins=[])
            while places:
                with self._turn:
                    if not any(self._deltas[request_id] or request_id in self._finished for request_id in places):
                        with _Interrupts():
                            self._pump()
                for request_id, place in list(places.items()):
                    yield from (replace(delta, request_id=place) for delta in _drain(self._deltas[request_id]))
                    with self._turn:
                        if request_id in self._finished and not self._deltas[request_id]:
                            self._forget(request_id)
                            del places[request_id]
        finally:
            self._dropped += places
            # the garbage collector may drop a stream in the midst of another call, whose next step then does it
            if self._turn.acquire(blocking=False):
                try:
                    if not self._is_stepping:
                        self._forget_dropped()
                finally:
                    self._turn.release()

    def _forget_dropped(self) -> None:
        if self._dropped:
            with _Interrupts():
                while self._dropped:
                    self._forget(self._dropped.popleft())

    def _forget(self, request_id: str) -> None:
        """Drop all traces of a request, aborting it if it still runs; its files are complete then."""
        self._client.abort(request_id)
        self._deltas.pop(request_id, None)
        finished = self._finished.pop(request_id, None)
        if finished is not None:
            self._client.finish_files(finished)


class _Interrupts:
    """Within it Ctrl-C waits for `let_through`, or for the end, so that no other request loses anything; a second one does not wait.

    Only the main thread is ever interrupted so. To begin and to end take some ten microseconds.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._came: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> _Interrupts:
        handler = signal.getsignal(signal.SIGINT) if current_thread() is main_thread() else None
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._hold_back)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self.let_through()

    def _hold_back(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))
        if len(self._came) > 1:
            self.let_through()

    def let_through(self) -> None:
        """Be interrupted here, if anything came."""
        if self._came:
            came = self._came[0]
            self._came.clear()
            assert self._handler is not None, "it is held back"
            self._handler(*came)


def _drain(queue: deque[StreamDelta]) -> Iterator[StreamDelta]:
    while queue:
        yield queue.popleft()


def _as_prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a text, a dict or a list of token ids alone is one prompt.

    Raises:
        RequestError: it is none of these, or has no order.
    """
    if isinstance(given, (str, Mapping)):
        return [given]
    listed: Any = given.tolist() if isinstance(given, Tensor) else given
    if isinstance(listed, (bytes, bytearray, Set)) or not isinstance(listed, Iterable):
        raise RequestError(
            f"prompts: got {given!r:.80}; must be a text, a list of token ids, a dict, or a list of these"
        )
    items: list[Any] = list(listed)
    return [items] if items and isinstance(items[0], numbers.Integral) else items


def _one_per_prompt(given: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Sampling parameters for each of `count` prompts; one for all is repeated.

    Raises:
        RequestError: it is something else, or a list of another length.
    """
    if isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(params, SamplingParams) for params in given):
        raise RequestError(f"sampling_params: got {given!r:.80}; must be SamplingParams or a list of them")
    if len(given) != count:
        raise RequestError(f"sampling_params: got {len(given)} for {count} prompts; give one for all or one per prompt")
    return list(given)


def _as_conversations(given: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """A list of conversations; one conversation, a list of messages, counts as a list of one.

    Raises:
        RequestError: it is neither, or a conversation has no message.
    """
    is_list = isinstance(given, (list, tuple)) and len(given) > 0
    conversations: Any = [given] if is_list and isinstance(given[0], Mapping) else given
    if not is_list or not all(_is_conversation(conversation) for conversation in conversations):
        raise RequestError(
            f"messages: got {given!r:.80}; must be a list of messages such as {{'role': 'user', 'content': '...'}}"
        )
    return list(conversations)


def _is_conversation(given: Any) -> bool:
    is_list = isinstance(given, (list, tuple)) and len(given) > 0
    return is_list and all(isinstance(message, Mapping) for message in given)


def _layout_arguments(given: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Arguments of `lay_out`, of what `chat` is given.

    Raises:
        RequestError: a value is of a wrong type.
        UnknownKeyError: a name is neither an argument's nor that of a variable of the template.
    """

    def need(name: str, kinds: Any, may_be: str) -> None:
        if not isinstance(given.get(name), kinds):
            raise RequestError(f"{name}: got {given[name]!r:.80}; must be {may_be}")

    need("add_generation_prompt", bool | None, "True or False")
    need("continue_final_message", bool | None, "True or False")
    need("chat_template", str | None, "a template's text, or None for the model's")
    need("chat_template_kwargs", Mapping | None, "a dict of the template's variables")
    need("tools", list | tuple | None, "a list of tools, or None")
    if given.get("chat_template_content_format") not in (None, "auto", "string"):
        raise RequestError(
            f"chat_template_content_format: got {given['chat_template_content_format']!r:.80}; may be 'auto' or 'string', as "
            "contents go to the template as texts; leave it out"
        )
    known = tokenizer.find_template_variables(given.get("chat_template"))
    in_a_dict = given.get("chat_template_kwargs") or {}
    _refuse_unknown(given, {*CHAT_ARGUMENTS, *known}, where="chat")
    for name in in_a_dict:
        if name not in known:
            raise UnknownKeyError(
                f"chat_template_kwargs: the template has no variable {name!r:.80}; it has: {', '.join(sorted(known)) or 'none'}"
            )
    own = ("add_generation_prompt", "continue_final_message", "chat_template", "tools")
    arguments = {name: given[name] for name in own if given.get(name) is not None}
    return arguments | {"variables": {name: given[name] for name in given if name in known} | dict(in_a_dict)}


def _refuse_unknown(given: Mapping[str, Any], known: Iterable[str], *, where: str) -> None:
    """Raise for the first name that is not known; vLLM's, which forerun has not, may be None."""
    for name, value in given.items():
        if name in known or (name in VLLMS_ARGUMENTS and value is None):
            continue
        if name in VLLMS_ARGUMENTS:
            raise RequestError(f"{name}: got {value!r:.80}; forerun has nothing of this; leave it out")
        if name in SAMPLING_FIELDS:
            raise UnknownKeyError(
                f"{where}: got {name!r}, which is a sampling parameter; put it into SamplingParams({name}=...)"
            )
        raise UnknownKeyError(f"{where}: unknown key {name!r}{did_you_mean(name, known)}")
