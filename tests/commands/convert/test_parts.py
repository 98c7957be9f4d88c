"""`dsv4 convert --shard I/N` on several machines, and `--finish`: the same bytes as one machine writes."""

import json
import os
import shutil
import signal

import pytest

from tests.support import conversions, crashing, damage, synthetic
from tests.support.conversions import convert, files
from tests.support.slow import slow

JOBS = {
    "transformers": ("--to", "transformers", "--max-shard-size", "400kB"),
    "fp8": ("--to", "fp8", "--max-shard-size", "400kB"),
    "mp": ("--to", "mp", "--ranks", "2"),
}
PARTS = 3
UNFINISHED = ".dsv4-convert"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = synthetic.write_checkpoint(tmp_path_factory.mktemp("source") / "small", synthetic.SMALL)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def parts(source, tmp_path_factory):
    """The output of each machine, in a folder of its own, of the job `fp8`."""
    folder = tmp_path_factory.mktemp("parts")
    for part in range(1, PARTS + 1):
        convert(source, folder / str(part), *JOBS["fp8"], "--shard", f"{part}/{PARTS}")
    return folder


@pytest.fixture
def joined(parts, tmp_path):
    """The parts copied together, as by `cp -r`, with nothing done yet."""
    return join(parts, tmp_path / "joined")


def join(parts, output):
    for part in parts.iterdir():
        shutil.copytree(part, output, dirs_exist_ok=True)
    return output


def finish(output):
    return conversions.run("convert", "--finish", output)


@pytest.mark.parametrize("job", ["mp", *slow(*sorted(JOBS.keys() - {"mp"}))])
def test_parts_joined_are_the_whole(source, tmp_path, job):
    convert(source, tmp_path / "whole", *JOBS[job])
    for part in range(1, PARTS + 1):
        out = convert(source, tmp_path / "parts" / str(part), *JOBS[job], "--shard", f"{part}/{PARTS}")
        assert "all are exact" in out or (job == "mp" and "nothing to compare" in out)
        assert not (tmp_path / "parts" / str(part) / damage.INDEX).exists()
        assert not (tmp_path / "parts" / str(part) / "config.json").exists()
    output = join(tmp_path / "parts", tmp_path / "joined")
    # a part of it is no model yet
    code, out, err = conversions.run("inspect", output)
    assert (code != 0, "unfinished conversion" in out + err) == (True, True)
    # what is cut across the parts has not been compared by any of them, and SHA256SUMS says so
    against = ("--against", source) if job == "mp" else ()
    code, out, err = conversions.run("convert", "--finish", output, *against)
    assert (code, "is complete" in out) == (0, True), err
    assert files(output) == files(tmp_path / "whole")


def test_parts_in_one_folder(source, tmp_path):
    convert(source, tmp_path / "whole", *JOBS["fp8"])
    for part in (2, 3, 1):
        convert(source, tmp_path / "out", *JOBS["fp8"], "--shard", f"{part}/{PARTS}")
    assert finish(tmp_path / "out")[0] == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.slow
def test_a_part_that_is_killed_continues(source, parts, tmp_path):
    command = (source, tmp_path / "out", *JOBS["fp8"], "--shard", f"2/{PARTS}")
    for number in (12, 25, 40):
        assert crashing.ended(crashing.started("kill", number, command)) == -signal.SIGKILL
    convert(*command)
    assert files(tmp_path / "out").keys() == files(parts / "2").keys()
    for name, content in files(parts / "2").items():
        if not name.startswith(UNFINISHED):
            assert (tmp_path / "out" / name).read_bytes() == content


def test_more_parts_than_files(source, tmp_path):
    convert(source, tmp_path / "whole", "--to", "bf16")
    for part in (1, 2, 3):
        out = convert(source, tmp_path / "out", "--to", "bf16", "--shard", f"{part}/3", "--json")
        summary = json.loads(out.splitlines()[-1])
        assert (summary["part"], summary["files"]) == ([part, 3], int(part == 1))
    assert finish(tmp_path / "out")[0] == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def a_file(folder):
    return sorted(folder.glob("*.safetensors"))[2]


def lose(path):
    path.unlink()


def shorten(path):
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path):
    os.truncate(path, path.stat().st_size + 1)


def empty(path):
    path.write_bytes(b"")


def change_header(path):
    path.write_bytes(path.read_bytes().replace(b"F8_E8M0", b"F8_E4M3", 1))


