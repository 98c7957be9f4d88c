"""`dsv4 profile` from outside: tables, JSON, baselines, traces, what it refuses and what it calls wrong."""

import gzip
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from dsv4cli.commands.profile.report import show_step
from dsv4cli.engine.profiling import ceilings, clock, compare, kernels, plot, step
from dsv4cli.engine.profiling.compare import SCHEMA
from dsv4cli.engine.profiling.output_file import check_writable
from dsv4cli.engine.weights import load as weights_load
from dsv4cli.engine.weights.reserve import Workload
from dsv4cli.errors import UsageError
from dsv4cli.kernels import norm
from dsv4cli.output import Colours, Output
from tests.support.program import Program
from tests.support.slow import slow, slow_rows

STEP = ("profile", "step", "--model", "random:tiny,layers=4", "--context", "130")
ONE_LAYER = ("profile", "step", "--model", "random:tiny,layers=1", "--context", "9")
# of this machine: measured by the first command that needs them
CEILINGS = cache(ceilings.measure_ceilings)


@pytest.fixture
def dsv4(monkeypatch, capfd):
    monkeypatch.setattr(clock, "CPU_SECONDS", 0)
    monkeypatch.setattr(step, "SECONDS", 0)
    monkeypatch.setattr(step, "FEWEST", 2)
    monkeypatch.setattr(ceilings, "measure_ceilings", CEILINGS)
    return Program(monkeypatch, capfd)


def test_an_operation_of_several_roundings_is_right_alone_too(dsv4):
    done = dsv4("profile", "kernels", "--only", "connect_post_pre", "--tokens", "1", "--json")
    assert done.code == 0


@pytest.mark.parametrize(
    ("options", "load"),
    [(["--batch", "3", "--context", "130"], Workload(131, 3)), (["--tokens", "70"], Workload(70, 1, 70))],
    ids=["decode", "prompt"],
)
def test_the_model_is_loaded_for_the_step_that_is_asked(options, load, dsv4, monkeypatch):
    """So that a GPU has room for its cache."""
    loads, load_model = [], weights_load.load_model
    monkeypatch.setattr(
        weights_load, "load_model", lambda *given, **how: loads.append(how["load"]) or load_model(*given, **how)
    )
    assert dsv4("profile", "step", "--model", "random:tiny,layers=1", *options, "--json").code == 0
    assert loads == [load]


def test_kernels_of_nano_are_all_right(dsv4):
    done = dsv4("profile", "kernels", "--tokens", "3", "--context", "600", "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert (document["schema"], document["kind"], document["model"], document["backend"]) == (
        SCHEMA,
        "kernels",
        "nano",
        "torch",
    )
    assert {"device", "driver", "torch", "triton", "cpu", "commit"} < document["machine"].keys()
    assert document["ceilings"]["copy_bytes_per_second"] > 1e8
    results = document["results"]
    families = {"gemm", "block_scale", "norm", "rope", "hyper_connections", "compressor", "indexer", "attention"}
    assert {line["family"] for line in results} == families | {"routing", "experts", "keys", "sampling", "places"}
    assert len({(line["name"], line["tokens"]) for line in results}) == len(results) == 47
    for line in results:
        assert line["wrong"] is None, line
        assert line["skipped"] is None
        assert line["seconds"]["low"] <= line["seconds"]["median"] <= line["seconds"]["high"]
        assert line["error"] <= line["bound"]
        assert line["bytes"] > 0


def test_kernels_for_people(dsv4):
    done = dsv4("profile", "kernels", "--model", "tiny", "--only", "norm", "--only", "router", "--tokens", "1")
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines() if "µs" in line] == ["rms_norm", "head_norm", "router"]
    assert max(map(len, done.out.splitlines())) <= 80


def test_what_a_cpu_is_not_given_is_named(dsv4):
    done = dsv4("profile", "kernels", "--model", "flash", "--tokens", "1", "--only", "head", "--only", "fp8_round")
    assert done.code == 0
    assert "skipped head x1: its inputs take 1.06 GB" in done.out


@pytest.mark.parametrize(("factor", "word"), [(1.01, "0.0"), *slow_rows((float("nan"), "not finite"))])
def test_a_wrong_operation_has_no_time(dsv4, monkeypatch, factor, word):
    right = norm.rms_norm
    monkeypatch.setattr(norm, "rms_norm", lambda *inputs: right(*inputs) * factor)
    done = dsv4("profile", "kernels", "--only", "norm", "--tokens", "1", "--json")
    assert done.code == 7
    assert "rms_norm" in done.err
    wrong, sound = json.loads(done.out)["results"]
    assert (wrong["name"], wrong["seconds"]) == ("rms_norm", None)
    assert word in wrong["wrong"]
    assert sound["seconds"]


