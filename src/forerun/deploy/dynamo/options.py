"""What `forerun dynamo-worker` takes besides the engine's own options."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forerun.errors import ConfigError

DISCOVERY_FOLDER = "DYN_FILE_KV"
"""Dynamo's variable for the folder of file discovery."""

Discovery = Literal["file", "etcd", "kubernetes", "mem"]
RequestPlane = Literal["tcp", "nats"]
EventPlane = Literal["zmq", "nats"]


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How the worker and the frontend find each other, and what the frontend is told of the model.

    The defaults need no service besides: neither etcd nor NATS.

    Raises:
        ConfigError: a name is empty.
    """

    served_model_name: str | None = None
    """Name of the model in requests and answers; by default MODEL as it is given."""
    namespace: str = "dynamo"
    """Dynamo's namespace: workers of one namespace, component and endpoint serve the same model."""
    component: str = "backend"
    """Name of this kind of worker."""
    endpoint_name: str = "generate"
    """Name of what it serves."""
    discovery_backend: Discovery = "file"
    """How workers are found: file (a folder on this machine), etcd, kubernetes or mem; as the frontend's."""
    discovery_folder: Path | None = None
    """Folder of file discovery; by default the frontend's: $DYN_FILE_KV, or dynamo_store_kv in the folder for temporary files."""
    request_plane: RequestPlane = "tcp"
    """How requests come: tcp or nats; as the frontend's."""
    event_plane: EventPlane = "zmq"
    """How events of the KV cache and of the load go to the router: zmq or nats; as the frontend's."""
    workers_folder: Path | None = None
    """Folder that the workers share: they compare their configurations there, and note requests with presence or
    frequency penalties while these run. With file discovery a folder beside that one by default; without one nothing
    is compared and such requests are refused."""
    kv_events: bool = True
    """Tell the router what the prefix cache holds, and how full it is."""
    tool_call_parser: str | None = None
    """Dynamo's parser of the model's tool calls."""
    reasoning_parser: str | None = None
    """Dynamo's parser of the model's reasoning."""

    def __post_init__(self) -> None:
        for name in ("namespace", "component", "endpoint_name"):
            if not getattr(self, name):
                raise ConfigError(f"--{name.replace('_', '-')}: got an empty name; give one, or leave the option out")

    @property
    def address(self) -> str:
        """Dynamo's name of what the worker serves."""
        return f"dyn://{self.namespace}.{self.component}.{self.endpoint_name}"

    @property
    def shared_folder(self) -> Path | None:
        """What all workers of the address see of each other; None: nothing."""
        if self.workers_folder is not None or self.discovery_backend != "file":
            return self.workers_folder
        default = os.environ.get(DISCOVERY_FOLDER) or Path(tempfile.gettempdir()) / "dynamo_store_kv"
        folder = self.discovery_folder or Path(default)
        return folder.with_name(f"{folder.name}.forerun")

    def set_environment(self) -> None:
        """Give Dynamo's runtime the one setting that it takes from the environment alone."""
        if self.discovery_folder is not None:
            os.environ[DISCOVERY_FOLDER] = str(self.discovery_folder)
