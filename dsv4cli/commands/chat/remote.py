"""`dsv4 chat --url`: use the models of a running server instead of loading one."""

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import typer

from dsv4cli.commands.chat.turn import Chat
from dsv4cli.errors import ServerError, UsageError
from dsv4cli.options import ModelOptions, is_given
from dsv4cli.output import Output

if TYPE_CHECKING:
    from dsv4cli.engine.chat.remote import RemoteConversation

# options of a model that is loaded in this process
LOCAL = frozenset(
    {"special_tokens", "draft", "prefill_chunk", "max_context", "device", "dtype", "exact", "backend"}
    | {"gpu_memory", "host_memory", "tp"}
)


class OnCommandLine(NamedTuple):
    """Whether the model and the URL were given on the command line, rather than saved with the session."""

    model: bool
    url: bool


class ServerModels:
    """The models of a server, with one selected. Counterpart of `Models`, which loads models on this machine."""

    def __init__(self, out: Output, url: str, key: str, options: ModelOptions, given: OnCommandLine) -> None:
        """Raise UsageError if the URL, a limit or a sampling value is invalid."""
        from dsv4cli.engine.chat.api_client import ApiClient
        from dsv4cli.engine.chat.remote import RemoteSampling
        from dsv4cli.engine.settings import Limits

        self._out, self._options, self._given = out, options, given
        self._client = ApiClient(url, key)
        self._limits = Limits(options.max_tokens, stops=tuple(options.stop or ()))
        self.name = options.model
        self.sampling = RemoteSampling().chosen(options.temperature, options.top_p, options.seed, vars(options))

    def __enter__(self) -> "ServerModels":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    @property
    def url(self) -> str:
        """The server's URL."""
        return self._client.url

    def open(self) -> "RemoteConversation":
        """Return a conversation with the model. Raises ServerError, and UsageError if the server lacks the model."""
        from dsv4cli.engine.chat.remote import RemoteConversation

        try:
            conversation = RemoteConversation(
                self._client, self.name, self._options.think, self._limits, self._out.warning
            )
        except ServerError as error:
            if not self._given.url:
                error.remedy += "; to continue with a local model, use --model NAME"
            raise
        self._conversation = conversation
        if self._given.model:
            self._check(self.name)
        self.name, context = conversation.model, conversation.context
        size = "" if context is None else f", a context of {context:,} tokens"
        self._out.status(f"{self.url}: {self.name}{size}")
        return conversation

    def change(self, chat: Chat, name: str) -> None:
        """Switch to another model of the server. Raises UsageError if the server does not have it."""
        self._check(name)
        self._conversation.model = self.name = name
        chat.window.left_out = 0
        chat.choose(replace(chat.session.choices, model=name))

    def _check(self, name: str) -> None:
        names = self._conversation.names
        if name not in names:
            raise UsageError(f"{self.url} has no model {name!r}", f"use one of {', '.join(names)}")


def check_options(context: typer.Context, more: tuple[str, ...] = ()) -> None:
    """Raise UsageError for options of loading and computing a model: with --url, they are set on the server.

    Args:
        more: names of further parameters that a server does not support.
    """
    for parameter in context.command.params:
        name = parameter.name or ""
        if not is_given(context, name):
            continue
        if name in LOCAL:
            raise UsageError(f"{parameter.opts[0]} cannot be combined with --url", "set it on the server")
        if name in more:
            raise UsageError(f"{parameter.opts[0]} cannot be combined with --url", "use a model on this machine")


def check_no_key(file: Path | None) -> None:
    """Raise UsageError if an API key file is given without --url."""
    if file is not None:
        raise UsageError("--api-key-file needs --url", "add the server's URL, for example --url http://localhost:8000")


def read_key(file: Path | None) -> str:
    """Return the API key on the first line of a file; empty without a file. Raises UsageError."""
    from dsv4cli.engine.text.inputs import read_text

    if file is None:
        return ""
    key = "".join(read_text(file).splitlines()[:1]).strip()
    if not key or not key.isascii() or not key.isprintable():
        raise UsageError(f"{file} has no API key on its first line", "put only the key in the file")
    return key
