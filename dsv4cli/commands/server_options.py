"""Options of `dsv4 run` and `eval` for answers of a server, and the connection to it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from dsv4cli.errors import UsageError
from dsv4cli.options import ModelOptions, is_given
from dsv4cli.output import Output

if TYPE_CHECKING:
    from dsv4cli.engine.chat.api_client import ApiClient
    from dsv4cli.engine.chat.remote import RemoteConversation, RemoteSampling

AnswerUrlOpt = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Use a server with an OpenAI-compatible API, such as dsv4 serve, instead of loading a model. "
        "--model selects one of the server's models.",
    ),
]
AnswerKeyOpt = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="FILE", help="File with the API key for --url on its first line."),
]
AnswerConcurrencyOpt = Annotated[
    int, typer.Option("--concurrency", min=1, max=1024, help="With --url: maximum number of concurrent requests.")
]
# requests at a time: enough to fill a batch of a server on one GPU, few enough for a provider's rate limit
CONCURRENCY = 8


class ServerChoice(NamedTuple):
    """The server to ask: its URL, the file with the key, and how many requests at a time."""

    url: str | None
    key_file: Path | None
    concurrency: int


class OpenServer(NamedTuple):
    """A server that has listed its models, with one of them selected."""

    conversation: "RemoteConversation"
    sampling: "RemoteSampling"
    key: str

    @property
    def url(self) -> str:
        """The server's URL."""
        return self.conversation.client.url

    def connect(self) -> "ApiClient":
        """Return another client of the server."""
        from dsv4cli.engine.chat.api_client import ApiClient

        return ApiClient(self.url, self.key)


def check_server(context: typer.Context, choice: ServerChoice, refused: tuple[str, ...] = ()) -> bool:
    """Return whether a server is asked. Raises UsageError for options that do not fit.

    Args:
        refused: names of further parameters that work only with a model that this process loads.
    """
    from dsv4cli.commands.chat.remote import check_no_key, check_options

    if choice.url is not None:
        check_options(context, refused)
        return True
    check_no_key(choice.key_file)
    if is_given(context, "concurrency"):
        raise UsageError("--concurrency needs --url", "add the server's URL, for example --url http://localhost:8000")
    return False


def open_server(context: typer.Context, out: Output, choice: ServerChoice, options: ModelOptions) -> OpenServer:
    """Request the server's models and select one. Raises UsageError, and ServerError."""
    from dsv4cli.commands.chat.remote import OnCommandLine, ServerModels, read_key

    assert choice.url is not None
    key = read_key(choice.key_file)
    models = ServerModels(out, choice.url, key, options, OnCommandLine(is_given(context, "model"), True))
    return OpenServer(models.open(), models.sampling, key)
