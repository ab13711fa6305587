"""What a training run is asked for."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError
from forerun.models.fingerprint import fingerprint_of_files
from forerun.train.eagle3_trainer import BATCH_TOKENS
from forerun.train.packaging import LAYOUTS, STORED_AS

LEAST_BUDGET = 120.0  # seconds: less trains nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What `forerun train` is asked for; see there.

    Raises:
        ConfigError: settings do not fit each other.
    """

    model: str
    output: Path
    method: str = "eagle3"
    prompts: Path | None = None
    magpie: int | None = None
    texts: tuple[Path, ...] = ()
    from_pool: Path | None = None
    begin_with: Path | None = None
    budget: float | None = None  # seconds
    epochs: float | None = None
    exclude: tuple[Path, ...] = ()
    draft_vocab_size: int = 8192
    layout: str = "speculators"
    stored_as: str = "bf16"
    verifier: str | None = None
    keep_features: bool = False
    device: str = "cpu"
    learning_rate: float = 3e-3
    batch_tokens: int = BATCH_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_amounts()

    def _check_choices(self) -> None:
        if self.method != "eagle3":
            raise ConfigError(
                f"--method: got {self.method!r}; may be eagle3; forerun.train.trainer.train_head trains the others"
            )
        for option, value, known in (("layout", self.layout, LAYOUTS), ("stored-as", self.stored_as, STORED_AS)):
            if value not in known:
                raise ConfigError(f"--{option}: got {value!r}; may be {', '.join(known)}")
        if self.verifier is not None and self.layout != "speculators":
            raise ConfigError(
                f"--verifier: got {self.verifier!r}, but only the layout of speculators names it; leave it out"
            )

    def _check_amounts(self) -> None:
        sources = ("prompts", "magpie", "texts", "from_pool")
        given = [name for name in sources if getattr(self, name) not in (None, ())]
        if len(given) > 1:
            first, second = (name.replace("_", "-") for name in given[:2])
            raise ConfigError(f"--{first} and --{second} are both given; keep one")
        counts = (
            ("magpie", self.magpie),
            ("draft-vocab-size", self.draft_vocab_size),
            ("batch-tokens", self.batch_tokens),
        )
        for option, count in counts:
            if count is not None and count < 1:
                raise ConfigError(f"--{option}: got {count}; must be at least 1")
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"--seed: got {self.seed}; must be from 0 to {(1 << 32) - 1}")
        for option, number in (("epochs", self.epochs), ("learning-rate", self.learning_rate)):
            if number is not None and not 0 < number < math.inf:
                raise ConfigError(f"--{option}: got {number:g}; must be above 0 and finite")
        if self.budget is None and self.epochs is None:
            raise ConfigError("--budget: is missing; say how long it may take, e.g. 3h, or give --magpie and --epochs")
        if self.budget is None and not given:
            raise ConfigError("--magpie: without --budget say how many conversations, e.g. --magpie 20000")
        if self.budget is not None and self.budget < LEAST_BUDGET:
            raise ConfigError(
                f"--budget: got {self.budget:.0f} seconds, in which nothing can be trained; give at least {LEAST_BUDGET:.0f}s"
            )

    def identity(self, model: Path, *, chat_template: str | Mapping[str, str] | None) -> dict[str, Any]:
        """Return what must be the same when a run goes on: files count by their content.

        Args:
            model: the target's folder or file.
            chat_template: what lays its conversations out, of which its fingerprint says nothing.

        Raises:
            ConfigError: a file cannot be read.
        """
        return {
            "fingerprint": fingerprint_of_files(model),
            "chat_template": _short_digest(json.dumps(chat_template, sort_keys=True).encode()),
            "method": self.method,
            "prompts": None if self.prompts is None else _digest("--prompts", self.prompts),
            "magpie": self.magpie,
            "texts": [str(path.resolve()) for path in self.texts],
            "from_pool": None if self.from_pool is None else str(self.from_pool.resolve()),
            "begin_with": None
            if self.begin_with is None
            else _digest("--begin-with", self.begin_with / "model.safetensors"),
            "exclude": [_digest("--exclude", path) for path in self.exclude],
            "draft_vocab_size": self.draft_vocab_size,
            "layout": self.layout,
            "stored_as": self.stored_as,
            "learning_rate": self.learning_rate,
            "batch_tokens": self.batch_tokens,
            "seed": self.seed,
        }

    def command(self) -> str:
        """Return the command that asks for this run; files are named without their folders."""
        options = []
        for option in fields(self)[2:]:
            value = getattr(self, option.name)
            for one in value if isinstance(value, tuple) else (value,):
                if one is True:
                    options.append(f"--{option.name.replace('_', '-')}")
                elif one != option.default:
                    shown = one.name if isinstance(one, Path) else f"{one:.15g}s" if option.name == "budget" else one
                    options.append(f"--{option.name.replace('_', '-')} {shown}")
        return " ".join(["forerun train", self.model, *options, "--output", self.output.name])

    def extent(self) -> dict[str, float | None]:
        """Return how much is asked for, which may change until the training has been planned."""
        return {"budget": self.budget, "epochs": self.epochs}


def is_from_pool(identity: Mapping[str, Any]) -> bool:
    """Whether the texts of a run are answers that a server kept, by what its `RunSettings.identity` says."""
    return identity.get("from_pool") is not None


def origin_of(identity: Mapping[str, Any]) -> str:
    """Return where the texts of a run come from, by what its `RunSettings.identity` says."""
    if is_from_pool(identity):
        return "those of a server's users, whose answers it kept"
    if identity.get("texts"):
        return "those of another run"
    if identity.get("prompts") is not None:
        return f"a file (digest {identity['prompts']})"
    return "invented by the target"


def _digest(option: str, path: Path) -> str:
    """Return a digest of a file's content."""
    try:
        return _short_digest(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path} ({error}); give a file") from None


def _short_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
