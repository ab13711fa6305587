"""A deployment plan, plan.json: what to run for a load, what it will reach, and why not if it cannot."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from forerun.core.whole_file import whole_file
from forerun.errors import ConfigError, refuse_unknown_keys
from forerun.plan.load import Load
from forerun.plan.sla import Sla

FILE_NAME = "plan.json"
VERSION = 1

JSON_NAMES = {str: "a text", bool: "true or false", dict: "an object", list: "a list"}
"""How messages call types."""


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
            _check_count("engine: ", name, getattr(self, name), least=1)
        _check_type("engine: ", "dtype", self.dtype, str)
        _check_type("engine: ", "quantization", self.quantization, str, or_none=True)
        _check_type("engine: ", "kernel_settings", self.kernel_settings, dict)
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
        _check_type("", "model", self.model, str)
        _check_type("", "profile", self.profile, dict)
        _check_type("", "feasible", self.feasible, bool)
        _check_type("", "predicted", self.predicted, dict)
        for name in ("best_achievable", "speculative_config", "acceptance", "simulated", "corrections"):
            _check_type("", name, getattr(self, name), dict, or_none=True)
        for warning in self.warnings:
            _check_type("", "a warning", warning, str)
        apart = self.layout is Layout.DISAGGREGATED
        _check_count("", "replicas", self.replicas, least=1)
        for name in ("prefill_replicas", "decode_replicas"):
            _check_count("", name, getattr(self, name), least=1 if apart else 0)
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
        if record.get("version") != VERSION:
            raise ConfigError(f"plan: got version {record.get('version')!r}; must be {VERSION}: plan again")
        values = {name: value for name, value in record.items() if name != "version"}
        refuse_unknown_keys(values, [f.name for f in fields(cls)], where="plan")
        engine = values.get("engine", {})
        _check_type("", "engine", engine, dict)
        _check_type("", "warnings", values.get("warnings", []), list)
        refuse_unknown_keys(engine, [f.name for f in fields(PlannedEngine)], where="plan: engine")
        if values.get("layout") not in list(Layout):
            raise ConfigError(f"plan: got layout {values.get('layout')!r}; must be {' or '.join(Layout)}")
        try:
            parts = {
                "load": Load.from_json(values["load"]),
                "sla": Sla.from_json(values["sla"]),
                "engine": PlannedEngine(**engine),
                "layout": Layout(values["layout"]),
                "warnings": tuple(values.get("warnings", [])),
            }
            return cls(**values | parts)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"plan: a key is missing or of another type ({error}); plan again") from None

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
        except ValueError as error:
            raise ConfigError(f"{file}: not JSON ({error}); forerun plan --output FOLDER writes a plan") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{file}: got a {type(record).__name__}; must be one JSON object: plan again")
        return cls.from_json(record)


def _check_count(where: str, name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            f"plan: {where}got {name}={value!r:.80}; must be a whole number, at least {least}: plan again"
        )


def _check_type(where: str, name: str, value: object, wanted: type, *, or_none: bool = False) -> None:
    if not isinstance(value, wanted) and not (or_none and value is None):
        raise ConfigError(
            f"plan: {where}got {name}={value!r:.80}; must be {JSON_NAMES[wanted]}{' or null' if or_none else ''}: plan again"
        )
