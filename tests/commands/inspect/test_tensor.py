"""`dsv4 inspect --tensor`, `--layer` and `--tree`: one tensor, one layer, the whole model in short."""

import json
from pathlib import Path

import numpy as np
import pytest
import typer.testing

from dsv4cli import cli
from dsv4cli.engine.checkpoint.identify import recognise
from dsv4cli.engine.checkpoint.naming import MpNaming, TransformersNaming
from dsv4cli.engine.checkpoint.stored import StoredModel
from dsv4cli.engine.checkpoint.values import decode
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.tensor_tree import numbers_text
from dsv4cli.engine.inspection.tensor_view import nearest
from dsv4cli.errors import UsageError
from tests.support import damage, program, variants

ROOT = Path(__file__).resolve().parents[3]
FLASH = str(damage.GOLDEN / "tiny-flash")
WEIGHT, SCALE = damage.WEIGHT, damage.SCALE
EXPERT = "layers.0.ffn.experts.3.w1"


def inside(*arguments: str):
    return program.inside("inspect", *arguments)


def section(name: str, *arguments: str):
    done = inside(*arguments, "--json")
    assert done.stderr == ""
    return json.loads(done.stdout)[name]


def test_a_tensor_in_the_terminal():
    done = inside(FLASH, "--tensor", "layers.3.attn.wq_a")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        f"{WEIGHT}  (attention)",
        "format  fp8, values [128, 256]",
        "weight  F8_E4M3 [128, 256]",
        f"        {damage.SHARD}, bytes 1,513,768 to 1,546,536",
    ]
    assert "values  32,768, 0 of them zero" in lines
    assert "first   0.0234375 0.0117188 0.015625 -0.03125 -0.140625 -0.0273438 0.0390625" in lines
    assert lines[-1] == "  2^-10  ████████████████████████████████████████  2"
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", ["layers.3.attn.wq_a", WEIGHT, SCALE])
def test_a_tensor_in_the_document_is_that_of_the_files(name):
    found = section("tensor", FLASH, "--tensor", name)
    assert (found["name"], found["form"], found["shape"]) == (WEIGHT, "fp8", [128, 256])
    shard = damage.read_shard(damage.GOLDEN / "tiny-flash" / damage.SHARD)
    for part in found["parts"]:
        content = Path(part["file"]).read_bytes()[part["begin"] : part["end"]]
        assert content == shard[part["name"]].data
        assert (part["dtype"], part["shape"]) == (shard[part["name"]].dtype, shard[part["name"]].shape)
    raw = {
        part["role"]: np.frombuffer(shard[part["name"]].data, np.uint8).reshape(part["shape"])
        for part in found["parts"]
    }
    values = decode("fp8", raw)
    statistics = found["values"]["statistics"]
    assert (statistics["min"], statistics["max"], statistics["count"]) == (values.min(), values.max(), values.size)
    assert statistics["rms"] == pytest.approx(np.sqrt((values.astype(np.float64) ** 2).mean()), rel=1e-6)
    assert found["values"]["first"] == values[0, :8].tolist()
    assert sum(count for _, _, count in found["values"]["histogram"]) == values.size
    for low, high, count in found["values"]["histogram"][1:-1]:
        assert count == ((values >= np.float32(low)) & (values < np.float32(high))).sum()


@pytest.mark.parametrize(
    ("name", "form", "shape"),
    [
        (EXPERT, "fp4", [128, 256]),
        ("norm", "bf16", [256]),
        ("layers.0.hc_attn_scale", "f32", [3]),
        ("layers.0.ffn.gate.tid2eid", "i64", [512, 2]),
    ],
)
def test_every_format_has_a_view(name, form, shape):
    found = section("tensor", FLASH, "--tensor", name)
    assert (found["form"], found["shape"]) == (form, shape)
    assert sum(count for _, _, count in found["values"]["histogram"]) == np.prod(shape)


def test_the_ids_of_a_table_have_a_bar_each():
    histogram = section("tensor", FLASH, "--tensor", "layers.0.ffn.gate.tid2eid")["values"]["histogram"]
    assert [low for low, _, _ in histogram] == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5]
    assert min(count for _, _, count in histogram) > 0


