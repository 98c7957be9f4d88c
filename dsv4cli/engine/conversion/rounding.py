"""Predicts what a conversion will round: matrices with values that the target's format cannot hold."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from dsv4cli.engine.checkpoint.compare import Comparison
from dsv4cli.engine.checkpoint.gguf import blocks
from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.values import decode
from dsv4cli.engine.config.formats import is_quantised
from dsv4cli.engine.conversion.gguf.encode import encode_matrix
from dsv4cli.engine.conversion.job import Conversion
from dsv4cli.engine.conversion.recode import Recipe, Recoder
from dsv4cli.engine.conversion.sources import open_source
from dsv4cli.engine.conversion.verify import is_exact
from dsv4cli.engine.system.threads import Progress
from dsv4cli.kernels.formats import FP8_BLOCK


def rounded_matrices(
    conversion: Conversion, device: torch.device, workers: int, progress: Progress | None = None
) -> dict[str, float]:
    """Return the relative L2 error of each quantized matrix of this part that the target rounds, largest first.

    The error is measured on each matrix's first block of 128 rows. `progress` is called with matrices done and in
    total.
    Raises CheckpointError for a value that the target cannot hold.
    """
    with open_source(conversion.source) as source:
        recoder = Recoder(source, conversion.specs, conversion.source_name, device)
        items = (item for file in conversion.own_files for batch in file.batches for item in batch)
        encodings = {item.matrix: item.encoding for item in items}
        every = map(recoder.recipe, conversion.own_copies)
        recipes = [recipe for recipe in every if _may_round(recipe, encodings[recipe.matrix])]
        errors = partial(_error, encodings)
        found = dict[str, float]()
        with ThreadPoolExecutor(workers) as pool:
            for number, (recipe, error) in enumerate(zip(recipes, pool.map(errors, recipes), strict=True), 1):
                if error:
                    found[recipe.matrix] = error
                if progress is not None:
                    progress(number, len(recipes))
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def _may_round(recipe: Recipe, encoding: str) -> bool:
    """Return whether to report rounding of a matrix. For matrices that are not quantized it is expected.

    The blocks of a GGUF file are read as fp32, in which they are exact.
    """
    form, target = recipe.form, recipe.target
    if isinstance(recipe.recoder.source.identity, GgufIdentity):
        return form != "i64" and (encoding == "Q8_0" or not is_exact(form, target))
    return form != "i64" and is_quantised(form) and not is_exact(form, target)


def _error(encodings: Mapping[str, str], recipe: Recipe) -> float:
    """Return the error of a matrix's first rows. encodings: its tensor type in GGUF, '' elsewhere."""
    end = min(FP8_BLOCK, recipe.parts["weight"].shape[0])
    made, encoding, result = recipe.rows(0, end), encodings[recipe.matrix], Comparison()
    if encoding:
        read = blocks.values(encoding, encode_matrix(recipe.matrix, encoding, made))
    else:
        read = decode(recipe.target, made)
    # a vector is compared as a column
    source, read = (np.ascontiguousarray(part).reshape(end, -1) for part in (recipe.source_values(0, end), read))
    result.add(source, read, 0)
    return result.relative_error
