"""GET /: a page to chat with the model and see where its tokens came from."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter, Response

from forerun.server.auth import open_to_all

PAGE = files("forerun.server").joinpath("page.html").read_bytes()

router = APIRouter()


def policy_of(page: bytes) -> str:
    """The Content-Security-Policy of a page: its own inline style and script by hash, this server, nothing else."""
    style, script = (_hash_of(page, name) for name in (b"style", b"script"))
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash_of(page: bytes, element: bytes) -> str:
    (content,) = re.findall(b"<%b>(.*?)</%b>" % (element, element), page, re.S)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


HEADERS = {
    "Content-Security-Policy": policy_of(PAGE),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/", include_in_schema=False)
@open_to_all
async def show_page() -> Response:
    """The page; it holds nothing of the model, and asks for the key where one is needed."""
    return Response(PAGE, media_type="text/html; charset=utf-8", headers=HEADERS)
