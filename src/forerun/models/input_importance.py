"""How much the inputs of a decoder's products count: their mean squares while random tokens pass through its layers.

An error in a weight is multiplied with its input, and a few inputs are a hundred times larger than the rest. Which ones is
the model's own doing, whatever the text: random tokens show them nearly as well as a corpus does, and need none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.models.layers import DecoderLayer, Product
from forerun.ops.rotary import Rotation

NUM_TOKENS = 256
SEED = 0


@dataclass(frozen=True, slots=True)
class LayerImportance:
    """The mean square of each input of a layer's products: [inputs] fp32.

    All experts read the same rows, but each takes too few of them to tell what its last product reads: of a mixture `down` is None.
    """

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor | None


class InputImportance:
    """Passes random tokens through layers, one after the other as they are read.

    Args:
        embed: [T] int64 -> [T, hidden_size], in the dtype of the layers.
        vocab_size: tokens to choose from.
        rotations: of positions [T], one for each of a decoder's rotations (`Decoder.rotations`).
        rotation_of: which of them each layer takes.
    """

    def __init__(
        self,
        embed: Callable[[Tensor], Tensor],
        vocab_size: int,
        rotations: Callable[[Tensor], Sequence[Rotation | None]],
        rotation_of: Sequence[int],
    ) -> None:
        token_ids = torch.randint(vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(SEED))
        self._hidden = embed(token_ids)
        self._rotations = rotations(torch.arange(NUM_TOKENS))
        self._rotation_of = rotation_of
        self._num_layers = 0

    def measure(self, layer: DecoderLayer) -> LayerImportance:
        """Compute the next layer, which is not packed yet, and return what its products read."""
        products: dict[str, _Watched] = {}

        def watched(name: str, product: Product) -> Product:
            products[name] = _Watched(product)
            return products[name]

        rotation = self._rotations[self._rotation_of[self._num_layers]]
        with torch.inference_mode():
            self._hidden = layer.with_products(watched)(self._hidden, rotation, attend_to_past)
        self._num_layers += 1
        return LayerImportance(
            qkv=products["qkv"].mean_square,
            output=products["output"].mean_square,
            gate_up=products["gate_up" if "gate_up" in products else "router"].mean_square,
            down=products["down"].mean_square if "down" in products else None,
        )


@dataclass(slots=True)
class _Watched:
    """A product that notes the mean square of each input: [inputs] fp32."""

    product: Product
    mean_square: Tensor = field(init=False)

    @property
    def num_bytes(self) -> int:
        """See `Product`."""
        return self.product.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        self.mean_square = x.float().square().mean(dim=0)
        return self.product(x)


def attend_to_past(
    layer: int,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`Attend` for one sequence that begins here, without a cache."""
    length, num_heads, _ = query.shape
    shared = num_heads // key.shape[1]
    keys, values = (part.float().repeat_interleave(shared, dim=1).transpose(0, 1) for part in (key, value))
    scores = query.float().transpose(0, 1) @ keys.mT * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, length, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    return (weights @ values).transpose(0, 1).to(query.dtype)
