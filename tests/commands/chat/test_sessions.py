"""The sessions of `dsv4 chat`: kept, listed, gone on with; files that others write too; another model."""

import gc
import json
import os
import re
import weakref

import pytest

from dsv4cli.commands.chat.journal import SessionChoices, SessionJournal, session_rows
from dsv4cli.commands.chat.model import Models, model_name
from dsv4cli.commands.chat.session import FileChanged, Session
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.system import atomic
from dsv4cli.engine.weights import load as loading
from dsv4cli.errors import NotEnoughMemory, UsageError
from tests.commands.chat.test_chat import assistant, chat, conversation, dsv4, user
from tests.support.program import SMALL
from tests.support.shared_models import load_models_anew
from tests.support.terminals import says, speak

__all__ = ["chat", "dsv4"]  # fixtures

OTHER = "random:tiny,layers=1,seed=5"


def session(folder):
    return Session(SessionJournal(folder / "sessions"), folder / "talk.json")


def test_the_last_writer_of_a_file_does_not_win_in_silence(tmp_path):
    first, second = session(tmp_path), session(tmp_path)
    first.messages = [user("one"), assistant("1")]
    first.save()
    second.messages = [user("two"), assistant("2")]
    with pytest.raises(FileChanged, match=r"talk\.json was changed by another program since"):
        second.save()
    assert conversation(tmp_path / "talk.json") == first.messages
    second.load_file(tmp_path / "talk.json")
    second.messages += [user("two"), assistant("2")]
    second.save()
    with pytest.raises(FileChanged):
        first.check_file()
    first.write_file(tmp_path / "talk.json")  # as /save does, by whoever knows
    first.save()
    assert conversation(tmp_path / "talk.json") == first.messages
    (tmp_path / "talk.json").unlink()  # nothing is lost where there is nothing
    first.check_file()


def test_a_chat_whose_file_somebody_writes_says_so_and_keeps_the_turn(chat, dsv4, tmp_path):
    file = tmp_path / "talk.json"
    asked, answered = says("Yes."), []

    def sample(*arguments):
        if not answered:
            file.write_text(json.dumps([user("theirs"), assistant("5")]))
        answered.append(1)
        return asked(*arguments)

    speak(dsv4.patch, sample)
    text = f"one\ntwo\n/retry\n/json\n/load {file}\nthree\n".encode()
    done = dsv4("chat", "--model", SMALL, "--session", str(file), stdin=text)
    warning, *errors = [line for line in done.err.splitlines() if line.startswith(("error", "warning"))]
    assert warning.startswith("warning: the session was not saved to its file: ")
    assert [error.endswith("was changed by another program since it was read") for error in errors] == [True, True]
    assert f"→ to read it again, use /load {file}; to overwrite it with this conversation, use /save {file}" in done.err
    shown = json.JSONDecoder().raw_decode(done.out[done.out.index("{") :])[0]
    assert shown["messages"] == [user("one"), assistant("Yes.")]
    assert conversation(file) == [user("theirs"), assistant("5"), user("three"), assistant("Yes.")]
    assert done.code == 2


EMPTY = ("", " \n", "[]", '{"messages": []}', '\ufeff{"messages": [], "tools": []}')


@pytest.mark.parametrize("text", EMPTY, ids=range(len(EMPTY)))
def test_a_session_file_may_be_empty(chat, tmp_path, text):
    file = tmp_path / "talk.json"
    file.write_text(text, encoding="utf-8")
    done = chat("one", options=("--session", str(file)))
    assert (done.code, done.out) == (0, "Yes.\n")
    assert conversation(file) == [user("one"), assistant("Yes.")]


@pytest.mark.parametrize("text", ["{}", "[1]", '{"messages": [], "other": 1}', "null"])
def test_a_session_file_of_something_else_is_refused(chat, tmp_path, text):
    (tmp_path / "talk.json").write_text(text)
    assert chat("one", options=("--session", str(tmp_path / "talk.json"))).code == 2