def test_a_tensor_of_every_layout(tmp_path):
    identity = recognise(damage.GOLDEN / "tiny-flash")
    plain = section("tensor", FLASH, "--tensor", EXPERT)["values"]
    bf16 = str(variants.write_variant(tmp_path / "hf", Formats("bf16", "bf16"), TransformersNaming(identity.config)))
    stacked = section("tensor", bf16, "--tensor", EXPERT)
    assert stacked["values"]["first"] == plain["first"]
    assert stacked["values"]["statistics"] == pytest.approx(plain["statistics"], rel=1e-6)
    (part,) = stacked["parts"]
    assert (part["name"], part["note"]) == ("model.layers.0.mlp.experts.gate_up_proj", "inside [6, 256, 256]")
    content = Path(part["file"]).read_bytes()[part["begin"] : part["end"]]
    with StoredModel(recognise(tmp_path / "hf")) as model:
        assert content == model.read(model.specs[f"{EXPERT}.weight"]).tobytes()
    mp = str(variants.write_variant(tmp_path / "mp", Formats(wo_a="bf16"), MpNaming(2, 6)))
    cut = section("tensor", mp, "--tensor", "model1-mp2/layers.1.attn.wq_b.weight")
    assert cut["name"] == "layers.1.attn.wq_b.weight"
    assert {part["note"] for part in cut["parts"]} == {f"part {n} of 2 along dimension 0" for n in (1, 2)}
    assert cut["values"]["first"] == section("tensor", FLASH, "--tensor", "layers.1.attn.wq_b")["values"]["first"]


def test_a_stored_name(tmp_path):
    config = recognise(damage.GOLDEN / "tiny-flash").config
    folder = str(variants.write_variant(tmp_path, Formats("bf16", "bf16"), TransformersNaming(config)))
    found = section("tensor", folder, "--tensor", "model.layers.3.self_attn.q_a_proj.weight")
    assert (found["name"], found["shape"]) == (WEIGHT, [128, 256])
    stacked = section("tensor", folder, "--tensor", "model.layers.0.mlp.experts.down_proj")
    assert (stacked["values"], stacked["shape"]) == (None, [6, 256, 128])
    assert stacked["holds"] == [f"layers.0.ffn.experts.{number}.w2.weight" for number in range(6)]
    table = inside(folder, "--tensor", "model.layers.0.mlp.experts.down_proj")
    assert "6 tensors, from layers.0.ffn.experts.0.w2.weight to" in table.stdout


def test_a_tensor_that_the_model_does_not_have(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.tensor_extra(folder)
    done = inside(str(folder), "--tensor", "layers.3.attn.bias")
    assert done.exit_code == 3
    assert "layers.3.attn.bias is not a tensor of this model" in done.stdout
    assert "the model has no such tensor" in done.stdout
    missing = damage.copy_checkpoint(tmp_path / "other")
    damage.drop_tensor(missing, SCALE)
    with pytest.raises(UsageError, match=f"lacks {SCALE}"):
        raise inside(str(missing), "--tensor", WEIGHT).exception


def test_a_file_without_a_configuration_has_headers(tmp_path):
    path = tmp_path / "one.safetensors"
    path.write_bytes((damage.GOLDEN / "tiny-flash" / damage.SHARD).read_bytes())
    found = section("tensor", str(path), "--tensor", WEIGHT)
    assert (found["form"], found["family"], found["values"]) == ("F8_E4M3", None, None)
    with pytest.raises(UsageError, match="has no tensor 'wq'"):
        raise inside(str(path), "--tensor", "wq").exception
    for option in (("--layer", "3"), ("--tree",), ("--values", "full")):
        with pytest.raises(UsageError, match="cannot tell which model"):
            raise inside(str(path), *option).exception


def test_wrong_values_of_one_tensor(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.scale_is_nan(folder)
    done = inside(str(folder), "--tensor", WEIGHT)
    assert done.exit_code == 3
    assert "16,384 NaN or infinite" in done.stdout
    assert f"wrong: {SCALE} has once byte 255, which is NaN" in done.stdout
    assert section("tensor", str(folder), "--tensor", WEIGHT)["values"]["first"] == ["nan"] * 8


NAMES = [
    f"layers.{layer}.attn.{name}.{part}"
    for layer in range(5)
    for name in ("wq_a", "wq_b")
    for part in ("weight", "scale")
]
NAMES += [f"layers.{layer}.ffn.experts.{expert}.w1.weight" for layer in range(5) for expert in range(12)]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("layers.3.attn.wqa.weight", "layers.3.attn.wq_a.weight"),
        ("layers.3.atn.wq_b.scale", "layers.3.attn.wq_b.scale"),
        ("model.layers.2.attn.wq_a.weight", "layers.2.attn.wq_a.weight"),
        ("layers.9.attn.wq_a.weight", "layers.4.attn.wq_a.weight"),
        ("layers.1.ffn.expert.11.w1.weight", "layers.1.ffn.experts.11.w1.weight"),
        ("layers.1.ffn.experts.99.w1.weight", "layers.1.ffn.experts.11.w1.weight"),
        ("tokenizer", None),
    ],
)
def test_a_near_miss(wrong, right):
    assert (nearest(wrong, NAMES) or [None])[0] == right


