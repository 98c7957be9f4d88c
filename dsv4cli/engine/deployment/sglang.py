"""The flags of SGLang 0.5.23 for DeepSeek-V4, from its source.

Read: srt/server_args.py, srt/arg_groups, srt/models/deepseek_v4.py, srt/models/deepseek_v2.py and
srt/layers/quantization. The values follow the cells of its cookbook for DeepSeek-V4
(docs_new/src/snippets/configs/deepseek-ai/deepseek-v4.jsx, commit acee17e).
"""

from collections.abc import Iterator

from dsv4cli.engine.deployment.cluster import Cluster
from dsv4cli.engine.deployment.common_flags import ADDRESS, MACHINES, REVISION
from dsv4cli.engine.deployment.flags import ChosenFlag, Deployment, EngineSpec, FlagRule
from dsv4cli.engine.deployment.served_model import ServedModel

VERSION = "SGLang 0.5.23"
# draft steps of the cookbook's low-latency cells; one more row is verified than is drafted
MTP_STEPS = 3
# formats of experts of which Marlin computes any part
FOUR_BIT = ("fp4", "nvfp4")
ALGORITHMS = {"mtp": "EAGLE", "dspark": "DSPARK"}
# share of a GPU from which the cookbook sets the memory fraction by hand, and its value
FULL, MEMORY_FRACTION = 0.7, 0.88


def refusal(model: ServedModel, cluster: Cluster, ranks: int) -> str:
    """Return '': SGLang keeps whole what it cannot shard."""
    return ""


def algorithm(deployment: Deployment, node: int = 0) -> str | None:
    """Return the algorithm of speculative decoding. SGLang builds the drafter's experts in FP4."""
    model = deployment.model
    if deployment.settings.drafts == 0 or model.formats.drafter == "nvfp4":
        return None
    return ALGORITHMS.get(model.config.drafter)


def steps(deployment: Deployment, node: int = 0) -> int | None:
    """Return the number of draft steps of MTP."""
    return (deployment.settings.drafts or MTP_STEPS) if algorithm(deployment) == "EAGLE" else None


def marlin(deployment: Deployment, node: int = 0) -> str | None:
    """Return the expert kernels if SGLang's own choice does not run the model on these GPUs."""
    experts, hopper = deployment.model.formats.experts, deployment.cluster.architecture == "hopper"
    if (experts == "nvfp4" and hopper) or (experts in FOUR_BIT and splits(deployment)):
        return "marlin"
    return None


def splits(deployment: Deployment) -> bool:
    """Return whether sharding the experts over all GPUs would split their FP8 blocks."""
    return deployment.model.splits_blocks(deployment.layout.total)


def whole_experts(deployment: Deployment, node: int) -> int | None:
    """Return the number of GPUs over which whole experts are spread if they cannot be sharded."""
    if splits(deployment) and deployment.model.formats.experts not in FOUR_BIT:
        return deployment.layout.total
    return None


def memory_fraction(deployment: Deployment, node: int) -> float | None:
    """Return the share of memory for weights and KV cache if the weights fill most of a GPU."""
    return MEMORY_FRACTION if deployment.weights_per_gpu > FULL * deployment.cluster.memory else None


def notes(deployment: Deployment) -> Iterator[str]:
    """Yield sentences on a deployment."""
    if deployment.model.config.drafter != "none" and deployment.model.formats.drafter == "nvfp4":
        yield "no speculative decoding: the drafter's experts are NVFP4, and SGLang would read them as FP4"
    if len(deployment.settings.names) > 1:
        yield f"SGLang has one model name: clients must use {deployment.settings.names[0]}"


PARSERS = (
    ChosenFlag("--tool-call-parser", ("deepseekv4",), "turns DSML into tool calls"),
    ChosenFlag("--reasoning-parser", ("deepseek-v4",), "separates the reasoning from the answer"),
)
RULES = (
    REVISION,
    FlagRule(
        "--served-model-name",
        lambda d, node: d.settings.names[0] if d.settings.names else d.model.label,
        "what clients call the model",
    ),
    FlagRule("--tp-size", lambda d, node: d.layout.total if d.layout.total > 1 else None, "all GPUs"),
    FlagRule(
        "--attn-dp-size",
        lambda d, node: d.layout.dp if d.layout.dp > 1 else None,
        "replicas of the attention, whose heads and output groups cannot be divided by the number of GPUs",
    ),
    FlagRule(
        "--enable-dp-lm-head",
        lambda d, node: d.layout.dp > 1 and algorithm(d) == "DSPARK",
        "DSpark requires it with several replicas of the attention",
    ),
    FlagRule(
        "--moe-runner-backend",
        marlin,
        "the other expert kernels run neither NVFP4 on Hopper nor a part of an FP8 block",
    ),
    FlagRule("--ep-size", whole_experts, "a part of an expert would split its FP8 blocks"),
    FlagRule("--speculative-algorithm", algorithm, "the drafter in the checkpoint"),
    FlagRule("--speculative-num-steps", steps, "number of draft tokens per step"),
    FlagRule(
        "--speculative-eagle-topk", lambda d, node: 1 if steps(d) else None, "the only value that DeepSeek-V4 supports"
    ),
    FlagRule(
        "--speculative-num-draft-tokens",
        lambda d, node: found + 1 if (found := steps(d)) else None,
        "draft tokens and the token before them",
    ),
    FlagRule(
        "--speculative-dspark-block-size",
        lambda d, node: (d.settings.drafts or None) if algorithm(d) == "DSPARK" else None,
        "number of draft tokens per step",
    ),
    FlagRule("--context-length", lambda d, node: d.settings.context, "context length"),
    FlagRule("--mem-fraction-static", memory_fraction, "the weights fill most of each GPU"),
    *MACHINES,
    FlagRule(
        "--dist-init-addr",
        lambda d, node: f"{d.settings.head}:{d.settings.head_port}" if d.cluster.nodes > 1 else None,
        "address of the first machine, and its port for the others",
    ),
    *ADDRESS,
)
ENVIRONMENT = (
    FlagRule(
        "SGLANG_SHARED_EXPERT_TP1",
        lambda d, node: 1 if splits(d) else None,
        "keeps the shared expert whole: sharding it would split its FP8 blocks",
    ),
)
SGLANG = EngineSpec(
    name="sglang",
    title=VERSION,
    command=("sglang", "serve"),
    module=("-m", "sglang.launch_server"),
    model_flag="--model-path",
    parsers=PARSERS,
    tp_flag="--tp-size",
    rules=RULES,
    environment=ENVIRONMENT,
    drafting=algorithm,
    refusal=refusal,
    usable=0.9,
    many_keys=False,
    notes=notes,
)
