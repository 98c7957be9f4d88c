"""`dsv4 chat` through pipes: one message a line, sessions, slash commands, tools."""

import json
import os
import re
import signal
import stat

import pytest

from dsv4cli.commands.chat import turn
from dsv4cli.engine.chat.conversation import Conversation
from dsv4cli.engine.checkpoint import source
from dsv4cli.engine.checkpoint.source import RandomSource
from dsv4cli.engine.config.presets import TINY, shortened
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.text.tokens import DSML
from tests.support.drafts import ManyTokens
from tests.support.program import SMALL, calls_block
from tests.support.slow import slow_rows
from tests.support.terminals import says, speak


@pytest.fixture
def dsv4(dsv4, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return dsv4


@pytest.fixture
def chat(dsv4):
    """Types lines, to which a model of one layer answers."""

    def call(*lines, answers=("Yes.",), options=()):
        speak(dsv4.patch, says(*answers))
        text = "".join(f"{line}\n" for line in lines).encode()
        return dsv4("chat", "--model", SMALL, "--seed", "1", *options, stdin=text)

    return call


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def conversation(path):
    return json.loads(path.read_text(encoding="utf-8"))["messages"]


def test_each_line_is_a_question_and_stdout_has_the_answers(chat):
    done = chat("hello", "", "and\twho?", answers=("Hi €.", "Two\nlines\n", "never"))
    assert (done.code, done.out) == (0, "Hi €.\nTwo\nlines\n")
    _, random, first, second = done.err.splitlines()
    assert "random" in random
    assert first.startswith(f"{SMALL} · ")
    assert " tokens · " in second


def test_a_byte_order_mark_is_no_part_of_a_line(chat):
    done = chat("\ufeff/think", "\ufeffhello", "/json")
    assert "thinking: off" in done.err
    assert json.loads(done.out.partition("\n")[2])["messages"][0] == user("hello")


def test_input_that_cannot_be_read_ends_the_chat(dsv4):
    speak(dsv4.patch, says("Yes."))
    done = dsv4("chat", "--model", SMALL, readable=False)
    assert done.code == 2
    assert done.err.splitlines()[-2:] == [
        "error: cannot read stdin: Bad file descriptor",
        "→ pass the question as an argument",
    ]


def test_a_session_file_has_what_was_said_and_grows(chat, tmp_path):
    file = tmp_path / "talk.json"
    options = ("--session", str(file), "--system", "Be brief.")
    chat("one", answers=("1",), options=options)
    chat("two", answers=("2",), options=options[:2])
    system = {"role": "system", "content": "Be brief."}
    assert conversation(file) == [system, user("one"), assistant("1"), user("two"), assistant("2")]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) in (["talk.json", "state"], ["state", "talk.json"])


def test_a_session_file_may_be_empty_again(chat, tmp_path):
    options = ("--session", str(tmp_path / "talk.json"))
    chat("one", "/clear", options=options)
    assert chat("two", options=options).out == "Yes.\n"
    assert conversation(tmp_path / "talk.json") == [user("two"), assistant("Yes.")]


def test_continue_goes_on_with_the_last_session(chat, tmp_path):
    chat("one", "two", "/undo", answers=("1", "2"))
    done = chat("/json", options=("--continue",))
    assert json.loads(done.out) == {"messages": [user("one"), assistant("1")]}
    state = tmp_path / "state" / "dsv4"
    (journal,) = (state / "sessions").iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (state, state / "sessions", journal)] == [0o700, 0o700, 0o600]


def test_continue_goes_on_with_what_took_the_place_of_a_question(chat):
    chat("one", "two", "/edit three", "/retry", answers=("1", "2", "3", "4"))
    done = chat("/json", options=("--continue",))
    assert json.loads(done.out) == {"messages": [user("one"), assistant("1"), user("three"), assistant("4")]}


@pytest.mark.parametrize("cut", [1, 20, 40])
def test_a_line_that_was_cut_off_does_not_count(chat, tmp_path, cut):
    chat("one", "two", answers=("1", "2"))
    (journal,) = (tmp_path / "state/dsv4/sessions").iterdir()
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert json.loads(chat("/json", options=("--continue",)).out)["messages"] == [user("one"), assistant("1")]


