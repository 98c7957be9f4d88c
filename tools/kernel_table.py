"""Prints the table of docs/internals/kernels.md: `python -m tools.kernel_table docs/internals/kernels-h200/*.json`.

The JSON files are documents of `dsv4 profile kernels --model flash --json`. Times of the best other kernels were
measured once on the same kind of GPU, in CUDA graphs over rotated buffers.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Document = dict[str, Any]
Line = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A line of the table: an operation of `profile kernels` by name, tokens and context.

    Attributes:
        other: time of the best other kernel in µs.
    """

    title: str
    name: str
    tokens: int
    limit: str
    other: float | None = None
    context: int = 4096


LAUNCH = "launch (1.1 µs) and ramp"
STREAM = "weights from memory; ramp and tail"
DECODE = "latency of dependent loads; two or three launches"
FEW_EXPERTS = "decoding FP4 in registers, latency of three launches"
TENSOR = "tensor cores; L2 and shared memory traffic"
SEARCH = "steps of the radix search"
ROWS = (
    Row("wq_b 32768×1024 FP8", "wq_b", 1, STREAM, 12.0),
    Row("wq_b", "wq_b", 16, STREAM, 12.2),
    Row("wo_b 4096×8192 FP8", "wo_b", 1, STREAM, 17.1),
    Row("wo_b", "wo_b", 16, "split sums, added up by the last program", 14.5),
    Row("wq_a 1024×4096 FP8", "wq_a", 1, LAUNCH, 8.4),
    Row("CSA: wq_a, wkv, weights_proj, compressors", "inputs_csa", 1, STREAM),
    Row("HCA: wq_a, wkv, compressor", "inputs_hca", 1, STREAM),
    Row("norm and wq_b", "normed_wq_b", 1, STREAM),
    Row("CSA: norm, wq_b and the indexer's wq_b", "normed_wq_b_index", 1, STREAM),
    Row("wo_a, 8 groups of 1024×4096 FP8", "wo_a", 1, STREAM, 12.2),
    Row("head 129280×4096 bf16", "head", 1, "weights from memory", 237.0),
    Row("head", "head", 16, "weights from memory", 245.5),
    Row("routed experts, 6 of 256, FP4", "routed_experts", 1, FEW_EXPERTS, 52.6),
    Row("routed experts", "routed_experts", 16, "decoding FP4 in registers", 377.0),
    Row("routed experts", "routed_experts", 64, "decoding FP4 in registers", 888.0),
    Row("shared expert", "shared_expert", 1, "three launches", 17.0),
    Row("routed and shared experts in the same launches", "mixture", 1, FEW_EXPERTS),
    Row("routed and shared experts in the same launches", "mixture", 16, "decoding FP4 in registers"),
    Row("routed and shared experts in the same launches", "mixture", 64, "decoding FP4 in registers"),
    Row("router: logits and top-k", "router", 1, "two launches", 9.9),
    Row("router of a hash layer", "router_hash", 1, LAUNCH),
    Row(
        "hyper-connections: post, mix, Sinkhorn, pre, norm", "connect_post_pre", 1, "Sinkhorn chain; two launches", 7.2
    ),
    Row("hyper-connections", "connect_post_pre", 16, "two launches", 9.6),
    Row("queries and keys: norm, rope, rounding, ring", "queries_and_keys", 1, LAUNCH, 2.2),
    Row("CSA: queries, keys and the indexer's queries", "queries_keys_index", 1, LAUNCH),
    Row("attention, 128 rows (sliding)", "attention_sliding", 1, DECODE, 12.3),
    Row("attention, 128 + 512 rows (CSA)", "attention_csa", 1, DECODE, 14.9),
    Row("attention, 128 + 512 rows", "attention_csa", 64, DECODE, 45.4),
    Row("attention, 128 + 1024 rows (HCA at 128K)", "attention_hca", 1, DECODE, 16.6, 131072),
    Row("indexer scores, 32K context", "index_scores", 1, LAUNCH, 3.4, 32768),
    Row("indexer scores, 1M context", "index_scores", 1, "Triton waits after each tensor-core product", 11.4, 1048576),
    Row("top 512 of 8,192", "top_entries", 1, SEARCH, 4.4, 32768),
    Row("top 512 of 262,144", "top_entries", 1, f"two launches, {SEARCH}", 14.9, 1048576),
    Row("top 512 of 1,024 as attention lists", "choose_entries", 1, "entries are ranked by many programs"),
    Row("top 512 of 8,192 as attention lists", "choose_entries", 1, SEARCH, None, 32768),
    Row("top 512 of 262,144 as attention lists", "choose_entries", 1, f"two launches, {SEARCH}", None, 1048576),
    Row("indexer scores and attention lists, 4K context", "best_entries", 1, LAUNCH),
    Row("indexer scores and attention lists, 128K context", "best_entries", 1, "three launches", None, 131072),
    Row("CSA compressors, each completes an entry", "compress_both", 1, "latency of dependent loads"),
    Row("CSA compressors, no entry completed", "compress_both", 1, LAUNCH, None, 4095),
    Row("HCA compressor, no entry completed", "compress_hca", 1, LAUNCH, None, 4095),
    Row("step metadata", "places", 1, LAUNCH),
    Row("step metadata", "places", 64, "writing lists and tables"),
    Row("greedy token", "greedy", 1, "two launches"),
    Row("noise for sampling a token", "noise", 1, "64-bit integers and logarithms in fp64"),
    Row("token sampled from a top-p nucleus", "draw", 1, "six launches"),
    Row("wq_b", "wq_b", 4096, TENSOR, 222.0, 8192),
    Row("wo_b", "wo_b", 4096, TENSOR, 194.0, 8192),
    Row("wo_a (bf16 input, FP8 weight)", "wo_a", 4096, "bf16 tensor cores: the input is not rounded", 205.0, 8192),
    Row("CSA: wq_a, wkv, weights_proj, compressors", "inputs_csa", 4096, TENSOR, None, 8192),
    Row("CSA: norm, wq_b and the indexer's wq_b", "normed_wq_b_index", 4096, TENSOR, None, 8192),
    Row("routed experts", "routed_experts", 4096, "bf16 tensor cores, rows padded to tiles, L2", 3128.0, 8192),
    Row("router", "router", 4096, "two launches, top-k", 26.8, 8192),
    Row("hyper-connections", "connect_post_pre", 4096, "streams are read a second time for the norm", 164.0, 8192),
    Row("queries and keys", "queries_and_keys", 4096, "memory", 150.0, 8192),
    Row("CSA: queries, keys and the indexer's queries", "queries_keys_index", 4096, "memory", None, 8192),
    Row("attention, 640 rows", "attention_csa", 4096, "L2 and shared memory traffic", 652.0, 8192),
    Row("top 512 of 2,048 as attention lists", "choose_entries", 4096, SEARCH, None, 8192),
    Row("CSA compressors", "compress_both", 4096, "two launches, latency", None, 8192),
    Row("HCA compressor", "compress_hca", 4096, "two launches", None, 8192),
)


