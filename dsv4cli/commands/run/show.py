"""Printing of the answers of `dsv4 run`, streamed or complete."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from dsv4cli.commands.job import Job
from dsv4cli.commands.reading import Reading
from dsv4cli.output import Output, counted

if TYPE_CHECKING:
    from dsv4cli.engine.chat.answer import Answer, Pieces
    from dsv4cli.engine.chat.answer_file import AnswerKey
    from dsv4cli.engine.chat.remote_answer import RemoteAnswer
    from dsv4cli.engine.runtime.request import Request

AnyAnswer = TypeVar("AnyAnswer", "Answer", "RemoteAnswer")
# request number, its answer so far, and the text added by this step
Steps = Iterator["tuple[int, Answer, Pieces]"]


def show_answer(out: Output, answer: "Answer | RemoteAnswer") -> None:
    """Print a finished answer."""
    record = answer.record()
    out.reasoning(record["reasoning_content"])
    out.end_line()
    out.stream(record["content"])
    out.end_line()
    show_calls(out, record["tool_calls"])
    if answer.complaint:
        out.warning(answer.complaint)


def show_calls(out: Output, calls: Sequence[dict[str, Any]]) -> None:
    """Print tool calls, one per line."""
    for call in calls:
        out.line(f"{call['function']['name']}({call['function']['arguments']})")


def show_reading(out: Output, requests: "Sequence[Request]", steps: Steps) -> Steps:
    """Yield the same steps. Until the first token, a terminal shows the progress of long prefills."""
    total, answered, reading = sum(len(one.prompt) for one in requests), False, Reading(out)
    try:
        reading.show(0, total)
        for step in steps:
            answered = answered or bool(step[1].tokens)
            reading.show(total if answered else sum(one.done for one in requests), total)
            yield step
    finally:
        reading.show(total, total)


def stream_answer(out: Output, steps: "Iterator[tuple[int, AnyAnswer, Pieces]]") -> "AnyAnswer":
    """Print the text as it is generated, then the tool calls. Returns the answer.

    An error ends the open line. After Ctrl-C the caller at the boundary does so.
    """
    answer, calls = None, ""
    try:
        for _, answer, pieces in steps:  # noqa: B007 - the last value is used
            for kind, text in pieces:
                if kind == "content":
                    out.stream(text)
                elif kind == "reasoning":
                    out.reasoning(text)
                else:
                    calls += text
        assert answer is not None
        tool_calls = answer.record()["tool_calls"]
        if not tool_calls:
            out.stream(calls)  # cut off or malformed: print it as generated
    except KeyboardInterrupt:
        raise
    except BaseException:
        out.end_line()
        raise
    out.end_line()
    show_calls(out, tool_calls)
    return answer


def limit_met(job: Job, answer: "Answer") -> str:
    """Return where an answer was cut off, and what would make it longer."""
    from dsv4cli.engine.runtime.limits import context_of

    config, limits = job.dialogue.config, job.limits
    if len(answer.tokens) >= limits.max_tokens:
        return f"after {counted(limits.max_tokens, 'token')}; raise --max-tokens"
    if context_of(config, limits) < config.max_position_embeddings:
        return f"at {limits.max_context:,} tokens with its prompt; raise --max-context"
    return "at the end of the model's context; shorten the prompt"


@dataclass
class InOrder:
    """Prints records in the order of their keys, each as soon as those before it were printed."""

    out: Output
    keys: "Sequence[AnswerKey]"
    waiting: "dict[AnswerKey, dict[str, Any] | None]" = field(default_factory=dict)
    shown: int = 0

    def add(self, key: "AnswerKey", record: dict[str, Any] | None) -> None:
        """Add a record, None if there will be none, and print every record that is next in order."""
        self.waiting[key] = record
        while self.shown < len(self.keys) and self.keys[self.shown] in self.waiting:
            self._print(self.keys[self.shown])
            self.shown += 1

    def rest(self) -> None:
        """Print the records that still wait for earlier ones, in order."""
        for key in sorted(self.waiting):
            self._print(key)

    def _print(self, key: "AnswerKey") -> None:
        record = self.waiting.pop(key)
        if record is not None:
            self.out.record(record)
