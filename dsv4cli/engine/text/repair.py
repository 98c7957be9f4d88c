"""Repair of malformed replies, if no guess is needed. No repaired call lacks an argument."""

import json
import re

from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.call_reader import CallReader, Required, is_json
from dsv4cli.engine.text.markup import MarkupStream
from dsv4cli.engine.text.plain_text import PlainPart, PlainText
from dsv4cli.engine.text.prompt_text import CALLS_OPEN, PARAMETER_OPEN
from dsv4cli.engine.text.reply import MalformedReply, ParsedReply, ToolCall, parse_reply

_MARKUP = re.compile(rf"</?{tokens.DSML}|{tokens.DSML}")
# what the official parser accepts as a name may contain the attributes of a damaged tag
_SOUND_NAME = re.compile(rf'(?:(?!{tokens.DSML}|" \w+=")[^<>\n])+')


def repair_reply(text: str, *, thinking: bool, required: Required | None = None) -> tuple[ParsedReply, list[str]]:
    """Parse a reply strictly or, if that fails, repair it. Also return descriptions of what was repaired or left out.

    A text without EOS was cut off; a call that is still open there is left out. Content, reasoning and calls contain no
    markup, and content and reasoning no special tokens. Arguments are JSON, and include everything that the markup
    contains.

    Args:
        text: the generated text, with EOS if the model ended it.
        thinking: whether the text begins with reasoning.
        required: the required parameters of each declared function. A call without a closing tag must have them.
    """
    words: list[str] = []
    text, ended, rest = text.partition(tokens.EOS)
    if rest:
        words.append("text after the end of the reply was left out")
    for whole in (text, text + tokens.EOS) if not ended else (text + ended,):
        reply = _sound(whole, thinking)
        if reply is not None:
            return reply, words
    reasoning, content = _thoughts(text, words) if thinking else ("", text)
    content, calls = _content_and_calls(content, bool(ended), required or {}, words)
    plain = PlainPart()
    reasoning = plain.push(reasoning) + plain.flush()
    _report_removed(plain, "reasoning", words)
    return ParsedReply(content, reasoning, calls), words


def _content_and_calls(text: str, ended: bool, required: Required, words: list[str]) -> tuple[str, list[ToolCall]]:
    """Split the text after the reasoning into content and calls. If no call is complete, loose text is content too."""
    stream, plain = MarkupStream(), PlainPart()
    content = markup = ""
    for kind, part in [*stream.push(text), *stream.flush()]:
        if kind == "content":
            content += plain.push(part)
            continue
        if part.startswith("\n\n"):
            content += plain.settle()
        markup += part
    if not markup:
        content += plain.flush()
    else:
        reader = CallReader(markup, ended, required)
        content += plain.push("" if reader.calls else reader.loose) + plain.flush().rstrip()
        words += reader.words or [_fault(reader)]
    _report_removed(plain, "content", words)
    return content, reader.calls if markup else []


def _fault(reader: CallReader) -> str:
    if reader.calls:
        return "the tool calls were not well formed"
    return "markup of tool calls without a call was left out"


def _sound(text: str, thinking: bool) -> ParsedReply | None:
    """Return the reply if it is well formed and needs no repair, None otherwise."""
    try:
        reply = parse_reply(text, thinking=thinking)
    except MalformedReply:
        return None
    plain = PlainText()
    plain.push(reply.reasoning_content + reply.content)
    return reply if not plain.removed and _sound_calls(text, reply.tool_calls) else None


def _sound_calls(text: str, calls: list[ToolCall]) -> bool:
    """Return True if every tag that begins a parameter has become one.

    The official parser takes any text between two well-formed tags as a name or a value, including markup.
    """
    functions = [call["function"] for call in calls]
    if not all(is_json(one["arguments"]) and tokens.DSML not in one["arguments"] for one in functions):
        return False
    arguments = [json.loads(one["arguments"]) for one in functions]
    names = [*(one["name"] for one in functions), *(name for one in arguments for name in one)]
    parameters = text.partition(CALLS_OPEN)[2].count(PARAMETER_OPEN)
    return all(map(_SOUND_NAME.fullmatch, names)) and parameters == sum(map(len, arguments))


def _thoughts(text: str, words: list[str]) -> tuple[str, str]:
    """Return the reasoning and the text after it.

    Tool calls end the reasoning if `</think>` is missing, or if nothing follows it.
    """
    reasoning, mark, content = text.partition(tokens.THINK_END)
    found = _MARKUP.search(reasoning)
    if found is None:
        if not mark:
            words.append(f"the thinking was not finished: {tokens.THINK_END} is missing")
        return reasoning, content
    if content.strip():
        words.append("markup of tool calls inside the thinking was left out")
        return reasoning[: found.start()].rstrip(), content
    words.append(f"{tokens.THINK_END} was missing before the tool calls")
    return reasoning[: found.start()].rstrip(), reasoning[found.start() :]


def _report_removed(plain: PlainPart, name: str, words: list[str]) -> None:
    words += [f"the token {token} was left out of the {name}" for token in dict.fromkeys(plain.removed)]
