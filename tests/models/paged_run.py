"""One sequence stepped through a model over a paged cache whose blocks lie in no order."""

import random

import numpy as np
import torch

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.kv.cache import KVCache
from forerun.ops.attention.paged import PagedAttention

BLOCK_SIZE = 4
NUM_BLOCKS = 40


class PagedRun:
    """Feeds token ids to a model and remembers how many are in the cache."""

    def __init__(self, model, *, attention=None):
        self._model = model
        self._attention = attention or PagedAttention()
        self._cache = KVCache(
            model.kv_specs, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device
        )
        self._block_ids = np.array(random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS), dtype=np.int32)
        self._length = 0

    def feed(self, token_ids, *, logits_rows=None, features=frozenset(), num_candidates=0):
        """Forward the next tokens and keep them."""
        result = self._forward(token_ids, range(len(token_ids)), None, logits_rows, features, num_candidates)
        self._length += len(token_ids)
        return result

    def try_tree(self, token_ids, tree_mask):
        """Forward a tree of tokens after those fed so far, and keep none."""
        depths = [int(row.sum()) - 1 for row in tree_mask]
        return self._forward(token_ids, depths, tree_mask, None, frozenset())

    def _forward(self, token_ids, depths, tree_mask, logits_rows, features, num_candidates=0):
        count = len(token_ids)
        places = range(self._length, self._length + count)
        blocks = self._block_ids.tolist()
        batch = ForwardBatch(
            token_ids=torch.as_tensor(token_ids),
            positions=torch.tensor([self._length + depth for depth in depths]),
            slot_mapping=torch.tensor([blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in places]),
            sequences=[
                SequenceRows(num_context=self._length, num_rows=count, block_ids=self._block_ids, tree_mask=tree_mask)
            ],
            block_size=BLOCK_SIZE,
            logits_rows=torch.arange(count) if logits_rows is None else torch.tensor(logits_rows, dtype=torch.int64),
            features=features,
            num_candidates=num_candidates,
        )
        with torch.inference_mode():
            return self._model.forward(batch, self._attention.begin(batch, self._cache))
