"""Attention heads of a draft layer that look for where its last two tokens stood before, and carry what followed them there.

A quarter of what a chat model writes follows its last three tokens as it did earlier in the text. A layer learns to copy
it (induction heads, arXiv 2209.11895), but not from a few million tokens: a head of 3.4 million was right at 48 % of such
places and at 43 % of all others. So a group of attention heads is added that begins with what copying takes: values that
carry a token from its embedding to the LM head, in closed form, and attention that is taught where to look.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.heads.eagle3 import NUM_INDUCTION_HEADS

OF_NEW_HEADS = 0.03  # deviation of the weights of queries and keys, with which attention begins almost even
SHRINKAGE = 1e-2  # of the covariances, as a share of their mean variance

QUERY, KEY, VALUE, OUTPUT = (f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo")


def add_induction_heads(
    content: Mapping[str, Any], tensors: Mapping[str, Tensor], embeddings: Tensor, *, seed: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Add key heads and their query heads to a draft layer; one that has them already is returned as it is.

    One key head is added, or as many as it takes for the width to be a multiple of the number of heads, without which
    other engines refuse a configuration; none where twice the heads are not enough for that.

    Args:
        content: the head's config.json in the authors' layout.
        tensors: its tensors in the authors' layout, fp32.
        embeddings: of the tokens that it can draft, [V, width].
        seed: of the weights of queries and keys.

    Returns:
        The same, with more heads, which `NUM_INDUCTION_HEADS` counts.
    """
    width = embeddings.shape[1]
    num_heads, num_kv_heads = content["num_attention_heads"], content["num_key_value_heads"]
    size, head_dim = num_heads // num_kv_heads, content["head_dim"]
    counts = (count for count in range(1, num_kv_heads + 1) if width % (num_heads + count * size) == 0)
    num_added = next(counts, 0)
    if content.get(NUM_INDUCTION_HEADS) or not num_added:
        return dict(content), dict(tensors)
    read = F.rms_norm(embeddings.float(), (width,), tensors["midlayer.input_layernorm.weight"], content["rms_norm_eps"])
    written = tensors["lm_head.weight"] * tensors["norm.weight"]
    of_written, of_read = _canonical_directions(written, read, count=num_added * head_dim)

    def as_neighbours(matrix: Tensor, neighbours: Tensor, count: int) -> Tensor:
        """Scale `matrix`, of as many heads as are added, to the norm that `neighbours`, of `count`, have on average."""
        factor: Tensor = neighbours.norm() / matrix.norm() * (num_added / count) ** 0.5
        return matrix * factor

    value, output = tensors[VALUE], tensors[OUTPUT]
    new_value = as_neighbours(F.pad(of_read.T, (0, width)), value, num_kv_heads)
    new_output = as_neighbours(of_written, output, num_heads).view(width, num_added, 1, head_dim)
    source = torch.Generator().manual_seed(seed)
    query, key = (
        OF_NEW_HEADS * torch.randn(count * num_added * head_dim, 2 * width, generator=source) for count in (size, 1)
    )
    grown = {
        QUERY: torch.cat([tensors[QUERY], query]),
        KEY: torch.cat([tensors[KEY], key]),
        VALUE: torch.cat([value, new_value]),
        OUTPUT: torch.cat([output, new_output.expand(-1, -1, size, -1).flatten(1)], dim=1),
    }
    counts_of_heads = {
        "num_attention_heads": num_heads + num_added * size,
        "num_key_value_heads": num_kv_heads + num_added,
        NUM_INDUCTION_HEADS: num_added * size,
    }
    return {**content, **counts_of_heads}, {**tensors, **grown}


def attention_loss(query: Tensor, key: Tensor, token_ids: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """Return the mean of -log of the attention that goes to where the next token was copied from.

    Row r of the layer reads token r + 1 and predicts the one after it. The mean is over the given places, tokens r + 1,
    where that one and the one before it stood somewhere earlier, with the same token behind them; 0 if there are none.

    Args:
        query: of the induction heads, [B, heads, S - 1, dim].
        key: of the same, [B, key heads, S - 1, dim].
        token_ids: [B, S].
        rows: the text of each place, [N].
        places: the place in its text, [N], from 1 on.
    """
    num_rows = token_ids.shape[1] - 2
    if num_rows < 1:
        return query.new_zeros((), dtype=torch.float32)
    same = token_ids[:, :, None] == token_ids[:, None, :]
    copied = (same[:, :-2, :-2] & same[:, 1:-1, 1:-1] & same[:, 2:, 2:]).tril(-2)  # [B, row, row read from - 1]
    is_asked = torch.zeros(copied.shape[:2], dtype=torch.bool, device=copied.device)
    is_asked[rows, places - 1] = True
    text, row = (is_asked & copied.any(-1)).nonzero(as_tuple=True)
    if not len(text):
        return query.new_zeros((), dtype=torch.float32)
    losses = []
    num_keys, scale = key.shape[2], query.shape[-1] ** -0.5
    places_of_keys = torch.arange(num_keys, device=row.device)
    for one in sorted(set(text.tolist())):  # its keys are read where they are
        own = row[text == one]
        # [key heads, heads of each, N of this text, dim]
        asking = query[one, :, own].float().view(key.shape[1], -1, len(own), query.shape[-1])
        scores = asking @ (key[one].float() * scale).transpose(1, 2)[:, None]
        wanted = F.pad(copied[one, own], (1, num_keys - num_rows - 1))
        of_all = scores.masked_fill(places_of_keys > own[:, None], float("-inf")).logsumexp(-1)
        of_wanted = scores.masked_fill(~wanted, float("-inf")).logsumexp(-1)
        losses.append((of_all - of_wanted).flatten())
    return torch.cat(losses).mean()


def _canonical_directions(left: Tensor, right: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
    """Return directions [width, count] of each side along which rows [N, width] of both agree best (Hotelling, 1936).

    Along them `left` and `right` have unit size, and those of `left` are weighted by how well they agree.
    """
    roots = []
    for side in (left, right):
        covariance = side.T @ side / len(side)
        covariance += SHRINKAGE * covariance.diagonal().mean() * torch.eye(len(covariance))
        sizes, axes = torch.linalg.eigh(covariance)
        roots.append(axes @ torch.diag(sizes.rsqrt()) @ axes.T)
    of_left, agreement, of_right = torch.linalg.svd(roots[0] @ (left.T @ right / len(left)) @ roots[1])
    # the first pair is what all tokens have in common
    chosen = slice(1, 1 + count) if count < len(agreement) else slice(count)
    return roots[0] @ of_left[:, chosen] * agreement[chosen], roots[1] @ of_right.T[:, chosen]
