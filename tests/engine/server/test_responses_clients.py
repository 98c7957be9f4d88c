"""Other people's clients of the Responses API, as they are, against the server: OpenAI's, agents, LangChain, Codex.

The clients of Node are found as Node finds them:
npm install --prefix DIR @openai/codex @ai-sdk/openai ai openai; export NODE_PATH=DIR/node_modules
"""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dsv4cli.engine.server.accounts import Accounts
from dsv4cli.engine.server.api_keys import ApiKey
from dsv4cli.engine.text.tokens import THINK_END
from tests.support.program import calls_block
from tests.support.scripted_engine import scripted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_garbage")]

SUM, ANSWER = "What is 17 + 25?", "17 + 25 = 42."
WEATHER, REPORT = "What is the weather in Paris?", "It is 21 degrees in Paris."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
KEY = "a-key-of-eight"


def call(name, **given):
    return calls_block([{"function": {"name": name, "arguments": json.dumps(given)}}])


def says(prompt):
    """A weather report: a call, and what it means."""
    last = prompt.rpartition("<｜User｜>")[2]
    thought = f"Let me see.{THINK_END}" if prompt.endswith("<think>") else ""
    if "<tool_result>" in last:
        return f"{thought}{REPORT}"
    return thought + (call("get_weather", city="Paris") if WEATHER in last else ANSWER)


@pytest.fixture(scope="module")
def server():
    with scripted(says, accounts=Accounts([ApiKey("own", KEY.encode())])) as one:
        yield one
    assert not [line for line in one.lines if " 400, " in line or " 500, " in line]


@pytest.fixture
def openai(server):
    module = pytest.importorskip("openai")
    with module.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def cached_part(server):
    """How much of the last prompt was found in the prefix cache, from the log."""
    line = next(line for line in reversed(server.lines) if "/responses 200" in line)
    words = line.replace(",", "").split()
    return int(words[words.index("cached") - 1]) / int(words[words.index("+") - 1])


def test_openai_answers_streams_and_parses(openai):
    pydantic = pytest.importorskip("pydantic")
    response = openai.responses.create(model="nano", input=SUM, reasoning={"effort": "high", "summary": "auto"})
    assert (response.output_text, response.output[0].summary[0].text) == (ANSWER, "Let me see.")
    with openai.responses.stream(model="nano", input=SUM) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == stream.get_final_response().output_text == ANSWER
    with scripted(lambda _: '{"total": 42}') as server:
        form, other = pydantic.create_model("Sum", total=int), openai.with_options(base_url=f"{server.url}/v1")
        assert other.responses.parse(model="nano", input=SUM, text_format=form).output_parsed.total == 42
    assert openai.responses.retrieve(response.id).output_text == ANSWER
    assert openai.responses.input_items.list(response.id).data[0].content[0].text == SUM
    assert openai.responses.input_tokens.count(model="nano", input=SUM).input_tokens > 0
    openai.responses.delete(response.id)
    with pytest.raises(pytest.importorskip("openai").NotFoundError):
        openai.responses.retrieve(response.id)


def test_openai_calls_tools_statelessly_and_by_id(openai, server):
    options = {"model": "nano", "tools": [FUNCTION], "reasoning": {"effort": "high"}}
    first = openai.responses.create(input=WEATHER, **options)
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "21"}
    second = openai.responses.create(input=[result], previous_response_id=first.id, **options)
    assert second.output_text == REPORT
    sealed = {"store": False, "include": ["reasoning.encrypted_content"]}
    first = openai.responses.create(input=WEATHER, **options, **sealed)
    items = [{"role": "user", "content": WEATHER}, *first.output, {**result, "call_id": first.output[-1].call_id}]
    second = openai.responses.create(input=items, **options, **sealed)
    assert second.output_text == REPORT
    assert cached_part(server) > 0.9


def test_openai_cancels_in_the_background(openai):
    response = openai.responses.create(model="nano", input=SUM, background=True)
    assert openai.responses.cancel(response.id).status in ("cancelled", "completed")


@pytest.mark.parametrize("streams", [False, True])
def test_openai_agents_by_default(server, streams):
    agents, module = pytest.importorskip("agents"), pytest.importorskip("openai")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        return f"21 in {city}"

    async def run():
        client = module.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY)
        model = agents.OpenAIResponsesModel("nano", openai_client=client)
        agent = agents.Agent("a", instructions="Help.", model=model, tools=[get_weather])
        if not streams:
            return (await agents.Runner.run(agent, WEATHER)).final_output
        result = agents.Runner.run_streamed(agent, WEATHER)
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert asyncio.run(run()) == REPORT
    assert cached_part(server) > 0.9


def test_langchain(server):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(model="nano", base_url=f"{server.url}/v1", api_key=KEY, use_responses_api=True)
    bound = chat.bind_tools([FUNCTION])
    messages = [{"role": "user", "content": WEATHER}]
    answer = bound.invoke(messages)
    [made] = answer.tool_calls
    assert (made["name"], made["args"]) == ("get_weather", {"city": "Paris"})
    messages += [answer, {"role": "tool", "tool_call_id": made["id"], "content": "21"}]
    assert bound.invoke(messages).text == REPORT
    assert cached_part(server) > 0.9
    assert "".join(chunk.text for chunk in chat.stream(SUM)) == ANSWER


