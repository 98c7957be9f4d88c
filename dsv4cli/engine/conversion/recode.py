"""Converts a matrix from the source's storage format to the target's, a few rows at a time."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dsv4cli.engine.checkpoint.layout import TensorSpec, matrices
from dsv4cli.engine.checkpoint.remedies import look
from dsv4cli.engine.checkpoint.stored import Raw, StoredModel
from dsv4cli.engine.checkpoint.values import Form, Values, decode, form_of, scale_rows
from dsv4cli.engine.config.formats import Role
from dsv4cli.engine.weights.fill import TORCH_DTYPES, damaged_scale, no_scales
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels import recode
from dsv4cli.kernels.block_scale import dequantise
from dsv4cli.kernels.formats import FP8_BLOCK

Tensors = dict[Role, torch.Tensor]
# no calibration: with a per-tensor activation scale of 1, activations up to 448 * 6 are representable
INPUT_SCALE = 1.0


@dataclass(frozen=True)
class Recoder:
    """Converts the matrices of a source to the formats of a tensor table.

    Attributes:
        source_name: returns the source's name of a matrix in the table.
    """

    source: StoredModel
    specs: Mapping[str, TensorSpec]
    source_name: Callable[[str], str]
    device: torch.device

    @cached_property
    def _targets(self) -> dict[str, dict[Role, TensorSpec]]:
        return matrices(self.specs.values())

    @cached_property
    def _sources(self) -> dict[str, dict[Role, TensorSpec]]:
        return self.source.matrices()

    def recipe(self, matrix: str) -> "Recipe":
        """Return the recipe for one matrix of the target."""
        return Recipe(self, matrix, self._sources[self.source_name(matrix)], self._targets[matrix])

    def partner(self, matrix: str) -> "Recipe":
        """Return the recipe of the matrix that shares a per-tensor scale: kernels run w1 and w3 of an expert as one."""
        stem, _, name = matrix.rpartition(".")
        return self.recipe(f"{stem}.{ {'w1': 'w3', 'w3': 'w1'}.get(name, name) }")


@dataclass(frozen=True)
class Recipe:
    """Converts one matrix. `rows` returns the roles in `roles`."""

    recoder: Recoder
    matrix: str
    parts: Mapping[Role, TensorSpec]
    roles: Mapping[Role, TensorSpec]

    @property
    def form(self) -> Form:
        """The storage format in the source."""
        return form_of(self.parts["weight"])

    @property
    def target(self) -> Form:
        """The storage format in the target."""
        return form_of(self.roles["weight"])

    @property
    def shares(self) -> bool:
        """Whether the rows need a value computed from the whole matrix. The recipe caches that value."""
        return self.target == "nvfp4"

    def rows(self, begin: int, end: int) -> dict[Role, Raw]:
        """Return the target's stored parts for rows [begin, end) of the weight, per-tensor scales included.

        Raises CheckpointError, naming tensor, row and column, for a value that the target cannot hold.
        """
        first = begin - begin % FP8_BLOCK
        arrays = self._read(slice(first, end))
        if self.form == self.target:
            found = arrays
            if "input_scale" in self.roles:
                found.setdefault("input_scale", np.array(INPUT_SCALE, np.float32))
        else:
            found = {role: numpy_bits(tensor) for role, tensor in self._recode(self._tensors(arrays), first).items()}
            self._check_scales(arrays)
        if begin == first:
            return found
        # only formats with one scale per row are split inside a block
        return {role: array[begin - first :] if array.ndim else array for role, array in found.items()}

    def source_values(self, begin: int, end: int) -> Values:
        """Return the values of rows of the source. `begin` must be a multiple of 128."""
        return decode(self.form, self._read(slice(begin, end)))

    def _read(self, rows: slice) -> dict[Role, Raw]:
        source, form = self.recoder.source, self.form
        return {
            role: source.read(spec, scale_rows(form, rows) if spec.is_scale else rows)
            for role, spec in self.parts.items()
        }

    def _check_scales(self, arrays: Mapping[Role, Raw]) -> None:
        """Raise CheckpointError for scales that loading would reject: another format would hide them."""
        for role, array in arrays.items():
            spec = self.parts[role]
            if role not in ("weight", "input_scale") and no_scales(spec.dtype, array.reshape(-1).view(np.uint8)).any():
                raise damaged_scale(spec)

    def _tensors(self, arrays: Mapping[Role, Raw]) -> Tensors:
        return {role: self._tensor(array, self.parts[role].dtype) for role, array in arrays.items()}

    def _tensor(self, array: Raw, dtype: str) -> torch.Tensor:
        bits = array.view(np.int16) if array.dtype == np.uint16 else array
        tensor = torch.from_numpy(bits).to(self.recoder.device)
        return tensor.view(TORCH_DTYPES[dtype])

    def _recode(self, tensors: Tensors, row0: int) -> Tensors:
        shared = self._shared_scale if self.shares else None
        with self._refusing(row0):
            return change(self.form, self.target, tensors, shared)

    @contextmanager
    def _refusing(self, row0: int) -> Iterator[None]:
        """Name the tensor in the error for a value that the target cannot hold.

        Args:
            row0: the tensor's row that the block counts as row 0.
        """
        try:
            yield
        except recode.NotRepresentable as problem:
            folder, name = self.recoder.source.identity.checkpoint.folder, self.parts["weight"].name
            where = f"row {row0 + problem.row}, column {problem.column}"
            remedy = "--to bf16 can hold every value, --to official keeps the format"
            if "NaN" in problem.reason:
                remedy = f"{look(folder, '--values')} shows how much is damaged; download it again"
            raise CheckpointError(
                f"{folder}: {name} cannot become {self.target} without loss: {problem.reason} at {where}", remedy
            ) from None

    @cached_property
    def _shared_scale(self) -> "int | torch.Tensor":
        """The source of the NVFP4 per-tensor scale.

        If the values are exact in FP4, the highest exponent of the FP4 scales; otherwise the scale itself.
        """
        recipes = {recipe.matrix: recipe for recipe in (self, self.recoder.partner(self.matrix))}.values()
        whole = [recipe._tensors(recipe._read(slice(None))) for recipe in recipes]
        pairs = [pair for recipe, tensors in zip(recipes, whole, strict=True) if (pair := recipe._as_fp4(tensors))]
        if len(pairs) == len(whole):
            k_max = recode.nvfp4_exponent(pairs)
            if self.form == "fp4" or all(_fits_nvfp4(pair, k_max) for pair in pairs):
                return k_max
        amax = torch.stack([values_of(self.form, tensors).abs().amax() for tensors in whole]).amax()
        return recode.nvfp4_scale_2(amax)

    def _as_fp4(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return an FP4 weight and scale with exactly the values of the whole matrix, or None if FP4 would round."""
        with self._refusing(0):
            if self.form == "fp4":
                pair = tensors["weight"], tensors["scale"]
                recode.nvfp4_exponent([pair])  # reject NaN here, where the tensor is known
                return pair
            values = values_of(self.form, tensors)
            pair = recode.to_fp4(values)
            return pair if torch.equal(recode.widen(*pair).float(), values.float()) else None


