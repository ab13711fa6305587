"""`forerun bench serve`: load on an OpenAI-compatible server, as `vllm bench serve` makes it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from forerun.bench.energy import EnergyMeter
from forerun.bench.load.dataset import Dataset
from forerun.bench.load.traffic import Traffic
from forerun.cli import loading
from forerun.cli.bench_report import REPORT, ReportOptions
from forerun.cli.serve_options import BodyOptions, ServerOptions
from forerun.cli.serve_results import FigureOptions, ResultOptions
from forerun.errors import ConfigError, ModelError
from forerun.models import store

if TYPE_CHECKING:
    from forerun.bench.load.measure import Load
    from forerun.bench.load.report import Report
    from forerun.bench.load.server import ServedModel
    from forerun.models.tokenizer import Tokenizer

FAILED = 1
SERVER, BODY, FIGURES, RESULT = ServerOptions(), BodyOptions(), FigureOptions(), ResultOptions()
DATASET, TRAFFIC = Dataset(), Traffic()


def serve(
    *,
    server: ServerOptions = SERVER,
    dataset: Annotated[Dataset, Parameter(name="*", group=Group("Prompts", sort_key=2), negative=())] = DATASET,
    traffic: Annotated[Traffic, Parameter(name="*", group=Group("Traffic", sort_key=3), negative=())] = TRAFFIC,
    body: BodyOptions = BODY,
    figures: FigureOptions = FIGURES,
    result: ResultOptions = RESULT,
    report: ReportOptions = REPORT,
) -> int:
    """Send requests to an OpenAI-compatible server, as "vllm bench serve" does, and measure its answers.

    Shows throughput, latencies, acceptance by the server's own counters, and energy.
    """
    if find_spec("aiohttp") is None:
        raise ConfigError("bench serve: aiohttp is not installed; pip install 'forerun[bench]'")
    from forerun.bench.load.measure import find_model  # aiohttp, which is an extra

    model = asyncio.run(find_model(server.url, server.headers, model=server.model, wait=server.ready_check_timeout_sec))
    tokenizer = _TokenizerOnDemand(server.tokenizer or model.root)
    load = _make_load(server, model, dataset, traffic, body, tokenizer)
    found = _measure(load, server, figures, result, tokenizer)
    document = found.to_json(detailed=result.save_detailed)
    if result.saves:
        from forerun.bench.load.report import save

        save(document, result.path(found.file_name), append=result.append_result)
    if result.plot is not None:
        from forerun.bench.load.picture import draw  # matplotlib: only when it is needed

        draw(found.measurement.run.answers, f"{model.name} at {server.url}", result.plot)
    report.write(document)
    _show(found, quiet=report.json_output)
    return 0 if found.figures.completed else FAILED


class _TokenizerOnDemand:
    """Loads a tokenizer when it is first asked for: many runs need none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loaded: Tokenizer | None = None

    def get(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ForerunError: it is not to be had; the message says by which option to name another.
        """
        if self._loaded is None:
            from forerun.models.tokenizer import load_tokenizer  # here, for not all load a tokenizer

            loading.pull_if_needed(self.name)
            try:
                with loading.spinner(f"Loading the tokenizer of {self.name}"):
                    self._loaded = load_tokenizer(store.resolve_model(self.name))
            except ModelError as error:
                raise ModelError(f"{error}; or name another by --tokenizer") from error
        return self._loaded

    def encode(self) -> Callable[[str], list[int]]:
        """What turns an answer into tokens."""
        tokenizer = self.get()
        return lambda text: tokenizer.encode(text, add_special_tokens=False)


def _make_load(
    server: ServerOptions,
    model: ServedModel,
    dataset: Dataset,
    traffic: Traffic,
    body: BodyOptions,
    tokenizer: _TokenizerOnDemand,
) -> Load:
    """Draw the requests: prompts of warm-ups are others than those that count, as far as a file has more."""
    from forerun.bench.load.draw import draw_requests
    from forerun.bench.load.endpoint import Endpoint
    from forerun.bench.load.measure import Load

    chat = server.backend == "openai-chat"
    needed = tokenizer.get() if dataset.needs_tokenizer(chat=chat) else None
    drawn = draw_requests(dataset, needed, dataset.num_prompts + traffic.num_warmups)
    requests = drawn[: dataset.num_prompts]
    spare = drawn[dataset.num_prompts :] or requests
    return Load(
        base_url=server.url,
        model_id=model.root,
        endpoint=Endpoint(
            url=server.url + server.path,
            backend=server.backend,
            model=server.served_model_name or model.name,
            body=body.body(server.backend, ignore_eos=dataset.dataset_name == "random"),
            headers=server.headers,
        ),
        requests=requests,
        warmups=spare[: traffic.num_warmups],
        traffic=traffic,
        seed=dataset.seed,
        id_prefix=server.id_prefix,
    )


def _measure(
    load: Load, server: ServerOptions, figures: FigureOptions, result: ResultOptions, tokenizer: _TokenizerOnDemand
) -> Report:
    """Run the load, and sum it up."""
    from forerun.bench.load.figures import sum_up
    from forerun.bench.load.measure import count_tokens, measure
    from forerun.bench.load.report import Report

    if server.is_local:
        meter = EnergyMeter.of_this_machine(figures.powercap_root)
    else:
        meter = EnergyMeter([], f"the server at {server.url} is not known to run on this machine")
    meter.rest(figures.energy_idle_seconds)

    @contextmanager
    def bar() -> Iterator[Callable[[], object]]:
        from tqdm import tqdm

        total = None if load.traffic.duration is not None else len(load.requests)
        with tqdm(total=total, unit="req", disable=figures.disable_tqdm or not sys.stderr.isatty()) as shown:
            yield lambda: shown.update(1)

    found = asyncio.run(measure(load, meter, bar))
    count_tokens(found.run, tokenizer.encode)
    return Report(
        load=load,
        measurement=found,
        figures=sum_up(
            found.run.answers,
            found.run.seconds,
            metrics=figures.metrics,
            percents=figures.percents,
            goals=figures.goals,
        ),
        tokenizer=tokenizer.name,
        label=result.label,
        metadata=result.pairs,
    )


def _show(found: Report, *, quiet: bool) -> None:
    from forerun.cli.serve_block import errors, render

    for line in errors(found):
        print(f"warning: {line}", file=sys.stderr)
    if not quiet:
        print(render(found))
