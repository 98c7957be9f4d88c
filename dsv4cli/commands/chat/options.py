"""Options of `dsv4 chat`."""

from pathlib import Path
from typing import Annotated

import typer

QuestionArg = Annotated[
    str | None,
    typer.Argument(
        metavar="QUESTION",
        help="First question. On a terminal, the conversation continues after the answer; otherwise the command exits.",
    ),
]
UrlOpt = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Chat with a server that speaks the OpenAI API, such as dsv4 serve, instead of loading a model.",
    ),
]
ApiKeyFileOpt = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File with the API key for --url on its first line.")
]
ContinueOpt = Annotated[bool, typer.Option("--continue", "-c", help="Continue the last session.")]
ResumeOpt = Annotated[
    str | None,
    typer.Option("--resume", "-r", metavar="WHICH", help="Continue a session from --sessions, by number or name."),
]
SessionsOpt = Annotated[bool, typer.Option("--sessions", help="List the sessions, newest first, and exit.")]
SessionOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json", help="Continue the conversation in this file, if it exists, and save the session to it."
    ),
]
ThinkBudgetOpt = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of thinking tokens; after that, the model must answer. By default, only "
        "--max-tokens and --max-context limit the reasoning."
    ),
]
ToolsOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help="Tools that the model can call, in the OpenAI API format. Without --tool-exec, you type the results.",
    ),
]
ToolExecOpt = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        help="Program that runs tool calls. It reads {name, arguments} as JSON from stdin and prints text or JSON.",
    ),
]
ToolTimeoutOpt = Annotated[float, typer.Option(help="Timeout of a tool call in seconds.")]
YesOpt = Annotated[bool, typer.Option("--yes", help="Run --tool-exec without asking.")]
MaxRoundsOpt = Annotated[
    int,
    typer.Option(
        min=1,
        help="Maximum rounds of tool calls per turn that --yes runs without asking. After that, chat asks for "
        "confirmation; without a terminal, the answer ends.",
    ),
]
ShowThinkingOpt = Annotated[
    bool, typer.Option("--show-thinking", help="Stream the reasoning instead of showing it in one line.")
]
NoMarkdownOpt = Annotated[
    bool, typer.Option("--no-markdown", help="Print answers as the model writes them, without rendering Markdown.")
]
NoHistoryOpt = Annotated[bool, typer.Option("--no-history", help="Do not keep a history of inputs.")]
ChatTpOpt = Annotated[
    int | None,
    typer.Option("--tp", min=1, help="Number of tensor-parallel ranks on this machine (one process and one GPU each)."),
]
