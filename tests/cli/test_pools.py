"""`forerun pools` shows and copies files of pools, and names what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from forerun.cli.app import main
from forerun.drafters.pool_files import ModelIdentity, SavedPools, file_of, read_pools, write_pools
from forerun.models.fingerprint import fingerprint_of_files
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", seed=1, vocab_size=97)


def saved(folder: Path, model: Path, **kinds: dict[str | None, int]) -> Path:
    identity = ModelIdentity(fingerprint=fingerprint_of_files(model), name=model.name)
    sections = {
        kind: {salt: {"tokens": np.full(count, 3, np.int32)} for salt, count in salts.items()}
        for kind, salts in kinds.items()
    }
    write_pools(file_of(folder, identity), SavedPools(model=identity, kinds=sections))
    return file_of(folder, identity)


def test_show_lists_kinds_salts_and_sizes(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved(tmp_path, model, suffix={None: 10, "a": 20}, recycle={None: 5})
    assert main(["pools", "show", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    rows = {row["kind"]: (row["num_salts"], row["num_bytes"]) for row in shown["pools"]}
    assert rows == {"suffix": (1, 120), "recycle": (0, 20)}
    assert {row["file"] for row in shown["pools"]} == {str(file)}
    assert main(["pools", "show", str(file)]) == 0
    assert "suffix" in capsys.readouterr().out


def test_show_names_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.pools").write_bytes(b"nonsense")
    assert main(["pools", "show", str(tmp_path), "--json"]) == 0
    (problem,) = json.loads(capsys.readouterr().out)["unusable"]
    assert "x.pools" in problem


def test_a_path_is_shown_as_it_is_whatever_it_is_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "one[" / "a]"
    folder.mkdir(parents=True)
    (folder / "x.pools").write_bytes(b"nonsense")
    assert main(["pools", "show", str(folder)]) == 0
    assert "one[/a]/x.pools:" in "".join(capsys.readouterr().out.split())


def test_a_folder_may_be_named_from_home_as_where_it_is_served(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    saved(tmp_path / "one", model, suffix={None: 10})
    file = str(tmp_path / "warm.pools")
    assert main(["pools", "export", str(model), file, "--pools-folder=~/one"]) == 0
    assert main(["pools", "import", str(model), file, "--pools-folder=~/two"]) == 0
    capsys.readouterr()
    assert main(["pools", "show", "~/two", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["pools"]
    assert Path(row["file"]).parent == tmp_path / "two"


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_another_file_is_refused_and_nobody_is_told_to_delete_it(
    as_json: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text("echo hello\n")
    assert main(["pools", "show", str(tmp_path / "run.sh"), *as_json]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "run.sh: no file of pools" in output.err
    assert "delete" not in output.err


def test_pools_move_from_folder_to_folder(tmp_path: Path, model: Path) -> None:
    saved(tmp_path / "one", model, suffix={None: 10, "a": 20})
    other = saved(tmp_path / "two", model, recycle={None: 5}, suffix={None: 1})
    file = tmp_path / "warm.pools"
    assert main(["pools", "export", str(model), str(file), "--pools-folder", str(tmp_path / "one")]) == 0
    assert main(["pools", "import", str(model), str(file), "--pools-folder", str(tmp_path / "two")]) == 0
    kinds = read_pools(other).kinds
    assert kinds.keys() == {"recycle", "suffix"}
    assert [len(arrays["tokens"]) for arrays in kinds["suffix"].values()] == [10, 20]


def test_a_damaged_file_in_the_folder_is_put_aside_by_an_import(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path / "from", model, suffix={None: 10})
    there = saved(tmp_path / "to", model, recycle={None: 5})
    damaged = there.read_bytes()[:-3]
    there.write_bytes(damaged)
    assert main(["pools", "import", str(model), str(file), "--pools-folder", str(tmp_path / "to")]) == 0
    assert f"it lies in {there.with_suffix('.unusable')} now" in capsys.readouterr().err
    assert there.with_suffix(".unusable").read_bytes() == damaged
    assert read_pools(there).kinds.keys() == {"suffix"}


def test_export_can_leave_out_what_salts_keep_apart(tmp_path: Path, model: Path) -> None:
    saved(tmp_path, model, suffix={None: 10, "a": 20}, recycle={"a": 5})
    file = tmp_path / "warm.pools"
    main(["pools", "export", str(model), str(file), "--pools-folder", str(tmp_path), "--shared-only"])
    assert [list(sections) for sections in read_pools(file).kinds.values()] == [[None]]


def test_pools_of_another_model_are_not_taken_in(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny_model(tmp_path / "other", "LlamaForCausalLM", seed=2, vocab_size=97)
    file = saved(tmp_path, other, suffix={None: 10})
    assert main(["pools", "import", str(model), str(file), "--pools-folder", str(tmp_path / "two")]) == 2
    assert "weights or tokenizer differ" in capsys.readouterr().err
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nowhere"], "PATH: got nowhere, which is not there"),
        (["export", "{model}", "x.pools", "--pools-folder", "nowhere"], "no pools of"),
        (["import", "{model}", "x.pools", "--pools-folder", "nowhere"], "x.pools: there is no such file"),
        (["export", "{model}", "no/x.pools", "--pools-folder", "nowhere"], "give a file in a folder that exists"),
    ],
)
def test_what_is_not_there_is_named(
    arguments: list[str],
    message: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pools", *(argument.format(model=model) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err
