"""Load generators, as they are, against the server: they count what the server has sent, and see no errors.

A generator that is not installed is skipped. The table of docs/guides/serve.md has the versions that were tested:
pip install guidellm, pip install aiperf, each in an environment of its own, with `guidellm` and `aiperf` on the PATH
"""

import json
import os
import shutil
import subprocess

import pytest

from dsv4cli.engine.server.accounts import Accounts
from dsv4cli.engine.server.api_keys import ApiKey
from tests.support.client_script import ANSWER, KEY, SUM, says
from tests.support.program import ROOT
from tests.support.scripted_engine import scripted

pytestmark = pytest.mark.slow

REQUESTS, CLIENTS = 40, 4
# tokens of `ANSWER` with its end token, and a limit that does not cut it off
WHOLE, MOST = 12, 50


@pytest.fixture(scope="module")
def server():
    with scripted(says, accounts=Accounts([ApiKey("own", KEY.encode())])) as one:
        yield one


@pytest.fixture
def run(tmp_path):
    """Runs a load generator, and returns the report that it writes."""

    def run(name, *options, report):
        program = shutil.which(name) or pytest.skip(f"needs {name}")
        # with several processes, or where its prompts run out, guidellm 0.8.1 may hang after it received all answers
        own = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
        done = subprocess.run([program, *map(str, options)], capture_output=True, text=True, timeout=1200,
                              stdin=subprocess.DEVNULL, cwd=tmp_path, env=own)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((tmp_path / report).read_text())

    return run


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm(run, server, streams, tmp_path, path):
    (tmp_path / "prompts.jsonl").write_text(f"{json.dumps({'prompt': SUM})}\n" * 10 * REQUESTS)
    backend = f"kind=openai_http,target={server.url},model=nano,request_format={path},api_key={KEY}"
    options = ("--backend", backend, "--profile", f"kind=concurrent,streams={CLIENTS}",
               "--constraint", f"kind=max_requests,count={REQUESTS}", "--disable-console-interactive",
               "--data", f"kind=json_file,path={tmp_path / 'prompts.jsonl'}",
               "--output", f"kind=json,path={tmp_path / 'report.json'}")  # fmt: skip
    [benchmark] = run("guidellm", "run", *options, report="report.json")["benchmarks"]
    requests = benchmark["requests"]
    assert {state: len(found) for state, found in requests.items() if found} == {"successful": REQUESTS}
    assert {(one["output"], one["output_tokens"]) for one in requests["successful"]} == {(ANSWER, WHOLE)}
    assert all(one["time_to_first_token_ms"] > 0 for one in requests["successful"])
    assert len(streams) >= REQUESTS


@pytest.mark.parametrize("kind", ["chat", "completions", "responses", "messages"])
def test_aiperf(run, server, streams, tmp_path, kind):
    options = ("-m", "nano", "-u", server.url, "--endpoint-type", kind, "--api-key", KEY, "--streaming",
               "--use-server-token-count", "--tokenizer", ROOT / "dsv4cli" / "nano", "--concurrency", CLIENTS,
               "--request-count", REQUESTS, "--synthetic-input-tokens-mean", 20, "--output-tokens-mean", MOST,
               "--ui", "none", "--artifact-dir", tmp_path)  # fmt: skip
    report = run("aiperf", "profile", *options, report="profile_export_aiperf.json")
    assert (report["request_count"]["avg"], report["request_error_rate"]["avg"]) == (REQUESTS, 0)
    assert report["total_usage_completion_tokens"]["avg"] == REQUESTS * WHOLE
    assert report["time_to_first_token"]["min"] > 0
    assert len(streams) == REQUESTS
