"""The trained heads that come with forerun, one folder each: config.json, model.safetensors, a model card, target.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from forerun.models.base import LoadedTarget
from forerun.ops.native.formats.base import WeightFormat

FOLDER = Path(__file__).parent
TARGET_FILE = "target.json"
NUM_TOKENS, NUM_VALUES = 16, 32  # of the output embedding, that tell a target from others
LEAST_SIMILARITY = 0.95  # cosine: a model in 4 bits has 0.99, another model of the same sizes hardly above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTarget:
    """The target that a head drafts for, told by its sizes and by some values of its output embedding.

    Whatever its weights were rounded to, a target has nearly those values, and so has one that was trained a little
    further; a head is good for both, and a bad one costs time only.
    """

    title: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    rows: list[list[float]]

    @classmethod
    def of(cls, target: LoadedTarget, *, title: str) -> HeadTarget:
        """Describe a loaded target."""
        model = target.model
        return cls(
            title=title,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
            rows=[[round(value, 5) for value in row] for row in _rows(target).tolist()],
        )

    def fits(self, target: LoadedTarget) -> bool:
        """Whether a loaded target is this one."""
        model = target.model
        sizes = (model.vocab_size, model.hidden_size, model.num_layers)
        if sizes != (self.vocab_size, self.hidden_size, self.num_layers):
            return False
        similarity = F.cosine_similarity(_rows(target).flatten(), torch.tensor(self.rows).flatten(), dim=0)
        return bool(similarity > LEAST_SIMILARITY)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedHead:
    """A head's folder and its weights, kept in int8, those of its output apart; and the title of the model that it drafts for."""

    folder: Path
    num_weights: int
    num_output_weights: int
    title: str

    def num_bytes(self, stored: WeightFormat) -> int:
        """The memory that its weights take in a format."""
        others = self.num_weights - self.num_output_weights
        return int(others * stored.bytes_per_weight + self.num_output_weights * stored.bytes_per_head_weight)


def find_shipped_head(target: LoadedTarget, *, within: Path | None = None) -> ShippedHead | None:
    """The EAGLE-3 head that comes with forerun for a target, or None; `within` holds the folders of heads."""
    for file in sorted((within or FOLDER).glob(f"*/{TARGET_FILE}")):
        made_for = HeadTarget(**json.loads(file.read_text(encoding="utf-8")))
        if made_for.fits(target):
            config = json.loads((file.parent / "config.json").read_text(encoding="utf-8"))
            return ShippedHead(
                folder=file.parent,
                num_weights=(file.parent / "model.safetensors").stat().st_size,
                num_output_weights=config["draft_vocab_size"] * config["hidden_size"],
                title=made_for.title,
            )
    return None


def _rows(target: LoadedTarget) -> torch.Tensor:
    """Values of the output embedding, [NUM_TOKENS, NUM_VALUES] fp32, of tokens at equal distances."""
    model = target.model
    distance = max(1, model.vocab_size // NUM_TOKENS)
    token_ids = torch.arange(0, model.vocab_size, distance, device=model.device)[:NUM_TOKENS]
    return model.head_rows(token_ids)[:, :NUM_VALUES].float().cpu()