def test_nothing_to_continue(chat):
    done = chat(options=("--continue",))
    assert done.code == 2
    assert "there is no session to continue" in done.err


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_name_with_spaces_stands_in_quotes(chat, tmp_path, quote):
    (tmp_path / "my notes.txt").write_text("the text")
    saved = tmp_path / "my talk.json"
    name = f"{quote}{tmp_path}/my notes.txt{quote}"
    done = chat(f"/read {name} why?", f"/read {name}", f"/save {saved}", f"/save {quote}{saved}.2{quote}")
    assert done.code == 0
    assert [one["content"] for one in conversation(saved)][::2] == ["why?\n\nthe text", "the text"]
    assert conversation(tmp_path / "my talk.json.2") == conversation(saved)


def test_an_empty_chat_leaves_nothing(chat, tmp_path):
    assert chat("/help", "/exit", "never").code == 0
    assert not (tmp_path / "state").exists()


def test_a_journal_that_cannot_be_written_is_a_warning(chat, tmp_path):
    (tmp_path / "state").write_text("in the way")
    done = chat("one")
    assert (done.code, done.out) == (0, "Yes.\n")
    assert f"warning: the session was not saved in {tmp_path / 'state/dsv4'}: Not a directory; to save it" in done.err


def test_commands_change_the_conversation(chat, tmp_path):
    lines = (
        "/system Be.",
        "/system Be kind.",
        "one",
        "/retry",
        "/edit uno",
        "//two",
        "/undo",
        f"/save {tmp_path}/x.json",
        "/clear",
    )
    done = chat(*lines, "/json", f"/load {tmp_path}/x.json", "/json", answers=("1", "I", "eins", "2"))
    assert done.err.count("error") == 0
    *_, second = done.out.partition("2\n")
    system = {"role": "system", "content": "Be kind."}
    decoder = json.JSONDecoder()
    cleared, end = decoder.raw_decode(second)
    assert cleared == {"messages": [system]}
    assert json.loads(second[end:]) == {"messages": [system, user("uno"), assistant("eins")]}


def test_a_retry_draws_anew(chat):
    done = chat("/set", "one", "/set seed", "/set", answers=("1",))
    assert "seed                1\n" in done.out
    assert "seed                2\n" in done.out
    assert "\nseed: 2\n" in done.err


def test_the_first_answer_has_the_seed_that_was_given(chat, dsv4):
    asked = []
    reply = Conversation.reply
    dsv4.patch.setattr(
        Conversation, "reply", lambda self, *rest, **more: asked.append(rest[1].seed) or reply(self, *rest, **more)
    )
    chat("a", "/retry", "/set seed=7", "b", "c", "/set seed=4294967295", "d", "e")
    assert asked == [1, 2, 7, 8, 4294967295, 0]


WRONG = (
    ("/hepl", "did you mean /help?"),
    ("/xyzzy", "there is no command /xyzzy"),
    ("/", "there is no command /"),
    ("/undo 3", "/undo takes no argument"),
    ("/undo", "there is no question yet"),
    ("/retry", "there is no question yet"),
    ("/copy", "this terminal does not support copying"),
    ("/set temperature=-1", "cannot be -1"),
    ("/set temperature=hot", "cannot be 'hot'"),
    ("/set colour=1", "there is no setting 'colour'"),
    ("/set think-budget=-1", "cannot be -1"),
    ("/think fast", 'no thinking level "fast"'),
    ("/read nothing.txt", "nothing.txt cannot be read"),
    ("/read -", "'-' is not a file name"),
    ("/load a\0b", "'a\\x00b' is not a file name"),
    ("/load", "the file name is missing"),
    ("/save /nowhere/at/all.json", "cannot write /nowhere/at/all.json"),
    ("/show-thinking perhaps", "cannot be perhaps"),
)


def test_wrong_commands_are_not_sent(chat):
    done = chat(*(line for line, _ in WRONG))
    assert (done.code, done.out) == (2, "")
    errors = done.err.split("error: ")[1:]
    assert len(errors) == len(WRONG)
    assert [words for (_, words), error in zip(WRONG, errors, strict=True) if words not in error] == []


