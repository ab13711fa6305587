"""Ranks that each compute some outputs of torch's layers compute together what one computes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

from forerun.core.batch import ForwardBatch, LayerKVSpec, SequenceRows
from forerun.errors import ConfigError
from forerun.kv.cache import KVCache
from forerun.models.column_parallel import ColumnParallel, head_shares
from forerun.models.config_file import read_config
from forerun.models.families import decoder_config
from forerun.models.loader import load_model
from forerun.ops.attention.paged import PagedAttention
from tests.tiny_models import SPECIAL, WITH_EXPERTS, save_tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_TOKENS = 10


class ThreadCollectives:
    """`Collectives` of ranks that are threads of this process."""

    def __init__(self, rank, barrier, table):
        self.rank = rank
        self.num_ranks = barrier.parties
        self._barrier = barrier
        self._table = table

    def gather(self, part, widths):
        assert part.shape[1] == widths[self.rank]
        self._table[self.rank] = part
        self._barrier.wait()
        gathered = torch.cat([self._table[rank] for rank in range(self.num_ranks)], dim=1)
        self._barrier.wait()
        return gathered


def run_ranks(num_ranks, compute):
    """What `compute(collectives)` gives on each rank."""
    barrier, table = Barrier(num_ranks, timeout=20), {}
    with ThreadPoolExecutor(num_ranks) as threads:
        futures = [threads.submit(compute, ThreadCollectives(rank, barrier, table)) for rank in range(num_ranks)]
    return [future.result() for future in futures]


def residual_stream(path, collectives=None):
    """What the layers of a model give for some tokens, as the engine calls them."""
    columns = None if collectives is None else ColumnParallel(collectives)
    model = load_model(path, dtype=torch.float64, device=CPU, columns=columns)
    config = model.config
    heads = config.num_kv_heads
    if collectives is not None:
        heads = len(head_shares(config, collectives.num_ranks)[collectives.rank].kv_heads)
    spec = LayerKVSpec(num_kv_heads=heads, key_dim=config.head_dim, value_dim=config.head_dim)
    cache = KVCache([spec] * config.num_layers, num_blocks=4, block_size=BLOCK_SIZE, dtype=torch.float64, device=CPU)
    token_ids = torch.arange(5, 5 + NUM_TOKENS)
    places = torch.arange(NUM_TOKENS)
    batch = ForwardBatch(
        token_ids=token_ids,
        positions=places,
        slot_mapping=places,
        sequences=[
            SequenceRows(num_context=0, num_rows=NUM_TOKENS, block_ids=torch.arange(3, dtype=torch.int32).numpy())
        ],
        block_size=BLOCK_SIZE,
        logits_rows=places,
    )
    with torch.inference_mode():
        hidden, attend = model.embed(token_ids), PagedAttention().begin(batch, cache)
        stream = model.layers(hidden, model.rotations(places), attend, 0, model.num_layers)
        normed = model.norm(stream)
        if columns is None:
            return stream, model.logits(normed)
        return stream, columns.linear(model.head.linear)(normed)


@pytest.mark.parametrize("architecture", sorted(SPECIAL.keys() - WITH_EXPERTS))
@pytest.mark.parametrize(("num_ranks", "num_kv_heads"), [(2, 3), (3, 3), (4, 2)])
def test_the_layers_of_all_ranks_give_the_stream_of_one(tmp_path, architecture, num_ranks, num_kv_heads):
    sizes = {"num_attention_heads": 12, "num_key_value_heads": num_kv_heads, "vocab_size": 101}
    path = save_tiny_model(tmp_path, architecture, seed=3, **sizes)
    stream, _ = residual_stream(path)
    for found, _ in run_ranks(num_ranks, lambda collectives: residual_stream(path, collectives)):
        torch.testing.assert_close(found, stream, rtol=1e-9, atol=1e-9)


def test_the_head_of_all_ranks_gives_the_logits_of_one(tmp_path):
    path = save_tiny_model(tmp_path, seed=3, vocab_size=101)
    _, logits = residual_stream(path)
    for _, found in run_ranks(2, lambda collectives: residual_stream(path, collectives)):
        torch.testing.assert_close(found.float(), logits, rtol=1e-6, atol=1e-6)


def config_of(folder: Path, **sizes):
    return decoder_config(read_config(save_tiny_model(folder, vocab_size=40, **sizes)))


def shares_of(config, num_ranks):
    return [(list(share.heads), list(share.kv_heads)) for share in head_shares(config, num_ranks)]


def test_whole_groups_of_heads_are_shared_out_as_evenly_as_they_can_be(tmp_path):
    config = config_of(tmp_path, num_key_value_heads=3)
    assert shares_of(config, 2) == [([0, 1, 2, 3], [0, 1]), ([4, 5], [2])]


def test_where_there_are_more_ranks_than_key_heads_groups_are_divided(tmp_path):
    config = config_of(tmp_path, num_key_value_heads=1)
    assert shares_of(config, 3) == [([0, 1], [0]), ([2, 3], [0]), ([4, 5], [0])]


def test_groups_that_cannot_be_divided_so_are_refused_with_what_can(tmp_path):
    config = config_of(tmp_path, num_key_value_heads=2)  # of three query heads each
    with pytest.raises(
        ConfigError, match=r"got 4; 2 key heads, each read by 3 query heads, can be shared out among 1, 2, 6$"
    ):
        head_shares(config, 4)
