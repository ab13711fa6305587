"""Models in one GGUF file or in several parts."""

import shutil

import pytest

from forerun.errors import ModelError
from forerun.models.fingerprint import fingerprint_of_files
from forerun.models.gguf.file import open_gguf
from forerun.models.model_folder import find_gguf, gguf_parts
from tests.gguf_bytes import STRING, Key, Tensor, gguf_bytes

U16 = 2


def part(number, count, tensors, *, total=None, keys=()):
    found = [Key("split.no", U16, number), Key("split.count", U16, count), *keys]
    if total is not None:
        found.append(Key("split.tensors.count", 5, total))
    places = [Tensor(name, [8], offset=32 * i) for i, name in enumerate(tensors)]
    return gguf_bytes(found, places, data=bytes(32 * len(places)))


@pytest.fixture
def parts(tmp_path):
    """Three parts, the first with the metadata alone."""
    files = gguf_parts(tmp_path / "m-00001-of-00003.gguf")
    files[0].write_bytes(part(0, 3, [], total=3, keys=[Key("general.architecture", STRING, "llama")]))
    files[1].write_bytes(part(1, 3, ["a", "b"]))
    files[2].write_bytes(part(2, 3, ["c"]))
    return files


@pytest.mark.parametrize("named", [0, 1, 2])
def test_any_part_names_the_whole_model(parts, named):
    file = open_gguf(parts[named])
    assert file.architecture == "llama"
    assert {name: place.file for name, place in file.tensors.items()} == {"a": parts[1], "b": parts[1], "c": parts[2]}


def test_a_folder_of_parts_is_one_model(parts):
    assert find_gguf(parts[0].parent) == parts[0]


def test_a_folder_that_is_called_like_a_file_is_one_model(parts, tmp_path):
    folder = tmp_path / "m.gguf"
    folder.mkdir()
    for part in parts:
        part.rename(folder / part.name)
    assert find_gguf(folder) == folder / parts[0].name


def test_a_folder_of_parts_and_another_file_is_refused(parts):
    (parts[0].parent / "other.gguf").touch()
    with pytest.raises(ModelError, match="give the path of one"):
        find_gguf(parts[0].parent)


def test_a_missing_part_is_named(parts):
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"part m-00002-of-00003\.gguf is missing"):
        open_gguf(parts[0])


@pytest.mark.parametrize("target", [0, 2])
def test_parts_that_lead_back_to_each_other_are_refused(parts, target):
    parts[1].unlink()
    parts[1].symlink_to(parts[target])
    with pytest.raises(ModelError, match=f"holds part {target + 1} of 3, but its name says 2 of 3"):
        open_gguf(parts[0])


def test_a_part_of_another_split_is_refused(parts):
    parts[1].write_bytes(part(1, 5, ["a", "b"]))
    with pytest.raises(ModelError, match="holds part 2 of 5"):
        open_gguf(parts[0])


def test_a_tensor_in_two_parts_is_refused(parts):
    parts[2].write_bytes(part(2, 3, ["a"]))
    with pytest.raises(ModelError, match=r"tensor 'a' is in m-00002-of-00003\.gguf too"):
        open_gguf(parts[0])


def test_parts_with_too_few_tensors_are_refused(parts):
    parts[2].write_bytes(part(2, 3, []))
    with pytest.raises(ModelError, match="hold 2 tensors, but must hold 3"):
        open_gguf(parts[0])


def test_a_part_under_another_name_is_refused(parts):
    shutil.copy(parts[1], parts[1].with_name("renamed.gguf"))
    with pytest.raises(ModelError, match=r"is part 2 of 3; must be named like name-00002-of-00003\.gguf"):
        open_gguf(parts[1].with_name("renamed.gguf"))


@pytest.mark.parametrize("name", ["m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-00001-of-99999.gguf"])
def test_a_name_of_no_possible_part_is_refused(tmp_path, name):
    with pytest.raises(ModelError, match="rename the file"):
        open_gguf(tmp_path / name)


def test_a_file_that_was_written_again_is_read_again(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([Key("general.architecture", STRING, "llama")]))
    assert open_gguf(path).architecture == "llama"
    path.write_bytes(gguf_bytes([Key("general.architecture", STRING, "gemma3")]))
    assert open_gguf(path).architecture == "gemma3"


def test_what_is_inside_is_said_in_few_words(tmp_path):
    tensors = [*(Tensor(f"a{i}", [256], 12, offset=160 * i) for i in range(3)), Tensor("b", [256], 14, offset=480)]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([Key("general.file_type", 4, 15)], tensors, data=bytes(800)))
    assert open_gguf(path).describe() == "Q4_K_M: 3 tensors Q4_K, 1 Q6_K"


def test_the_fingerprint_is_that_of_all_parts(parts):
    before = fingerprint_of_files(parts[0])
    parts[2].write_bytes(part(2, 3, ["d"]))
    assert fingerprint_of_files(parts[0]) != before
