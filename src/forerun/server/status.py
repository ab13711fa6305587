"""What the server is and whether it is well: /health, /version, /v1/models, /metrics, /openapi.json."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

import forerun
from forerun.core.metrics import Metric
from forerun.engine.engine import Engine
from forerun.server.auth import open_to_all
from forerun.server.engine_thread import EngineError
from forerun.server.errors import ApiError
from forerun.server.metrics import CONTENT_TYPE, expose
from forerun.server.replies import ModelCard, ModelList, Version, reply
from forerun.server.served_model import ServedModel, served_model

MOST_WAIT_S = 10.0  # for a step to end; a scraper gives up about then

router = APIRouter()


@router.get("/health", response_class=Response)
@open_to_all
async def health(model: Annotated[ServedModel, Depends(served_model)]) -> Response:
    """200 with no body: the model is loaded and the engine runs; else 503."""
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
    model: ServedModel | None = request.app.state.model
    return Response(expose(model.metrics if model else None, await _engine_metrics(model)), media_type=CONTENT_TYPE)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    """What the endpoints take."""
    return JSONResponse(request.app.openapi())


async def _engine_metrics(model: ServedModel | None) -> list[Metric]:
    """The engine's own; none before it is there, after its end, and while it does not answer."""
    if model is None:
        return []
    try:
        return await asyncio.wait_for(model.engine.ask(Engine.metrics), MOST_WAIT_S)
    except (EngineError, TimeoutError):
        return []


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
