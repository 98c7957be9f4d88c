"""`dsv4 run --url` against a server that says what it is told to, with all that goes wrong on the way."""

import json
from queue import Queue

import pytest

from dsv4cli.engine.chat import remote_pool
from tests.support.chat_server import MODEL, ChatServer, Says
from tests.support.program import Program

CALL = {"name": "add", "arguments": '{"a": 1}'}


@pytest.fixture
def server():
    with ChatServer().running() as one:
        yield one


class Results(Queue):
    """Results that come, or an error: a request that nobody carries out would be waited for without end."""

    def get(self):
        return super().get(timeout=30)


@pytest.fixture
def dsv4(dsv4, monkeypatch, server):
    monkeypatch.setattr(remote_pool, "PAUSES", (0.0,))
    monkeypatch.setattr(remote_pool, "SimpleQueue", Results)
    return lambda *arguments, **more: dsv4("run", "--url", server.url, *arguments, **more)


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{number}", "id": number}) + "\n" for number in range(5)))
    return path


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def asked(server):
    return [one["messages"][-1]["content"] for one in server.bodies]


def test_an_answer_is_streamed(dsv4, server):
    server.script = [Says(["Hi", " €."], ["Hm."], calls=[CALL], finish="tool_calls")]
    done = dsv4("hello", "--think", "high", "--temperature", "0", "--top-k", "3", "--seed", "7", "--stop", "X")
    assert (done.code, done.out) == (0, 'Hi €.\nadd({"a": 1})\n')
    assert "Hm." in done.err
    assert "5 tokens in " in done.err
    [body] = server.bodies
    assert {"model": MODEL, "temperature": 0.0, "top_k": 3, "seed": 7, "stop": ["X"]}.items() <= body.items()
    assert body["reasoning_effort"] == "high"
    assert "top_p" not in body


def test_json(dsv4, server):
    server.script = [Says(["Hi."], ["Hm."])]
    found = json.loads(dsv4("hello", "--json", "--seed", "3").out)
    assert found == {
        "schema": "dsv4.run/1", "model": MODEL, "url": server.url, "content": "Hi.", "reasoning_content": "Hm.",
        "tool_calls": [], "finish_reason": "stop", "seed": 3,
        "usage": {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25},
    }  # fmt: skip
    found = json.loads(dsv4("hello", "--json", "-n", "2").out)
    assert [one["content"] for one in found["answers"]] == ["Hi.", "Hi."]
    assert len({body["seed"] for body in server.bodies}) == 3


def test_samples_are_shown_in_order(dsv4, server):
    server.script = [Says(["Hi."])]
    done = dsv4("hello", "-n", "2", "--seed", "1")
    assert done.out == "Hi.\n\nHi.\n"
    assert done.err.index("answer 1 of 2, seed 1") < done.err.index("answer 2 of 2")


def test_a_conversation_with_tools_is_sent(dsv4, server, tmp_path):
    tool = {"type": "function", "function": {"name": "add"}}
    talk = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "tools": [tool]}
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    assert dsv4("--messages", str(tmp_path / "talk.json")).code == 0
    assert {name: server.bodies[0][name] for name in talk} == talk


def test_answers_to_lines_are_in_order(dsv4, server, lines):
    done = dsv4("--prompts", str(lines), "--seed", "5", "--concurrency", "3")
    found = records(done.out)
    assert [(one["index"], one["id"], one["content"], one["seed"]) for one in found] == [
        (number, number, "Yes.", 5 + number) for number in range(5)
    ]
    assert "request" not in found[0]
    assert sorted(asked(server)) == [f"p{number}" for number in range(5)]
    assert "5 answers, 25 tokens in " in done.err


@pytest.mark.parametrize(
    "trouble",
    [
        Says(status=429, message="rate limit", headers={"Retry-After": "0"}),
        Says(status=503, message="full"),
        Says(status=502, message="bad gateway"),
        Says(["Y", "es."], cut=2),
        Says(["Y"], damage='{"error": {"message": "out of memory"}}'),
    ],
    ids=["429", "503", "502", "cut", "error"],
)
def test_what_passes_is_tried_again(dsv4, server, lines, trouble):
    server.script = [Says(["Yes."]), trouble, trouble, Says(["Yes."])]
    done = dsv4("--prompts", str(lines), "--concurrency", "1")
    assert (done.code, [one["content"] for one in records(done.out)]) == (0, ["Yes."] * 5)
    assert asked(server) == ["p0", "p1", "p1", "p1", "p2", "p3", "p4"]
    assert done.err.count("; trying again") == 1


