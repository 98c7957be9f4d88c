"""Fast launches of Triton kernels: a repeated launch goes directly to the compiled kernel.

Triton looks up a compiled kernel by what it specializes on: each tensor's dtype and whether its address is a multiple
of 16 bytes, each integer's class, and the value of each constant and option. Triton's own lookup takes 15 to 70 us.
Here a few calls into C build the same key from the arguments; the first launch with a key uses Triton's path. Only the
first launch checks that tensors are on the GPU, that module constants have not changed, and how Triton is configured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from inspect import getclosurevars
from itertools import chain
from operator import attrgetter, itemgetter, or_
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import BaseBackend
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITCallable, JITFunction, native_specialize_impl
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4cli.kernels.card import BLACKWELL, HOPPER, is_from

# versions of Triton that specialize and launch as this module does
READ = ("3.6.", "3.7.")
# kind of a kernel argument by its type; Triton handles calls with any other type, such as fake tensors
KINDS = {
    torch.Tensor: "tensor", torch.nn.Parameter: "tensor", int: "integer", TensorDescriptor: "descriptor",
    tuple: "tuple", bool: "plain", float: "plain", type(None): "plain", triton.language.constexpr: "constant",
}  # fmt: skip

Types = tuple[Any, ...]
Picker = Callable[[Sequence[Any]], Sequence[Any]]
_address, _dtype = torch.Tensor.data_ptr, attrgetter("dtype")


def launched(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a kernel that Python launches, as `triton.jit` does: `kernel[grid](*arguments, **launch_options)`.

    In Triton's interpreter, and with a Triton version that is not in READ, this is `triton.jit`.
    """
    if function is None:
        return partial(launched, **options)
    direct = triton.__version__.startswith(READ) and not knobs.runtime.interpret
    return Kernel(function, **options) if direct else triton.jit(function, **options)


def takes_gluon(device: torch.device) -> bool:
    """Return whether Gluon kernels can run on this device: they require Hopper and a Triton version in READ.

    Check this before you import Gluon, which is experimental.
    """
    read = triton.__version__.startswith(READ)
    return read and device.type == "cuda" and is_from(device, HOPPER) and not is_from(device, BLACKWELL)


