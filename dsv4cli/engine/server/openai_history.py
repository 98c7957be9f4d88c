"""OpenAI's messages with the names of the prompt format: older forms, refusals and reasoning. No torch."""

from typing import Any

from dsv4cli.engine.text.prompt import Message

# roles whose messages instruct the model
INSTRUCTING = ("system", "developer")


def openai_messages(value: Any) -> Any:
    """Return the messages with the names of the prompt format.

    `reasoning` becomes `reasoning_content`, a developer message that precedes all others becomes a system message, and
    an assistant message without content gets an empty one. A refusal becomes text. A `function_call` and the message
    with the role `function` that answers it become a tool call and its result. A value that is not a list is returned
    unchanged.
    """
    if not isinstance(value, list):
        return value
    messages, leading = [], True
    for nth, one in enumerate(value):
        leading = leading and isinstance(one, dict) and one.get("role") in INSTRUCTING
        messages.append(_message(one, nth, leading) if isinstance(one, dict) else one)
    return _with_results(messages)


def _message(given: Message, nth: int, leading: bool) -> Message:
    message = dict(given)
    if leading:
        message["role"] = "system"
    if message.get("role") == "assistant":
        message = _answer(message, nth)
    # fields of the prompt format that clients may not set
    return {name: value for name, value in message.items() if name not in ("wo_eos", "tools", "response_format")}


def _answer(message: Message, nth: int) -> Message:
    reasoning, refusal, call = (message.pop(name, None) for name in ("reasoning", "refusal", "function_call"))
    if message.get("reasoning_content") is None and reasoning is not None:
        message["reasoning_content"] = reasoning
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [_part(one) for one in content]
    elif content is None:
        message["content"] = refusal if isinstance(refusal, str) else ""
    if call is not None and not message.get("tool_calls"):
        message["tool_calls"] = [{"id": f"function_{nth}", "type": "function", "function": call}]
    return message


def _part(given: Any) -> Any:
    """Return a part of an answer's content; a refusal becomes text."""
    refused = isinstance(given, dict) and given.get("type") == "refusal"
    return {"type": "text", "text": given.get("refusal")} if refused else given


def _with_results(messages: list[Any]) -> list[Any]:
    """Return the messages with those of the role `function` as results of the latest call."""
    found, call_id = [], ""
    for one in messages:
        if isinstance(one, dict) and one.get("tool_calls") and isinstance(one["tool_calls"], list):
            last = one["tool_calls"][-1]
            call_id = str(last.get("id") or "") if isinstance(last, dict) else ""
        if isinstance(one, dict) and one.get("role") == "function":
            one = {"role": "tool", "tool_call_id": call_id, "content": one.get("content") or ""}
        found.append(one)
    return found
