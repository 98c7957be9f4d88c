"""Files that come whole or not at all: through xet, from what others left unfinished, to several at once."""

import os
import random
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import file_download, get_session
from huggingface_hub.utils import WeakFileLock
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

from dsv4cli.engine.hub import fetch, job
from dsv4cli.engine.hub.retry import RetryPolicy
from dsv4cli.engine.hub.selection import Selection
from dsv4cli.engine.hub.xet import PAGE, written
from tests.support.hub_server import HubServer, point_at
from tests.support.slow import slow

CONTENT = random.Random(0).randbytes(600_000)
HASTY = RetryPolicy(first_wait=0.001, longest_wait=0.004, stall=0.4)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = HubServer()
    point_at(server, tmp_path, monkeypatch)
    yield server
    server.close()


@pytest.fixture(params=["cache", "folder"])
def folder(request, tmp_path):
    """Where files go: None for the cache."""
    return None if request.param == "cache" else tmp_path / "model"


class Xet:
    """Stands in for the xet storage: `does` writes what it likes to the path and tells the real progress reporter."""

    def __init__(self, does):
        self.does, self.calls, self.ended = does, 0, threading.Event()

    def __call__(self, *, incomplete_path, expected_size, tqdm_class, xet_file_data, **_):
        self.calls += 1
        name = {"reconstruction_desc": "", "transfer_desc": "", "total": expected_size, "log_level": 0, "name": "x"}
        with XetDownloadProgressReporter(**name, tqdm_class=tqdm_class) as progress:
            self.does(self, Path(incomplete_path), lambda size: progress.update_progress(_report(size, expected_size)))


def _report(size, total):
    rates = {"total_bytes_completion_rate": None, "total_transfer_bytes_completion_rate": 1.0}
    return SimpleNamespace(
        total_bytes_completed=size, total_transfer_bytes_completed=size // 2, total_bytes=total, **rates
    )


