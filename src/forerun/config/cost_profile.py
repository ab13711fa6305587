"""What an engine learnt of its steps' costs, kept for the next engine with the same model on the same machine."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from forerun.core.whole_file import whole_file
from forerun.engine.costs import EXPERTS_PRIOR, PRIOR, PRIORS, StepCosts

logger = logging.getLogger(__name__)

VERSION = 3
"""To be raised whenever the meaning of `StepCosts.weights` changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """A file with the costs of a model's steps, one for each model.

    `identity` is what they depend on: the processor, the kernels, the number of threads, the dtype; where layers have
    experts also these. A profile of another identity is not used and, once there are new figures, overwritten. Reading
    and writing never fail: without the file an engine learns its costs anew.
    """

    model: str
    identity: Mapping[str, str | int]
    folder: Path | None  # None: nothing is kept
    keeps_new: bool = True  # or what is learnt is forgotten: of steps that only seem to take time

    @property
    def path(self) -> Path | None:
        """The file."""
        if self.folder is None:
            return None
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in self.model)[:80]
        identity = f"{self.model} {self.identity.get('weight_bytes')}".encode("utf-8", "surrogateescape")
        digest = sha256(identity).hexdigest()[:8]
        return self.folder / f"{name}-{digest}.json"

    def load(self) -> StepCosts:
        """The costs to begin with: the file's, or where there is none for this machine those of a typical one."""
        path, typical = self.path, self._typical
        if path is None or not os.path.isfile(path):  # nor in a folder that may not be searched
            return StepCosts(typical)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            other = self._difference(found)
            if other is None:
                return StepCosts([float(weight) for weight in found["weights"]])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            logger.warning("%s is damaged (%s); step costs are learnt anew", path, error)
            return StepCosts(typical)
        logger.info("%s was measured with another %s; step costs are learnt anew", path, other)
        return StepCosts(typical)

    @property
    def _typical(self) -> Sequence[float]:
        """The costs of a model that was never measured."""
        if "experts" in self.identity:
            return EXPERTS_PRIOR
        return PRIORS.get(str(self.identity.get("kernels")), PRIOR)

    def _difference(self, found: Any) -> str | None:
        """What of the identity differs in a file, with both values; None if nothing does."""
        if found["version"] != VERSION:
            return f"version of this file ({found['version']}, here {VERSION})"
        for name, here in self.identity.items():
            if found["identity"].get(name) != here:
                return f"{name} ({found['identity'].get(name)}, here {here})"
        return None

    def save(self, costs: StepCosts) -> None:
        """Write the file; where that fails the next engine learns anew."""
        path = self.path
        if path is None or not self.keeps_new:
            return
        content = {"version": VERSION, "identity": dict(self.identity), "weights": list(costs.weights)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as part:
                part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            logger.debug("%s: step costs are not kept (%s)", path, error)


NOTHING_KEPT = CostProfile(model="", identity={}, folder=None)
"""For engines that begin anew each time."""
