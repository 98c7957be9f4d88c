"""Real clients, as they are, against the server: OpenAI's, Anthropic's, httpx, lm-eval's harness."""

import asyncio
import json
import math
import os
import subprocess
import sys

import pytest

from dsv4cli.engine.evaluation.forms import NANO_FILE
from tests.support.program import Program

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_garbage")]

SUM, ANSWER = "What is 17 + 25?", "17 + 25 = 42."
WEATHER = "What is the weather in Paris?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "description": "Get the weather in a city.", "parameters": PARAMETERS}


@pytest.fixture
def openai(nano):
    module = pytest.importorskip("openai")
    with module.OpenAI(base_url=f"{nano.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic(nano):
    module = pytest.importorskip("anthropic")
    with module.Anthropic(base_url=nano.url, api_key="none", max_retries=0) as client:
        yield client


def asked(content):
    return [{"role": "user", "content": content}]


def test_openai_chats(openai):
    assert [one.id for one in openai.models.list()] == ["nano"]
    answer = openai.chat.completions.create(model="nano", messages=asked(SUM), temperature=0, reasoning_effort="high")
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


def test_openai_streams(openai):
    with openai.chat.completions.stream(
        model="nano", messages=asked(SUM), temperature=0, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER
    assert final.usage.completion_tokens == 12
    assert "".join(event.delta for event in events if event.type == "content.delta") == ANSWER


def test_openai_calls_tools(openai):
    tools, messages = [{"type": "function", "function": FUNCTION}], asked(WEATHER)
    with openai.chat.completions.stream(model="nano", messages=messages, tools=tools, temperature=0) as stream:
        choice = stream.get_final_completion().choices[0]
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, json.loads(call.function.arguments)["city"]) == ("tool_calls", "Paris")
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}]
    answer = openai.chat.completions.create(model="nano", messages=messages, tools=tools, temperature=0)
    assert "21" in answer.choices[0].message.content


def test_openai_parses_what_follows_a_schema(openai):
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"enum": ["yes", "no"]}}}
    answer = openai.chat.completions.create(model="nano", messages=asked(SUM), response_format=form, temperature=0)
    assert json.loads(answer.choices[0].message.content) in ("yes", "no")


def test_openai_completes_and_sees_errors(openai):
    import openai as module

    prompt = "<｜begin▁of▁sentence｜><｜User｜>What is 17 + 25?<｜Assistant｜></think>"
    answer = openai.completions.create(model="nano", prompt=[prompt, prompt], temperature=0, max_tokens=20, logprobs=1)
    assert [choice.text for choice in answer.choices] == [ANSWER, ANSWER]
    assert "".join(answer.choices[0].logprobs.tokens) == ANSWER
    with pytest.raises(module.BadRequestError) as error:
        openai.chat.completions.create(model="nano", messages=asked(SUM), temperature=-1)
    assert error.value.param == "temperature"


def test_anthropic_talks(anthropic):
    message = anthropic.messages.create(model="nano", max_tokens=64, messages=asked(SUM))
    assert message.content[0].text == ANSWER
    assert anthropic.messages.count_tokens(model="nano", messages=asked(SUM)).input_tokens == 14
    import anthropic as module

    with pytest.raises(module.BadRequestError, match="messages: expected a list"):
        anthropic.messages.create(model="nano", max_tokens=64, messages=[])


def test_anthropic_streams_thinking_and_calls(anthropic):
    with anthropic.messages.stream(
        model="nano",
        max_tokens=1100,
        messages=asked(SUM),
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:
        texts = "".join(stream.text_stream)
        thinking, text = stream.get_final_message().content
    assert (texts, text.text, thinking.type, bool(thinking.thinking)) == (ANSWER, ANSWER, "thinking", True)
    tools = [{"name": "get_weather", "description": FUNCTION["description"], "input_schema": PARAMETERS}]
    messages = asked(WEATHER)
    with anthropic.messages.stream(model="nano", max_tokens=64, messages=messages, tools=tools) as stream:
        message = stream.get_final_message()
    call = message.content[-1]
    assert (message.stop_reason, call.input["city"]) == ("tool_use", "Paris")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"temperature": 21}'}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = anthropic.messages.create(model="nano", max_tokens=64, messages=messages, tools=tools)
    assert "21" in answer.content[0].text


