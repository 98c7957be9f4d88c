"""What llama.cpp and ds4 load: GGUF files with the required metadata.

llama.cpp: src/models/deepseek4.cpp, src/llama-model-loader.cpp and src/llama-vocab.cpp, tested with nano. ds4: ds4.c
(config_validate_deepseek4_model, weights_validate_layout).
"""

from collections.abc import Iterator, Mapping

from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.gguf.naming import IN_LAYER, gguf_name
from dsv4cli.engine.config.gguf import ARCHITECTURE, TOKENS, missing_keys
from dsv4cli.engine.inspection.consumers import common
from dsv4cli.engine.inspection.consumers.checkpoint import Finding, InspectedCheckpoint, Rule

LLAMA_VERSION = "llama.cpp (September 2026)"
DS4_VERSION = "ds4 (August 2026)"
CUTTER = "tokenizer.ggml.pre"
KNOWN_CUTTERS = ("joyai-llm", "deepseek-v3")
# how to make ds4's own files, whose matrices have the types that its kernels support
DS4_FIX = "make ds4's own file with its gguf-tools/deepseek4-quantize, from what `dsv4 download flash` fetches"
WRITE_AGAIN = "write the file again from the release with `dsv4 convert flash OUT --to gguf`"
# type that ds4 has a kernel for, by the end of the tensor's name; other tensors can have several types
DS4_TYPES: Mapping[str, str] = {
    "token_embd.weight": "F16",
    "hc_fn.weight": "F16",
    "hc_attn_fn.weight": "F16",
    "hc_ffn_fn.weight": "F16",
    "ffn_gate_inp.weight": "F16",
    "compressor_kv.weight": "F16",
    "compressor_gate.weight": "F16",
    "compressor_ape.weight": "F16",
    "indexer.proj.weight": "F16",
    "indexer.attn_q_b.weight": "F16",
    "attn_q_a.weight": "Q8_0",
    "attn_q_b.weight": "Q8_0",
    "attn_kv.weight": "Q8_0",
    "attn_output_a.weight": "Q8_0",
    "attn_output_b.weight": "Q8_0",
    "shexp.weight": "Q8_0",
    "output.weight": "Q8_0",
}


def is_gguf(consumer: str, fix: str = "") -> Rule:
    """Return a rule that requires GGUF files, the only format that both programs read."""

    def rule(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
        if not isinstance(checkpoint.identity, GgufIdentity):
            yield Finding("no", f"{consumer} reads only GGUF files, and this is not one", fix)

    return rule


def vocabulary(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the tokens and the name of the pre-tokenizer in the file (llama-vocab.cpp, load)."""
    identity = checkpoint.identity
    if not isinstance(identity, GgufIdentity):
        return
    if TOKENS not in identity.metadata:
        yield Finding("no", f"there is no {TOKENS}: the file has no vocabulary")
    elif identity.metadata.get(CUTTER) not in KNOWN_CUTTERS:
        found = identity.metadata.get(CUTTER)
        yield Finding(
            "note",
            f"{CUTTER} is {found!r}: llama.cpp splits text differently from this model's tokenizer, so pass token ids",
        )


def dimensions(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the dimensions: ds4 has those of Flash and Pro built in (ds4.c, ds4_select_shape_from_metadata)."""
    if checkpoint.identity.size not in ("flash", "pro"):
        yield Finding("no", "ds4 has the dimensions of Flash and Pro only", DS4_FIX)


def required_keys(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the metadata keys that both programs require; dsv4 completes them."""
    identity = checkpoint.identity
    lacking = [*missing_keys(identity.metadata)] if isinstance(identity, GgufIdentity) else []
    if lacking:
        others = f" and {len(lacking) - 1} more keys" if len(lacking) > 1 else ""
        yield Finding("no", f"it lacks the key {lacking[0]}{others}, as early converters did", WRITE_AGAIN)


def keys(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check the metadata keys that ds4 requires and llama.cpp derives (ds4.c, required_u32)."""
    identity, key = checkpoint.identity, f"{ARCHITECTURE}.vocab_size"
    if isinstance(identity, GgufIdentity) and key not in identity.metadata:
        yield Finding("no", f"there is no {key}", DS4_FIX)


def types(checkpoint: InspectedCheckpoint) -> Iterator[Finding]:
    """Check that each tensor has the type of its kernel (ds4.c, tensor_expect_layout)."""
    identity = checkpoint.identity
    if not isinstance(identity, GgufIdentity):
        return
    weights = (spec for spec in identity.specs.values() if not spec.is_scale)
    for spec in weights:
        name, found = gguf_name(spec), identity.stored_type(spec)
        wanted = next((kind for end, kind in DS4_TYPES.items() if name.endswith(end)), found)
        if found and found != wanted:
            yield Finding("no", f"{name} is {found}, and ds4 takes {wanted}", DS4_FIX)
            return
    first = next((spec for spec in identity.specs.values() if IN_LAYER.match(spec.name) and spec.expert == 0), None)
    if first is not None and identity.stored_type(first) == "MXFP4":
        yield Finding("note", "the experts are MXFP4, which ds4 has on its branch ds4f-mxfp4")


LLAMA_RULES: tuple[Rule, ...] = (
    is_gguf("llama.cpp"),
    common.damage("llama.cpp stops at it"),
    required_keys,
    common.unknown_tensors("llama.cpp counts the tensors and stops", fatal=True),
    vocabulary,
)
DS4_RULES: tuple[Rule, ...] = (
    is_gguf("ds4", DS4_FIX),
    common.damage("ds4 stops at it"),
    required_keys,
    keys,
    dimensions,
    types,
)