def test_a_near_miss_is_told():
    with pytest.raises(UsageError) as caught:
        raise inside(FLASH, "--tensor", "layers.3.attn.wqa.weight").exception
    assert caught.value.remedy.startswith(f"did you mean {WEIGHT} or ")


# --- layers


def test_a_layer_in_the_terminal():
    done = inside(FLASH, "--layer", "2")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "layers.2: CSA, scored  76 tensors, 1.48 MB"
    assert "  ffn.experts.0-5.w1                    I8       6 x [128, 256]  104.45 kB" in lines
    assert "  attn.indexer.wq_b                     F8_E4M3  [512, 128]      65.54 kB" in lines
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("name", "kind", "tensors"),
    [
        ("0", "window, hash", 77),
        ("layers.2", "CSA, hash", 88),
        ("41", "HCA, scored", 81),
        ("mtp.0", "window, scored", 87),
    ],
)
def test_the_layers_of_flash(name, kind, tensors):
    found = section("layer", "random:flash,experts=8", "--layer", name)
    assert (found["kind"], found["tensors"]) == (kind, tensors)
    assert found["numbers"] == [int(name.rpartition(".")[2])]


@pytest.mark.parametrize("name", ["5", "-1", "mtp.1", "mtp", "x", "layers"])
def test_a_layer_that_is_not_there(name):
    with pytest.raises(UsageError, match="there is no layer") as caught:
        raise inside(FLASH, "--layer", name).exception
    assert caught.value.remedy == "layers are 0 to 4, and mtp.0"


# --- the tree


def test_the_tree_folds_equal_layers():
    lines = inside("random:flash", "--tree").stdout.splitlines()
    assert lines[0] == "random:flash: 69,187 tensors, 159.61 GB"
    assert [line for line in lines if "layers." in line or "mtp." in line] == [
        "├─ layers.0, 1: window, hash  2 x 3.57 GB",
        "├─ layers.2: CSA, hash  3.60 GB",
        "├─ layers.3, 5, ..., 41: HCA, scored  20 x 3.57 GB",
        "├─ layers.4, 6, ..., 42: CSA, scored  20 x 3.59 GB",
        "└─ mtp.0: window, scored  3.59 GB",
    ]
    assert max(map(len, lines)) <= 80


def test_the_tree_in_the_document_holds_everything():
    done = json.loads(inside("random:flash-0731,experts=7", "--tree", "--json").stdout)
    tree, sizes = done["tree"], done["sizes"]
    for key in ("tensors", "nbytes"):
        layers = sum(len(one["numbers"]) * one[key] for one in tree["layers"])
        assert sum(entry[key] for entry in tree["outside"]) + layers == sizes[key]
    numbers = {(one["part"], number) for one in tree["layers"] for number in one["numbers"]}
    assert numbers == {("layers", n) for n in range(43)} | {("mtp", n) for n in range(3)}


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((), ""),
        ((4,), "4"),
        ((0, 1), "0, 1"),
        ((0, 1, 2), "0-2"),
        ((3, 5, 7), "3, 5, 7"),
        ((3, 5, 7, 9), "3, 5, ..., 9"),
        ((0, 1, 2, 9, 20), "0-2, 9, 20"),
    ],
)
def test_numbers_in_short(numbers, text):
    assert numbers_text(numbers) == text


def test_a_terminal_that_is_not_utf8_gets_ascii():
    for option in ("--tree", "--tensor=norm"):
        done = typer.testing.CliRunner(charset="ascii").invoke(cli.app, ["inspect", FLASH, option])
        assert done.exit_code == 0
        assert "\\u" not in done.stdout
        assert ("|- embed.weight" in done.stdout) or ("##" in done.stdout)
