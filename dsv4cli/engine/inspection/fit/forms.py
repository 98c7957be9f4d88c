"""The forms in which a release can be downloaded: their formats and tensors, without any file; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from dsv4cli.engine.checkpoint.gguf.loading import loaded_specs
from dsv4cli.engine.checkpoint.gguf.naming import gguf_name
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors, loaded_tensors
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.fit.speed import BLOCKS, STORED, KernelRates

WIDE = Formats("f32", "f32", "f32")
# types of ds4's files, the most downloaded ones: of experts by the end of the GGUF name, F16 for names with one of
# these parts, F32 for vectors, Q8_0 for all other matrices
TWO_BIT = {"ffn_gate_exps.weight": "IQ2_XXS", "ffn_up_exps.weight": "IQ2_XXS", "ffn_down_exps.weight": "Q2_K"}
FOUR_BIT = dict.fromkeys(TWO_BIT, "Q4_K")
IN_HALVES = ("token_embd", "gate_inp", "hc_", "compressor", "indexer")
OTHERS = "Q8_0"


@dataclass(frozen=True)
class Form:
    """A form of a release.

    Attributes:
        name: for the table and the JSON document.
        source: where it can be downloaded; FILE stands for a GGUF file.
        config, formats, table: the model, the formats and the tensors that are loaded.
        kernels: how fast its kernels are on a GPU.
    """

    name: str
    source: str
    config: ModelConfig
    formats: Formats
    table: Mapping[str, TensorSpec]
    kernels: KernelRates = STORED


def forms_of(size: str, config: ModelConfig) -> list[Form]:
    """Return the forms of a release of this size, an empty list for any other model."""
    if size not in ("flash", "pro"):
        return []
    nvfp4, plain = Formats(experts="nvfp4", draft_experts="fp4"), config.without_drafter()
    nvidia = f"nvidia/DeepSeek-V4-{size.capitalize()}-NVFP4"
    return [
        Form("official", size, config, Formats(), loaded_tensors(config, Formats())),
        Form("NVFP4", nvidia, config, nvfp4, loaded_tensors(config, nvfp4)),
        Form("4-bit GGUF", "FILE.gguf", plain, WIDE, _gguf(plain, FOUR_BIT), kernels=BLOCKS),
        Form("2-bit GGUF", "FILE.gguf", plain, WIDE, _gguf(plain, TWO_BIT), kernels=BLOCKS),
    ]


def _gguf(config: ModelConfig, experts: Mapping[str, str]) -> dict[str, TensorSpec]:
    """Return the tensors that are loaded of a GGUF file with these types of experts."""
    shapes = {gguf_name(spec): spec.shape for spec in expected_tensors(config, WIDE).values()}
    return loaded_specs(config, {name: _type(name, shape, experts) for name, shape in shapes.items()})


def _type(name: str, shape: tuple[int, ...], experts: Mapping[str, str]) -> str:
    """Return the type of a tensor in a file of ds4, token ids apart."""
    if len(shape) == 1:
        return "F32"
    return experts.get(name.split(".", 2)[-1]) or ("F16" if any(part in name for part in IN_HALVES) else OTHERS)
