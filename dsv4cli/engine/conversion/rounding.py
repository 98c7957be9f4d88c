"""What a conversion will round, told before it writes: matrices whose values the target's format does not have."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from dsv4cli.engine.checkpoint.compare import Comparison
from dsv4cli.engine.checkpoint.gguf import blocks
from dsv4cli.engine.checkpoint.values import decode
from dsv4cli.engine.config.formats import is_quantised
from dsv4cli.engine.conversion.gguf.encode import encode_matrix
from dsv4cli.engine.conversion.job import Conversion
from dsv4cli.engine.conversion.recode import Recipe, Recoder
from dsv4cli.engine.conversion.sources import open_source
from dsv4cli.engine.conversion.verify import is_exact
from dsv4cli.kernels.formats import FP8_BLOCK

Progress = Callable[[int, int], None]


def rounded_matrices(
    conversion: Conversion, device: torch.device, workers: int, progress: Progress | None = None
) -> dict[str, float]:
    """The relative L2 error of each quantised matrix of this part that the target does not have, the worst first.

    It is taken from the matrix's first rows, a block of 128. progress is given matrices done and in all. Raises
    CheckpointError for a value that has no place in the target.
    """
    with open_source(conversion.source) as source:
        recoder = Recoder(source, conversion.specs, conversion.source_name, device)
        recipes = [recipe for name in conversion.own_copies if _may_round(recipe := recoder.recipe(name))]
        items = (item for file in conversion.own_files for batch in file.batches for item in batch)
        encodings = {item.matrix: item.encoding for item in items}
        errors = partial(_error, encodings)
        found = dict[str, float]()
        with ThreadPoolExecutor(workers) as pool:
            for number, (recipe, error) in enumerate(zip(recipes, pool.map(errors, recipes), strict=True), 1):
                if error:
                    found[recipe.matrix] = error
                if progress is not None:
                    progress(number, len(recipes))
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def _may_round(recipe: Recipe) -> bool:
    """Of what is not quantised it goes without saying."""
    form, target = recipe.form, recipe.target
    return form != "i64" and is_quantised(form) and not is_exact(form, target)


def _error(encodings: Mapping[str, str], recipe: Recipe) -> float:
    """Of the first rows of a matrix, as they will be read again. encodings: its tensor type in GGUF, '' elsewhere."""
    end = min(FP8_BLOCK, recipe.parts["weight"].shape[0])
    made, encoding, result = recipe.rows(0, end), encodings[recipe.matrix], Comparison()
    if encoding:
        read = blocks.values(encoding, encode_matrix(recipe.matrix, encoding, made))
    else:
        read = decode(recipe.target, made)
    result.add(recipe.source_values(0, end), read, 0)
    return result.relative_error
