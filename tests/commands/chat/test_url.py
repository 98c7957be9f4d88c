"""`dsv4 chat --url`: the same terminal with a server behind it, and all that a server can do wrong."""

import json
import subprocess
import sys

import pytest

from dsv4cli.commands.chat import turn
from dsv4cli.engine.chat import api_client
from tests.commands.chat.test_chat import assistant, conversation, dsv4, user
from tests.support.chat_server import CONTEXT, MODEL, ChatServer, Says
from tests.support.program import ROOT, SMALL
from tests.support.terminals import Terminal, says, speak
from tests.support.waiting import comes

__all__ = ["dsv4"]  # a fixture
ADDER = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}


@pytest.fixture
def server():
    with ChatServer().running() as one:
        yield one


@pytest.fixture
def chat(dsv4, server):
    """Types lines, to which the server answers."""

    def call(*lines, options=()):
        return dsv4("chat", "--url", server.url, *options, stdin="".join(f"{line}\n" for line in lines).encode())

    return call


def spoken(body):
    return [(one["role"], one["content"]) for one in body["messages"]]


def test_lines_are_questions_and_the_server_is_asked_as_openai_has_it(chat, server):
    server.script = [Says(["Hi €", "."]), Says(["Two\nlines\n"], ["Hm."])]
    done = chat("hello", "who?")
    assert (done.code, done.out) == (0, "Hi €.\nTwo\nlines\n")
    first, second = server.bodies
    assert spoken(first) == [("user", "hello")]
    assert spoken(second) == [("user", "hello"), ("assistant", "Hi €."), ("user", "who?")]
    assert {"model": MODEL, "stream": True, "max_tokens": 4096, "reasoning_effort": "none"}.items() <= first.items()
    assert first["stream_options"] == {"include_usage": True}
    assert first["seed"] != second["seed"]
    assert not first.keys() & {"temperature", "top_p", "stop", "tools", "thinking"}
    opening, line, thought, _ = done.err.splitlines()
    assert opening == f"{server.url}: {MODEL}, a context of {CONTEXT:,} tokens"
    assert line.startswith(f"{MODEL} · 25 of 4,096 tokens · ")
    assert line.endswith(" s")
    assert thought.startswith("thinking (0.")  # pieces are not tokens there


def test_what_is_chosen_is_sent(chat, server):
    options = ("--temperature", "0.5", "--think", "high", "--stop", "X", "--max-tokens", "9", "--seed", "3")
    options = (*options, "--min-p", "0.1", "--repetition-penalty", "1.5")
    chat(
        "a",
        "/set top-p=0.25",
        "/set max-tokens=7",
        "/set top-k=4",
        "/think off",
        "b",
        options=(*options, "--system", "Be brief."),
    )
    first, second = server.bodies
    assert spoken(first) == [("system", "Be brief."), ("user", "a")]
    assert [first[name] for name in ("temperature", "reasoning_effort", "stop", "max_tokens", "seed")] == [
        0.5, "high", ["X"], 9, 3,
    ]  # fmt: skip
    assert first["chat_template_kwargs"] == {"thinking": True}
    assert not first.keys() & {"top_p", "top_k", "presence_penalty"}
    assert (first["min_p"], first["repetition_penalty"], second["min_p"], second["top_k"]) == (0.1, 1.5, 0.1, 4)
    assert [second[name] for name in ("temperature", "top_p", "reasoning_effort", "max_tokens")] == [
        0.5,
        0.25,
        "none",
        7,
    ]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thinking_is_kept_whatever_a_server_calls_it(chat, server, field):
    server.script = [Says(["5."], ["Two ", "and three."], reasoning=field)]
    done = chat("Sum?", "/json", options=("--think", "high", "--show-thinking"))
    assert "Two and three." in done.err
    shown = json.loads(done.out.removeprefix("5.\n"))
    assert shown["messages"][1] == assistant("5.", reasoning_content="Two and three.")


def test_a_budget_of_thinking_goes_to_dsv4_serve_alone(chat, server):
    done = chat("a", options=("--think", "high", "--think-budget", "50"))
    assert (done.code, server.bodies) == (2, [])
    assert "is not a dsv4 server and has no thinking budget" in done.err
    server.models[0]["owned_by"] = "dsv4"
    assert chat("a", options=("--think", "high", "--think-budget", "50")).code == 0
    assert server.bodies[0]["thinking"] == {"type": "enabled", "budget_tokens": 50}


