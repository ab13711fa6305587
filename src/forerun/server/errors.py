"""Errors in OpenAI's shape, {"error": {"message", "type", "param", "code"}}, and those of /v1/messages in Anthropic's."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Scope

from forerun.errors import ErrorKind, ForerunError, RequestError

logger = logging.getLogger(__name__)

TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
MESSAGES_PATH = "/v1/messages"
MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's names of what statuses mean; of others 400's or 500's counts."""

PARAM = re.compile(r"(?!sampling:)([a-z_]+)[.:\[]")
"""The name of the value, with which the message of a ForerunError begins; "sampling" is all that a token is chosen by."""
RETRY_AFTER_S = 1  # for the Retry-After header of answers that ask the client to try again

SHOWN_CAUSES = 3  # reasons that an answer names for a value that fits none of several types


class ErrorDetails(BaseModel):
    """What is wrong, and what to change."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer other than 200."""

    error: ErrorDetails


ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}
"""Answers of every endpoint, for /openapi.json."""


class ApiError(HTTPException):
    """An answer other than 200; of Starlette's kind, which FastAPI lets through while it reads a body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, _writable(message), headers)
        self.code = code
        self.param = None if param is None else _writable(param)

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def messages_body(self, request_id: str | None) -> dict[str, Any]:
        """The answer's JSON in Anthropic's shape."""
        kind = MESSAGES_TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.detail}, "request_id": request_id}

    def response(self, scope: Scope) -> JSONResponse:
        """The answer to a request, in the shape of the interface that its path belongs to."""
        is_messages = MESSAGES_PATH in scope["path"]
        body = self.messages_body(scope.get("state", {}).get("request_id")) if is_messages else self.body
        return JSONResponse(body, status_code=self.status_code, headers=dict(self.headers or {}))


def refused(error: ForerunError) -> ApiError:
    """400 for a value that the engine does not take; `param` is the value's name, with which all such messages begin."""
    named = PARAM.match(str(error))
    return ApiError(400, str(error), param=named.group(1) if named else None)


def failed_while_running(message: str, kind: ErrorKind | None) -> RequestError | ApiError:
    """For a request that the engine ended with an error of that kind: the client's is as if it had been refused, else 500."""
    return RequestError(message) if kind is ErrorKind.REQUEST else ApiError(500, message)


def cut_off() -> ApiError:
    """503 for a request that did not end before the server did."""
    return ApiError(503, "the server is shutting down, and --shutdown-timeout is over; send the request again later")


def malformed(errors: Sequence[Any], body: Any) -> ApiError:
    """400 for a body that does not have the shape that the endpoint takes; nothing of the body is repeated."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"body: not JSON ({first['ctx']['error']} at character {first['loc'][-1]}); send JSON")
    path, of_value = _first_mistake(errors, body)
    if not path:
        return ApiError(400, "body: must be a JSON object with Content-Type: application/json")
    name = ".".join(path)
    if all(error["type"] == "missing" for error in of_value):
        return ApiError(400, f"{name}: is missing; give one", param=path[0])
    causes = list(dict.fromkeys(_uncapital(error["msg"]) for error in of_value))[:SHOWN_CAUSES]
    return ApiError(400, f"{name}: {', or '.join(causes)}", param=path[0])


def _writable(text: str) -> str:
    """The text without halves of surrogate pairs, which requests may hold and answers must not."""
    return text.encode("utf-8", "backslashreplace").decode()


def _first_mistake(errors: Sequence[Any], body: Any) -> tuple[list[str], list[Any]]:
    """The path of the first value that is wrong, and its errors.

    A value that may be of several types has errors for each. The one that lies deepest in the value counts, which has got furthest
    on its type; where such lie in different places, all say what the value may be.
    """
    first = errors[0]
    path, num_certain = _path(first, body)
    if num_certain is None:
        return path, [first]
    certain = path[:num_certain]
    of_field = [(_path(error, body)[0], error) for error in errors if error["loc"][:2] == first["loc"][:2]]
    of_value = [(other, error) for other, error in of_field if other[:num_certain] == certain]
    deepest = max(len(other) for other, _ in of_value)
    found = [(other, error) for other, error in of_value if len(other) == deepest]
    if any(other != found[0][0] for other, _ in found):
        return certain, [error for _, error in of_value]
    return found[0][0], [error for _, error in found]


def _path(error: Any, body: Any) -> tuple[list[str], int | None]:
    """The names that lead to the value in the body, and how many of them come before a choice of types; None without one.

    Pydantic names the type that it tried on its way, which leads nowhere in the body.
    """
    names: list[str] = []
    num_certain: int | None = None
    value, way = body, error["loc"][1:]
    for number, part in enumerate(way):
        is_there = part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
        is_absent = error["type"] == "missing" and number == len(way) - 1
        if is_there or is_absent:
            names.append(str(part))
            value = value[part] if is_there else None
        elif num_certain is None and number > 0:  # the first may be the type of the body, where it has a choice
            num_certain = len(names)
    return names, num_certain


def _uncapital(text: str) -> str:
    text = text.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def install(app: FastAPI) -> None:
    """Give every error of the app this shape."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response(request.scope)

    @app.exception_handler(ForerunError)
    async def on_forerun_error(request: Request, error: ForerunError) -> JSONResponse:
        if error.kind is ErrorKind.SERVER:
            raise error  # for `on_bug`, and for the log
        return refused(error).response(request.scope)

    @app.exception_handler(RequestValidationError)
    async def on_validation(request: Request, error: RequestValidationError) -> JSONResponse:
        return malformed(error.errors(), error.body).response(request.scope)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = {
            400: "body: cannot be read; must be JSON in UTF-8, without thousands of digits in a number or of brackets in each other",
            404: "there is no such endpoint; see /openapi.json",
            405: f"{request.method} is not what this endpoint takes; see /openapi.json",
        }.get(error.status_code, error.detail or HTTPStatus(error.status_code).phrase)
        return ApiError(error.status_code, message, headers=error.headers).response(request.scope)

    @app.exception_handler(Exception)
    async def on_bug(request: Request, _error: Exception) -> JSONResponse:
        logger.error("request %s failed; its traceback follows", getattr(request.state, "request_id", "without id"))
        return ApiError(500, "the server failed on this request; its log has the reason").response(request.scope)
