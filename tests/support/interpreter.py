"""Triton's interpreter with the arithmetic of a GPU: right roundings, wide products, and no zeros by luck.

Without this it cuts fp32 to bf16 instead of rounding, takes the bits of bf16 for integers, and loses carries in FP8.
`tests/support/every_test.py` switches the interpreter itself on, before Triton is imported, where there is no GPU.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

Method = Callable[..., Any]


@cache
def correct() -> None:
    """Puts the arithmetic below in place of the interpreter's, for the rest of the process."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    for name, wrap in (
        ("cast_impl", rounding_cast),
        ("create_dot", wide_dot),
        ("binary_op", wide_operation),
        ("unary_op", wide_operation),
        ("create_masked_load", poisoned_load),
        ("create_masked_load", bounded(0, 1)),
        ("create_masked_store", bounded(0, 2)),
        ("create_atomic_rmw", bounded(1, 3)),
    ):
        setattr(builder, name, wrap(getattr(builder, name)))
    executor._init_args_hst = remembering_places(executor._init_args_hst)
    builder.create_fp_to_fp = conversion
    interpreter._patch_lang_tensor = with_index(interpreter._patch_lang_tensor)
    launched: set[str] = set()
    interpreter._patch_lang = once(interpreter._patch_lang, launched)
    executor.__call__ = quiet(executor.__call__, launched)
    interpreter._patch_builtin = patch_known_members
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype)
    core = interpreter.tl.core
    core.block_type.__init__ = like_the_first_block(core.block_type.__init__)
    core.tensor.__init__ = like_the_first_tensor(core.tensor.__init__)
    core.dtype.__eq__ = by_name(core.dtype.__eq__)
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = as_before(semantic.broadcast_impl_value)
    semantic.computation_type_impl = once_a_pair(semantic.computation_type_impl)
    semantic.binary_op_type_checking_impl = unless_known(semantic.binary_op_type_checking_impl)
    running = interpreter.interpreter_builder
    # it computes everything anew in 64 bits, and without `debug` drops what it finds
    running.options = dataclasses.replace(running.options, sanitize_overflow=False)


def rounding_cast(cast: Method) -> Method:
    def call(self: Any, source: Any, target: Any) -> Any:
        return narrow(cast(self, wide(source), wide_type(target.scalar)), target.scalar)

    return call


def conversion(self: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    from triton.runtime import interpreter

    assert rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE), "only rounding to nearest is simulated"
    return self.cast_impl(source, target)


def wide_dot(dot: Method) -> Method:
    def call(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        a, b = wide(a), wide(b)
        if a.data.dtype != np.float32:
            return dot(self, a, b, d, *precision)
        product = torch.from_numpy(np.array(a.data)) @ torch.from_numpy(np.array(b.data))
        return dataclasses.replace(d, data=d.data + product.numpy().astype(d.data.dtype))

    return call


def wide_operation(operation: Method) -> Method:
    """The same on fp32 and rounded to the operands' dtype; a comparison's result is boolean.

    A number's comparison had the dtype of the numbers, in Triton itself, and Triton 3.9 takes such a mask no longer.
    """
    import triton.language as tl

    def call(self: Any, first: Any, *rest: Any) -> Any:
        if narrow_dtype(first.dtype) is None:  # the operands have one dtype
            result = operation(self, first, *rest)
        else:
            *others, op = rest
            result = operation(self, wide(first), *map(wide, others), op)
        if result.data.dtype == np.bool_:
            result.dtype = tl.int1
            return result
        return narrow(result, first.dtype.scalar)

    return call


def poisoned_load(load: Method) -> Method:
    """A load without `other` gives, where it is masked, whatever a test cannot overlook."""
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    def call(self: Any, pointers: Any, mask: Any, other: Any, *hints: Any, **named: Any) -> Any:
        if other is None:
            dtype = pointers.get_element_ty()
            stored = _get_np_dtype(dtype)
            # NaN in every float format; an index far out of range; true
            byte = 1 if dtype.is_int1() else 0xFF if dtype.is_floating() else 0x7F
            values = np.full((*pointers.data.shape, stored.itemsize), byte, np.uint8).view(stored)[..., 0]
            other = TensorHandle(values, dtype)
        return load(self, pointers, mask, other, *hints, **named)

    return call


# where the memory of a launch's tensors begins and ends, in ascending order
_begins, _ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)


