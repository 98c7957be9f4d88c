"""Calls of `dsv4 chat`: what a command prints reaches the model, within bounds, and the terminal only made harmless."""

import fcntl
import json
import sys

import pytest

from dsv4cli.commands.chat.journal import read_journal
from dsv4cli.commands.chat.tool_process import carry_out
from dsv4cli.commands.chat.tools import Round, Tools
from dsv4cli.engine.chat.conversation import Conversation
from dsv4cli.engine.text.tokens import USER
from dsv4cli.errors import NotEnoughMemory, UnsoundResult
from dsv4cli.output import Colours, Output
from tests.support.program import SMALL, Program, calls_block
from tests.support.slow import slow
from tests.support.terminals import Terminal, says, speak, speaking
from tests.support.waiting import comes

CALLS = [{"id": "1", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]
CALL = calls_block([{"type": "function", **CALLS[0]}])


class Keys:
    """What a user types."""

    edits = False

    def __init__(self, *lines):
        self.lines = list(lines)

    def read(self, draft):
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)


@pytest.fixture
def tools(capsys, monkeypatch, tmp_path):
    """Carries out a call by a script; gives its result, stdout and stderr."""

    def run(script, *keys, room=10**6, number=1, seconds=30.0, terminal=True, **options):
        (tmp_path / "call.py").write_text(script)
        command = [sys.executable, str(tmp_path / "call.py")] if script else []
        monkeypatch.setattr("sys.stdin.isatty", lambda: terminal, raising=False)
        one = Tools(Output(Colours()), Keys(*keys), command, seconds, **{"ask_first": False, **options})
        result = next(one.run(CALLS, Round(number, room, len)), None)
        shown = capsys.readouterr()
        return result and result["content"], shown.out, shown.err

    return run


def test_arguments_that_nobody_can_parse_reach_the_command_as_text():
    deep = {"id": "1", "function": {"name": "f", "arguments": "[" * 10**5}}
    one = Tools(Output(Colours()), Keys(), ["cat"], ask_first=False)
    [result] = one.run([deep], Round(1, 10**6, lambda text: 0))
    assert result["content"].startswith('{"name": "f", "arguments": "[[[')


def test_plain_text_is_a_result(tools):
    result, out, err = tools("print('Sunny, 21 °C.\\n  No wind.\\n')")
    assert result == "Sunny, 21 °C.\n  No wind."
    assert out == 'weather({"city": "Paris"})\n'
    assert err == "→ Sunny, 21 °C. No wind.\n"
    assert tools("")[0] is None
    assert tools("pass")[0] == ""


def test_what_a_failing_command_says_reaches_the_model_and_harmlessly_the_terminal(tools):
    script = "import sys; print('half'); sys.stderr.write('no \\x1b[31mcity\\x9b1m\\u202e\\nnone'); sys.exit(3)"
    result, _, err = tools(script)
    assert json.loads(result) == {
        "error": "the command failed with exit code 3",
        "stdout": "half",
        "stderr": "no \x1b[31mcity\x9b1m\u202e\nnone",
    }
    assert err == "warning: the command failed with exit code 3\nno �[31mcity�1m�\nnone\n"


def test_what_a_command_says_beside_its_result_is_shown_alone(tools):
    result, _, err = tools("import sys; print('{}'); print('\\x07looking', file=sys.stderr)")
    assert (result, err) == ("{}", "�looking\n→ {}\n")


def test_of_long_errors_the_end_is_kept(tools):
    result, _, err = tools("import sys; sys.exit('x' * 5000 + 'the reason')")
    assert len(json.loads(result)["stderr"]) == 2000
    assert json.loads(result)["stderr"].endswith("xthe reason")
    assert "(the end of 5.01 kB)\n" in err
    assert len(err) < 2200


def test_a_huge_result_is_cut_and_shown_short(tools):
    result, _, err = tools("print('word ' * 300_000)")
    assert result == ("word " * 4000) + "\n[cut: the first 20,000 characters of 1.50 MB]"
    assert "warning: the result is too long; the model gets the first 20,000 characters of 1.50 MB\n" in err
    assert "word … (1.50 MB)" in err
    assert len(err) < 500


def test_a_result_leaves_room_in_the_context(tools):
    digits = "0123456789" * 20
    assert tools(f"print({digits!r})", room=200)[0] == digits
    assert tools(f"print({digits!r})", room=199)[0] == f"{digits[:-1]}\n[cut: the first 199 characters of 201 B]"
    assert tools("", "世界" * 100, room=150)[0] == f"{'世界' * 75}\n[cut: the first 150 characters of 600 B]"
    result, out, err = tools("print(1)", room=100)
    assert (result, out) == (None, "")
    assert err == "warning: the context has no space for another tool result; the answer ends here\n"


def test_a_command_that_never_stops_printing_ends_in_time_and_fills_no_memory():
    ended = carry_out([sys.executable, "-c", "while True: print('x' * 4000)"], "", 0.3, kept=1000)
    assert ended.code is None
    assert ended.out_bytes > 10_000
    assert len(ended.out) == 1000


