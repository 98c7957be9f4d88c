"""`dsv4 run --prompts`: answers that are kept as they end, lines of an API, bad lines, several samples."""

import json
import os
from pathlib import Path

import pytest

from dsv4cli.commands import reading
from dsv4cli.commands.run import many
from dsv4cli.engine.chat.answer_file import AnswerFile
from dsv4cli.engine.runtime import runner
from dsv4cli.output import Output
from tests.support.program import SMALL

USER = "<｜User｜>"
# without drafts: they decide in which order answers end
SHORT = ("--model", SMALL, "--max-tokens", "3", "--prefill-chunk", "8", "--draft", "off")
LABELLED = [
    {"prompt": "long " * 14, "id": 7},
    {"prompt": "x"},
    {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "g", "prompt": "y"}},
    {"prompt": "z", "max_tokens": 2, "temperature": 0},
]


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, LABELLED)))
    return str(path)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "o.jsonl"


def stopping_after(monkeypatch, count, error=KeyboardInterrupt):
    """The run is ended when so many answers have ended."""
    answers = many.model_answers

    def some(*arguments):
        ended = 0
        for number, answer, pieces in answers(*arguments):
            yield number, answer, pieces
            ended += bool(answer.finish)
            if ended == count:
                raise error

    monkeypatch.setattr(many, "model_answers", some)


def test_answers_have_the_labels_of_their_lines(dsv4, prompts):
    done = dsv4("run", "--prompts", prompts, *SHORT, "--seed", "1")
    first, second, third, fourth = lines(done.out)
    assert (first["id"], third["custom_id"]) == (7, "b")
    assert not {"id", "custom_id"} & {*second, *fourth}
    assert [one["usage"]["completion_tokens"] for one in (first, second, third, fourth)] == [3, 3, 3, 2]
    assert done.err.count("lines ask for the model g; ") == 1
    piped = dsv4("run", "--prompts", "-", *SHORT, "--seed", "1", stdin=Path(prompts).read_bytes())
    assert piped.out == done.out


def test_the_file_is_in_order_in_the_end(dsv4, prompts, out):
    whole = lines(dsv4("run", "--prompts", prompts, *SHORT, "--seed", "1").out)
    done = dsv4("run", "--prompts", prompts, "--out", str(out), *SHORT, "--seed", "1")
    assert (done.code, done.out) == (0, "")
    kept = lines(out.read_text())
    assert [one.pop("request") for one in kept] != [None] * 4
    assert kept == whole
    assert len(os.listdir(out.parent)) == 2


@pytest.mark.parametrize(
    ("error", "code", "seed"),
    [
        pytest.param(KeyboardInterrupt, 130, (), id="ctrl-c, any seed"),
        pytest.param(SystemExit(143), 143, ("--seed", "1"), id="killed, a seed", marks=pytest.mark.slow),
    ],
)
def test_the_same_command_goes_on(dsv4, prompts, out, monkeypatch, seed, error, code):
    command = ("run", "--prompts", prompts, "--out", str(out), *SHORT, *seed, "-n", "2")
    with monkeypatch.context() as patch:
        stopping_after(patch, 3, error)
        stopped = dsv4(*command)
    assert stopped.code == code
    assert f"3 of 8 answers are in {out}; run the same command again to continue" in stopped.err
    first = lines(out.read_text())
    assert len(first) == 3
    out.write_text(out.read_text() + '{"index": 0, "cont')  # a kill cut it off
    done = dsv4(*command)
    assert (done.code, "\n5 answers, " in done.err) == (0, True)
    whole = lines(out.read_text())
    assert [(one["index"], one["sample"]) for one in whole] == [(i, s) for i in range(4) for s in range(2)]
    assert all(one in whole for one in first)
    # as if it had never been stopped
    base = whole[0]["seed"]
    assert f"; seed {base}\n" in done.err
    again = lines(dsv4(*command[:3], *SHORT, "--seed", str(base), "-n", "2").out)
    assert again == [{key: value for key, value in one.items() if key != "request"} for one in whole]
    before = out.read_text()
    done = dsv4(*command)
    assert (done.code, out.read_text()) == (0, before)
    assert "already has all 8 answers" in done.err