def cdiv(x: int, y: int) -> int:
    """Return x / y rounded up. Triton's own takes 2 us, because it can also be called while a kernel is compiled."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n; 0 for 0. Faster than Triton's own, as `cdiv`."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def described(
    base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]
) -> TensorDescriptor:
    """Return a descriptor of the elements from `base` on as a matrix of this shape, read in blocks.

    Skips the slow checks of TensorDescriptor's constructor: the driver rejects the same mistakes.
    """
    found = TensorDescriptor.__new__(TensorDescriptor)
    found.base, found.shape, found.strides, found.block_shape = base, shape, strides, block
    return found


class Kernel(JITFunction):  # type: ignore[misc] # Triton has no types
    """A Triton kernel and its call signatures so far."""

    kinds: Mapping[type, str] = KINDS

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self.calls: dict[Types, Call] = {}

    @property
    def cache_key(self) -> str:
        """The kernel's key in Triton's cache.

        Triton reads the constants of a called function before it has collected them (DependenciesFinder._update_hash).
        They are collected here first. Otherwise the key would depend on what was compiled before, and the next process
        would not find the kernel.
        """
        if self.hash is None:
            for called in called_by(self)[:-1]:
                _ = called.cache_key
        return str(super().cache_key)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """Return a function that launches the kernel with this grid.

        It returns the compiled kernel, or None, without a launch, if a hook kept Triton from compiling it.
        """
        return lambda *arguments, **options: self._launch(grid, arguments, options)

    def _launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        values = (*arguments, *options.values())
        types = (len(arguments), *options, *map(type, values))
        call = self.calls.get(types)
        if call is None:
            names = [*self.arg_names[: len(arguments)], *options]
            call = self.calls[types] = _call(self.params, self.kinds, names, values)
        if call.tuples:
            values, call = call.opened(values)
        if not call.direct or self.pre_run_hooks or _watched():
            return self.run(*arguments, grid=grid, warmup=False, **options)
        active, tensors = driver.active, call.tensors(values)
        addresses, device = [*map(_address, tensors)], active.get_current_device()
        key = (device, *call.constants(values), specialised(call.integers(values)), *map(_dtype, tensors))
        if call.descriptors:
            key += call.described(values)
        if reduce(or_, addresses, 0) & 15:
            key += tuple([address & 15 == 0 for address in addresses])
        compiled = call.compiled.get(key)
        if compiled is None:
            compiled = self.run(*arguments, grid=grid, warmup=False, **options)
            if isinstance(compiled, CompiledKernel):
                call.compiled[key] = compiled
            return compiled
        width, height, depth = (*grid, 1, 1)[:3]
        stream, metadata = active.get_current_stream(device), compiled.packed_metadata
        given = call.arguments((*values, *call.defaults, *addresses))
        compiled.run(width, height, depth, stream, compiled.function, metadata, None, None, None, *given)
        return compiled


@dataclass(frozen=True)
class Call:
    """A call signature of a kernel: which arguments are positional, which are named, and the type of each value.

    Attributes:
        direct: whether a launch can bypass Triton.
        tuples: positions of tuples whose item types are still unknown.
        constants, integers, tensors: pick the values of that kind.
        descriptors: positions of descriptors.
        arguments: picks the compiled kernel's arguments from all values, defaults and tensor addresses.
        compiled: compiled kernels by what Triton specializes on.
    """

    direct: bool
    tuples: list[int]
    constants: Picker
    integers: Picker
    tensors: Picker
    descriptors: list[int]
    defaults: list[Any]
    arguments: Picker
    inner: Callable[..., "Call"]
    calls: dict[Types, "Call"] = field(default_factory=dict)
    compiled: dict[tuple[Any, ...], CompiledKernel] = field(default_factory=dict)

    def opened(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], "Call"]:
        """Return the values followed by the items of their tuples, and the call that knows the items' types too."""
        lengths = [len(values[place]) for place in self.tuples]
        items = [*chain.from_iterable([values[place] for place in self.tuples])]
        types = (*lengths, *map(type, items))
        call = self.calls.get(types)
        if call is None:
            call = self.calls[types] = self.inner((*values, *items), dict(zip(self.tuples, lengths, strict=True)))
        return (*values, *items), call

    def described(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return what Triton specializes on for each descriptor."""
        return tuple([(values[place].base.dtype, *values[place].block_shape) for place in self.descriptors])


def _call(
    params: Sequence[Any],
    known: Mapping[type, str],
    names: Sequence[str],
    values: Sequence[Any],
    lengths: dict[int, int] | None = None,
) -> Call:
    """Return the call with these values: first one for each name, then the items of tuples with these lengths."""
    fixed = {param.name: param.is_constexpr for param in params}
    kinds = [known.get(type(value)) for value in values]
    for place, name in enumerate(names):
        if fixed.get(name, True):  # a name that is no parameter of the kernel is a launch option
            kinds[place] = "constant"
    places = {kind: [place for place, one in enumerate(kinds) if one == kind] for kind in (None, *KINDS.values())}
    defaults = [param.default for param in params if param.name not in names]
    # index of each value and default; a tensor is replaced by its address, a tuple by its items
    sources: list[Any] = [*range(len(values) + len(defaults))]
    for number, place in enumerate(places["tensor"]):
        sources[place] = len(sources) + number
    begin = len(names)
    for place, length in (lengths or {}).items():
        sources[place] = sources[begin : begin + length]
        begin += length
    absent = iter(sources[len(values) :])
    arguments = [sources[names.index(param.name)] if param.name in names else next(absent) for param in params]
    nested = lengths is not None and len(places["tuple"]) > len(lengths)
    return Call(
        direct=not places[None] and not nested,
        tuples=places["tuple"] if lengths is None else [],
        constants=_picker(places["constant"]),
        integers=_picker(places["integer"]),
        tensors=_picker(places["tensor"]),
        descriptors=places["descriptor"],
        defaults=defaults,
        arguments=_arranger(arguments),
        inner=partial(_call, params, known, names),
    )


def _arranger(places: Sequence[int | list[int]]) -> Picker:
    """Return a function that picks the values at these places; a list of places becomes a tuple."""
    single = [place for place in places if isinstance(place, int)]
    if len(single) == len(places):
        return _picker(single)
    pickers = [itemgetter(place) if isinstance(place, int) else _picker(place) for place in places]
    return lambda values: [pick(values) for pick in pickers]


def _picker(places: Sequence[int]) -> Picker:
    """Return a function that picks the values at these places."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1)) if places else itemgetter(slice(0))


def called_by(function: JITCallable) -> list[JITCallable]:
    """Return a Triton function and all functions that it calls, each once, callees first."""
    found: dict[int, JITCallable] = {}

    def look(one: JITCallable) -> None:
        for called in getclosurevars(one.fn).globals.values():
            if isinstance(called, JITCallable) and id(called) not in found:
                look(called)
        found[id(one)] = one

    look(function)
    return list(found.values())


@lru_cache(maxsize=1 << 16)
def specialised(numbers: tuple[int, ...]) -> tuple[Any, ...]:
    """Return Triton's specialization of integers: 1 is a constant; others by bit width and divisibility by 16."""
    return tuple([native_specialize_impl(BaseBackend, number, False, True, True) for number in numbers])


def _watched() -> bool:
    """Return whether a Triton launch hook is installed."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
