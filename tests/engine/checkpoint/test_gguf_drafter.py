"""The MTP drafter of a GGUF file: llama.cpp's block after the layers, or ds4's names; used if it is whole."""

import numpy as np
import pytest
import torch

from dsv4cli.engine.checkpoint.gguf.drafter import HalfInfo, split_drafter
from dsv4cli.engine.checkpoint.gguf.files import read_model
from dsv4cli.engine.checkpoint.gguf.header import gguf_header, tensor_places
from dsv4cli.engine.checkpoint.gguf.model import recognise_gguf
from dsv4cli.engine.checkpoint.gguf.stored import GgufStoredModel
from dsv4cli.engine.checkpoint.layouts import runnable
from tests.commands.run.test_gguf import EXACT
from tests.support.gguf_models import DS4, LLAMA, write_nano


def edit(path, change):
    """Write the file again with other tensors. change: a dict of type, shape and bytes by name, edited in place."""
    model = read_model(path)
    content = path.read_bytes()
    tensors = {
        name: (info.dtype, info.shape, content[info.begin : info.end])
        for name, info in model.checkpoint.tensors.items()
    }
    change(tensors)
    described = {name: (kind, shape) for name, (kind, shape, _) in tensors.items()}
    output = bytearray(gguf_header(model.metadata, described))
    start = len(output)
    for (begin, _), (_, _, raw) in zip(tensor_places(described), tensors.values(), strict=True):
        output += bytes(start + begin - len(output)) + raw
    path.write_bytes(output)


@pytest.mark.parametrize(
    ("names", "mix"), [("nextn", DS4), ("mtp", DS4), pytest.param("nextn", LLAMA, marks=pytest.mark.slow)]
)
def test_every_value_is_the_one_in_the_file(tmp_path, names, mix):
    path, values = write_nano(tmp_path, mix, drafter=names)
    found = runnable(recognise_gguf(path))
    assert (found.config.drafter, found.config.num_hidden_layers, found.assumptions) == ("mtp", 4, ())
    if names == "nextn":  # llama.cpp gives the block no hyper-head of its own
        values = values | {f"mtp.0.{name}": values[name] for name in ("hc_head_fn", "hc_head_base", "hc_head_scale")}
    read = 0
    with GgufStoredModel(found) as model:
        for spec in found.specs.values():
            if spec.name.startswith("mtp.") and spec.form != "fp4":
                raw = model.read(spec)
                wide = (raw.astype(np.uint32) << 16).view(np.float32) if spec.dtype == "BF16" else raw
                assert torch.equal(torch.from_numpy(np.array(wide)).reshape(values[spec.name].shape), values[spec.name])
                read += 1
    assert read >= 30


def test_the_fused_matrix_is_two_halves(tmp_path):
    path, _ = write_nano(tmp_path, EXACT, drafter="nextn")
    main, drafter = split_drafter(read_model(path).checkpoint.tensors)
    halves = [drafter.tensors[f"mtp.0.{letter}_proj.weight"] for letter in "eh"]
    assert all(isinstance(half, HalfInfo) for half in halves)
    assert (halves[0].begin, halves[0].shape) == (halves[1].begin, halves[1].shape)
    assert [half.half for half in halves] == [0, 1]
    assert not any(name.startswith(("mtp.", "blk.4.")) for name in main)
    # the norm of the main model stands in for one that the block lacks
    lacking = {name: info for name, info in read_model(path).checkpoint.tensors.items() if "shared_head" not in name}
    _, drafter = split_drafter(lacking)
    assert drafter.tensors["mtp.0.norm.weight"].name == "output_norm.weight"


def lose_norm(tensors):
    del tensors["blk.4.nextn.enorm.weight"]


def own_embedding(tensors):
    tensors["blk.4.nextn.embed_tokens.weight"] = tensors["token_embd.weight"]


def second_stage(tensors):
    tensors |= {name.replace("blk.4.", "blk.5."): entry for name, entry in tensors.items() if name.startswith("blk.4.")}


def unknown(tensors):
    tensors["blk.4.nextn.other.weight"] = tensors["blk.4.nextn.enorm.weight"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lose_norm, "enorm.weight is missing"),
        (own_embedding, "it has an embedding or a head of its own"),
        (second_stage, "it has 2 blocks, and dsv4 runs MTP drafters of one block"),
    ],
)
def test_a_drafter_that_is_not_whole_is_left_out_with_a_line(tmp_path, change, why):
    path, _ = write_nano(tmp_path, EXACT, drafter="nextn")
    edit(path, change)
    found = runnable(recognise_gguf(path))
    assert found.config.drafter == "none"
    assert found.assumptions[-1].startswith("its drafter (")
    assert found.assumptions[-1].endswith(f"tensors) is not used: {why}")
    assert not any(name.startswith(("mtp.", "blk.4.")) for name in found.checkpoint.tensors)


def test_a_tensor_of_the_drafter_that_nobody_knows_is_reported(tmp_path):
    path, _ = write_nano(tmp_path, EXACT, drafter="nextn")
    edit(path, unknown)
    found = recognise_gguf(path)
    assert "mtp.0.nextn.other.weight" in found.checkpoint.tensors
    assert found.config.drafter == "mtp"
