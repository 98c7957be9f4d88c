"""`dsv4 inspect MODEL` without options: what the model is, whether it would load, how large it is."""

import textwrap
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4cli.harmless import brief_line
from dsv4cli.output import UNIT_NOTE, Output, count_text, counted, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dsv4cli.engine.checkpoint.contents import Contents
    from dsv4cli.engine.checkpoint.identify import Identity
    from dsv4cli.engine.checkpoint.sizes import Sizes
    from dsv4cli.engine.inspection.report import Inspection

SIZES = {"flash": "DeepSeek-V4-Flash", "pro": "DeepSeek-V4-Pro", "tiny": "tiny, for tests"}
RELEASES = {"v4": "April 2026 (v4)", "0731": "0731 or later"}
DRAFTERS = {"none": "none", "mtp": "MTP, one block", "dspark": "DSpark, {} blocks"}
KINDS = "0: window only; 4: compressed sparse; 128: heavily compressed"
LAYOUTS = {
    "official": "official: FP4 experts, FP8 matrices",
    "fp8": "official names, all matrices in FP8",
    "bf16": "official names, all in BF16",
    "nvfp4": "ModelOpt's, with NVFP4 experts",
    "base": "official names, all matrices in FP8 with FP32 scales",
    "transformers": "transformers' names, experts stacked",
    "gguf": "llama.cpp's GGUF, experts stacked",
    "compressed-tensors": "compressed-tensors' names, packed experts",
    "mixed": "official names, formats mixed",
}
# example of a GGUF tensor name for each family
GGUF_EXAMPLES = {
    "experts": "blk.0.ffn_gate_exps.weight", "attention": "blk.0.attn_q_a.weight", "embedding": "token_embd.weight",
    "norms": "output_norm.weight",
}  # fmt: skip
# columns to the right of the labels in a terminal of 80 columns
VALUE_WIDTH = 66
OTHERS = "; dsv4 uses the tensors, other programs may not"
# maximum problems listed on a terminal; --json has all
SHOWN = 8


def show_problem(out: Output, result: "Inspection") -> None:
    """Print whether the model would load, or whether the file is valid; if not, why."""
    name, coverage, problem, contents = result.source.name, result.coverage, result.problem, result.contents
    if problem:
        out.line(f"{name} {_complaint(result)}", strong=True)
        if result.refused:
            out.line(f"  {brief_line(problem.message)}")
        for sentence in islice(coverage.sentences(), SHOWN) if coverage else ():
            out.line(f"  {brief_line(sentence)}")
        if coverage and coverage.count > SHOWN:
            out.line(f"  and {coverage.count - SHOWN:,} more; --json lists them all")
        out.line(f"→ {problem.remedy}")
    elif contents:
        known = ", all as the model requires" if coverage else "; no config.json says which model they belong to"
        out.line(f"{name} is valid: {contents.tensors:,} tensors{known}", strong=True)
    elif coverage:
        out.line(f"{name} would load: all {coverage.expected:,} tensors are present and as expected", strong=True)
    else:
        out.line(f"{name}: random weights in the model's formats, no files", strong=True)
    for note in result.notes:
        others = "" if getattr(result.identity, "layout", "") == "gguf" else OTHERS
        out.paragraph(f"note: {note}{others}", "  ")
    for sentence in result.prompt_problems:
        out.paragraph(f"note: {sentence}", "  ")


def _complaint(result: "Inspection") -> str:
    if result.contents:
        return "is damaged"
    return "is complete, but dsv4 cannot run its layout" if result.runs_elsewhere else "would not load"


def show_report(out: Output, result: "Inspection") -> None:
    """Print whether the model would load, what it is, and how large it is."""
    show_problem(out, result)
    if result.identity:
        out.line()
        sizes = _sizes(result.sizes, result.files) if result.sizes else ()
        out.table([*_identity(result, result.identity), *sizes])
    if result.sizes:
        out.line()
        _bytes(out, result.sizes)
    if result.contents:
        out.line()
        _contents(out, result.contents)


