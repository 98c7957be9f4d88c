"""`dsv4 convert` and the system: each refusal of a disk is a sentence, a source that changes is noticed, a plan writes
nothing, other files are counted."""

import errno
import json
import os
import shlex
import shutil
import tracemalloc

import pytest

from dsv4cli.engine.conversion import convert as conversion
from dsv4cli.engine.conversion import write
from dsv4cli.engine.conversion.disk_space import distinct_sizes
from dsv4cli.output import Output
from tests.support import conversions, synthetic
from tests.support.conversions import convert, files
from tests.support.slow import slow_except, slow_rows

BF16 = ("--to", "bf16")
UNFINISHED = ".dsv4-convert"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return synthetic.write_checkpoint(tmp_path_factory.mktemp("source") / "small", synthetic.SMALL)


@pytest.fixture
def source(small, tmp_path):
    """One that a test may change."""
    return shutil.copytree(small, tmp_path / "source")


def refused(code, *arguments):
    found, out, err = conversions.run("convert", *arguments)
    assert (found, out) == (code, ""), err
    assert "Traceback" not in err
    error, remedy = err.rstrip("\n").split("\n")[-2:]
    return error, remedy


REFUSALS = {
    errno.ENOSPC: (5, "no space left on its disk: ", "free some space"),
    errno.EDQUOT: (5, "the quota on its disk is used up: ", "free some space"),
    errno.EFBIG: (5, "does not allow a file of that size", "--max-shard-size"),
    errno.EIO: (1, "Input/output error: ", "check the disk"),
    errno.ESTALE: (1, "Stale file handle: ", "check the disk"),
    errno.EROFS: (2, "cannot be written to: Read-only file system", "use a folder"),
    errno.EACCES: (2, "cannot be written to: Permission denied", "use a folder"),
}


@pytest.mark.parametrize(
    ("number", "call"),
    slow_except(
        [(errno.ENOSPC, "pwrite"), (errno.EFBIG, "pwrite"), (errno.EROFS, "pwrite"), (errno.EIO, "replace")],
        [*((number, "pwrite") for number in REFUSALS), *((errno.EIO, call) for call in ("fsync", "replace", "mkdir"))],
    ),
    ids=lambda value: errno.errorcode.get(value, value),
)
def test_what_a_disk_refuses_is_a_sentence(small, tmp_path, monkeypatch, number, call):
    code, sentence, advice = REFUSALS[number]
    (tmp_path / "an output").mkdir()

    def refuse(*arguments, **options):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        error, remedy = refused(code, small, tmp_path / "an output", *BF16)
    assert str(tmp_path / "an output") in error
    assert sentence in error
    assert advice in remedy
    if code in (1, 5) and number != errno.EFBIG:
        assert " GB still to be written, " in error
        assert "run the same command again: it continues" in remedy
    convert(small, tmp_path / "an output", *BF16)


def test_what_a_disk_refuses_when_the_end_is_written(small, tmp_path, monkeypatch):
    """The journal's verdict, the copies, the configuration: every phase has the sentence."""
    for phase, owner, name in (("judge", conversion.Journal, "judge"), ("assemble", conversion, "assemble")):

        def refuse(*arguments, **options):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuse)
            error, _ = refused(1, small, tmp_path / phase, *BF16)
        assert "Input/output error" in error
        convert(small, tmp_path / phase, *BF16)


def test_a_source_whose_other_file_cannot_be_read(source, tmp_path):
    (source / "tokenizer.json").write_text("{}")

    def unreadable(path):
        if path.name == "tokenizer.json":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path)

    from dsv4cli.engine.conversion import copies

    opened = copies.open_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "open_file", unreadable)
        error, remedy = refused(1, source, tmp_path / "out", *BF16)
    assert f"{source / 'tokenizer.json'} cannot be read: Permission denied" in error
    assert "check the file" in remedy


