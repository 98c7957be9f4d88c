"""`dsv4 convert`, what it refuses: a sentence that names the thing, a remedy, the documented exit code, and nothing
left behind; and what it finds when it compares its output with the source."""

import errno
import hashlib
import json
import os
import shutil
import struct
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants

from dsv4cli.engine.conversion import convert as conversion
from dsv4cli.engine.conversion import write
from dsv4cli.output import size_text
from tests.support import damage, synthetic
from tests.support.conversions import convert, files, run
from tests.support.damage import DAMAGES, SHARD, WEIGHT
from tests.support.foreign import FOREIGN, INCOMPLETE, half
from tests.support.slow import slow, slow_rows

UNFINISHED = ".dsv4-convert"
EXPERT = "layers.1.ffn.experts.1.w2"
LINEAR = "layers.1.attn.wo_a"
BF16 = ("--to", "bf16")
# byte of a scale: 2 ** -7, as in the golden nets
TOP = 0x78
DRY = ((), ("--dry-run",))
# a file may be missing where its tensors are not needed: it is the tensor that is named first
PARTS = {
    damage.shard_missing: (f"download {SHARD} again", "is missing (and "),
    damage.index_names_absent_file: (WEIGHT, "model-00009-of-00009.safetensors, where the index puts it"),
}
HARMS = DAMAGES | FOREIGN | INCOMPLETE | PARTS


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A source of two layers with two experts."""
    folder = synthetic.write_checkpoint(tmp_path_factory.mktemp("source") / "small", synthetic.SMALL)
    before = state(folder)
    yield folder
    assert state(folder) == before


@pytest.fixture
def source(small, tmp_path):
    """One that a test may change."""
    return shutil.copytree(small, tmp_path / "source")


def state(folder):
    """What a reader leaves alone."""
    return files(folder), {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def refused(code, *arguments):
    """Runs `dsv4 convert`, which must end with this code and no answer; returns the two lines on stderr."""
    found, out, err = run("convert", *arguments)
    assert (found, out) == (code, ""), err
    error, remedy = err.rstrip("\n").split("\n")[-2:]
    assert error.startswith("error: ")
    assert remedy.startswith("→ ")
    return error, remedy


def set_byte(folder, tensor, offset, value):
    def change(stored):
        data = bytearray(stored.data)
        data[offset] = value
        return replace(stored, data=bytes(data))

    damage.edit_tensor(folder, tensor, change)


def set_scales(folder, expert, byte):
    damage.edit_tensor(folder, f"{expert}.scale", lambda stored: replace(stored, data=bytes([byte]) * len(stored.data)))


def spread_scales(folder, expert, row, by):
    """Gives all groups of an expert one scale but the second of a row, `by` powers of two below, which begins with
    0.5."""
    set_scales(folder, expert, TOP)
    stored = damage.read_shard(damage.shard_of(folder, f"{expert}.scale"))[f"{expert}.scale"]
    group = row * stored.shape[1] + 1
    set_byte(folder, f"{expert}.scale", group, TOP - by)
    # a group is 32 codes, the first of them in the low half of its first byte
    set_byte(folder, f"{expert}.weight", 16 * group, 0x21)


def left(folder):
    """What of an output looks like a model or like a part of one."""
    return [name for name in files(folder) if not name.startswith(UNFINISHED)]


@pytest.mark.parametrize("harm", [*half(DAMAGES | FOREIGN | INCOMPLETE, 0), *PARTS], ids=lambda harm: harm.__name__)
def test_a_source_that_is_damaged_or_another_model(tmp_path, harm):
    folder = damage.copy_checkpoint(tmp_path)
    harm(folder)
    before = state(folder)
    code = 4 if harm in FOREIGN else 1
    error, remedy = refused(code, folder, tmp_path / "out", *BF16)
    assert [word for word in HARMS[harm] if word not in f"{error} {remedy}"] == []
    assert str(folder) in error
    assert not (tmp_path / "out").exists()
    assert state(folder) == before


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("{tmp}/nothing", 1, ["there is no folder {tmp}/nothing", "check the path"]),
        ("nothing.gguf", 1, ["there is no file nothing.gguf", "check the path"]),
        ("nothing", 2, ["'nothing' is neither a folder nor a known model", "known names: nano, nano-0731, flash"]),
        ("", 2, ["'' is neither a folder nor a known model"]),
        ("{tmp}/full", 1, ["{tmp}/full contains no safetensors file"]),
        ("{tmp}/file", 2, ["{tmp}/file is a file; a model is a folder", "use the folder"]),
        ("{tmp}/m.gguf", 1, ["{tmp}/m.gguf is truncated", "download m.gguf again"]),
        ("flash", 1, ["DeepSeek-V4-Flash is not in the Hugging Face cache", "`dsv4 download flash`"]),
        ("some/repo", 1, ["some/repo is not in the Hugging Face cache", "`dsv4 download some/repo`"]),
        ("https://huggingface.co/some/repo", 1, ["there is no folder https://huggingface.co/some/repo"]),
    ],
)
def test_a_source_that_is_not_there(tmp_path, monkeypatch, places, source, code, words):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    text = " ".join(refused(code, source.format(tmp=tmp_path), tmp_path / "out", *BF16))
    assert [word for word in words if word.format(tmp=tmp_path) not in text] == []
    assert files(tmp_path) == places


@pytest.fixture
def places(tmp_path):
    """A folder with something in it and some files; their content."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    return files(tmp_path)