def test_step_and_its_trace(dsv4, tmp_path):
    trace = tmp_path / "step.json"
    done = dsv4(*STEP, "--batch", "2", "--trace", str(trace), "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert (document["schema"], document["kind"], document["kernels"]) == (SCHEMA, "step", None)
    counts = {line["name"]: line["count"] for line in document["results"]}
    assert counts == {
        "step": 1, "batch": 1, "embedding": 1, "sliding attention": 2, "CSA attention": 1, "HCA attention": 1,
        "MoE, scored": 3, "MoE, hash": 1, "hyper-connections": None, "head": 1, "between them": None,
    }  # fmt: skip
    shares = [line["share"] for line in document["results"][1:]]
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1)
    seen = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event]
    assert seen.count("dsv4: block") == 4
    assert seen.count("dsv4: CSA attention") == 1


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_trace_that_torch_wrote_in_part_is_an_error(dsv4, tmp_path, monkeypatch, name):
    full = torch.profiler.profile.export_chrome_trace

    def cut(profiler, path):  # what torch does on a full disk, with a line to stderr
        full(profiler, path)
        opened = gzip.open if path.endswith(".gz") else open
        with opened(path, "rb") as file:
            content = file.read()
        with opened(path, "wb") as file:
            file.write(content[:1000])

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", cut)
    trace = tmp_path / name
    trace.write_text("of an earlier run")
    done = dsv4(*STEP, "--trace", str(trace))
    assert (done.code, done.out, trace.read_text()) == (5, "", "of an earlier run")
    assert done.err.splitlines()[-2].startswith("error: the trace does not fit in ")


def test_a_trace_on_a_full_disk_is_an_error(dsv4, tmp_path):
    full = tmp_path / "full"
    full.symlink_to("/dev/full")  # never the device itself: as root, a rename would replace it
    done = dsv4(*STEP, "--trace", str(full))
    assert (done.code, done.out, full.is_symlink()) == (5, "", True)
    assert done.err.splitlines()[-2:] == [
        f"error: no space left on the disk while writing {full}",
        "→ free some space",
    ]


def test_a_trace_does_not_replace_a_link(dsv4, tmp_path):
    link = tmp_path / "link"
    link.symlink_to("there.json")
    assert dsv4(*STEP, "--trace", str(link)).code == 0
    assert link.is_symlink()
    assert json.loads((tmp_path / "there.json").read_text())["traceEvents"]


def test_a_step_on_a_gpu_shows_a_layer_kernel_by_kernel(dsv4, capfd):
    document = json.loads(dsv4(*STEP, "--json").out)
    up, down = ({"name": name, "seconds": 1e-5, "idle_seconds": 1e-6} for name in ("up", "down"))
    layer = {"kind": "CSA attention", "layers": 20, "seconds": 2e-5, "idle_seconds": 2e-6, "kernels": [up, down]}
    launched = {"count": 2, "busy_seconds": 3.3e-5, "gap_seconds": 2e-6, "per_token": {"count": 2}, "layers": [layer]}
    show_step(Output(Colours()), document | {"kernels": launched})
    lines = capfd.readouterr().out.splitlines()[-4:]
    assert [line.split("  ")[0] for line in lines] == ["CSA attention, mean of 20 layers", "up", "down", "total"]
    assert [line.split()[-4:] for line in lines[1:]] == [
        ["10.0", "µs", "1.0", "µs"], ["10.0", "µs", "1.0", "µs"], ["20.0", "µs", "2.0", "µs"]
    ]  # fmt: skip


def test_step_for_people(dsv4):
    done = dsv4(*STEP, "--tokens", "5")
    assert done.code == 0
    assert "prefill: 1 sequence, 5 tokens of each after 130" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize("command", [("profile", "kernels", "--only", "norm", "--tokens", "1"), *slow(ONE_LAYER)])
