"""What the server is and whether it is well: /health, /version, /v1/models, /metrics, /openapi.json."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel

import forerun
from forerun.server.auth import open_to_all
from forerun.server.errors import ApiError
from forerun.server.metrics import CONTENT_TYPE, expose
from forerun.server.protocol import reply
from forerun.server.served_model import ServedModel, served_model

router = APIRouter()


class Version(BaseModel):
    """GET /version."""

    version: str


class ModelCard(BaseModel):
    """GET /v1/models/NAME."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    forerun: dict[str, Any]


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


@router.get("/health", response_class=Response)
@router.head("/health", include_in_schema=False)
@open_to_all
async def health(model: Annotated[ServedModel, Depends(served_model)]) -> Response:
    """200 with no body: the model is loaded, the engine runs, and no step hangs; else 503."""
    if model.engine.failure is not None:
        raise ApiError(503, f"{model.engine.failure}; the server's log has the reason")
    return Response()


@router.get("/version", responses=reply(Version))
async def version() -> JSONResponse:
    """The version of forerun."""
    return JSONResponse({"version": forerun.__version__})


@router.get("/v1/models", responses=reply(ModelList))
async def list_models(model: Annotated[ServedModel, Depends(served_model)]) -> JSONResponse:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_card(model)]})


@router.get("/v1/models/{name:path}", responses=reply(ModelCard))
async def show_model(name: str, model: Annotated[ServedModel, Depends(served_model)]) -> JSONResponse:
    """The model of that name."""
    model.check_name(name)
    return JSONResponse(_card(model))


@router.get("/metrics", response_class=PlainTextResponse)
@open_to_all
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    if request.app.state.read_metrics is not None:
        return Response(await request.app.state.read_metrics(), media_type=CONTENT_TYPE)
    model: ServedModel | None = request.app.state.model
    if model is None:
        return Response(media_type=CONTENT_TYPE)
    return Response(expose(model.metrics, await model.engine_metrics()), media_type=CONTENT_TYPE)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    """The OpenAPI description of all endpoints."""
    return JSONResponse(request.app.openapi())


def _card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "forerun",
        "root": model.root,
        "parent": None,
        "max_model_len": model.llm.max_model_len,
        "forerun": {"speculation": model.llm.speculative.describe() if model.speculates else None},
    }