def test_an_output_where_something_is(small, tmp_path, places):
    error, remedy = refused(2, small, tmp_path / "full", *BF16)
    assert (
        f"{tmp_path / 'full'} is not empty, and does not contain a conversion of this source with these options"
        in error
    )
    assert "empty or does not exist yet" in remedy
    for name in ("file", "file/below"):
        error, remedy = refused(2, small, tmp_path / name, *BF16)
        assert f"{tmp_path / 'file'} is a file" in error
    assert files(tmp_path) == places


def test_an_output_that_may_not_be_written(small, tmp_path, monkeypatch):
    """Root may write anywhere, so the system is made to say what it says to others."""
    (tmp_path / "home").mkdir()

    def forbidden(call):
        def checked(path, *arguments, **options):
            if str(path).startswith(str(tmp_path / "home")):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *arguments, **options)

        return checked

    for name in ("mkdir", "open"):
        monkeypatch.setattr(os, name, forbidden(getattr(os, name)))
    home = str(tmp_path / "home")
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode & os.W_OK and str(path).startswith(home)))
    for output in ("home", "home/a/b"):
        error, remedy = refused(2, small, tmp_path / output, *BF16)
        assert f"{tmp_path / 'home'}" in error
        assert "Permission denied" in error
        assert "can write" in remedy
        # the plan is the answer to a dry run, the code its verdict
        code, out, err = run("convert", small, tmp_path / output, *BF16, "--dry-run")
        assert (code, "to write, " in out) == (2, True)
        assert f"{tmp_path / 'home'} cannot be written to: Permission denied" in err
    assert files(tmp_path) == {}


