"""GGUF files, read: against the gguf package, and damaged in every place."""

import struct
from pathlib import Path

import numpy as np
import pytest

from dsv4cli.engine.checkpoint.gguf import header
from dsv4cli.engine.checkpoint.gguf.files import read_model
from dsv4cli.engine.checkpoint.gguf.header import gguf_header, read_gguf
from dsv4cli.errors import CheckpointError

METADATA = {
    "general.architecture": "deepseek4",
    "a.number": 7,
    "a.fraction": 1e-6,
    "a.switch": True,
    "a.list": [1, -2, 3],
    "a.list.of.fractions": [0.5, 10.0],
    "a.list.of.words": ["Ġt", "", "｜"],
    "an.empty.list": [],
}
TENSORS = {
    "vector": ("F32", (3,)),
    "blocks": ("MXFP4", (2, 5, 64)),
    "codes": ("Q8_0", (3, 32)),
    "wide": ("BF16", (4, 6)),
}


def write(path: Path, metadata=METADATA, tensors=TENSORS) -> bytes:
    places = header.tensor_places(tensors)
    content = gguf_header(metadata, tensors)
    content += np.random.default_rng(0).bytes(places[-1][1] if places else 0)
    path.write_bytes(content)
    return content


def test_a_header_comes_back(tmp_path):
    write(tmp_path / "a.gguf")
    found = read_gguf(tmp_path / "a.gguf")
    # a fraction has the 32 bits of the file
    assert found.metadata.pop("a.fraction") == pytest.approx(1e-6, rel=2**-24)
    assert found.metadata == {key: value for key, value in METADATA.items() if key != "a.fraction"}
    assert {info.name: (info.dtype, info.shape) for info in found.tensors} == TENSORS
    assert all(info.begin % header.ALIGNMENT == 0 for info in found.tensors)


def test_the_gguf_package_reads_the_same(tmp_path):
    gguf = pytest.importorskip("gguf")
    content = write(tmp_path / "a.gguf")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert reader.fields["a.list.of.words"].contents() == METADATA["a.list.of.words"]
    assert reader.fields["a.number"].types == [gguf.GGUFValueType.UINT32]
    assert reader.fields["a.list"].types[-1] == gguf.GGUFValueType.INT32
    ours = {info.name: info for info in read_gguf(tmp_path / "a.gguf").tensors}
    for tensor in reader.tensors:
        info = ours.pop(tensor.name)
        assert (tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist()))) == (info.dtype, info.shape)
        assert tensor.data.tobytes() == content[info.begin : info.end]
    assert not ours


def put(content: bytearray, offset: int, raw: bytes) -> bytearray:
    content[offset : offset + len(raw)] = raw
    return content


def replaced(old: bytes, new: bytes):
    def change(content: bytearray) -> bytearray:
        assert old in content
        return bytearray(bytes(content).replace(old, new, 1))

    return change


def aligned(content: bytearray, alignment: int) -> bytearray:
    """The file with one more key, whose length keeps the tensors where they were."""
    count = struct.unpack_from("<Q", content, 16)[0]
    key = struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, alignment)
    return put(content, 16, struct.pack("<Q", count + 1))[:24] + key + content[24:]


DAMAGE = {
    "is not a GGUF file": lambda content: put(content, 0, b"PK\3\4"),
    "is of GGUF version 9": lambda content: put(content, 4, struct.pack("<I", 9)),
    "is big-endian": lambda content: put(content, 4, struct.pack(">I", 3)),
    "keys": lambda content: put(content, 16, struct.pack("<Q", 1 << 40)),
    "of its header do not fit into it": lambda content: put(content, 8, struct.pack("<Q", 1 << 15)),
    "8 keys and 1152921504606846976 tensors": lambda content: put(content, 8, struct.pack("<Q", 1 << 60)),
    "is truncated": lambda content: content[:-40],
    "truncated or corrupt": lambda content: content[:50],
    "overlaps": lambda content: replaced(struct.pack("<IQ", 39, 32), struct.pack("<IQ", 39, 0))(content),
    "tensor type 77": lambda content: replaced(struct.pack("<IQ", 39, 32), struct.pack("<IQ", 77, 32))(content),
    "general.alignment is 48, not a power of two": lambda content: aligned(content, 48),
    "is longer than its header says": lambda content: content + bytes(64),
    "does not begin at the next aligned offset": lambda content: replaced(
        struct.pack("<IQ", 39, 32), struct.pack("<IQ", 39, 96)
    )(content + bytes(64)),
    "no whole MXFP4": lambda content: replaced(struct.pack("<IQQQ", 3, 64, 5, 2), struct.pack("<IQQQ", 3, 65, 5, 2))(
        content
    ),
    "9 dimensions": lambda content: replaced(struct.pack("<IQQQ", 3, 64, 5, 2), struct.pack("<IQQQ", 9, 64, 5, 2))(
        content
    ),
    "appears twice": lambda content: replaced(b"a.number", b"a.switch")(content),
    "a value of type 66": lambda content: replaced(
        b"a.number" + struct.pack("<I", 4), b"a.number" + struct.pack("<I", 66)
    )(content),
    "a list of type 9": lambda content: replaced(struct.pack("<IIQ", 9, 5, 3), struct.pack("<IIQ", 9, 9, 3))(content),
    "a name of": lambda content: put(content, 24, struct.pack("<Q", 1 << 13)) + bytes(1 << 14),
}


@pytest.mark.parametrize("sentence", DAMAGE)
def test_damage_is_named(tmp_path, sentence):
    content = DAMAGE[sentence](bytearray(write(tmp_path / "a.gguf")))
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        read_gguf(tmp_path / "a.gguf")
    assert str(tmp_path / "a.gguf") in caught.value.message


def test_every_cut_is_noticed(tmp_path):
    content = write(tmp_path / "a.gguf")
    for length in (*range(0, 400, 7), len(content) - 1):
        (tmp_path / "a.gguf").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"a\.gguf"):
            read_gguf(tmp_path / "a.gguf")


def parts(folder: Path, numbers=(0, 1), count=2):
    for place, number in enumerate(numbers):
        name = f"m-{place + 1:05}-of-{count:05}.gguf"
        said = {"split.no": number, "split.count": count, "split.tensors.count": 2}
        write(folder / name, {**METADATA, **said} if number == 0 else said, {f"t{place}": ("F32", (4,))})


def test_files_that_count_themselves_are_one_model(tmp_path):
    parts(tmp_path)
    for path in (tmp_path, tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"):
        found = read_model(path)
        assert [*found.checkpoint.tensors] == ["t0", "t1"]
        assert found.metadata["a.number"] == 7


def test_a_file_that_is_missing_or_of_another_place_is_named(tmp_path):
    parts(tmp_path, (0, 0))
    with pytest.raises(CheckpointError, match=r"00002.* has part number 1, but its name says 2"):
        read_model(tmp_path)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf is missing"):
        read_model(tmp_path)


def test_of_two_models_one_must_be_named(tmp_path):
    write(tmp_path / "a.gguf")
    write(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match="holds 2 GGUF models") as caught:
        read_model(tmp_path)
    assert str(tmp_path / "a.gguf") in str(caught.value.remedy)
    assert read_model(tmp_path / "b.gguf").checkpoint.tensors.keys() == TENSORS.keys()
