"""FP4 and NVFP4 codes and e8m0 scales under other dtypes of a header, which have the same bytes."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4cli.engine.checkpoint.coverage import check_coverage
from dsv4cli.engine.checkpoint.identify import identify
from dsv4cli.engine.checkpoint.matrix import stored_matrices
from dsv4cli.engine.checkpoint.opening import open_stored
from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.weights.load import load_model
from tests.support import damage
from tests.support.conversions import run, stored
from tests.support.damage import Stored
from tests.support.program import inside
from tests.support.slow import slow, slow_except

FLASH = damage.GOLDEN / "tiny-flash"
NVFP4 = Formats("fp8", "nvfp4", "bf16", draft_experts="fp4")
CODES = ("I8", "U8", "F4")


def renamed(*pairs: tuple[str, str], where: str = "") -> Callable[[str, Stored], dict[str, Stored]]:
    """Tensors of one dtype called another, in names that hold `where`."""
    wanted = dict(pairs)

    def change(name: str, one: Stored) -> dict[str, Stored]:
        dtype = wanted.get(one.dtype, one.dtype) if where in name else one.dtype
        shape = [*one.shape[:-1], 2 * one.shape[-1]] if dtype == "F4" != one.dtype else one.shape
        return {name: replace(one, dtype=dtype, shape=shape)}

    return change


VARIANTS = {
    "u8": (renamed(("I8", "U8")), ("the fp4 codes of 108 matrices are stored as U8",)),
    "f4": (renamed(("I8", "F4")), ("the fp4 codes of 108 matrices are stored as F4",)),
    "some u8": (renamed(("I8", "U8"), where="layers.0."), ("the fp4 codes of 18 matrices are stored as U8",)),
    "drafter f4": (renamed(("I8", "F4"), where="mtp."), ("the fp4 codes of 18 matrices are stored as F4",)),
    "scales u8": (renamed(("F8_E8M0", "U8")), ("160 e8m0 scales are stored as U8",)),
    "all u8": (renamed(("I8", "U8"), ("F8_E8M0", "U8")), ("the fp4 codes of 108", "160 e8m0 scales")),
}


@pytest.mark.parametrize("name", slow_except(("f4", "some u8"), VARIANTS))
def test_it_loads_as_it_is_and_says_what_the_file_has(tmp_path, name):
    change, notes = VARIANTS[name]
    folder = damage.copy_checkpoint(tmp_path)
    damage.rewrite(folder, change)
    found, usual = identify(folder), identify(FLASH)
    assert (found.formats, found.layout) == (usual.formats, "official")
    check_coverage(found.checkpoint, found.stored_table).raise_if_incomplete()
    assert len(found.aliases) == len(notes)
    assert all(words in said for words, said in zip(notes, found.aliases, strict=True))
    ours, theirs = (
        dict(load_model(FolderSource("m", path), Numerics.reference()).named_parameters()) for path in (folder, FLASH)
    )
    assert ours.keys() == theirs.keys()
    for key, parameter in ours.items():
        assert parameter.dtype == theirs[key].dtype
        first, second = (one.data.reshape(-1).view(torch.uint8) for one in (parameter, theirs[key]))
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", [*slow("f4"), "all u8"])
def test_commands_take_it(tmp_path, name):
    folder = damage.copy_checkpoint(tmp_path)
    damage.rewrite(folder, VARIANTS[name][0])
    done = inside("inspect", str(folder))
    assert done.exit_code == 0
    assert f"are stored as {name[-2:].upper()}, which has the same" in " ".join(done.stdout.split())
    assert inside("inspect", str(folder), "--values", "full").exit_code == 0
    assert "of 272 matrices" not in inside("inspect", str(folder), "--diff", str(FLASH)).stdout
    view = inside("inspect", str(folder), "--tensor", "layers.1.ffn.experts.2.w1").stdout
    assert f"weight  {name[-2:].upper()} [128, " in view
    (folder / "tokenizer.json").touch()
    assert "not known: the fp4 codes" in inside("inspect", str(folder), "--for", "vllm").stdout
    code, _, err = run("convert", folder, tmp_path / "out", "--to", "official", "--verify", "full")
    assert code == 0, err
    assert stored(tmp_path / "out") == stored(FLASH)


@pytest.mark.parametrize("dtype", slow_except(["U8"], CODES))
def test_nvfp4_is_known_by_its_scales(tmp_path, dtype):
    folder = tmp_path / "nvfp4"
    code, _, err = run("convert", FLASH, folder, "--to", "nvfp4", "--verify", "off")
    assert code == 0, err
    usual = dict(values(folder))
    damage.rewrite(folder, renamed(*((one, dtype) for one in CODES)))
    found = identify(folder)
    assert found.formats == NVFP4
    check_coverage(found.checkpoint, found.stored_table).raise_if_incomplete()
    for name, one in values(folder):
        np.testing.assert_array_equal(one, usual[name])


def values(folder):
    """The values of some experts."""
    with open_stored(identify(folder)) as model:
        for name, matrix in stored_matrices(model):
            if ".experts.1." in name:
                yield name, matrix.piece(slice(0, matrix.shape[0])).values


def test_files_that_are_cut_for_ranks_may_hold_bytes(tmp_path):
    code, _, err = run("convert", FLASH, tmp_path / "mp", "--to", "mp", "--ranks", "2", "--verify", "off")
    assert code == 0, err
    for path in (tmp_path / "mp").glob("*.safetensors"):
        tensors = damage.read_shard(path)
        for name, one in tensors.items():
            if one.dtype == "F4":
                tensors[name] = replace(one, dtype="I8", shape=[*one.shape[:-1], one.shape[-1] // 2])
        damage.write_shard(path, tensors)
    found = identify(tmp_path / "mp")
    check_coverage(found.checkpoint, found.stored_table).raise_if_incomplete()
    assert "of 272 matrices" not in inside("inspect", str(tmp_path / "mp"), "--diff", str(FLASH)).stdout
