"""A profile: what was measured of a model on a machine, in a folder. Simulation, plans and tuning start from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import forerun
from forerun.core.file_version import is_version
from forerun.core.whole_file import whole_file
from forerun.engine.costs import KINKS
from forerun.errors import ConfigError
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.draft_trace import DraftTrace
from forerun.plan.record_types import check_count, check_keys, check_number, check_schedule, check_type
from forerun.plan.step_times import DraftingCost, StepTimeModel

VERSION = 1

PROFILE_FILE = "profile.json"
SPECULATION_FILE = "speculation_profile.json"
TRACES_FOLDER = "draft_traces"

PLAIN = "plain"
"""The name of decoding without drafts, which every profile has but that of a server that always drafts."""

SCHEDULE = "num_speculative_tokens_per_batch_size"
LENGTHS = ("num_speculative_tokens", SCHEDULE)
"""Keys of a `speculative_config` that say how long drafts are, which a plan chooses."""

SERVERS_KERNELS = "a server's own"
"""`Profile.kernels` of what was measured through a server."""

COUNTS = (
    *("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "vocab_size"),
    "tensor_parallel_size",
)
SIZES = ("weight_bytes", "kv_bytes_per_token", "kv_cache_memory_bytes")  # that may be unknown
MEASURES = ("gigabytes_per_second", "watts", "idle_watts")  # that may be unknown, and are no whole numbers
NAMES = ("model", "machine", "kernels", "dtype", "version")
OF_DRAFTERS = ("drafter_block_bytes", "drafter_scratch_bytes")
PARTS = ("configs", "served_steps", "drafting", "acceptance", *OF_DRAFTERS, "traces")
"""Fields that are by the name of a configuration."""

AGAIN = "profile again"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Everything that is known of one engine: its limits, its step times, its drafters.

    What is known by configuration is under the names of `configs`, acceptance for one class of prompts under "name/class".

    Attributes:
        kernel_settings: settings of how it computes that were not as by default, in the names of `EngineSettings`.
        tensor_parallel_size: processes that computed it together, each on a `device` of its own.
        num_blocks: KV blocks of an engine without drafter.
        step_times: of steps without drafts; of a server that always drafts its own.
        served_steps: step times of configurations that a server ran, each measured by itself with what it drafted: as if each
            sequence had all places of its `acceptance` drafted in each step. At other lengths nothing is known of them.
        has_plain_steps: False where a server was measured that always drafts, so that nothing is known of decoding without
            drafts.
        configs: the speculative_config of each profiled configuration.
        drafting: what drafting costs.
        acceptance: what drafts yield.
        drafter_block_bytes: what a drafter adds to each KV block: its own KV, and the target's hidden states that it reads.
        drafter_scratch_bytes: what blocks take that its drafts alone are written to, where that was measured.
        traces: files of draft traces, absolute or from the working directory.

    Raises:
        ConfigError: a value is of another type, a count or a size is below 1, a measure is not finite, or the parts name
            different configurations.
    """

    model: str
    machine: str  # processor or GPU, and cores
    kernels: str
    dtype: str
    version: str  # of forerun, or of the server that was measured
    quantization: str | None = None
    tensor_parallel_size: int = 1
    device: str | None = None  # cpu or cuda; None: a server does not say
    kernel_settings: dict[str, Any] = field(default_factory=dict)
    gigabytes_per_second: float | None  # the memory's, median of the probes between measurements; None: not probed
    weight_bytes: int | None  # that a step reads
    kv_bytes_per_token: int | None  # in all processes together, heads that two of them hold once
    kv_cache_memory_bytes: int | None = None  # that its blocks take, on a GPU those of one process; None: not known
    vocab_size: int  # of a server: of the tokens that it was sent
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    watts: float | None = None  # mean power in the measured steps; None: no counter
    idle_watts: float | None = None
    step_times: StepTimeModel
    served_steps: dict[str, StepTimeModel] = field(default_factory=dict)
    has_plain_steps: bool = True
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    drafting: dict[str, DraftingCost] = field(default_factory=dict)
    acceptance: dict[str, AcceptanceProfile] = field(default_factory=dict)
    drafter_block_bytes: dict[str, int] = field(default_factory=dict)
    drafter_scratch_bytes: dict[str, int] = field(default_factory=dict)
    traces: dict[str, Path] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)  # of the measurement, for people

    def __post_init__(self) -> None:
        self._check_types()
        for part in PARTS[1:]:
            for name in getattr(self, part):
                if name.partition("/")[0] not in self.configs:
                    raise ConfigError(
                        f"profile: {part} names {name!r}, which is no profiled configuration "
                        f"({', '.join(self.configs) or 'there is none'}); profile again"
                    )
        lacking = [name for name in self.configs if name not in self.drafting or name not in self.acceptance]
        if lacking:
            raise ConfigError(
                f"profile: drafting or acceptance of {', '.join(lacking)} is missing; "
                "run forerun profile again with the same --output-dir, which goes on where it stopped"
            )

    def _check_types(self) -> None:
        for name in (*NAMES, "quantization"):
            check_type("profile", name, getattr(self, name), str, or_none=name == "quantization", do=AGAIN)
        if self.device not in (None, "cpu", "cuda"):
            raise ConfigError(f"profile: got device={self.device!r:.80}; must be cpu, cuda or null: {AGAIN}")
        check_type("profile", "has_plain_steps", self.has_plain_steps, bool, do=AGAIN)
        for name in (*PARTS, "kernel_settings", "conditions"):
            check_type("profile", name, getattr(self, name), dict, do=AGAIN)
        for name in (*COUNTS, *SIZES):
            check_count("profile", name, getattr(self, name), least=1, or_none=name in SIZES, do=AGAIN)
        for name in MEASURES:
            check_number("profile", name, getattr(self, name), least=0.0, or_none=True, do=AGAIN)
        for part in OF_DRAFTERS:
            for name, size in getattr(self, part).items():
                check_count(f"profile: {part}", name, size, least=0, do=AGAIN)
        for name, config in self.configs.items():
            check_type("profile: configs", name, config, dict, do=AGAIN)
            check_config(f"profile: configs: {name}", config, do=AGAIN)

    def check_fits(self, **wanted: Any) -> None:
        """Refuse a profile of something else.

        Args:
            wanted: values of fields; what is left out or None is not compared.

        Raises:
            ConfigError: the profile is of another model, machine or version of forerun, or computed otherwise.
        """
        for name, value in wanted.items():
            found = getattr(self, name)
            if value is not None and value != found:
                raise ConfigError(
                    f"profile: it is of another {name} ({found!r}, here {value!r}); make one with forerun profile"
                )

    @property
    def version_warning(self) -> str | None:
        """What to tell a user whose forerun is not the one that measured; None where it is, or a server was measured."""
        if self.kernels == SERVERS_KERNELS or self.version == forerun.__version__:
            return None
        return (
            f"the profile was measured with forerun {self.version}, and this is {forerun.__version__}, which may take other "
            "times and draft otherwise; profile again for a sure answer"
        )

    def steps_of(self, name: str | None) -> StepTimeModel:
        """What steps take with a configuration; None: without drafts.

        Raises:
            ConfigError: the profile is of a server that always drafts, and plain steps are asked for.
        """
        if name is None and not self.has_plain_steps:
            raise ConfigError(
                f"config: nothing is known of steps without drafts, as the profile is of a server that always drafts "
                f"({', '.join(self.configs)}); profile it without speculation too, and put both together with "
                "forerun profile --merge"
            )
        return self.step_times if name is None else self.served_steps.get(name, self.step_times)

    def configs_like(self, config: Mapping[str, Any]) -> list[str]:
        """Names of the configurations that are this one, but for the lengths of drafts."""
        return [name for name, one in self.configs.items() if _without_lengths(one) == _without_lengths(config)]

    def trace(self, name: str) -> DraftTrace:
        """The drafts of a configuration at every place of the recorded texts.

        Raises:
            ConfigError: there is none for this configuration, or its file is damaged.
        """
        if name not in self.traces:
            raise ConfigError(
                f"profile: has no draft trace of {name!r}; has {', '.join(self.traces) or 'none'}. "
                "A server has none, nor a configuration whose drafts do not go by the text alone: simulate it by its "
                "acceptance rates"
            )
        return DraftTrace.load(self.traces[name])

    def acceptance_for(self, name: str, kind: str | None = None) -> AcceptanceProfile:
        """The acceptance of a configuration on a class of prompts; None: on all.

        Raises:
            ConfigError: there is none.
        """
        key = name if kind is None else f"{name}/{kind}"
        if key not in self.acceptance:
            raise ConfigError(f"profile: has no acceptance of {key!r}; has {', '.join(self.acceptance) or 'none'}")
        return self.acceptance[key]

    def save(self, folder: Path) -> None:
        """Write profile.json and speculation_profile.json; traces must be in the folder already, and stay where they are.

        Raises:
            ConfigError: a trace lies outside the folder.
        """
        folder.mkdir(parents=True, exist_ok=True)
        record: dict[str, Any] = {"profile": VERSION}
        for one in fields(self):
            record[one.name] = getattr(self, one.name)
        record["step_times"] = self.step_times.to_json()
        record["served_steps"] = {name: times.to_json() for name, times in self.served_steps.items()}
        record["drafting"] = {name: cost.to_json() for name, cost in self.drafting.items()}
        record["acceptance"] = {name: found.to_json() for name, found in self.acceptance.items()}
        record["traces"] = {name: _inside(folder, path) for name, path in self.traces.items()}
        if self.acceptance:
            conditions = {name: getattr(self, name) for name in (*NAMES, "quantization")} | self.conditions
            profiles = {name: found.to_json(**conditions) for name, found in self.acceptance.items()}
            best = max(self.configs, key=lambda name: self.acceptance[name].mean_accept_length)
            write_json(folder / SPECULATION_FILE, profiles[best] | {"configuration": best, "configurations": profiles})
        write_json(folder / PROFILE_FILE, record)  # last, as it says that the folder is whole

    @classmethod
    def load(cls, folder: Path) -> Profile:
        """Read a profile's folder.

        Raises:
            ConfigError: there is no finished profile, it is of another version, something is missing, or a number
                is not one; the error names it.
        """
        path = folder / PROFILE_FILE
        if not path.is_file():
            how = (
                "its measurement was interrupted: run forerun profile with this --output-dir again, which goes on there"
                if (folder / "stages").is_dir()
                else "make one with forerun profile MODEL --output-dir FOLDER"
            )
            raise ConfigError(f"{folder}: has no {PROFILE_FILE}; {how}")
        try:
            record = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
            if not isinstance(record, dict):
                raise ConfigError(f"profile: got {record!r:.80}; must be an object: {AGAIN}")
            version = record.pop("profile", None)
            if not is_version(version, VERSION):
                raise ConfigError(f"{path}: is of version {version!r:.80}; this forerun reads {VERSION}: profile again")
            _check_parts(record)
            record["step_times"] = StepTimeModel.from_json(record["step_times"])
            record["served_steps"] = {
                name: StepTimeModel.from_json(one) for name, one in record.get("served_steps", {}).items()
            }
            record["drafting"] = {name: DraftingCost.from_json(one) for name, one in record["drafting"].items()}
            record["acceptance"] = {
                name: AcceptanceProfile.from_json(one) for name, one in record["acceptance"].items()
            }
            record["traces"] = {name: folder / where for name, where in record["traces"].items()}
            missing = [str(one) for one in record["traces"].values() if not one.is_file()]
            if missing:
                raise ConfigError(f"{', '.join(missing)} missing; profile again")
            return cls(**record)
        except ConfigError as problem:
            raise ConfigError(str(problem) if str(path) in str(problem) else f"{path}: {problem}") from None
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as problem:
            why = f"lacks {problem}" if isinstance(problem, KeyError) else str(problem)
            raise ConfigError(f"{path}: {why}; profile again") from None