def test_httpx_streams_many_at_once(nano):
    httpx = pytest.importorskip("httpx")

    async def one(client):
        body = {"messages": asked(SUM), "temperature": 0, "stream": True}
        async with client.stream("POST", f"{nano.url}/v1/chat/completions", json=body) as response:
            return [line async for line in response.aiter_lines() if line.startswith("data: {")]

    async def all_of_them():
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*(one(client) for _ in range(8)))

    for lines in asyncio.run(all_of_them()):
        deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
        assert "".join(delta.get("content", "") for delta in deltas) == ANSWER


@pytest.fixture
def harness(nano, tmp_path):
    """What lm-eval finds when it asks the server: the samples of a task of its own, and its results."""
    pytest.importorskip("lm_eval")

    def evaluate(model, path, items, task, *arguments):
        (tmp_path / "items.jsonl").write_text("".join(json.dumps(one) + "\n" for one in items))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "items.jsonl")}}}
        (tmp_path / "task.yaml").write_text(json.dumps({"task": "own", **data, "test_split": "test", **task}))
        server = f"base_url={nano.url}{path},model=nano,num_concurrent=2,max_retries=1"
        done = subprocess.run(
            [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", server, "--tasks", "own",
             "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples", *arguments],
            cwd=tmp_path, env={**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
            capture_output=True, text=True, timeout=1200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        [samples] = (tmp_path / "out").rglob("samples_own*.jsonl")
        [results] = (tmp_path / "out").rglob("results*.json")
        samples = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        return samples, json.loads(results.read_text())["results"]["own"]

    return evaluate


def test_a_harness_finds_the_figures_of_run_score(nano, harness, tmp_path, monkeypatch, capsys):
    """lm-eval's local-completions with ids made by this server, on a task of three questions."""
    sums = ((2, 3), (17, 25), (9, 9))
    items = [{"q": f"What is {a} + {b}?", "choices": [f" {a + b}", f" {a + b + 1}"]} for a, b in sums]
    task = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    samples, _ = harness("local-completions", "/v1/completions", items, task)
    found = {}
    for sample in samples:
        for choice, response in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            found[sample["doc"]["q"] + choice] = float(response[0])
    texts = {one["q"] + choice: (one["q"], choice) for one in items for choice in one["choices"]}
    ids = {
        text: [nano.post("/tokenize", {"prompt": part})[1]["tokens"] for part in (text, q)]
        for text, (q, _) in texts.items()
    }
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"ids": whole}) + "\n" for whole, _ in ids.values()))
    scored = Program(monkeypatch, capsys)("run", "--score", str(tmp_path / "texts.jsonl")).out.splitlines()
    for (text, (_, context)), line in zip(ids.items(), scored, strict=True):
        assert math.isclose(found[text], sum(json.loads(line)["logprobs"][len(context) :]), abs_tol=1e-4)


def test_a_harness_in_its_chat_form_finds_the_figures_of_eval(harness, tmp_path, monkeypatch, capsys):
    """lm-eval's local-chat-completions; nano has some of these questions wrong."""
    names = {"spelling", "counting", "units", "chinese", "greetings"}
    own = [item for item in map(json.loads, NANO_FILE.read_text().splitlines()) if item["task"] in names]
    asked = [
        {"prompt": item["messages"][0]["content"], "score": "exact", "answer": item["answer"]}
        for item in own
        if len(item["messages"]) == 1
    ]
    task = {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [], "max_gen_toks": 64, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    }
    samples, results = harness("local-chat-completions", "/v1/chat/completions", asked, task, "--apply_chat_template")
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    dsv4, out = Program(monkeypatch, capsys), tmp_path / "results.jsonl"
    options = ("--temperature", "0", "--max-tokens", "64", "--out", str(out), "--json")
    scored = json.loads(dsv4("eval", str(tmp_path / "asked.jsonl"), *options).out)
    given = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    assert [sample["filtered_resps"] for sample in samples] == [[one["content"]] for one in given]
    assert [sample["exact_match"] for sample in samples] == [one["ruling"] == "correct" for one in given]
    assert scored["cut"] == 0  # the harness counts such an answer as wrong
    assert math.isclose(results["exact_match,none"], scored["score"])
    assert 0 < scored["score"] < 1
    assert len(samples) == scored["items"] == 27


@pytest.mark.filterwarnings("ignore")  # its own types
@pytest.mark.parametrize("model", ["openai/nano", "anthropic/nano"])
def test_litellm_recognizes_a_prompt_that_is_too_long(nano, monkeypatch, model):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would download the prices of models
    litellm = pytest.importorskip("litellm")
    base = f"{nano.url}/v1" if model.startswith("openai") else nano.url
    messages = asked("word " * 9000)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model=model, messages=messages, api_base=base, api_key="none", max_tokens=5, num_retries=0)
