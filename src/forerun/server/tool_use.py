"""One request's use of its tools: which it may call, what its answer must match, and how calls are written in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from forerun.models.chat.events import AnswerReader
from forerun.models.chat.tool_format import Function, ToolFormat, json_format, one_of
from forerun.server.errors import ApiError
from forerun.server.protocol import AllowedChoice, NamedChoice, ToolBody, ToolChoice

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
FORM_UNKNOWN = (
    "this model's chat template writes calls in a form that is not known here; "
    "leave tools out, or start the server with --tool-call-parser"
)


class ToolFields(Protocol):
    """A body with tools."""

    tools: list[ToolBody] | None
    tool_choice: ToolChoice | None


def offered(body: ToolFields) -> list[ToolBody]:
    """The tools that the model sees.

    Raises:
        ApiError: 400, tools and choice do not fit.
    """
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two have the same name; rename one", param="tools")
    if choice not in (None, "none") and not tools:
        raise ApiError(400, "tool_choice: is given without tools; give tools, or leave it out", param="tool_choice")
    for name in _chosen(choice):
        if name not in names:
            raise ApiError(400, f"tool_choice: {name!r:.80} is none of the tools; name one", param="tool_choice")
    return [] if choice == "none" else tools


def _chosen(choice: ToolChoice | None) -> list[str]:
    """The functions that the choice names; where it names none, all may be called."""
    match choice:
        case NamedChoice():
            return [choice.function.name]
        case AllowedChoice():
            return [tool.function.name for tool in choice.allowed_tools.tools]
        case _:
            return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Tools that one answer may call.

    `is_forced`: it must consist of calls. `is_named`: of the one function that the request names. `is_narrowed`: the model
    sees others, too. `only_one`: it may have one call at most. `has_format`: what is no call has a form of its own.
    """

    form: ToolFormat
    functions: tuple[Function, ...]
    is_forced: bool
    is_named: bool
    is_narrowed: bool
    only_one: bool
    has_format: bool

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar makes what begins as a call a call; otherwise calls are read from the text when they are whole."""
        if self.has_format and not self.is_forced:
            return not self.form.opens_text  # calls without a mark may be the beginning of other JSON
        is_bound = self.is_forced or self.is_narrowed or self.only_one
        return is_bound or any(function.is_strict for function in self.functions)

    def structure(self, wanted: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """What the text must match (see `SamplingParams.structured_outputs`), given what else is wanted of it.

        Raises:
            ApiError: 400, the two do not go together.
        """
        if self.is_forced:
            form = self.form.forced(self.functions, only_one=self.only_one)
        elif wanted is not None:
            calls = self.form.forced(self.functions, only_one=self.only_one)
            form = one_of(calls, self.form.answer(_answer(wanted)))
        elif self.is_constrained:
            form = self.form.after_text(self.functions, only_one=self.only_one)
        else:
            return None
        return {"structural_tag": {"type": "structural_tag", "format": form}}

    def reader(self) -> AnswerReader:
        """Reads one completion."""
        names = frozenset(function.name for function in self.functions)
        return self.form.reader(names, is_forced=self.is_constrained)


def tool_use(body: ToolFields, form: ToolFormat | None, *, parallel: bool, has_format: bool) -> ToolUse | None:
    """How a request uses its tools; None where it has none to call.

    Args:
        body: the request.
        form: how the model writes calls, if that is known.
        parallel: whether it may call several at once.
        has_format: whether it says what an answer without calls must match.

    Raises:
        ApiError: 400, tools and choice do not fit, or calls of this model cannot be read.
    """
    tools, choice = offered(body), body.tool_choice
    if not tools:
        return None
    if form is None:
        raise ApiError(400, f"tools: {FORM_UNKNOWN}", param="tools")
    is_named = isinstance(choice, NamedChoice)
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
    chosen = _chosen(choice) or [tool.function.name for tool in tools]
    functions = tuple(_function(tool) for tool in tools if tool.function.name in chosen)
    return ToolUse(
        form=form,
        functions=functions,
        is_forced=is_named or mode == "required",
        is_named=is_named,
        is_narrowed=len(functions) < len(tools),
        only_one=is_named or not parallel,
        has_format=has_format,
    )


def _function(tool: ToolBody) -> Function:
    given = tool.function
    schema = NO_ARGUMENTS if given.parameters is None else {"type": "object"} | given.parameters
    return Function(given.name, schema, is_strict=bool(given.strict))


def _answer(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """An answer other than calls, where its form is given too."""
    given = {name: value for name, value in wanted.items() if value is not None}
    if given == {"json_object": True}:
        return json_format({"type": "object"})
    if set(given) == {"json"} and isinstance(given["json"], Mapping):
        return json_format(given["json"])
    raise ApiError(
        400,
        "tools: go with response_format json_schema or json_object only; leave one of them out, or set tool_choice",
        param="tools",
    )
