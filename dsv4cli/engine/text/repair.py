"""Replies that the strict parser refuses, read as well as they can be: nothing is invented, and no call half done."""

import re

from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.plain_text import PlainText
from dsv4cli.engine.text.prompt_text import from_json, to_json
from dsv4cli.engine.text.reply import MalformedReply, ParsedReply, ToolCall, parse_reply

_MARKUP = re.compile(rf"</?{tokens.DSML}|{tokens.DSML}")
_TAG = re.compile(rf"<?(/?){tokens.DSML} ?(tool_calls|invoke|parameter)\b([^<>]*)>?")
_CALLS_BEGIN = f"\n\n<{tokens.DSML}"
_NAME = re.compile(rf'name="((?:(?!{tokens.DSML})[^"])*)"')
_SOUND_NAME = re.compile(rf"(?:(?!{tokens.DSML})[^<>\n])+")
_TYPE = re.compile(r'string="(true|false)"')


def repair_reply(text: str, *, thinking: bool) -> tuple[ParsedReply, list[str]]:
    """A reply as the strict parser reads it, or else as well as can be, and what was repaired, in words.

    A text without EOS was cut off: a call that is still open there is left out. Content and reasoning have no special
    tokens and no markup, repaired calls no markup. Arguments are JSON.
    """
    ended = tokens.EOS in text
    for whole in (text, text + tokens.EOS):
        reply = _sound(whole, thinking)
        if reply is not None:
            return reply, []
    words: list[str] = []
    text, _, rest = text.partition(tokens.EOS)
    if rest:
        words.append("text after the end of the reply was left out")
    reasoning, content = _thoughts(text, words) if thinking else ("", text)
    markup = _MARKUP.search(content)
    calls: list[ToolCall] = []
    if markup:
        block = content[markup.start() :]
        content = content[: markup.start()]
        # no text ends with the empty line before its calls
        content = content[:-2] if f"{content[-2:]}{block}".startswith(_CALLS_BEGIN) else content.rstrip()
        calls = _Calls(block, ended, words).read()
    return ParsedReply(_plain(content, "content", words), _plain(reasoning, "reasoning", words), calls), words


def _sound(text: str, thinking: bool) -> ParsedReply | None:
    """The reply, if it is well formed and nothing in it needs repair."""
    try:
        reply = parse_reply(text, thinking=thinking)
    except MalformedReply:
        return None
    plain = PlainText()
    plain.push(reply.reasoning_content + reply.content)
    functions = [call["function"] for call in reply.tool_calls]
    # the official parser takes all for a name that stands before the next parameter
    sound = all(is_json(one["arguments"]) and _SOUND_NAME.fullmatch(one["name"]) for one in functions)
    return reply if sound and not plain.removed else None


def _thoughts(text: str, words: list[str]) -> tuple[str, str]:
    """Reasoning, and what follows it. Tool calls end it where no `</think>` does, or one with nothing behind it."""
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


def _plain(text: str, name: str, words: list[str]) -> str:
    """The text without special tokens."""
    plain = PlainText()
    text = plain.push(text) + plain.flush()
    words += [f"the token {token} was left out of the {name}" for token in dict.fromkeys(plain.removed)]
    return text


class _Calls:
    """Reads a block of calls tag by tag; `words` gets what is repaired."""

    def __init__(self, block: str, ended: bool, words: list[str]) -> None:
        self._block = block
        self._ended = ended
        self._words = words
        self._calls: list[ToolCall] = []
        self._name: str | None = None
        self._arguments: dict[str, str] = {}
        self._open: tuple[str, str | None, int] | None = None  # a parameter's name, its type, where its value begins

    def read(self) -> list[ToolCall]:
        """The calls; one that was cut off is left out, one that lacks closing tags only is taken."""
        before = len(self._words)
        for tag in _TAG.finditer(self._block):
            closing, kind, attributes = tag[1] == "/", tag[2], tag[3]
            if kind == "parameter" and closing:
                self._close_parameter(tag.start())
                continue
            if self._open is not None:
                self._words.append(f"the parameter {self._open[0]} was not closed")
                self._close_parameter(tag.start())
            if kind == "parameter":
                self._open_parameter(attributes, tag.end())
            else:
                self._close_call(whole=closing and kind == "invoke")
                if kind == "invoke" and not closing:
                    self._open_call(attributes)
        self._end()
        if not self._calls and before == len(self._words):
            self._words.append("markup of tool calls without a call was left out")
        elif before == len(self._words):
            self._words.append("the tool calls were not well formed")
        return self._calls

    def _end(self) -> None:
        if self._name is None:
            return
        if self._open is not None or not self._ended or not self._arguments:
            self._words.append(f"the call of {self._name} was cut off and is left out")
        else:
            self._close_call(whole=False)

    def _open_call(self, attributes: str) -> None:
        name = _NAME.search(attributes)
        if name is None or not name[1]:
            self._words.append("a tool call without a name was left out")
        else:
            self._name, self._arguments = name[1], {}

    def _close_call(self, whole: bool) -> None:
        if self._name is None:
            return
        if not whole:
            self._words.append(f"the call of {self._name} was not closed")
        text = ", ".join(f"{to_json(key)}: {value}" for key, value in self._arguments.items())
        self._calls.append({"type": "function", "function": {"name": self._name, "arguments": f"{{{text}}}"}})
        self._name = None

    def _open_parameter(self, attributes: str, start: int) -> None:
        name, kind = _NAME.search(attributes), _TYPE.search(attributes)
        if name is None:
            self._words.append("a parameter without a name was left out")
        else:
            self._open = name[1], None if kind is None else kind[1], start

    def _close_parameter(self, end: int) -> None:
        if self._open is None:
            return
        (key, kind, start), self._open = self._open, None
        if self._name is None:
            return
        if key in self._arguments:
            self._words.append(f"the call of {self._name} had the parameter {key} twice: the first is kept")
            return
        value = self._value(key, self._block[start:end])
        if kind is None:
            self._words.append(f"the parameter {key} did not say whether it is text")
        self._arguments[key] = value if kind != "true" and is_json(value) else to_json(value)

    def _value(self, key: str, text: str) -> str:
        """The text up to markup that is no tag."""
        markup = _MARKUP.search(text)
        if markup is None:
            return text
        self._words.append(f"markup inside the parameter {key} and what follows it were left out")
        return text[: markup.start()]


def is_json(text: str) -> bool:
    """Whether a text is JSON, as every reader takes it."""
    try:
        from_json(text)
    except (ValueError, RecursionError):
        return False
    return True
