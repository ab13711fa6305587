"""Errors in OpenAI's shape, {"error": {"message", "type", "param", "code"}}, and those of /v1/messages in Anthropic's."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import takewhile
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
ONE_OF_TYPES = re.compile(r"str|constrained-\w+|\w+\[.*\]|[A-Z]\w*")
"""How pydantic writes, behind the way to a value that may be of several types, which of them it was tried as."""

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


def malformed(errors: Sequence[Any]) -> ApiError:
    """400 for a body that does not have the shape that the endpoint takes; nothing of the body is repeated."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"body: not JSON ({first['ctx']['error']} at character {first['loc'][-1]}); send JSON")
    path = _path(first)
    if not path:
        return ApiError(400, "body: must be a JSON object with Content-Type: application/json")
    place = list(takewhile(lambda part: not ONE_OF_TYPES.fullmatch(part), path))
    same = [first] if place == path else [error for error in errors if _path(error)[: len(place)] == place]
    causes = list(dict.fromkeys(_uncapital(error["msg"]) for error in same))[:SHOWN_CAUSES]
    name = ".".join(place)
    if first["type"] == "missing":
        return ApiError(400, f"{name}: is missing; give one", param=path[0])
    return ApiError(400, f"{name}: {', or '.join(causes)}", param=path[0])


def _writable(text: str) -> str:
    """The text without halves of surrogate pairs, which requests may hold and answers must not."""
    return text.encode("utf-8", "backslashreplace").decode()


def _path(error: Any) -> list[str]:
    """Names that lead to the value in the body.

    A body that may be of several types has the name of its type first, with a capital letter as no field has.
    """
    names = [str(part) for part in error["loc"][1:]]
    return names[1:] if names and names[0][:1].isupper() else names


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
        return malformed(error.errors()).response(request.scope)

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
