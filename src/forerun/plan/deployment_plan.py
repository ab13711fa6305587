"""A deployment plan, plan.json: what to run for a load, what it will reach, and why not if it cannot."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from forerun.core.file_version import is_version
from forerun.core.finite_numbers import is_number
from forerun.core.whole_file import whole_file
from forerun.errors import ConfigError, refuse_unknown_keys
from forerun.plan.load import Load
from forerun.plan.profile import NAMES
from forerun.plan.record_types import MOST_COUNT, check_count, check_keys, check_number, check_type
from forerun.plan.sla import LATENCIES, Sla

FILE_NAME = "plan.json"
VERSION = 1

AGAIN = "plan again"

MOST = {"max_num_seqs": 10**6, "tensor_parallel_size": 1024}
"""Of what launch files go through one by one: batch sizes, and the GPUs of an engine."""

LIMITS = tuple(f"{name}_ms" for name in LATENCIES)
"""Keys of the SLA that may be null."""


class Layout(StrEnum):
    """Whether one engine serves a whole request, or one computes its prompt and another its answer."""

    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngine:
    """The settings of each engine, in the names of `EngineSettings`.

    `device` is cpu or cuda, None where the profile does not say. `kernel_settings` are those of how it computes that are
    not as by default; other systems have none of them.

    Raises:
        ConfigError: a value is of another type or out of range.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    dtype: str
    quantization: str | None = None
    tensor_parallel_size: int = 1
    device: str | None = None
    kernel_settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "tensor_parallel_size"):
            check_count("plan: engine", name, getattr(self, name), least=1, most=MOST.get(name, MOST_COUNT), do=AGAIN)
        check_type("plan: engine", "dtype", self.dtype, str, do=AGAIN)
        check_type("plan: engine", "quantization", self.quantization, str, or_none=True, do=AGAIN)
        check_type("plan: engine", "kernel_settings", self.kernel_settings, dict, do=AGAIN)
        if self.device not in (None, "cpu", "cuda"):
            raise ConfigError(f"plan: engine: got device={self.device!r:.80}; must be cpu, cuda or null: plan again")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """What to run for a load.

    `profile` says what was measured: model, machine, kernels, version. Where `feasible` is False, no plan within
    the limits meets the SLA; then replicas and settings are those of `best_achievable`, which has the latencies
    that they reach. `speculative_config` has the keys of `forerun serve` and vLLM; None: no speculation.
    `acceptance` has ModelOpt's keys (speculation_profile.json). `predicted` has milliseconds in keys that end in
    _ms, and tokens or requests per second in those that end in per_second.

    Raises:
        ConfigError: a value is of another type or out of range, or engines of both kinds are not all engines.
    """

    model: str
    profile: dict[str, Any]
    load: Load
    sla: Sla
    feasible: bool
    best_achievable: dict[str, Any] | None
    layout: Layout
    replicas: int  # all engines, of both kinds where they are apart
    prefill_replicas: int
    decode_replicas: int
    engine: PlannedEngine
    speculative_config: dict[str, Any] | None = None
    acceptance: dict[str, Any] | None = None
    predicted: dict[str, Any] = field(default_factory=dict)
    simulated: dict[str, Any] | None = None  # what the simulator says of the same plan
    corrections: dict[str, Any] | None = None  # with which the profile was corrected; None: as it was measured
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_type("plan", "model", self.model, str, do=AGAIN)
        check_type("plan", "profile", self.profile, dict, do=AGAIN)
        check_type("plan", "feasible", self.feasible, bool, do=AGAIN)
        check_type("plan", "predicted", self.predicted, dict, do=AGAIN)
        for name in ("best_achievable", "speculative_config", "acceptance", "simulated", "corrections"):
            check_type("plan", name, getattr(self, name), dict, or_none=True, do=AGAIN)
        for name in NAMES:
            check_type("plan: profile", name, self.profile.get(name, ""), str, do=AGAIN)
        _check_rates(self.acceptance or {})
        for warning in self.warnings:
            check_type("plan", "a warning", warning, str, do=AGAIN)
        apart = self.layout is Layout.DISAGGREGATED
        check_count("plan", "replicas", self.replicas, least=1, do=AGAIN)
        for name in ("prefill_replicas", "decode_replicas"):
            check_count("plan", name, getattr(self, name), least=1 if apart else 0, do=AGAIN)
        if self.prefill_replicas + self.decode_replicas != (self.replicas if apart else 0):
            raise ConfigError(
                f"plan: got {self.replicas} replicas, {self.prefill_replicas} of them for prompts and {self.decode_replicas} for "
                f"answers; must add up where the layout is disaggregated, and be 0 where it is not: plan again"
            )

    def to_json(self) -> dict[str, Any]:
        """The record that `plan.json` holds."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        parts = {"load": self.load.to_json(), "sla": self.sla.to_json(), "engine": asdict(self.engine)}
        return {"version": VERSION} | plain | parts | {"layout": str(self.layout), "warnings": list(self.warnings)}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> DeploymentPlan:
        """The plan of a record that `to_json` made.

        Raises:
            ConfigError: it is of another version, a key is missing or unknown, or a value out of range.
        """
        if not is_version(record.get("version"), VERSION):
            raise ConfigError(f"plan: got version {record.get('version')!r}; must be {VERSION}: plan again")
        values = {name: value for name, value in record.items() if name != "version"}
        refuse_unknown_keys(values, [f.name for f in fields(cls)], where="plan")
        check_keys("plan", values, _needed(cls), do=AGAIN)
        for name in ("engine", "load", "sla"):
            check_type("plan", name, values[name], dict, do=AGAIN)
        check_type("plan", "warnings", values.get("warnings", []), list, do=AGAIN)
        engine = values["engine"]
        refuse_unknown_keys(engine, [f.name for f in fields(PlannedEngine)], where="plan: engine")
        check_keys("plan: engine", engine, _needed(PlannedEngine), do=AGAIN)
        for name, value in values["load"].items():
            check_number("plan: load", name, value, do=AGAIN)
        for name, value in values["sla"].items():
            check_number("plan: sla", name, value, or_none=name in LIMITS, do=AGAIN)
        if values.get("layout") not in list(Layout):
            raise ConfigError(f"plan: got layout {values.get('layout')!r}; must be {' or '.join(Layout)}")
        parts = {
            "load": Load.from_json(values["load"]),
            "sla": Sla.from_json(values["sla"]),
            "engine": PlannedEngine(**engine),
            "layout": Layout(values["layout"]),
            "warnings": tuple(values.get("warnings", [])),
        }
        return cls(**values | parts)

    def save(self, folder: Path) -> Path:
        """Write plan.json into a folder, which is made if needed, and return the file; it is whole, or that of before."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE_NAME
        with whole_file(path) as part:
            text = json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
            part.write_text(text, encoding="utf-8")
        return path

    @classmethod
    def load_file(cls, path: Path) -> DeploymentPlan:
        """Read the plan of a folder, or of a file.

        Raises:
            ConfigError: there is none, or it is no plan of this version.
        """
        file = path / FILE_NAME if path.is_dir() else path
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            reason = error.strerror or "unreadable"
            raise ConfigError(f"{file}: {reason}; forerun plan --output FOLDER writes a plan") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: not JSON ({error}); forerun plan --output FOLDER writes a plan") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{file}: got a {type(record).__name__}; must be one JSON object: plan again")
        try:
            return cls.from_json(record)
        except ConfigError as problem:
            raise ConfigError(f"{file}: {problem}") from None


def _check_rates(acceptance: dict[str, Any]) -> None:
    """Refuse rates of another type, of which launch files are made."""
    name = "conditional_accept_rates"
    rates = acceptance.get(name, [])
    check_type("plan: acceptance", name, rates, list, do=AGAIN)
    if not all(map(is_number, rates)):
        raise ConfigError(f"plan: acceptance: got {name}={rates!r:.80}; must be a list of numbers: {AGAIN}")


def _needed(record: type) -> list[str]:
    """The fields of a record that have no default."""
    return [one.name for one in fields(record) if one.default is MISSING and one.default_factory is MISSING]
