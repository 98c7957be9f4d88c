"""The validated body of /v1/chat/completions: its conversation as a prompt, and the options of the answers."""

import re
from dataclasses import dataclass
from typing import Any

from dsv4cli.engine.server.answer_format import AnswerFormat, openai_shape, with_schema
from dsv4cli.engine.server.efforts import Effort, effort_of
from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.neutral_fields import refuse_unsupported
from dsv4cli.engine.server.openai_history import INSTRUCTING, openai_messages
from dsv4cli.engine.server.plan import MOST_CHOICES, MOST_STOPS, AnswerPlan, limits_of, sampling_of
from dsv4cli.engine.server.refusals import Refusal, bad_field
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.text.prompt import Message, Tool, check_messages, check_tools, with_tools
from dsv4cli.engine.text.turns import text_of
from dsv4cli.errors import UsageError

MOST_LOGPROBS = 20
# Claude Code begins its system prompt with this line. It contains a nonce per request, so the prefix cache would
# never hit (anthropics/claude-code#68900).
BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:(?:[ \t]*[\w.-]+=[^;\s]*;?)+\s*")
# accepted fields that do not affect the answer
IDLE = (
    "model", "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "add_generation_prompt", "continue_final_message", "guided_decoding_backend",
)  # fmt: skip


@dataclass(frozen=True)
class ChatRequest:
    """A validated request to /v1/chat/completions.

    Attributes:
        stream: whether the answers are streamed.
        include_usage: whether the stream ends with a chunk that contains the usage.
        logprobs: whether tokens and their log-probabilities are reported.
        old_calls: whether the client uses the older form of tools, and gets calls as `function_call`.
    """

    plan: AnswerPlan
    stream: bool
    include_usage: bool
    logprobs: bool
    old_calls: bool = False


def read_chat(body: dict[str, Any], service: Service) -> ChatRequest:
    """Validate a request body.

    Raises:
        Refusal: a field is invalid; the message names it.
    """
    fields = Fields(body)
    effort = effort_of(fields, service.dialogue.release, service.defaults.think)
    shape = openai_shape(fields, openai_tools(fields))
    ids = prompt_ids(openai_messages(fields.value("messages")), shape, effort, service)
    logprobs, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, MOST_LOGPROBS)
    if top is not None and not logprobs:
        raise bad_field("top_logprobs", "needs logprobs: true")
    given = [fields.whole(name, 1) for name in ("max_completion_tokens", "max_tokens")]
    most = next((one for one in given if one is not None), None)
    limits = limits_of(fields, service, most, fields.texts("stop", MOST_STOPS), top or 0)
    count = fields.whole("n", 1, MOST_CHOICES) or 1
    ignore_eos = fields.flag("ignore_eos")
    plan = AnswerPlan(ids, sampling_of(fields, service), limits, shape, effort.budget, count, ignore_eos)
    options = fields.mapping("stream_options")
    include_usage = options is not None and options.flag("include_usage")
    request = ChatRequest(plan, fields.flag("stream"), include_usage, logprobs, bool(fields.items("functions")))
    refuse_unsupported(fields, {"best_of": count} | ({"min_tokens": fields.value("min_tokens")} if ignore_eos else {}))
    fields.ignored(*IDLE)
    service.say_ignored(fields.unknown)
    return request


def conversation_ids(fields: Fields, effort: Effort, service: Service) -> list[int]:
    """Return the prompt's token ids for `messages` and `tools`.

    Raises:
        Refusal: a field is invalid, or the prompt is too long.
    """
    shape = openai_shape(fields, openai_tools(fields))
    return prompt_ids(openai_messages(fields.value("messages")), shape, effort, service)


def openai_tools(fields: Fields) -> list[Tool]:
    """Return the tools in `tools`, or in the older `functions`. Raises `Refusal` if one is invalid."""
    tools, functions = fields.items("tools") or [], fields.items("functions") or []
    if tools and functions:
        raise bad_field(fields.name("functions"), "cannot be combined with tools: use tools")
    return checked_tools(tools or [{"type": "function", "function": one} for one in functions])


def checked_tools(tools: list[Any]) -> list[Tool]:
    """Return the tools, in OpenAI's shape, after validation. Raises `Refusal` if one is invalid."""
    try:
        return check_tools(tools)
    except UsageError as error:
        raise _refusal(error, "tools") from None


def prompt_ids(messages: Any, shape: AnswerFormat, effort: Effort, service: Service) -> list[int]:
    """Validate messages in OpenAI's shape, and return the prompt's token ids.

    Raises:
        Refusal: a message is invalid, or the prompt is too long.
    """
    try:
        checked = with_schema(with_tools(_as_system(check_messages(messages)), shape.tools), shape.form)
        return service.prompt(service.dialogue_of(effort), checked)
    except UsageError as error:
        raise _refusal(error, "messages") from None


def _as_system(messages: list[Message]) -> list[Message]:
    """Return the conversation with developer messages as system messages.

    The prompt format drops a developer message before the last question, along with the reasoning that followed it. An
    API client expects its instructions to stay in effect.
    """
    first = next((i for i, message in enumerate(messages) if message["role"] not in INSTRUCTING), len(messages))
    return [
        one if one["role"] not in INSTRUCTING else {"role": "system", "content": _instruction(one, leading=i < first)}
        for i, one in enumerate(messages)
    ]


def _instruction(message: Message, leading: bool) -> str:
    text = text_of(message.get("content"))
    return BILLING_LINE.sub("", text) if leading else text


def _refusal(error: UsageError, field: str) -> Refusal:
    """Return the refusal for an error, about the field that its message names, or else about `field`."""
    where, _, reason = error.message.partition(": ")
    return bad_field(where, reason) if reason else bad_field(field, error.message)