@pytest.mark.parametrize("output", ["", "out", "a/b/out", "../link", "..", "../link/out"])
def test_an_output_inside_the_source_or_around_it(source, tmp_path, output):
    (tmp_path / "link").symlink_to(source)
    before = state(tmp_path)
    for rest in DRY:
        error, remedy = refused(2, source, source / output, *BF16, *rest)
        assert f"{source / output} and the source overlap" in error
        assert "outside the source" in remedy
    assert state(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", ["convert needs --to, the layout to write", "for example --to bf16; dsv4 convert --help"]),
        ("--to bf16 --layers 5-2", ["--layers '5-2' names no layers", "FIRST-LAST"]),
        ("--to bf16 --layers 99", ["--layers 99: the model has 2 layers", "choose from 0-1"]),
        ("--to bf16 --layers 1-2", ["--layers 1-2: the model has 2 layers", "choose from 0-1"]),
        ("--to bf16 --layers first", ["--layers 'first' names no layers", "FIRST-LAST"]),
        ("--to bf16 --layers=-1", ["--layers '-1' names no layers"]),
        ("--to mp", ["--ranks N and --to mp", "`--to mp --ranks 4`"]),
        ("--to bf16 --ranks 2", ["--ranks N and --to mp"]),
        ("--to mp --ranks 5", ["embed.weight [128, 256] cannot be split across 5 ranks", "fewer ranks"]),
        # half a block of its FP8 scales
        ("--to mp --ranks 4", ["layers.0.attn.wo_b.weight [256, 256] cannot be split across 4 ranks", "fewer ranks"]),
        ("--to mp --ranks 4 --attention bf16", ["the experts cannot be split across 4 ranks", "fewer ranks"]),
        ("--to fp8 --experts fp4", ["--to fp8 cannot store experts in fp4", "use --experts fp8"]),
        ("--to nvfp4 --experts bf16", ["--to nvfp4 cannot store experts in bf16", "use --experts nvfp4"]),
        ("--to transformers --experts fp4", ["--to transformers cannot store experts in fp4", "use --experts bf16"]),
        (
            "--to transformers --attention fp8",
            ["--to transformers cannot store attention in fp8", "use --attention bf16"],
        ),
        ("--to bf16 --experts nvfp4", ["--to bf16 cannot store experts in nvfp4", "use --experts bf16 or fp4 or fp8"]),
        ("--to bf16 --shard 3/2", ["--shard '3/2' is not a valid part", "I from 1 to N"]),
        ("--to bf16 --shard 0/2", ["--shard '0/2' is not a valid part"]),
        ("--to bf16 --shard 2", ["--shard '2' is not a valid part"]),
        ("--to bf16 --shard 1/0", ["--shard '1/0' is not a valid part"]),
        ("--to bf16 --max-shard-size 5", ["--max-shard-size '5' is not a size", "kB, MB, GB"]),
        ("--to bf16 --max-shard-size 0TB", ["--max-shard-size '0TB' is not a size", "TB, KiB"]),
        ("--to bf16 --device tpu", ["--device cannot be 'tpu'", "cuda:N"]),
    ],
)
def test_options_that_make_no_sense(small, tmp_path, options, words):
    for rest in DRY:
        text = " ".join(refused(2, small, tmp_path / "out", *options.split(), *rest))
        assert [word for word in words if word not in text] == []
    assert files(tmp_path) == {}


@pytest.mark.parametrize(
    "option", ["--experts int4", "--attention fp4", "--verify some", "--ranks 0", "--max-workers 0"]
)
def test_values_that_an_option_does_not_have(small, tmp_path, option):
    name, value = option.split()
    code, out, err = run("convert", small, tmp_path / "out", *BF16, name, value)
    assert (code, out) == (2, "")
    assert f"Invalid value for '{name}': " in err
    assert value in err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3"])
def test_a_device_that_is_not_there(small, tmp_path, device):
    error, remedy = refused(4, small, tmp_path / "out", *BF16, "--device", device)
    assert f"--device {device} does not exist" in error
    assert remedy == "→ use --device cpu"
    assert files(tmp_path) == {}


def test_finish_does_nothing_but_finish(small, tmp_path):
    folder = tmp_path / "out"
    convert(small, folder, *BF16, "--shard", "1/2", "--verify", "off")
    before = files(folder)
    for option in ("--finish", "--check"):
        for rest in ("--dry-run", "--shard 1/2", "--layers 0-1", "--no-mtp", "--ranks 2"):
            error, _ = refused(2, option, folder, *rest.split())
            assert f"{option} accepts only the output folder" in error
        error, remedy = refused(2, option, folder, "--verify", "full")
        assert f"{option} with --verify full needs a source" in error
        assert f"dsv4 convert {option} OUT --against SRC --verify full" in remedy
        error, _ = refused(2, option, folder, "--verify", "off", "--against", small)
        assert f"{option} with --verify off compares nothing" in error
    assert "accepts only the output folder" in refused(2, "--finish", folder, "--check", folder)[0]
    assert "--against needs --finish or --check" in refused(2, small, folder, *BF16, "--against", small)[0]
    assert files(folder) == before


