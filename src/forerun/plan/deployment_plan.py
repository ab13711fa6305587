"""A deployment plan, plan.json: what to run for a load, what it will reach, and why not if it cannot."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, refuse_unknown_keys
from forerun.plan.load import Load
from forerun.plan.sla import Sla

FILE_NAME = "plan.json"
VERSION = 1


OBJECT, OBJECT_OR_NULL = (dict, "an object"), (dict | None, "an object or null")
PARTS: dict[str, tuple[Any, str]] = {
    "model": (str, "a name"),
    "feasible": (bool, "true or false"),
    "profile": OBJECT,
    "predicted": OBJECT,
    "best_achievable": OBJECT_OR_NULL,
    "speculative_config": OBJECT_OR_NULL,
    "acceptance": OBJECT_OR_NULL,
    "simulated": OBJECT_OR_NULL,
    "corrections": OBJECT_OR_NULL,
}
"""What the parts of a plan that are written as they are must be."""


class Layout(StrEnum):
    """Whether one engine serves a whole request, or one computes its prompt and another its answer."""

    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngine:
    """The settings of each engine, in the names of `EngineSettings`.

    Raises:
        ConfigError: a number is below 1 or none, or a name is no text.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    dtype: str
    quantization: str | None = None
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in ("dtype", "quantization"):
                if not isinstance(value, str) and (one.name == "dtype" or value is not None):
                    raise ConfigError(f"plan: engine: got {one.name}={value!r:.60}; must be a name: plan again")
            elif not _is_count(value, least=1):
                raise ConfigError(
                    f"plan: engine: got {one.name}={value!r:.60}; must be a whole number, at least 1: plan again"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """What to run for a load.

    `profile` says what was measured: model, machine, kernels, version. Where `feasible` is False, no plan within
    the limits meets the SLA; then replicas and settings are those of `best_achievable`, which has the latencies
    that they reach. `speculative_config` has the keys of `forerun serve` and vLLM; None: no speculation.
    `acceptance` has ModelOpt's keys (speculation_profile.json). `predicted` has milliseconds in keys that end in
    _ms, and tokens or requests per second in those that end in per_second.

    Raises:
        ConfigError: a part is of another type, or the counts of engines contradict each other.
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
        for name, (kind, said) in PARTS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ConfigError(f"plan: got {name}={value!r:.60}; must be {said}: plan again")
        replicas, prefill, decode = self.replicas, self.prefill_replicas, self.decode_replicas
        if self.layout is Layout.DISAGGREGATED:
            is_right = all(_is_count(one, least=1) for one in (prefill, decode)) and replicas == prefill + decode
            wanted = "prefill_replicas and decode_replicas of at least 1, and as many replicas as both"
        else:
            is_right = _is_count(replicas, least=1) and (prefill, decode) == (0, 0)
            wanted = "replicas of at least 1, and no prefill_replicas and decode_replicas"
        if not is_right:
            raise ConfigError(
                f"plan: got replicas={replicas!r:.60}, prefill_replicas={prefill!r:.60}, decode_replicas={decode!r:.60}; "
                f"{self.layout} must have {wanted}: plan again"
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
        for name in ("engine", "load", "sla"):
            if not isinstance(values.get(name, {}), dict):
                raise ConfigError(f"plan: got {name}={values[name]!r:.60}; must be an object: plan again")
        engine = values.get("engine", {})
        refuse_unknown_keys(engine, [f.name for f in fields(PlannedEngine)], where="plan: engine")
        if values.get("layout") not in list(Layout):
            raise ConfigError(f"plan: got layout {values.get('layout')!r}; must be {' or '.join(Layout)}")
        try:
            parts = {
                "load": Load.from_json(values["load"]),
                "sla": Sla.from_json(values["sla"]),
                "engine": PlannedEngine(**engine),
                "layout": Layout(values["layout"]),
                "warnings": tuple(values.get("warnings", ())),
            }
            return cls(**values | parts)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"plan: a key is missing or of another type ({error}); plan again") from None

    def save(self, folder: Path) -> Path:
        """Write plan.json into a folder, which is made if needed, and return the file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE_NAME
        path.write_text(json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        return path

    @classmethod
    def load_file(cls, path: Path) -> DeploymentPlan:
        """Read the plan of a folder, or of a file.

        Raises:
            ConfigError: there is none, or it is no plan of this version.
        """
        file = path / FILE_NAME if path.is_dir() else path
        try:
            record = json.loads(file.read_text())
        except OSError as error:
            reason = error.strerror or "unreadable"
            raise ConfigError(f"{file}: {reason}; forerun plan --output FOLDER writes a plan") from None
        except ValueError as error:
            raise ConfigError(f"{file}: not JSON ({error}); forerun plan --output FOLDER writes a plan") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{file}: got a {type(record).__name__}; must be one JSON object: plan again")
        return cls.from_json(record)


def _is_count(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