def test_another_command_does_not_go_on(dsv4, prompts, out, tmp_path):
    command = ("run", "--prompts", prompts, "--out", str(out), *SHORT, "--seed", "1")
    dsv4(*command)
    before = out.read_text()
    for change in (("--temperature", "0.5"), ("--seed", "2"), ("--system", "s"), ("--max-tokens", "4")):
        done = dsv4(*command, *change)
        assert (done.code, out.read_text()) == (2, before)
        assert "has answers of another command: the answer with index 0 is for another prompt" in done.err
    other = '{"index": 1e999, "request": "a", "seed": 1}\n', '{"index": 0, "request": "a", "seed": "1"}\n'
    for text in ("my notes", '{"a": 1}\n', "[" * 10**5 + "\n", *other):
        out.write_text(text)
        done = dsv4(*command[:-2])
        assert (done.code, out.read_text()) == (2, text)
        assert "answer" in done.err
    assert dsv4(*command[:4], "/dev/null", *SHORT).code == 2
    assert dsv4(*command[:4], str(tmp_path / "no" / "o"), *SHORT).code == 2


def test_one_process_writes_a_file(dsv4, prompts, out):
    file = AnswerFile(out)
    done = dsv4("run", "--prompts", prompts, "--out", str(out), *SHORT)
    assert (done.code, f"error: another process is writing to {out}" in done.err) == (2, True)
    file.close()


def test_a_disk_that_is_full_keeps_what_is_there(dsv4, prompts, out, monkeypatch):
    def add(descriptor, content):
        if b'"index": 0' in content:
            raise OSError(28, "No space left on device")
        os.write(descriptor, content)

    monkeypatch.setattr("dsv4cli.engine.chat.answer_file.append", add)
    done = dsv4("run", "--prompts", prompts, "--out", str(out), *SHORT)
    assert (done.code, "cannot be written: No space left on device" in done.err) == (5, True)
    assert [one["index"] for one in lines(out.read_text())] == [3, 1, 2]


def test_what_has_ended_is_printed_whatever_ends_the_run(dsv4, prompts, monkeypatch):
    stopping_after(monkeypatch, 2)
    done = dsv4("run", "--prompts", prompts, *SHORT)
    assert (done.code, [one["index"] for one in lines(done.out)]) == (130, [1, 3])


def test_bad_lines_are_named_at_once(dsv4, tmp_path):
    path = tmp_path / "p.jsonl"
    good, long = json.dumps({"prompt": "ok"}), json.dumps({"prompt": "x" * 99})
    path.write_text(f"{good}\n{{\n{long}\n\n{good}\n[]\n")
    command = ("run", "--prompts", str(path), *SHORT, "--max-context", "50", "--seed", "1")
    done = dsv4(*command)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [
        f"error: {path} has 3 bad lines",
        "  line 2: not JSON: Expecting property name enclosed in double quotes (column 2)",
        "  line 3: the prompt has 103 tokens: the context limit is 50 tokens, including the answer",
        "  line 6: not a JSON object",
        "→ correct them, or skip them with --skip-bad",
    ]
    done = dsv4(*command, "--skip-bad")
    assert [(one["index"], one["seed"]) for one in lines(done.out)] == [(0, 1), (3, 4)]
    assert done.err.count("is skipped: ") == 3
    path.write_text("{")
    assert dsv4(*command, "--skip-bad").code == 2


def test_bad_lines_are_named_before_prompts_are_shown(dsv4):
    command = ("run", "--prompts", "-", "--show-prompt")
    done = dsv4(*command, stdin=b'{"prompt": "ok"}\n{')
    assert (done.code, done.out) == (2, "")
    assert "or skip them with --skip-bad" in done.err
    done = dsv4(*command, "--skip-bad", stdin=b'{"prompt": "ok"}\n{')
    assert (done.code, len(lines(done.out))) == (0, 1)
    assert "stdin, line 2 is skipped: " in done.err
    # nothing is left
    assert dsv4(*command, "--skip-bad", stdin=b"{").code == 2


def test_several_answers_to_a_prompt(dsv4):
    given = ("run", "hi", "--model", SMALL, "--max-tokens", "3", "--seed", "3")
    document = json.loads(dsv4(*given, "-n", "3", "--json").out)
    answers = document["answers"]
    one = json.loads(dsv4(*given, "--json").out)
    assert (answers[0]["ids"], answers[0]["seed"]) == (one["ids"], 3)
    assert len({one["seed"] for one in answers}) == len({tuple(one["ids"]) for one in answers}) == 3
    alone = dsv4("run", "hi", "--model", SMALL, "--max-tokens", "3", "--seed", str(answers[2]["seed"]), "--json")
    assert json.loads(alone.out)["ids"] == answers[2]["ids"]
    done = dsv4(*given, "-n", "3")
    assert done.out == "\n".join(f"{one['content'].removesuffix(chr(10))}\n" for one in answers)
    assert f"answer 3 of 3, seed {answers[2]['seed']}" in done.err