def find(documents: list[Document], row: Row) -> tuple[Document, Line] | None:
    """Return the document and the line that measured a row."""
    for document in documents:
        for line in document["results"]:
            if (line["name"], line["tokens"], line["context"]) == (row.name, row.tokens, row.context) and line[
                "seconds"
            ]:
                return document, line
    return None


def floor(document: Document, line: Line) -> float:
    """Return the lower bound of the time in µs, from the measured bandwidth and the measured FLOP rate."""
    ceilings = document["ceilings"]
    bandwidth = max(ceilings["copy_bytes_per_second"], ceilings["read_bytes_per_second"])
    seconds = line["seconds"]["median"]
    matmul = (line["of_matmul"] or 0.0) * seconds
    return max(line["bytes"] / bandwidth, matmul) * 1e6


def cells(documents: list[Document], row: Row) -> list[str] | None:
    """Return a line of the table; None if no document has it."""
    found = find(documents, row)
    if found is None:
        return None
    document, line = found
    ours, low, high = (line["seconds"][key] * 1e6 for key in ("median", "low", "high"))
    least, reference = floor(document, line), line["reference_seconds"]
    slow = reference["median"] * 1e6 if reference else None
    return [
        row.title,
        f"{row.tokens:,}",
        f"{ours:,.1f} ({low:,.1f} to {high:,.1f})",
        f"{least:,.1f}",
        f"{ours / least:.1f}" if ours < 10 * least else f"{ours / least:,.0f}",
        f"{slow:,.0f}" if slow else "",
        f"{slow / ours:,.0f}×" if slow else "",
        f"{row.other:,g}" if row.other else "",
        row.limit,
    ]


HEAD = [
    "operation",
    "tokens",
    "µs (spread)",
    "lower bound µs",
    "× bound",
    "PyTorch µs",
    "speed-up",
    "best other µs",
    "limited by",
]


def main() -> None:
    """Print the table."""
    documents = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    table = [HEAD, ["---"] * len(HEAD), *filter(None, (cells(documents, row) for row in ROWS))]
    for line in table:
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
