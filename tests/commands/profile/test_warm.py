"""`dsv4 profile warm` from outside: what it says, and what it refuses."""

import json
import pickle
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from dsv4cli.commands import job
from dsv4cli.commands.compiling import NoCompilation
from dsv4cli.commands.job import Job, open_job
from dsv4cli.commands.serve.run_server import Running
from dsv4cli.engine.compiling import compile_ahead, process
from dsv4cli.engine.server.warm import CacheOptions
from dsv4cli.kernels.card import CARDS
from dsv4cli.options import ModelOptions
from dsv4cli.output import Colours, Output
from tests.support.compiler import compiler
from tests.support.gguf_models import DS4, write_nano
from tests.support.program import Program

WARM = ("profile", "warm", "--model", "random:tiny", "--card", "h200")


@pytest.fixture
def dsv4(monkeypatch, capfd):
    return Program(monkeypatch, capfd)


@pytest.fixture
def says(monkeypatch, tmp_path):
    return compiler(monkeypatch, tmp_path)


def test_it_says_what_was_compiled(dsv4, says, tmp_path):
    says({"found": 3}, {"found": 3, "compiled": 2, "present": 1, "searching": False})
    done = dsv4(*WARM)
    assert (done.code, done.out) == (0, f"3 kernels of random:tiny for h200 in {tmp_path}/cache\n")
    assert done.err.startswith("2 kernels compiled in ")
    assert done.err.endswith("; 1 were in the cache\n")
    document = json.loads(dsv4(*WARM[:-1], "H200", "--json").out)
    assert document.pop("seconds") > 0
    assert document == {
        "schema": "dsv4.profile.warm/1", "model": "random:tiny", "card": "h200", "tp": 1, "kernels": 3, "compiled": 2,
        "already_there": 1, "failed": [], "folder": f"{tmp_path}/cache",
    }  # fmt: skip


def test_options_become_what_is_compiled(dsv4, says, tmp_path):
    says({})
    assert dsv4(*WARM, "--tp", "2", "--max-context", "900", "--batch", "16", "--draft", "2", "--exact").code == 0
    demand, card = pickle.loads(bytes.fromhex((tmp_path / "given").read_text()))
    assert (demand.ranks, demand.sequences, demand.longest, demand.drafts) == (2, 16, (900,), 2)
    assert (demand.exact, demand.length, len(demand.samplings), card) == (True, None, 4, CARDS["h200"])


@pytest.mark.parametrize("options", [(), ("--max-context", "900", "--draft", "2")])
def test_a_server_then_looks_for_nothing(options, dsv4, says, tmp_path, monkeypatch):
    """What `serve` demands with the same options is what was compiled, so its mark is there."""
    says({})
    assert dsv4(*WARM, "--serve", *options).code == 0
    found, _ = pickle.loads(bytes.fromhex((tmp_path / "given").read_text()))
    asked = []

    @contextmanager
    def meanwhile(out, demand, device, process):
        asked.append(demand)
        yield NoCompilation()

    monkeypatch.setattr(job, "compiled_in_background", meanwhile)
    monkeypatch.setattr(compile_ahead, "found_memory", lambda *given: None)
    monkeypatch.setattr("dsv4cli.commands.serve.run_server.left_by", lambda out: None)
    monkeypatch.setattr(Job, "kernels", "triton")
    monkeypatch.setattr(Job, "_load", lambda *given: None)
    served = ModelOptions(model="random:tiny", **({"max_context": 900, "draft": "2"} if options else {}))
    policy: Any = SimpleNamespace(share=CacheOptions(), key_file=None, guard=SimpleNamespace(accounts=None))
    with Running(open_job(Output(Colours()), served), policy, 0.0).job.model():
        assert asked == [found]


def test_the_kernels_of_gguf_blocks_are_foretold_by_their_types(dsv4, says, tmp_path, monkeypatch):
    """Without the types, a dry run would take the model for one of fp32 matrices, which fits no such machine."""
    path, _ = write_nano(tmp_path, DS4)
    says({})
    assert dsv4("profile", "warm", "--model", str(path), "--card", "h200").code == 0
    warmed, _ = pickle.loads(bytes.fromhex((tmp_path / "given").read_text()))
    assert warmed.gguf_types["blk.0.ffn_gate_exps.weight"] == "IQ2_XXS"
    asked = []
    monkeypatch.setattr(job, "compiled_in_background", lambda out, demand, *rest: asked.append(demand) or nullcontext())
    monkeypatch.setattr(compile_ahead, "found_memory", lambda *given: None)
    monkeypatch.setattr(Job, "kernels", "triton")
    with open_job(Output(Colours()), ModelOptions(str(path), device="cpu"))._compiled([5], True):
        assert asked[0].gguf_types == warmed.gguf_types


def test_what_could_not_be_compiled_is_a_failure(dsv4, says):
    says({"found": 3, "compiled": 2, "failed": ["gate_up: ValueError: no registers left"], "searching": False})
    done = dsv4(*WARM, "--json")
    assert (done.code, json.loads(done.out)["failed"]) == (1, ["gate_up: ValueError: no registers left"])
    assert "no registers left" in done.err
    says(code=1)
    assert "exited with code 1" in dsv4(*WARM).err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--card", "h300"), 2, "use one of a100, "),
        (("--tp", "3"), 2, "3 ranks"),
        (("--tp", "4"), 2, "use one of these numbers: 1, 2\n"),
        (("--draft", "9"), 2, "--draft"),
        (("--serve", "--batch", "2"), 2, "remove --batch"),
        (("--model", "nowhere"), 2, "nowhere"),
    ],
)
def test_what_it_refuses(dsv4, says, arguments, code, message):
    says(code=1)
    done = dsv4(*WARM, *arguments)
    assert (done.code, message in done.err) == (code, True), done.err


def test_a_cache_that_cannot_be_written_is_refused_before_the_work(dsv4, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(process, "cache_folder", lambda: tmp_path / "file")
    done = dsv4("profile", "warm", "--model", "tiny", "--card", "h200")
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-2:] == [
        f"error: cannot write to Triton's cache {tmp_path / 'file'}: File exists",
        "→ set TRITON_CACHE_DIR to another folder",
    ]


def test_without_a_gpu_a_card_is_to_be_named(dsv4, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = dsv4("profile", "warm")
    assert (done.code, done.err) == (
        4,
        "error: this machine has no GPU to compile for\n→ specify a GPU model, for example --card h200\n",
    )
