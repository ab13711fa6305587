"""The cells of a run, their contenders, and their order."""

from __future__ import annotations

from benchmarks.peers.engines import CONTENDERS, PEERS, contenders_of, plain_contender
from benchmarks.peers.prompts import PromptSets
from benchmarks.peers.schedule import make_cells, one_of_each_kind, turn

PROMPTS = PromptSets(
    code=[[1] * 300, [2] * 300], chat=[[3], [4]], plain=[[1] * 96, [2] * 96], prefill=[[1] * 512, [2] * 512]
)


def test_eight_sequences_are_decoded_together_however_few_prompts_there_are():
    (batch,) = (cell for cell in make_cells(PROMPTS) if cell.kind == "batch")
    assert len(batch.arguments["prompts"]) == 8


def test_speculation_is_measured_on_texts_only():
    speculating = next(one for one in CONTENDERS if one.speculation)
    assert {cell.kind for cell in make_cells(PROMPTS) if cell.concerns(speculating)} == {"code", "chat"}


def test_plain_decoding_is_measured_on_all():
    cells = make_cells(PROMPTS)
    assert all(cell.concerns(plain_contender("forerun")) for cell in cells)


def test_warming_up_takes_the_first_cell_of_each_kind():
    first = one_of_each_kind(make_cells(PROMPTS))
    assert [(cell.kind, cell.index) for cell in first] == [
        (kind, 0) for kind in ("plain", "batch", "prefill", "curve", "code", "chat")
    ]


def test_turns_go_there_and_back():
    assert (turn("abc", 0), turn("abc", 1)) == (["a", "b", "c"], ["c", "b", "a"])


def test_every_peer_decodes_plainly_too():
    assert {plain_contender(name).peer for name in PEERS} == set(PEERS)


def test_forerun_takes_part_with_any_peers():
    assert {one.peer for one in contenders_of(["vllm"])} == {"forerun", "vllm"}