@pytest.mark.parametrize(
    ("counts", "texts"),
    [
        ((12_000_000, 11_000_000), ["0.012 GB", "0.011 GB"]),
        ((10, 9), ["0.000000010 GB", "0.000000009 GB"]),
        ((5_000_000_000, 0), ["5.00 GB", "0.00 GB"]),
        ((7, 7), ["0.000000007 GB", "0.000000007 GB"]),
        ((1_234_567_890_123, 20_000_000_000), ["1,234.57 GB", "20.00 GB"]),
    ],
)
def test_numbers_do_not_contradict_each_other(counts, texts):
    assert distinct_sizes(*counts) == texts


# --- a source that changes


@pytest.mark.parametrize("when", ["writing", "comparing"])
def test_a_source_that_changes(source, tmp_path, monkeypatch, when):
    path = source / "model-00002-of-00005.safetensors"

    def change(call):
        def changing(*arguments, **options):
            found = call(*arguments, **options)
            path.write_bytes(path.read_bytes())
            return found

        return changing

    target = (write, "publish") if when == "writing" else (conversion, "verify")
    with monkeypatch.context() as patch:
        patch.setattr(*target, change(getattr(*target)))
        error, remedy = refused(1, source, tmp_path / "an output", *BF16)
    assert f"{path} changed while it was read" in error
    if when == "writing":
        assert shlex.quote(str(tmp_path / "an output")) in remedy
    assert not (tmp_path / "an output" / "config.json").exists()
    error, _ = refused(2, source, tmp_path / "an output", *BF16)
    assert "the source has changed" in error


# --- a plan


def test_a_plan_of_an_empty_part(small, tmp_path):
    plan = json.loads(convert(small, tmp_path / "out", *BF16, "--shard", "2/2", "--dry-run", "--json"))
    assert (plan["files"], plan["bytes_to_write"], plan["seconds"], plan["bytes_per_second"]) == (0, 0, 0, None)
    assert "nothing to write" in convert(small, tmp_path / "out", *BF16, "--shard", "2/2", "--dry-run")


def test_a_plan_writes_nothing(small, tmp_path, monkeypatch):
    opened = []

    def open_to_read(path, flags, *rest, **options):
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path) != os.devnull:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        opened.append(path)
        return before(path, flags, *rest, **options)

    before = os.open
    monkeypatch.setattr(os, "open", open_to_read)
    assert "to write, " in convert(small, tmp_path / "out", *BF16, "--dry-run")
    assert opened
    assert files(tmp_path) == {}


# --- other files


def test_other_files_are_counted(source, tmp_path, monkeypatch):
    (source / "assets").mkdir()
    (source / "assets" / "picture.raw").write_bytes(b"x" * 5_000_000)
    (source / "tokenizer.json").write_text("{}")
    plan = json.loads(convert(source, tmp_path / "out", *BF16, "--dry-run", "--json"))
    assert (plan["other_files"], plan["other_bytes"]) == (2, 5_000_002)
    assert plan["bytes_to_write"] == plan["bytes_out"] + plan["other_bytes"]
    assert "other files" in convert(source, tmp_path / "out", *BF16, "--dry-run")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": plan["bytes_out"] + 5_000_001}))
    error, _ = refused(5, source, tmp_path / "out", *BF16)
    assert "needs " in error


def test_other_files_do_not_go_through_memory(source, tmp_path, monkeypatch):
    with (source / "large.raw").open("wb") as file:
        file.truncate(64 << 20)
    peaks, copy = [], conversion.copy_files

    def watched(*arguments, **options):
        tracemalloc.start()
        copy(*arguments, **options)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    monkeypatch.setattr(conversion, "copy_files", watched)
    convert(source, tmp_path / "out", *BF16, "--verify", "off")
    assert (tmp_path / "out" / "large.raw").stat().st_size == 64 << 20
    assert peaks[0] < 16 << 20