def test_a_command_that_reads_nothing_is_not_in_the_way():
    assert carry_out([sys.executable, "-c", "print('ok')"], "x" * 10**6, 30, kept=100).out == "ok"


def test_a_process_left_behind_does_not_delay_a_result():
    script = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('done')"
    assert carry_out([sys.executable, "-c", script], "", 30, kept=100).out == "done"


def test_what_a_command_has_started_ends_with_it(tmp_path):
    lock = tmp_path / "lock"
    hold = f"import fcntl, subprocess; file = open({str(lock)!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX)\n"
    quiet = "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    # longer than `comes` waits
    script = hold + f"subprocess.Popen(['sleep', '600'], pass_fds=[file.fileno()], {quiet}); print('done')"
    assert carry_out([sys.executable, "-c", script], "", 30, kept=100).out == "done"
    with lock.open() as file:

        def is_free() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        assert comes(is_free), "the process that holds the lock lives"


def test_a_wrong_key_asks_again_and_a_no_is_told(tools):
    assert tools("print(1)", "what?", "", "Y", ask_first=True)[0] == "1"
    result, _, err = tools("print(1)", "maybe", "n", ask_first=True)
    assert result is None
    assert err.count("(y/n)\n") == 2
    assert err.endswith("no result; the answer ends here\n")
    assert tools("print(1)", ask_first=True)[2].endswith("no result; the answer ends here\n")


def test_after_many_rounds_yes_asks_all_the_same(tools):
    assert tools("print(1)", number=25)[0] == "1"
    result, _, err = tools("print(1)", "y", number=26)
    assert result == "1"
    assert "25 rounds of tool calls in this turn. Continue? (y/n)\n" in err
    assert tools("print(1)", number=27)[0] == "1"
    assert tools("print(1)", "n", number=51)[0] is None
    assert tools("print(1)", number=3, rounds=2, terminal=False)[2] == (
        "warning: 2 rounds of tool calls in this turn, and no terminal for confirmation; the answer ends here; "
        "to allow more, raise --max-rounds\n"
    )


