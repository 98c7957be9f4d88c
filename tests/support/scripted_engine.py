"""A server whose model says what a script wants, behind the real server code: for other people's clients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from dsv4cli.engine.chat.dialogue import Dialogue, open_dialogue
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.runtime.request import Request, Result, Token
from dsv4cli.engine.runtime.usage import Usage
from dsv4cli.engine.settings import Limits
from tests.support.serving import Served, serving

# what the model says to a prompt; the end token follows
Script = Callable[[str], str]


class ScriptedEngine:
    """Stands in for an engine. It keeps every prompt and its answer, as a prefix cache without a limit does.

    most: the most tokens of a step; how many there are is drawn. prompts: the text of each prompt.
    """

    followers = max_request_tokens = unpinned = None
    preparing = False

    def __init__(self, dialogue: Dialogue, script: Script, most: int = 4) -> None:
        self._tokenizer, self._script, self._most = dialogue.tokenizer, script, most
        self._draw = Random(0)
        self._waiting: dict[Request, list[int]] = {}
        self._seen: list[list[int]] = []
        self.prompts: list[str] = []
        self.usage = Usage()
        self.runner = SimpleNamespace(cache=SimpleNamespace(device=torch.device("cpu")))

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def prepare(self) -> bool:
        return False

    def draft_report(self) -> None:
        return None

    def add(self, request: Request) -> None:
        request.cached = max((_common(request.prompt, one) for one in self._seen), default=0)
        prompt = self._tokenizer.decode(request.prompt)
        self.prompts.append(prompt)
        self._waiting[request] = self._tokenizer.encode(self._script(prompt))

    def cancel(self, request: Request) -> None:
        if self._waiting.pop(request, None) is not None:
            self._seen.append(list(request.ids))

    def step(self) -> list[Result]:
        return [Result(request, self._tokens(request)) for request in list(self._waiting)]

    def _tokens(self, request: Request) -> list[Token]:
        left = self._waiting[request]
        most = request.limits.max_tokens - (len(request.ids) - len(request.prompt))
        given = [Token(id, -0.5, [], None) for id in left[: min(self._draw.randint(1, self._most), most)]]
        del left[: len(given)]
        if len(given) == most:
            given[-1] = replace(given[-1], finish="length")
        elif not left:
            given.append(Token(self._tokenizer.eos_id, -0.5, [], "stop"))
        request.ids += [token.id for token in given]
        if given[-1].finish:
            self._seen.append(list(request.ids))
            del self._waiting[request]
        return given


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with; the last of a prompt is never found, as in the prefix cache."""
    same = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(other))
    return min(same, len(one) - 1)


@contextmanager
def scripted(script: Script, *, context: int = 1 << 17, think: str = "off", **offered: Any) -> Iterator[Served]:
    """A server that answers as the script says; `engine` of it has the prompts."""
    dialogue = open_dialogue(resolve_model("nano"), think)
    dialogue = replace(dialogue, config=replace(dialogue.config, max_position_embeddings=context))
    offered.setdefault("own_limits", Limits(max_tokens=4096))
    with serving(dialogue, ScriptedEngine(dialogue, script), "nano", think=think, **offered) as one:
        yield one