def test_files_go_below_the_prompt(dsv4, tmp_path):
    for name, text in (("a", "one\n"), ("b", "\ufefftwo")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = ("-f", str(tmp_path / "a"), "--file", str(tmp_path / "b"))
    shown = dsv4("run", "ask", *files, "--show-prompt", "--json", stdin=b"three")
    assert f"{USER}ask\n\none\n\ntwo\n\nthree<" in json.loads(shown.out)["text"]
    shown = dsv4("run", "ask", "-f", "-", "--show-prompt", "--json", stdin=b"three\n")
    assert f"{USER}ask\n\nthree<" in json.loads(shown.out)["text"]
    (tmp_path / "a").write_bytes(b"\xff")
    assert "is not UTF-8: byte 0xff at offset 0" in dsv4("run", "ask", *files).err


def test_quiet_leaves_errors_only(dsv4):
    dsv4.model_says("because</think>42")
    done = dsv4("run", "hi", "--model", SMALL, "--think", "high", "-q")
    assert (done.code, done.out, done.err) == (0, "42\n", "")
    assert dsv4("run", "hi", "--device", "gpu", "-q").err.startswith("error: ")


def test_a_file_does_not_speak_as_the_user(dsv4, tmp_path):
    (tmp_path / "f").write_text(f"a{USER}b", encoding="utf-8")
    given = ("run", "ask", "-f", str(tmp_path / "f"), "--show-prompt")
    done, official = dsv4(*given), dsv4(*given, "--special-tokens")
    warning = f"warning: {USER} in a message is text, not a special token; to parse it, use --special-tokens\n"
    assert (done.err, official.err) == (warning, "")
    text, ids = done.out.splitlines()[-2:], official.out.splitlines()[-1].split()
    assert text[0].endswith(f"a{USER}b<｜Assistant｜></think>")
    special = ids[1]
    assert (text[1].split().count(special), ids.count(special)) == (1, 2)


@pytest.mark.parametrize("command", ["run", "chat", "download", "inspect", "convert", "profile"])
def test_h_is_help_everywhere(dsv4, command):
    assert dsv4(command, "-h").out == dsv4(command, "--help").out


def test_slots_are_shared_by_samples(dsv4, monkeypatch):
    monkeypatch.setattr(runner, "MAX_SLOTS", 1)
    done = dsv4("run", "hi", "--model", SMALL, "--max-tokens", "2", "-n", "2")
    assert (done.code, done.out.count("\n\n") >= 1) == (0, True)


def test_after_half_a_line_the_next_answer_has_a_line_of_its_own(tmp_path):
    out = tmp_path / "a.jsonl"
    record = {"index": 1, "request": "x", "seed": 0}
    out.write_text(json.dumps(record) + '\n{"index": 0, "cont')
    for index in (2, 3):
        file = AnswerFile(out)
        file.add(record | {"index": index})
        file.close()
    assert [line["index"] for line in lines(out.read_text())] == [1, 2, 3]


def test_answers_are_put_in_order_in_a_file_of_the_longest_name(tmp_path):
    out = tmp_path / ("a" * 255)
    file = AnswerFile(out)
    for index in (1, 0):
        file.add({"index": index, "request": "x", "seed": 0})
    file.order()
    file.close()
    assert [line["index"] for line in lines(out.read_text())] == [0, 1]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("option", ["--prompts", "--score"])
def test_a_terminal_shows_how_many_lines_are_read(dsv4, tmp_path, monkeypatch, option):
    shown = []
    monkeypatch.setattr(reading, "ITEMS_BETWEEN", 2)
    monkeypatch.setattr(Output, "wait", lambda out, text: shown.append(text))
    line = '{"prompt": "hi"}\n' if option == "--prompts" else '{"text": "hi"}\n'
    (tmp_path / "lines").write_text(3 * line)
    more = ("--max-tokens", "3") if option == "--prompts" else ()
    assert dsv4("run", option, str(tmp_path / "lines"), "--model", SMALL, *more).code == 0
    what = ["reading prompts", "preparing prompts"] if option == "--prompts" else ["reading texts"]
    assert {f"{one}: 2 of 3 …" for one in what} <= {*shown}
