"""`dsv4 convert`: nothing is called complete that has not been compared, or whose bytes are not those that were
written; `--finish`, `--check`, and a finished job run again."""

import hashlib
import json
import os
import shutil
import subprocess

import pytest

from dsv4cli.engine.conversion import convert as conversion
from tests.commands.convert.test_refusals import EXPERT, ONE, UNFINISHED, flip, write_wrongly
from tests.support import conversions, synthetic
from tests.support.conversions import convert, files

BF16 = ("--to", "bf16")
PARTED = (*BF16, "--max-shard-size", "400kB")
SUMS = "SHA256SUMS"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = synthetic.write_checkpoint(tmp_path_factory.mktemp("source") / "a model", synthetic.SMALL)
    (folder / "tokenizer.json").write_text("{}")
    for name in ("notes\n.txt", "\u2028\x0c.txt", os.fsdecode(b"\xff.txt")):
        (folder / name).write_text("x")
    (folder / SUMS).write_text("of the source\n")
    return folder


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "out"
    convert(source, folder, *PARTED)
    return folder


@pytest.fixture(scope="module")
def parted(source, tmp_path_factory):
    """Two parts in one folder, both compared."""
    folder = tmp_path_factory.mktemp("parted") / "out"
    for part in (1, 2):
        convert(source, folder, *PARTED, "--shard", f"{part}/2")
    return folder


@pytest.fixture
def parts(parted, tmp_path):
    return shutil.copytree(parted, tmp_path / "parts")


@pytest.fixture
def interrupted(source, tmp_path, monkeypatch):
    """A job that was interrupted between writing and comparing."""

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "verify_files", interrupt)
        assert conversions.run("convert", source, tmp_path / "out", *BF16)[0] == 130
    return tmp_path / "out"


def a_part(folder, part=1):
    """The second file of a part of two."""
    return sorted(folder.glob("*.safetensors"))[part + 1]


def err_of(code, *arguments):
    found, out, err = conversions.run("convert", *arguments)
    assert (found, out) == (code, ""), err
    return err


# --- what failed its comparison


def test_what_failed_its_comparison_does_not_pass_without_one(source, interrupted):
    write_wrongly(interrupted / ONE, f"{EXPERT}.weight", 0.5, bit=3)
    assert "differs from the source" in err_of(7, source, interrupted, *BF16, "--verify", "full")
    for _ in range(2):
        err = err_of(7, source, interrupted, *BF16, "--verify", "off")
        assert "differs from the source, as a comparison found" in err
        assert f"`rm -r {interrupted}`" in err
    assert "as its comparison found" in err_of(7, "--finish", interrupted)
    assert not (interrupted / "config.json").exists()


def test_what_failed_its_comparison_is_compared_whole(source, interrupted):
    """A sample might miss it."""
    write_wrongly(interrupted / ONE, "layers.1.attn.wq_a.weight", 0.99, bit=3)
    err_of(7, source, interrupted, *BF16, "--verify", "full")
    assert "wq_a differs from the source" in err_of(7, source, interrupted, *BF16)
    # written anew, it is sound
    (interrupted / ONE).unlink()
    out = convert(source, interrupted, *BF16)
    assert "all of " in out
    assert "all are exact" in out


def test_a_part_that_failed_is_not_finished(source, parts):
    (path,) = (parts / UNFINISHED).glob("journal-1-*")
    with path.open("a") as file:
        file.write(json.dumps({"verdict": {"sound": False, "check": "full", "cut": 0}}) + "\n")
    assert "part 1 of 2 differs from the source" in err_of(7, "--finish", parts)
    assert "part 1 of 2" in err_of(7, "--finish", parts)
    assert not (parts / "config.json").exists()
    # compared again, all of it, and found sound
    code, out, err = conversions.run("convert", "--finish", parts, "--against", source)
    assert code == 0, err
    assert "all of " in out


def test_a_part_that_was_not_compared_is_not_finished(source, whole, tmp_path):
    folder = tmp_path / "out"
    convert(source, folder, *PARTED, "--shard", "1/2")
    convert(source, folder, *PARTED, "--shard", "2/2", "--verify", "off")
    before = files(folder)
    err = err_of(2, "--finish", folder)
    assert "part 2 of 2 has not been compared with the source" in err
    assert f"`dsv4 convert --finish {folder} --against SRC`" in err
    assert files(folder) == before
    code, out, err = conversions.run("convert", "--finish", folder, "--against", source)
    assert code == 0, err
    assert "is complete" in out
    assert "all are exact" in out
    assert files(folder) == files(whole)


def test_a_part_written_after_its_comparison_is_not_compared(source, parts):
    a_part(parts).unlink()
    convert(source, parts, *PARTED, "--shard", "1/2", "--verify", "off")
    assert "part 1 of 2 has not been compared" in err_of(2, "--finish", parts)


