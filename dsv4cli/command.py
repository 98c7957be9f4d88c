"""Conventions of all commands: how to name a model, alternative option spellings, and the layout of help pages."""

import copy
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import typer
import typer.core

from dsv4cli.help_page import HelpPage
from dsv4cli.model_names import complete_model

# options of one meaning: where a command has one of a pair, it accepts the other too, which help does not list
SPELLINGS = (("--prefill-chunk", "--chunk"), ("--max-context", "--context"), ("--max-workers", "--workers"))
OTHER_SPELLING = {name: other for pair in SPELLINGS for name, other in (pair, pair[::-1])}
# positional arguments that name the model to work on
MODEL_ARGUMENTS = ("model", "source")
# the most options that a help page has in one list; more are listed by panel
MOST_IN_A_LIST = 13
# panels in the order of a help page; an option may name another one as its rich_help_panel
OTHER_SIDE, OTHER = "Other side", "Other"
PANELS = {
    "Model": "model layers no-mtp revision release tokenizer",
    "Input": "file messages prompts score system special-tokens skip-bad prompt ids like steps limit choices",
    "Session": "continue resume sessions session no-history",
    "Tools": "tools tool-exec tool-timeout yes max-rounds",
    "Server": "url api-key-file host port uds alias max-queue grace health-timeout reasoning-field no-store",
    "Other engine": "engine engine-python nodes node-rank head print ready-timeout no-verify",
    "Access": "share-cache allow-host allow-origin root-path",
    "Layout": "to ranks experts attention max-shard-size",
    "Questions": "values tensor layer tree template for fit diff quick long only",
    OTHER_SIDE: "",
    "Sampling": "think think-budget max-tokens temperature top-p top-k min-p presence-penalty frequency-penalty "
    "repetition-penalty seed samples stop",
    "Speed": "draft prefill-chunk device dtype exact backend tp step-ms max-workers shard finish concurrency timeout",
    "Memory": "max-context gpu-memory host-memory cache-memory gpus ram batch",
    "Comparison": "verify check record against",
    "Output": "out keep what stages plot report junit no-noise dry-run show-prompt logprobs show-thinking no-markdown "
    "log-json log-prompts json quiet help",
    OTHER: "",
}
PANEL_OF = {f"--{name}": panel for panel, names in PANELS.items() for name in names.split()}

# Typer's UsageError, which it does not export
WRONG_ARGUMENT: type[Exception] = typer.BadParameter.__bases__[0]
# positional arguments that are text, which a shell cuts into words unless it is quoted
TEXTS = ("PROMPT", "QUESTION")

Function = TypeVar("Function", bound=Callable[..., None])
# help text of an option or an argument: the left and the right column
Row = tuple[str, str]


class Command(typer.core.TyperCommand):
    """A command that accepts -m/--model for a positional model, and both spellings of an option."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        prefix = self.context_settings.get("auto_envvar_prefix")
        for param in self.params if prefix else ():
            param.envvar = f"{prefix}_{(param.name or '').upper()}"  # explicit, so that errors name it
        named = [one for one in self.params if one.param_type_name == "argument" and one.name in MODEL_ARGUMENTS]
        self.params[:0] = [_model_option(one.human_readable_name) for one in named]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; the value of -m becomes the first positional one."""
        parsed, _, _ = self.make_parser(ctx).parse_args(args=[*args])
        named = parsed.get("named_model")
        try:
            return super().parse_args(ctx, args if named is None else [named, *args])
        except WRONG_ARGUMENT as error:
            if "extra argument" in error.message:  # type: ignore[attr-defined]
                error.message += self._too_many(ctx.command_path, named)  # type: ignore[attr-defined]
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line. A required argument has no braces, which would mean a choice."""
        pieces = super().collect_usage_pieces(ctx)
        return [one[1:-1] if one.startswith("{") and one.endswith("}") else one for one in pieces]

    def _too_many(self, command: str, named: str | None) -> str:
        """Return what to do about too many positional arguments; '' if nothing is known."""
        if named is not None:
            return ". Name the model once: with --model, or without."
        if any(one.param_type_name == "argument" and one.metavar in TEXTS for one in self.params):
            return f'. Put a text with spaces in quotes: {command} "What is 17 + 25?"'
        return ""

    def make_parser(self, ctx: Any) -> Any:
        """Make the parser, which also knows the other spelling of each option."""
        parser = super().make_parser(ctx)
        for param in self.params:
            others = [OTHER_SPELLING[name] for name in param.opts if name in OTHER_SPELLING]
            if others:
                hidden = copy.copy(param)
                hidden.opts = others
                hidden.add_to_parser(parser, ctx)
        return parser

    def get_help(self, ctx: Any) -> str:
        """Return the help page."""
        return _help(self, ctx)


class CommandGroup(typer.core.TyperGroup):
    """A group of commands; its help lists each with one sentence."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Without any, show the help page on stderr and exit."""
        if not args and not ctx.resilient_parsing:
            typer.echo(self.get_help(ctx), err=True)
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        """Return the help page."""
        return _help(self, ctx)


class Application(typer.Typer):
    """A Typer application that uses these command classes and plain-text help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": CommandGroup, "rich_markup_mode": None} | options)

    def command(self, *arguments: Any, **options: Any) -> Callable[[Function], Function]:
        """Return a decorator that registers a command."""
        return super().command(*arguments, cls=Command, **options)


def _model_option(argument: str) -> typer.core.TyperOption:
    """Return the option that is another way to give the positional model."""
    return typer.core.TyperOption(
        param_decls=["named_model", "-m", "--model"],
        type=str,
        metavar="MODEL",
        help=f"Same as {argument}.",
        autocompletion=complete_model,
        expose_value=False,
        allow_from_autoenv=False,
    )


def _help(command: Command | CommandGroup, context: Any) -> str:
    page = HelpPage(shutil.get_terminal_size().columns)
    page.usage(context.command_path, command.collect_usage_pieces(context))
    page.text(command.help or "")
    shown = [(one, row) for one in command.get_params(context) if (row := _row(one, context))]
    page.section("Arguments", [row for one, row in shown if one.param_type_name == "argument"])
    for title, rows in _panels([(one, row) for one, row in shown if one.param_type_name == "option"]):
        page.section(title, rows)
    if isinstance(command, CommandGroup):
        page.section("Commands", _listed(command))
    page.text(command.epilog or "")
    return str(page)


def _row(param: Any, context: Any) -> Row | None:
    """Return the help text of an option or an argument, without its environment variable: the page says the rule."""
    shown = copy.copy(param)
    shown.show_envvar = False
    row: Row | None = shown.get_help_record(context)
    return row


def _panels(options: Sequence[tuple[Any, Row]]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the title and the rows of each list of options."""
    if len(options) <= MOST_IN_A_LIST:
        yield "Options", [row for _, row in options]
        return
    place = {name: number for number, name in enumerate(PANEL_OF)}
    named = [(next(name for name in one.opts if name.startswith("--")), one, row) for one, row in options]
    named.sort(key=lambda option: place.get(option[0], len(place)))
    for panel in PANELS:
        yield panel, [row for name, one, row in named if panel == (one.rich_help_panel or PANEL_OF.get(name, OTHER))]


def _listed(group: CommandGroup) -> list[Row]:
    """Return the commands of a group, each with the first sentence of its help."""
    # the limit is of characters: no first sentence is that long
    return [(name, one.get_short_help_str(limit=1000)) for name, one in group.commands.items() if not one.hidden]