@pytest.mark.parametrize("damage_file", [lose, shorten, lengthen, empty, change_header])
def test_a_file_that_is_not_the_planned_one_is_named(joined, damage_file):
    path = a_file(joined)
    damage_file(path)
    before = files(joined)
    code, out, err = finish(joined)
    assert (code, out) == (1, "")
    assert str(path) in err
    assert ("does not exist yet" if damage_file is lose else "is not the file of this conversion") in err
    assert "--shard" in err
    assert files(joined) == before


def test_what_finish_asks_for_helps(source, joined, tmp_path):
    convert(source, tmp_path / "whole", *JOBS["fp8"])
    path = a_file(joined)
    shorten(path)
    assert finish(joined)[0] == 1
    path.unlink()
    convert(source, joined, *JOBS["fp8"], "--shard", f"3/{PARTS}")
    assert finish(joined)[0] == 0
    assert files(joined) == files(tmp_path / "whole")


def test_a_part_of_another_job_does_not_join(source, joined, tmp_path):
    convert(source, tmp_path / "other", "--to", "fp8", "--max-shard-size", "300kB", "--shard", "1/3")
    shutil.copytree(tmp_path / "other", joined, dirs_exist_ok=True)
    code, _, err = finish(joined)
    assert (code, "does not exist yet" in err or "is not the file" in err) == (1, True)


@pytest.mark.slow
def test_finish_killed_and_run_again(source, joined, tmp_path):
    convert(source, tmp_path / "whole", *JOBS["fp8"])
    trace = crashing.started("", 0, ("--finish", shutil.copytree(joined, tmp_path / "traced")), tmp_path / "calls")
    assert crashing.ended(trace) == 0
    names = (tmp_path / "calls").read_text().split("\n")
    # the last call removes the empty folder: before it, nothing is left to finish with
    for number in range(1, len(names)):
        output = shutil.copytree(joined, tmp_path / str(number))
        assert crashing.ended(crashing.started("kill", number, ("--finish", output))) == -signal.SIGKILL
        assert finish(output)[0] == 0
        assert files(output) == files(tmp_path / "whole")


def test_what_is_finished_is_checked(source, joined, tmp_path):
    finish(joined)
    convert(source, tmp_path / "done", "--to", "bf16")
    for folder in (joined, tmp_path / "done"):
        for rest in ((), ("--against", source)):
            code, out, err = conversions.run("convert", "--finish", folder, *rest)
            assert (code, f"{folder} is unchanged" in out, "already finished" in err) == (0, True, True)
            assert ("all are exact" in out) == bool(rest)
    next(joined.glob("*.safetensors")).write_bytes(b"")
    assert finish(joined)[0] == 3


def test_there_is_nothing_to_finish(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        code, _, err = finish(folder)
        assert (code, f"{folder} contains no unfinished conversion" in err) == (2, True)


def test_a_damaged_header_is_not_the_file_of_the_conversion(joined):
    path = min(joined.glob("*.safetensors"))
    with path.open("r+b") as file:
        file.write(b"\xff" * 8)  # its length
    code, _, err = finish(joined)
    assert (code, f"{path} is not the file of this conversion" in err) == (1, True)


ONE = "model-00001-of-00001.safetensors"
GOOD = {"parts": 1, "files": {ONE: {"nbytes": 1, "header": ""}}, "metadata": {}, "index": None, "to": "fp8", "layer": 0}


@pytest.mark.parametrize(
    "plan",
    [
        [], None, {}, GOOD | {"parts": 0}, GOOD | {"parts": 10**9}, GOOD | {"files": {}}, GOOD | {"files": {ONE: {}}},
        GOOD | {"metadata": {"../a": "x"}}, GOOD | {"metadata": {"/tmp/a": "x"}}, GOOD | {"metadata": {"a/../b": "x"}},
        GOOD | {"metadata": {"a": 1}}, GOOD | {"layer": "0"}, GOOD | {"index": []},
    ],
)  # fmt: skip
def test_a_plan_that_is_none_writes_nothing(tmp_path, plan):
    workshop = tmp_path / "out" / UNFINISHED
    workshop.mkdir(parents=True)
    (workshop / "plan.json").write_text(json.dumps(plan))
    code, _, err = finish(tmp_path / "out")
    assert (code, "plan.json is damaged" in err) == (1, True)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["plan.json"]


@pytest.mark.parametrize("rest", [("SRC",), ("--to", "bf16")])
def test_finish_takes_a_folder_alone(joined, rest):
    code, _, err = conversions.run("convert", "--finish", joined, *rest)
    assert (code, "--finish accepts only the output folder" in err) == (2, True)
