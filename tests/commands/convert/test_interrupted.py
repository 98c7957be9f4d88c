"""`dsv4 convert`, interrupted: killed, Ctrl-C, a full disk, parts on several machines; what comes out is the same."""

import errno
import os
import shutil
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4cli.commands import convert as commands
from dsv4cli.engine.conversion import journal, plan
from dsv4cli.engine.conversion.journal import Journal
from dsv4cli.engine.settings import Part
from dsv4cli.errors import UsageError
from dsv4cli.output import Output
from tests.support import conversions, crashing, damage, synthetic
from tests.support.conversions import convert, files
from tests.support.slow import slow
from tests.support.waiting import comes

JOBS = {
    "transformers": ("--to", "transformers", "--max-shard-size", "400kB", "--verify", "off"),
    "nvfp4": ("--to", "nvfp4", "--max-shard-size", "400kB", "--verify", "off"),
    "mp": ("--to", "mp", "--ranks", "2"),
}
BF16 = ("--to", "bf16", "--max-shard-size", "400kB")
# kills of each job, spread over its calls; every call is the business of the slow test
KILLS = 3
UNFINISHED = ".dsv4-convert"
PLAN = f"{UNFINISHED}/plan.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = synthetic.write_checkpoint(tmp_path_factory.mktemp("source") / "small", synthetic.SMALL)
    (folder / "inference").mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "inference" / "generate.py").write_text("pass")
    for path in folder.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = state(folder)
    yield folder
    assert state(folder) == before