def test_calls_are_carried_out_and_their_results_go_back(chat, server, tmp_path, monkeypatch):
    monkeypatch.setattr(turn, "BURST", 60)  # however busy the machine is
    server.script = [Says(["I add."], calls=[{"name": "add", "arguments": '{"a": 2}'}]), Says(["4."])]
    (tmp_path / "tools.json").write_text(json.dumps([ADDER]))
    command = f"""{sys.executable} -c "import json; print(json.loads(input())['arguments']['a'] * 2)" """
    options = ("--tools", str(tmp_path / "tools.json"), "--tool-exec", command, "--yes")
    done = chat("Twice 2?", options=options)
    assert (done.code, done.out) == (0, 'I add.\nadd({"a": 2})\n4.\n')
    assert "tokens/s" not in done.err  # all came at once
    first, second = server.bodies
    assert first["tools"] == second["tools"] == [ADDER]
    assert [message["role"] for message in first["messages"]] == ["user"]  # the tools are not in a message too
    called, result = second["messages"][1:]
    assert called["tool_calls"] == [
        {"type": "function", "id": "c0", "function": {"name": "add", "arguments": '{"a": 2}'}}
    ]
    assert result == {"role": "tool", "tool_call_id": "c0", "content": "4"}


def test_a_call_that_was_carried_out_stays_where_the_server_is_busy_then(chat, server, tmp_path):
    server.script = [Says(calls=[{"name": "add", "arguments": "{}"}]), Says(status=503, message="full"), Says(["4."])]
    (tmp_path / "call.py").write_text(f"open({str(tmp_path / 'carried')!r}, 'a').write('x')")
    talk = tmp_path / "talk.json"
    options = ("--tool-exec", f"{sys.executable} {tmp_path}/call.py", "--yes", "--session", str(talk))
    done = chat("Twice 2?", options=options)
    assert (done.code, "to ask for the answer again, use /retry" in done.err) == (6, True)
    assert [one["role"] for one in conversation(talk)] == ["user", "assistant", "tool"]
    assert chat("/retry", options=options).out == "4.\n"
    assert (tmp_path / "carried").read_text() == "x"


REFUSALS = (
    (Says(status=503, message="full", headers={"Retry-After": "7"}), "is busy: full\n→ try again in 7 s"),
    (Says(status=429, message="slow down"), "is busy: slow down\n→ try again in a moment"),
    (Says(status=400, message="no \x1b[31mroom"), "rejects the request (400): no \\x1b[31mroom\n"),
    (Says(status=403, message="ask as localhost"), "rejects the request (403): ask as localhost"),
    (Says(status=404, message="no such model"), "has no /v1/chat/completions: no such model"),
    (Says(status=500, message="out of luck"), "has failed (500): out of luck"),
    (Says(status=307, headers={"Location": "https://elsewhere"}), "redirects to https://elsewhere"),
    (Says(cut=0), "the connection closed before the answer was complete"),
    (Says(damage="{nothing"), "does not respond as OpenAI's API does"),
    (Says(damage="[1]"), "does not respond as OpenAI's API does"),
    (Says(damage='{"choices": [7]}'), "does not respond as OpenAI's API does"),
    (Says(damage='{"error": {"message": "no memory"}}'), "has failed: no memory"),
)


@pytest.mark.parametrize(("says", "words"), REFUSALS, ids=range(len(REFUSALS)))
def test_a_question_without_an_answer_is_taken_back(chat, server, says, words):
    server.script = [says, Says(["Now."])]
    done = chat("one", "two", "/json")
    assert words in done.err
    assert done.code == 6
    assert json.loads(done.out.removeprefix("Now.\n"))["messages"] == [user("two"), assistant("Now.")]


LOST = (
    (Says(["Half ", "an ", "answer"], cut=3), "the connection closed before the answer was complete"),
    (Says(["Half ", "an "], damage="{nothing"), "does not respond as OpenAI's API does"),
    (Says(["Half ", "an "], damage='{"error": {"message": "no memory"}}'), "has failed: no memory"),
)


@pytest.mark.parametrize(("says", "words"), LOST, ids=range(len(LOST)))
def test_what_came_of_an_answer_stays(chat, server, tmp_path, says, words):
    server.script = [says, Says(["Whole."])]
    file = tmp_path / "talk.json"
    done = chat("one", options=("--session", str(file)))
    assert (done.code, done.out) == (6, "Half an \n")
    assert f"{words}: the part that arrived is kept\n→ /retry asks again" in done.err
    assert conversation(file) == [user("one"), assistant("Half an ")]
    assert chat("/retry", options=("--session", str(file))).out == "Whole.\n"
    assert spoken(server.bodies[1]) == [("user", "one")]


