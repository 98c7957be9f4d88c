"""Messages as the turns of the prompt format: user texts and tool results are merged, ordered and rendered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv4cli.engine.text import prompt_text as texts
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.tokens import Given
from dsv4cli.errors import UsageError

_PRIMED_ROLES = ("assistant", "latest_reminder")  # a turn before one of these ends with the assistant prefix


@dataclass
class TurnPart:
    """A part of a user turn: a text, or the result of the tool call `call_id`."""

    text: str
    call_id: str | None

    @property
    def parts(self) -> list[str]:
        """The rendered part."""
        return [Given(self.text)] if self.call_id is None else texts.result_parts(self.text)


@dataclass
class Turn:
    """One message, or several user and tool messages that the format merges into one user turn.

    Attributes:
        written: False if the model has already processed the turn.
    """

    role: str
    message: Mapping[str, Any]
    written: bool
    blocks: list[TurnPart] = field(default_factory=list)

    @property
    def task(self) -> str | None:
        """The quick-instruction task that follows the turn, None if there is none."""
        task: str | None = self.message.get("task")
        return task


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Return a message's content as text. Parts are joined by an empty line; parts that are not text become notes."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n\n".join(part["text"] if part["type"] == "text" else f"[Unsupported {part['type']}]" for part in content)


def fold(messages: Sequence[Mapping[str, Any]], *, written: bool) -> list[Turn]:
    """Return messages as turns: consecutive user and tool messages are merged, but a user message never joins a task.

    As in the official encoder, the task of a user message that joins an earlier turn is lost.
    """
    turns: list[Turn] = []
    for message in messages:
        role = message["role"]
        if role not in ("user", "tool"):
            turns.append(Turn(role, message, written))
            continue
        joins = bool(turns) and turns[-1].role == "user" and (role == "tool" or turns[-1].task is None)
        if not joins:
            turns.append(Turn("user", message if role == "user" else {}, written))
        turns[-1].blocks.append(_block(message))
    return turns


def order_results(turns: Sequence[Turn]) -> None:
    """Sort the tool results of each user turn in the order of the latest calls. An unknown call counts as the first."""
    order: dict[str, int] = {}
    for turn in turns:
        if turn.role == "assistant" and turn.message.get("tool_calls"):
            order = {call["id"]: nth for nth, call in enumerate(turn.message["tool_calls"]) if call.get("id")}
        results = [block for block in turn.blocks if block.call_id is not None]
        ordered = iter(sorted(results, key=lambda block: order.get(block.call_id or "", 0)))
        turn.blocks = [block if block.call_id is None else next(ordered) for block in turn.blocks]


def last_question(turns: Sequence[Turn]) -> int:
    """Return the index of the last user or developer turn, -1 if there is none."""
    return max((i for i, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def without_developers(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns without developer turns before the last question, whose reasoning is dropped too."""
    last = last_question(turns)
    return [turn for i, turn in enumerate(turns) if turn.role != "developer" or i >= last]


def render(turns: Sequence[Turn], *, thinking: bool, keep: bool) -> list[str]:
    """Return the parts of the turns that the model has yet to process (`written`).

    Args:
        keep: keep the reasoning from before the last question.
    """
    last = last_question(turns)
    parts: list[str] = []
    for i, turn in enumerate(turns):
        if not turn.written:
            continue
        answers_task = i > 0 and turns[i - 1].task is not None
        parts += _body(turn, reasoning=thinking and not answers_task and (keep or i > last))
        if i + 1 == len(turns) or turns[i + 1].role in _PRIMED_ROLES:
            parts.append(_tail(turn, thinking=thinking, current=keep or i >= last))
    return parts


def _block(message: Mapping[str, Any]) -> TurnPart:
    call_id = None if message["role"] == "user" else message.get("tool_call_id", "")
    return TurnPart(text_of(message.get("content")), call_id)


def _body(turn: Turn, *, reasoning: bool) -> list[str]:
    """Return the parts of a turn.

    Args:
        reasoning: whether to include an assistant's reasoning.
    """
    match turn.role:
        case "system":
            return _instructions(turn.message)
        case "developer":
            return [tokens.USER, *_instructions(turn.message)]
        case "user":
            return [tokens.USER, *texts.joined((block.parts for block in turn.blocks), "\n\n")]
        case "latest_reminder":
            return [tokens.LATEST_REMINDER, Given(text_of(turn.message.get("content")))]
        case "assistant":
            return _answer(turn.message, reasoning)
    raise UsageError(f'no message can have the role "{turn.role}"', "use system, user, assistant or tool")


def _instructions(message: Mapping[str, Any]) -> list[str]:
    parts: list[str] = [Given(text_of(message.get("content")))]
    if message.get("tools"):
        parts += texts.tools_parts(message["tools"])
    if message.get("response_format"):
        parts += texts.format_parts(message["response_format"])
    return parts


def _answer(message: Mapping[str, Any], reasoning: bool) -> list[str]:
    # the previous turn ended with <think>
    thought = [Given(message.get("reasoning_content") or ""), tokens.THINK_END] if reasoning else []
    calls = texts.calls_parts(message["tool_calls"]) if message.get("tool_calls") else []
    return [*thought, Given(text_of(message.get("content"))), *calls, "" if message.get("wo_eos") else tokens.EOS]


def _tail(turn: Turn, *, thinking: bool, current: bool) -> str:
    """Return the text that requests the next answer: a task's token or the assistant prefix.

    Args:
        current: whether that answer may reason.
    """
    if turn.task == "action":
        return tokens.ASSISTANT + (tokens.THINK_START if thinking else tokens.THINK_END) + tokens.TASKS["action"]
    if turn.task is not None:
        if turn.task not in tokens.TASKS:
            raise UsageError(f'unknown task "{turn.task}"', f"use one of {', '.join(tokens.TASKS)}")
        return tokens.TASKS[turn.task]
    if turn.role in ("user", "developer"):
        return tokens.ASSISTANT + (tokens.THINK_START if thinking and current else tokens.THINK_END)
    return ""
