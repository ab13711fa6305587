"""`forerun profile`: measures what simulation, plans and tuning compute with."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter
from rich.console import Console
from rich.table import Table

from forerun.bench.profiling.stages import check_folder, delete_profile, held_profile, is_begun
from forerun.bench.workloads import check_temperature
from forerun.cli import loading
from forerun.cli.command import command
from forerun.cli.console import bar, plain_console
from forerun.cli.input_files import Prompt, read_configs, read_kinds
from forerun.cli.interruption import resumable
from forerun.cli.options import SPECULATIVE_OPTIONS, Duration, EngineOptions, Flag, JsonFlag, Paths
from forerun.cli.whole_numbers import parse_numbers
from forerun.errors import ConfigError
from forerun.plan.profile import PROFILE_FILE, SERVERS_KERNELS

if TYPE_CHECKING:
    from forerun.bench.profiling.grid import ProfileGrid
    from forerun.bench.profiling.profiler import ProfileTask
    from forerun.bench.profiling.server_profiler import ServerTask
    from forerun.models.base import LoadedTarget
    from forerun.plan.profile import Profile


STARTED_WITH = ("max_num_seqs", "max_num_batched_tokens", "dtype", "quantization", "tensor_parallel_size")
"""Engine options that say how a server was started, besides those of speculation."""

DEFAULT_CONFIGS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "auto": {"method": "auto"},
}
"""What is profiled without --configs: drafters that need no files."""


Numbers = Annotated[tuple[int, ...] | None, Parameter(converter=parse_numbers, n_tokens=1, negative=())]


@Parameter(name="*", group=Group("Grid", sort_key=1))
@dataclass(frozen=True, kw_only=True)
class GridOptions:
    """What is measured; without any of these as much as the usual grid, or the budget, has."""

    budget: Duration = None
    """Measure as much as fits into this time, e.g. 60s or 10m, loading left out."""
    input_lengths: Numbers = None
    """Tokens of the prompts whose first token is timed."""
    num_sequences: Numbers = None
    """Sequences that decode at once."""
    contexts: Numbers = None
    """Tokens of each of them."""
    draft_lengths: Numbers = None
    """Draft lengths K that are verified; 0 is always measured."""
    rounds: int | None = None
    """Rounds; each measures everything, in an order of its own."""
    num_texts: int | None = None
    """Prompts of each class that the model answers, at most, to judge drafters by."""
    max_tokens: int | None = None
    """Tokens of each answer."""

    def __post_init__(self) -> None:
        if self.budget is not None and self._given:
            raise ConfigError("--budget: it chooses the grid, which other options give as well; leave one out")

    @property
    def _given(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "budget"}
        return {name: value for name, value in found.items() if value is not None}

    def grid(self, others: ProfileGrid) -> ProfileGrid | None:
        """The grid asked for, what is not given as in `others`; None where nothing is asked for."""
        given = self._given
        if not given:
            return None
        if "draft_lengths" in given:
            given["draft_lengths"] = tuple({0, *given["draft_lengths"]})
        return replace(others, **given)


@Parameter(name="*", group=Group("Server", sort_key=3))
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """A server to measure in place of an engine of this process."""

    server: str | None = None
    """Its URL, e.g. http://localhost:8000; --speculative-config, --max-num-seqs, --max-num-batched-tokens, --dtype,
    --quantization and --tensor-parallel-size then say how it was started. OPENAI_API_KEY of the environment is its key."""
    num_kv_tokens: int | None = None
    """Tokens that its KV memory holds, where its metrics do not say so."""
    merge: Paths = None
    """Finished profiles of one server, started with another way to draft each time: put them into one folder, and measure nothing."""

    def __post_init__(self) -> None:
        if self.merge is not None and self.server is not None:
            raise ConfigError("--merge: it puts together what was measured; leave out --server")
        if self.num_kv_tokens is not None and (self.server is None or self.num_kv_tokens < 1):
            raise ConfigError(
                f"--num-kv-tokens: got {self.num_kv_tokens}; must be 1 or more, and is for --server: leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """What is drafted, and on what."""

    configs: Path | None = None
    """A YAML or JSON file of configurations to profile, as of "forerun bench compare"; by default suffix and auto."""
    prompts: Paths = None
    """Files, each a class of prompts, as in "forerun bench compare"; by default built-in ones."""
    temperature: float = 0.0
    """Of the answers that drafters are judged by."""

    def __post_init__(self) -> None:
        check_temperature("--temperature", self.temperature)

    def kinds(self) -> Mapping[str, Sequence[Prompt]]:
        """The prompts by class."""
        from forerun.bench.prompts import WORKLOADS

        return WORKLOADS if self.prompts is None else read_kinds(self.prompts)


GRID, ENGINE, DRAFTERS, SERVER = GridOptions(), EngineOptions(), DrafterOptions(), ServerOptions()


@command
def profile(
    model: str,
    /,
    *,
    output_dir: Path | None = None,
    overwrite: Flag = False,
    json_output: JsonFlag = False,
    drafters: Annotated[DrafterOptions, Parameter(name="*", group=Group("Drafters", sort_key=2))] = DRAFTERS,
    grid: GridOptions = GRID,
    server: ServerOptions = SERVER,
    engine: EngineOptions = ENGINE,
) -> None:
    """Measure a model on this machine or at a server: what steps take, what drafting costs and yields.

    The folder that it writes is what "forerun simulate", "forerun plan" and "forerun tune" compute with. An
    interrupted profile goes on where it stopped.

    Args:
        model: A folder, a .gguf file, a known name (see "forerun models list") or a hub id org/name; with --server
            the model's name there.
        output_dir: The folder to write, by default profile-MODEL.
        overwrite: Begin anew, whatever the folder has; an earlier profile in it is deleted, other files stay.
        json_output: Print the profile as one line of JSON, and nothing else, on standard output.

    Examples:
        forerun profile smollm2-135m --budget 60s
        forerun profile smollm2-135m --configs drafters.yaml --prompts support.jsonl code.jsonl
        forerun profile smollm2-135m --server http://localhost:8000 --num-kv-tokens 100000 --output-dir served
        forerun profile smollm2-135m --merge served-plain served-suffix --output-dir served
    """
    if server.server is None and engine.no_speculation:
        raise ConfigError("--no-speculation: profile measures plain decoding anyway; leave it out")
    if server.server is None and engine.names_drafter:
        raise ConfigError("--speculative-config: profile takes configurations from --configs; write this one there")
    if engine.kv_transfer_config is not None:
        raise ConfigError("--kv-transfer-config: profile saves no hidden states; leave it out")
    if engine.seed != ENGINE.seed:
        raise ConfigError(
            "--seed: a profile's answers are drawn by the numbers of their prompts as seeds; leave it out"
        )
    folder = _default_folder(model) if output_dir is None else output_dir
    check_folder(folder, overwrite=overwrite, goes_on=server.merge is None)
    interruptible = resumable(lambda: is_begun(folder), without="--overwrite" if overwrite else None)
    if server.merge is not None:
        _refuse_measuring(drafters, grid, engine)
        found = _merged(model, server.merge, into=folder)
        with held_profile(folder):
            check_folder(folder, overwrite=overwrite, goes_on=False)  # what there is by now
            if overwrite:
                delete_profile(folder)
            found.save(folder)
    elif server.server is None:
        target, task = _local(model, drafters, grid, engine)
        from forerun.bench.profiling.profiler import Profiler

        with interruptible, bar() as shown:
            found = Profiler(
                target=target,
                task=task,
                folder=folder,
                overwrite=overwrite,
                progress=shown.progress,
                announce=_announce,
                advance=shown.advance,
            ).run()
    else:
        at_server = _at_server(server, model, drafters, grid, engine)
        from forerun.bench.profiling.server_profiler import profile_server

        with interruptible, bar() as shown:
            found = profile_server(
                at_server,
                folder,
                overwrite=overwrite,
                progress=shown.progress,
                announce=_announce,
                advance=shown.advance,
            )
    if json_output:
        print(json.dumps(json.loads((folder / PROFILE_FILE).read_text(encoding="utf-8"))))
    else:
        _show(found, folder, plain_console())


def _default_folder(model: str) -> Path:
    return Path(f"profile-{Path(os.path.abspath(model)).name}")


def _local(
    model: str, drafters: DrafterOptions, grid: GridOptions, engine: EngineOptions
) -> tuple[LoadedTarget, ProfileTask]:
    """The model, loaded, and what is measured of it.

    Raises:
        ForerunError: options do not fit each other, or the model cannot be loaded.
    """
    from forerun.bench.profiling.grid import DEFAULT_GRID, GRIDS
    from forerun.bench.profiling.profiler import ProfileTask  # torch: only when it is needed
    from forerun.bench.prompts import encode_prompt
    from forerun.config.settings import EngineSettings

    named = DEFAULT_CONFIGS if drafters.configs is None else read_configs(drafters.configs)
    kinds = drafters.kinds()
    chosen = grid.grid(GRIDS[DEFAULT_GRID]) or (GRIDS[DEFAULT_GRID] if grid.budget is None else None)
    settings = EngineSettings.from_keywords(model, engine.plain_settings())
    target = loading.load_target(settings)
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ConfigError(f"prompts: {model} has no tokenizer to read them with; give a folder that holds one")
    task = ProfileTask(
        settings=settings,
        configs=named,
        prompts={kind: [encode_prompt(tokenizer, text) for text in texts] for kind, texts in kinds.items()},
        grid=chosen,
        budget_seconds=grid.budget,
        temperature=drafters.temperature,
    )
    return target, task


def _refuse_measuring(drafters: DrafterOptions, grid: GridOptions, engine: EngineOptions) -> None:
    if (drafters, grid, engine) != (DRAFTERS, GRID, ENGINE):
        raise ConfigError("--merge: nothing is measured, so what is drafted, the grid and engine options do not apply")


def _merged(model: str, folders: Sequence[Path], *, into: Path) -> Profile:
    """The profiles of a server in some folders, as one; configurations get the names of the folders.

    Raises:
        ConfigError: one is of another model or engine, two folders have the same name, or one would be written to.
    """
    from forerun.plan.merged_profile import merged_profile
    from forerun.plan.profile import Profile

    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"--merge: got {', '.join(names)}, which name configurations; give folders of different names"
        )
    if into.resolve() in [folder.resolve() for folder in folders]:
        raise ConfigError(f"--output-dir: got {into}, which is one of --merge and would be lost; give another folder")
    parts = {name: Profile.load(folder) for name, folder in zip(names, folders, strict=True)}
    for one in parts.values():
        one.check_fits(model=model)
    return merged_profile(parts)


def _at_server(
    server: ServerOptions,
    model: str,
    drafters: DrafterOptions,
    grid: GridOptions,
    engine: EngineOptions,
) -> ServerTask:
    """What is measured at a server.

    Raises:
        ConfigError: an option does not apply to a server, aiohttp is missing, or a prompt is no text.
    """
    if find_spec("aiohttp") is None:
        raise ConfigError("--server: aiohttp is not installed; pip install 'forerun[bench]'")
    from forerun.bench.profiling.grid import GRIDS, SERVER_GRID
    from forerun.bench.profiling.server_profiler import ServerTask  # aiohttp, which is an extra

    applied = (*STARTED_WITH, "no_speculation", *SPECULATIVE_OPTIONS)
    same = replace(ENGINE, **{name: getattr(engine, name) for name in applied})
    of_this_process = (drafters.configs, grid.budget, grid.draft_lengths)
    if (
        any(one is not None for one in of_this_process)
        or drafters.temperature != DRAFTERS.temperature
        or same != engine
    ):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in STARTED_WITH)
        raise ConfigError(
            "--server: it is measured as it was started and answers greedily, so --budget, --configs, --draft-lengths, "
            f"--temperature and engine options other than {names} and --speculative-config do not apply; leave them out"
        )
    asked = engine.asked_speculation()
    kinds = drafters.kinds()
    texts = {kind: [text for text in some if isinstance(text, str)] for kind, some in kinds.items()}
    if any(len(texts[kind]) < len(some) for kind, some in kinds.items()):
        raise ConfigError("--prompts: a server is asked single messages; give files without conversations")
    key = os.environ.get("OPENAI_API_KEY")
    assert server.server is not None, "the caller has looked"
    return ServerTask(
        url=server.server.rstrip("/"),
        model=model,
        prompts=texts,
        grid=grid.grid(GRIDS[SERVER_GRID]) or GRIDS[SERVER_GRID],
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        speculative_config={"method": asked} if isinstance(asked, str) else asked,
        dtype=engine.dtype,
        quantization=engine.quantization,
        tensor_parallel_size=engine.tensor_parallel_size,
        num_kv_tokens=server.num_kv_tokens,
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )


def _announce(line: str) -> None:
    print(f"profile: {line}", file=sys.stderr)


def _show(found: Profile, folder: Path, console: Console) -> None:
    """Print what matters most, and where the rest is."""
    times = found.step_times
    plain = {"plain": (times, 0)} if found.has_plain_steps else {}
    lengths = {f"K = {k}": (times, k) for k in (1, 3, 5)}
    served = {name: (one, found.acceptance[name].num_places) for name, one in found.served_steps.items()}
    measured = plain | (served if found.kernels == SERVERS_KERNELS else lengths)
    fitted = "ms of a step, each sequence after 512 tokens, by the model that is fitted to what was measured"
    table = Table(title=f"{found.model} on {found.machine}", caption=fitted)
    for name in ("sequences", *measured):
        table.add_column(name, justify="right")
    for count in (1, 4, 16):
        seconds = (
            one.seconds(num_rows=count * (k + 1), num_sequences=count, num_context_tokens=512 * count)
            for one, k in measured.values()
        )
        table.add_row(str(count), *(f"{1e3 * one:.1f}" for one in seconds))
    console.print(table)
    for name, acceptance in found.acceptance.items():
        rates = " ".join(f"{rate:.0%}" for rate in acceptance.marginal[:8])
        console.print(f"{name}: {acceptance.mean_accept_length:.2f} tokens per step; places stand {rates}")
    if times.error is not None:
        console.print(
            f"the model of step times is off by {times.error.median:.1%} (median), {times.error.p95:.1%} (p95)"
        )
    console.print(f"written to {folder}", soft_wrap=True)  # a path is not broken in two