def _fits_nvfp4(pair: tuple[torch.Tensor, torch.Tensor], k_max: int) -> bool:
    try:
        recode.fp4_to_nvfp4(*pair, k_max)
    except recode.NotRepresentable:
        return False
    return True


def change(form: str, target: str, tensors: Tensors, shared: "int | torch.Tensor | None") -> Tensors:
    """Convert the parts of a matrix, or some of its rows, to another storage format; exact if the target allows it.

    Args:
        shared: for nvfp4, k_max if all values are exact in FP4, otherwise scale_2.

    Raises NotRepresentable if converting fp4 to fp8 or nvfp4 would round, and for NaN and infinity.
    """
    form, tensors = _with_e8m0(form, tensors)
    if form == target:
        return tensors
    if target == "fp8_f32":
        coded = change(form, "fp8", tensors, shared)
        return {**coded, "scale": coded["scale"].float()}
    if form == "fp4" and target == "fp8":
        return _scaled(recode.fp4_to_fp8(tensors["weight"], tensors["scale"]))
    if form == "fp4" and target == "nvfp4":
        assert isinstance(shared, int)
        return _nvfp4(*recode.fp4_to_nvfp4(tensors["weight"], tensors["scale"], shared))
    return _rounded(target, values_of(form, tensors), shared)


def _with_e8m0(form: str, tensors: Tensors) -> tuple[str, Tensors]:
    """Replace the scales by e8m0 ones if they are equal: NVFP4 becomes FP4, FP8 with fp32 powers of two becomes FP8."""
    if form == "nvfp4":
        packed = recode.nvfp4_to_fp4(tensors["weight"], tensors["weight_scale"], tensors["weight_scale_2"])
        return (form, tensors) if packed is None else ("fp4", _scaled(packed))
    if form == "fp8_f32" and recode.are_e8m0(tensors["scale"]):
        return "fp8", _scaled((tensors["weight"], recode.to_e8m0(tensors["scale"])))
    return form, tensors


def _rounded(target: str, values: torch.Tensor, shared: "int | torch.Tensor | None") -> Tensors:
    """Round values to the nearest in a format."""
    if target == "nvfp4" and isinstance(shared, int):
        return _nvfp4(*recode.fp4_to_nvfp4(*recode.to_fp4(values), shared))
    if target == "nvfp4":
        assert isinstance(shared, torch.Tensor)
        return _nvfp4(*recode.to_nvfp4(values, shared), shared)
    if target == "fp4":
        return _scaled(recode.to_fp4(values))
    if target == "fp8":
        return _scaled(recode.to_fp8(values))
    return {"weight": values.to({"bf16": torch.bfloat16, "f32": torch.float32}[target])}


def values_of(form: str, tensors: Tensors) -> torch.Tensor:
    """Return the values of a matrix, in bf16 if that is exact, otherwise in fp32."""
    if form == "nvfp4":
        return recode.nvfp4_values(tensors["weight"], tensors["weight_scale"], tensors["weight_scale_2"])
    if form == "fp8_f32":
        return dequantise(tensors["weight"], tensors["scale"])
    return recode.widen(tensors["weight"], tensors["scale"]) if "scale" in tensors else tensors["weight"]


def _scaled(parts: tuple[torch.Tensor, torch.Tensor]) -> Tensors:
    return {"weight": parts[0], "scale": parts[1]}


def _nvfp4(weight: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> Tensors:
    inputs = torch.tensor(INPUT_SCALE, dtype=torch.float32, device="cpu")
    return {"weight": weight, "weight_scale": scale, "weight_scale_2": scale_2, "input_scale": inputs}


def numpy_bits(tensor: torch.Tensor) -> Raw:
    """Return the bits of a tensor in the form that `StoredModel.read` returns."""
    tensor = tensor.cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return (tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor).numpy()