def remembering_places(init: Method) -> Method:
    """Note the memory of all tensors that a kernel is given."""

    def call(self: Any, arguments: Any, named: Any) -> Any:
        global _begins, _ends
        given = init(self, arguments, named)
        places = {
            (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            for storage in storages((*given[0], *given[1].values()))
        }
        both = np.array(sorted(places), np.uint64).reshape(-1, 2)
        _begins, _ends = both[:, 0], both[:, 1]
        return given

    return call


def storages(given: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the memory of tensors, also those in tuples and descriptors."""
    if isinstance(given, torch.Tensor):
        yield given.untyped_storage()
    elif isinstance(given, tuple):
        for one in given:
            yield from storages(one)
    elif hasattr(given, "base"):
        yield from storages(given.base)


def bounded(pointers: int, mask: int) -> Callable[[Method], Method]:
    """Fail where a kernel loads or stores beyond its tensors: a GPU may have mapped no memory there.

    pointers, mask: which arguments they are.
    """

    def wrap(access: Method) -> Method:
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            given, inside = arguments[pointers], arguments[mask].data
            places = given.data[np.broadcast_to(inside, given.data.shape)]
            if places.size:
                last = np.searchsorted(_begins, places, side="right") - 1
                size = np.uint64(given.get_element_ty().primitive_bitwidth + 7 >> 3)
                known = (last >= 0) & (places + size <= _ends[last])
                assert known.all(), f"{(~known).sum()} of {places.size} places are beyond the tensors"
            return access(self, *arguments, **named)

        return call

    return wrap


def quiet(launch: Method, launched: set[str]) -> Method:
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        launched.clear()
        with np.errstate(all="ignore"):  # infinities and NaN are results
            return launch(self, *arguments, **options)

    return call


def once(patch: Method, launched: set[str]) -> Method:
    """Each module of the language made interpretable once a launch, not at every call of a device function: 1 ms."""
    from triton.runtime.interpreter import _LangPatchScope

    @cache
    def language(function: Any) -> frozenset[str]:
        found = {getattr(value, "__name__", "") for value in function.__globals__.values()}
        return frozenset(found & {"triton.language", "triton.language.core"})

    def call(function: Any) -> Any:
        if language(function) <= launched:
            return _LangPatchScope()
        launched.update(language(function))
        return patch(function)

    return call


def with_index(patch: Method) -> Method:
    def call(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # a range over a runtime number

    return call


def remembered(numpy_dtype: Method) -> Method:
    """It makes a table of all types for each tensor."""
    known: dict[str, Any] = {}

    def call(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = numpy_dtype(dtype)
        return known[name]

    return call


def patch_known_members(owner: Any, builder: Any, scope: Any) -> None:
    """Triton's goes through everything in the language at each launch to find what to patch: 1 ms."""
    for name, member, interpreted in _builtins(owner):
        if getattr(owner, name) is member:
            scope.set_attr(owner, name, interpreted)


@cache
def _builtins(owner: Any) -> list[tuple[str, Method, Method]]:
    """Those of a module or class, by name: each as it is, and as kernels call it."""
    from triton.runtime.interpreter import interpreter_semantic, tl

    def interpreted(member: Method) -> Method:
        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter_semantic
            return member(*arguments, **named)

        return call

    found = inspect.getmembers(owner)
    return [(name, member, interpreted(member)) for name, member in found if tl.core.is_builtin(member)]


def like_the_first_block(init: Method) -> Method:
    """Every operation makes the type of its result, and most of the time goes into that."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def call(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in known:
            init(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key], element_ty=element_ty)

    return call


def like_the_first_tensor(init: Method) -> Method:
    """The same for what a tensor knows of its shape."""
    known: dict[str, dict[str, Any]] = {}

    def call(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            init(self, handle, type)
            known[type.name] = dict(vars(self))
        vars(self).update(known[type.name], handle=handle, type=type, dtype=type.scalar)

    return call


def by_name(equal: Method) -> Method:
    """Types of numbers are compared at every operation."""

    def call(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is type(self) else equal(self, other)

    return call


def as_before(broadcast: Method) -> Method:
    """Which of two tensors is spread to which shape follows from their types."""
    known: dict[tuple[str, str], tuple[Any, Any]] = {}

    def call(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        key = left.type.name, right.type.name
        if key not in known:
            results = broadcast(self, left, right)
            known[key] = tuple(
                None if result is given else (result.handle.data.shape, result.type)
                for result, given in zip(results, (left, right), strict=True)
            )
            return results
        first, second = known[key]
        return spread(left, *first) if first else left, spread(right, *second) if second else right

    return call


def spread(tensor: Any, shape: tuple[int, ...], spread_type: Any) -> Any:
    handle = tensor.handle
    values = np.empty(shape, handle.data.dtype)
    values[...] = handle.data  # half the time of np.broadcast_to
    return type(tensor)(type(handle)(values, handle.dtype.scalar), spread_type)


def unless_known(check: Method) -> Method:
    """Skip casts and broadcasts for two tensors of the type in which the operation computes, and reuse the tensor that
    was made of a number for an operand of the same type."""
    import triton.language as tl

    known: dict[tuple[Any, ...], Any] = {}

    def call(self: Any, left: Any, right: Any, *allowed: Any, **named: Any) -> tuple[Any, Any]:
        first, second = type(left) is tl.tensor, type(right) is tl.tensor
        if first and second:
            if left.type.name == right.type.name and left.dtype.name in COMPUTED:
                return left, right
            return check(self, left, right, *allowed, **named)
        number, beside = (right, left) if first else (left, right)
        if type(number) not in (int, float) or not (first or second) or number != number:
            return check(self, left, right, *allowed, **named)
        # zero and its negative are equal
        key = beside.type.name, first, type(number), number or repr(number), allowed, *named.items()
        if key not in known:
            left, right = check(self, left, right, *allowed, **named)
            if (left if first else right) is not beside:  # it was cast
                return left, right
            known[key] = right if first else left
            known[key].handle.data.flags.writeable = False
        return (left, known[key]) if first else (known[key], right)

    return call


def once_a_pair(computation_type: Method) -> Method:
    """The type that an operation computes in follows from the types of its operands."""
    known: dict[tuple[Any, ...], Any] = {}

    def call(self: Any, left: Any, left_is_number: bool, right: Any, right_is_number: bool, divides: bool) -> Any:
        key = left.name, left_is_number, right.name, right_is_number, divides
        if key not in known:
            known[key] = computation_type(self, left, left_is_number, right, right_is_number, divides)
        return known[key]

    return call


COMPUTED = {"fp32", "int32", "int64", "int1"}
NARROW = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def narrow_dtype(dtype: Any) -> torch.dtype | None:
    """The torch dtype of a float format that numpy does not have; None for every other type."""
    return NARROW.get(dtype.scalar.name)


def wide_type(dtype: Any) -> Any:
    import triton.language as tl

    return tl.float32 if narrow_dtype(dtype) else dtype


def wide(handle: Any) -> Any:
    """bf16 and FP8 as fp32, which has all their values; any other handle as it is."""
    dtype = narrow_dtype(handle.dtype)
    if dtype is None:
        return handle
    values = torch.from_numpy(np.array(handle.data)).view(dtype).float()
    return type(handle)(values.numpy(), wide_type(handle.dtype), handle.attr)  # five times as fast as replace()


def narrow(handle: Any, target: Any) -> Any:
    """Values rounded to nearest even; FP8 is clamped to its largest finite value, as NVIDIA's instructions do."""
    dtype = narrow_dtype(target)
    if dtype is None:
        return handle
    values = torch.from_numpy(np.array(handle.data))
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    bits = values.to(dtype).view(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
    return type(handle)(bits.numpy(), target, handle.attr)
