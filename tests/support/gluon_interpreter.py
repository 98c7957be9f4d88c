"""Runs kernels in Gluon on a CPU: values, shared memory and barriers, each set of warps a thread; no layouts.

What it shows: that the arithmetic is right, that every slot is filled before it is read and freed before it is filled
(`races`), that copies by TMA are aligned and views of what they write have the same swizzle, and that nobody waits for
ever. What it does not: layouts of registers, which only the compiler checks, and time.
"""

import operator
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from triton import language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from dsv4cli.kernels.gluon_launch import gluon_layout
from tests.support.races import Actor, Memory

DTYPES = {
    "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64, "fp32": torch.float32,
    "bf16": torch.bfloat16, "fp16": torch.float16, "uint8": torch.uint8, "fp8e5": torch.float8_e5m2,
    "fp8e4nv": torch.float8_e4m3fn,
}  # fmt: skip
# what shared memory holds before anything is stored, and what a load without `other` gives where it is masked
POISON = {dtype: float("nan") if dtype.is_floating_point else 101 for dtype in DTYPES.values()}
# seconds after which a wait is for ever
PATIENCE = 10
# the address of the tensor that a kernel loads from, and the cache modifier of the load
Loads = set[tuple[int, str]]
# requirements of TMA: alignment in bytes in global memory and in shared memory; maximum number of rows
TMA_GLOBAL, TMA_SHARED, TMA_ROWS = 16, 128, 256


class Here(threading.local):
    """The set of warps that a thread stands for.

    Attributes:
        actor: its clock; None if nobody looks for races.
        early: where its loads are noted until it waits for the previous kernel; None if they are not, or afterwards.
    """

    actor: Actor | None = None
    early: Loads | None = None


HERE = Here()


def run(
    kernel: Any, grid: int | tuple[int, ...], *arguments: Any, early: Loads | None = None, races: bool = False
) -> None:
    """The programs of a kernel, one after the other; tensors are contiguous, and pointers to their first element.

    Args:
        early: receives the loads before the wait for the previous kernel, if the kernel overlaps that.
        races: whether it may race, because it reads more of shared memory than it uses, and before that is written.
    """
    sizes = (grid,) if isinstance(grid, int) else grid
    for numbers in product(*map(range, sizes)):
        language = Language(numbers, sizes)
        HERE.actor, HERE.early = None if races else Actor(0), early
        try:
            _in_python(kernel, {}, language)(*map(_pointed, arguments))
        finally:
            HERE.actor = HERE.early = None
        # a copy that ends later would write to the shared memory of the next program
        assert all(barrier.seen == barrier.phase for barrier in language.barriers if barrier.copied), "not awaited"
        assert early is None or language.waited, "the next kernel may start before the previous one has ended"


def called(function: Any, *arguments: Any) -> Any:
    """What a function in Gluon returns that depends on its arguments only."""
    return _in_python(function, {}, Language((0,), (1,)))(*arguments)


def _pointed(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_pointed, value))
    return Pointers(value.view(-1), 0) if isinstance(value, torch.Tensor) else value


def _in_python(function: Any, known: dict[Any, Any], language: "Language") -> Any:
    """What Gluon would compile, with another language."""
    source = function.fn
    if source not in known:
        names = dict(source.__globals__)
        known[source] = FunctionType(source.__code__, names, source.__name__, source.__defaults__)
        for name in source.__code__.co_names:
            if name in names:
                names[name] = _replaced(names[name], known, language)
    return known[source]


def _replaced(value: Any, known: dict[Any, Any], language: "Language") -> Any:
    if isinstance(value, gl.constexpr):
        return value.value
    if value is gl or value is tl:
        return language
    if callable(getattr(value, "fn", None)):
        return _in_python(value, known, language)
    return next((ours for theirs, ours in REPLACED if theirs is value), value)


def raw(value: Any) -> Any:
    return value.values if isinstance(value, Values) else value