@pytest.mark.parametrize("options", ["fp8", *slow("official --experts fp8", "mp --ranks 1 --experts fp8")])
def test_fp8_is_refused_where_the_scales_of_a_block_are_too_far_apart(source, tmp_path, options):
    # 0.5 with a scale 2 ** 14 below that of codes of 6, which become 6 * 2 ** 6, is e4m3's smallest number
    spread_scales(source, EXPERT, row=200, by=14)
    assert "all are exact" in convert(source, tmp_path / "fits", "--to", *options.split(), "--verify", "full")
    spread_scales(source, EXPERT, row=200, by=15)
    before = state(source)
    error, remedy = refused(1, source, tmp_path / "out", "--to", *options.split())
    assert f"{EXPERT}.weight cannot become fp8 without loss" in error
    # of its block
    assert "at row 128, column 0" in error
    assert "--to bf16 can hold every value" in remedy
    assert left(tmp_path / "out") == []
    assert state(source) == before


def test_nvfp4_is_refused_where_the_scales_of_a_matrix_are_too_far_apart(source, tmp_path):
    # e4m3 has the powers of two from 2 ** -9 to 2 ** 8
    spread_scales(source, EXPERT, row=200, by=17)
    assert "all are exact" in convert(source, tmp_path / "fits", "--to", "nvfp4", "--verify", "full")
    spread_scales(source, EXPERT, row=200, by=18)
    before = state(source)
    error, remedy = refused(1, source, tmp_path / "out", "--to", "nvfp4")
    assert f"{EXPERT}.weight cannot become nvfp4 without loss" in error
    assert "at row 200, column 32" in error
    assert "--to bf16 can hold every value" in remedy
    assert left(tmp_path / "out") == []
    assert state(source) == before


def test_nvfp4_needs_one_scale_for_gate_and_up(source, tmp_path):
    """w1 and w3 of an expert share it, w2 has its own; the drafter has none."""
    stem = EXPERT.removesuffix("w2")
    for name, byte in (("w1", TOP), ("w2", TOP - 40), ("w3", TOP - 17)):
        set_scales(source, stem + name, byte)
    spread_scales(source, EXPERT.replace("layers.1", "mtp.0"), row=200, by=40)
    assert "all are exact" in convert(source, tmp_path / "fits", "--to", "nvfp4", "--verify", "full")
    set_scales(source, f"{stem}w3", TOP - 18)
    error, _ = refused(1, source, tmp_path / "out", "--to", "nvfp4")
    assert f"{stem}w3.weight cannot become nvfp4 without loss" in error


@pytest.mark.parametrize(
    ("tensor", "byte", "options", "place"),
    [
        (f"{EXPERT}.scale", 0xFF, "bf16", "a scale is NaN at row 255, column 224"),
        *slow_rows(
            (f"{EXPERT}.scale", 0xFF, "fp8", "a scale is NaN at row 255, column 224"),
            (f"{EXPERT}.scale", 0xFF, "nvfp4", "a scale is NaN at row 255, column 224"),
        ),
        (f"{LINEAR}.scale", 0xFF, "mp --ranks 1", "a scale is NaN at row 128, column 128"),
        (f"{LINEAR}.weight", 0x7F, "transformers", "a value is NaN at row 255, column 255"),
        *slow_rows((f"{LINEAR}.weight", 0xFF, "official --attention bf16", "a value is NaN at row 255, column 255")),
        # 2 ** 126: codes from 4 on are beyond bf16, and not the first of a block's is as large
        (f"{EXPERT}.scale", 0xFD, "bf16", "a value is NaN or beyond bf16 at row 255, column "),
        *slow_rows((f"{LINEAR}.scale", 0xFD, "bf16", "a value is NaN or beyond bf16 at row 128, column 1")),
    ],
)
def test_a_value_that_has_no_place_is_named(source, tmp_path, monkeypatch, tensor, byte, options, place):
    monkeypatch.setattr(write, "CPU_STEP", 1)  # not in the first step
    set_byte(source, tensor, -1, byte)
    error, remedy = refused(1, source, tmp_path / "out", "--to", *options.split())
    assert f"{tensor.rpartition('.')[0]}.weight cannot become " in error
    assert place in error
    assert f"`dsv4 inspect {source} --values`" in remedy
    assert left(tmp_path / "out") == []


