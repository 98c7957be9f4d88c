"""How fast a model of random GGUF blocks decodes and prefills on this machine's GPU: the numbers of
docs/internals/kernels.md, "GGUF blocks".

python -m tests.benchmarks.gguf_speed --batch 1 --batch 16 --prefill 8192
python -m tests.benchmarks.gguf_speed --types Q4_K,Q4_K,Q8_0 --model random:flash,experts=128

Every tensor has the type that it has in a 2-bit file of ds4 or unsloth, except those that `--types` names.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from functools import cache
from time import perf_counter

import torch

from dsv4cli.engine.checkpoint.gguf.loading import loaded_specs
from dsv4cli.engine.checkpoint.gguf.naming import gguf_name
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.world import SINGLE
from dsv4cli.engine.weights.fill import fill, made
from dsv4cli.engine.weights.random_weights import random_tensors
from dsv4cli.kernels.ggml import types as ggml
from tests.benchmarks.decode_speed import decode, prefill
from tests.support.ggml_blocks import random_rows

# types by a pattern of the name, the first that matches, of tensors that are not of the type of most matrices
RECIPES = {
    "ds4": {r"token_embd|gate_inp|hc_|compressor|indexer": "F16"},
    "unsloth": {r"gate_inp": "BF16", r"hc_|_ape|indexer\.proj": "F32"},
}
# rows of blocks that each matrix repeats; tokens of a chunk of a prompt
ROWS, CHUNK = 64, 8192


def file_types(config: ModelConfig, types: list[str], recipe: dict[str, str]) -> dict[str, str]:
    """The types of a file's tensors by name, given those of w1 and w3 of experts, of w2, and of other matrices."""
    up, down, others = types
    kinds = {r"ffn_down_exps": down, r"_exps": up} | recipe | {r"": others}
    found: dict[str, str] = {}
    for spec in expected_tensors(config, Formats("f32", "f32", "f32")).values():
        name = gguf_name(spec)
        kind = next(kind for pattern, kind in kinds.items() if re.search(pattern, name))
        found[name] = kind if len(spec.shape) > 1 else "F32"
    return found


@cache
def rows_of(kind: str, nbytes: int, device: torch.device) -> torch.Tensor:
    """Random rows whose values give rows of about unit length."""
    blocks = nbytes // ggml.TYPES[kind].nbytes
    values = ggml.decode(kind, random_rows(kind, ROWS, blocks, 1, 1.0))
    scale = 1 / (float(values.std()) * values.shape[1] ** 0.5)
    return torch.from_numpy(random_rows(kind, ROWS, blocks, 1, scale)).to(device)


def tensors(
    specs: dict[str, TensorSpec], config: ModelConfig, device: torch.device
) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """All tensors, one at a time."""
    for spec in specs.values():
        if spec.dtype in ggml.BLOCK_DTYPES:
            rows = rows_of(ggml.BLOCK_DTYPES[spec.dtype], spec.shape[1], device)
            yield spec, rows.repeat(-(-spec.shape[0] // ROWS), 1)[: spec.shape[0]]
        else:
            yield from random_tensors([spec], 0, config.n_routed_experts, device)


def main() -> None:
    """Fills once, then measures everything that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:flash")
    parser.add_argument("--types", default="IQ2_XXS,Q2_K,Q8_0", help="of w1 and w3 of experts, of w2, of all others")
    parser.add_argument("--recipe", choices=RECIPES, default="ds4", help="the publisher of the file's other types")
    parser.add_argument("--context", type=int, default=4096, help="tokens before the step")
    parser.add_argument("--batch", type=int, action="append", help="sequences; 1 if absent")
    parser.add_argument("--prefill", type=int, action="append", default=[], help="tokens of a prompt")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA GPU to measure")
    device, begin = torch.device("cuda"), perf_counter()
    config = resolve_model(asked.model).identity.config.without_drafter()
    specs = loaded_specs(config, file_types(config, asked.types.split(","), RECIPES[asked.recipe]))
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        model = Transformer(config, Numerics.reference(), SINGLE)
        fill(model, specs, made(tensors(specs, config, device)), device=device, world=SINGLE)
        size = sum(parameter.nbytes for parameter in model.parameters())
        what = f"{asked.model} in {asked.types}, {asked.recipe}"
        print(f"{what}: {size / 1e9:.1f} GB in {perf_counter() - begin:.1f} s", flush=True)
        step = argparse.Namespace(temperature=1.0, trace=None, wrong=False)
        for batch in asked.batch or [1]:
            decode(model.eval(), SINGLE, device, (asked.context, batch), 0, step)
        for tokens in asked.prefill:
            prefill(model, SINGLE, device, tokens, min(tokens, CHUNK))


if __name__ == "__main__":
    main()
