"""Tools, the choice among them, and calls of earlier turns, as requests write them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from forerun.server.limits import MOST_CALLS, MOST_TOOL_DEPTH, MOST_TOOLS

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


def _arguments(given: Any) -> Any:
    """JSON text as the object that it is."""
    if given is None or given == "":
        return {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON ({error}); must be the text of a JSON object") from None
    if not isinstance(given, dict):
        raise ValueError("must be the text of a JSON object")
    return _not_too_deep(given)


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise ValueError("its type must be 'object'")
    return _not_too_deep(schema)


def _not_too_deep(value: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [value]
    for _ in range(MOST_TOOL_DEPTH):
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        level = [inner for inner in level if isinstance(inner, (dict, list))]
        if not level:
            return value
    raise ValueError(f"nested too deeply; must be at most {MOST_TOOL_DEPTH} levels")


class FunctionBody(BaseModel):
    """A function that the model may call; fields that are not here go to the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_parameters)] | None = None
    strict: bool | None = None


class ToolBody(BaseModel):
    """A tool."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"] = "function"
    function: FunctionBody

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it, parameters always there."""
        given = self.function
        described = {} if given.description is None else {"description": given.description}
        schema = {"type": "object", "properties": {}} if given.parameters is None else given.parameters
        more = given.model_extra or {}
        return {"type": self.type, "function": {"name": given.name, **described, "parameters": schema, **more}}


class NamedFunction(BaseModel):
    """A function by its name."""

    model_config = ConfigDict(strict=True)

    name: str


class NamedChoice(BaseModel):
    """The one tool that is to be called."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"] = "function"
    function: NamedFunction


class CalledFunction(BaseModel):
    """A function and what it was called with; the arguments come as JSON text."""

    model_config = ConfigDict(strict=True)

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)]


class CallBody(BaseModel):
    """A call of an earlier turn."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it, with its arguments as an object."""
        known = {} if self.id is None else {"id": self.id}
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {**known, "type": self.type, "function": function}


Tools = Annotated[list[ToolBody], Field(max_length=MOST_TOOLS)]
Calls = Annotated[list[CallBody], Field(max_length=MOST_CALLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice
