"""Python clients, as they are, against the server: each one streams, calls a tool, parses JSON and returns reasoning.

A client that is not installed is skipped. The table of docs/guides/serve.md has the versions that were tested:
pip install openai anthropic litellm langchain-openai langchain-anthropic 'pydantic-ai-slim[openai,anthropic]' \
openai-agents 'smolagents[openai]' llm
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from dsv4cli.engine.server.accounts import Accounts
from dsv4cli.engine.server.api_keys import ApiKey
from tests.support.client_script import (
    ANSWER,
    KEY,
    PARAMETERS,
    REPORT,
    SCHEMA,
    SUM,
    THOUGHT,
    TOTAL,
    WEATHER,
    says,
)  # fmt: skip
from tests.support.scripted_engine import scripted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # the clients' own warnings
    pytest.mark.usefixtures("own_garbage"),
]

FUNCTION = {"name": "get_weather", "description": "Get the weather in a city.", "parameters": PARAMETERS}
SCHEMA_FORM = {"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server():
    with scripted(says, accounts=Accounts([ApiKey("own", KEY.encode())])) as one:
        yield one
    assert not [line for line in one.lines if " 400, " in line or " 500, " in line]


def user(text):
    return [{"role": "user", "content": text}]


def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: Name of the city.
    """
    return f"21 in {city}"


def form():
    """Return the class that JSON answers are parsed into."""
    return pytest.importorskip("pydantic").create_model("Sum", total=int)


class Client:
    """A client of the server, with one method for each thing that the table of clients lists.

    stream returns an answer that was streamed, tools the report that follows a call, parse the parsed JSON answer, and
    reason the reasoning.
    """

    def __init__(self, server, tmp_path):
        self.url, self.base, self.folder = server.url, f"{server.url}/v1", tmp_path


class OpenAiChat(Client):
    def __init__(self, server, tmp_path):
        super().__init__(server, tmp_path)
        module = pytest.importorskip("openai")
        self.client = module.OpenAI(base_url=self.base, api_key=KEY, max_retries=0)

    def create(self, text, **options):
        return self.client.chat.completions.create(model="nano", messages=user(text), **options)

    def stream(self):
        with self.client.chat.completions.stream(model="nano", messages=user(SUM)) as stream:
            return "".join(event.delta for event in stream if event.type == "content.delta")

    def tools(self):
        tools = [{"type": "function", "function": FUNCTION}]
        message = self.create(WEATHER, tools=tools).choices[0].message
        [call] = message.tool_calls
        result = {
            "role": "tool",
            "tool_call_id": call.id,
            "content": get_weather(**json.loads(call.function.arguments)),
        }
        messages = [*user(WEATHER), message, result]
        answer = self.client.chat.completions.create(model="nano", messages=messages, tools=tools)
        return answer.choices[0].message.content

    def parse(self):
        options = {"model": "nano", "messages": user(TOTAL), "response_format": form()}
        return self.client.chat.completions.parse(**options).choices[0].message.parsed

    def reason(self):
        return self.create(SUM, reasoning_effort="high").choices[0].message.reasoning_content


class OpenAiResponses(OpenAiChat):
    def stream(self):
        with self.client.responses.stream(model="nano", input=SUM) as stream:
            return "".join(event.delta for event in stream if event.type == "response.output_text.delta")

    def tools(self):
        options = {"model": "nano", "tools": [{"type": "function", **FUNCTION, "strict": True}]}
        first = self.client.responses.create(input=WEATHER, **options)
        [call] = first.output
        output = get_weather(**json.loads(call.arguments))
        result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
        return self.client.responses.create(input=[result], previous_response_id=first.id, **options).output_text

    def parse(self):
        return self.client.responses.parse(model="nano", input=TOTAL, text_format=form()).output_parsed

    def reason(self):
        response = self.client.responses.create(model="nano", input=SUM, reasoning={"effort": "high"})
        return response.output[0].content[0].text


