"""Reading from any layout: whole, by rows, from stacked tensors and from parts; and the values of raw bytes."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4cli.engine.checkpoint.identify import FolderIdentity, recognise
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors
from dsv4cli.engine.checkpoint.naming import MpNaming, Naming, TransformersNaming, stored_table
from dsv4cli.engine.checkpoint.stored import StoredModel
from dsv4cli.engine.checkpoint.values import decode, e4m3_values, e8m0_values, form_of, scale_rows
from dsv4cli.engine.config.storage import Formats
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.block_scale import dequantise
from tests.support import damage
from tests.support.slow import slow

GOLDEN = damage.GOLDEN / "tiny-flash"
TORCH_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8}


@pytest.fixture(scope="module")
def identity() -> FolderIdentity:
    return recognise(GOLDEN)


def lay_out(folder: Path, naming: Naming, specs: Collection[TensorSpec], tensors: dict[str, np.ndarray]) -> None:
    """Writes tensors, raw arrays by official name, where a naming puts them; the slow and plain way."""
    stored = {}
    for key, spec in stored_table(naming, specs).items():
        sample = next(tensors[s.name] for s in specs for location in naming.locations(s) if location.name == key)
        shape = (*spec.shape[:-1], spec.shape[-1] // 2) if spec.dtype == "F4" else spec.shape
        stored[key] = (spec, np.zeros(shape, sample.dtype))
    for spec in specs:
        for location in naming.locations(spec):
            part = tensors[spec.name]
            if location.cut:
                part = np.take(part, range(part.shape[location.cut.dim])[location.cut.of(part.shape)], location.cut.dim)
            stored[location.name][1].reshape(-1)[location.begin : location.begin + part.size] = part.reshape(-1)
    files: dict[str, dict[str, damage.Stored]] = {}
    for key, (spec, array) in stored.items():
        file, _, name = key.rpartition("/")
        entry = damage.Stored(spec.dtype, list(spec.shape), array.tobytes())
        files.setdefault(file or "model", {})[name] = entry
    for file, entries in files.items():
        damage.write_shard(folder / f"{file}.safetensors", entries)
    (folder / "config.json").write_bytes((GOLDEN / "config.json").read_bytes())


def test_a_folder_is_read_as_its_files_say(identity):
    with StoredModel(identity) as model:
        for path in identity.checkpoint.files:
            for name, stored in damage.read_shard(path).items():
                array = model.read(model.specs[name])
                assert (list(array.shape), array.tobytes()) == (stored.shape, stored.data), name


@pytest.mark.parametrize("ranks", [*slow(1), 2])
def test_parts_of_ranks_are_put_together(tmp_path, identity, ranks):
    with StoredModel(identity) as model:
        tensors = {name: model.read(spec) for name, spec in model.specs.items()}
    lay_out(tmp_path, MpNaming(ranks, identity.config.n_routed_experts), model.specs.values(), tensors)
    found = recognise(tmp_path)
    assert (found.layout, found.formats) == (f"mp{ranks}", identity.formats)
    with StoredModel(found) as parts:
        for name, expected in tensors.items():
            spec = parts.specs[name]
            assert np.array_equal(parts.read(spec), expected), name
            count = (expected.shape or (1,))[0]
            for rows in (slice(0, count // 2), slice(count // 3, count), slice(count - 1, count), slice(0, 0)):
                assert np.array_equal(parts.read(spec, rows), expected[rows]), (name, rows)


def test_experts_are_taken_from_stacked_tensors(tmp_path, identity):
    formats = Formats("bf16", "bf16", "bf16")
    specs = expected_tensors(identity.config, formats)
    kinds = {"BF16": np.uint16, "F32": np.float32, "I64": np.int64}
    random = np.random.default_rng(0)
    tensors = {name: random.integers(0, 60000, spec.shape).astype(kinds[spec.dtype]) for name, spec in specs.items()}
    lay_out(tmp_path, TransformersNaming(identity.config), specs.values(), tensors)
    found = recognise(tmp_path)
    assert (found.layout, found.formats) == ("transformers", formats)
    with StoredModel(found) as model:
        for name, expected in tensors.items():
            assert np.array_equal(model.read(model.specs[name]), expected), name
            assert np.array_equal(model.read(model.specs[name], slice(1, 3)), expected[1:3]), name


def test_values_are_those_of_the_reference(identity):
    with StoredModel(identity) as model:
        for name, parts in model.matrices().items():
            weight = parts["weight"]
            if "scale" not in parts:
                continue
            raw = {role: model.read(spec) for role, spec in parts.items()}
            typed = [torch.from_numpy(raw[role]).view(TORCH_DTYPES[parts[role].dtype]) for role in ("weight", "scale")]
            expected = dequantise(*typed).numpy()
            assert decode(form_of(weight), raw).tobytes() == expected.tobytes(), name
            rows = slice(128, 256) if weight.shape[0] > 128 else slice(0, 7)
            some = {
                role: model.read(spec, scale_rows(form_of(weight), rows) if spec.is_scale else rows)
                for role, spec in parts.items()
            }
            assert decode(form_of(weight), some).tobytes() == expected[rows].tobytes(), name


def test_every_code_of_the_formats():
    byte = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(e4m3_values(), byte.view(torch.float8_e4m3fn).float().numpy(), equal_nan=True)
    assert np.signbit(e4m3_values()[0x80])
    assert np.array_equal(e8m0_values(), byte.view(torch.float8_e8m0fnu).float().numpy(), equal_nan=True)
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    raw = {"weight": bits.numpy().view(np.uint16)[None]}
    expected = bits.view(torch.bfloat16).float().numpy()
    assert np.array_equal(decode("bf16", raw)[0], expected, equal_nan=True)


def test_nvfp4_multiplies_both_scales():
    raw = {
        "weight": np.array([[0x1F] * 4 + [0xA5] * 4 + [0x00] * 8], np.uint8),
        "weight_scale": np.array([[0x38, 0x30]], np.uint8),  # 1, 0.5
        "weight_scale_2": np.array(0.25, np.float32),
        "input_scale": np.array(1, np.float32),
    }
    values = decode("nvfp4", raw)
    assert values[0].tolist() == [-1.5, 0.125] * 4 + [0.75, -0.25] * 4 + [0.0] * 16


def test_a_tensor_that_is_not_there_or_cut_off_is_named(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    with StoredModel(recognise(folder)) as model:
        path = damage.shard_of(folder, damage.WEIGHT)
        path.write_bytes(path.read_bytes()[:-1000])
        last = max(
            (info for info in model.identity.checkpoint.tensors.values() if info.file == path), key=lambda i: i.end
        )
        with pytest.raises(CheckpointError, match=rf"{path.name} ends inside {last.name}"):
            model.read(model.specs[last.name])
    (folder / damage.SHARD).unlink()
    found = recognise(folder)
    assert found.checkpoint.missing_files == (damage.SHARD,)
    with StoredModel(found) as model, pytest.raises(CheckpointError, match=rf"tensor {damage.WEIGHT} is missing"):
        model.read(model.specs[damage.WEIGHT])
