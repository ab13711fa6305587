"""What is packed of a head is kept: a second start reads none of its matrices and computes the same bits."""

from __future__ import annotations

import pytest
import torch

from forerun.models.checkpoint import SafetensorsCheckpoint
from forerun.models.heads import reader
from forerun.models.heads.eagle import load_eagle
from forerun.models.heads.eagle3 import load_eagle3, load_peagle
from forerun.models.packed_cache import PackedCache
from tests import heads_eagle
from tests.engines import native_target
from tests.native import generator, needs_kernels
from tests.ops.native.passes import filled_cache, random_batch, source

KINDS = {
    "eagle": (load_eagle, heads_eagle.eagle, {"bias": True}),
    "eagle3": (load_eagle3, heads_eagle.eagle3, {}),
    "eagle3 of two layers": (load_eagle3, heads_eagle.eagle3, {"num_layers": 2}),
    "eagle3 with the whole vocabulary": (load_eagle3, heads_eagle.eagle3, {"num_draft": 264}),
    "peagle": (load_peagle, heads_eagle.peagle, {}),
}
READ_AT_EVERY_START = ("norm", "d2t", "t2d", "mask_hidden")

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache that keeps heads of any size."""
    monkeypatch.setattr(reader, "LEAST_KEPT_BYTES", 0)
    cache = PackedCache(folder=tmp_path / "packed", most_bytes=1 << 30)
    monkeypatch.setattr(PackedCache, "of_environment", lambda: cache)
    return cache


@pytest.fixture
def read(monkeypatch):
    """The names of tensors that are read."""
    names, load = [], SafetensorsCheckpoint.load
    monkeypatch.setattr(SafetensorsCheckpoint, "load", lambda self, name: names.append(name) or load(self, name))
    return names


def computed(head, target):
    """All that a head computes of random features: hidden states, logits, and the state of its mask."""
    batch, num_blocks = random_batch(source(2), [(0, 5)], block_size=4)
    kv = filled_cache(head.kv_specs, num_blocks=num_blocks, block_size=4, dtype=target.model.dtype)
    features = [torch.randn(5, target.model.hidden_size, generator=generator(i)) for i in range(len(head.needs))]
    outputs = head.forward(batch.token_ids, head.fuse(features), batch.positions, target.attention.begin(batch, kv))
    mask = [head.mask.state] if hasattr(head, "mask") else []
    return torch.cat([part.float().flatten() for part in (outputs, head.logits(head.states(outputs)), *mask)])


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_start_reads_no_matrix_and_computes_the_same_bits(kind, quantization, tmp_path, read):
    load, make, options = KINDS[kind]
    target = native_target()
    folder = heads_eagle.save(tmp_path / "head", *make(target, **options))
    first, second = (computed(load(folder, target, quantization=quantization), target) for _ in range(2))
    assert torch.equal(first, second)
    matrices = [name for name in read if not any(part in name for part in READ_AT_EVERY_START)]
    twice = {name for name in matrices if matrices.count(name) == 2}
    assert twice == (
        {"lm_head.weight"} if "num_draft" in options else set()
    )  # compared with the target's at every start
    assert any("q_proj" in name for name in matrices)


def test_a_head_in_another_format_is_packed_for_itself(tmp_path, cache):
    target = native_target()
    folder = heads_eagle.save(tmp_path / "head", *heads_eagle.eagle3(target))
    for quantization in (None, "int8", "int8"):
        load_eagle3(folder, target, quantization=quantization)
    assert len([*cache.folder.iterdir()]) == 2


def test_a_head_that_has_changed_is_packed_again(tmp_path):
    target = native_target()
    outputs = []
    for seed in (0, 1):
        folder = heads_eagle.save(tmp_path / "head", *heads_eagle.eagle3(target, seed=seed))
        outputs.append(computed(load_eagle3(folder, target), target))
    assert not torch.equal(*outputs)


def test_small_heads_are_not_kept(tmp_path, cache, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(PackedCache, "of_environment", lambda: cache)
    target = native_target()
    load_eagle3(heads_eagle.save(tmp_path / "head", *heads_eagle.eagle3(target)), target)
    assert not cache.folder.exists()