@pytest.mark.filterwarnings("ignore")  # its own types
def test_litellm(server, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # fetches nothing
    litellm = pytest.importorskip("litellm")
    options = {"model": "openai/nano", "api_base": f"{server.url}/v1", "api_key": KEY}
    response = litellm.responses(input=SUM, **options)
    assert response.output[-1].content[0].text == ANSWER
    events = list(litellm.responses(input=SUM, stream=True, **options))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    first = litellm.responses(input=WEATHER, tools=[FUNCTION], **options)
    made = first.output[-1]
    assert json.loads(made.arguments) == {"city": "Paris"}
    result = {"type": "function_call_output", "call_id": made.call_id, "output": "21"}
    items = [{"role": "user", "content": WEATHER}, made.model_dump(exclude_none=True), result]
    assert litellm.responses(input=items, tools=[FUNCTION], **options).output[-1].content[0].text == REPORT
    assert cached_part(server) > 0.9


AI_SDK = """
const { createOpenAI } = require('@ai-sdk/openai'), { generateText, streamText, tool, stepCountIs } = require('ai');
const { z } = require('zod');
const model = createOpenAI({ baseURL: process.argv[2], apiKey: process.argv[3] })('nano');
const tools = { get_weather: tool({ description: 'Get the weather.', inputSchema: z.object({ city: z.string() }),
                                    execute: async ({ city }) => `21 in ${city}` }) };
const asked = { model, tools, prompt: process.argv[4], stopWhen: stepCountIs(3) };
(async () => {
  const whole = await generateText(asked);
  const stream = streamText(asked);
  let text = '';
  for await (const part of stream.textStream) text += part;
  const kinds = (await stream.steps).map(step => step.finishReason);
  console.log(JSON.stringify({ whole: whole.text, text, kinds }));
})();
"""


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ai_sdk_by_default(server, tmp_path):
    if shutil.which("node") is None or subprocess.run(["node", "-e", "require('@ai-sdk/openai')"], check=False,
                                                      capture_output=True).returncode:  # fmt: skip
        pytest.skip("needs node and @ai-sdk/openai")
    (tmp_path / "ask.cjs").write_text(AI_SDK)
    said = json.loads(run("node", str(tmp_path / "ask.cjs"), f"{server.url}/v1", KEY, WEATHER))
    assert said == {"whole": REPORT, "text": REPORT, "kinds": ["tool-calls", "stop"]}
    assert cached_part(server) > 0.9


def codex_program():
    own = [Path(folder) / ".bin/codex" for folder in os.environ.get("NODE_PATH", "").split(os.pathsep) if folder]
    return next((str(path) for path in own if path.exists()), None) or shutil.which("codex")


CODEX = """
model = "nano"
model_provider = "dsv4"
[model_providers.dsv4]
name = "dsv4"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "OWN_KEY"
"""


@pytest.fixture
def codex(tmp_path):
    """Runs `codex exec` in a folder of its own, with a server that follows a script."""
    program = codex_program()
    if program is None:
        pytest.skip("needs @openai/codex")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()

    def execute(server, prompt, *options):
        (home / "config.toml").write_text(CODEX.format(url=server.url))
        own = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home), "OWN_KEY": KEY}
        return run(program, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
                   *options, prompt, cwd=work, env=own)  # fmt: skip

    execute.folder = work
    return execute


def runs_code(prompt):
    """Calls the custom tool `exec`, which runs JavaScript."""
    code = 'text(await tools.exec_command({cmd: "echo \\"new words\\" > notes.txt"}));'
    return "It is done." if "<tool_result>" in prompt.rpartition("<｜User｜>")[2] else call("exec", input=code)


def test_codex_calls_a_custom_tool(codex):
    with scripted(runs_code) as server:
        assert codex(server, "Write new words into notes.txt.", "--enable", "code_mode") == "It is done.\n"
        assert (codex.folder / "notes.txt").read_text() == "new words\n"
        assert cached_part(server) > 0.95


def edits(prompt):
    """Reads a file, changes it, and says so; it thinks before each step."""
    asked = prompt.rpartition("<tool_result>")[2] if "<tool_result>" in prompt.rpartition("<｜User｜>")[2] else ""
    if "new words" in asked:
        return f"That is it.{THINK_END}The file is changed."
    command = "sed -i s/old/new/ notes.txt; cat notes.txt" if "old words" in asked else "cat notes.txt"
    return f"I run a command.{THINK_END}I look at it." + call("exec_command", cmd=command)


def test_codex_edits_a_file(codex):
    (codex.folder / "notes.txt").write_text("old words\n")
    with scripted(edits, think="high") as server:
        assert codex(server, "Replace old by new in notes.txt.") == "The file is changed.\n"
        assert (codex.folder / "notes.txt").read_text() == "new words\n"
        assert [line for line in server.lines if "/v1/responses 200" not in line and "built-in" not in line] == []
        assert len(server.engine.prompts) == 3
        # the reasoning of both steps came back, sealed: it is in the last prompt, whose beginning was found
        assert server.engine.prompts[-1].count("I run a command.") == 2
        assert cached_part(server) > 0.95
