"""Users' own logits processors: called with copies, and never trusted."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import Tensor

from forerun.core.sampling_params import LogitsProcessor
from forerun.errors import RequestError


class CustomProcessor:
    """One logits processor of a request, `f(output_ids, logits)` or `f(prompt_ids, output_ids, logits)`.

    Raises:
        RequestError: it takes neither two nor three arguments.
    """

    def __init__(self, function: LogitsProcessor, *, prompt_ids: Sequence[int]) -> None:
        self._function = function
        self._name = _name_of(function)
        num_arguments = _num_required_arguments(function)
        if num_arguments not in (2, 3):
            raise RequestError(
                f"logits_processors: {self._name} takes {num_arguments} arguments; "
                "must take (output_ids, logits) or (prompt_ids, output_ids, logits)"
            )
        self._prompt_ids = tuple(prompt_ids) if num_arguments == 3 else None

    def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
        """Return the processor's logits, [vocab_size] fp32.

        Raises:
            RequestError: the processor raised, or returned anything but a row without NaN and +inf.
        """
        before = () if self._prompt_ids is None else (list(self._prompt_ids),)
        try:
            returned = self._function(*before, list(output_ids), logits.clone())
        except Exception as error:
            raise RequestError(f"logits_processors: {self._name} raised {type(error).__name__}: {error}") from error
        return self._checked(returned, logits)

    def _checked(self, returned: object, logits: Tensor) -> Tensor:
        if not isinstance(returned, Tensor) or returned.shape != logits.shape or returned.is_complex():
            got = (
                f"a tensor of shape {list(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__
            )
            raise RequestError(
                f"logits_processors: {self._name} returned {got}; must return real logits of shape {list(logits.shape)}"
            )
        row = returned.detach().to(logits)
        # max is NaN where any logit is.
        if not row.max().item() < float("inf"):
            raise RequestError(f"logits_processors: {self._name} returned NaN or +inf; use -inf to forbid tokens")
        return row


def _name_of(function: LogitsProcessor) -> str:
    return function.__qualname__ if inspect.isroutine(function) else type(function).__name__


def _num_required_arguments(function: LogitsProcessor) -> int | str:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "unknown"
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def as_processors(functions: Sequence[LogitsProcessor] | None, *, prompt_ids: Sequence[int]) -> list[CustomProcessor]:
    """Wrap a request's logits processors, in order."""
    return [CustomProcessor(function, prompt_ids=prompt_ids) for function in functions or ()]