def test_the_comparison_counts_bytes(small, tmp_path, monkeypatch):
    seen = {}

    class Bar:
        def __init__(self, label):
            self.label = label

        def __enter__(self):
            return lambda done, total: seen.__setitem__(self.label, (done, total))

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(Output, "progress", lambda out, label: Bar(label))
    convert(small, tmp_path / "out", "--to", "bf16", "--verify", "full")
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert seen["comparing"][0] == seen["comparing"][1]
    # all but the header
    assert 0.95 * size < seen["comparing"][1] < size
    convert(small, tmp_path / "sample", "--to", "bf16")
    assert seen["comparing"][0] == seen["comparing"][1] <= size


# --- what to do next


@pytest.mark.parametrize(
    ("options", "command"),
    [
        (("--to", "nvfp4"), "inspect {} --for vllm"),
        *slow_rows(
            (("--to", "official"), "inspect {}"),
            (("--to", "transformers"), "inspect {} --for transformers"),
            (("--to", "mp", "--ranks", "1"), "inspect {} --for official"),
        ),
        (("--to", "bf16", "--layers", "0-1"), "inspect {}"),
    ],
)
def test_the_next_step_can_be_pasted(source, tmp_path, options, command):
    (source / "tokenizer.json").write_text("{}")
    folder = tmp_path / "an output"
    code, _, err = conversions.run("convert", source, folder, *options)
    assert code == 0, err
    hint = err.rstrip("\n").split("\n")[-1]
    assert f"`dsv4 {command.format(shlex.quote(str(folder)))}`" in hint
    assert conversions.run(*shlex.split(hint.split("`")[1])[1:])[0] == 0


def test_the_next_step_of_a_part(small, tmp_path):
    folder = tmp_path / "an output"
    for part in (1, 2):
        _, _, err = conversions.run("convert", small, folder, *BF16, "--shard", f"{part}/2")
        assert f"`dsv4 convert --finish {shlex.quote(str(folder))}`" in err
    assert conversions.run("convert", "--finish", folder)[0] == 0


@pytest.mark.parametrize(
    ("lost", "advice"),
    [
        ((5,), "--layers 0-1 --no-mtp"),
        ((3, 5), "--layers 0-0 --no-mtp"),
        # the embedding, the head, or every layer
        ((1,), ""),
        *slow_rows(((3,), "--layers 0-0"), ((4,), ""), ((2, 3), "")),
    ],
)
def test_the_layers_that_are_there_can_be_converted(tmp_path, lost, advice):
    source = synthetic.write_checkpoint(tmp_path / "part", synthetic.SMALL)
    for number in lost:
        (source / f"model-{number:05}-of-00005.safetensors").unlink()
    error, remedy = refused(1, source, tmp_path / "out", *BF16)
    assert "missing" in error
    assert ("repeat the command with" in remedy) == bool(advice)
    if advice:
        assert f"with `{advice}`, which are there" in remedy
        convert(source, tmp_path / "out", *BF16, *advice.split())


def test_an_index_that_names_a_file_in_vain_is_no_part_of_a_model(source, tmp_path):
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {
        key: "gone.safetensors" if key == "norm.weight" else file for key, file in index["weight_map"].items()
    }
    path.write_text(json.dumps(index))
    error, remedy = refused(1, source, tmp_path / "out", *BF16)
    assert "norm.weight is in" in error
    # all layers are there: to choose them would not help
    assert "--layers" not in remedy


def test_a_file_that_a_link_has_lost_is_not_left_out(source, tmp_path):
    (source / "encoding").mkdir()
    lost = source / "encoding" / "encoding_dsv4.py"
    lost.symlink_to("../../blobs/none")
    for more in ((), ("--dry-run",)):
        error, remedy = refused(1, source, tmp_path / "out", *BF16, *more)
        assert f"{lost} is missing, but a link points to it" in error
        assert "download encoding/encoding_dsv4.py again, or remove the link" in remedy
    assert not (tmp_path / "out").exists()


def test_an_output_behind_a_link_that_leads_nowhere(small, tmp_path):
    (tmp_path / "dead").symlink_to("none")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("dead", "dead/out", "loop", "loop/out"):
        error, _ = refused(2, small, tmp_path / name, *BF16)
        assert f"{tmp_path / name.partition('/')[0]} is a broken symbolic link" in error
