"""`dsv4 inspect`: show what a model is, whether it loads and how large it is, and answer questions set by options."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from dsv4cli.commands.hidden_folder import note_hidden_folder
from dsv4cli.commands.inspect.consumers import show_verdict
from dsv4cli.commands.inspect.diff import show_diff
from dsv4cli.commands.inspect.fit import show_fit
from dsv4cli.commands.inspect.options import (
    FIT_CONTEXT,
    BatchOpt,
    ContextOpt,
    DiffOpt,
    FitOpt,
    ForOpt,
    GpusOpt,
    InspectedArg,
    LayerOpt,
    RamOpt,
    TemplateOpt,
    TensorOpt,
    TreeOpt,
    ValuesOpt,
)
from dsv4cli.commands.inspect.report import show_problem, show_report
from dsv4cli.commands.inspect.template import show_template
from dsv4cli.commands.inspect.tensor import show_layer, show_tensor, show_tree
from dsv4cli.commands.inspect.values import show_values
from dsv4cli.commands.inspect.variants import show_variants
from dsv4cli.errors import UsageError
from dsv4cli.harmless import shell_word
from dsv4cli.options import JsonOpt, QuietOpt
from dsv4cli.output import Output

if TYPE_CHECKING:
    from dsv4cli.engine.checkpoint.identify import Identity
    from dsv4cli.engine.inspection.checks.survey import Depth
    from dsv4cli.engine.inspection.consumers.judge import Consumer
    from dsv4cli.engine.inspection.report import Inspection
    from dsv4cli.engine.inspection.sources import Inspectable

INSPECT_EXAMPLES = (
    "dsv4 inspect ~/models/DeepSeek-V4-Flash",
    "dsv4 inspect flash --json",
    "dsv4 inspect flash --values full",
    "dsv4 inspect nvidia/DeepSeek-V4-Flash-NVFP4 --for vllm",
    "dsv4 inspect pro --for sglang --gpus 2x8xH200",
    "dsv4 inspect unsloth/DeepSeek-V4-Flash-GGUF",
    "dsv4 inspect random:pro --fit --gpus 8x141GB --max-context 100000",
    "dsv4 inspect OUT --diff flash",
    "dsv4 inspect flash --tensor layers.3.attn.wq_a",
    "dsv4 inspect flash --template > chat_template.jinja",
)


# questions that a model can answer even if dsv4 cannot load it
_ANY_LAYOUT = {"diff", "template"}
# prints an answer, stores its document and returns whether it is yes
_Question = Callable[["_Section", "Inspection"], bool]


class _Section(Output):
    """An Output whose document becomes a section of another document."""

    value: Mapping[str, Any] | None = None

    def document(self, value: Mapping[str, Any]) -> None:
        """Keep the document."""
        self.value = value


def inspect(
    context: typer.Context,
    model: InspectedArg,
    values: ValuesOpt = None,
    tensor: TensorOpt = None,
    layer: LayerOpt = None,
    tree: TreeOpt = False,
    consumer: ForOpt = None,
    fit: FitOpt = False,
    gpus: GpusOpt = None,
    ram: RamOpt = None,
    tokens: ContextOpt = None,
    batch: BatchOpt = None,
    diff: DiffOpt = None,
    template: TemplateOpt = False,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Show what a model is, whether it would load, and how large it is.

    The command reads the configuration and the headers of the weight files, and the weights only if an option needs
    them, so it takes seconds even for 865 GB. The exit code is 3 if the checkpoint is damaged, if dsv4 cannot run it (a
    layout that only `dsv4 convert` reads is still described), if --for, --fit or --diff answers no, or if --values
    finds an error. Without --values, a model with wrong weights can pass.

    For a repository with several GGUF models, the command lists them with their sizes and the memory that each needs.
    """
    from dsv4cli.engine.inspection.sources import resolve_inspectable

    if not fit:
        unused = None if consumer in ("vllm", "sglang") else gpus
        _check_unasked({"--gpus": unused, "--ram": ram, "--max-context": tokens, "--batch": batch})
    out = Output(context.obj.colours, as_json, quiet)
    source = resolve_inspectable(model, out.status)
    note_hidden_folder(out, model)
    questions: dict[str, _Question | None] = {
        "verdict": partial(_ask_for, consumer=consumer, gpus=gpus) if consumer else None,
        "fit": partial(_ask_fit, gpus=gpus, ram=ram, context=tokens or FIT_CONTEXT, batch=batch or 1) if fit else None,
        "diff": partial(_ask_diff, other=diff, layer=layer, tensor=tensor) if diff is not None else None,
        "tensor": partial(_ask_tensor, name=tensor) if tensor is not None and diff is None else None,
        "layer": partial(_ask_layer, name=layer) if layer is not None and diff is None else None,
        "tree": _ask_tree if tree else None,
        "template": _ask_template if template else None,
        "values": partial(_ask_values, depth=values) if values else None,
    }
    _answer(out, source, {name: question for name, question in questions.items() if question})


