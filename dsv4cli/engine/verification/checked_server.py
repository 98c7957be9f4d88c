"""What the server offers, and the requests that checks build for it. No torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv4cli.engine.chat.remote import EFFORTS
from dsv4cli.engine.config.presets import Release
from dsv4cli.engine.text.prompt import Message, Tool, encode_messages, think_options, with_tools
from dsv4cli.engine.text.tokenizer import Tokenizer
from dsv4cli.engine.verification.calls import CHAT, COMPLETIONS, MESSAGES, RESPONSES, ApiCall
from dsv4cli.engine.verification.check import Problem

# JSON has about this many characters per token, for estimates without a tokenizer
CHARACTERS_PER_TOKEN = 4
# number of alternatives to request per token; servers allow at least five
TOP = 5


@dataclass(frozen=True)
class CheckedServer:
    """A server, and what it was found to offer.

    Attributes:
        limit: the context length that it announces, in tokens; None if it announces none.
        release: the encoder that its prompts are compared with.
        release_found: how the release was determined, for reports.
        tokenizer: the model's vocabulary on this machine; None if there is none.
        vocabulary: where the tokenizer comes from, for reports.
        logprobs: whether chat answers have log-probabilities.
        completions: whether `/v1/completions` continues raw text.
        echo: whether it scores the tokens of a prompt.
        tokenize: whether there is `/tokenize`.
        messages, responses: whether there is Anthropic's API, and OpenAI's Responses API.
        unknown: attributes that could not be found out, because the server did not answer in time, with that problem.
    """

    url: str
    model: str
    limit: int | None = None
    release: Release = "v4"
    release_found: str = "assumed"
    tokenizer: Tokenizer | None = None
    vocabulary: str = ""
    logprobs: bool = False
    completions: bool = False
    echo: bool = False
    tokenize: bool = False
    messages: bool = False
    responses: bool = False
    unknown: Mapping[str, Problem] = field(default_factory=dict)

    def chat(
        self,
        key: str,
        messages: Sequence[Message] | str,
        *,
        level: str = "off",
        tools: Sequence[Tool] = (),
        most: int = 16,
        logprobs: bool = False,
        **fields: Any,
    ) -> ApiCall:
        """Return a chat request at temperature 0.

        Args:
            messages: the conversation, or the text of its only message.
            level: the thinking level.
            most: maximum number of tokens of the answer.
            logprobs: request log-probabilities, if the server has them.
            fields: further fields of the body, which replace the others.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "temperature": 0, "max_tokens": most}
        body |= {"reasoning_effort": EFFORTS[level], "chat_template_kwargs": {"thinking": level != "off"}}
        if tools:
            body["tools"] = list(tools)
        if logprobs and self.logprobs:
            body |= {"logprobs": True, "top_logprobs": TOP}
        if fields.get("stream"):
            body["stream_options"] = {"include_usage": True}
        return ApiCall(key, CHAT, body | fields, tokens_in=self.estimate(messages, tools, level))

    def raw(self, key: str, prompt: str, most: int, **fields: Any) -> ApiCall:
        """Return a request that continues a raw text at temperature 0, with special tokens in the returned text."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": most}
        body |= {"skip_special_tokens": False, "add_special_tokens": False}
        return ApiCall(key, COMPLETIONS, body | fields, tokens_in=self._tokens(prompt))

    def message(self, key: str, text: str, most: int, **fields: Any) -> ApiCall:
        """Return a request to Anthropic's API."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": most}
        return ApiCall(key, MESSAGES, body | {"temperature": 0} | fields, tokens_in=self._tokens(text))

    def response(self, key: str, text: str, most: int, **fields: Any) -> ApiCall:
        """Return a request to OpenAI's Responses API."""
        body = {"model": self.model, "input": text, "max_output_tokens": most, "temperature": 0}
        return ApiCall(key, RESPONSES, body | fields, tokens_in=self._tokens(text))

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool], level: str) -> str:
        """Return the official encoder's prompt."""
        return "".join(prompt_parts(messages, tools, level, self.release))

    def estimate(self, messages: Sequence[Message], tools: Sequence[Tool], level: str) -> int:
        """Return the length of a prompt in tokens, estimated if there is no tokenizer."""
        if self.tokenizer is None or level == "low":
            return self._tokens(json.dumps([messages, tools], ensure_ascii=False))
        return len(self.tokenizer.encode_parts(prompt_parts(messages, tools, level, self.release))[0])

    def _tokens(self, text: str) -> int:
        return -(-len(text) // CHARACTERS_PER_TOKEN) if self.tokenizer is None else len(self.tokenizer.encode(text))

    def record(self) -> Mapping[str, Any]:
        """Return what is known of the server, for the JSON document; None for what is unknown."""
        names = ("url", "model", "limit", "release", "release_found", "vocabulary")
        offers = ("logprobs", "completions", "echo", "tokenize", "messages", "responses")
        return {name: None if name in self.unknown else getattr(self, name) for name in (*names, *offers)}


def prompt_parts(
    messages: Sequence[Message], tools: Sequence[Tool], level: str, release: Release, *, drop_thinking: bool = True
) -> list[str]:
    """Return the official encoder's prompt in parts. Text from the messages is `Given`."""
    thinking, effort = think_options(release, level)
    return encode_messages(
        with_tools(messages, tools), release=release, thinking=thinking, effort=effort, drop_thinking=drop_thinking
    )
