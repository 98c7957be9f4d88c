"""compressed-tensors' packed formats: the numbers that its own reader gives, and the official ones where these are."""

import numpy as np
import pytest
import torch

from dsv4cli.engine.checkpoint.identify import identify, recognise
from dsv4cli.engine.checkpoint.naming import CompressedNaming
from dsv4cli.engine.checkpoint.stored import StoredModel
from dsv4cli.engine.checkpoint.values import decode
from dsv4cli.engine.config.storage import Formats
from dsv4cli.errors import UnsupportedCheckpoint
from tests.engine.weights.test_layouts import load, logits
from tests.support import damage
from tests.support.variants import GOLDEN, Arrays, recoded, write_variant

NVFP4 = Formats(experts="nvfp4")
MATRIX = "layers.1.ffn.experts.2.w1"


def any_nvfp4(name: str, old: str, raw: Arrays, new: str) -> Arrays:
    """NVFP4 that FP4 does not have: scales with every mantissa, no power of two for the whole."""
    made = recoded(name, old, raw, new)
    if new == "nvfp4":
        count = np.arange(made["weight_scale"].size).reshape(made["weight_scale"].shape)
        made["weight_scale"] = (0x20 + count * 7 % 0x3F).astype(np.uint8)
        made["weight_scale_2"] = np.array(0.0123, np.float32)
    return made


@pytest.mark.parametrize(
    ("formats", "naming"),
    [
        pytest.param(NVFP4, CompressedNaming((), "U8"), marks=pytest.mark.slow),
        pytest.param(NVFP4, CompressedNaming((1,), "U8"), marks=pytest.mark.slow),
        (Formats(), CompressedNaming((), "U8")),
        pytest.param(Formats(), CompressedNaming((), "F8_E8M0"), marks=pytest.mark.slow),
    ],
    ids=["nvfp4", "nvfp4, scales of one", "mxfp4", "mxfp4 with typed scales"],
)
def test_it_runs_as_it_is(tmp_path, formats, naming):
    folder = write_variant(tmp_path, formats, naming)
    found = identify(folder)
    assert (found.layout, found.naming, found.formats) == ("compressed-tensors", naming, formats)
    assert torch.equal(logits(load(folder)), logits(load(GOLDEN)))


@pytest.mark.slow  # the package takes seconds to import
def test_the_numbers_are_those_of_its_own_reader(tmp_path):
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    folder = write_variant(tmp_path, NVFP4, CompressedNaming((1,), "U8"), encode=any_nvfp4)
    stored = {name: entry for name, entry in damage.read_shard(folder / "model.safetensors").items() if MATRIX in name}
    packed, scale, divisor = (stored[f"{MATRIX}.weight_{part}"] for part in ("packed", "scale", "global_scale"))
    rows, half = packed.shape
    codes = helpers.unpack_fp4_from_uint8(
        torch.frombuffer(bytearray(packed.data), dtype=torch.uint8).view(rows, half), rows, 2 * half, torch.float32
    )
    scale = torch.frombuffer(bytearray(scale.data), dtype=torch.float8_e4m3fn).view(rows, -1).double()
    expected = codes.double() * (scale / np.frombuffer(divisor.data, np.float32)[0]).repeat_interleave(16, 1)
    with StoredModel(recognise(folder)) as model:
        parts = model.matrices()[MATRIX]
        found = torch.from_numpy(decode("nvfp4", {role: model.read(spec) for role, spec in parts.items()}))
    # 1 / x twice, and two products in fp32
    torch.testing.assert_close(found.double(), expected, rtol=2**-22, atol=0)
    assert expected.unique().numel() > 100


def test_the_config_may_say_so(tmp_path):
    folder = write_variant(tmp_path, NVFP4, CompressedNaming((), "U8"))
    for given, known in (("nvfp4-pack-quantized", True), ("mxfp4-pack-quantized", True), ("pack-quantized", False)):
        damage.edit_config(folder, quantization_config={"quant_method": "compressed-tensors", "format": given})
        if known:
            assert identify(folder).formats == NVFP4
        else:
            with pytest.raises(UnsupportedCheckpoint, match="a format other than NVFP4 and MXFP4"):
                identify(folder)


def test_a_divisor_of_zero_is_refused(tmp_path):
    folder = write_variant(tmp_path, NVFP4, CompressedNaming((), "U8"))
    file = folder / "model.safetensors"
    stored, name = damage.read_shard(file), f"{MATRIX}.weight_global_scale"
    damage.write_shard(file, stored | {name: damage.Stored("F32", [], bytes(4))})
    with pytest.raises(Exception, match="weight_scale_2 holds a scale that is not a positive number"):
        load(folder)