def _answer(out: Output, source: "Inspectable", asked: Mapping[str, _Question]) -> None:
    """Inspect the model and print the report and the answers, or the GGUF models to choose from."""
    from dsv4cli.engine.inspection.report import document, inspect_model
    from dsv4cli.engine.inspection.sources import RemoteSource

    if isinstance(source, RemoteSource):
        if not asked and source.is_choice:
            show_variants(out, source)
            return
        out.status(f"reading the headers of {source.repository} over the network")
    result = inspect_model(source)
    answer, sections = _ask(out, result, asked)
    out.document(document(result, sections))
    if not answer:
        raise typer.Exit(3)


def _ask(out: Output, result: "Inspection", asked: Mapping[str, _Question]) -> tuple[bool, dict[str, Any]]:
    """Print the report and answer the questions of the options in order.

    Returns whether every answer is yes, and each question's section of the JSON document.
    """
    began = _begin(out, result, asked.keys())
    # another program's verdict replaces dsv4's
    answer = result.problem is None or "verdict" in asked or (bool(_ANY_LAYOUT & {*asked}) and not _is_unknown(result))
    sections: dict[str, Any] = {}
    for name, question in asked.items():
        if name != "verdict" and _is_unknown(result):
            continue
        if began:
            out.line()
        began, part = True, _Section(out.colours, out.as_json, out.silent)
        answer = question(part, result) and answer
        sections[name] = part.value
    return answer, sections


def _begin(out: Output, result: "Inspection", asked: Collection[str]) -> bool:
    """Print the report, or only the problem if other questions are asked. Return whether anything was printed."""
    if not set(asked) - {"values"}:
        show_report(out, result)
    elif result.problem and "verdict" not in asked and (not _ANY_LAYOUT & {*asked} or _is_unknown(result)):
        show_problem(out, result)
    else:
        return False
    return True


def _is_unknown(result: "Inspection") -> bool:
    """Return whether the reported problem leaves nothing more to say about the model."""
    return result.problem is not None and result.identity is None


def _ask_for(out: Output, result: "Inspection", consumer: "Consumer", gpus: str | None) -> bool:
    return show_verdict(out, result, consumer, gpus)


def _check_unasked(given: Mapping[str, str | int | None]) -> None:
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option} needs --fit", f"add it: --fit {option} {shell_word(str(value))}")


def _ask_fit(out: Output, result: "Inspection", gpus: str | None, ram: str | None, context: int, batch: int) -> bool:
    return show_fit(out, result, gpus=gpus, ram=ram, context=context, batch=batch)


def _ask_diff(out: Output, result: "Inspection", other: str, layer: str | None, tensor: str | None) -> bool:
    if layer is not None and not layer.isdecimal():
        raise UsageError(f"--diff --layer needs the number of a main layer, not {layer}", "select a part with --tensor")
    return show_diff(out, result.source.name, other, None if layer is None else int(layer), tensor)


def _ask_tensor(out: Output, result: "Inspection", name: str) -> bool:
    return show_tensor(out, result.source, result.identity, name)


def _ask_layer(out: Output, result: "Inspection", name: str) -> bool:
    return show_layer(out, _known(result), name)


def _ask_tree(out: Output, result: "Inspection") -> bool:
    return show_tree(out, _known(result), result.source.name)


def _ask_template(out: Output, result: "Inspection") -> bool:
    return show_template(out, _known(result), result.source.name)


def _ask_values(out: Output, result: "Inspection", depth: "Depth") -> bool:
    from dsv4cli.engine.checkpoint.identify import FolderIdentity
    from dsv4cli.engine.inspection.sources import RemoteSource

    identity, name = _known(result), result.source.name
    if isinstance(result.source, RemoteSource):
        fetch = f"dsv4 download {shell_word(result.source.repository)}"
        raise UsageError(f"the weights of {name} are not on this machine", f"download them: {fetch}")
    if not isinstance(identity, FolderIdentity):
        raise UsageError(f"{name} has no files to read values from", "remove --values")
    return show_values(out, identity, depth)


def _known(result: "Inspection") -> "Identity":
    if result.identity is None:
        raise UsageError(
            f"cannot tell which model {result.source.name} belongs to", "put its config.json into the same folder"
        )
    return result.identity
