"""`dsv4 verify` from outside: verdicts, exit codes, reports, interruptions, and what it imports."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from dsv4cli.engine.chat import api_client
from dsv4cli.engine.verification import sender
from tests.support.chat_server import ChatServer, Says
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.program import ROOT
from tests.support.serving import served


@pytest.fixture(scope="module")
def nano():
    with served() as one:
        yield one


def test_a_right_server_is_right_and_reports_say_so(dsv4, nano, tmp_path):
    markdown, junit = tmp_path / "a.md", tmp_path / "a.xml"
    words = ("verify", nano.url, "--quick", "--only", "limits", "--json")
    done = dsv4(*words, "--report", str(markdown), "--junit", str(junit))
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["schema"], found["verdict"], found["server"]["vocabulary"]) == ("dsv4.verify/1", "right", "nano")
    assert found["server"]["release_found"] == "found by the length of its prompts"
    assert {check["verdict"] for check in found["checks"]} == {"right"}
    assert found["requests"] == sum(check["requests"] for check in found["checks"]) == 4
    assert "![dsv4 verify: 3/3 checks right](https://" in markdown.read_text()
    suites = {suite.get("name"): suite for suite in ElementTree.parse(junit).getroot()}
    assert {name: suite.get("tests") for name, suite in suites.items()} == {"limits": "3"}


def test_a_wrong_server_has_code_3_with_evidence_and_a_command(dsv4):
    with ChatServer().running() as server:
        server.script = [Says(status=500, message="\x1b[31mbroken")]
        done = dsv4("verify", server.url)
    assert (done.code, done.out) == (6, "")
    assert "cannot answer a chat request: status 500" in done.err
    assert "\x1b" not in done.err


def test_no_server_has_code_6(dsv4, monkeypatch):
    monkeypatch.setattr(sender, "BACKOFF", (0.0,))
    done = dsv4("verify", "http://127.0.0.1:9")
    assert (done.code, done.out) == (6, "")
    assert "cannot reach a server at http://127.0.0.1:9" in done.err


def busy(passing, proxy):
    """No capacity for a conversation with a system message."""
    if any(one["role"] == "system" for one in passing.body.get("messages") or ()):
        passing.status, passing.document = 503, {"error": {"message": "busy"}}


def without_echo(passing, proxy):
    """No capacity to score a prompt."""
    if passing.body.get("echo"):
        passing.status, passing.document = 503, {"error": {"message": "busy"}}


def test_a_check_that_a_late_answer_prevents_is_not_skipped(dsv4, nano, tmp_path, monkeypatch):
    monkeypatch.setattr(sender, "BACKOFF", ())
    junit = tmp_path / "a.xml"
    with FaultyProxy(nano.port, Fault("busy", "", after=without_echo)).serving() as proxy:
        done = dsv4("verify", proxy.url, "--quick", "--only", "numbers,limits", "--json", "--junit", str(junit))
    assert done.code == 6, done.err
    found = json.loads(done.out)
    assert (found["verdict"], found["server"]["echo"], found["server"]["completions"]) == ("no answer", None, True)
    verdicts = {one["name"]: one["verdict"] for one in found["checks"]}
    assert {name for name, verdict in verdicts.items() if verdict != "right"} == {"numbers.logprobs"}
    [problem] = [problem for one in found["checks"] for problem in one["problems"]]
    assert problem["late"]
    assert problem["evidence"] == ['target/echo: status 503: {"error": {"message": "busy"}}']
    assert {suite.get("name"): suite.get("errors") for suite in ElementTree.parse(junit).getroot()} == {
        "numbers": "1",
        "limits": "0",
    }


def test_a_busy_server_has_code_6_and_reports_say_so(dsv4, nano, tmp_path, monkeypatch):
    monkeypatch.setattr(sender, "BACKOFF", ())
    markdown, junit = tmp_path / "a.md", tmp_path / "a.xml"
    with FaultyProxy(nano.port, Fault("busy", "", after=busy)).serving() as proxy:
        words = ("verify", proxy.url, "--quick", "--only", "encoding", "--json")
        done = dsv4(*words, "--report", str(markdown), "--junit", str(junit))
    assert done.code == 6, done.err
    found = json.loads(done.out)
    assert found["verdict"] == "no answer"
    late = [one for one in found["checks"] if one["verdict"] == "no answer"]
    assert late[0]["name"] == "encoding.system"
    assert {(one["late"], one["wrong"]) for check in late for one in check["problems"]} == {(True, False)}
    assert "-lightgrey)" in markdown.read_text()
    [suite] = ElementTree.parse(junit).getroot()
    assert (suite.get("errors"), suite.get("failures")) == (str(len(late)), "0")
    assert suite.find("testcase/error").get("message") == late[0]["problems"][0]["what"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["localhost:8000"], "is not the URL of a server"),
        (["http://x", "--only", "replies,magic"], "there are no checks named 'magic'"),
        (["http://x", "--report", "/nowhere/a.md"], "there is no folder /nowhere"),
        (["http://x", "--against", "/nowhere/a.json"], "create one: dsv4 verify URL --record FILE.json"),
    ],
)
def test_wrong_usage_has_code_2(dsv4, words, said):
    done = dsv4("verify", *words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_a_dry_run_tells_the_cost_only(dsv4, nano):
    done = dsv4("verify", nano.url, "--quick", "--only", "encoding", "--dry-run")
    assert done.code == 0
    header, row, total = done.out.splitlines()
    assert header.split() == ["checks", "requests", "tokens", "in", "tokens", "out"]
    assert row.split()[:2] == ["encoding", "10"]
    assert total.split()[1:] == row.split()[1:]


def test_a_run_continues_where_it_was_ended(dsv4, nano, tmp_path):
    words = ("verify", nano.url, "--quick", "--only", "limits", "--out", str(tmp_path / "run.jsonl"))
    assert dsv4(*words).code == 0
    lines = (tmp_path / "run.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run.jsonl").write_text("".join(lines[:-2]) + lines[-2][:20])  # killed in a line
    done = dsv4(*words)
    assert done.code == 0
    assert f"{len(lines) - 3} responses, which are not requested again" in done.err
    again = (tmp_path / "run.jsonl").read_text().splitlines(keepends=True)
    assert again[:-2] == lines[:-2]
    assert [json.loads(line)["key"] for line in again[1:]] == [json.loads(line)["key"] for line in lines[1:]]
    assert dsv4("verify", "http://127.0.0.1:9", "--out", str(tmp_path / "run.jsonl")).code == 2


def test_no_torch_is_loaded(nano):
    program = f"""
import sys
from dsv4cli import cli
sys.argv = ["dsv4", "verify", "{nano.url}", "--quick", "--only", "limits", "--json"]
try:
    cli.main()
except SystemExit as left:
    assert not left.code, left.code
assert not {{"torch", "triton", "transformers", "numpy"}} & sys.modules.keys(), sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_refusal_of_any_status_arrives_whole(nano):
    client = api_client.ApiClient(nano.url)
    found = client.exchange("POST", "/v1/chat/completions", b"{", 60)
    assert (found.status, found.complete) == (400, True)
    assert "error" in json.loads(found.body)
    assert len(client.exchange("GET", "/v1/models", None, 60, most=9).body) == 9