def test_one_prompt_is_tried_again_until_its_answer_begins(dsv4, server):
    server.script = [Says(status=503, message="full"), Says(["Yes."])]
    done = dsv4("hello")
    assert (done.code, done.out) == (0, "Yes.\n")
    assert "is busy: full; trying again in 0 s" in done.err
    server.script = [Says(["Ye", "s."], cut=2)]
    done = dsv4("hello")
    assert (done.code, done.out) == (6, "Ye\n")
    assert "the connection closed before the answer was complete" in done.err


def test_a_rejected_line_is_named(dsv4, server, lines):
    server.script = [Says(["Yes."]), Says(status=400, message="too long"), Says(["Yes."])]
    done = dsv4("--prompts", str(lines), "--concurrency", "1")
    assert (done.code, len(records(done.out))) == (6, 1)
    assert f"{lines}, line 2: {server.url} rejects the request (400): too long" in done.err


def test_a_rejected_line_is_skipped(dsv4, server, lines):
    server.script = [Says(["Yes."]), Says(status=400, message="too long"), Says(["Yes."])]
    done = dsv4("--prompts", str(lines), "--concurrency", "1", "--skip-bad")
    assert (done.code, [one["index"] for one in records(done.out)]) == (0, [0, 2, 3, 4])
    assert "line 2 is skipped" in done.err
    assert "4 answers, 20 tokens" in done.err


def test_a_file_is_continued(dsv4, server, lines, tmp_path):
    out = tmp_path / "out.jsonl"
    given = ("--prompts", str(lines), "--out", str(out), "--concurrency", "1")
    server.script = [Says(["Yes."]), Says(["Yes."]), Says(status=500, message="broken")]
    done = dsv4(*given)
    assert done.code == 6
    assert f"2 of 5 answers are in {out}; run the same command again to continue" in done.err
    server.script = [Says(["Yes."])]
    assert dsv4(*given).code == 0
    assert asked(server) == ["p0", "p1", "p2", "p2", "p3", "p4"]
    found = records(out.read_text())
    assert [one["index"] for one in found] == [0, 1, 2, 3, 4]
    assert [one["seed"] - found[0]["seed"] for one in found] == [0, 1, 2, 3, 4]
    assert f"{out} already has all 5 answers" in dsv4(*given).err
    assert len(server.bodies) == 6
    done = dsv4(*given, "--think", "high")
    assert done.code == 2
    assert "has answers of another command" in done.err


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--tp", "2"), "--tp cannot be combined with --url"),
        (("--draft", "off"), "--draft cannot be combined with --url"),
        (("--logprobs", "1"), "--logprobs cannot be combined with --url"),
        (("--show-prompt",), "--show-prompt cannot be combined with --url"),
        (("--model", "flash"), "has no model 'flash'"),
        (("--concurrency", "0"), "--concurrency"),
    ],
)
def test_options_that_a_server_does_not_have(dsv4, server, given, reason):
    done = dsv4("hello", *given)
    assert done.code == 2
    assert reason in done.err
    assert not server.bodies


def test_options_without_a_url(monkeypatch, capsys, tmp_path):
    program = Program(monkeypatch, capsys)
    for option, value in (("--concurrency", "2"), ("--api-key-file", str(tmp_path))):
        done = program("run", "hello", option, value)
        assert (done.code, f"{option} needs --url" in done.err) == (2, True)


def test_a_key(dsv4, server, tmp_path):
    server.key = "secret"
    (tmp_path / "key").write_text("secret\n")
    assert dsv4("hello").code == 6
    assert dsv4("hello", "--api-key-file", str(tmp_path / "key")).code == 0


def test_a_server_that_is_gone_is_given_up(dsv4, server, lines, monkeypatch):
    monkeypatch.setattr(remote_pool.Backoff.__init__, "__defaults__", (0.0,))
    monkeypatch.setattr(remote_pool, "PATIENCE", 0.0)
    server.script = [Says(status=503, message="full")]
    done = dsv4("hello")
    assert (done.code, done.out) == (6, "")
