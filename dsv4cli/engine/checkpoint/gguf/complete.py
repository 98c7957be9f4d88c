"""Completes GGUF metadata from the tensors: early converters left keys out; no numpy.

Dimensions follow from shapes. What no tensor shows is assumed to be as in every release, and reported.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dsv4cli.engine.checkpoint.gguf.drafter import IN_BLOCK, drafter_blocks
from dsv4cli.engine.checkpoint.headers import TensorInfo
from dsv4cli.engine.config.gguf import ARCHITECTURE, NUMBERS, RATIOS, RELEASE
from dsv4cli.engine.config.layer_kind import CSA, HCA
from dsv4cli.engine.config.presets import COMMON, Release
from dsv4cli.errors import CheckpointError

Tensors = Mapping[str, TensorInfo]
# keys that no tensor shows, by their official name: every release has the same value
ASSUMED = ("hc_sinkhorn_iters", "hc_eps", "compress_rope_theta")
# keys in which converters write a model's name, and the release that it can tell
NAMES = ("general.name", "general.basename", "general.version", "general.finetune", "general.base_model.0.name")
NEWER: Release = "0731"
LONGEST_NAME = 500
EXPERT_STACKS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight", "ffn_gate_inp.weight")


def completed(metadata: Mapping[str, Any], tensors: Tensors, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return the metadata with every key that follows from the tensors, and a sentence for each that was added.

    `where` names the file in errors. Raises CheckpointError if the tensors have different numbers of experts.
    """
    found, notes = dict(metadata), list[str]()
    layers = _layers(tensors)
    if layers and found.get(_key("block_count")) not in (None, len(layers)) and drafter_blocks(tensors):
        # llama.cpp counts the blocks of the drafter
        found[_key("block_count")] = len(layers)
    derived: dict[str, Callable[[], Any]] = {
        NUMBERS["o_groups"]: lambda: _output_groups(found, tensors),
        NUMBERS["o_lora_rank"]: lambda: _output_rank(found, tensors),
        NUMBERS["num_hash_layers"]: lambda: sum("ffn_gate_tid2eid.weight" in layer for layer in layers),
        NUMBERS["hc_mult"]: lambda: tensors["output_hc_base.weight"].shape[0],
        RATIOS: lambda: [_ratio(layer) for layer in layers],
    }
    for name, value in derived.items():
        if _key(name) not in found:
            try:
                found[_key(name)] = value()
            except (KeyError, IndexError, TypeError, ZeroDivisionError):
                continue  # reported as a missing key or tensor
            notes.append(f"{_key(name)} is missing; by the tensors it is {_shown(found[_key(name)])}")
    for official in ASSUMED:
        key = _key(NUMBERS[official])
        if key not in found:
            found[key] = COMMON[official]
            notes.append(f"{key} is missing; it is assumed to be {COMMON[official]:g}, as in every release")
    notes += _count_experts(found, tensors, where)
    named = next((key for key in NAMES if NEWER in str(found.get(key, ""))[:LONGEST_NAME]), None)
    if RELEASE not in found and named:
        found[RELEASE] = NEWER
        notes.append(f"the release is not stated; by {named} it is {NEWER}")
    return found, notes


def _key(name: str) -> str:
    return f"{ARCHITECTURE}.{name}"


def _layers(tensors: Tensors) -> list[set[str]]:
    """Return the tensor names of each layer, without `blk.N.` and without the drafter's blocks."""
    found: dict[int, set[str]] = {}
    for match in filter(None, map(IN_BLOCK.fullmatch, tensors)):
        found.setdefault(int(match[1]), set()).add(match[2])
    kept = sorted(found.keys() - drafter_blocks(tensors))
    return [found[number] for number in kept]


def _ratio(layer: set[str]) -> int:
    if "attn_compressor_kv.weight" not in layer:
        return 0
    return CSA if "indexer.attn_q_b.weight" in layer else HCA


def _output_groups(metadata: Mapping[str, Any], tensors: Tensors) -> int:
    """Return the number of groups of attn_output_a [G * o, heads * width / G]."""
    heads, width = (metadata[_key(NUMBERS[name])] for name in ("num_attention_heads", "head_dim"))
    return int(heads * width // tensors["blk.0.attn_output_a.weight"].shape[-1])


def _output_rank(metadata: Mapping[str, Any], tensors: Tensors) -> int:
    return int(tensors["blk.0.attn_output_b.weight"].shape[-1] // metadata[_key(NUMBERS["o_groups"])])


def _count_experts(metadata: dict[str, Any], tensors: Tensors, where: str) -> Iterator[str]:
    """Set the number of experts to that of the tensors: files of pruned models may state the original number."""
    counts: dict[int, str] = {}
    for name, info in tensors.items():
        if name.endswith(EXPERT_STACKS) and info.shape:
            counts.setdefault(info.shape[0], name)
    if len(counts) > 1:
        (first, one), (second, other) = list(counts.items())[:2]
        raise CheckpointError(
            f"{where}: {one} has {first:,} experts and {other} has {second:,}",
            "dsv4 needs one number of experts in all layers: use another file",
        )
    key, stored = _key(NUMBERS["n_routed_experts"]), next(iter(counts), None)
    stated = metadata.get(key)
    if stored is not None and type(stated) is int and stated != stored:
        metadata[key] = stored
        yield f"{key} is {stated:,}; by the tensors it is {stored:,}"


def _shown(value: Any) -> str:
    """Return a number, or a list shortened to its first items."""
    if not isinstance(value, list):
        return str(value)
    return " ".join(map(str, value[:8])) + (f" … ({len(value)} layers)" if len(value) > 8 else "")