class AnthropicSdk(Client):
    def __init__(self, server, tmp_path):
        super().__init__(server, tmp_path)
        module = pytest.importorskip("anthropic")
        self.messages = module.Anthropic(base_url=self.url, api_key=KEY, max_retries=0).messages

    def stream(self):
        with self.messages.stream(model="nano", max_tokens=500, messages=user(SUM)) as stream:
            return "".join(stream.text_stream)

    def tools(self):
        tool = {"name": "get_weather", "description": FUNCTION["description"], "input_schema": PARAMETERS}
        options = {"model": "nano", "max_tokens": 500, "tools": [tool]}
        first = self.messages.create(messages=user(WEATHER), **options)
        call = first.content[-1]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**call.input)}
        turns = [*user(WEATHER), {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        return self.messages.create(messages=turns, **options).content[0].text

    def parse(self):
        options = {"model": "nano", "max_tokens": 500, "messages": user(TOTAL), "output_format": form()}
        return self.messages.parse(**options).parsed_output

    def reason(self):
        thinking = {"type": "enabled", "budget_tokens": 1024}
        message = self.messages.create(model="nano", max_tokens=2000, messages=user(SUM), thinking=thinking)
        return message.content[0].thinking


class LiteLlm(Client):
    model, path = "openai/nano", "/v1"

    def __init__(self, server, tmp_path):
        super().__init__(server, tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would download the prices of models
            self.module = pytest.importorskip("litellm")
        self.own = {"model": self.model, "api_base": self.url + self.path, "api_key": KEY, "num_retries": 0}

    def complete(self, messages, **options):
        return self.module.completion(messages=messages, **self.own, **options)

    def stream(self):
        chunks = self.complete(user(SUM), stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def tools(self):
        tools = [{"type": "function", "function": FUNCTION}]
        message = self.complete(user(WEATHER), tools=tools).choices[0].message
        [call] = message.tool_calls
        result = {
            "role": "tool",
            "tool_call_id": call.id,
            "content": get_weather(**json.loads(call.function.arguments)),
        }
        return self.complete([*user(WEATHER), message, result], tools=tools).choices[0].message.content

    def parse(self):
        content = self.complete(user(TOTAL), response_format=SCHEMA_FORM).choices[0].message.content
        return form().model_validate_json(content)

    def reason(self):
        options = {"reasoning_effort": "high", "allowed_openai_params": ["reasoning_effort"]}
        return self.complete(user(SUM), **options).choices[0].message.reasoning_content


class LiteLlmResponses(LiteLlm):
    def respond(self, content, **options):
        return self.module.responses(input=content, **self.own, **options)

    def stream(self):
        # of models that it does not know, it streams nothing, and cuts the whole response up
        known = {"litellm_provider": "openai", "supports_native_streaming": True, "supports_reasoning": True}
        self.module.register_model({self.model: known})
        events = self.respond(SUM, stream=True)
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")

    def tools(self):
        tools = [{"type": "function", **FUNCTION, "strict": True}]
        call = self.respond(WEATHER, tools=tools).output[-1]
        output = get_weather(**json.loads(call.arguments))
        result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
        items = [*user(WEATHER), call.model_dump(exclude_none=True), result]
        return self.respond(items, tools=tools).output[-1].content[0].text

    def parse(self):
        response = self.respond(TOTAL, text={"format": {"type": "json_schema", **SCHEMA_FORM["json_schema"]}})
        return form().model_validate_json(response.output[-1].content[0].text)

    def reason(self):
        response = self.respond(SUM, reasoning={"effort": "high", "summary": "auto"})
        return response.output[0].summary[0].text


class LiteLlmAnthropic(LiteLlm):
    model, path = "anthropic/nano", ""

    def reason(self):
        thinking = {"type": "enabled", "budget_tokens": 1024}
        options = {"max_tokens": 2000, "thinking": thinking, "allowed_openai_params": ["thinking"]}
        return self.complete(user(SUM), **options).choices[0].message.reasoning_content


class LangChain(Client):
    def chat(self, **options):
        module = pytest.importorskip("langchain_openai")
        return module.ChatOpenAI(model="nano", base_url=self.base, api_key=KEY, max_retries=0, **options)

    def stream(self):
        return "".join(chunk.text for chunk in self.chat().stream(SUM))

    def tools(self):
        bound, messages = self.chat().bind_tools([get_weather]), user(WEATHER)
        answer = bound.invoke(messages)
        [call] = answer.tool_calls
        result = {"role": "tool", "tool_call_id": call["id"], "content": get_weather(**call["args"])}
        return bound.invoke([*messages, answer, result]).text

    def parse(self):
        return self.chat().with_structured_output(form(), method="json_schema").invoke(TOTAL)

    reason = None  # ChatOpenAI drops the reasoning of chat completions


class LangChainResponses(LangChain):
    def chat(self, **options):
        return super().chat(use_responses_api=True, **options)

    def reason(self):
        answer = self.chat(reasoning={"effort": "high", "summary": "auto"}).invoke(SUM)
        return next(block["reasoning"] for block in answer.content_blocks if block["type"] == "reasoning")


class LangChainAnthropic(LangChain):
    def chat(self, **options):
        module = pytest.importorskip("langchain_anthropic")
        own = {"base_url": self.url, "api_key": KEY, "max_tokens": 2000, "max_retries": 0}
        return module.ChatAnthropic(model="nano", **own, **options)

    def reason(self):
        answer = self.chat(thinking={"type": "enabled", "budget_tokens": 1024}).invoke(SUM)
        return next(block["reasoning"] for block in answer.content_blocks if block["type"] == "reasoning")


class PydanticAi(Client):
    settings: ClassVar = {"openai_reasoning_effort": "high"}

    def model(self):
        openai = pytest.importorskip("pydantic_ai.models.openai")
        return openai.OpenAIChatModel("nano", provider=self.provider())

    def provider(self):
        return pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider(base_url=self.base, api_key=KEY)

    def agent(self, **options):
        return pytest.importorskip("pydantic_ai").Agent(self.model(), **options)

    def stream(self):
        async def run():
            async with self.agent().run_stream(SUM) as result:
                return "".join([part async for part in result.stream_text(delta=True, debounce_by=None)])

        return asyncio.run(run())

    def tools(self):
        return self.agent(tools=[get_weather]).run_sync(WEATHER).output

    def parse(self):
        return self.agent(output_type=form()).run_sync(TOTAL).output

    def reason(self):
        response = self.agent().run_sync(SUM, model_settings=self.settings).response
        return response.thinking


class PydanticAiResponses(PydanticAi):
    settings: ClassVar = {"openai_reasoning_effort": "high", "openai_reasoning_summary": "auto"}

    def model(self):
        openai = pytest.importorskip("pydantic_ai.models.openai")
        return openai.OpenAIResponsesModel("nano", provider=self.provider())


class PydanticAiAnthropic(PydanticAi):
    settings: ClassVar = {"anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}

    def model(self):
        anthropic = pytest.importorskip("pydantic_ai.models.anthropic")
        provider = pytest.importorskip("pydantic_ai.providers.anthropic")
        return anthropic.AnthropicModel("nano", provider=provider.AnthropicProvider(api_key=KEY, base_url=self.url))


class OpenAiAgents(Client):
    model_class = "OpenAIResponsesModel"

    def agent(self, **options):
        agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(base_url=self.base, api_key=KEY, max_retries=0)
        model = getattr(agents, self.model_class)("nano", openai_client=client)
        return agents, agents.Agent("a", instructions="Help.", model=model, **options)

    def stream(self):
        agents, agent = self.agent()

        async def run():
            events = agents.Runner.run_streamed(agent, SUM).stream_events()
            parts = [event.data async for event in events if event.type == "raw_response_event"]
            return "".join(part.delta for part in parts if part.type == "response.output_text.delta")

        return asyncio.run(run())

    def tools(self):
        agents = pytest.importorskip("agents")
        _, agent = self.agent(tools=[agents.function_tool(get_weather)])
        return asyncio.run(agents.Runner.run(agent, WEATHER)).final_output

    def parse(self):
        agents, agent = self.agent(output_type=form())
        return asyncio.run(agents.Runner.run(agent, TOTAL)).final_output

    def reason(self):
        agents = pytest.importorskip("agents")
        settings = agents.ModelSettings(reasoning={"effort": "high", "summary": "auto"})
        _, agent = self.agent(model_settings=settings)
        items = asyncio.run(agents.Runner.run(agent, SUM)).new_items
        return next(item.raw_item.summary[0].text for item in items if item.type == "reasoning_item")


class OpenAiAgentsChat(OpenAiAgents):
    model_class = "OpenAIChatCompletionsModel"


class Smolagents(Client):
    def model(self):
        module = pytest.importorskip("smolagents")
        return module, module.OpenAIModel("nano", api_base=self.base, api_key=KEY)

    def stream(self):
        _, model = self.model()
        return "".join(delta.content or "" for delta in model.generate_stream(user(SUM)))

    def tools(self):
        module, model = self.model()
        agent = module.ToolCallingAgent([module.tool(get_weather)], model, verbosity_level=0, max_steps=3)
        return agent.run(WEATHER)

    def parse(self):
        _, model = self.model()
        return form().model_validate_json(model.generate(user(TOTAL), response_format=SCHEMA_FORM).content)

    def reason(self):
        _, model = self.model()
        answer = model.generate(user(SUM), reasoning_effort="high")
        return answer.raw.choices[0].message.reasoning_content


class Llm(Client):
    """The command `llm`, which streams to its stdout unless --no-stream is set."""

    def run(self, *arguments):
        pytest.importorskip("llm")
        model = {"model_id": "own", "model_name": "nano", "api_base": self.base, "supports_schema": True,
                 "supports_tools": True, "reasoning": True, "responses": self.responses,
                 "api_key_name": "own"}  # fmt: skip
        (self.folder / "extra-openai-models.yaml").write_text(json.dumps([model]))
        (self.folder / "keys.json").write_text(json.dumps({"own": KEY}))
        own = {"LLM_USER_PATH": str(self.folder)}
        done = subprocess.run([sys.executable, "-m", "llm", "prompt", "-m", "own", *arguments], capture_output=True,
                              text=True, timeout=600, stdin=subprocess.DEVNULL, env={**os.environ, **own})  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done

    responses = False

    def stream(self):
        return self.run(SUM).stdout.strip()

    def tools(self):
        functions = "def get_weather(city: str) -> str:\n    return '21 in ' + city\n"
        return self.run(WEATHER, "--functions", functions).stdout.strip()

    def parse(self):
        return form().model_validate_json(self.run(TOTAL, "--schema", json.dumps(SCHEMA)).stdout)

    reason = None  # it shows only the reasoning of responses


class LlmResponses(Llm):
    responses = True

    def reason(self):
        return self.run(SUM, "-o", "reasoning_effort", "high").stderr.strip()


CLIENTS = {
    "openai chat": OpenAiChat, "openai responses": OpenAiResponses, "anthropic": AnthropicSdk,
    "litellm openai": LiteLlm, "litellm responses": LiteLlmResponses, "litellm anthropic": LiteLlmAnthropic,
    "langchain-openai chat": LangChain, "langchain-openai responses": LangChainResponses,
    "langchain-anthropic": LangChainAnthropic,
    "pydantic-ai chat": PydanticAi, "pydantic-ai responses": PydanticAiResponses,
    "pydantic-ai anthropic": PydanticAiAnthropic,
    "openai-agents responses": OpenAiAgents, "openai-agents chat": OpenAiAgentsChat,
    "smolagents": Smolagents, "llm chat": Llm, "llm responses": LlmResponses,
}  # fmt: skip


@pytest.fixture(params=CLIENTS.values(), ids=[name.replace(" ", "-") for name in CLIENTS])
def client(request, server, tmp_path):
    return request.param(server, Path(tmp_path))


def test_streams(client, streams):
    assert client.stream() == ANSWER
    assert len(streams) == 1


def test_calls_a_tool(client):
    assert client.tools() == REPORT


def test_parses_json(client):
    assert client.parse().total == 42


def test_returns_the_reasoning(client):
    if client.reason is None:
        pytest.skip("the client drops it")
    assert client.reason() == THOUGHT
