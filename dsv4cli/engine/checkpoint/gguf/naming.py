"""GGUF's naming scheme: llama.cpp's names and tensor types, with stacked experts; no torch.

Source: llama.cpp, src/llama-arch.cpp and src/models/deepseek4.cpp. A drafter has ds4's names, as drafter.py gives them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.naming import Location
from dsv4cli.engine.config.formats import FormatName
from dsv4cli.kernels.ggml.types import TYPES, row_bytes

TOP = {
    "embed.weight": "token_embd.weight",
    "head.weight": "output.weight",
    "norm.weight": "output_norm.weight",
    "hc_head_fn": "output_hc_fn.weight",
    "hc_head_base": "output_hc_base.weight",
    "hc_head_scale": "output_hc_scale.weight",
}
# names within a layer, after `layers.N.` and `blk.N.`
LAYER = {
    "hc_attn_fn": "hc_attn_fn.weight",
    "hc_attn_base": "hc_attn_base.weight",
    "hc_attn_scale": "hc_attn_scale.weight",
    "hc_ffn_fn": "hc_ffn_fn.weight",
    "hc_ffn_base": "hc_ffn_base.weight",
    "hc_ffn_scale": "hc_ffn_scale.weight",
    "attn_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "attn.attn_sink": "attn_sinks.weight",
    "attn.wq_a": "attn_q_a.weight",
    "attn.q_norm.weight": "attn_q_a_norm.weight",
    "attn.wq_b": "attn_q_b.weight",
    "attn.wkv": "attn_kv.weight",
    "attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "attn.wo_a": "attn_output_a.weight",
    "attn.wo_b": "attn_output_b.weight",
    "attn.compressor.ape": "attn_compressor_ape.weight",
    "attn.compressor.wkv.weight": "attn_compressor_kv.weight",
    "attn.compressor.wgate.weight": "attn_compressor_gate.weight",
    "attn.compressor.norm.weight": "attn_compressor_norm.weight",
    "attn.indexer.wq_b": "indexer.attn_q_b.weight",
    "attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
    "attn.indexer.compressor.wkv.weight": "indexer_compressor_kv.weight",
    "attn.indexer.compressor.wgate.weight": "indexer_compressor_gate.weight",
    "attn.indexer.compressor.norm.weight": "indexer_compressor_norm.weight",
    "ffn.gate.weight": "ffn_gate_inp.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "ffn.shared_experts.w1": "ffn_gate_shexp.weight",
    "ffn.shared_experts.w2": "ffn_down_shexp.weight",
    "ffn.shared_experts.w3": "ffn_up_shexp.weight",
    "ffn.experts.w1": "ffn_gate_exps.weight",
    "ffn.experts.w2": "ffn_down_exps.weight",
    "ffn.experts.w3": "ffn_up_exps.weight",
}
# names of a drafter in addition to those of a layer, after `mtp.N.`
DRAFTER = {
    "e_proj": "e_proj.weight",
    "h_proj": "h_proj.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "norm.weight": "norm.weight",
    "hc_head_fn": "hc_head_fn.weight",
    "hc_head_base": "hc_head_base.weight",
    "hc_head_scale": "hc_head_scale.weight",
}
# tensor type in which a matrix of a format of the table is written, and a plain tensor of a dtype where it has another
MATRIX_TYPES: Mapping[FormatName, str] = {"fp4": "MXFP4", "bf16": "BF16", "f32": "Q8_0"}
PLAIN_TYPES = {"I64": "I32"}
_OF_DRAFTER = LAYER | DRAFTER
EXPERT = re.compile(r"\.experts\.\d+\.")
IN_LAYER = re.compile(r"(layers|mtp)\.(\d+)\.(.*)")


def gguf_name(spec: TensorSpec) -> str:
    """Return llama.cpp's name of the tensor that contains one of the table: experts are stacked, scales included."""
    name = EXPERT.sub(".experts.", spec.matrix)
    match = IN_LAYER.fullmatch(name)
    if match is None:
        return TOP[name]
    return f"blk.{match[2]}.{LAYER[match[3]]}" if match[1] == "layers" else f"mtp.{match[2]}.{_OF_DRAFTER[match[3]]}"


@dataclass(frozen=True)
class GgufNaming:
    """The naming of a GGUF file. experts: number per layer. types: tensor type by name."""

    experts: int
    types: Mapping[str, str]

    def locations(self, spec: TensorSpec) -> tuple[Location, ...]:
        """Return where the tensor is stored: itself, or the stack that contains the matrix and its scales.

        The type is the one in the tensor table if the file's type is unknown.
        """
        name = gguf_name(spec)
        shape = self.shape(spec)
        begin = 0 if spec.expert is None else spec.expert * prod(shape[1:])
        return (Location(name, self.types.get(name, spec.dtype), shape, begin),)

    def shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """Return the shape of the stored tensor in values; the rows of a scale are those of its weight."""
        matrix = (spec.shape[0], spec.columns) if spec.columns else spec.shape
        return matrix if spec.expert is None else (self.experts, *matrix)

    def begin(self, spec: TensorSpec) -> int:
        """Return the byte offset of this matrix in the stored tensor."""
        if spec.expert is None:
            return 0
        *_, rows, columns = self.shape(spec)
        return spec.expert * rows * row_bytes(self.types[gguf_name(spec)], columns)


def written_types(specs: Iterable[TensorSpec]) -> dict[str, str]:
    """Return the GGUF type of each stored tensor when this table is written.

    FP4 becomes MXFP4 (another nibble order), a matrix in fp32 is rounded to Q8_0, token ids are stored in 32 bits.
    """
    return {gguf_name(spec): _written(spec) for spec in specs if not spec.is_scale}


def _written(spec: TensorSpec) -> str:
    if spec.form is None:
        return PLAIN_TYPES.get(spec.dtype, spec.dtype)
    found = MATRIX_TYPES[spec.form]
    # a row of no whole number of blocks stays as it is
    return spec.dtype if found == "Q8_0" and spec.columns % TYPES[found].values else found
