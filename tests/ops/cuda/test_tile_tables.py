"""Tables of tiles: what they hold, how they are read, and what is refused."""

from __future__ import annotations

import json

import pytest

from forerun.errors import ConfigError
from forerun.ops.cuda import tiles as module
from forerun.ops.cuda.tiles import Tiles, TileTable, rule_of, tiles_instead, tiles_of, use_table
from tests.gpus import A100, H200

SHAPE = (4096, 4096)
TABLE = TileTable(
    gpu="NVIDIA H200",
    capability=(9, 0),
    triton="3.7.1",
    tiles={SHAPE: Tiles(32, 256, 2), (28672, 4096): Tiles(128, 64, 1)},
)


@pytest.fixture(autouse=True)
def _nothing_in_use(monkeypatch):
    monkeypatch.setattr(module, "_in_use", None)
    monkeypatch.setattr(module, "_tiles", {})


def changed(path, **changes):
    """The table's file with some values changed, the digest as it was."""
    TABLE.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_a_table_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "folder" / "table.json"
    TABLE.write(path)
    assert TileTable.read(path) == TABLE
    assert TileTable.read(path).digest == TABLE.digest
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


def test_the_digest_is_of_all_that_bits_hang_on():
    others = [
        TileTable(gpu="NVIDIA H100", capability=(9, 0), triton="3.7.1", tiles=TABLE.tiles),
        TileTable(gpu="NVIDIA H200", capability=(9, 0), triton="3.6.0", tiles=TABLE.tiles),
        TileTable(gpu="NVIDIA H200", capability=(9, 0), triton="3.7.1", tiles={}),
        TileTable(
            gpu="NVIDIA H200", capability=(9, 0), triton="3.7.1", tiles={**TABLE.tiles, SHAPE: Tiles(32, 256, 4)}
        ),
    ]
    assert len({table.digest for table in (TABLE, *others)}) == 5
    reordered = TileTable(
        gpu="NVIDIA H200", capability=(9, 0), triton="3.7.1", tiles=dict(reversed(TABLE.tiles.items()))
    )
    assert reordered.digest == TABLE.digest


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tiles": []}, "its digest is"),
        ({"gpu": "NVIDIA H100"}, "its digest is"),
        ({"digest": None}, "the file says None"),
        ({"tiles": [{"weight": [4096, 4096]}]}, "KeyError"),
        ({"tiles": [{"weight": [4096], "tile_outputs": 64, "tile_inputs": 128, "tile_splits": 1}]}, "no tiles"),
        (
            {"tiles": [{"weight": [64, 64], "tile_outputs": 48, "tile_inputs": 128, "tile_splits": 1}]},
            "must be powers of two of 16 or more",
        ),
        ({"tiles": [{"weight": [64, 64], "tile_outputs": "64", "tile_inputs": 128, "tile_splits": 1}]}, "no tiles"),
        ({"capability": 9}, "damaged"),
    ],
)
def test_a_damaged_table_is_refused_with_what_is_wrong(tmp_path, changes, reason):
    path = changed(tmp_path / "table.json", **changes)
    with pytest.raises(ConfigError, match="is no table of tiles or damaged") as caught:
        TileTable.read(path)
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)
    assert 'make it anew with "forerun tune-kernels"' in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"', b"\xff\xfe"])
def test_what_is_no_table_is_refused(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="is no table of tiles or damaged"):
        TileTable.read(path)


def test_a_table_of_a_later_format_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has format 2, must be 1"):
        TileTable.read(changed(tmp_path / "table.json", format=2))
    with pytest.raises(ConfigError, match="has format True, must be 1"):
        TileTable.read(changed(tmp_path / "table.json", format=True))


def test_a_table_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read .*; check the path"):
        TileTable.read(tmp_path / "none.json")


def test_a_table_is_for_its_gpu_and_its_triton_alone():
    TABLE.check_fits(H200, "3.7.1", source="table.json")
    with pytest.raises(
        ConfigError,
        match=r"table\.json: is for NVIDIA H200 \(capability 9\.0\) with triton 3\.7\.1, here is NVIDIA A100 \(capability 8\.0\)",
    ):
        TABLE.check_fits(A100, "3.7.1", source="table.json")
    with pytest.raises(ConfigError, match=r"here is .* with triton 3\.6\.0; make one with"):
        TABLE.check_fits(H200, "3.6.0", source="table.json")


def test_products_are_cut_by_the_table_in_use_and_by_the_rule_elsewhere():
    assert tiles_of(*SHAPE) == rule_of(*SHAPE)
    use_table(TABLE)
    assert tiles_of(*SHAPE) == Tiles(32, 256, 2)
    assert tiles_of(576, 1536) == rule_of(576, 1536)
    use_table(TABLE)  # another engine with the same


@pytest.mark.parametrize(("first", "second"), [(TABLE, None), (None, TABLE)])
def test_two_engines_of_one_process_cannot_cut_otherwise(first, second):
    use_table(first)
    before = tiles_of(*SHAPE)
    with pytest.raises(ConfigError, match="an engine in this process uses table"):
        use_table(second)
    assert tiles_of(*SHAPE) == before


def test_a_cut_that_is_measured_is_forgotten_afterwards():
    use_table(TABLE)
    for shape in (SHAPE, (64, 64)):
        before = tiles_of(*shape)
        with tiles_instead(shape, Tiles(16, 16, 1)):
            assert tiles_of(*shape) == Tiles(16, 16, 1)
        assert tiles_of(*shape) == before