def test_an_answer_that_was_lost_is_said_once(chat, server):
    server.script = [Says(["Half", "!"], cut=2), Says(["Whole."])]
    done = chat("one", "two")
    assert done.out == "Half\nWhole.\n"
    assert done.err.count("the part that arrived is kept") == 1


def test_a_server_may_say_nothing_of_the_end(chat, server):
    server.script = [Says(["One."], finish=""), Says(["Two."], done=False), Says([], usage=None)]
    done = chat("a", "b", "c")
    assert (done.code, done.out) == (0, "One.\nTwo.\n")
    assert "no answer yet" not in done.err


def test_half_a_call_is_none(chat, server, tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([ADDER]))
    server.script = [Says(["I add."], calls=[{"name": "add", "arguments": '{"a": 2}'}], cut=4)]
    done = chat("one", "/json", options=("--tools", str(tmp_path / "tools.json")))
    assert json.loads(done.out.removeprefix("I add.\n"))["messages"] == [user("one"), assistant("I add.")]


def test_a_key_is_asked_for_read_from_a_file_and_sent(chat, server, tmp_path):
    server.key = "s3cret"
    key = tmp_path / "key"
    done = chat("a")
    assert (done.code, done.out) == (6, "")
    assert "requires an API key\n→ write the key to a file, and pass it with --api-key-file" in done.err
    key.write_text("wrong\n")
    assert "rejects this API key" in chat("a", options=("--api-key-file", str(key))).err
    key.write_text("s3cret\nmore\n")
    assert chat("a", options=("--api-key-file", str(key))).out == "Yes.\n"
    key.write_text("\n")
    assert chat("a", options=("--api-key-file", str(key))).code == 2


@pytest.mark.parametrize(
    "url", ["localhost:8000", "http://", "ftp://x", "http://x:port", "http://me:key@x", "http://a b", "http://[::1", ""]
)
def test_what_is_no_address(dsv4, url):
    done = dsv4("chat", "--url", url, stdin=b"a\n")
    assert done.code == 2
    assert "is not the URL of a server\n→ use a URL such as http://localhost:8000" in done.err


def test_nobody_is_there(dsv4, server):
    server.stop()
    done = dsv4("chat", "--url", server.url, stdin=b"a\n")
    assert done.code == 6
    assert f"cannot reach a server at {server.url}: Connection refused\n→ start one with dsv4 serve" in done.err


def test_nobody_can_have_this_name(dsv4):
    done = dsv4("chat", "--url", f"http://{'a' * 70}:1", stdin=b"a\n")
    assert (done.code, "cannot reach a server at http://aaaa" in done.err) == (6, True)


def test_an_address_may_end_with_v1(dsv4, server):
    assert dsv4("chat", "--url", f"{server.url}/v1/", stdin=b"a\n").out == "Yes.\n"


@pytest.mark.parametrize("option", [("--tp", "2"), ("--device", "cpu"), ("--draft", "2"), ("--max-context", "99")])
def test_what_the_server_decides_is_refused(chat, option):
    done = chat("a", options=option)
    assert done.code == 2
    assert f"{option[0]} cannot be combined with --url" in done.err


def test_a_key_without_a_server(dsv4, tmp_path):
    done = dsv4("chat", "--api-key-file", str(tmp_path / "key"), stdin=b"a\n")
    assert (done.code, "--api-key-file needs --url" in done.err) == (2, True)


def test_commands_that_tell(chat):
    done = chat("a", "/set", "/tokens ab", "/tokens", "/context", "/stats")
    assert done.code == 0
    assert "temperature         the server's own" in done.out
    assert "2 tokens: 97 98" in done.out
    assert "5  total" in done.out
    assert "5 of 4,096 tokens used, 4,091 left" in done.out
    assert "prompt tokens prefilled           20" in done.out


def test_a_server_that_never_counts_is_asked_once_and_a_line_says_so(chat, server, monkeypatch):
    monkeypatch.setattr(api_client, "LONGEST_WAIT", 0.1)
    server.count_after.clear()
    done = chat("x" * CONTEXT, "y", "/context")
    assert (done.out, server.counted) == ("Yes.\nYes.\n", 1)
    words = f"warning: {server.url} did not respond to /tokenize within 0.1 s: tokens are not counted"
    assert done.err.count(words) == 1
    assert len(server.bodies) == 2