def test_a_baseline(dsv4, tmp_path, command):
    old = json.loads(dsv4(*command, "--json").out)
    first = old["results"][0]
    first["seconds"]["median"] *= 1000
    old["machine"]["device"] = "another"
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    done = dsv4(*command, "--baseline", str(path))
    assert done.code == 0
    assert "another device" in done.err
    assert "device: another, now " in done.out
    found = json.loads(dsv4(*command, "--baseline", str(path), "--json").out)["baseline"]
    assert found["same_device"] is False
    # a thousandfold, on a machine that may be busy
    assert 30 < found["changes"][0]["speedup"] < 30_000


def times(median, low, high):
    return {"name": "a", "tokens": 1, "seconds": {"median": median, "low": low, "high": high}}


@pytest.mark.parametrize(
    ("before", "now", "drift", "verdict"),
    [
        (times(10, 9.9, 10.1), times(5, 4.9, 5.1), 1, "faster"),
        (times(10, 9.9, 10.1), times(20, 19, 21), 1, "slower"),
        (times(10, 6, 14), times(7, 5, 9), 1, "within the spread"),
        (times(2, 1.1, 2), times(1, 1, 1.2), 1, "within the spread"),  # the ranges meet
        (times(10, 9.9, 10.1), times(9.4, 9.3, 9.5), 1, "within the spread"),  # as far apart as two runs of the same
        (times(10, 8, 12), times(7.5, 7.4, 7.6), 1, "within the spread"),  # apart, and by less than the spread
        (times(10, 9.9, 10.1), times(8.3, 8.2, 8.4), 1.21, "within the spread"),  # as the machine
        (times(10, 9.9, 10.1), times(1, 0.9, 1.1), 1.3, "unclear"),
    ],
)
def test_noise_is_no_news(before, now, drift, verdict):
    ends = [
        {
            "machine": {},
            "ceilings": {"copy_bytes_per_second": 1e9 * rate, "matmul_flops": {"fp32": 1e9}},
            "results": [line],
        }
        for rate, line in ((1, before), (drift, now))
    ]
    for first, last in (ends, ends[::-1]):
        found = compare.compare(first, last).changes[0]
        names = {"faster": "slower", "slower": "faster"} if first is ends[1] else {}
        assert found.verdict == names.get(verdict, verdict)
        assert found.record()["verdict"] == found.verdict


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        ([1, 1], [1], "within the spread"),
        ([1, 1], [1.5, 1.5], "slower"),
        ([1, 1], [0.66, 0.67], "faster"),
        ([1, 1], [1.5, 1.05], "within the spread"),
        ([1, 1], [1.5, 0.5], "within the spread"),
        ([1, 1], [3, 1.3], "within the spread"),  # apart from the baseline, and further from each other
        ([1, 1.5], [1.5], "within the spread"),
        ([1.5, 1], [1], "within the spread"),
    ],
)
def test_a_change_is_one_in_every_pass(dsv4, tmp_path, monkeypatch, before, now, verdict):
    clocks = iter([*before, *now])

    def time_calls(calls, device):
        seconds = next(clocks)
        return clock.Timing(seconds, seconds * 0.99, seconds * 1.01, 15, "host")

    monkeypatch.setattr(kernels, "time_calls", time_calls)
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda device: ceilings.Ceilings(1.0, 1.0, {"fp32": 1.0}))
    command = ("profile", "kernels", "--model", "tiny", "--only", "rms_norm", "--tokens", "1")
    path = tmp_path / "old.json"
    path.write_text(dsv4(*command, "--json").out)
    (line,) = json.loads(path.read_text())["results"]
    assert [line["seconds"]["median"], line["second_pass"]["median"]] == before
    done = dsv4(*command, "--baseline", str(path))
    assert done.out.splitlines()[-1].endswith(verdict)
    assert next(clocks, None) is None


def test_two_passes_of_a_baseline_count_as_well():
    one = times(10, 9.9, 10.1)
    two = {**one, "second_pass": times(5, 4.9, 5.1)["seconds"]}
    now = {"machine": {}, "results": [times(5, 4.9, 5.1)]}
    assert compare.compare({"machine": {}, "results": [one]}, now).changes[0].verdict == "faster"
    assert compare.compare({"machine": {}, "results": [two]}, now).changes[0].verdict == "within the spread"


def test_a_part_of_a_step_has_the_range_of_the_whole():
    lines = [{**times(10, 8, 13), "tokens": 1}, {"name": "b", "seconds": {"median": 4}}]
    document = {"machine": {}, "results": lines}
    assert compare.compare(document, document).changes[1].now == compare.MeasuredTimes(4, 3.2, 5.2)