def _operation(function: Callable[..., Any], turned: bool = False) -> Callable[..., Any]:
    def apply(one: "Values", other: Any) -> Any:
        if isinstance(other, Pointers):
            return other + one
        left, right = one.values, raw(other)
        return Values(function(right, left) if turned else function(left, right))

    return apply


class Values:
    """A tensor in registers."""

    type = SimpleNamespace(layout=None)

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    def to(self, dtype: Any, bitcast: bool = False) -> "Values":
        wanted = DTYPES[dtype.name]
        return Values(self.values.view(wanted) if bitcast else self.values.to(wanted))

    def __getitem__(self, index: Any) -> "Values":
        return Values(self.values[index])

    def __neg__(self) -> "Values":
        return Values(-self.values)

    def __invert__(self) -> "Values":
        return Values(~self.values)


class Addresses:
    """Places in memory as numbers of bytes; the memory begins at 0."""

    def __init__(self, memory: torch.Tensor, numbers: torch.Tensor) -> None:
        self.memory, self.numbers = memory, numbers

    def __or__(self, other: Values) -> "Addresses":
        return Addresses(self.memory, self.numbers | other.values)

    def to(self, pointer: Any) -> "Pointers":
        assert DTYPES[pointer.element_ty.name] == self.memory.dtype
        return Pointers(self.memory, self.numbers // self.memory.itemsize)


class Scalar(int):
    """A number that kernels convert."""

    def to(self, dtype: Any, bitcast: bool = False) -> "Scalar | float":
        return torch.tensor(int(self), dtype=torch.int32).view(DTYPES[dtype.name]).item() if bitcast else self


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "rshift", "lshift"):
    _function = getattr(operator, f"__{_name}__")
    setattr(Values, f"__{_name}__", _operation(_function))
    setattr(Values, f"__r{_name}__", _operation(_function, True))
    if _name != "truediv":
        setattr(Scalar, f"__{_name}__", lambda one, other, f=_function: _scalar(f, one, other))
        setattr(Scalar, f"__r{_name}__", lambda one, other, f=_function: Scalar(f(int(other), int(one))))
for _name in ("lt", "gt", "le", "ge", "eq"):
    setattr(Values, f"__{_name}__", _operation(getattr(operator, f"__{_name}__")))


def _scalar(function: Callable[..., Any], one: int, other: Any) -> Any:
    if isinstance(other, int):
        return Scalar(function(int(one), int(other)))
    found = function(int(one), raw(other))
    return Values(found) if isinstance(other, Values) else found