def test_finish_finds_what_differs(source, parts):
    path = a_part(parts)
    name = next(iter(conversions.damage.read_shard(path)))
    flip(path, name, 0.5, bit=3)
    (journal,) = (parts / UNFINISHED).glob("journal-1-*")
    entry = {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    with journal.open("a") as file:
        file.write(json.dumps(entry) + "\n")
    err = err_of(7, "--finish", parts, "--against", source, "--verify", "full")
    assert "differs from the source" in err
    assert "part 1 of 2 differs" in err_of(7, "--finish", parts)


def test_finish_with_another_source(source, parts, tmp_path):
    other = synthetic.write_checkpoint(tmp_path / "other", synthetic.SMALL, seed=1)
    assert "differs from the source" in err_of(7, "--finish", parts, "--against", other)
    tiny = conversions.damage.copy_checkpoint(tmp_path / "tiny")
    assert f"{parts} cannot come from {tiny}" in err_of(2, "--finish", parts, "--against", tiny)


def test_a_journal_that_was_not_copied(parts):
    (path,) = (parts / UNFINISHED).glob("journal-2-*")
    path.unlink()
    err = err_of(1, "--finish", parts)
    assert "contains no journal of part 2 of 2" in err
    assert "--shard 2/2" in err


def test_parts_of_what_is_cut_are_named(source, tmp_path):
    options = ("--to", "mp", "--ranks", "2")
    for part in (1, 2):
        convert(source, tmp_path / "out", *options, "--shard", f"{part}/2")
    code, _, err = conversions.run("convert", "--finish", tmp_path / "out")
    assert (code, "matrices split across parts have not been compared" in err) == (0, True)
    assert f"dsv4 convert --check {tmp_path / 'out'} --against SRC" in err.replace("` SRC", " SRC")
    out = convert("--check", tmp_path / "out", "--against", source, "--verify", "full")
    assert "all of " in out
    # the job run again does not take the cut ones for compared
    found = json.loads(convert(source, tmp_path / "out", *options, "--json"))
    assert (found["compared"], found["verified"]["exact"] > 0) == ("sample", True)


# --- bytes


def test_a_file_that_changed_after_a_kill(source, interrupted):
    whole_again = (interrupted / ONE).read_bytes()
    flip(interrupted / ONE, "norm.weight", 0, bit=3)
    for check in ("sample", "off"):
        err = err_of(7, source, interrupted, *BF16, "--verify", check)
        assert f"{interrupted / ONE} has changed since it was written" in err
        assert f"`rm {interrupted / ONE}`" in err
    assert "it has not been compared with the source" in err_of(2, "--finish", interrupted)
    (interrupted / ONE).unlink()
    convert(source, interrupted, *BF16)
    assert (interrupted / ONE).read_bytes() == whole_again


def test_a_file_that_changed_on_its_way(parts):
    path = a_part(parts, 2)
    flip(path, next(iter(conversions.damage.read_shard(path))), 1, bit=7)
    before = files(parts)
    assert f"{path} has changed since it was written" in err_of(7, "--finish", parts)
    assert files(parts) == before


def test_a_file_that_no_run_has_written_is_not_trusted(source, interrupted):
    content = (interrupted / ONE).read_bytes()
    (journal,) = (interrupted / UNFINISHED).glob("journal*")
    lines = [line for line in journal.read_text().splitlines() if "sha256" not in line]
    journal.write_text("\n".join(lines) + "\n")
    flip(interrupted / ONE, "norm.weight", 0, bit=3)
    convert(source, interrupted, *BF16, "--verify", "off")
    assert (interrupted / ONE).read_bytes() == content


def test_the_hashes_are_those_of_sha256sum(whole):
    done = subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=whole, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    names = {name for name in files(whole) if name != SUMS}
    assert len(done.stdout.splitlines()) == len(names)
    assert "notes\n.txt" in names


def test_nobody_else_sees_the_hashes(whole, source, tmp_path):
    assert conversions.run("inspect", whole)[0] == 0
    convert(whole, tmp_path / "back", "--to", "official")
    assert (tmp_path / "back" / SUMS).read_bytes() != (whole / SUMS).read_bytes()
    assert b"of the source" not in (whole / SUMS).read_bytes()
    code, out, _ = conversions.run("inspect", whole, "--diff", source)
    assert (code, SUMS in out) == (0, False), out


# --- --check


def test_check(whole, source, tmp_path):
    out = convert("--check", whole)
    assert "is unchanged" in out
    assert json.loads(convert("--check", whole, "--json"))["sound"] is True
    out = convert("--check", whole, "--against", source, "--verify", "full", "--workers", "2")
    assert "all of " in out
    folder = shutil.copytree(whole, tmp_path / "out")
    path = a_part(folder)
    flip(path, next(iter(conversions.damage.read_shard(path))), 0.3, bit=3)
    (folder / "tokenizer.json").unlink()
    code, out, _ = conversions.run("convert", "--check", folder)
    assert code == 3
    assert f"{path.name} has changed" in out
    assert "tokenizer.json is missing" in out
    code, out, _ = conversions.run("convert", "--check", folder, "--json")
    found = json.loads(out)
    assert (code, found["missing"], found["changed"]) == (3, ["tokenizer.json"], [path.name])


def test_check_of_values_alone(whole, source, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "out")
    (folder / SUMS).unlink()
    assert f"dsv4 convert --check {folder} --against SRC" in err_of(2, "--check", folder)
    assert "all are exact" in convert("--check", folder, "--against", source)
    path = a_part(folder)
    flip(path, next(iter(conversions.damage.read_shard(path))), 0.5, bit=3)
    code, out, _ = conversions.run("convert", "--check", folder, "--against", source, "--verify", "full")
    assert (code, f"{folder} differs from {source}" in out) == (3, True)


def test_check_knows_the_first_layer(source, tmp_path):
    convert(source, tmp_path / "out", "--to", "nvfp4", "--layers", "1", "--no-mtp")
    assert "all are exact" in convert("--check", tmp_path / "out", "--against", source, "--verify", "full")


def test_check_with_another_source(whole, source, tmp_path):
    other = synthetic.write_checkpoint(tmp_path / "b", synthetic.SMALL, seed=1)
    code, out, err = conversions.run("convert", "--check", whole, "--against", other)
    assert (code, f"{whole} differs from {other}" in out, "has changed since it was written" in out) == (3, True, False)
    assert "if it was made from another source, name that one" in err


def test_a_list_without_files_proves_nothing(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "out")
    (folder / SUMS).write_bytes((folder / SUMS).read_bytes().split(b"\n")[0] + b"\n")
    assert f"{SUMS} lists no file" in err_of(2, "--check", folder)


@pytest.mark.parametrize("what", ["none", "unfinished"])
def test_there_is_nothing_to_check(parts, tmp_path, what):
    folder = parts if what == "unfinished" else tmp_path / "none"
    err = err_of(2, "--check", folder)
    assert ("is not finished" if what == "unfinished" else "there is no folder") in err


# --- a finished job


def test_a_finished_job_is_complete(source, whole):
    before = files(whole)
    for rest in ((), ("--dry-run",), ("--shard", "2/3")):
        code, out, err = conversions.run("convert", source, whole, *PARTED, *rest)
        assert (code, f"{whole} is complete" in out) == (0, True), err
        assert "--check" in err
    found = json.loads(convert(source, whole, *PARTED, "--json"))
    assert (found["event"], found["compared"]) == ("complete", "sample")
    assert files(whole) == before


def test_a_finished_job_that_was_not_compared_is_said(source, tmp_path):
    convert(source, tmp_path / "out", *BF16, "--verify", "off")
    for rest in (("--verify", "off"), ("--dry-run",)):
        code, out, err = conversions.run("convert", source, tmp_path / "out", *BF16, *rest)
        assert (code, "is complete" in out, "part of the output has not been compared" in err) == (0, True, True)


def test_a_finished_job_is_compared_as_far_as_it_was_not(source, tmp_path):
    job = (source, tmp_path / "out", *BF16)
    convert(*job, "--verify", "off")
    before = files(tmp_path / "out")
    for options, compared in ((("--shard", "2/2"), "sample"), (("--verify", "full"), "full")):
        found = json.loads(convert(*job, *options, "--json"))
        assert (found["event"], found["compared"], found["verified"]["exact"] > 0) == ("complete", compared, True)
        # known from now on
        assert json.loads(convert(*job, *options, "--json"))["verified"] is None
    after = files(tmp_path / "out")
    assert {name for name in after if after[name] != before.get(name)} == {SUMS}
    assert "is unchanged" in convert("--check", tmp_path / "out")


def test_a_finished_job_that_differs_is_found(source, tmp_path):
    convert(source, tmp_path / "out", *BF16, "--verify", "off")
    flip(tmp_path / "out" / ONE, f"{EXPERT}.weight", 0.5, bit=3)
    for _ in range(2):
        err = err_of(7, source, tmp_path / "out", *BF16, "--verify", "full")
        assert f"{EXPERT} differs from the source" in err


def test_another_job_is_not_complete(source, whole, tmp_path):
    for options in (BF16, ("--to", "fp8", *PARTED[2:]), (*PARTED, "--no-mtp")):
        assert "does not contain a conversion of this source with these options" in err_of(2, source, whole, *options)
    # the same shapes with other values
    other = synthetic.write_checkpoint(tmp_path / "a model", synthetic.SMALL, seed=1)
    assert "does not contain a conversion of this source with these options" in err_of(2, other, whole, *PARTED)


def test_a_finished_job_that_lost_a_file(source, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "out")
    a_part(folder).unlink()
    err = err_of(1, source, folder, *PARTED)
    assert f"{a_part(whole).name} is missing" in err
    assert f"`rm -r {folder}`" in err


# --- the lock


def test_the_part_is_held_until_the_comparison_has_ended(source, tmp_path, monkeypatch):
    others = []
    compare = conversion.verify_files

    def with_others(job, *arguments, **options):
        for command in ((source, job.output, *BF16), ("--finish", job.output)):
            others.append("another process is writing this part" in err_of(2, *command))
        return compare(job, *arguments, **options)

    monkeypatch.setattr(conversion, "verify_files", with_others)
    convert(source, tmp_path / "out", *BF16)
    assert others == [True, True]
    assert (tmp_path / "out" / "config.json").exists()