def test_what_says_little_and_what_cannot_be_is_said(dsv4, monkeypatch):
    of = clock.Timing.of
    wide = lambda seconds, method: replace(of(seconds, method), median=1e-6, low=0.8e-6, high=1.2e-6)  # noqa: E731
    monkeypatch.setattr(clock.Timing, "of", wide)
    done = dsv4("profile", "kernels", "--only", "rms_norm", "--tokens", "1", "--model", "tiny")
    assert done.code == 0
    assert "with a spread above 25%" in done.err
    assert "1 of 1 time with a spread above 25%" in dsv4(*ONE_LAYER).err
    monkeypatch.setattr(
        clock.Timing, "of", lambda seconds, method: replace(of(seconds, method), median=1, low=1, high=1)
    )
    done = dsv4("profile", "kernels", "--only", "rms_norm", "--tokens", "1", "--model", "tiny")
    assert "spread" not in done.err
    assert "over 105%" not in done.err


def test_more_than_the_most_is_said(dsv4, monkeypatch):
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda device: ceilings.Ceilings(1.0, 1.0, {"fp32": 1.0}))
    done = dsv4("profile", "kernels", "--only", "rms_norm", "--tokens", "1", "--model", "tiny")
    assert done.code == 0
    assert "over 105% of the measured maximum: rms_norm x1;" in " ".join(done.err.split())


def test_what_only_one_of_two_documents_has(dsv4):
    lines = [{"name": "a", "tokens": 1, "seconds": {"median": 2.0}}, {"name": "b", "tokens": 1, "seconds": None}]
    before = {"machine": {"torch": "2.11"}, "model": "nano", "results": lines}
    now = {"machine": {"torch": "2.12"}, "model": "nano", "results": [{**lines[0], "name": "c"}]}
    found = compare.compare(before, now)
    assert found.differences == {"torch": ("2.11", "2.12")}
    assert found.same_device
    assert [change.record() for change in found.changes] == [
        {"name": "c x1", "before": None, "now": 2.0, "speedup": None, "verdict": None},
        {"name": "a x1", "before": 2.0, "now": None, "speedup": None, "verdict": None},
    ]


def test_what_is_not_the_same_measurement_is_said():
    line = {"name": "a", "tokens": 1, "context": 4096, "seconds": {"median": 2.0}}
    before = {"machine": {}, "model": "nano", "results": [line]}
    found = compare.compare(before, before | {"results": [line | {"context": 131072}]})
    assert found.differences == {"context": (4096, 131072)}
    step = {"machine": {}, "model": "nano", "tokens": 1, "batch": 1, "context": 64, "results": [{"name": "step"}]}
    assert compare.compare(step, step | {"tokens": 2048}).differences == {"tokens": (1, 2048)}


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["kernels", "--only", "bogus"], 2, "bogus"),
        (["kernels", "--tokens", "1,x"], 2, "--tokens"),
        (["kernels", "--tokens", "0"], 2, "--tokens"),
        (["kernels", "--tokens", "9" * 5000], 2, "--tokens"),
        (["kernels", "--tokens", "9000"], 2, "--tokens"),
        (["kernels", "--context", "0"], 2, "--context"),
        (["kernels", "--context", "8193"], 2, "--context"),
        (["kernels", "--tp", "3"], 2, "3 ranks"),
        (["kernels", "--tp", "4"], 2, "4 ranks would have 64"),
        (["kernels", "--model", "nope"], 2, "nope"),
        (["kernels", "--plot", "a.pdf"], 2, "--plot"),
        (["kernels", "--plot", "no/such/folder/a.svg"], 2, "--plot"),
        (["kernels", "--baseline", "no-such-file"], 2, "--baseline"),
        (["step", "--trace", "no/such/folder/a.json"], 2, "--trace"),
        (["step", "--trace", "."], 2, "--trace: . is a folder"),
        (["step", "--trace", "/proc/a.json"], 2, "cannot write --trace /proc/a.json"),
        (["kernels", "--plot", "/proc/a.svg"], 2, "cannot write --plot /proc/a.svg"),
        (["step", "--context", "8192"], 2, "--context"),
        (["step", "--model", "random:tiny", "--tokens", "4097", "--batch", "2"], 2, "limit of a step"),
        (["step", "--device", "cuda:0"], 4, "cuda:0"),
        (["step", "--backend", "triton"], 4, "--backend triton"),
        (["kernels", "--backend", "triton"], 4, "--backend triton"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_refusals(dsv4, arguments, code, word):
    done = dsv4("profile", *arguments)
    assert (done.code, done.out) == (code, "")
    sentence, remedy = done.err.splitlines()
    assert sentence.startswith("error: ")
    assert word in sentence
    assert remedy.startswith("→ ")


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"schema": "dsv4.run/1"}', f'{{"schema": "{SCHEMA}", "kind": "step"}}',
     f'{{"schema": "{SCHEMA}", "kind": "kernels", "machine": {{}}, "results": [1]}}',
     f'{{"schema": "{SCHEMA}", "kind": "kernels", "machine": {{}}, "results": [], "draft": {{"rows": [1]}}}}',
     f'{{"schema": "{SCHEMA}", "kind": "kernels", "machine": {{}}, "results": [], "draft": 1}}'],
)  # fmt: skip
def test_what_is_no_baseline(dsv4, tmp_path, text):
    path = tmp_path / "old.json"
    path.write_text(text)
    done = dsv4("profile", "kernels", "--baseline", str(path))
    assert done.code == 2
    assert str(path) in done.err
    assert "dsv4 profile kernels --json" in done.err


