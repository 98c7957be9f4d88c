"""Exports of compressed-tensors, read and written, against the package itself."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4cli.engine.checkpoint.identify import identify
from dsv4cli.engine.checkpoint.layouts import recognise_stored
from dsv4cli.engine.checkpoint.opening import open_stored
from dsv4cli.engine.checkpoint.packed import is_packed
from dsv4cli.engine.checkpoint.values import decode, form_of
from dsv4cli.errors import CheckpointError, UnsupportedCheckpoint
from tests.support import damage
from tests.support.conversions import convert, differing, e2m1, official_values, run, stored, tensor
from tests.support.damage import Stored
from tests.support.slow import slow

NANO = Path("dsv4cli/nano")
DTYPES = {torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.bfloat16: "BF16", torch.float32: "F32"}
DTYPES |= {torch.float8_e4m3fn: "F8_E4M3"}
FORMS = {"fp4": ("mxfp4-pack-quantized", "MXFP4A16"), "nvfp4": ("nvfp4-pack-quantized", "NVFP4A16")}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    for experts in FORMS:
        convert(NANO, folder / experts, "--to", "compressed-tensors", "--experts", experts, "--verify", "full")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("experts", FORMS)
def test_the_package_unpacks_the_same_values(exported, experts):
    package = pytest.importorskip("compressed_tensors")
    form, preset = FORMS[experts]
    config = json.loads((exported / experts / "config.json").read_text())["quantization_config"]
    parsed = package.quantization.QuantizationConfig.model_validate(config)
    assert parsed.format == form
    scheme = parsed.config_groups["group_0"]
    wanted = package.quantization.preset_name_to_scheme(preset, targets=scheme.targets)
    for key in ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic", "scale_dtype"):
        assert getattr(scheme.weights, key) == getattr(wanted.weights, key), key
    assert scheme.input_activations is None
    compressor = package.compressors.BaseCompressor.get_value_from_registry(form)
    values, tensors = official_values(stored(NANO)), stored(exported / experts)
    for name in [name for name in values if ".ffn.experts." in name][::17]:
        matrix = name.removesuffix(".weight")
        state = {
            key.rpartition(".")[2]: tensor(entry) for key, entry in tensors.items() if key.rpartition(".")[0] == matrix
        }
        names = {"weight_packed", "weight_scale"} | ({"weight_global_scale"} if experts == "nvfp4" else set())
        assert state.keys() == names
        assert torch.equal(compressor.decompress(state, scheme)["weight"].float(), values[name])
    # every other matrix is in bf16 and said not to be quantised
    wide = {name for name in tensors if name.endswith((".wq_a.weight", ".w1.weight")) and ".experts." not in name}
    assert {name.removesuffix(".weight") for name in wide} <= set(config["ignore"])
    assert {tensors[name].dtype for name in wide} == {"BF16"}


@pytest.mark.parametrize("experts", FORMS)
def test_the_values_are_those_of_the_source(exported, experts):
    """By plain code; the slow test asks the package."""
    values, tensors = official_values(stored(NANO)), stored(exported / experts)
    for name in [name for name in values if ".ffn.experts." in name][::17]:
        stem = name.removesuffix("weight")
        scale = tensor(tensors[f"{stem}weight_scale"]).float()
        if experts == "fp4":
            scale = torch.ldexp(torch.ones(()), scale - 127)
        else:
            scale = scale / tensor(tensors[f"{stem}weight_global_scale"])
        codes = e2m1(tensors[f"{stem}weight_packed"])
        assert torch.equal(codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], dim=1), values[name])


@pytest.mark.parametrize("experts", FORMS)
def test_there_and_back(exported, tmp_path, experts):
    convert(exported / experts, tmp_path / "back", "--to", "official")
    assert differing(official_values(stored(NANO)), official_values(stored(tmp_path / "back"))) == []
    first, second = stored(NANO), stored(tmp_path / "back")
    same = [name for name in first if ".ffn.experts." in name]
    assert [name for name in same if first[name] != second[name]] == []


@pytest.mark.slow
def test_through_modelopt_s_layout(exported, tmp_path):
    """Which has a scale of activations, and its global scale the other way round."""
    convert(exported / "nvfp4", tmp_path / "there", "--to", "nvfp4")
    assert "layers.0.ffn.experts.0.w1.input_scale" in stored(tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "packed", "--to", "compressed-tensors", "--experts", "nvfp4")
    assert stored(tmp_path / "packed") == stored(exported / "nvfp4")


def as_stored(value: torch.Tensor) -> Stored:
    return Stored(DTYPES[value.dtype], [*value.shape], value.contiguous().view(torch.uint8).numpy().tobytes())


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [n, k] in words of 32 bits, the first in the lowest ones, raised by half their range."""
    count = 32 // bits
    words = (codes.long() + (1 << (bits - 1))).unflatten(1, (-1, count)) << torch.arange(0, 32, bits)
    return words.sum(-1).to(torch.uint32).view(torch.int32)