def _check_parts(record: Mapping[str, Any]) -> None:
    """Refuse parts of a file that cannot be read, as they are no objects of what they are made of."""
    check_keys("profile", record, ("step_times", "drafting", "acceptance", "traces"), do=AGAIN)
    for part in ("step_times", *PARTS):
        check_type("profile", part, record.get(part, {}), dict, do=AGAIN)
    for part in ("served_steps", "drafting", "acceptance"):
        for name, one in record.get(part, {}).items():
            check_type(f"profile: {part}", name, one, dict, do=AGAIN)
    for name, where in record["traces"].items():
        check_type("profile: traces", name, where, str, do=AGAIN)


def with_underscores(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a `speculative_config` in the one spelling that all who read a profile or a plan know."""
    return {str(key).replace("-", "_"): value for key, value in config.items()}


def chooses_lengths(config: Mapping[str, Any]) -> bool:
    """Whether the engine chooses the lengths of drafts while it runs, by a `speculative_config`."""
    return bool(config.get("enable_adaptive_verification", config.get("method") == "auto"))


def check_config(what: str, config: Mapping[str, Any], *, do: str) -> None:
    """Refuse a configuration whose drafts nobody could plan or simulate, as a value is of another type.

    Args:
        what: what is checked, as the error begins.
        config: the configuration.
        do: what the user should do, as the error ends.

    Raises:
        ConfigError: a value is of another type.
    """
    known = with_underscores(config)
    if "method" in known:
        check_type(what, "method", known["method"], str, do=do)
    if "num_speculative_tokens" in known:
        check_count(what, "num_speculative_tokens", known["num_speculative_tokens"], least=0, do=do)
    if known.get(SCHEDULE) is not None:
        check_schedule(what, SCHEDULE, known[SCHEDULE], do=do)


def missing_points(
    step_times: StepTimeModel, *, num_rows: int, num_sequences: int, prompt_rows: int, num_context_tokens: int = 0
) -> list[str]:
    """What of a load's steps lies beyond all that was measured, and is only known by straight lines: for warnings."""
    found = step_times.measured
    if found is None:
        return ["the profile does not say what was measured"]
    wanted = (
        ("rows", found.rows, num_rows),
        ("sequences", found.sequences, num_sequences),
        ("tokens of context", found.context_tokens, num_context_tokens),
    )
    beyond = [f"steps of {need} {name} (up to {have} were measured)" for name, have, need in wanted if need > have]
    if prompt_rows > max(found.prompt_rows, KINKS[-1]):
        beyond.append(f"prompts of {prompt_rows} rows in a step (up to {found.prompt_rows} were measured)")
    return beyond


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON file that is whole or not there, whenever the process ends."""
    with whole_file(path) as part:
        part.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _without_lengths(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in with_underscores(config).items() if key not in LENGTHS}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"got {name} for a number; must be finite")


def _inside(folder: Path, path: Path) -> str:
    try:
        return path.resolve().relative_to(folder.resolve()).as_posix()
    except ValueError:
        raise ConfigError(f"profile: the trace {path} is not in {folder}; copy it there first") from None