@pytest.mark.parametrize(
    "damage",
    [
        {"ceilings": "x"},
        {"ceilings": {"matmul_flops": None}},
        {"ceilings": {"copy_bytes_per_second": "x"}},
        {"results": [times(1, "x", 1)]},
        {"results": [times(1, 1, None)]},
        {"results": [{**times(1, 1, 1), "second_pass": {"median": 1}}]},
        {"results": "x"},
        {"results": [{"seconds": {"median": 1}}]},
        {"draft": {"rows": []}},
    ],
    ids=str,
)
def test_a_damaged_baseline_is_told_before_anything_is_measured(tmp_path, damage):
    path = tmp_path / "old.json"
    document = {"schema": SCHEMA, "kind": "kernels", "machine": {}, "results": []}
    path.write_text(json.dumps(document))
    assert compare.read_baseline(path, "kernels") == document
    path.write_text(json.dumps(document | damage))
    with pytest.raises(UsageError, match="not a complete profile"):
        compare.read_baseline(path, "kernels")


@pytest.mark.parametrize(
    ("command", "options"),
    [(("profile", "kernels", "--only", "norm", "--tokens", "1"), ("--tokens", "--context", "--only")),
     (STEP, ("--context", "--batch", "--tokens"))],
)  # fmt: skip
def test_where_memory_runs_out_options_of_the_command_are_named(dsv4, monkeypatch, command, options):
    def full(*given, **named):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(kernels, "measure", full)
    monkeypatch.setattr(step, "_Step", full)
    done = dsv4(*command)
    assert done.code == 5
    remedy = done.err.splitlines()[-1]
    assert re.findall(r"--[a-z-]+", remedy) == list(options)
    assert set(options) <= set(re.findall(r"--[a-z-]+", dsv4(*command[:2], "--help").out))


def test_a_file_that_is_asked_about_stays_as_it_is(tmp_path):
    there = tmp_path / "there"
    there.write_text("kept")
    (tmp_path / "link").symlink_to("nothing")
    for path in (there, tmp_path / "new", tmp_path / "link", Path("/dev/null")):
        check_writable("--trace", path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]
    assert there.read_text() == "kept"


def test_a_picture_needs_matplotlib(dsv4, tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    done = dsv4("profile", "kernels", "--plot", str(tmp_path / "a.svg"))
    assert done.code == 2
    assert "pip install '.[plot]'" in done.err


def test_no_name_of_the_picture_covers_another():
    points = [(100 + 3 * i, 200 + 2 * (i % 5)) for i in range(40)]
    named = [(f"operation_{i}", point) for i, point in enumerate(points)]
    boxes = plot.places(named, points, 12.0)
    assert not any(one.meets(other) for i, one in enumerate(boxes) for other in boxes[:i])
    alone = plot.places(named[:1], points[:1], 12.0)[0]
    assert abs(alone.left - 100) < 20
    assert alone.low < 200 < alone.high


def test_a_picture(dsv4, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "a.svg"
    done = dsv4("profile", "kernels", "--only", "gemm", "--tokens", "1,3", "--plot", str(file))
    assert done.code == 0
    assert "3 tokens" in file.read_text()


def test_help_names_the_parts(dsv4):
    done = dsv4("profile", "--help")
    assert done.code == 0
    assert {"kernels", "step"} < {line.split()[0] for line in done.out.splitlines() if line.strip()}