def test_a_device_or_a_pipe_is_not_replaced(chat, tmp_path):
    """As root, /dev/null too was."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = chat("hello", options=("--session", str(pipe)))
    assert (done.code, f"--session {pipe} is not a file" in done.err) == (2, True)
    done = chat("hello", f"/save {pipe}")
    assert f"cannot write {pipe}: it is there, and is not a file" in done.err
    assert pipe.is_fifo()
    assert [one.name for one in tmp_path.glob(".pipe*")] == []


@pytest.mark.parametrize("content", ["notes\n", "[]x", '{"a": 1}', b"\xff"], ids=repr)
def test_saving_does_not_destroy_another_file(chat, tmp_path, content):
    notes = tmp_path / "notes"
    before = content if isinstance(content, bytes) else content.encode()
    notes.write_bytes(before)
    done = chat("hello", f"/save {notes}")
    assert f"error: {notes} exists and is not a conversation\n" in done.err
    assert notes.read_bytes() == before


@pytest.mark.parametrize("content", ["", "[]", '{"messages": []}', '[{"role": "user", "content": "earlier"}]'])
def test_saving_replaces_an_earlier_conversation(chat, tmp_path, content):
    (tmp_path / "talk.json").write_text(content)
    done = chat("hello", f"/save {tmp_path}/talk.json")
    assert "saved 2 messages" in done.err
    assert json.loads((tmp_path / "talk.json").read_text())["messages"][0]["content"] == "hello"


def test_a_session_with_tools_may_be_cleared_and_gone_on_with(chat, tmp_path):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    (tmp_path / "talk.json").write_text(json.dumps({"messages": [], "tools": [tool]}))
    done = chat("/json", options=("--session", str(tmp_path / "talk.json")))
    assert json.loads(done.out) == {"messages": [], "tools": [tool]}


@pytest.mark.parametrize("word", ["/quit", "/bye", "/exit"])
def test_words_to_leave(chat, word):
    assert chat(word, "never").out == ""


def test_other_words_for_commands(chat):
    done = chat("one", "/regenerate", "/help /retry", "/help quit", "/history", answers=("1", "2"))
    assert done.out.splitlines() == [
        *("1", "2"),
        "/retry  Ask the last question again. Also /regenerate.",
        "/exit  Quit; to continue this session later, use --continue. Also /quit, /bye.",
        *("> one", "2"),
    ]  # fmt: skip
    assert "there is no command /x" in chat("/help x").err
    assert "did you mean /quit?" in chat("/qiut").err


def test_a_question_on_the_command_line_is_all_there_is_in_a_pipe(chat):
    done = chat("never", options=("Is it?",))
    assert (done.code, done.out) == (0, "Yes.\n")
    assert chat(options=(" ",)).code == 2


def listed(done):
    return [re.split(r" {2,}", line) for line in done.out.splitlines()]


def test_sessions_are_listed_and_chosen(chat, tmp_path):
    assert "there are no sessions in" in chat(options=("--sessions",)).err
    chat("What is, ünïcode?", answers=("1",))
    chat("second", "/new", "third", "/sessions", answers=("2", "3"))
    done = chat("never", options=("--sessions",))
    assert [(number, *rest) for number, _, *rest in listed(done)] == [
        ("1", "2", SMALL, "third"),
        ("2", "2", SMALL, "second"),
        ("3", "2", SMALL, "What is, ünïcode?"),
    ]
    [name] = [path.stem for path in (tmp_path / "state/dsv4/sessions").glob("*what*")]
    assert re.fullmatch(r"\d{8}-\d{6}-what-is-ünïcode", name)
    assert json.loads(chat("/json", options=("--resume", "3")).out)["messages"][0] == user("What is, ünïcode?")
    assert json.loads(chat("/json", options=("-r", name)).out)["messages"][1] == assistant("1")
    done = chat("/resume 2", "/json", "again", "/sessions")
    assert json.JSONDecoder().raw_decode(done.out)[0]["messages"] == [user("second"), assistant("2")]
    # what goes on stands for what it goes on with
    rows = listed(chat(options=("--sessions",)))
    assert [(row[2], row[-1]) for row in rows] == [("4", "second"), ("2", "third"), ("2", "What is, ünïcode?")]


def test_a_new_session_leaves_the_file_of_the_last_one(chat, tmp_path):
    file = tmp_path / "talk.json"
    done = chat("/system Hi.", "one", "/new", "two", "/json", options=("--session", str(file)))
    system = {"role": "system", "content": "Hi."}
    assert conversation(file) == [system, user("one"), assistant("Yes.")]
    assert json.loads(done.out.partition("Yes.\nYes.\n")[2])["messages"] == [system, user("two"), assistant("Yes.")]
    assert f"{file} is not changed" in done.err
    assert len(listed(chat(options=("--sessions",)))) == 2


def test_a_full_disk_leaves_no_empty_session(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "append", full)
    journal = SessionJournal(tmp_path)
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            journal.write([user("one")], [], SessionChoices())
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    journal.write([user("one")], [], SessionChoices())
    assert [row[2:] for row in session_rows(tmp_path)] == [["1", "nano", "one"]]


def test_a_folder_is_kept_with_its_whole_path(tmp_path, monkeypatch):
    (tmp_path / "my model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_name(resolve_model("my model")) == str(tmp_path / "my model")
    assert model_name(resolve_model("nano")) == "nano"


def test_a_session_that_is_not_there(chat):
    chat("one", "/new", "two")
    for which, words in (("9", "there is no session '9'"), ("20", "2 sessions begin with '20'"), ("", "no session ''")):
        done = chat("/json", options=("--resume", which))
        assert (done.code, done.out) == (2, "")
        assert words in done.err
        assert "list them with `dsv4 chat --sessions`" in done.err
    assert "list them with `/sessions`" in chat("/resume 9").err


def test_a_journal_that_cannot_be_read_is_listed_as_such(chat, tmp_path):
    chat("one")
    for name, text in (("odd", '{"schema": 1}\nnot JSON\n'), ("deep", "[" * 10**5 + "\n{}\n")):
        (tmp_path / f"state/dsv4/sessions/20200101-000000-{name}.jsonl").write_text(text)
    listed = chat(options=("--sessions",)).out
    assert "20200101-000000-odd.jsonl cannot be read" in listed
    assert "20200101-000000-deep.jsonl cannot be read" in listed


def test_continue_keeps_model_thinking_and_temperature(chat, dsv4):
    chat("one", "/set top-p=0.8", "/set top-k=6", answers=("1",), options=("--think", "high", "--temperature", "0.5"))

    def go_on(*options):
        speak(dsv4.patch, says("Yes."))
        text = b"/model\n/think\n/set\n"
        done = dsv4("chat", "--continue", *options, stdin=text)
        assert done.code == 0
        said = dict(line.split(": ") for line in done.err.splitlines() if line.startswith(("model", "thinking")))
        numbers = dict(line.split() for line in done.out.splitlines()[-10:] if " " in line)
        return said["model"], said["thinking"], *(numbers[name] for name in ("temperature", "top-p", "top-k"))

    assert go_on() == (SMALL, "high", "0.5", "0.8", "6")
    assert go_on("--think", "off", "--temperature", "0", "--model", OTHER) == (OTHER, "off", "0.0", "0.8", "6")


def test_a_model_that_is_gone_is_named_with_a_way_on(chat, dsv4, tmp_path):
    journal = SessionJournal(tmp_path / "state" / "dsv4" / "sessions")
    journal.write([user("one"), assistant("1")], [], SessionChoices(str(tmp_path / "gone")))
    done = dsv4("chat", "--continue", stdin=b"two\n")
    assert (done.code, done.out) == (1, "")
    assert "to continue with another model, use --model NAME" in done.err
    assert chat("two", options=("--continue",)).out == "Yes.\n"


def test_choices_of_another_program_are_refused(chat, tmp_path):
    chat("one")
    (journal,) = (tmp_path / "state/dsv4/sessions").iterdir()
    journal.write_text(journal.read_text().replace('"temperature": null', '"temperature": "hot"'))
    assert "cannot continue the session in" in chat("two", options=("--continue",)).err


@pytest.fixture
def models(dsv4):
    """Loads real models; for each that has been loaded, how many others were still there."""
    load_models_anew(dsv4.patch)
    load, made, alive = loading.load_model, [], []

    def loads(source, *arguments, **more):
        gc.collect()
        alive.append((source.name, sum(one() is not None for one in made)))
        if source.name.endswith("seed=6"):
            raise NotEnoughMemory("it is too large", "take a smaller one")
        model = load(source, *arguments, **more)
        made.append(weakref.ref(model))
        return model

    dsv4.patch.setattr(loading, "load_model", loads)
    return alive


def test_another_model_takes_the_place_of_the_first(dsv4, models, tmp_path):
    text = f"Hello\n/model {OTHER}\nAnd now?\n/model\n".encode()
    options = ("--model", SMALL, "--max-tokens", "2", "--session", str(tmp_path / "talk.json"))
    done = dsv4("chat", *options, stdin=text)
    assert (done.code, models) == (0, [(SMALL, 0), (OTHER, 0)])
    assert done.err.endswith(f"model: {OTHER}\n")
    assert [one["role"] for one in conversation(tmp_path / "talk.json")] == ["user", "assistant"] * 2
    (journal,) = (tmp_path / "state/dsv4/sessions").iterdir()
    assert OTHER in journal.read_text()


def test_where_another_model_cannot_be_loaded_the_first_one_goes_on(dsv4, models):
    too_large = OTHER.replace("5", "6")
    text = f"/model nowhere\n/model {too_large}\n/model\nHello\n".encode()
    done = dsv4("chat", "--model", SMALL, "--max-tokens", "2", stdin=text)
    assert (done.code, models) == (5, [(SMALL, 0), (too_large, 0), (SMALL, 0)])
    assert "'nowhere' is neither a folder" in done.err
    assert "it is too large" in done.err
    assert f"model: {SMALL}\n" in done.err
    assert f"\n{SMALL} · " in done.err  # it answers


def test_ranks_do_not_change_their_model():
    with pytest.raises(UsageError, match="uses 2 ranks") as caught:
        Models(None, 2).change(None, "nano")
    assert "dsv4 chat --continue --tp 2 --model nano" in caught.value.remedy