def test_a_turn_of_calls_without_end_ends(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    dsv4 = Program(monkeypatch, capsys)
    speak(monkeypatch, says(CALL))
    options = ("--tool-exec", "echo seen", "--yes", "--max-rounds", "3")
    done = dsv4("chat", "--model", SMALL, *options, stdin=b"weather?\n/json\n")
    messages = json.loads(done.out[done.out.index("{\n") :])["messages"]
    assert [message.get("content") for message in messages] == ["weather?", *(["", "seen"] * 3), ""]
    assert "3 rounds of tool calls in this turn, and no terminal for confirmation" in done.err
    assert done.code == 0


@pytest.mark.parametrize("command", ["seq 100000", *slow(f"{sys.executable} -c \"print('{USER}' * 5000)\"")])
def test_results_larger_than_the_context_do_not_lose_the_turn(monkeypatch, capsys, tmp_path, command):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    dsv4 = Program(monkeypatch, capsys)
    speak(monkeypatch, says(CALL, CALL, CALL, "Blue."))
    options = ("--tool-exec", command, "--yes", "--max-context", "3000")
    done = dsv4("chat", "--model", SMALL, *options, stdin=b"weather?\n")
    assert (done.code, done.out.endswith("Blue.\n")) == (0, True)
    assert done.err.count("warning: the result is too long; the model gets the first ") == 3


@pytest.mark.slow  # test_results_larger_than_the_context_do_not_lose_the_turn fills it too
def test_calls_until_the_context_is_full_do_not_lose_the_turn(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    dsv4 = Program(monkeypatch, capsys)
    speak(monkeypatch, says(CALL))
    options = ("--tool-exec", "seq 100000", "--yes", "--max-context", "3000")
    done = dsv4("chat", "--model", SMALL, *options, stdin=b"weather?\n/json\n")
    assert "the context has no space for another tool result; the answer ends here" in done.err
    assert "error" not in done.err
    assert done.out.count('"role": "tool"') >= 3
    assert done.code == 0


def test_on_a_terminal(tmp_path):
    prepare = speaking(says(CALL, "It is **so**."), 0, 0)
    (tmp_path / "call.py").write_text("import sys; sys.exit('\\x1b]0;title\\x07bad')")
    options = ("--tool-exec", f"{sys.executable} {tmp_path}/call.py")
    one = Terminal("chat", "--model", SMALL, *options, prepare=prepare, columns=200, XDG_STATE_HOME=str(tmp_path))
    one.until("Ctrl-D quits\n", ">")
    one.type("weather?\r")
    one.until("(y/n)", ">")
    one.type("x\r")
    one.until("(y/n)", ">")
    one.type("y\r")
    one.until("exit code 1", "\ufffd]0;title\ufffdbad", "It is so.", ">")
    one.type("\x04")
    assert one.leave() == 0


def journaled(tmp_path):
    """The messages of the only journal, in short: roles, and the names of calls."""
    [path] = (tmp_path / "dsv4" / "sessions").glob("*.jsonl")
    return shortly(read_journal(path).messages)


def shortly(messages):
    return [one["role"] + "()" * len(one.get("tool_calls", ())) for one in messages]


@pytest.fixture
def carrying(monkeypatch, capsys, tmp_path):
    """A chat whose calls are carried out by a command that notes each of them; how many there were."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "call.py").write_text(f"print('ok'); open({str(tmp_path / 'carried')!r}, 'a').write('x')")
    options = ("--tool-exec", f"{sys.executable} {tmp_path}/call.py", "--yes", "--session", str(tmp_path / "talk.json"))

    def chat(*answers, fails, stdin):
        dsv4 = Program(monkeypatch, capsys)
        speak(monkeypatch, says(*answers))
        reply, asked = Conversation.reply, []

        def failing(self, messages, sampling, **given):
            asked.append(messages)
            if len(asked) in fails:
                raise fails[len(asked)]
            return reply(self, messages, sampling, **given)

        monkeypatch.setattr(Conversation, "reply", failing)
        done = dsv4("chat", "--model", SMALL, *options, stdin=stdin)
        return done, len((tmp_path / "carried").read_text()), asked

    return chat


ERRORS = [NotEnoughMemory("none is left", "ask for less"), UnsoundResult("not a number", "report it")]


@pytest.mark.parametrize("error", [*ERRORS[:1], *slow(*ERRORS[1:])], ids=lambda error: type(error).__name__)
def test_calls_that_were_carried_out_stay_when_the_next_answer_fails(carrying, tmp_path, error):
    done, carried, _ = carrying(CALL, CALL, "Well.", fails={3: error}, stdin=b"weather?\n")
    kept = ["user", *(["assistant()", "tool"] * 2)]
    assert (done.code, carried, journaled(tmp_path)) == (error.exit_code, 2, kept)
    assert shortly(json.loads((tmp_path / "talk.json").read_text())["messages"]) == kept
    assert "the calls and their results are kept; to ask for the answer again, use /retry" in done.err


def test_a_retry_carries_no_call_out_again(carrying, tmp_path):
    done, carried, asked = carrying(
        CALL, "One.", "Two.", fails={2: ERRORS[0], 4: ERRORS[0]}, stdin=b"a?\n/retry\n/retry\n/retry\n"
    )
    assert (done.out, carried) == ('weather({"city": "Paris"})\nOne.\nTwo.\n', 1)
    assert journaled(tmp_path) == ["user", "assistant()", "tool", "assistant"]
    assert [shortly(one)[-1] for one in asked] == [
        "user",
        *["tool"] * 4,
    ]  # the fourth failed: the answer before it stayed
    done, carried, asked = carrying("Three.", fails={}, stdin=b"b?\n/retry\n")
    assert shortly(asked[-1]) == ["user", "assistant()", "tool", "assistant", "user"]


def test_an_error_before_any_call_leaves_the_session_as_it_was(carrying, tmp_path):
    (tmp_path / "carried").touch()
    _, carried, _ = carrying("One.", fails={2: ERRORS[0]}, stdin=b"a?\nb?\n")
    assert (carried, journaled(tmp_path)) == (0, ["user", "assistant"])


def test_results_that_are_there_stay_when_the_user_wants_no_more(capsys):
    one = Tools(Output(Colours()), Keys("y", "n"), ["cat"], ask_first=True)
    [result] = one.run(CALLS * 2, Round(1, 10**6, len))
    assert '"weather"' in result["content"]


def test_ctrl_c_in_a_call_keeps_the_results_before_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "call.py").write_text(
        "import os, signal, sys, time\n"
        "if 'Rome' in input():\n    os.kill(os.getppid(), signal.SIGINT)\n    time.sleep(60)\n"
        "print('ok')"
    )
    calls = [
        {"type": "function", "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'}}
        for city in ("Paris", "Rome")
    ]
    speak(monkeypatch, says(calls_block(calls)))
    options = ("--tool-exec", f"{sys.executable} {tmp_path}/call.py", "--yes")
    done = Program(monkeypatch, capsys)("chat", "--model", SMALL, *options, stdin=b"weather?\n")
    assert (done.code, journaled(tmp_path)) == (130, ["user", "assistant()()", "tool"])


def test_the_journal_has_each_round_before_the_next_answer(carrying, tmp_path):
    seen = []

    class Watching(dict):
        def __contains__(self, number):
            seen.append(journaled(tmp_path) if number > 1 else [])
            return False

    carrying(CALL, CALL, "Well.", fails=Watching(), stdin=b"a?\n")
    assert seen == [[], ["user", "assistant()", "tool"], ["user", *(["assistant()", "tool"] * 2)]]


def test_a_call_that_the_model_invents_takes_no_line_for_its_result(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    dsv4 = Program(monkeypatch, capsys)
    speak(monkeypatch, says(CALL, "Blue."))
    done = dsv4("chat", "--model", SMALL, stdin=b"weather?\nand the sky?\n")
    assert (done.code, done.out) == (0, 'weather({"city": "Paris"})\nBlue.\n')
    assert journaled(tmp_path) == ["user", "assistant()", "user", "assistant"]
    assert "the call has no result: no tools were offered to the model; use --tools FILE" in done.err