def state(folder):
    """What a reader leaves alone."""
    facts = {path: (path.stat().st_mtime_ns, path.stat().st_mode, path.stat().st_ino) for path in folder.rglob("*")}
    return facts, files(folder)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The files of each job done in one go."""
    folder = tmp_path_factory.mktemp("whole")
    for name, options in JOBS.items():
        convert(source, folder / name, *options)
    return {name: files(folder / name) for name in JOBS}


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(plan, "BATCH", crashing.BATCH)


@pytest.fixture(scope="module")
def calls(source, tmp_path_factory):
    """The calls of each job that change the disk, in order, as they come when nothing happens."""
    folder = tmp_path_factory.mktemp("calls")
    for name, options in JOBS.items():
        process = crashing.started("", 0, (source, folder / name, *options), folder / f"{name}.calls")
        assert crashing.ended(process) == 0
    return {name: (folder / f"{name}.calls").read_text().split("\n") for name in JOBS}


def happens(what, number, *arguments):
    return crashing.ended(crashing.started(what, number, arguments))


def spread(count, kills):
    """`kills` numbers from 1 to count."""
    return [1 + position * (count - 1) // (kills - 1) for position in range(kills)]


def assert_nothing_half(output, whole):
    """Files have their final names when they are complete, index and configuration only when all others have."""
    there = {name: content for name, content in files(output).items() if not name.startswith(UNFINISHED)}
    assert [name for name in there if whole.get(name) != there[name]] == []
    weights = {name for name in whole if name.endswith(".safetensors")}
    if damage.INDEX in there or "config.json" in there:
        assert weights <= there.keys()
    if not (output / UNFINISHED).exists():
        assert not there or there == whole


def kill_and_run_again(source, output, options, whole, number):
    assert happens("kill", number, source, output, *options) == -signal.SIGKILL
    assert_nothing_half(output, whole)
    assert happens("", 0, source, output, *options) == 0
    assert files(output) == whole


@pytest.mark.parametrize("kill", [0, *slow(*range(1, KILLS))])
@pytest.mark.parametrize("job", ["nvfp4", *slow("transformers", "mp")])
def test_killed_and_run_again(source, whole, calls, tmp_path, job, kill):
    number = spread(len(calls[job]), KILLS)[kill]
    kill_and_run_again(source, tmp_path / "out", JOBS[job], whole[job], number)


@pytest.mark.slow
def test_killed_after_the_last_weights(source, whole, calls, tmp_path):
    """At each name given or taken away: copies, configuration, index, journal, plan, folder."""
    names = calls["transformers"]
    last = len(names) - names[::-1].index("pwrite")
    numbers = [
        number for number, name in enumerate(names, 1) if number > last and name in ("replace", "unlink", "rmdir")
    ]
    assert len(numbers) >= 8
    for number in numbers:
        kill_and_run_again(source, tmp_path / str(number), JOBS["transformers"], whole["transformers"], number)


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_killed_at_every_call(source, whole, calls, tmp_path, job):
    for number in range(1, len(calls[job]) + 1):
        kill_and_run_again(source, tmp_path / str(number), JOBS[job], whole[job], number)
        shutil.rmtree(tmp_path / str(number))


@pytest.mark.slow  # test_killed_and_run_again has one kill
@pytest.mark.parametrize(("number", "least"), [(150, 1), (45, 6)])
def test_killed_again_and_again(source, whole, tmp_path, number, least):
    """Every run gets a little further; what is on the disk is not written again."""
    options, kills, sizes = JOBS["nvfp4"], 0, []
    while happens("kill", number, source, tmp_path / "out", *options) == -signal.SIGKILL:
        kills += 1
        assert_nothing_half(tmp_path / "out", whole["nvfp4"])
        sizes.append(len(files(tmp_path / "out")))
        assert kills < 60
    assert kills >= least
    assert sizes == sorted(sizes)
    assert files(tmp_path / "out") == whole["nvfp4"]


@pytest.mark.parametrize("share", [0.5, *slow(0.05, 0.98)])
def test_ctrl_c(source, whole, calls, tmp_path, share):
    number = round(share * len(calls["mp"]))
    assert happens("interrupt", number, source, tmp_path / "out", *JOBS["mp"]) == 130
    assert_nothing_half(tmp_path / "out", whole["mp"])
    assert happens("", 0, source, tmp_path / "out", *JOBS["mp"]) == 0
    assert files(tmp_path / "out") == whole["mp"]


@pytest.mark.parametrize("share", [0.3, *slow(1), *slow(0.01, 0.7)])
def test_the_disk_fills_up(source, whole, tmp_path, monkeypatch, small_batches, share):
    """os.pwrite takes part of the last bytes that fit, then refuses, as a full disk does."""
    room = share * sum(map(len, whole["nvfp4"].values())) * 0.9
    write = os.pwrite

    def limited(descriptor, content, offset):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fits = min(len(content), max(int(room), 1))
        room -= min(fits, room)
        return write(descriptor, content[:fits], offset)

    monkeypatch.setattr(os, "pwrite", limited)
    code, out, err = conversions.run("convert", source, tmp_path / "out", *JOBS["nvfp4"])
    assert (code, out) == (5, "")
    assert "no space left" in err
    assert_nothing_half(tmp_path / "out", whole["nvfp4"])
    monkeypatch.setattr(os, "pwrite", write)
    convert(source, tmp_path / "out", *JOBS["nvfp4"])
    assert files(tmp_path / "out") == whole["nvfp4"]


def test_the_disk_fills_up_where_the_journal_is_written(source, whole, tmp_path, monkeypatch, small_batches):
    write, lines = os.write, 0

    def limited(descriptor, content):
        nonlocal lines
        lines += 1
        if lines < 9:
            # a part of what is asked for is taken
            return write(descriptor, content[: len(content) // 2 + 1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", limited)
    code, _, err = conversions.run("convert", source, tmp_path / "out", *JOBS["nvfp4"])
    assert (code, "no space left" in err) == (5, True)
    monkeypatch.setattr(os, "write", write)
    convert(source, tmp_path / "out", *JOBS["nvfp4"])
    assert files(tmp_path / "out") == whole["nvfp4"]


def test_nothing_is_synced_after_its_file_is_closed(source, tmp_path, monkeypatch, small_batches):
    """A batch that is being synced while the next one fails is waited for."""
    sync, write, failed = os.fdatasync, os.pwrite, []

    def slow(descriptor):
        time.sleep(0.05)
        try:
            sync(descriptor)
        except OSError as error:
            failed.append(error)
            raise

    def limited(descriptor, content, offset):
        if (tmp_path / "out" / UNFINISHED / "journal-1-of-1.jsonl").stat().st_size > 200:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content, offset)

    monkeypatch.setattr(os, "fdatasync", slow)
    monkeypatch.setattr(os, "pwrite", limited)
    assert conversions.run("convert", source, tmp_path / "out", *JOBS["mp"])[0] == 5
    assert failed == []


@pytest.fixture
def unfinished(source, calls, tmp_path):
    """A conversion to nvfp4 that was killed half way."""
    assert happens("kill", len(calls["nvfp4"]) // 2, source, tmp_path / "out", *JOBS["nvfp4"]) == -signal.SIGKILL
    return tmp_path / "out"


def test_a_torn_line_of_the_journal_does_not_count(source, whole, unfinished, small_batches):
    (path,) = (unfinished / UNFINISHED).glob("journal*")
    with path.open("ab") as file:
        file.write(b'{"file": "model-00002-of-')
    convert(source, unfinished, *JOBS["nvfp4"])
    assert files(unfinished) == whole["nvfp4"]


def test_an_unfinished_file_that_was_removed_is_written_anew(source, whole, unfinished, small_batches):
    # the one that is being written, and maybe the one before, whose hash was not known yet
    paths = list((unfinished / UNFINISHED).glob("*.safetensors"))
    assert paths
    for path in paths:
        path.unlink()
    # killed just before and just after the file is there again
    for number in range(2, 6):
        assert happens("kill", number, source, unfinished, *JOBS["nvfp4"]) == -signal.SIGKILL
    convert(source, unfinished, *JOBS["nvfp4"])
    assert files(unfinished) == whole["nvfp4"]


@pytest.mark.parametrize(
    "options",
    [
        BF16,
        (*JOBS["nvfp4"], "--no-mtp"),
        *slow((*JOBS["nvfp4"], "--shard", "1/2"), (*JOBS["nvfp4"][:2], "--verify", "off")),
    ],
)
def test_another_job_does_not_continue(source, whole, unfinished, options, small_batches):
    before = files(unfinished)
    code, out, err = conversions.run("convert", source, unfinished, *options)
    assert (code, out) == (2, "")
    assert "of another source or with other options" in err
    assert files(unfinished) == before
    convert(source, unfinished, *JOBS["nvfp4"])
    assert files(unfinished) == whole["nvfp4"]


def test_a_source_that_has_changed_is_refused(source, unfinished, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy")
    code, _, err = conversions.run("convert", copy, unfinished, *JOBS["nvfp4"])
    assert code == 0, err  # the same files in another place

    again = tmp_path / "again"
    assert happens("kill", 60, copy, again, *JOBS["nvfp4"]) == -signal.SIGKILL
    shard = copy / "model-00002-of-00005.safetensors"
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes())
    code, _, err = conversions.run("convert", copy, again, *JOBS["nvfp4"])
    assert (code, "the source has changed" in err) == (2, True)
    assert f"`rm -r {again}`" in err


def test_a_second_process_is_refused(source, whole, calls, tmp_path):
    process = crashing.started("stop", len(calls["nvfp4"]) // 2, (source, tmp_path / "out", *JOBS["nvfp4"]))
    wait_until_stopped(process.pid)
    code, _, err = conversions.run("convert", source, tmp_path / "out", *JOBS["nvfp4"])
    os.kill(process.pid, signal.SIGCONT)
    assert (code, "another process is writing this part" in err) == (2, True)
    assert crashing.ended(process) == 0
    assert files(tmp_path / "out") == whole["nvfp4"]


def test_of_two_that_begin_at_once_with_other_options_one_is_refused(tmp_path, monkeypatch):
    plans = [{"files": {"a": {"nbytes": 1, "header": "", "header_bytes": 8}}, "metadata": {}, "parts": 1, "layer": 0,
              "to": to, "index": None} for to in ("bf16", "fp8")]  # fmt: skip
    write_file = journal.write_file

    def write_while_another_begins(*arguments):
        monkeypatch.setattr(journal, "write_file", write_file)
        other = Journal(tmp_path, Part()).opened(plans[1], {})
        with pytest.raises(UsageError, match="another process is writing this part"), other:
            pass
        write_file(*arguments)

    monkeypatch.setattr(journal, "write_file", write_while_another_begins)
    with Journal(tmp_path, Part()).opened(plans[0], {}):
        assert journal.read_plan(tmp_path / PLAN) == plans[0]


def wait_until_stopped(pid):
    assert comes(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


@pytest.mark.parametrize("share", [0.5, *slow(0.1, 0.9)])
def test_what_was_there_is_not_counted_as_written(source, calls, tmp_path, monkeypatch, small_batches, share):
    """In the rate at the end, and in that of the bar, which begins with the bytes that are there."""
    number, output, options = round(share * len(calls["transformers"])), tmp_path / "out", JOBS["transformers"]
    assert happens("kill", number, source, output, *options) == -signal.SIGKILL
    write, written, told, reports = os.pwrite, 0, [], []

    def counted(descriptor, content, offset):
        nonlocal written
        written += len(content)
        return write(descriptor, content, offset)

    @contextmanager
    def progress(self, label):
        yield lambda done, total: reports.append((done, total)) if label == "to transformers" else None

    monkeypatch.setattr(os, "pwrite", counted)
    monkeypatch.setattr(Output, "progress", progress)
    monkeypatch.setattr(commands, "size_text", lambda nbytes: told.append(nbytes) or f"{nbytes}")
    monkeypatch.setattr(commands, "time", SimpleNamespace(monotonic=iter((5.0, 7.0)).__next__))
    convert(source, output, *options)
    # the last two: bytes of a second, and all
    total = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    assert told[-2:] == [round(written / 2), total]
    assert written < total
    assert reports[0] == (total - written, total)
    assert reports[-1] == (total, total)