class Pointers:
    """Places in memory, which is one tensor, or several one behind another."""

    def __init__(self, memory: torch.Tensor, places: Any) -> None:
        self.memory, self.places = memory, places
        self.dtype = SimpleNamespace(element_ty=next((one for one in GLUON if DTYPES[one.name] == memory.dtype), None))

    def __add__(self, more: Any) -> "Pointers":
        return Pointers(self.memory, self.places + raw(more))

    __radd__ = __add__

    def to(self, pointer: Any, bitcast: bool = True) -> "Pointers | Addresses":
        """The same places in memory of another dtype, or as numbers."""
        if pointer.is_int():
            return Addresses(self.memory, torch.as_tensor(self.places) * self.memory.itemsize)
        wanted = DTYPES[pointer.element_ty.name]
        size = wanted.itemsize // self.memory.itemsize
        whole = self.memory[: len(self.memory) // size * size].view(wanted)
        assert not (self.places % size).any(), "not aligned"
        return Pointers(whole, self.places // size)


GLUON = [gl.int8, gl.int16, gl.int32, gl.int64, gl.float32, gl.bfloat16, gl.uint8]


class Shared:
    """A view of shared memory."""

    def __init__(self, values: torch.Tensor, layout: Any = None, memory: Memory | None = None) -> None:
        self.values, self.layout, self.memory = values, layout, memory

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    def _view(self, values: torch.Tensor) -> "Shared":
        return Shared(values, self.layout, self.memory)

    def index(self, number: int) -> "Shared":
        assert number >= 0
        return self._view(self.values[int(number)])

    def slice(self, begin: int, length: int, dim: int = 0) -> "Shared":
        return self._view(self.values.narrow(dim, begin, length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return self._view(self.values.permute(*order))

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> "Shared":
        values = self.values.view(DTYPES[dtype.name]).view(shape)
        if isinstance(self.layout, gl.NVMMASharedLayout):
            assert _swizzled(self.layout, self.values) == _swizzled(layout, values), "other swizzle"
        return Shared(values, layout, self.memory)

    def read(self) -> torch.Tensor:
        """Return a copy of the values."""
        if self.memory is not None and HERE.actor is not None:
            self.memory.read(self.values, HERE.actor)
        return self.values.clone()

    def load(self, _layout: Any) -> Values:
        return Values(self.read())

    def store(self, given: Values, by: Actor | None = None) -> None:
        """Write what a set of warps has, or what copies bring."""
        assert (given.values.shape, given.values.dtype) == (self.values.shape, self.values.dtype)
        if self.memory is not None and HERE.actor is not None:
            self.memory.write(self.values, HERE.actor, by or HERE.actor)
        self.values.copy_(given.values)


def _swizzled(layout: Any, values: torch.Tensor) -> int:
    """Return in how many bytes of a row 16-byte parts are swizzled: 0 for none. Rows are not longer than that."""
    if isinstance(layout, gl.NVMMASharedLayout):
        width = int(layout.swizzle_byte_width)
        assert values.shape[-1] * values.element_size() <= max(width, 16), "a row in several tiles"
        return width
    assert isinstance(layout, gl.SwizzledSharedLayout)
    return 0 if layout.max_phase == 1 else -1


class Barriers(list["Barrier"]):
    """One for each slot."""

    @property
    def shape(self) -> list[int]:
        return [len(self), 1]

    def index(self, number: int) -> "Barrier":
        return self[int(number)]


class Barrier:
    """As mbarrier in PTX: a phase ends when `count` have arrived, and all bytes that they expect."""

    def __init__(self, number: int) -> None:
        """number: that of the copies that it counts, among the actors of the program."""
        self.condition, self.phase, self.count, self.pending, self.bytes = threading.Condition(), 0, 0, 0, 0
        self.copied, self.seen = False, 0
        self.copies = Actor(number)
        # what is known to those that have arrived, and to those that wait until the last phase ended
        self.arrived = self.ended = Actor(number).known * 0

    def arrive(self, count: int, more: int = 0) -> None:
        """more: bytes that are expected, or negative if they have come."""
        actor = self.copies if more < 0 else HERE.actor
        with self.condition:
            if actor is not None:
                self.arrived = torch.maximum(self.arrived, actor.known)
                actor.tick()
            self.pending, self.bytes, self.copied = self.pending - count, self.bytes + more, self.copied or more != 0
            assert self.pending >= 0, "more have arrived than were expected"
            assert self.bytes >= 0, "more bytes have come than were expected"
            if not self.pending and not self.bytes:
                self.phase, self.pending, self.ended = self.phase + 1, self.count, self.arrived
                self.condition.notify_all()

    def wait(self, parity: int) -> None:
        with self.condition:
            assert self.condition.wait_for(lambda: self.phase & 1 != parity, PATIENCE), "nobody arrives"
            self.seen = self.phase
            if HERE.actor is not None:
                HERE.actor.learn(self.ended)


class Language:
    """`gl` and `tl` of a program; layouts are what they are in Gluon."""

    def __init__(self, numbers: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        self.numbers, self.sizes, self.barriers = numbers, sizes, list[Barrier]()
        self.waited = False

    def __getattr__(self, name: str) -> Any:
        return getattr(gl, name) if hasattr(gl, name) else getattr(tl, name)

    static_range = staticmethod(range)

    def static_assert(self, fact: bool) -> None:
        assert fact

    def program_id(self, axis: int) -> Scalar:
        return Scalar(self.numbers[axis])

    def num_programs(self, axis: int) -> Scalar:
        return Scalar(self.sizes[axis])

    def arange(self, begin: int, end: int, layout: Any = None) -> Values:
        return Values(torch.arange(begin, end, dtype=torch.int32))

    def full(self, shape: list[int], value: Any, dtype: Any, layout: Any = None) -> Values:
        return Values(torch.full([int(size) for size in shape], value, dtype=DTYPES[dtype.name]))

    def load(self, pointers: Pointers, mask: Any = None, other: Any = None, cache_modifier: str = "") -> Any:
        if HERE.early is not None:
            HERE.early.add((pointers.memory.data_ptr(), cache_modifier))
        places = torch.as_tensor(pointers.places)
        inside = torch.as_tensor(True if mask is None else raw(mask)).expand(places.shape)
        found = torch.full(places.shape, POISON[pointers.memory.dtype] if other is None else other)
        found = found.to(pointers.memory.dtype).masked_scatter(inside, pointers.memory[places[inside]])
        if found.ndim:
            return Values(found)
        return float(found) if found.dtype.is_floating_point else Scalar(found.item())

    def store(self, pointers: Pointers, values: Values, mask: Values | None = None) -> None:
        inside = torch.tensor(True) if mask is None else mask.values
        inside = inside.expand(pointers.places.shape)
        pointers.memory[pointers.places[inside]] = values.values[inside]

    def atomic_add(self, pointers: Pointers, more: int, sem: str) -> Scalar:
        before = int(pointers.memory[pointers.places])
        pointers.memory[pointers.places] += more
        return Scalar(before)

    def where(self, condition: Any, one: Any, other: Any) -> Any:
        if not isinstance(condition, Values):
            chosen = one if condition else other
            return Scalar(chosen) if isinstance(chosen, int) else chosen
        if isinstance(one, Pointers):
            both, behind = torch.cat((one.memory, other.memory)), len(one.memory)
            return Pointers(both, torch.where(condition.values, one.places, other.places + behind))
        given = [value.values for value in (one, other) if isinstance(value, Values)]
        found = torch.where(condition.values, raw(one), raw(other))
        whole = not isinstance(one, float) and not isinstance(other, float)
        return Values(found.to(given[0].dtype if given else torch.int32 if whole else torch.float32))

    def maximum(self, one: Any, other: Any) -> Any:
        return Values(one.values.clamp(min=raw(other))) if isinstance(one, Values) else Scalar(max(one, other))

    def minimum(self, one: Any, other: Any) -> Any:
        return Values(one.values.clamp(max=raw(other))) if isinstance(one, Values) else Scalar(min(one, other))

    def max(self, values: Values, axis: int) -> Any:
        largest = values.values.amax(axis)
        return Values(largest) if largest.ndim else Scalar(largest.item())

    def sum(self, values: Values, axis: int) -> Values:
        return Values(values.values.sum(axis, dtype=values.values.dtype))

    def broadcast(self, one: Values, other: Values) -> list[Values]:
        return [Values(both) for both in torch.broadcast_tensors(one.values, other.values)]

    def to_tensor(self, value: int) -> Scalar:
        return Scalar(value)

    def debug_barrier(self) -> None:
        """Nothing: all warps of a set are one thread."""

    def abs(self, values: Values) -> Values:
        return Values(values.values.abs())

    def inline_asm_elementwise(self, text: str, _constraints: str, given: list[Values], **options: Any) -> Any:
        """Run PTX of bitwise instructions on words, or one on pairs of fp16; without operands, none."""
        if not given:
            if text.startswith("griddepcontrol.wait"):
                self.waited, HERE.early = True, None
            return None
        if text.startswith("mov"):  # of the bytes of a word, and given it four times
            words = given[0].values[..., 0, 0].contiguous()
            return Values(words.view(torch.int8).view(*words.shape, 2, 2))
        if text.startswith("popc"):
            bits = torch.arange(32, device="cpu")
            return Values((given[0].values[..., None] >> bits & 1).sum(-1).int())
        if text.startswith("prmt"):
            return Values(_permuted(*torch.broadcast_tensors(*(one.values for one in given))))
        if text.startswith("max"):  # magnitudes
            one, other = (value.values.abs() for value in given)
            return Values(torch.maximum(one, other))
        if "f16x2" in text:
            return Values(_of_halves(text, torch.broadcast_tensors(*(one.values for one in given))))
        words = given[0].values.view(torch.int32)
        return [Values(word.view(torch.int8)) for word in _executed(text, words, len(options["dtype"]))]

    def exp(self, values: Values) -> Values:
        return Values(values.values.exp())

    def expand_dims(self, values: Any, axis: int) -> Any:
        if isinstance(values, Pointers):
            return Pointers(values.memory, values.places.unsqueeze(axis))
        return Values(raw(values).unsqueeze(axis))

    def join(self, one: Values, other: Values) -> Values:
        return Values(torch.stack(torch.broadcast_tensors(one.values, other.values), -1))

    def split(self, values: Values) -> list[Values]:
        return [Values(one) for one in values.values.unbind(-1)]

    def reshape(self, values: Values, shape: list[int]) -> Values:
        return Values(values.values.reshape([int(size) for size in shape]))

    def permute(self, values: Values, order: tuple[int, ...]) -> Values:
        return Values(values.values.permute(*order))

    def convert_layout(self, values: Values, _layout: Any, assert_trivial: bool = False) -> Values:
        return values

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        if dtype == gl.int64:
            # the first numbers are those of threads
            made = Barriers(Barrier(8 + len(self.barriers) + number) for number in range(shape[0]))
            self.barriers += made
            return made
        wanted = DTYPES[dtype.name]
        values = torch.full([int(size) for size in shape], POISON[wanted], dtype=wanted)
        return Shared(values, layout, Memory(values))

    def warp_specialize(self, parts: list[Any], _warps: Any, _registers: Any) -> None:
        failed: list[Exception] = []
        actor, early = HERE.actor, HERE.early

        def carry_out(number: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            HERE.actor, HERE.early = actor and Actor(number, actor.known), early
            try:
                function(*arguments)
            except Exception as error:  # noqa: BLE001 # raised below
                failed.append(error)

        threads = [threading.Thread(target=carry_out, args=(number, *part)) for number, part in enumerate(parts, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in failed:
            raise error


class Descriptor:
    """A matrix in memory, read in blocks of this shape."""

    def __init__(self, matrix: torch.Tensor, block: tuple[int, int]) -> None:
        self.matrix, self.block, self.layout = matrix, block, gluon_layout(matrix.dtype, block)
        size = matrix.element_size()
        assert matrix.stride(1) == 1
        assert not any(one % TMA_GLOBAL for one in (matrix.data_ptr(), matrix.stride(0) * size, block[1] * size))
        assert max(block) <= TMA_ROWS


BITWISE = {"and": operator.and_, "or": operator.or_, "shl": operator.lshift}


def _executed(text: str, words: torch.Tensor, results: int) -> list[torch.Tensor]:
    """What the instructions leave in operands $0 to $results - 1; the next operand is `words`, int32."""
    # 64 bits, so that a right shift is one of unsigned words
    held = {f"${results}": words.long() & 0xFFFFFFFF}
    for line in text.strip("{} \n").replace(".reg .b32 t, u;", "").split(";"):
        if line.strip():
            name, to, *names = line.replace(",", " ").split()
            left, right = (held[one] if one in held else int(one, 0) for one in names)
            done = left >> right if name.startswith("shr") else BITWISE[name.split(".")[0]](left, right)
            held[to] = done & 0xFFFFFFFF
    found = [held[f"${number}"] for number in range(results)]
    return [torch.where(one >= 1 << 31, one - (1 << 32), one).int() for one in found]


def _permuted(first: torch.Tensor, second: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return as bytes of a word those of two words with the numbers in the four lowest hexadecimal digits."""
    each = torch.stack((first, second), -1).view(torch.uint8)
    digits = numbers[..., None] >> torch.arange(0, 16, 4, device="cpu") & 15
    assert not (digits > 7).any(), "this would repeat a sign"
    return each.gather(-1, digits.long()).view(torch.int32)[..., 0]


def _of_halves(text: str, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the pairs of fp16 that an instruction computes, int32, each rounded once."""
    name = re.search(r"(\w+)\.rn\.f16x2", text)[1]  # type: ignore[index]
    if name == "cvt":
        return torch.stack((given[0], given[0]), -1).half().view(torch.int32)[..., 0]
    a, *others = (one.contiguous().view(torch.float16).double() for one in given)
    found = {"add": operator.add, "mul": operator.mul, "fma": lambda a, b, c: a * b + c}[name](a, *others)
    return found.half().view(torch.int32)


def _begin(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _copy(shared: Shared, pointers: Pointers, mask: Values | None = None) -> None:
    shared.store(Language((0,), (1,)).load(pointers, mask, 0))


def _described_copy(source: Descriptor, place: list[int], barrier: Barrier, shared: Shared) -> None:
    (row, column), (rows, columns) = place, source.block
    block = source.matrix[row : row + rows, column : column + columns]
    # rows beyond the matrix are 0
    block = torch.cat((block, block.new_zeros(rows - len(block), columns)))
    assert shared.layout == source.layout, "other layout than the descriptor's"
    assert shared.values.storage_offset() * shared.values.element_size() % TMA_SHARED == 0, "not aligned"
    if HERE.early is not None:
        HERE.early.add((source.matrix.data_ptr(), "tma"))
    shared.store(Values(block), barrier.copies)
    barrier.arrive(0, -block.numel() * block.element_size())


class Running(Values):
    """Sums of a product that runs until it is awaited: before, only another product may read them."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self.compute, self.found = compute, None

    def end(self) -> None:
        self.found = self.compute()

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        assert self.found is not None, "read before it was awaited"
        return self.found


# what each thread has started, in order
STARTED: dict[int, list[Running]] = defaultdict(list)


def _products(
    left: Values, right: Shared, sums: Values, use_acc: bool = True, is_async: bool = False, **_options: Any
) -> Values:
    def operand(of: Any) -> torch.Tensor:
        return of.read() if isinstance(of, Shared) else of.values

    def compute() -> torch.Tensor:
        product = operand(left).float() @ operand(right).float()
        return sums.values + product if use_acc else product

    # it reads from now on, until it ends
    _ = operand(right), isinstance(left, Shared) and operand(left)

    if not is_async:
        return Values(compute())
    running = Running(compute)
    STARTED[threading.get_ident()].append(running)
    return running


def _awaited(number: int, deps: Sequence[Values]) -> Any:
    """Ends all products of this thread except for the last `number`."""
    started = STARTED[threading.get_ident()]
    while len(started) > number:
        started.pop(0).end()
    return deps[0] if len(deps) == 1 else deps


def _exact_products(left: Values, right: Values, sums: Values) -> Values:
    return Values(sums.values + (left.values.double() @ right.values.double()).to(sums.values.dtype))


MBARRIER = SimpleNamespace(
    MBarrierLayout=lambda: None,
    init=_begin,
    wait=lambda barrier, parity, pred=True: barrier.wait(int(parity)) if pred else None,
    arrive=lambda barrier, count: barrier.arrive(count),
    expect=lambda barrier, more: barrier.arrive(1, more),
)
# a copy is told of by each of the 128 threads that make it
COPY = SimpleNamespace(
    async_copy_global_to_shared=_copy, mbarrier_arrive=lambda barrier, increment_count: barrier.arrive(128)
)
TMA = SimpleNamespace(async_copy_global_to_shared=_described_copy)
REPLACED = [
    (async_copy, COPY), (hopper.mbarrier, MBARRIER), (hopper.tma, TMA), (hopper.warpgroup_mma, _products),
    (hopper.warpgroup_mma_wait, _awaited),
    (hopper.fence_async_shared, lambda: None), (ampere.mma_v2, _exact_products),
]  # fmt: skip