def integers(
    bits: int, symmetric: bool, rows: int, columns: int, generator
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a matrix of random integers, and its exact values."""
    low, high, groups = -(1 << (bits - 1)), 1 << (bits - 1), columns // 64
    codes = torch.randint(low, high, (rows, columns), generator=generator)
    scale = (torch.rand(rows, groups, generator=generator) + 0.1).bfloat16()
    state = {"weight_packed": pack(codes, bits), "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}
    point = torch.zeros(rows, groups, dtype=torch.long)
    if not symmetric:
        point = torch.randint(low, high, (rows, groups), generator=generator)
        state["weight_zero_point"] = pack(point.T, bits).T.contiguous()
    wide = [value.repeat_interleave(64, dim=1).float() for value in (point, scale)]
    return state, (codes.float() - wide[0]) * wide[1]


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False)])
def test_integers_are_those_of_the_package(bits, symmetric):
    package = pytest.importorskip("compressed_tensors")
    args = package.quantization.QuantizationArgs(
        num_bits=bits, type="int", strategy="group", group_size=64, symmetric=symmetric
    )
    scheme = package.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    compressor = package.compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    state, exact = integers(bits, symmetric, 64, 256, torch.Generator().manual_seed(0))
    found = compressor.decompress(state, scheme)["weight"]
    # which the package rounds to bf16
    assert torch.equal(found, exact.bfloat16())


def write_integers(folder: Path, bits: int, symmetric: bool) -> tuple[Path, dict[str, torch.Tensor]]:
    """A copy whose experts' w1 are integers; their exact values."""
    folder = damage.copy_checkpoint(folder)
    generator, exact = torch.Generator().manual_seed(0), {}

    def export(name: str, entry: Stored) -> dict[str, Stored]:
        if not name.endswith((".w1.weight", ".w1.scale")) or ".ffn.experts." not in name:
            return {name: entry}
        if name.endswith(".scale"):
            return {}
        state, exact[name] = integers(bits, symmetric, entry.shape[0], 2 * entry.shape[1], generator)
        return {name.removesuffix("weight") + key: as_stored(value) for key, value in state.items()}

    damage.rewrite(folder, export)
    say = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
    damage.edit_config(folder, quantization_config=say)
    return folder, exact


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
def test_integers_are_seen_as_their_exact_values(tmp_path, bits, symmetric):
    folder, exact = write_integers(tmp_path, bits, symmetric)
    identity = recognise_stored(folder)
    assert identity.layout == "compressed-tensors"
    with open_stored(identity) as model:
        for name in list(exact)[::5]:
            spec = identity.specs[name]
            np.testing.assert_array_equal(model.read(spec), exact[name].numpy())
            # a band that begins inside a word of zero points
            np.testing.assert_array_equal(model.read(spec, slice(13, 30)), exact[name].numpy()[13:30])


@pytest.mark.slow
def test_integers_become_bf16(tmp_path):
    folder, exact = write_integers(tmp_path, 4, symmetric=False)
    out = convert(folder, tmp_path / "out", "--to", "bf16", "--verify", "full")
    assert "the others within 0.00" in out
    values = official_values(stored(tmp_path / "out"))
    assert all(torch.equal(values[name], value.bfloat16().float()) for name, value in exact.items())


@pytest.mark.parametrize("shape", ["blocks", "channels", "tensor"])
def test_e4m3_with_scales_of_any_shape(tmp_path, shape):
    folder = damage.copy_checkpoint(tmp_path / "net")
    scales = {"blocks": lambda r, c: (-(-r // 128), -(-c // 128)), "channels": lambda r, c: (r, 1)}
    generator, wanted = torch.Generator().manual_seed(0), {}

    def export(name: str, entry: Stored) -> dict[str, Stored]:
        # 512 x 128, and 256 x 256
        if not re.search(r"\.attn\.(wq_b|wo_b)\.(weight|scale)$", name):
            return {name: entry}
        if name.endswith(".scale"):
            return {}
        rows, columns = entry.shape
        found = scales[shape](rows, columns) if shape in scales else (1,)
        scale = torch.rand(found, generator=generator) + 0.5
        spread = scale.reshape(found if len(found) == 2 else (1, 1))
        spread = spread.repeat_interleave(-(-rows // spread.shape[0]), 0)[:rows]
        spread = spread.repeat_interleave(-(-columns // spread.shape[1]), 1)[:, :columns]
        wanted[name] = tensor(entry).float() * spread
        return {name: entry, name.replace(".weight", ".weight_scale"): as_stored(scale)}

    damage.rewrite(folder, export)
    damage.edit_config(folder, quantization_config={"quant_method": "compressed-tensors", "format": "float-quantized"})
    identity = recognise_stored(folder)
    with open_stored(identity) as model:
        for name, value in wanted.items():
            spec = identity.specs[name]
            whole = decode(form_of(spec), {"weight": model.read(spec)})
            np.testing.assert_array_equal(whole, value.numpy())
            np.testing.assert_array_equal(model.read(spec, slice(100, 140)), value.numpy()[100:140])


def mixed(exported: Path, folder: Path) -> Path:
    """A copy of the NVFP4 export that says that groups of tensors have formats of their own."""
    folder.mkdir()
    for path in (exported / "nvfp4").glob("*.*"):
        (folder / path.name).write_bytes(path.read_bytes())
    say = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    damage.edit_config(folder, quantization_config=say)
    return folder


def test_of_mixed_formats_the_tensors_tell_what_runs(exported, tmp_path):
    """What the engine runs is recognised as the engine does, whoever asks."""
    folder = mixed(exported, tmp_path / "net")
    assert recognise_stored(folder) == identify(folder)


def test_e4m3_with_the_scales_of_a_release_is_not_taken_for_an_export(exported, tmp_path):
    folder, official = mixed(exported, tmp_path / "net"), stored(NANO)

    def release(name: str, entry: Stored) -> dict[str, Stored]:
        if not name.endswith(".attn.wq_a.weight"):
            return {name: entry}
        scale = name.replace(".weight", ".scale")
        return {name: official[name], scale: official[scale]}

    damage.rewrite(folder, release)
    assert not is_packed(folder)


@pytest.mark.parametrize("quantised", [True, False])
def test_scales_of_activations_are_expected_where_the_export_has_them(exported, tmp_path, quantised):
    folder = mixed(exported, tmp_path / "net")

    def activations(name: str, entry: Stored) -> dict[str, Stored]:
        if name.endswith(".attn.wq_a.weight"):  # of e4m3: an export that the engine does not run
            codes = tensor(entry).float().to(torch.float8_e4m3fn)
            return {name: as_stored(codes), name + "_scale": as_stored(torch.tensor([0.75]))}
        if not quantised or not name.endswith(".weight_global_scale"):
            return {name: entry}
        return {name: entry, name.replace("weight_global", "input_global"): as_stored(torch.tensor([2.0]))}

    damage.rewrite(folder, activations)
    specs = recognise_stored(folder).specs
    found = [name for name in specs if name.endswith(".input_scale")]
    assert len(found) == (sum(".experts." in name and name.endswith(".w1.weight") for name in specs) * 3) * quantised


def test_e4m3_beside_nvfp4(exported, tmp_path):
    folder = mixed(exported, tmp_path / "net")
    scale, wanted = torch.tensor([0.75]), {}

    def export(name: str, entry: Stored) -> dict[str, Stored]:
        if not name.endswith(".attn.wq_a.weight"):
            return {name: entry}
        codes = tensor(entry).float().to(torch.float8_e4m3fn)
        wanted[name] = codes.float() * scale
        return {name: as_stored(codes), name + "_scale": as_stored(scale)}

    damage.rewrite(folder, export)
    convert(folder, tmp_path / "out", "--to", "official", "--no-mtp")
    found, values = official_values(stored(tmp_path / "out")), official_values(stored(NANO))
    experts = [name for name in found if ".ffn.experts." in name]
    assert differing({name: values[name] for name in experts}, {name: found[name] for name in experts}) == []
    identity = recognise_stored(folder)
    assert (identity.formats.linear, identity.formats.experts) == ("f32", "nvfp4")
    with open_stored(identity) as model:
        for name, value in wanted.items():
            np.testing.assert_array_equal(model.read(identity.specs[name]), value.numpy())


def renamed(old, new):
    return lambda name, entry: {name.replace(old, new): entry}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (renamed("layers.0.attn.wq_a.weight", "model.layers.0.attn.wq_a.weight"), "transformers' names"),
        (renamed("layers.0.ffn.experts.0.w1.weight_scale", "layers.0.ffn.experts.0.w1.weight_g_idx"), "another order"),
    ],
)
def test_other_names_and_orders_are_refused(exported, tmp_path, change, sentence):
    folder = tmp_path / "net"
    folder.mkdir()
    for path in (exported / "fp4").glob("*.*"):
        (folder / path.name).write_bytes(path.read_bytes())
    damage.rewrite(folder, change)
    say = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    damage.edit_config(folder, quantization_config=say)
    with pytest.raises(UnsupportedCheckpoint, match=sentence):
        recognise_stored(folder)


def test_a_lost_scale_is_named(exported, tmp_path):
    folder = tmp_path / "net"
    folder.mkdir()
    for path in (exported / "nvfp4").glob("*.*"):
        (folder / path.name).write_bytes(path.read_bytes())
    lost = "layers.1.ffn.experts.3.w2.weight_scale"
    damage.rewrite(folder, lambda name, entry: {} if name == lost else {name: entry})
    code, _, err = run("convert", folder, tmp_path / "out", "--to", "official")
    assert code == 1
    assert lost in err


def test_a_lost_scale_of_integers_is_named(tmp_path):
    folder, exact = write_integers(tmp_path, 4, symmetric=True)
    lost = next(iter(exact)) + "_scale"
    damage.rewrite(folder, lambda name, entry: {} if name == lost else {name: entry})
    code, _, err = run("convert", folder, tmp_path / "out", "--to", "bf16")
    assert code == 1
    assert lost in err


@pytest.mark.parametrize("last", ["weight_packed", *slow("weight_scale", "weight_zero_point")])
def test_a_row_too_few_is_named(tmp_path, last):
    folder, exact = write_integers(tmp_path, 8, symmetric=False)
    name = next(iter(exact)).removesuffix("weight") + last

    def shorter(found: str, entry: Stored) -> dict[str, Stored]:
        if found != name:
            return {found: entry}
        rows, columns = entry.shape
        return {name: Stored(entry.dtype, [rows - 1, columns], entry.data[: len(entry.data) // rows * (rows - 1)])}

    damage.rewrite(folder, shorter)
    code, _, err = run("convert", folder, tmp_path / "out", "--to", "bf16")
    assert code == 1
    assert f"{name} is " in err
    assert "expected [" in err


def test_a_width_that_no_integer_has_is_named(tmp_path):
    folder, exact = write_integers(tmp_path, 4, symmetric=True)

    def narrow(name: str, entry: Stored) -> dict[str, Stored]:
        if not name.endswith("weight_packed"):
            return {name: entry}
        rows, columns = entry.shape
        return {name: Stored("I32", [rows, columns // 2], entry.data[: len(entry.data) // 2])}

    damage.rewrite(folder, narrow)
    identity = recognise_stored(folder)
    with open_stored(identity) as model, pytest.raises(CheckpointError, match="expected integers of 4 or 8 bits"):
        model.read(identity.specs[next(iter(exact))])


def test_inspect_says_what_it_is(exported):
    code, out, _ = run("inspect", exported / "nvfp4")
    assert code == 0
    assert "compressed-tensors' names, packed experts" in out
    code, out, _ = run("inspect", NANO, "--diff", exported / "nvfp4", "--json")
    assert code == 0
