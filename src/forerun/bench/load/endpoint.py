"""Where requests go, and their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forerun.bench.load.answer import LoadRequest

Backend = Literal["openai", "openai-chat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where requests go, and what they all have in common."""

    url: str
    backend: Backend
    model: str
    body: Mapping[str, Any]  # sampling values and the like; these come last, so they may replace any other key
    headers: Mapping[str, str]

    def payload(self, request: LoadRequest) -> dict[str, Any]:
        """The JSON of a request."""
        if self.backend == "openai-chat":
            message = {"role": "user", "content": request.prompt}
            asked: dict[str, Any] = {"messages": [message], "max_completion_tokens": request.output_len}
        else:
            asked = {"prompt": request.prompt, "max_tokens": request.output_len}
        # continuous_usage_stats: tokens of each chunk, from servers that know it
        usage = {"include_usage": True, "continuous_usage_stats": True}
        return {"model": self.model, **asked, "stream": True, "stream_options": usage, **self.body}
