"""`forerun models`, in a cache folder of its own."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from forerun.cli.app import main
from forerun.models import store
from forerun.models.download import Progress, Report
from forerun.models.store import KNOWN_MODELS

NAME = next(iter(KNOWN_MODELS))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def pulled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were pulled; nothing is fetched."""
    names: list[str] = []

    def pull(name: str, *, report: Report) -> Path:
        names.append(name)
        report(Progress("download", 1, 2))
        return cache / "models" / name

    monkeypatch.setattr(store, "pull", pull)
    return names


def test_list_shows_name_licence_and_state(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list"]) == 0
    output = capsys.readouterr().out
    assert all(word in output for word in (NAME, "Apache-2.0", "absent"))


def test_list_shows_whole_names_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["models", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in KNOWN_MODELS)


def test_list_has_a_line_for_each_model_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *KNOWN_MODELS]


def test_list_as_json_is_one_line(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["models", "list", "--json"])
    output = capsys.readouterr().out
    found = {row["name"]: (row["state"], row["path"]) for row in json.loads(output)["models"]}
    assert output.count("\n") == 1
    assert found == {name: ("absent", str(cache / "models" / name)) for name in KNOWN_MODELS}


def test_path_is_the_bare_folder(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["models", "path", NAME])
    assert capsys.readouterr().out == f"{cache / 'models' / NAME}\n"


def test_pull_says_where_the_model_is(cache: Path, pulled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "pull", NAME]) == 0
    assert pulled == [NAME]
    assert str(cache / "models" / NAME) in capsys.readouterr().out


def test_pull_as_json_is_one_line(pulled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["models", "pull", NAME, "--json"])
    assert json.loads(capsys.readouterr().out)["state"] == "ready"


def test_unknown_name_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "pull", "smollm2-135"]) == 2
    assert f"did you mean '{NAME}'" in capsys.readouterr().err


@pytest.fixture
def packed(cache: Path) -> Path:
    """A file of packed weights that is damaged."""
    path = cache / "packed" / "model-int8-avx2-0123456789abcdef.packed"
    path.parent.mkdir()
    path.write_bytes(b"damaged")
    return path


def test_prune_says_what_it_removes_and_why(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "prune"]) == 0
    assert not packed.exists()
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{packed.name}: 7 bytes removed; it is damaged")
    assert last == f"0 bytes of packed weights are left in {packed.parent}"


def test_prune_says_what_is_left_unfinished(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (packed.parent / f".{packed.name}.0123").write_bytes(b"half")
    assert main(["models", "prune"]) == 0
    left, unfinished = capsys.readouterr().out.splitlines()[-2:]
    assert left.startswith("4 bytes of packed weights are left")
    assert unfinished.startswith("4 bytes of them are being written now, or go an hour after")


def test_packed_weights_that_may_not_be_removed_are_named_with_what_to_do(
    packed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert main(["models", "prune"]) == 2
    said = capsys.readouterr().err
    assert f"cannot be removed ([Errno 13] Permission denied: '{packed}')" in said
    assert f"run this as a user who may write to {packed.parent}" in said


@pytest.mark.parametrize("below", ["", "cache"])
@pytest.mark.parametrize("command", ["list", "prune"])
def test_a_cache_folder_that_is_a_file_is_named(
    command: str, below: str, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = cache / "file"
    file.write_text("")
    monkeypatch.setenv("FORERUN_CACHE", str(file / below))
    assert main(["models", command]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        f"error: cache folder {file / below} cannot be used: {file} is not a folder; "
        "set FORERUN_CACHE to a folder that you may write\n"
    )


@pytest.mark.parametrize("command", ["list", "prune"])
def test_a_cache_folder_that_is_not_there_yet_is_empty(
    command: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(cache / "one" / "two"))
    assert main(["models", command]) == 0
    assert list(cache.iterdir()) == []


def test_prune_as_json_is_one_line(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "prune", "--all", "--json"]) == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    found = json.loads(output)
    assert (found["folder"], found["bytes_left"]) == (str(packed.parent), 0)
    assert [(file["name"], file["num_bytes"]) for file in found["removed"]] == [(packed.name, 7)]