@pytest.mark.parametrize("number", [float("nan"), *slow(0.0, -1.0, float("inf"))])
@pytest.mark.parametrize(("to", "role"), [("base", "scale"), ("nvfp4", "weight_scale_2")])
def test_a_scale_that_would_not_load_does_not_become_sound(small, tmp_path, number, to, role):
    source = tmp_path / to
    convert(small, source, "--to", to, "--verify", "off")
    data = struct.pack("<f", number)
    name = f"{EXPERT}.{role}"
    damage.edit_tensor(source, name, lambda stored: replace(stored, data=data + stored.data[4:]))
    # a copy has it as it was
    convert(source, tmp_path / "copy", "--to", to, "--verify", "off")
    error, _ = refused(1, source, tmp_path / "out", *BF16)
    assert f"{name} holds a scale that is not a positive number" in error or "is NaN or too large" in error
    assert left(tmp_path / "out") == []


def test_a_disk_that_is_too_small(small, tmp_path, monkeypatch):
    output = tmp_path / "out"
    plan = json.loads(convert(small, output, *BF16, "--dry-run", "--json"))
    assert plan["fits"] is True
    needed = plan["bytes_to_write"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    error, remedy = refused(5, small, output, *BF16)
    # as many digits as tell the two apart
    assert f"{output} needs {needed / 1e9:.9f} GB more and its disk has {(needed - 1) / 1e9:.9f} GB free" in error
    assert remedy == "→ free 0.000000001 GB, or use another disk"
    # the plan is the answer to a dry run, the code its verdict
    code, out, err = run("convert", small, output, *BF16, "--dry-run", "--json")
    assert (code, json.loads(out)["fits"], json.loads(out)["free"]) == (5, False, needed - 1)
    assert f"error: {output} needs " in err
    code, out, err = run("convert", small, output, *BF16, "--dry-run")
    assert (code, f"{size_text(needed)} to write, " in out) == (5, True)
    assert not output.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    convert(small, output, *BF16)
    assert sum(path.stat().st_size for path in output.glob("*.safetensors")) == needed


def test_the_disk_is_that_of_the_output(small, tmp_path, monkeypatch):
    asked = []

    def usage(path):
        asked.append(path)
        return SimpleNamespace(free=10**9)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.chdir(tmp_path)
    convert(small, "new/folder", *BF16, "--dry-run")
    assert {*asked} == {tmp_path}


def write_wrongly(path, name, position, bit):
    """What a conversion that errs in one bit writes: that bit, and the hash of the file with it."""
    flip(path, name, position, bit)
    (journal,) = (path.parent / UNFINISHED).glob("journal*")
    entry = {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    with journal.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def flip(path, name, position, bit):
    """Flips one bit of a stored tensor: position from 0, its first byte, to 1, its last; bit: counted from there."""
    with path.open("r+b") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
        offset = 8 + length + begin + round(position * (end - begin - 1)) + bit // 8
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit % 8]))


ONE, FIRST, SECOND = "model-00001-of-00001.safetensors", "model0-mp2.safetensors", "model1-mp2.safetensors"
GATE_UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def unverified(small, tmp_path_factory):
    """The output of a conversion that was interrupted between writing and comparing, by its options."""

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    @cache
    def of(options):
        folder = tmp_path_factory.mktemp("unverified") / "out"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(conversion, "verify_files", interrupt)
            assert run("convert", small, folder, "--to", *options.split())[0] == 130
        return folder

    return of


