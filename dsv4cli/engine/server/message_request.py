"""The validated body of Anthropic's /v1/messages: its content blocks as messages of the prompt format."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dsv4cli.engine.server.answer_format import AnswerFormat, anthropic_shape
from dsv4cli.engine.server.chat_request import checked_tools, prompt_ids
from dsv4cli.engine.server.efforts import Effort, effort_of
from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.foreign_blocks import document_text, foreign_note
from dsv4cli.engine.server.neutral_fields import refuse_unsupported
from dsv4cli.engine.server.plan import MOST_STOPS, AnswerPlan, limits_of, sampling_of
from dsv4cli.engine.server.refusals import bad_field
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.text.prompt import Message, Tool
from dsv4cli.engine.text.prompt_text import to_json

# accepted fields that do not affect the answer
IDLE = (
    "model", "metadata", "service_tier", "cache_control", "container", "context_management", "diagnostics",
    "inference_geo", "speed", "user_profile_id", "workspace_id",
)  # fmt: skip


@dataclass(frozen=True)
class MessageRequest:
    """A validated request to /v1/messages.

    Attributes:
        stream: whether the answer is streamed.
        thinking: whether the answer includes its thinking.
    """

    plan: AnswerPlan
    stream: bool
    thinking: bool


def read_message(body: dict[str, Any], service: Service) -> MessageRequest:
    """Validate a request body.

    Raises:
        Refusal: a field is invalid; the message names it.
    """
    fields = Fields(body)
    effort = effort_of(fields, service.dialogue.release, service.defaults.think)
    shape = anthropic_shape(fields, _tools(fields))
    ids = _prompt(fields, shape, effort, service)
    most = fields.whole("max_tokens", 1)
    limits = limits_of(fields, service, most, fields.texts("stop_sequences", MOST_STOPS), 0)
    plan = AnswerPlan(ids, sampling_of(fields, service), limits, shape, effort.budget)
    request = MessageRequest(plan, fields.flag("stream"), effort.specified)
    refuse_unsupported(fields)
    fields.ignored(*IDLE)
    service.say_ignored(fields.unknown)
    return request


def message_ids(body: dict[str, Any], service: Service) -> list[int]:
    """Return the token ids of a body whose prompt is only counted. Raises `Refusal` if a field is invalid."""
    fields = Fields(body)
    effort = effort_of(fields, service.dialogue.release, service.defaults.think)
    return _prompt(fields, anthropic_shape(fields, _tools(fields)), effort, service)


def _prompt(fields: Fields, shape: AnswerFormat, effort: Effort, service: Service) -> list[int]:
    """Return the prompt's token ids for `system`, `messages` and `tools`."""
    given = fields.items("messages")
    if not given:
        raise bad_field("messages", "expected a list of messages")
    messages = _system(fields.value("system"))
    for nth, one in enumerate(given):
        messages += _messages(one, f"messages[{nth}]")
    turns = groupby(messages, key=lambda message: message["role"] == "assistant")
    merged = [one for answers, run in turns for one in ([_joined([*run])] if answers else run)]
    return prompt_ids(merged, shape, effort, service)


def _joined(answers: list[Message]) -> Message:
    """Merge consecutive assistant messages into one."""
    return {
        "role": "assistant",
        "content": "".join(one["content"] for one in answers),
        "reasoning_content": "".join(one["reasoning_content"] for one in answers),
        "tool_calls": [call for one in answers for call in one["tool_calls"]],
    }


def _tools(fields: Fields) -> list[Tool]:
    return checked_tools([_tool(one, f"tools[{nth}]") for nth, one in enumerate(fields.items("tools") or [])])


def _system(given: Any) -> list[Message]:
    if given is None:
        return []
    return [{"role": "system", "content": _text(given, "system")}]


def _text(given: Any, where: str) -> str:
    """Return a text, or the joined texts of a list of blocks."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise bad_field(where, "expected a text or a list of blocks")
    texts = []
    for nth, one in enumerate(given):
        block = _block(one, f"{where}[{nth}]")
        if block.text("type") != "text":
            raise bad_field(f"{where}[{nth}].type", 'expected "text", the only content that DeepSeek-V4 accepts')
        texts.append(block.needed("text"))
    return "\n\n".join(texts)


def _block(given: Any, where: str) -> Fields:
    if not isinstance(given, dict):
        raise bad_field(where, "expected an object")
    return Fields(given, where)


def _messages(given: Any, where: str) -> list[Message]:
    """Convert a message of content blocks to messages of the prompt format. Each tool result becomes its own."""
    fields = _block(given, where)
    role, content = fields.choice("role", ("user", "assistant", "system")), fields.value("content")
    if role is None:
        raise bad_field(fields.name("role"), "expected user or assistant, got nothing")
    if role == "system":
        return [{"role": role, "content": _text(content, fields.name("content"))}]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or (role == "user" and not blocks):
        raise bad_field(fields.name("content"), "expected a text or a list of blocks")
    own = [_block(one, f"{fields.name('content')}[{nth}]") for nth, one in enumerate(blocks)]
    return [_answer(own)] if role == "assistant" else [_said(one) for one in own]


def _said(block: Fields) -> Message:
    kind = block.text("type")
    if kind == "tool_result":
        content = _result(block.value("content"), block.name("content"))
        return {"role": "tool", "tool_call_id": block.needed("tool_use_id"), "content": content}
    text = document_text(block)
    if text is not None:
        return {"role": "user", "content": text}
    if kind != "text":
        reason = "expected text or tool_result: DeepSeek-V4 accepts only text, and the server fetches no content"
        raise block.wrong("type", reason, kind)
    return {"role": "user", "content": block.needed("text")}


def _result(given: Any, where: str) -> str | list[dict[str, Any]]:
    """Return a tool's result in OpenAI's shape. The prompt format replaces content other than text with a note."""
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise bad_field(where, "expected a text or a list of blocks")
    blocks = [_block(one, f"{where}[{nth}]") for nth, one in enumerate(given)]
    return [_result_part(block) for block in blocks]


def _result_part(block: Fields) -> dict[str, Any]:
    kind = block.needed("type")
    text = block.needed("text") if kind == "text" else document_text(block)
    return {"type": kind} if text is None else {"type": "text", "text": text}


def _answer(blocks: list[Fields]) -> Message:
    reasoning, content, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block in blocks:
        match block.text("type"):
            case "text":
                content.append(block.needed("text"))
            case "thinking":
                reasoning.append(block.needed("thinking"))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = to_json(block.value("input") or {})
                function = {"name": block.needed("name"), "arguments": arguments}
                calls.append({"id": block.needed("id"), "type": "function", "function": function})
            case kind:
                note = foreign_note(block)
                if note is None:
                    raise block.wrong("type", "expected text, thinking or tool_use", kind)
                content.append(note)
    # joined without an empty line: the answer's text is one, interrupted by calls
    return {
        "role": "assistant",
        "content": "".join(content),
        "reasoning_content": "".join(reasoning),
        "tool_calls": calls,
    }


def _tool(given: Any, where: str) -> Tool:
    fields = _block(given, where)
    if fields.text("type") not in (None, "custom"):
        raise fields.wrong("type", "expected custom: this server has no built-in tools", fields.value("type"))
    schema = fields.mapping("input_schema")
    if schema is None:
        raise bad_field(fields.name("input_schema"), "expected an object, got nothing")
    function = {"name": fields.needed("name"), "description": fields.text("description") or ""}
    return {"type": "function", "function": {**function, "parameters": given["input_schema"]}}
