"""`dsv4 inspect`: what a checkpoint is, whether it would load, how large it is; reads headers only."""

import textwrap
from itertools import islice
from typing import TYPE_CHECKING

import typer

from dsv4cli.options import JsonOpt, ModelArg
from dsv4cli.output import UNIT_NOTE, Output, count_text, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsv4cli.engine.identify import Identity
    from dsv4cli.engine.inspection import Inspection
    from dsv4cli.engine.sizes import Sizes

SIZES = {"flash": "DeepSeek-V4-Flash", "pro": "DeepSeek-V4-Pro", "tiny": "tiny, for tests"}
RELEASES = {"v4": "April 2026 (v4)", "0731": "0731, or another with the DSpark drafter"}
DRAFTERS = {"none": "none", "mtp": "MTP, one block", "dspark": "DSpark, {} blocks"}
KINDS = "0: window only; 4: compressed sparse; 128: heavily compressed"
# columns right of the labels in a terminal of 80
VALUE_WIDTH = 66
# problems that a person reads at once; --json has all
SHOWN = 8


def inspect(context: typer.Context, model: ModelArg, as_json: JsonOpt = False) -> None:
    """Show what a model is, whether it would load, and how large it is.

    Reads the configuration and the headers of the weight files, never the weights: seconds for 865 GB. The answer is
    no (exit code 3) when the checkpoint is damaged or is a relative that dsv4 does not run.
    """
    from dsv4cli.engine.inspection import document, inspect_model
    from dsv4cli.engine.source import resolve_model

    out = Output(context.obj, as_json)
    result = inspect_model(resolve_model(model))
    out.document(document(result))
    _report(out, result)
    if result.problem:
        raise typer.Exit(3)


def _report(out: Output, result: "Inspection") -> None:
    name, coverage, problem = result.source.name, result.coverage, result.problem
    if problem:
        out.line(f"{name} would not load", strong=True)
        for sentence in islice(coverage.sentences(), SHOWN) if coverage else [problem.message]:
            out.line(f"  {sentence}")
        if coverage and coverage.count > SHOWN:
            out.line(f"  and {coverage.count - SHOWN:,} more; --json lists them all")
        out.line(f"→ {problem.remedy}")
    elif coverage:
        out.line(f"{name} would load: all {coverage.expected:,} tensors are there and as expected", strong=True)
    else:
        out.line(f"{name}: random weights in the stored formats, no files", strong=True)
    if result.identity and result.sizes:
        out.line()
        out.table([*_identity(result, result.identity), *_sizes(result.sizes, result.files)])
        out.line()
        _bytes(out, result.sizes)


def _identity(result: "Inspection", identity: "Identity") -> "Iterator[tuple[str, str]]":
    from dsv4cli.engine.inspection import schedule

    config, formats = identity.config, identity.formats
    folder = getattr(result.source, "folder", "")
    if folder and str(folder) != result.source.name:
        yield "folder", str(folder)
    yield "size", SIZES.get(identity.size, "custom, neither Flash nor Pro")
    yield "release", RELEASES[identity.release]
    yield "drafter", DRAFTERS[config.drafter].format(config.draft_stages)
    words = textwrap.wrap(f"{config.num_hidden_layers} with ratios {schedule(config.layer_ratios)}", VALUE_WIDTH)
    yield from zip(["layers", *[""] * len(words)], [*words, KINDS], strict=True)
    yield "experts", f"{config.n_routed_experts} a layer, {config.num_experts_per_tok} for a token, and 1 shared"
    if config.num_hash_layers:
        first = "layer 0" if config.num_hash_layers == 1 else f"layers 0 to {config.num_hash_layers - 1}"
        yield "", f"chosen by token id in {first}, by score in the others"
    yield "context", f"{config.max_position_embeddings:,} tokens"
    yield "formats", f"experts {formats.experts}, other matrices {formats.linear}, embedding and norms {formats.dense}"


def _sizes(sizes: "Sizes", files: int) -> "Iterator[tuple[str, str]]":
    drafter = sizes.parameters - sizes.main
    yield "parameters", count_text(sizes.main) + (f", and {count_text(drafter)} in the drafter" if drafter else "")
    yield (
        "",
        (
            f"{count_text(sizes.active)} active for a token, {count_text(sizes.active_without_embedding)} of them "
            "outside the embedding"
        ),
    )
    yield "tensors", f"{sizes.tensors:,}" + (f" in {files} files" if files else "")


def _bytes(out: Output, sizes: "Sizes") -> None:
    """The bytes by family, their sum, the part of the drafter, and the same bytes by dtype."""
    rows = [(f"  {name}", value) for name, value in sizes.by_family.items()]
    rows += [("  total", sizes.nbytes), ("  of it under mtp.", sizes.drafter_bytes)]
    out.line(f"bytes as stored ({UNIT_NOTE})")
    out.table([(name, size_text(value), f"{value / sizes.nbytes:.1%}") for name, value in rows], numbers=True)
    out.line()
    out.line("bytes by dtype")
    dtypes = sizes.by_dtype.items()
    out.table([(f"  {name}", size_text(value), f"{value / sizes.nbytes:.1%}") for name, value in dtypes], numbers=True)
