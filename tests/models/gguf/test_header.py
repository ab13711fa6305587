"""Headers of GGUF files, whole and damaged."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ModelError
from forerun.models.gguf import header as header_module
from forerun.models.gguf.header import read_header
from forerun.models.gguf.types import TENSOR_TYPES
from tests.gguf_bytes import ARRAY, CODES, F32, STRING, U32, U64, Key, Tensor, gguf_bytes, text

ARCHITECTURE = Key("general.architecture", STRING, "llama")


def read(tmp_path, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return read_header(path)


def refusal(tmp_path, content):
    with pytest.raises(ModelError) as found:
        read(tmp_path, content)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_keys_of_each_type_are_read(tmp_path):
    metadata = read(
        tmp_path,
        gguf_bytes(
            [
                ARCHITECTURE,
                Key("a", U32, 7),
                Key("b", F32, 0.5),
                Key("c", 7, True),
                Key("d", 5, -3),
                Key("e", U64, 1 << 40),
            ]
        ),
    ).metadata
    assert metadata.text("general.architecture") == "llama"
    assert (metadata.integer("a"), metadata.number("b"), metadata.flag("c", False)) == (7, 0.5, True)
    assert (metadata.number("d"), metadata.integer("e"), metadata.integer("absent", 5)) == (-3.0, 1 << 40, 5)


@given(words=st.lists(st.text(max_size=20), max_size=30))
def test_arrays_of_strings_come_back(tmp_path_factory, words):
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    path.write_bytes(gguf_bytes([Key("words", ARRAY, words, STRING), Key("after", U32, 1)]))
    metadata = read_header(path).metadata
    assert (metadata.strings("words"), metadata.count("words"), metadata.integer("after")) == (words, len(words), 1)
    sought = {"a", *words[:3]} - {""}
    assert metadata.places("words", sought) == {word: words.index(word) for word in sought if word in words}


@pytest.mark.parametrize("kind", CODES)
def test_arrays_of_numbers_come_back(tmp_path, kind):
    found = read(tmp_path, gguf_bytes([Key("x", ARRAY, [0, 1, 1], kind)])).metadata.numbers("x")
    assert np.array_equal(found, [0, 1, 1])


def test_tensors_have_torchs_shapes_and_their_places(tmp_path):
    tensors = [Tensor("a", [32, 3], 8), Tensor("b", [4], 0, offset=128)]
    first, second = read(tmp_path, gguf_bytes(tensors=tensors, data=bytes(160))).tensors
    assert (first.name, first.shape, first.type.name, first.num_bytes) == ("a", (3, 32), "Q8_0", 3 * 34)
    assert (second.shape, second.start - first.start, second.num_bytes) == ((4,), 128, 16)


def test_the_types_are_those_of_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    sizes = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert sizes == {number: (kind.name, kind.weights, kind.bytes) for number, kind in TENSOR_TYPES.items()}


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match="there is no such file"):
        read_header(tmp_path / "absent.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + bytes(100)])
def test_another_kind_of_file_is_refused(tmp_path, content):
    assert "not a GGUF file" in refusal(tmp_path, content)


DAMAGES = {
    "only the magic": (b"GGUF", "after the file's end"),
    "version 1": (gguf_bytes(version=1), "GGUF version 1; may be 2, 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "endless keys": (gguf_bytes(num_keys=1 << 63), "promises 9223372036854775808 keys"),
    "more keys than bytes": (gguf_bytes(num_keys=50), "promises 50 keys"),
    "endless tensors": (gguf_bytes(num_tensors=(1 << 64) - 1), "promises 18446744073709551615 tensors"),
    "a key twice": (gguf_bytes([Key("a", U32, 1), Key("a", U32, 2)]), "key 'a' is there twice"),
    "a key of an unknown type": (gguf_bytes([Key("a", U32, 1)]).replace(b"a\x04", b"a\x63"), "unknown type 99"),
    "an endless key": (
        gguf_bytes([Key("a", U32, 1)]).replace(text("a"), struct.pack("<Q", 1 << 62) + b"a"),
        "bytes; must have",
    ),
    "a key that is not UTF-8": (gguf_bytes([Key("ab", U32, 1)]).replace(b"ab", b"\xff\xfe"), "not UTF-8"),
    "an endless text": (
        gguf_bytes([Key("a", STRING, "xyz")]).replace(text("xyz"), struct.pack("<Q", 1 << 50) + b"xyz"),
        "at most",
    ),
    "an endless array": (
        gguf_bytes([Key("a", ARRAY, [1], U32)]).replace(struct.pack("<IQ", U32, 1), struct.pack("<IQ", U32, 1 << 61)),
        "after the file's end",
    ),
    "endless strings": (
        gguf_bytes([Key("a", ARRAY, ["x"], STRING)]).replace(
            struct.pack("<IQ", STRING, 1), struct.pack("<IQ", STRING, 1 << 61)
        ),
        "strings",
    ),
    "a string beyond the file": (
        gguf_bytes([Key("a", ARRAY, ["xyz"], STRING)]).replace(text("xyz"), struct.pack("<Q", 1 << 61) + b"xyz"),
        "after the file's end",
    ),
    "an array of arrays": (gguf_bytes([Key("a", ARRAY, [], ARRAY)]), "array of type 9"),
    "an odd alignment": (gguf_bytes([Key("general.alignment", U32, 3)]), "power of two"),
    "an alignment in floating point": (
        gguf_bytes([Key("general.alignment", F32, 32.0)]),
        "got 32.0; must be a power of",
    ),
    "no alignment": (gguf_bytes([Key("general.alignment", U32, 0)]), "power of two"),
    "a tensor twice": (
        gguf_bytes(tensors=[Tensor("a", [8]), Tensor("a", [8], offset=32)], data=bytes(64)),
        "there twice",
    ),
    "a tensor beyond the file": (gguf_bytes(tensors=[Tensor("a", [9])], data=bytes(32)), "after the file's end"),
    "a tensor of endless size": (
        gguf_bytes(tensors=[Tensor("a", [1 << 40] * 4)], data=bytes(32)),
        "after the file's end",
    ),
    "a tensor without elements": (gguf_bytes(tensors=[Tensor("a", [0, 4])]), "impossible shape"),
    "five dimensions": (gguf_bytes(tensors=[Tensor("a", [1] * 5)], data=bytes(32)), "5 dimensions"),
    "a part of a block": (gguf_bytes(tensors=[Tensor("a", [33], 8)], data=bytes(64)), "impossible shape"),
    "an unaligned tensor": (gguf_bytes(tensors=[Tensor("a", [1], offset=4)], data=bytes(64)), "no multiple of 32"),
    "tensors that overlap": (
        gguf_bytes(tensors=[Tensor("a", [16]), Tensor("b", [8], offset=32)], data=bytes(64)),
        "'a' and 'b' overlap",
    ),
    "a tensor of an unknown type": (
        gguf_bytes(tensors=[Tensor("a", [1], 77)], data=bytes(32)),
        "unknown type 77; may be F32, F16",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_in_one_line(tmp_path, damage):
    content, said = DAMAGES[damage]
    assert said in refusal(tmp_path, content)


def test_a_header_cut_anywhere_is_refused(tmp_path):
    whole = gguf_bytes(
        [ARCHITECTURE, Key("a", ARRAY, ["x", "yz"], STRING), Key("b", ARRAY, [1, 2], U32)],
        [Tensor("t", [8])],
        data=bytes(32),
    )
    for end in range(4, len(whole)):
        assert "damaged GGUF" in refusal(tmp_path, whole[:end])


def test_texts_are_bounded_in_sum(tmp_path, monkeypatch):
    monkeypatch.setattr(header_module, "MOST_TEXT_BYTES", 10)
    read(tmp_path, gguf_bytes([Key("a", STRING, "12345"), Key("b", STRING, "12345")]))
    assert "at most" in refusal(tmp_path, gguf_bytes([Key("a", STRING, "12345"), Key("b", STRING, "123456")]))


def test_texts_are_bounded_by_their_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(header_module, "MOST_TEXT_BYTES", 10)
    assert "at most" in refusal(tmp_path, gguf_bytes([Key("a", STRING, "ééé"), Key("b", STRING, "ééé")]))


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda metadata: metadata.integer("absent"), "has no absent"),
        (lambda metadata: metadata.integer("text"), "got 'x'; must be a whole number"),
        (lambda metadata: metadata.integer("negative"), "got -1; must be a whole number"),
        (lambda metadata: metadata.number("nan"), "must be a number"),
        (lambda metadata: metadata.flag("text", True), "must be true or false"),
        (lambda metadata: metadata.text("words"), "got an array of 2; must be a text"),
        (lambda metadata: metadata.strings("text"), "must be an array"),
        (lambda metadata: metadata.strings("numbers"), "must be an array of at most"),
        (lambda metadata: metadata.numbers("words"), "must be an array of numbers"),
        (lambda metadata: metadata.below("own").integer("text"), "metadata own.text: got 'x'"),
    ],
)
def test_values_of_other_types_are_named(tmp_path, ask, said):
    metadata = read(
        tmp_path,
        gguf_bytes(
            [
                *(
                    Key("text", STRING, "x"),
                    Key("own.text", STRING, "x"),
                    Key("negative", 5, -1),
                    Key("nan", F32, float("nan")),
                ),
                *(Key("words", ARRAY, ["a", "b"], STRING), Key("numbers", ARRAY, [1], U32)),
            ]
        ),
    ).metadata
    with pytest.raises(ModelError, match=said):
        ask(metadata)
