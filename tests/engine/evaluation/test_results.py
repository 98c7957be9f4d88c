"""The file of results: whole after a kill, and nobody else's."""

import json
import shutil

import pytest

from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.evaluation.outcome import Outcome, outcome_of
from dsv4cli.engine.evaluation.results import ResultsFile, is_results, read_results, weights_of
from dsv4cli.errors import UsageError
from tests.support.program import ROOT

HEADER = {
    "schema": "dsv4.eval-results/1", "model": "m", "weights": "w", "questions": "q", "form": "dsv4", "items": 3,
    "digest": "d", "settings": {"temperature": 0.0, "seed": 1},
}  # fmt: skip


def outcome(index, ruling="correct", **more):
    return Outcome(index, f"i{index}", "t", "exact", ruling, "é\u2028", 5, 2, **more)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "r.jsonl"


def written(path, *outcomes, header=HEADER):
    file = ResultsFile(path, header)
    for one in outcomes:
        file.add(one)
    file.close()
    return file


def test_results_come_back_as_they_went(path):
    first = outcome(2, content="a", logprobs=[-1.5], nll=0.25, common_prefix=0, seed=3)
    written(path, first, outcome(0, "wrong"))
    assert is_results(path)
    header, found = read_results(path)
    assert header == HEADER
    assert found == {2: first, 0: outcome(0, "wrong")}
    assert first.record().keys() >= {"common_prefix", "nll"}
    assert "content" not in outcome(0).record()
    file = ResultsFile(path, HEADER)
    file.order()
    file.close()
    assert [json.loads(line).get("index") for line in path.read_text().split("\n")[:-1]] == [None, 0, 2]


@pytest.mark.parametrize("cut", [1, 20, 60, -1])
def test_a_line_that_a_kill_has_cut_off_is_asked_again(path, cut):
    written(path, outcome(0), outcome(1))
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:2]) + b"\n" + lines[2][:cut])
    assert set(written(path).outcomes) == {0}
    assert written(path, outcome(1)).outcomes.keys() == {0, 1}
    assert set(read_results(path)[1]) == {0, 1}


@pytest.mark.parametrize("cut", [1, 30, 90])
def test_a_first_line_that_a_kill_has_cut_off_is_written_anew(path, cut):
    written(path)
    path.write_bytes(path.read_bytes()[:cut])
    written(path, outcome(1))
    assert read_results(path) == (HEADER, {1: outcome(1)})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"weights": "x"}, "results of another model"),
        ({"digest": "x"}, "results of other questions"),
        ({"settings": {"temperature": 1.0, "seed": 1}}, "results of other settings: temperature 0.0, now 1.0"),
    ],
)
def test_other_results_are_not_mixed_in(path, change, complaint):
    written(path, outcome(0))
    before = path.read_bytes()
    with pytest.raises(UsageError) as error:
        ResultsFile(path, HEADER | change)
    assert complaint in error.value.message
    assert path.read_bytes() == before
    written(path, header=HEADER | {"model": "another name"})


@pytest.mark.parametrize(
    "content",
    [
        "a note of mine",
        '{"index": 0}\n{"ind',
        json.dumps(HEADER) + '\n{"index": 0}\n',
        json.dumps(HEADER) + "\n[1]\n",
        json.dumps(HEADER) + "\nno JSON\nand mo",
        json.dumps(HEADER | {"schema": "dsv4.eval/1"}) + "\n",
        "3\n",
        "[" * 10**5 + "\n",
        json.dumps(HEADER | {"settings": 5}) + "\n",
        json.dumps(HEADER) + "\n" + json.dumps(outcome(0).record() | {"given": 5}) + "\n",
        json.dumps(HEADER) + "\n" + json.dumps(outcome(0).record() | {"nll": "1"}) + "\n",
    ],
    ids=range(11),
)
def test_what_is_no_file_of_results_stays_as_it_is(path, content):
    path.write_text(content)
    with pytest.raises(UsageError, match="not a result that eval wrote"):
        ResultsFile(path, HEADER)
    assert path.read_text() == content


def test_one_process_writes_at_a_time(path):
    file = ResultsFile(path, HEADER)
    with pytest.raises(UsageError, match="another process is writing"):
        ResultsFile(path, HEADER)
    file.close()
    assert not is_results(path.parent)
    assert not is_results(path.with_name("none"))
    with pytest.raises(UsageError, match="cannot read"):
        read_results(path.with_name("none"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("report.json", '{"schema": "dsv4.eval/1"}\n', "does not contain the results of each question"),
        ("empty.jsonl", "", "does not contain the results of each question"),
        ("absent.jsonl", None, "there is no file"),
    ],
)
def test_a_json_file_without_results_is_not_taken_for_a_model(name, content, said, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=said) as raised:
        is_results(tmp_path / name)
    assert "--out FILE.jsonl" in raised.value.remedy
    (tmp_path / "model.gguf").write_text("GGUF")
    (tmp_path / "folder.json").mkdir()
    assert not any(is_results(tmp_path / model) for model in ("model.gguf", "folder.json"))


@pytest.mark.parametrize("change", [{"ruling": "right"}, {"index": "0"}, {"id": 4}, {"extra": 1}])
def test_a_line_must_be_a_result(change):
    with pytest.raises(ValueError, match="not the"):
        outcome_of(outcome(0).record() | change)


def test_a_model_is_another_once_its_files_were_changed(tmp_path):
    folder = tmp_path / "nano"
    shutil.copytree(ROOT / "dsv4cli" / "nano", folder)
    before = weights_of(resolve_model(str(folder)))
    assert weights_of(resolve_model(str(folder))) == before
    (folder / "model.safetensors").touch()
    changed = weights_of(resolve_model(str(folder)))
    assert changed != before
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    assert weights_of(resolve_model(str(folder))) != changed
    assert weights_of(resolve_model("random:tiny")) != weights_of(resolve_model("random:tiny,seed=1"))