def test_settings_and_numbers(chat, tmp_path):
    (tmp_path / "text.txt").write_text("body\n")
    lines = ("/set temperature=0.5", "/set max_tokens 3", "/think high", "/think off", "/tokens ab")
    done = chat(*lines, f"/read {tmp_path}/text.txt why?", "/json", "/stats", "/context", "/tokens", answers=("12345",))
    assert done.err.count("error") == 0
    assert "2 tokens: 100 101\n123\n{" in done.out
    assert '"why?\\n\\nbody"' in done.out
    assert "tokens generated" in done.out
    assert "cut off at the token limit" in done.err


def test_a_full_context_leaves_the_oldest_out_of_the_prompt_only(chat):
    lines = [f"{number} {'x' * 20}" for number in range(5)]
    done = chat(*lines, "/context", "/json", "/clear", "again", options=("--max-context", "105"))
    near = "warning: 14 tokens of context left; the oldest messages will soon be dropped from the prompt"
    full = (
        "warning: the oldest 4 messages are dropped from the prompt to leave space for an answer; "
        "the session keeps them"
    )
    # what has gone stays away as long as the rest fits
    assert [line for line in done.err.splitlines() if line.startswith("warning")] == [near, full, near]
    answers, _, document = done.out.partition("{\n")
    assert answers.startswith("Yes.\n" * 5)
    assert (
        "91 of 105 tokens used, 14 left\nthe oldest 4 messages are not in the prompt: the context is full\n" in answers
    )
    messages = json.JSONDecoder().raw_decode("{\n" + document)[0]["messages"]
    assert [message["content"] for message in messages] == [text for line in lines for text in (line, "Yes.")]
    assert done.out.endswith("Yes.\n")


def test_thinking_is_one_line_and_kept(chat):
    answers = ("some thoughts</think>Yes.",)
    done = chat("why?", "/json", "/show-thinking", answers=answers, options=("--think", "high"))
    assert done.out.startswith("Yes.\n{")
    assert '"reasoning_content": "some thoughts"' in done.out
    assert "thinking (13 tokens, " in done.err
    assert done.err.endswith("some thoughts\n")
    shown = chat("why?", answers=answers, options=("--think", "high", "--show-thinking"))
    assert "some thoughts\n(thought: 13 tokens, " in shown.err


@pytest.mark.parametrize("call", ["", f'<{DSML}invoke name="f">\na = 1\n</{DSML}invoke>\n'])
def test_the_text_around_markup_without_a_call_is_shown_and_kept(chat, call):
    answer = f"Let me look.\n\n<{DSML}tool_calls>\n{call}</{DSML}tool_calls>\n\nIt has 3 lines."
    done = chat("how long?", "/json", answers=(answer,))
    assert done.out.startswith("Let me look.\n\nIt has 3 lines.\n{")
    assert '"content": "Let me look.\\n\\nIt has 3 lines."' in done.out
    assert "left out" in done.err


def test_ctrl_c_before_there_is_a_reply_counts(chat, dsv4):
    dsv4.patch.setattr(Conversation, "messages_to_drop", lambda *_: os.kill(os.getpid(), signal.SIGINT) or 0)
    done = chat("hello", "never")
    assert (done.code, done.out) == (130, "")
    assert "stopped; no answer yet" in done.err


def test_a_thinking_that_was_ended_is_reported(chat):
    done = chat("why?", answers=("some thoughts and more",), options=("--think", "high", "--think-budget", "5"))
    assert "thinking (5 tokens, " in done.err
    assert "thinking reached its budget" in done.err
    done = chat("why?", answers=("hm", "Yes."), options=("--think", "high"))
    assert done.out == "Yes.\n"
    assert "no answer after thinking" in done.err


