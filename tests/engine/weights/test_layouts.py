"""Checkpoints in other layouts and formats run as they are: parameters and logits are those of the official layout."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import dsv4cli
from dsv4cli.engine.checkpoint.identify import identify, recognise
from dsv4cli.engine.checkpoint.naming import MpNaming, Naming, SavedNaming, TransformersNaming
from dsv4cli.engine.checkpoint.sharding import part_shape
from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.engine.checkpoint.values import e4m3_values
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.world import SINGLE, World
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.weights import placement, read
from dsv4cli.engine.weights.fill import TORCH_DTYPES
from dsv4cli.engine.weights.load import load_model
from dsv4cli.engine.weights.read import stored
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.block_scale import dequantise, fp8_round
from tests.support import damage
from tests.support.slow import slow
from tests.support.variants import GOLDEN, Arrays, recoded, write_variant

BF16, MP = Formats("bf16", "bf16"), Formats(wo_a="bf16")
NVFP4, BASE = Formats(experts="nvfp4"), Formats("fp8_f32", "fp8_f32")
CONFIG = recognise(GOLDEN).config
NANO = Path(dsv4cli.__file__).parent / "nano"
NANO_CONFIG = recognise(NANO).config
LAYOUTS = {
    "mp1": (MP, MpNaming(1, NANO_CONFIG.n_routed_experts)),
    "mp2": (MP, MpNaming(2, NANO_CONFIG.n_routed_experts)),
    "transformers": (BF16, TransformersNaming(NANO_CONFIG)),
    "saved": (BF16, SavedNaming(NANO_CONFIG)),
}


@pytest.fixture
def as_stored(monkeypatch):
    """Weights stay in their storage formats on a CPU too."""
    monkeypatch.setattr(placement, "DEQUANTIZED_PART", 2**60)


def load(folder: Path) -> Transformer:
    return load_model(FolderSource("test", folder), Numerics.reference())


@torch.inference_mode()
def logits(model: Transformer) -> torch.Tensor:
    memory = Cache(model.config, model.numerics)
    batch = make_batch(memory, [(memory.allocate(), list(range(3, 12)))])
    return model.logits(model(batch, memory.layers).streams)


def parts(folder: Path, world: World) -> dict[str, torch.Tensor]:
    """This rank's part of every tensor, by official names, as bytes."""
    identity = identify(folder)
    specs = {name: spec for name, spec in identity.specs.items() if spec.parameter}
    empty = {
        name: torch.empty(part_shape(spec, world.size), dtype=TORCH_DTYPES[spec.dtype]) for name, spec in specs.items()
    }
    for _ in stored(identity.checkpoint, specs.values(), world, naming=identity.naming)(empty):
        pass
    return {name: tensor.view(-1).view(torch.uint8) for name, tensor in empty.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str, Formats, Naming | None], Path]:
    """nano in a layout, written once."""
    root = tmp_path_factory.mktemp("layouts")
    return cache(lambda name, formats, naming: write_variant(root / name, formats, naming, source=NANO))


