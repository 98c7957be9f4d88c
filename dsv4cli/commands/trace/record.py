"""`dsv4 trace record`: record the inputs and outputs of a model's blocks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4cli.commands.job import Job, open_job
from dsv4cli.commands.starting import import_torch
from dsv4cli.commands.trace.side import (
    LayersOpt,
    WhatOpt,
    finished,
    in_ranks,
    loaded,
    manifest_for,
    parts_of,
    record_plan,
    walk_of,
)
from dsv4cli.commands.trace.texts import (
    IdsOpt,
    PromptOpt,
    PromptsOpt,
    StepsOpt,
    TextOptions,
    check,
    read_texts,
    recorded_alone,
)
from dsv4cli.options import (
    BackendOpt,
    DeviceOpt,
    DtypeOpt,
    ExactOpt,
    GpuMemoryOpt,
    HostMemoryOpt,
    JsonOpt,
    ModelArg,
    ModelOptions,
    QuietOpt,
    TpOpt,
)
from dsv4cli.output import Output, counted, size_text

if TYPE_CHECKING:
    from dsv4cli.engine.tracing.manifest import Text

FolderOpt = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the recording: new or empty.")]
LikeOpt = Annotated[Path | None, typer.Option(metavar="DIR", help="Use the tokens of this recording.")]
ChunkOpt = Annotated[
    int, typer.Option("--prefill-chunk", min=1, help="Maximum number of prompt tokens per prefill step.")
]
NoNoiseOpt = Annotated[
    bool, typer.Option("--no-noise", help="Skip the two extra passes that measure the rounding error of each stage.")
]
RECORD_EXAMPLES = (
    "dsv4 trace record --out A",
    'dsv4 trace record flash --prompt "What is 17 + 25?" --steps 16 --out A',
    "dsv4 trace record flash --ids 5,6,7 --layers 0-3 --what block,router --out A",
    "dsv4 trace record flash --like A --tp 2 --out B",
)


def record(
    context: typer.Context,
    folder: FolderOpt,
    model: ModelArg = "nano",
    prompt: PromptOpt = None,
    ids: IdsOpt = None,
    prompts: PromptsOpt = None,
    like: LikeOpt = None,
    steps: StepsOpt = 4,
    layers: LayersOpt = None,
    what: WhatOpt = None,
    chunk: ChunkOpt = 4096,
    tp: TpOpt = None,
    no_noise: NoNoiseOpt = False,
    device: DeviceOpt = "auto",
    dtype: DtypeOpt = "auto",
    exact: ExactOpt = False,
    backend: BackendOpt = "auto",
    gpu_memory: GpuMemoryOpt = None,
    host_memory: HostMemoryOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Record the inputs and outputs of a model's blocks.

    A recording has the residual streams, queries, keys, compressed KV entries, selected entries and experts, outputs
    and logits of the prompt and of the tokens decoded after it. Each layer is one safetensors file, written row by row
    as the steps run.
    """
    options = ModelOptions(
        model=model, draft="off", prefill_chunk=chunk, device=device, dtype=dtype, exact=exact, backend=backend,
        gpu_memory=gpu_memory, host_memory=host_memory,
    )  # fmt: skip
    given, parts = TextOptions(prompt, ids, prompts, steps), parts_of(layers, what)
    if like is not None:
        recorded_alone(given, "--like")
    job = open_job(Output(context.obj.colours, as_json, quiet), options)
    texts = read_texts(job, given) if like is None else _texts_of(job, like)
    _record(job, texts, folder, parts, tp, noise=not no_noise)


def _texts_of(job: Job, like: Path) -> "list[Text]":
    from dsv4cli.engine.tracing.manifest import read_manifest

    texts = list(read_manifest(like).texts)
    check(job, texts)
    return texts


def _record(job: Job, texts: "list[Text]", folder: Path, parts: dict[str, Any], tp: int | None, *, noise: bool) -> None:
    import_torch(job.out)
    from dsv4cli.engine.tracing.passes import Pass, Plan
    from dsv4cli.engine.tracing.record import keep_noise, with_twins
    from dsv4cli.engine.tracing.recording import make_folder

    manifest = manifest_for(job, texts, parts)
    make_folder(folder)  # before reading the weights, which can take minutes
    plan = with_twins(folder, manifest) if noise else Plan(manifest, (Pass(folder),))
    with in_ranks(job, tp, plan) as own, loaded(own, texts) as transformer:
        manifest = record_plan(own, walk_of(own, transformer), plan)
    recording, *twins = finished(job, plan, manifest, tp)
    for twin in twins:
        keep_noise(recording, twin, fed=twin.manifest.fed)
    size = sum(file.stat().st_size for file in folder.iterdir())
    tokens, stages = manifest.rows("token", 0), sum(len(recording.stages(layer)) for layer in recording.layers())
    job.out.line(f"{folder}: {counted(tokens, 'token')}, {counted(stages, 'stage')}, {size_text(size)}")
    job.out.document(
        {"schema": "dsv4.trace.record/1", "folder": str(folder), "model": job.source.name, "tokens": tokens}
        | {"texts": [{"ids": list(text.ids), "prompt": text.prompt} for text in manifest.texts]}
        | {"stages": stages, "bytes": size, "noise": noise}
    )
