"""An answer that a server streams over OpenAI's API. Does not import torch."""

from dataclasses import dataclass, field
from typing import Any

from dsv4cli.engine.chat.answer import FinishReason, Pieces
from dsv4cli.engine.chat.thinking import Closed
from dsv4cli.engine.text.prompt import Message


@dataclass
class RemoteAnswer:
    """An answer, built from the events of a stream.

    Attributes:
        sampled: number of its tokens as reported by the server; until then, the number of deltas.
        thoughts: number of deltas with reasoning.
    """

    finish: FinishReason | None = None
    sampled: int = 0
    thoughts: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    closed: Closed = ""
    complaint: str = ""
    prepared: bool = False
    _content: str = ""
    _reasoning: str = ""
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def push(self, event: dict[str, Any]) -> Pieces:
        """Add an event, and return its text by kind.

        Raises:
            TypeError, ValueError, LookupError, AttributeError: the event has another format.
        """
        pieces: Pieces = []
        for choice in (event.get("choices") or [])[:1]:
            delta = choice.get("delta") or {}
            reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
            content = delta.get("content") or ""
            self._reasoning += reasoning
            self._content += content
            called = "".join(self._call(one) for one in delta.get("tool_calls") or ())
            pieces = [("reasoning", reasoning), ("content", content), ("calls", called)]
            self.sampled += bool(reasoning or content or called)
            self.thoughts += bool(reasoning)
            finish = choice.get("finish_reason")
            if finish is not None:
                self.finish = finish if finish in ("length", "tool_calls") else "stop"
                self.sampled = max(self.sampled, 1)  # the end token counts
        self._count(event.get("usage"))
        return [(kind, text) for kind, text in pieces if text]

    def message(self) -> tuple[Message, list[str]]:
        """Return the answer as a message. Tool calls are included only if the answer is complete."""
        calls = [_sound_call(self._calls[index]) for index in sorted(self._calls)] if self.finish else []
        content, reasoning = _sound(self._content), _sound(self._reasoning)
        return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}, []

    def record(self) -> dict[str, Any]:
        """Return the JSON form, as `Answer.record` does without `ids`, and the token counts."""
        message, _ = self.message()
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.sampled}
        usage["total_tokens"] = sum(usage.values())
        del message["role"]
        return {**message, "finish_reason": self.finish, "usage": usage}

    def _call(self, delta: dict[str, Any]) -> str:
        index = int(delta.get("index") or 0)
        call = self._calls.setdefault(index, {"type": "function", "function": {"name": "", "arguments": ""}})
        if delta.get("id"):
            call["id"] = str(delta["id"])
        function = delta.get("function") or {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        call["function"]["name"] += name
        call["function"]["arguments"] += arguments
        return f"{name}{arguments}"

    def _count(self, usage: dict[str, Any] | None) -> None:
        if usage:
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self.sampled = int(usage.get("completion_tokens") or self.sampled)
            self.cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _sound(text: str) -> str:
    """Join halves of surrogate pairs that arrived separately, and replace halves without a counterpart."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _sound_call(call: dict[str, Any]) -> dict[str, Any]:
    function = {name: _sound(text) for name, text in call["function"].items()}
    return {name: function if name == "function" else _sound(text) for name, text in call.items()}