def _identity(result: "Inspection", identity: "Identity") -> "Iterator[tuple[str, str]]":
    from dsv4cli.engine.config.formats import STORAGE
    from dsv4cli.engine.inspection.report import schedule

    config, formats = identity.config, identity.formats
    folder = getattr(result.source, "folder", None)
    if folder and folder != Path(result.source.name):
        yield "folder", str(folder)
    yield "size", SIZES.get(identity.size, "custom, neither Flash nor Pro")
    yield from _release(identity)
    yield "drafter", DRAFTERS[config.drafter].format(config.draft_stages)
    yield from _layout(result)
    words = textwrap.wrap(f"{config.num_hidden_layers} with ratios {schedule(config.layer_ratios)}", VALUE_WIDTH)
    yield from zip(["layers", *[""] * len(words)], [*words, KINDS], strict=True)
    yield "experts", f"{config.n_routed_experts} per layer, {config.num_experts_per_tok} per token, and 1 shared"
    if config.num_hash_layers:
        first = "layer 0" if config.num_hash_layers == 1 else f"layers 0 to {config.num_hash_layers - 1}"
        yield "", f"selected by token id in {first}, by score in the others"
    yield "context", f"{config.max_position_embeddings:,} tokens"
    named = {form: storage.words for form, storage in STORAGE.items()}
    if getattr(identity, "layout", "") == "gguf":
        yield from _gguf(identity)
        return
    experts, linear, dense = named[formats.experts], named[formats.linear], named[formats.dense]
    yield "formats", f"experts {experts}, other matrices {linear}, embedding and norms {dense}"
    others = {"wo_a": (formats.output, formats.linear), "experts of the drafter": (formats.drafter, formats.experts)}
    odd = [f"{name} {named[form]}" for name, (form, usual) in others.items() if form != usual]
    if odd:
        yield "", ", ".join(odd)


def _release(identity: "Identity") -> "Iterator[tuple[str, str]]":
    from dsv4cli.engine.config.keys import RELEASE_KEY
    from dsv4cli.engine.config.presets import RELEASES as KNOWN

    used = RELEASES[identity.release]
    if identity.config.release is not None:
        yield "release", used
        return
    yield "release", f"unknown; prompts use the format of {used}"
    if getattr(identity, "layout", "") != "gguf":
        others = " or ".join(f'"{release}"' for release in KNOWN)
        yield "", f'to state it, set "{RELEASE_KEY}" in config.json to {others}'


def _gguf(identity: "Identity") -> "Iterator[tuple[str, str]]":
    """Yield rows of the tensor types and the vocabulary; --json has the rest of the metadata."""
    from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity

    assert isinstance(identity, GgufIdentity)
    types = {
        label: info.dtype
        for label, name in GGUF_EXAMPLES.items()
        if (info := identity.checkpoint.tensors.get(name)) is not None
    }
    yield "formats", ", ".join(f"{label} {kind}" for label, kind in types.items())
    metadata = identity.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    cut = metadata.get("tokenizer.ggml.pre", "unnamed")
    words = f"{len(tokens):,} tokens, pre-tokenizer {cut}" if isinstance(tokens, list) else "none"
    yield "vocabulary", brief_line(words + (", a chat template" if "tokenizer.chat_template" in metadata else ""))
    yield "metadata", f"{len(metadata)} keys; --json has them"


def _layout(result: "Inspection") -> "Iterator[tuple[str, str]]":
    layout, coverage = getattr(result.identity, "layout", "official"), result.coverage
    if layout != "official":
        cut = f"official convert.py's, split for {layout.removeprefix('mp')} processes"
        yield "layout", LAYOUTS.get(layout, cut)
        if coverage and coverage.complete and not result.contents:
            yield "", f"all {coverage.expected:,} tensors of this layout are present"


def _sizes(sizes: "Sizes", files: int) -> "Iterator[tuple[str, str]]":
    drafter = sizes.parameters - sizes.main
    yield "parameters", count_text(sizes.main) + (f", and {count_text(drafter)} in the drafter" if drafter else "")
    yield (
        "",
        (
            f"{count_text(sizes.active)} active per token, {count_text(sizes.active_without_embedding)} of them "
            "outside the embedding"
        ),
    )
    yield "tensors", f"{sizes.tensors:,}" + (f" in {counted(files, 'file')}" if files else "")


def _bytes(out: Output, sizes: "Sizes") -> None:
    """Print the bytes by tensor family, their sum, the drafter's share, and the same bytes by dtype."""
    out.line(f"bytes as stored ({UNIT_NOTE})")
    _shares(out, {**sizes.by_family, "total": sizes.nbytes, "under mtp.": sizes.drafter_bytes}, sizes.nbytes)
    out.line()
    out.line("bytes by dtype")
    _shares(out, sizes.by_dtype, sizes.nbytes)


def _contents(out: Output, contents: "Contents") -> None:
    out.line(f"bytes by dtype ({UNIT_NOTE})")
    _shares(out, {**contents.by_dtype, "total": contents.nbytes}, contents.nbytes)
    if any(contents.by_family):
        out.line()
        out.line("bytes by family")
        families = {name or "not part of this model": nbytes for name, nbytes in contents.by_family.items()}
        _shares(out, families, contents.nbytes)


def _shares(out: Output, sums: "Mapping[str, int]", total: int) -> None:
    rows = [(f"  {name}", size_text(value), f"{value / max(total, 1):.1%}") for name, value in sums.items()]
    out.table(rows, numbers=True)
