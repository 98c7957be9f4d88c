"""The validated body of /v1/responses: its items as a prompt, and the options of the answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4cli.engine.chat.dropping import messages_to_drop
from dsv4cli.engine.server.accounts import Account
from dsv4cli.engine.server.answer_format import AnswerFormat, form_in, openai_form
from dsv4cli.engine.server.chat_request import prompt_ids
from dsv4cli.engine.server.efforts import Effort, effort_of
from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.neutral_fields import refuse_unsupported
from dsv4cli.engine.server.plan import MOST_STOPS, AnswerPlan, limits_of, sampling_of
from dsv4cli.engine.server.refusals import Refusal, bad_field
from dsv4cli.engine.server.response_input import InputReader, input_items
from dsv4cli.engine.server.response_store import PREVIOUS, ResponseStore, StoredInput
from dsv4cli.engine.server.response_tools import ResponseTools, read_choice, read_tools
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.text.prompt import Message
from dsv4cli.engine.text.reply_grammar import AnswerForm

# accepted fields that do not affect the answer; max_tool_calls limits calls of built-in tools only
IDLE = (
    "model", "stream_options", "service_tier", "prompt_cache_retention", "prompt_cache_options", "client_metadata",
    "max_tool_calls", "background_options", "access_programs", "image",
)  # fmt: skip
# identifiers that the response repeats
REPEATED = ("safety_identifier", "prompt_cache_key", "user")
# fields that refer to something that only OpenAI's server has
ELSEWHERE = ("conversation", "prompt", "moderation", "context_management")
SUMMARIES = ("auto", "concise", "detailed")
SEALED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
NOTHING_STORED = "this server stores no responses (--no-store): send the whole conversation as input"


@dataclass(frozen=True)
class ResponseRequest:
    """A validated request to /v1/responses.

    Attributes:
        stream: whether the answer is streamed.
        background: whether the request returns immediately while the answer is generated.
        stored: whether the response is stored.
        inputs: the request's own input as it is stored.
        tools: the offered tools.
        summarized: whether the reasoning is returned as a summary.
        sealed: whether the reasoning is also returned as `encrypted_content`.
        shown: the fields of the request that the response repeats.
    """

    plan: AnswerPlan
    stream: bool
    background: bool
    stored: bool
    inputs: StoredInput
    tools: ResponseTools
    summarized: bool
    sealed: bool
    shown: dict[str, Any]


@dataclass(frozen=True)
class _Conversation:
    """A request's conversation, before it is encoded."""

    own: list[dict[str, Any]]
    tools: ResponseTools
    messages: list[Message]
    shape: AnswerFormat
    effort: Effort
    shown: dict[str, Any]


def read_response(body: dict[str, Any], service: Service, owner: Account) -> ResponseRequest:
    """Validate a request body.

    Args:
        owner: the account whose stored responses the request may refer to.

    Raises:
        Refusal: a field is invalid; the message names it.
    """
    fields = Fields(body)
    talk = _conversation(fields, service, owner)
    stops = fields.texts("stop", MOST_STOPS)  # not in OpenAI's Responses API
    limits = limits_of(fields, service, fields.whole("max_output_tokens", 1), stops, 0)
    sampling = sampling_of(fields, service)
    refuse_unsupported(fields)
    ids = _ids(talk, fields, service, limits.max_tokens)
    plan = AnswerPlan(ids, sampling, limits, talk.shape, talk.effort.budget)
    stream, background = fields.flag("stream"), fields.flag("background")
    stored = fields.flag("store", otherwise=True) and service.responses is not None
    if background and (stream or not stored):
        raise bad_field("background", "needs a stored response that is not streamed")
    summary = _summary(fields)
    inputs = StoredInput.of(talk.own if stored else ())
    sealed = SEALED in _included(fields)
    shown = {
        **talk.shown,
        "background": background,
        "max_output_tokens": fields.value("max_output_tokens"),
        "metadata": _metadata(fields),
        "reasoning": {"effort": "none" if talk.effort.level == "off" else talk.effort.level, "summary": summary},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "truncation": fields.value("truncation") or "disabled",
        **{name: text for name in REPEATED if (text := fields.text(name)) is not None},
    }
    fields.ignored(*IDLE)
    service.say_ignored(fields.unknown)
    return ResponseRequest(
        plan, stream, background, stored, inputs, talk.tools, summary is not None, sealed, shown
    )  # fmt: skip


def response_ids(body: dict[str, Any], service: Service, owner: Account) -> list[int]:
    """Return the token ids of a body whose prompt is only counted. Raises `Refusal` if a field is invalid."""
    fields = Fields(body)
    return _ids(_conversation(fields, service, owner), fields, service, service.defaults.limits.max_tokens)


