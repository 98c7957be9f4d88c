"""MXFP4 experts of GGUF files loaded as FP4: the values that are decoded, from one read of each row."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4cli.engine.checkpoint.files import Files
from dsv4cli.engine.checkpoint.gguf.loading import loaded_table
from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.gguf.stored import GgufStoredModel
from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.world import SINGLE, World
from dsv4cli.engine.weights import read
from dsv4cli.engine.weights.fill import allocate, fill, local_slice
from dsv4cli.engine.weights.gguf import stored_gguf
from dsv4cli.engine.weights.load import load_model
from dsv4cli.errors import CheckpointError
from tests.engine.weights.test_gguf_load import parameters, stage
from tests.support.gguf_models import DS4, write_nano

EXPERTS = {r"ffn_.*_exps": "MXFP4"} | DS4
# a matrix of nano's experts has 34,816 bytes: in two pieces, alone, and many in a piece
PIECES = [20_000, 40_000, 1_000_000]
# a gate matrix of layer 2: bytes of an expert and of a row
EXPERT, ROW = 256 * 136, 136


def write(folder: Path, parts: int = 1) -> GgufIdentity:
    path, _ = write_nano(folder, EXPERTS, parts=parts)
    return FolderSource("test", path).identity


def check(identity: GgufIdentity, world: World, device: str = "cpu") -> None:
    """Compares the parameters of a rank with what `GgufStoredModel` decodes."""
    found, compared = parameters(identity, device, world), 0
    with GgufStoredModel(identity) as model:
        for spec in loaded_table(identity).values():
            if spec.form == "fp4":
                expected = torch.from_numpy(np.ascontiguousarray(model.read(spec)[local_slice(spec, world)]))
                assert torch.equal(found[spec.parameter][spec.expert].view(torch.uint8), expected), spec.name
                compared += 1
    assert compared == 2 * 3 * identity.config.num_hidden_layers * identity.config.n_routed_experts


@pytest.mark.parametrize("world", [SINGLE, World(1, 2)])
@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("way", ["strips", "staged"])
def test_experts_have_the_values_that_are_decoded(tmp_path, monkeypatch, way, piece, world):
    identity = write(tmp_path, parts=3 if piece == PIECES[0] else 1)
    if way == "staged":
        stage(monkeypatch, piece)
    else:
        monkeypatch.setattr(read, "PIECE", piece)
        monkeypatch.setattr(read, "STRIP", piece // 3)
    check(identity, world)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [SINGLE, World(1, 2)])
@pytest.mark.parametrize("piece", [*PIECES, read.PIECE])
def test_experts_on_a_gpu_have_the_values_that_are_decoded(tmp_path, monkeypatch, piece, world):
    monkeypatch.setattr(read, "PIECE", piece)
    check(write(tmp_path), world, "cuda")


@pytest.mark.gpu
def test_loading_to_a_gpu_needs_little_memory(tmp_path, monkeypatch):
    identity = write(tmp_path)
    table, model = loaded_table(identity), Transformer(identity.config, Numerics.reference(), SINGLE)
    monkeypatch.setattr(read, "PIECE", 1_000_000)
    torch.cuda.reset_peak_memory_stats()
    fill(model, table, stored_gguf(identity, table.values(), SINGLE), device="cuda", world=SINGLE)
    # two copies of a piece, and masks of its blocks
    assert torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() <= 2.5 * read.PIECE


def test_experts_in_host_memory_share_a_buffer_with_others(tmp_path, monkeypatch):
    identity = write(tmp_path)
    # codes of w2, which has other columns than w1 and w3
    stage(monkeypatch, 1_000_000, besides=128)
    check(identity, SINGLE)


@pytest.mark.parametrize("way", ["strips", "staged"])
def test_each_row_is_read_once(tmp_path, monkeypatch, way):
    identity, places, whole = write(tmp_path), list[tuple[int, int]](), Files.read
    if way == "staged":
        stage(monkeypatch, 1_000_000)

    def counted(files, info, begin, into):
        if "_exps" in info.name:
            places.append((info.begin + begin, len(into)))
        whole(files, info, begin, into)

    monkeypatch.setattr(Files, "read", counted)
    parameters(identity)
    places.sort()
    # no range overlaps the next one
    assert all(begin + size <= after for (begin, size), (after, _) in pairwise(places))
    stored = sum(info.nbytes for name, info in identity.checkpoint.tensors.items() if "_exps" in name)
    assert sum(size for _, size in places) == stored


@pytest.mark.parametrize("way", ["strips", "staged", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_scale_that_is_not_a_number_is_refused_by_name(tmp_path, monkeypatch, way):
    identity = write(tmp_path)
    if way == "staged":
        stage(monkeypatch, 1_000_000)
    info = identity.checkpoint.tensors["blk.2.ffn_gate_exps.weight"]
    with info.file.open("r+b") as file:
        file.seek(info.begin + 5 * EXPERT + 7 * ROW + 3 * 17)  # a block of expert 5
        file.write(b"\xff")
    with pytest.raises(
        CheckpointError,
        match=r"^layers\.2\.ffn\.experts\.5\.w1\.scale holds the scale byte 255 \(not a number\)$",
    ):
        load_model(FolderSource("test", info.file), Numerics.reference(), device="cuda" if way == "gpu" else "cpu")


@pytest.mark.parametrize("way", ["strips", "staged"])
def test_progress_counts_weights_and_scales(tmp_path, monkeypatch, way):
    identity = write(tmp_path)
    if way == "staged":
        stage(monkeypatch, 20_000)
    table = loaded_table(identity)
    model = Transformer(identity.config, Numerics.reference(), SINGLE)
    destinations = allocate(model, table, torch.device("cpu"), SINGLE)
    arrived = dict.fromkeys(destinations, 0)
    for name, nbytes in stored_gguf(identity, table.values(), SINGLE)(destinations):
        arrived[name] += nbytes
    assert arrived == {name: destination.nbytes for name, destination in destinations.items()}
