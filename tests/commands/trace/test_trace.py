"""`dsv4 trace` from outside: streams, exit codes, keys, refusals."""

import contextlib
import json
import re
import shutil

import pytest
import torch

from dsv4cli.commands.job import Job
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.tracing.manifest import Text
from dsv4cli.engine.tracing.record import manifest_of
from dsv4cli.engine.tracing.recording import RecordedFolder
from dsv4cli.engine.tracing.stages import BY_NAME
from dsv4cli.engine.tracing.walk import Walk
from tests.engine.model.test_mutations import MUTATIONS
from tests.support import damage

# ratios 0, 0 and 4
NET = "random:tiny,layers=3"
IDS = "5,6,7,8,9,10,11,12,13"
PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recording with its noise, and the document that says so."""
    folder = tmp_path_factory.mktemp("recorded") / "A"
    with pytest.MonkeyPatch.context() as patch:
        from contextlib import redirect_stdout
        from io import StringIO

        with redirect_stdout(StringIO()) as out:
            run(patch, "record", NET, "--ids", IDS, "--out", str(folder), "--json")
    return folder, json.loads(out.getvalue())


def run(patch, *arguments):
    from dsv4cli import cli

    patch.setattr("sys.argv", ["dsv4", "trace", *arguments])
    patch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code


def test_a_recording_says_what_it_is_of(recorded):
    folder, document = recorded
    assert document.keys() == {"schema", "folder", "model", "tokens", "texts", "stages", "bytes", "noise"}
    assert (document["schema"], document["tokens"], document["noise"]) == ("dsv4.trace.record/1", 13, True)
    [text] = document["texts"]
    assert (text["ids"][:9], text["prompt"]) == ([*range(5, 14)], 9)
    manifest = RecordedFolder(folder).manifest
    assert (manifest.model, manifest.layers, manifest.simulate) == (NET, (0, 3), True)
    assert manifest.how.keys() >= {"backend", "chunk", "drafts", "device", "torch", "dsv4"}


def test_the_same_again_is_explained(recorded, dsv4, tmp_path):
    folder, _ = recorded
    again = tmp_path / "B"
    done = dsv4(
        "trace", "record", NET, "--like", str(folder), "--no-noise", "--prefill-chunk", "2", "--out", str(again)
    )
    assert (done.code, done.out.startswith(f"{again}: 13 tokens, ")) == (0, True)
    done = dsv4("trace", "compare", str(folder), str(again))
    assert (done.code, done.err) == (0, "")
    assert "rounding explains every difference: " in done.out


def test_equal_recordings_are_called_identical_and_what_is_not_compared_is_said(recorded, dsv4):
    folder, _ = recorded
    done = dsv4("trace", "compare", str(folder), str(folder))
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("\nboth are identical: 55 stages, 13 tokens; drafters are not compared\n")


def test_a_model_without_a_drafter_has_none_that_is_not_compared(dsv4, tmp_path):
    copy = damage.copy_checkpoint(tmp_path)
    damage.drafter_lost(copy)
    folder = str(tmp_path / "A")
    assert dsv4("trace", "record", str(copy), "--ids", IDS, "--out", folder, "--layers", "0-0").code == 0
    done = dsv4("trace", "compare", folder, folder)
    assert re.search(r"\nboth are identical: \d+ stages, 13 tokens\n$", done.out)


def test_a_picture(recorded, dsv4, tmp_path):
    pytest.importorskip("matplotlib")
    folder, _ = recorded
    picture = tmp_path / "parts.png"
    assert dsv4("trace", "compare", str(folder), str(folder), "--plot", str(picture)).code == 0
    assert picture.read_bytes().startswith(PNG)


def test_a_mistake_is_named(dsv4, monkeypatch, recorded, tmp_path):
    folder, _ = recorded
    MUTATIONS["route scale missing"].put_in(monkeypatch)
    other = str(tmp_path / "B")
    dsv4("trace", "record", NET, "--like", str(folder), "--no-noise", "--out", other)
    done = dsv4("trace", "compare", str(folder), other)
    assert done.code == 3
    assert "layer 0, router, weights of the chosen experts: " in done.out
    assert "the same stage diverges in layers 0, 1, 2" in done.out
    done = dsv4("trace", "compare", str(folder), other, "--json")
    document = json.loads(done.out)
    assert (done.code, done.err) == (3, "")
    assert document.keys() == {"schema", "one", "other", "parts", "first", "stages"}
    assert (document["first"]["layer"], document["first"]["stage"]) == (0, "gate.weights")
    assert {stage["stage"] for stage in document["stages"]} == BY_NAME.keys()
    assert document["first"].keys() == {
        "layer", "stage", "where", "rows", "other_choices", "cosine", "relative", "noise", "excess", "largest",
        "beyond",
    }  # fmt: skip


def test_bisect_names_it_in_one_command(dsv4, monkeypatch):
    MUTATIONS["overlap dropped at chunk borders"].put_in(monkeypatch)
    done = dsv4("trace", "bisect", NET, "--ids", IDS, "--prefill-chunk", "6", "--what", "attn", "--json")
    [found] = json.loads(done.out)["comparisons"]
    assert (done.code, done.err) == (3, "")
    assert {"streams", "ffn.streams"} < {stage["stage"] for stage in found["stages"]}
    assert (found["one"], found["other"]) == (NET, f"{NET} --prefill-chunk 6")
    assert found["first"]["where"] == "layer 2, attention, compressed entries"


@pytest.mark.slow
def test_bisect_against_a_recording(dsv4, recorded, tmp_path):
    folder, _ = recorded
    done = dsv4("trace", "bisect", NET, "--against", str(folder), "--keep", str(tmp_path / "kept"))
    assert done.code == 0
    assert f"{folder} and {NET}\n" in done.out
    assert "both are identical: 55 stages, 13 tokens" in done.out
    assert RecordedFolder(tmp_path / "kept" / "other").manifest.fed


@pytest.mark.slow
@pytest.mark.parametrize(("target", "farthest"), [("fp8", 0), ("bf16", 1)])
def test_bisect_of_a_conversion(dsv4, tmp_path, target, farthest):
    other = str(tmp_path / target)
    assert dsv4("convert", "nano", other, "--to", target).code == 0
    done = dsv4("trace", "bisect", "nano", "--against", other, "--ids", IDS, "--json")
    [found] = json.loads(done.out)["comparisons"]
    # inputs of bf16 weights are not rounded
    assert (done.code, max(stage["excess"] for stage in found["stages"]) <= farthest) == (0, True)


@pytest.mark.slow
def test_bisect_of_slots(dsv4):
    done = dsv4("trace", "bisect", NET, "--ids", IDS, "--slots")
    assert (done.code, done.out.count(": 55 stages, 13 tokens; drafters are not compared\n")) == (0, 2)


@pytest.mark.slow
def test_ranks_record_their_parts(dsv4, tmp_path):
    done = dsv4("trace", "bisect", "nano", "--ids", IDS, "--tp", "2", "--keep", str(tmp_path / "kept"))
    assert done.code == 0, done.err
    other = RecordedFolder(tmp_path / "kept" / "other")
    one = RecordedFolder(tmp_path / "kept" / "one")
    assert other.rows(0, "attn.q", 0, 13).shape == one.rows(0, "attn.q", 0, 13).shape


def test_what_layers_give_that_are_not_fed_is_not_judged(dsv4):
    done = dsv4("trace", "bisect", NET, "--ids", IDS, "--prefill-chunk", "2", "--layers", "1-1", "--json")
    [found] = json.loads(done.out)["comparisons"]
    places = [(stage["layer"], stage["stage"]) for stage in found["stages"]]
    assert ((1, "streams") in places, (2, "streams") in places) == (False, True)


@pytest.mark.slow  # of one text, which does not change
def test_the_usual_text_has_many_different_tokens(dsv4, tmp_path):
    arguments = (NET, "--steps", "0", "--layers", "0-0", "--what", "router", "--no-noise", "--json")
    documents = [json.loads(dsv4("trace", "record", *arguments, "--out", str(tmp_path / n)).out) for n in "AB"]
    [ids], [again] = ([text["ids"] for text in one["texts"]] for one in documents)
    assert ids == again
    assert (len(ids), min(ids) >= 3) == (300, True)
    # of 509 that there are: 227 in the mean
    assert len(set(ids)) > 200


def test_prompts_of_a_file(dsv4, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"ids": [5, 6]}\n{"prompt": "Hi"}\n{"text": "ab"}\n')
    done = dsv4(
        "trace", "record", "random:tiny,layers=1", "--prompts", str(file), "--steps", "0", "--what", "router",
        "--no-noise", "--json", "--out", str(tmp_path / "A"),
    )  # fmt: skip
    document = json.loads(done.out)
    assert (done.code, document["stages"], document["noise"]) == (0, 2, False)
    assert [text["prompt"] for text in document["texts"]][::2] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("record", NET, "--ids", "5;6", "--out", "A"), "--ids '5;6' is not a list of token ids"),
        (("record", NET, "--ids", "5", "--prompt", "Hi", "--out", "A"), "--prompt and --ids cannot be combined"),
        (("record", NET, "--layers", "2-3", "--out", "A"), "--layers 2-3: the model has 3 layers"),
        (("record", NET, "--like", "other", "--out", "A"), "the text has the token id 999, but the model's vocabulary"),
        (("record", NET, "--what", "blocks", "--out", "A"), "--what 'blocks' is not a group of stages"),
        (("record", NET, "--ids", "5", "--out", "full"), "full is not empty"),
        (("record", NET, "--ids", "5", "--steps", "1099999", "--out", "A"), "the text has 1,100,000 tokens"),
        (("record", NET, "--ids", "5,99999", "--out", "A"), "the text has the token id 99999"),
        (("record", NET, "--like", "none", "--out", "A"), "none has no complete recording"),
        (("record", NET, "--like", "other", "--ids", "5", "--out", "A"), "--ids and --like cannot be combined"),
        (("bisect", NET, "--against", "other", "--prompt", "Hi"), "--prompt and --against other cannot be combined"),
        (("compare", "none", "none"), "none has no complete recording"),
        (("bisect", NET), "no option sets how the other side differs"),
        (("bisect", NET, "--backend", "torch"), "--backend torch changes nothing: both sides would use torch kernels"),
        (("bisect", NET, "--device", "cpu", "--prefill-chunk", "300"), "with 300 prompt tokens per step"),
        (("bisect", NET, "--slots", "--prefill-chunk", "1"), "--slots cannot be combined with other changes"),
        (("bisect", NET, "--against", "random:tiny,layers=2"), "have different shapes: 3 layers of"),
        (("bisect", NET, "--prefill-chunk", "1", "--plot", "parts.gif"), "--plot parts.gif does not end with"),
        (("bisect", NET, "--prefill-chunk", "1", "--keep", "full"), "full is not empty"),
    ],
)
def test_refusals(dsv4, tmp_path, monkeypatch, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    for name in ("full", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    manifest_of(resolve_model(NET), Numerics.reference(), [Text((5,), 1)]).write(tmp_path / "other")
    told = json.loads((tmp_path / "other" / "manifest.json").read_text())
    told["texts"] = [{"ids": [5, 999], "prompt": 1}]
    (tmp_path / "other" / "manifest.json").write_text(json.dumps(told))
    # nobody waits for weights to hear it
    monkeypatch.setattr(Job, "model", None)
    done = dsv4("trace", *arguments)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.err
    assert "\n→ " in done.err
    assert " on cpu: " not in done.err  # no model is loaded for that
    assert not (tmp_path / "A").exists()


def test_what_does_not_compare(dsv4, recorded, tmp_path):
    folder, _ = recorded
    half, shape = tmp_path / "half", tmp_path / "shape"
    shutil.copytree(folder, half)
    (half / "manifest.json").unlink()
    done = dsv4("trace", "compare", str(folder), str(half))
    assert (done.code, f"{half} has no complete recording" in done.err) == (2, True)
    dsv4("trace", "record", "random:tiny,layers=2", "--ids", IDS, "--steps", "0", "--no-noise", "--out", str(shape))
    done = dsv4("trace", "compare", str(folder), str(shape))
    assert (done.code, "have different shapes: 3 layers of" in done.err) == (2, True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_recording_does_not_stand_in_the_way(dsv4, tmp_path, monkeypatch, error):
    out = tmp_path / "A"

    def interrupted(walk, texts, progress):
        (out / "layer-000-rank-0.safetensors").write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Walk, "through", interrupted)
        with contextlib.suppress(RuntimeError):
            assert dsv4("trace", "record", NET, "--ids", IDS, "--out", str(out)).code == 130
    assert not out.exists()


def test_other_tokens_and_unknown_noise(dsv4, recorded, tmp_path):
    folder, _ = recorded
    other = str(tmp_path / "B")
    dsv4("trace", "record", NET, "--ids", "5,6", "--steps", "0", "--no-noise", "--out", other)
    done = dsv4("trace", "compare", str(folder), other)
    assert (done.code, "differ in text 0: " in done.err) == (2, True)
    done = dsv4("trace", "compare", other, other)
    assert (done.code, "has a noise measurement, which compare needs" in done.err) == (2, True)