def _conversation(fields: Fields, service: Service, owner: Account) -> _Conversation:
    for name in ELSEWHERE:
        if fields.value(name):
            raise bad_field(name, "this server has no conversations, prompt templates, moderation or compaction")
    store, previous = service.responses, fields.text(PREVIOUS)
    if previous is not None and store is None:
        raise bad_field(PREVIOUS, NOTHING_STORED)
    earlier = store.conversation(previous, owner) if store is not None and previous is not None else []
    given = fields.value("input")
    if given is None and not earlier:
        raise bad_field("input", "expected a text or a list of items, got nothing")
    own = input_items([] if given is None else given, _finder(store, owner))
    tools = _tools(fields, [*earlier, *own], service)
    choice, allowed, shown_choice = read_choice(fields, tools)
    text = fields.mapping("text")
    form, where = _form(text, fields)
    shape = AnswerFormat(form, choice, allowed, where)
    shown = {
        "instructions": fields.text("instructions"),
        "parallel_tool_calls": fields.flag("parallel_tool_calls", otherwise=True),
        PREVIOUS: previous,
        "text": _shown_text(text, service),
        "tool_choice": shown_choice,
        "tools": tools.shown,
    }
    effort = effort_of(fields, service.dialogue.release, service.defaults.think)
    messages = _messages(shown["instructions"], earlier, own, service)
    return _Conversation(own, tools, messages, shape, effort, shown)


def _form(text: Fields | None, fields: Fields) -> tuple[AnswerForm | None, str]:
    """Return the form of the text, from `text.format` or the fields of the chat API, and the field that requests it."""
    form, (other, field) = None if text is None else form_in(text, "format", nested=False), openai_form(fields)
    if form is not None and other is not None:
        raise bad_field(field, "cannot be combined with text.format: use one of them")
    return (other, field) if form is None else (form, "text.format")


def _finder(store: ResponseStore | None, owner: Account) -> Callable[[str], dict[str, Any] | None]:
    if store is not None:
        return lambda name: store.item(name, owner)

    def refuse(name: str) -> None:
        raise bad_field("input", f"cannot find the item {name!r}: {NOTHING_STORED}")

    return refuse


def _tools(fields: Fields, items: Sequence[dict[str, Any]], service: Service) -> ResponseTools:
    """Return the tools of the request, and of its input items that add tools."""
    given = list(fields.items("tools") or [])
    for item in items:
        if item["type"] == "additional_tools":
            given += Fields(item, "input").items("tools") or []
    tools = read_tools(given)
    for kind in tools.dropped:
        service.say_once(f"leaving out the built-in tool {kind}: this server has none")
    return tools


def _messages(
    instructions: str | None, earlier: list[dict[str, Any]], own: list[dict[str, Any]], service: Service
) -> list[Message]:
    reader = InputReader(service.seal)
    if instructions:
        reader.messages.append({"role": "system", "content": instructions})
    reader.read(earlier, PREVIOUS)
    reader.read(own, "input")
    if not reader.messages:
        raise bad_field("input", "expected at least one message")
    for note in reader.notes:
        service.say_once(f"leaving out {note}")
    return reader.messages


def _ids(talk: _Conversation, fields: Fields, service: Service, max_tokens: int) -> list[int]:
    """Return the prompt's token ids. With truncation, the oldest turns are left out if the prompt is too long."""

    def encoded(messages: Sequence[Message]) -> list[int]:
        return prompt_ids(list(messages), talk.shape, talk.effort, service)

    if fields.choice("truncation", ("auto", "disabled")) != "auto":
        return encoded(talk.messages)

    def count(messages: Sequence[Message]) -> int:
        try:
            return len(encoded(messages))
        except Refusal as refusal:
            if refusal.code != "context_length_exceeded":
                raise
            return service.most_tokens + 1

    first = sum(1 for _ in _leading(talk.messages))
    dropped = messages_to_drop(talk.messages, count, service.context, max_tokens)
    if dropped <= 0:
        return encoded(talk.messages)  # if nothing can be left out, the prompt is refused as too long
    return encoded([*talk.messages[:first], *talk.messages[first + dropped :]])


def _leading(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the system messages before all others."""
    end = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return messages[:end]


def _shown_text(text: Fields | None, service: Service) -> dict[str, Any]:
    """Return `text` as the response shows it. Verbosity has no effect: the model was not trained with levels of it."""
    if text is None:
        return {"format": {"type": "text"}}
    verbosity = text.choice("verbosity", ("low", "medium", "high"))
    if verbosity in ("low", "high"):
        service.say_ignored(["text.verbosity"])
    shown = text.value("format") or {"type": "text"}
    if shown.get("type") == "json_schema":
        shown = {"name": "response", **shown}
    return {"format": shown} | ({} if verbosity is None else {"verbosity": verbosity})


def _summary(fields: Fields) -> str | None:
    """Return the kind of the requested summary, None for none."""
    reasoning = fields.mapping("reasoning")
    if reasoning is None:
        return None
    return reasoning.choice("summary", SUMMARIES) or reasoning.choice("generate_summary", SUMMARIES)


def _included(fields: Fields) -> Sequence[str]:
    """Return `include`. Its values for items of built-in tools are accepted: no response has such items."""
    given = fields.items("include") or []
    if not all(isinstance(one, str) for one in given):
        raise fields.wrong("include", "expected a list of strings", given)
    if LOGPROBS in given or fields.whole("top_logprobs", 0, 20):
        raise bad_field("include", f"{LOGPROBS} is not supported; use logprobs of /v1/chat/completions")
    return given


def _metadata(fields: Fields) -> dict[str, str]:
    given = fields.mapping("metadata")
    return {} if given is None else {name: given.needed(name) for name in given.names}
