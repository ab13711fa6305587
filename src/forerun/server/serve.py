"""The server's life: it listens, loads, serves, and ends when what runs has ended."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

import forerun
from forerun.errors import ConfigError, DeviceLostError
from forerun.llm import LLM
from forerun.models.chat.formats import FORMATS
from forerun.server.app import MOST_HEADER_BYTES, Edge, build_app
from forerun.server.connections import Connection, ConnectionLimits, room_for
from forerun.server.options import ServerOptions
from forerun.server.served_model import ServedModel
from forerun.server.watched_head import WatchedHead

KEEP_ALIVE_S = 60  # longer than clients wait between requests, who else send one into a connection that closes
FAREWELL_S = 2.0  # for answers that the shutdown cuts off to say so
POLL_S = 0.1  # from one look at what still runs to the next
LOGGED = (
    *("forerun.build", "forerun.config.cost_profile", "forerun.config.gpu_memory", "forerun.config.kernel_table"),
    "forerun.engine.stats",
)
SWITCH_INTERVAL_S = 0.0005  # the engine's thread must not wait long for Python's lock after each kernel call


class Server:
    """One server.

    Args:
        load: gives the model; called once, in a thread, while the server answers 503.
        options: see `ServerOptions`.
        report: shows a line to whoever started the server.
    """

    def __init__(
        self, load: Callable[[], LLM], options: ServerOptions, *, report: Callable[[str], None] = print
    ) -> None:
        self.app = build_app(options, host=options.host, lifespan=self._lifespan)
        self.is_listening, self.is_ready = threading.Event(), threading.Event()
        self._load = load
        self._options = options
        self._report = report
        self._failure: BaseException | None = None
        self._has_frozen = False
        self._loading: threading.Thread | None = None
        self._watching: asyncio.Task[None] | None = None
        self._limits = ConnectionLimits(max_connections=options.max_connections, client_timeout=options.client_timeout)
        config = uvicorn.Config(
            Edge(self.app),
            http=partial(Connection, limits=self._limits),  # type: ignore[arg-type]
            ws="none",
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=options.shutdown_timeout,
            log_config=None,
            log_level="error",  # below that, whoever sends nonsense fills the log
            access_log=False,
            server_header=False,
        )
        self._server = _Uvicorn(config)

    def run(self) -> None:
        """Serve until SIGTERM, Ctrl-C or `stop`.

        Raises:
            ConfigError: the address cannot be listened on.
            ForerunError: the model cannot be loaded.
            DeviceLostError: the device computes no more.
        """
        self._limits.max_connections = room_for(self._options.max_connections)
        if self._limits.max_connections < self._options.max_connections:
            self._report(
                f"--max-connections: {self._limits.max_connections}, as many as the limit on open files (ulimit -n) leaves"
            )
        with listen(self._options.host, self._options.port) as sock:
            self.port: int = sock.getsockname()[1]
            self.is_listening.set()
            interval = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            try:
                asyncio.run(self._server.serve(sockets=[sock]))
            finally:
                sys.setswitchinterval(interval)
                if self._has_frozen:
                    gc.unfreeze()
        if self._failure is not None:
            raise self._failure

    @property
    def is_working(self) -> bool:
        """Whether a thread still loads the model or computes a step; after `run` nobody will use what comes of it."""
        model: ServedModel | None = self.app.state.model
        is_loading = self._loading is not None and self._loading.is_alive()
        return is_loading or (model is not None and model.engine.is_running)

    def stop(self) -> None:
        """Let what runs finish, then end; for whoever runs the server in a thread."""
        self._server.should_exit = True

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def load() -> None:
            try:
                llm = self._load()
                if self._options.watch_head is not None:
                    llm.check_replaces_head()
                model = ServedModel(llm, self._options, when_lost=self._lose)
            except BaseException as error:
                self._failure = error
                self.stop()
                return
            with suppress(RuntimeError):  # the loop is closed: the server was stopped meanwhile
                loop.call_soon_threadsafe(self._begin, app, model)

        self._loading = threading.Thread(target=load, name="forerun-loading", daemon=True)
        self._loading.start()
        try:
            yield
        finally:  # also where a second signal does not let the rest end
            if self._watching is not None:
                self._watching.cancel()
            if app.state.model is not None:
                # In a thread: the step that runs may be long, and answers that are cut off must get out meanwhile.
                await asyncio.to_thread(app.state.model.close)

    def _lose(self, error: DeviceLostError) -> None:
        """End, since the device computes no more: whoever started the process can start it again."""
        self._failure = error
        self.stop()

    def _begin(self, app: FastAPI, model: ServedModel) -> None:
        self._has_frozen = gc.get_freeze_count() == 0  # else whoever has frozen before us unfreezes
        gc.collect()
        gc.freeze()  # a collection that walks all that was loaded holds every stream for a quarter of a second
        model.engine.start()
        app.state.model = model
        self._report(banner(model))
        if self._options.watch_head is not None:
            watch = WatchedHead(model, self._options.watch_head, report=self._report)
            self._watching = asyncio.get_running_loop().create_task(watch.run())
        self._report(f"ready: http://{url_host(self._options.host)}:{self.port} (Ctrl-C stops)")
        self.is_ready.set()


class _Uvicorn(uvicorn.Server):
    """uvicorn, but a signal that was obeyed is not raised again (the process ends with 0), and answers that it cuts off say so."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what runs finish; what does not in time is cancelled, and gets a moment to answer."""
        await super().shutdown(sockets)
        if self.force_exit:
            for task in self.server_state.tasks:
                task.cancel()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=FAREWELL_S)
        if self.force_exit:
            await self.lifespan.shutdown()  # uvicorn leaves it out, and it would fail when the event loop cancels it

    async def _wait_tasks_to_complete(self) -> None:
        """Wait for what runs, or the second signal; uvicorn's own then waits for open connections (from Python 3.12 on)."""
        while (self.server_state.connections or self.server_state.tasks) and not self.force_exit:
            await asyncio.sleep(POLL_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at the first signal, at once at the second."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def obey(_signal: int, _frame: FrameType | None) -> None:
            self.force_exit = self.should_exit
            self.should_exit = True

        before = {number: signal.signal(number, obey) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        ConfigError: the address is taken, is none of this machine, or needs rights that the process lacks.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(socket.SOMAXCONN)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:  # the latter where the host cannot be a name
        number, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
        if number == errno.EADDRINUSE:
            advice = "stop what does, or give another --port (0 takes a free one)"
        elif number == errno.EACCES:
            advice = "give a --port above 1023"
        else:
            advice = "give an address of this machine as --host, or 0.0.0.0 for all of them"
        raise ConfigError(f"--host {host} --port {port}: cannot listen there ({reason or error}); {advice}") from None
    return sock


def banner(model: ServedModel) -> str:
    """What is served and how, a line for each."""
    llm, options = model.llm, model.options
    kv_bytes, kv_tokens = model.kv_memory
    speculative = llm.speculative
    given = llm.settings.speculative_config
    drafter = given.get("model") if isinstance(given, Mapping) else None
    rows = {
        "target": f"{model.name} ({model.root})" if model.root != model.name else model.name,
        "drafter": drafter or (speculative.method if model.speculates else "none"),
        "method": speculative.describe(),
        "num_speculative_tokens": speculative.num_speculative_tokens,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "device": f"{llm.device}, {f'native kernels ({llm.kernels.level})' if llm.kernels else 'torch'}",
        "KV memory": f"{kv_bytes / 2**20:.1f} MiB, {kv_tokens} tokens",
        "max_model_len": llm.max_model_len,
        "max_num_seqs": llm.settings.max_num_seqs,
        "sampling defaults": llm.sampling_defaults.describe() or "temperature 1",
        "tool calls": _tool_calls(model),
        "reasoning": _reasoning(model),
        "API key": "needed" if options.api_key else "none needed",
    }
    width = max(map(len, rows))
    return "\n".join(
        [f"forerun {forerun.__version__}", *(f"  {name:<{width}}  {value}" for name, value in rows.items())]
    )


def _tool_calls(model: ServedModel) -> str:
    """How the model learns of tools, and writes their calls."""
    name = next((name for name, form in FORMATS.items() if form is model.tool_format), None)
    if name is None:
        return "not read: the chat template's form is not known here; --tool-call-parser sets one"
    where = (
        "the system message, as the chat template reads none" if model.tool_template is None else "the chat template"
    )
    return f"{name}, tools in {where}"


def _reasoning(model: ServedModel) -> str:
    """Where reasoning stands in the model's answers."""
    if model.reasoning_form is not None:
        return str(model.reasoning_form)
    if model.options.reasoning_parser == "none":
        return "left in the content, as --reasoning-parser is none"
    return "none read: the chat template shows no marks of it; --reasoning-parser sets them"


def log_stats() -> None:
    """Write the engine's log to stderr: at the start what it uses and why not more, then throughput and acceptance as it works."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for name in LOGGED:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False


def url_host(host: str) -> str:
    """A host as it stands in a URL: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
