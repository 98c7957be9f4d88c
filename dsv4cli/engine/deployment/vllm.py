"""The flags of vLLM 0.33.0 for DeepSeek-V4, from its source.

Read: engine/arg_utils.py, entrypoints/cli/serve.py, config/speculative.py, config/parallel.py, models/deepseek_v4 and
layers/quantization/mxfp4.py. The values follow the recipe for DeepSeek-V4 in vllm-project/recipes (commit ec99fcc).
"""

from collections.abc import Iterator

from dsv4cli.engine.deployment.cluster import Cluster
from dsv4cli.engine.deployment.common_flags import ADDRESS, MACHINES, REVISION
from dsv4cli.engine.deployment.flags import ChosenFlag, Deployment, EngineSpec, FlagRule
from dsv4cli.engine.deployment.served_model import FP8_BLOCK, ServedModel

VERSION = "vLLM 0.33.0"
# number of draft tokens of the recipe for the MTP drafter; DSpark has its block size
MTP_DRAFTS = 2


def refusal(model: ServedModel, cluster: Cluster, ranks: int) -> str:
    """Return why the shared experts cannot be sharded over the ranks, '' if they can.

    Pull request 46001 (June 2026) pads the shards with zeros instead.
    """
    if not model.splits_blocks(ranks):
        return ""
    rows = model.config.moe_intermediate_size
    return (
        f"{rows} / {ranks} = {rows / ranks:g} rows of an expert are not a multiple of {FP8_BLOCK}, the size of an FP8 "
        "block (vLLM stops while loading, or pads each shard with zeros since pull request 46001)"
    )


def method(deployment: Deployment, node: int = 0) -> str | None:
    """Return the method of speculative decoding. vLLM builds the drafter's experts in the model's format."""
    model, drafts = deployment.model, deployment.settings.drafts
    if drafts == 0 or model.config.drafter == "none" or model.formats.drafter != model.formats.experts:
        return None
    return model.config.drafter


def drafts(deployment: Deployment, node: int) -> int | None:
    """Return the number of draft tokens; None for DSpark's own."""
    found = method(deployment)
    if found is None:
        return None
    return deployment.settings.drafts or (MTP_DRAFTS if found == "mtp" else None)


def notes(deployment: Deployment) -> Iterator[str]:
    """Yield sentences on a deployment."""
    model = deployment.model
    if model.config.drafter != "none" and model.formats.drafter != model.formats.experts:
        found, other = model.formats.drafter.upper(), model.formats.experts.upper()
        yield f"no speculative decoding: the drafter's experts are {found}, and vLLM would read them as {other}"


PARSERS = (
    ChosenFlag("--tool-call-parser", ("deepseek_v4",), "turns DSML into tool calls"),
    ChosenFlag("--reasoning-parser", ("deepseek_v4",), "separates the reasoning from the answer"),
    ChosenFlag("--enable-auto-tool-choice", (), "lets the model decide whether to call a tool"),
)
RULES = (
    REVISION,
    FlagRule(
        "--served-model-name",
        lambda d, node: (d.settings.names or (d.model.label,)) if node == 0 else None,
        "what clients call the model",
    ),
    FlagRule(
        "--tensor-parallel-size",
        lambda d, node: d.layout.tp if d.layout.tp > 1 else None,
        "divides the attention heads, the output groups and the FP8 blocks of the shared expert evenly",
    ),
    FlagRule(
        "--data-parallel-size",
        lambda d, node: d.layout.dp if d.layout.dp > 1 else None,
        "one replica of the attention for each group of tensor-parallel ranks",
    ),
    FlagRule(
        "--enable-expert-parallel",
        lambda d, node: d.layout.total > 1,
        "spreads whole experts over all GPUs instead of splitting each",
    ),
    FlagRule("--spec-method", method, "the drafter in the checkpoint"),
    FlagRule("--spec-tokens", drafts, "number of draft tokens per step"),
    FlagRule(
        "--max-model-len",
        lambda d, node: d.settings.context or "auto",
        "context length; auto takes the longest for which memory is left",
    ),
    *MACHINES,
    FlagRule(
        "--master-addr",
        lambda d, node: d.settings.head if d.cluster.nodes > 1 else None,
        "address of the first machine",
    ),
    FlagRule(
        "--master-port",
        lambda d, node: d.settings.head_port if d.cluster.nodes > 1 else None,
        "its port for the others",
    ),
    FlagRule("--headless", lambda d, node: node > 0, "only the first machine has the API"),
    *ADDRESS,
)
ENVIRONMENT = (
    FlagRule(
        "VLLM_ENGINE_READY_TIMEOUT_S", lambda d, node: d.settings.ready_seconds, "vLLM gives up loading after 600 s"
    ),
)
VLLM = EngineSpec(
    name="vllm",
    title=VERSION,
    command=("vllm", "serve"),
    module=("-m", "vllm.entrypoints.cli.main", "serve"),
    model_flag="",
    parsers=PARSERS,
    tp_flag="--tensor-parallel-size",
    rules=RULES,
    environment=ENVIRONMENT,
    drafting=method,
    refusal=refusal,
    usable=0.92,
    many_keys=True,
    notes=notes,
)
