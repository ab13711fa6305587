"""The choice of tiles, with a clock that is made up."""

from __future__ import annotations

import pytest
import torch

from forerun.bench.kernel_tuning import ROWS, candidates, tune, tune_shape, weight_shapes
from forerun.models.config_file import read_config
from forerun.models.families import decoder_config
from forerun.models.loader import load_model
from forerun.ops.cuda.tiles import Tiles, rule_of
from tests.gpus import A100, H200
from tests.tiny_models import save_tiny_model

SHAPE = (4096, 4096)
RULE = rule_of(*SHAPE)
BEST, SECOND = Tiles(32, 256, 2), Tiles(128, 64, 2)


class FakeMeter:
    """Times by table, 10 microseconds for what is not in it; each second measurement is disturbed."""

    def __init__(self, times=None, *, changes_bits=(), noise=5.0):
        self.times, self.changes_bits, self.noise = times or {}, changes_bits, noise
        self.measured, self.asked = [], []

    def microseconds(self, shape, tiles, num_rows):
        seen = self.measured.count((tiles, num_rows))
        self.measured.append((tiles, num_rows))
        times = self.times.get(tiles, 10.0)
        time = times[num_rows] if isinstance(times, dict) else times
        return time + self.noise * (seen % 2)

    def keeps_bits(self, shape, tiles):
        self.asked.append(tiles)
        return tiles not in self.changes_bits


def tuned(meter, **options):
    return tune_shape(SHAPE, meter, shared_bytes=H200.shared_bytes, **options)


def test_the_fastest_over_all_numbers_of_rows_wins():
    one_row_only = {BEST: {1: 5.0, 8: 20.0, 16: 20.0, 32: 20.0, 64: 20.0}, SECOND: 8.0}
    found = tuned(FakeMeter(one_row_only))
    assert found.tiles == SECOND
    assert found.gain == pytest.approx(0.25)


def test_a_disturbed_measurement_decides_nothing():
    assert tuned(FakeMeter({BEST: 8.0}, noise=100.0)).tiles == BEST


def test_a_cut_that_changes_a_rows_bits_gives_way_to_the_next():
    meter = FakeMeter({BEST: 5.0, SECOND: 8.0}, changes_bits={BEST})
    found = tuned(meter)
    assert (found.tiles, found.num_refused) == (SECOND, 1)
    assert meter.asked == [BEST, SECOND]


def test_what_wins_by_a_hair_leaves_the_rule_in_place():
    found = tuned(FakeMeter({BEST: 9.9}))
    assert (found.tiles, found.gain) == (RULE, 0.0)


def test_cuts_that_cannot_be_launched_never_win():
    times = {tiles: float("inf") for tiles in candidates(SHAPE, shared_bytes=H200.shared_bytes) if tiles != RULE}
    assert tuned(FakeMeter(times)).tiles == RULE


def test_only_finalists_are_measured_at_every_number_of_rows():
    meter = FakeMeter({BEST: 5.0})
    tuned(meter, rounds=2)
    whole = {tiles for tiles, num_rows in meter.measured if num_rows == ROWS[1]}
    assert BEST in whole
    assert RULE in whole
    assert len(whole) == 7
    assert len(meter.measured) == 2 * len(candidates(SHAPE, shared_bytes=H200.shared_bytes)) + 2 * 7 * len(ROWS)


@pytest.mark.parametrize("gpu", [A100, H200])
@pytest.mark.parametrize("shape", [SHAPE, (28672, 4096), (576, 1536), (97, 64), (16, 16)])
def test_candidates_are_few_and_fit_the_gpu(shape, gpu):
    found = candidates(shape, shared_bytes=gpu.shared_bytes)
    assert found[0] == rule_of(*shape)
    assert len(found) == len(set(found)) <= 37
    for tiles in found[1:]:
        assert 3 * 2 * tiles.inputs * (tiles.outputs + 32) <= gpu.shared_bytes
        assert tiles.splits == 1 or tiles.splits * tiles.inputs <= shape[1], "no part is without inputs"
    assert not any(tiles.inputs == 256 and tiles.outputs == 128 for tiles in found if gpu is A100)


def test_only_what_is_better_than_the_rule_comes_into_the_table():
    reported = []
    chosen = tune([SHAPE, (97, 64)], FakeMeter({BEST: 5.0}), shared_bytes=H200.shared_bytes, report=reported.append)
    assert chosen == {SHAPE: BEST}
    assert [found.shape for found in reported] == [SHAPE, (97, 64)]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def test_shapes_are_those_of_a_decoders_weights(tmp_path, architecture):
    path = save_tiny_model(tmp_path, architecture, seed=1, vocab_size=97)
    model = load_model(path, dtype=torch.float32, device=torch.device("cpu"))
    layer = next(iter(model.layers.layers))
    products = (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    loaded = {tuple(product.weight.shape) for product in products}
    assert set(weight_shapes(decoder_config(read_config(path)))) == {*loaded, (97, model.hidden_size)}