def test_drafts_are_told_in_the_line_and_in_the_stats(chat, dsv4):
    alone = chat("hello", "/stats", answers=("seventy",))
    assert " per step" not in alone.err + alone.out
    ManyTokens(dsv4.patch)
    dsv4.patch.setattr(turn, "BURST", 0.0)  # however fast it is
    done = chat("hello", "again", "/stats", answers=("seventy",))
    assert done.out.startswith("seventy\nseventy\n")
    assert len(re.findall(r" tokens · \d[\d.]* tokens/s, 2\.0 per step · first token after ", done.err)) == 2
    assert re.search(r"^drafts +2\.0 tokens per step, 67 % of 12 accepted \(mtp\)$", done.out, re.MULTILINE)


def test_another_model_must_have_the_drafter_that_was_asked_for(chat, dsv4):
    bare = RandomSource("bare", parse_config(shortened(TINY, 1, 8), "bare").without_drafter(), 1)
    known = source.resolve_model
    dsv4.patch.setattr(source, "resolve_model", lambda name: bare if name == "bare" else known(name))
    done = chat("/model bare", "/model", options=("--draft", "2"))
    assert "error: bare has no drafter, and --draft 2 needs one\n" in done.err
    assert done.err.endswith(f"\nmodel: {SMALL}\n")


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}


@pytest.fixture
def tools(tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER]))
    return ("--tools", str(tmp_path / "tools.json"))


def test_the_next_line_is_the_result_of_a_call(chat, tools):
    done = chat("weather?", '{"sky": "blue"}', "/json", answers=(f"{calls_block([CALL])}", "Blue."), options=tools)
    head, _, document = done.out.partition("{\n")
    assert head == 'weather({"city": "Paris"})\nBlue.\n'
    called = {**CALL, "id": "call_1_0"}
    result = {"role": "tool", "tool_call_id": "call_1_0", "content": '{"sky": "blue"}'}
    messages = [user("weather?"), assistant("", tool_calls=[called]), result, assistant("Blue.")]
    assert json.loads("{\n" + document) == {"messages": messages, "tools": [WEATHER]}


@pytest.mark.parametrize(
    ("script", "result"),
    [
        ("print(input())", '{"name": "weather", "arguments": {"city": "Paris"}}'),
        *slow_rows(("print('no json')", "no json")),
        ("raise SystemExit(3)", '{"error": "the command failed with exit code 3"}'),
        *slow_rows(("import time; time.sleep(60)", '{"error": "no result after 0.5 s"}')),
    ],
    ids=["echo", "no-json", "fails", "slow"],
)  # fmt: skip
def test_a_command_carries_out_calls(chat, tools, tmp_path, script, result):
    (tmp_path / "call.py").write_text(script)
    limit = "0.5" if "sleep" in script else "30"
    options = (*tools, "--tool-exec", f"python3 {tmp_path}/call.py", "--yes", "--tool-timeout", limit)
    done = chat("weather?", "/json", answers=(calls_block([CALL]), "Well."), options=options)
    assert json.loads("{\n" + done.out.partition("{\n")[2])["messages"][2]["content"] == result


REFUSED = (
    (("--tool-exec", "true"), "add --yes"),
    (("--tool-exec", "true '", "--yes"), "close the quotes"),
    (("--tool-exec", "no-such-program x", "--yes"), "cannot find an executable program 'no-such-program'"),
    (("--tool-exec", f"{__file__} x", "--yes"), "make a script executable with chmod +x"),
    (("--tool-timeout", "0", "--tool-exec", "true"), "--tool-timeout cannot be 0"),
    (("--tool-timeout", "nan", "--tool-exec", "true"), "--tool-timeout cannot be nan"),
    (("--tool-timeout", "9"), "--tool-timeout needs --tool-exec"),
    (("--yes",), "--yes needs --tool-exec"),
    (("--max-rounds", "3"), "--max-rounds needs --tool-exec"),
    (("--sessions", "hello"), "a question and --sessions cannot be combined"),
    (("--think-budget", "-1"), "--think-budget cannot be -1"),
    (("--session", "/nowhere/talk.json"), "the folder /nowhere does not exist"),
    (("--session", "talk.json", "--continue"), "cannot be combined"),
)


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_work_is_refused_at_once(chat, options, words):
    done = chat("hello", options=options)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert "random" not in done.err  # no model was loaded


def test_torchrun_is_refused(chat, dsv4):
    dsv4.patch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert "chat cannot run under torchrun" in chat("hello").err