def test_a_server_that_counts_nothing(chat, server):
    server.counts, server.models = False, [{"id": "plain"}]
    server.script = [Says(["Yes."], usage=None)]
    done = chat("a", "/tokens ab", "/context", "/clear", "/context")
    assert done.out == "Yes.\n0 tokens used; the server does not report its context limit\n"
    assert done.err.splitlines()[0] == f"{server.url}: plain"
    assert done.err.splitlines()[1].startswith("plain · ")
    assert "tokens ·" not in done.err
    assert done.err.count("has no /tokenize: Not Found") == 2


def test_another_model_of_the_server(chat, server):
    server.models += [{"id": "second", "max_model_len": 99}]
    chat("a", "/model second", "b", "/model third")
    assert [body["model"] for body in server.bodies] == [MODEL, "second"]
    done = chat("a", "/model third", options=("--model", "second"))
    assert server.bodies[-1]["model"] == "second"
    assert f"has no model 'third'\n→ use one of {MODEL}, second" in done.err
    assert chat("a", options=("--model", "third")).code == 2


def test_a_session_goes_on_with_its_server_and_may_leave_it(chat, dsv4, server):
    chat("one")
    done = dsv4("chat", "--continue", "two", stdin=b"")
    assert (done.code, done.out) == (0, "Yes.\n")
    assert spoken(server.bodies[1])[0] == ("user", "one")
    speak(dsv4.patch, says("Here."))
    assert dsv4("chat", "--continue", "--model", SMALL, "three").out == "Here.\n"
    assert dsv4("chat", "--continue", "four").out == "Here.\n"
    assert len(server.bodies) == 2


def test_a_session_whose_server_is_gone_says_what_else_there_is(chat, dsv4, server):
    chat("one")
    server.stop()
    done = dsv4("chat", "--continue", "two")
    assert done.code == 6
    assert "; to continue with a local model, use --model NAME" in done.err


def test_the_oldest_turns_go_when_the_context_is_full(chat, server):
    done = chat("a" * 2000, "b" * 1500, "c" * 1000, options=("--max-tokens", "100"))
    assert [[content[:1] for _, content in spoken(body)] for body in server.bodies] == [
        ["a"], ["a", "Y", "b"], ["b", "Y", "c"],
    ]  # fmt: skip
    assert "the oldest 2 messages are dropped" in done.err


@pytest.mark.slow  # tests/commands/eval/test_url.py runs the longest command of a server's clients
def test_it_loads_no_torch(server, tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "dsv4cli", "chat", "--url", server.url, "Hi"]
    environment = {"XDG_STATE_HOME": str(tmp_path), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "Yes.\n"
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "dsv4cli" in loaded
    assert not loaded & {"torch", "triton", "numpy", "transformers", "huggingface_hub", "tokenizers"}


@pytest.fixture
def terminal(server, tmp_path):
    """A chat with the server in a terminal."""
    running = []

    def start(*options):
        one = Terminal("chat", "--url", server.url, "--no-markdown", *options, XDG_STATE_HOME=str(tmp_path))
        running.append(one)
        one.until("Ctrl-D quits\n", ">")
        return one

    yield start
    for one in running:
        one.end()


def test_ctrl_c_stops_an_answer_closes_the_connection_and_keeps_what_came(terminal, server):
    server.script = [Says(["word "] * 2000, pause=0.01), Says(["Next."])]
    one = terminal()
    one.type("go\r")
    one.until("word word")
    one.type("\x03")
    one.until(f"{MODEL} · ", "stopped", ">")
    assert server.ended.wait(60)
    one.type("on\r")
    one.until("Next.\n", f"{MODEL} · ", ">")
    one.type("\x04")
    assert one.leave() == 0
    assert not {"Traceback", "error"} & {*one.plain.replace(":", " ").split()}
    (_, asked), (_, kept), _ = spoken(server.bodies[1])
    assert asked == "go"
    assert kept.startswith("word word")


def test_ctrl_c_before_the_first_word_takes_the_question_back(terminal, server):
    server.script = [Says(["Late."] * 3, pause=200), Says(["Next."])]  # longer than `until` waits
    one = terminal()
    one.type("go\r")
    assert comes(lambda: server.bodies)
    one.type("\x03")
    one.until("stopped; no answer yet", ">")
    one.type("on\r")
    one.until("Next.\n", ">")
    one.type("\x04")
    assert one.leave() == 0
    assert spoken(server.bodies[1]) == [("user", "on")]
