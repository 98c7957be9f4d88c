"""Plans the files of a conversion to GGUF byte by byte: one, or several named as by gguf-split. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from dsv4cli.engine.checkpoint.gguf.header import gguf_header, tensor_bytes, tensor_places
from dsv4cli.engine.checkpoint.gguf.naming import GgufNaming, gguf_name
from dsv4cli.engine.checkpoint.layout import TensorSpec, matrices
from dsv4cli.engine.conversion.plan import FilePlan, Item, Slot, in_batches
from dsv4cli.kernels.ggml.types import row_bytes

# name of a stored tensor -> its type and shape
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def plan_gguf(
    specs: Mapping[str, TensorSpec], naming: GgufNaming, metadata: Mapping[str, Any], stem: str, max_file: int
) -> tuple[FilePlan, ...]:
    """Return the files of a table, named after `stem`. Each has at most max_file bytes of tensors, which are never cut.

    The first file has the metadata, the others only their number, as gguf-split writes them.
    """
    weights = {name: roles["weight"] for name, roles in matrices(specs.values()).items()}
    tensors: Tensors = {}
    owners: dict[str, dict[str, TensorSpec]] = {}
    for matrix, weight in weights.items():
        name = gguf_name(weight)
        tensors[name] = naming.types[name], naming.shape(weight)
        owners.setdefault(name, {})[matrix] = weight
    groups = list(_by_size(tensors, max_file))
    plans = []
    for number, group in enumerate(groups):
        said = dict(metadata) if number == 0 else {}
        name = f"{stem}.gguf"
        if len(groups) > 1:
            said |= {"split.no": number, "split.count": len(groups), "split.tensors.count": len(tensors)}
            name = f"{stem}-{number + 1:05}-of-{len(groups):05}.gguf"
        plans.append(_plan(name, said, group, owners, naming))
    return tuple(plans)


def _by_size(tensors: Tensors, max_file: int) -> Iterator[Tensors]:
    group: Tensors = {}
    size = 0
    for name, (kind, shape) in tensors.items():
        nbytes = tensor_bytes(kind, shape)
        if group and size + nbytes > max_file:
            yield group
            group, size = {}, 0
        group[name] = kind, shape
        size += nbytes
    yield group


def _plan(
    name: str,
    metadata: Mapping[str, Any],
    tensors: Tensors,
    owners: Mapping[str, Mapping[str, TensorSpec]],
    naming: GgufNaming,
) -> FilePlan:
    """Return one file. owners: for each stored tensor, the weights that it holds, by matrix."""
    header = gguf_header(metadata, tensors)
    places = [(len(header) + begin, len(header) + end) for begin, end in tensor_places(tensors)]
    items = [
        _item(matrix, weight, naming, begin)
        for tensor, (begin, _) in zip(tensors, places, strict=True)
        for matrix, weight in owners[tensor].items()
    ]
    # a matrix begins right after the previous one, or after padding
    ends = [len(header), *(end for _, end in places)]
    gaps = [(end, begin) for end, (begin, _) in zip(ends, places, strict=False) if end < begin]
    work = in_batches(sorted(items, key=lambda item: item.slots[0].offset))
    return FilePlan(name, header, ends[-1], tuple(tensors), tuple(work), tuple(gaps))


def _item(matrix: str, weight: TensorSpec, naming: GgufNaming, begin: int) -> Item:
    (location,) = naming.locations(weight)
    rows = weight.shape[0]
    width = row_bytes(location.dtype, location.shape[-1] if len(weight.shape) > 1 else 1)
    slot = Slot("weight", location, begin + naming.begin(weight), 1)
    return Item(matrix, (0, rows), (slot,), rows * width, location.dtype)