@pytest.mark.parametrize(
    ("options", "file", "tensor", "position", "named"),
    [
        ("official", ONE, f"{EXPERT}.weight", 1, EXPERT),
        *slow_rows(("official", ONE, "layers.0.ffn.gate.tid2eid", 0.5, "layers.0.ffn.gate.tid2eid")),
        pytest.param("official", ONE, "mtp.0.hc_head_fn", 0.9, "mtp.0.hc_head_fn", marks=pytest.mark.slow),
        ("bf16", ONE, f"{LINEAR}.weight", 0.3, LINEAR),
        *slow_rows(("fp8", ONE, f"{EXPERT}.weight", 0.7, EXPERT)),
        pytest.param("fp8", ONE, f"{EXPERT}.scale", 1, EXPERT, marks=pytest.mark.slow),
        pytest.param("nvfp4", ONE, f"{EXPERT}.weight", 0.7, EXPERT, marks=pytest.mark.slow),
        *slow_rows(("nvfp4", ONE, f"{EXPERT}.weight_scale", 0.5, EXPERT)),
        ("nvfp4", ONE, f"{EXPERT}.weight_scale_2", 1, EXPERT),
        *slow_rows(("transformers", ONE, DOWN, 0.75, EXPERT)),
        pytest.param("transformers", ONE, GATE_UP, 0.625, "layers.1.ffn.experts.1.w1", marks=pytest.mark.slow),
        ("transformers", ONE, GATE_UP, 0.875, "layers.1.ffn.experts.1.w3"),
        # cut, an expert's, and what each rank has whole
        pytest.param(
            "mp --ranks 2", FIRST, "layers.1.attn.wo_b.weight", 0.5, "layers.1.attn.wo_b", marks=pytest.mark.slow
        ),
        ("mp --ranks 2", SECOND, "layers.1.attn.wo_b.weight", 0.5, "layers.1.attn.wo_b"),
        *slow_rows(
            ("mp --ranks 2", SECOND, "layers.1.attn.wq_b.scale", 1, "layers.1.attn.wq_b"),
            ("mp --ranks 2", SECOND, f"{EXPERT}.weight", 0.5, EXPERT),
        ),
        pytest.param("mp --ranks 2", FIRST, "norm.weight", 0.5, "norm.weight", marks=pytest.mark.slow),
        ("mp --ranks 2", SECOND, "norm.weight", 0.5, "norm.weight"),
        pytest.param(
            "mp --ranks 2", SECOND, "layers.1.attn.wkv.weight", 0, "layers.1.attn.wkv", marks=pytest.mark.slow
        ),
        *slow_rows(("mp --ranks 2", SECOND, "layers.1.attn.wkv.scale", 0, "layers.1.attn.wkv")),
    ],
)
def test_a_bit_that_changed_before_the_comparison(small, unverified, tmp_path, options, file, tensor, position, named):
    output = shutil.copytree(unverified(options), tmp_path / "out")
    there = {*left(output)}
    write_wrongly(output / file, tensor, position, bit=3)
    error, remedy = refused(7, small, output, "--to", *options.split(), "--verify", "full")
    assert f"{output}: {named} differs from the source" in error
    assert f"`rm -r {output}` and convert again" in remedy
    # no model without index and configuration
    assert {*left(output)} == there


def test_a_difference_is_found_as_often_as_one_looks(small, unverified, tmp_path):
    output = shutil.copytree(unverified("fp8"), tmp_path / "out")
    write_wrongly(output / ONE, "norm.weight", 0, bit=3)
    write_wrongly(output / ONE, f"{EXPERT}.weight", 0.5, bit=3)
    for check in ("full", "sample", "full"):
        error, _ = refused(7, small, output, "--to", "fp8", "--verify", check)
        assert "norm.weight differs from the source (and 1 more)" in error
    # the bit as it was
    write_wrongly(output / ONE, "norm.weight", 0, bit=3)
    write_wrongly(output / ONE, f"{EXPERT}.weight", 0.5, bit=3)
    assert "all are exact" in convert(small, output, "--to", "fp8", "--verify", "full")


def test_a_zero_that_changed_its_sign(small, unverified, tmp_path):
    output = shutil.copytree(unverified("bf16"), tmp_path / "out")
    # the first row of each expert begins with sixteen bytes of -0
    write_wrongly(output / ONE, f"{EXPERT}.weight", 0, bit=15)
    error, _ = refused(7, small, output, *BF16, "--verify", "full")
    assert f"{EXPERT} differs from the source" in error


def test_what_is_not_compared_is_said(small, unverified, tmp_path):
    output = shutil.copytree(unverified("bf16"), tmp_path / "out")
    write_wrongly(output / ONE, f"{EXPERT}.weight", 0.5, bit=3)
    assert "not compared with the source (--verify off)" in convert(small, output, *BF16, "--verify", "off")
    summary = json.loads(convert(small, tmp_path / "json", *BF16, "--verify", "off", "--json").splitlines()[-1])
    assert summary["verified"] is None