@pytest.mark.parametrize("way", ["direct", pytest.param("staged", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", ["mp2", *slow("transformers", "mp1", "saved")])
def test_each_rank_gets_what_the_official_layout_gives_it(folders, monkeypatch, layout, way):
    if way == "staged":
        monkeypatch.setattr(read, "needs_staging", lambda destination: True)
        monkeypatch.setattr(read, "PIECE", 1 << 17)
    formats, naming = LAYOUTS[layout]
    for world in (SINGLE, World(0, 2), World(1, 2)):
        found = parts(folders(layout, formats, naming), world)
        expected = parts(folders(formats.linear, formats, None), world)
        assert found.keys() == expected.keys()
        assert [name for name, part in found.items() if not torch.equal(part, expected[name])] == []


@pytest.fixture(scope="module")
def official() -> torch.Tensor:
    return logits(load(GOLDEN))


@pytest.mark.parametrize("formats", [NVFP4, BASE], ids=str)
def test_what_has_the_official_values_has_the_official_logits(tmp_path, official, formats):
    assert torch.equal(logits(load(write_variant(tmp_path, formats))), official)


@pytest.mark.slow
def test_linears_in_nvfp4(tmp_path):
    """As in FP8, of values that both have."""

    def coarse(name: str, old: str, raw: Arrays, new: str) -> Arrays:
        if old != "fp8":
            return recoded(name, old, raw, new)
        rows, columns = raw["weight"].shape
        codes = (np.arange(rows * columns // 2) * 89 % 251).astype(np.uint8).reshape(rows, columns // 2)
        return recoded(name, "fp4", {"weight": codes, "scale": np.full((rows, columns // 32), 122, np.uint8)}, new)

    first, second = (
        logits(load(write_variant(tmp_path / form, Formats(form, wo_a="bf16"), encode=coarse)))
        for form in ("nvfp4", "fp8")
    )
    assert torch.equal(first, second)


def edit(folder: Path, change: Callable[[str, damage.Stored], damage.Stored | None]) -> None:
    """Changes tensors of the one file; None: there is no such tensor any more."""
    file = folder / "model.safetensors"
    changed = {name: change(name, old) for name, old in damage.read_shard(file).items()}
    damage.write_shard(file, {name: new for name, new in changed.items() if new is not None})


def with_scales(folder: Path, names: Collection[str], numbers: list[float]) -> None:
    """Numbers instead of the first scales of matrices."""

    def change(name: str, old: damage.Stored) -> damage.Stored:
        if name not in names:
            return old
        values = np.frombuffer(old.data, np.float32).copy()
        values[: len(numbers)] = numbers
        return replace(old, data=values.tobytes())

    edit(folder, change)


@pytest.mark.parametrize(
    ("formats", "name", "number"),
    [
        (BASE, "layers.3.attn.wq_a.scale", 0.0),
        (BASE, "layers.1.ffn.experts.2.w2.scale", float("nan")),
        (NVFP4, "layers.1.ffn.experts.2.w1.weight_scale_2", float("inf")),
        (NVFP4, "layers.1.ffn.experts.2.w1.weight_scale_2", -1.0),
    ],
)
def test_a_number_that_is_no_scale_is_refused(tmp_path, formats, name, number):
    folder = write_variant(tmp_path, formats)
    with_scales(folder, [name], [number])
    with pytest.raises(CheckpointError, match=f"{name} holds a scale that is not a positive number"):
        load(folder)


@pytest.mark.parametrize("byte", [0x7F, 0xB8])
def test_a_scale_of_nvfp4_that_is_negative_or_no_number_is_refused(tmp_path, byte):
    folder, name = write_variant(tmp_path, NVFP4), "layers.1.ffn.experts.2.w3.weight_scale"
    edit(folder, lambda key, old: replace(old, data=bytes([byte]) + old.data[1:]) if key == name else old)
    with pytest.raises(CheckpointError, match=f"{name} holds a scale that is negative or not a number"):
        load(folder)


def test_fp32_scales_of_any_mantissa(tmp_path, as_stored):
    folder, name = write_variant(tmp_path, BASE), "layers.3.attn.wq_a"
    with_scales(folder, [f"{name}.scale"], [0.3, 0.7])
    module = load(folder).get_submodule(name)
    rows, columns = module.weight.shape
    codes = torch.from_numpy(e4m3_values()[module.weight.view(torch.uint8).numpy()]).double()
    factor = module.scale.double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    assert torch.equal(dequantise(module.weight, module.scale).double(), (codes * factor).float().double())
    x = torch.randn(5, columns).bfloat16()
    # fp32 sums, rounded once to bf16
    exact = fp8_round(x, 128).double() @ (codes * factor).T
    torch.testing.assert_close(module(x).double(), exact, rtol=2**-7, atol=1e-6)


def test_weights_alone_need_no_input_scale(tmp_path, official):
    folder = write_variant(tmp_path, NVFP4)
    edit(folder, lambda name, old: None if name.endswith("input_scale") else old)
    assert torch.equal(logits(load(folder)), official)


def test_an_input_scale_multiplies_no_weight(tmp_path, official):
    folder = write_variant(tmp_path, NVFP4)
    with_scales(folder, [f"layers.1.ffn.experts.2.w{number}.input_scale" for number in (1, 2, 3)], [1e-3])
    assert torch.equal(logits(load(folder)), official)


def test_the_file_of_a_rank_that_is_not_there_is_named(tmp_path):
    folder = write_variant(tmp_path, MP, MpNaming(2, CONFIG.n_routed_experts))
    (folder / "model1-mp2.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model1-mp2"):
        load(folder)


def test_bf16_of_what_the_releases_have_in_fp32_is_widened(tmp_path):
    folder = write_variant(tmp_path, BF16, TransformersNaming(CONFIG))

    def narrow(name: str, old: damage.Stored) -> damage.Stored:
        if old.dtype != "F32" or name.startswith("mtp."):
            return old
        halves = (np.frombuffer(old.data, np.uint32) >> 16).astype(np.uint16)
        return damage.Stored("BF16", old.shape, halves.tobytes())

    edit(folder, narrow)
    model = load(folder)
    assert {parameter.dtype for name, parameter in model.named_parameters() if "hc_" in name} == {torch.float32}
    assert logits(model).isfinite().all()