def delivers(content):
    def does(xet, path, tell):
        path.write_bytes(content)
        tell(len(content) // 3)
        tell(len(content))

    return does


def fails(xet, path, tell):
    path.write_bytes(CONTENT[:1000])
    raise RuntimeError("Data processing error: CAS service error")


def hangs(xet, path, tell):
    path.write_bytes(CONTENT[:400_000])
    tell(400_000)
    xet.ended.wait(20)


def download(folder, **options):
    """The outcome of the one large file, and every report of the progress."""
    reports = []
    plan = job.plan("org/name", None, Selection(), folder, HASTY)
    outcomes = job.carry_out(plan, 2, HASTY, lambda done, total: reports.append((done, total)))
    path = plan.destination.folder / "weights.bin"
    assert path.read_bytes() == CONTENT
    left = [each for each in (folder or plan.destination.root).rglob("*.incomplete") if each.is_file()]
    assert left == []
    assert reports[-1] == (len(CONTENT), len(CONTENT))
    assert all(0 <= done <= total for done, total in reports)
    return outcomes["weights.bin"]


@pytest.fixture
def xet(hub, monkeypatch):
    """Puts a stand-in for xet before huggingface_hub."""
    hub.add("org/name", {"weights.bin": CONTENT}, xet=True)

    def put(does):
        stand_in = Xet(does)
        monkeypatch.setattr(file_download, "xet_get", stand_in)
        return stand_in

    return put


def test_xet_brings_what_it_can(hub, xet, folder):
    stand_in = xet(delivers(CONTENT))
    assert (download(folder), stand_in.calls, hub.sent) == ("fetched", 1, 0)
    assert (download(folder), stand_in.calls) == ("there", 1)


def test_wrong_bytes_of_xet_are_fetched_again(hub, xet, folder):
    stand_in = xet(lambda self, path, tell: delivers(CONTENT if self.calls > 1 else CONTENT[::-1])(self, path, tell))
    assert (download(folder), stand_in.calls, hub.sent) == ("repaired", 2, 0)


def test_the_plain_way_takes_over_from_a_failing_xet(hub, xet, folder):
    stand_in = xet(fails)
    assert (download(folder), stand_in.calls, hub.sent) == ("fetched", 1, len(CONTENT))


@pytest.mark.parametrize("folder", ["cache", *slow("folder")], indirect=True)
def test_the_plain_way_continues_what_xet_left_standing(hub, xet, folder):
    stand_in = xet(hangs)
    assert (download(folder), stand_in.calls, hub.sent) == ("fetched", 1, len(CONTENT) - 400_000)
    stand_in.ended.set()


@pytest.mark.parametrize(
    ("size", "hole"), [(400_000, None), (400_000, 200_000), (600_000, 300_000), (0, None)], ids=str
)
def test_an_unfinished_file_of_a_dead_process_is_continued(hub, xet, folder, tmp_path, size, hole):
    """Also where it was written at several places: up to the first hole."""
    stand_in = xet(delivers(CONTENT))
    download(folder)
    plan = job.plan("org/name", None, Selection(), folder, HASTY)
    path, part = (plan.destination.folder / "weights.bin").resolve(), plan.destination.part(plan.wanted[0])
    path.unlink()
    (plan.destination.folder / "weights.bin").unlink(missing_ok=True)
    left = part.with_name(f"{plan.wanted[0].etag}.0123abcd.incomplete")
    other = part.with_name(f"{plan.wanted[0].etag}.4567abcd.incomplete")
    with left.open("wb") as file:
        file.write(CONTENT[: hole or size])
        if hole:
            file.seek(hole + (1 << 17))
            file.write(CONTENT[hole + (1 << 17) : size])
    other.write_bytes(CONTENT[:10] if size else b"")
    stand_in.calls = hub.sent = 0
    sound = written(left)
    assert (hole or size) - 2 * PAGE < sound <= (hole or size)
    assert download(folder) == "fetched"
    assert (hub.sent, stand_in.calls) == ((len(CONTENT) - sound, 0) if sound else (0, 1))


@pytest.mark.parametrize("folder", ["cache", *slow("folder")], indirect=True)
def test_an_unfinished_file_of_a_living_process_is_left_alone(hub, xet, folder):
    xet(delivers(CONTENT))
    plan = job.plan("org/name", None, Selection(), folder, HASTY)
    file, destination = plan.wanted[0], plan.destination
    left = destination.part(file).with_name(f"{file.etag}.0123abcd.incomplete")
    for path in (left, destination.hub_lock(file)):
        path.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(CONTENT[:300_000])
    with WeakFileLock(destination.hub_lock(file)):
        done = threading.Thread(target=job.carry_out, args=(plan, 1, HASTY, lambda done, total: None))
        done.start()
        done.join(0.3)
        assert left.read_bytes() == CONTENT[:300_000]
    done.join(10)
    left.unlink()
    assert download(folder) == "there"


def test_two_processes_share_the_work(hub, folder, monkeypatch):
    """Both want the same file at the same time: it comes once, and both end well."""
    hub.add("org/name", {"weights.bin": CONTENT, "again.bin": CONTENT[:50_000]})
    bring = fetch._bring
    both = {name: threading.Barrier(2) for name in ("weights.bin", "again.bin")}

    def together(context, file, damaged):
        both[file.name].wait(20)  # one that looks later finds it there already
        return bring(context, file, damaged)

    monkeypatch.setattr(fetch, "_bring", together)
    plans = [job.plan("org/name", None, Selection(), folder, HASTY) for _ in range(2)]
    outcomes = []
    threads = [
        threading.Thread(target=lambda plan=plan: outcomes.append(job.carry_out(plan, 2, HASTY, lambda *_: None)))
        for plan in plans
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [set(outcome.values()) for outcome in outcomes] == [{"fetched"}] * 2
    assert hub.sent == len(CONTENT) + 50_000


def test_two_threads_that_end_at_once_write_the_same_reference(hub, monkeypatch):
    hub.add("org/name", {"weights.bin": CONTENT[:1000]})
    plan = job.plan("org/name", None, Selection(), None, HASTY)
    job.carry_out(plan, 1, HASTY, lambda *_: None)
    both, replace, errors = threading.Barrier(2), os.replace, []

    def together(source, target):
        both.wait(10)
        replace(source, target)

    def close():
        try:
            plan.destination.close()
        except OSError as error:
            errors.append(error)

    monkeypatch.setattr(os, "replace", together)
    threads = [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == []


def test_files_of_the_same_content(hub, folder):
    files = {f"{number}.bin": CONTENT[:50_000] for number in range(3)} | {"a/b/c.txt": b"x", "d.txt": b"x"}
    hub.add("org/name", files)
    plan = job.plan("org/name", None, Selection(), folder, HASTY)
    job.carry_out(plan, 3, HASTY, lambda done, total: None)
    assert {name: (plan.destination.folder / name).read_bytes() for name in files} == files


@pytest.mark.parametrize("folder", ["cache", *slow("folder")], indirect=True)
def test_a_trickle_is_given_up(hub, folder):
    """A connection that stays open and delivers a few bytes a second is cut, and the rest asked for anew."""
    hub.add("org/name", {"weights.bin": CONTENT})
    hub.pace = 0.1  # 4096 bytes each time
    policy = RetryPolicy(first_wait=0.001, stall=0.4, slowest=200_000)
    plan = job.plan("org/name", None, Selection(), folder, policy)

    def faster(request):
        hub.pace = 0 if request.begin else hub.pace

    hub.on_request = faster
    job.carry_out(plan, 1, policy, lambda done, total: None)
    assert any(request.begin for request in hub.asked("storage"))
    assert (plan.destination.folder / "weights.bin").read_bytes() == CONTENT


def test_without_symbolic_links(hub, tmp_path, monkeypatch):
    """On such a file system huggingface_hub keeps the content in the snapshot; so do we, and not twice."""
    monkeypatch.setattr("dsv4cli.engine.hub.destination.are_symlinks_supported", lambda folder: False)
    hub.add("org/name", {"weights.bin": CONTENT})
    assert download(None) == "fetched"
    assert download(None) == "there"
    root = tmp_path / "hub" / "models--org--name"
    assert [path.stat().st_size for path in root.rglob("*") if path.stat().st_size > 1000 and path.is_file()] == [
        len(CONTENT)
    ]


def test_the_free_space_is_that_of_the_target(hub, tmp_path, monkeypatch):
    hub.add("org/name", {"weights.bin": CONTENT})
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=7))
    plan = job.plan("org/name", None, Selection(), tmp_path / "a" / "b", HASTY)
    assert (plan.free, plan.fits, asked) == (7, False, [tmp_path])


def test_the_session_is_huggingface_hubs(hub, monkeypatch):
    """Its client factory, hence its proxies and certificates, and its offline mode."""
    hub.add("org/name", {"weights.bin": CONTENT})
    agents, session = [], get_session()
    note = [*session.event_hooks["request"], lambda request: agents.append(request.headers["user-agent"])]
    monkeypatch.setattr(session, "event_hooks", {"request": note})
    download(None)
    assert agents
    assert all(agent.startswith("dsv4/") for agent in agents)
