"""Triton's interpreter against torch: what a kernel test on a CPU rests on."""

import sys

import pytest
import torch

from tests.support.interpreter import correct

if torch.cuda.is_available() or sys.platform != "linux":
    pytest.skip("the interpreter is off: there is a GPU, or no Triton", allow_module_level=True)

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from dsv4cli.kernels.gluon_barriers import await_filled, await_freed, ring, tell
from tests.support import gluon_interpreter
from tests.support.gluon_interpreter import Descriptor, Pointers, Shared, Values, run

NARROW = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(autouse=True)
def _correct() -> None:
    correct()


@triton.jit
def _convert(x, y, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place, place < count, other=0.0).to(y.dtype.element_ty), place < count)


def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    _convert[(triton.cdiv(x.numel(), 4096),)](x, y, x.numel(), 4096)
    return y


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.float().signbit() | ours.isnan(), theirs.float().signbit() | theirs.isnan())


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_conversion_from_fp32(dtype):
    bits = torch.randint(-(2**31), 2**31, (20_000,)).int()
    bits[:5] = torch.tensor([0x3FFB0000, 0x3F808000, 0x3F818000, 1, 0x7F800000])  # a carry, two ties, a subnormal, inf
    x = bits.view(torch.float32)
    largest = torch.finfo(dtype).max
    expected = (x if dtype == torch.bfloat16 else x.clamp(-largest, largest)).to(dtype)
    assert_same(converted(x, dtype), expected)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_conversion_to_fp32(dtype):
    codes = torch.arange(2 ** (8 * dtype.itemsize)).to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)
    assert_same(converted(codes, torch.float32), codes.float())


def test_conversion_from_and_to_integers():
    x = torch.tensor([0, 1, -3, 257, 65_535], dtype=torch.int32)
    assert torch.equal(converted(x, torch.bfloat16), x.bfloat16())
    assert torch.equal(converted(x.bfloat16(), torch.int32), x.bfloat16().int())


@triton.jit
def _square_sum(x, y, steps, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None]
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for _ in range(steps):
        values = tl.load(x + place)
        total = tl.dot(values, values, total)
    tl.store(y + place, total)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float16, torch.float32], ids=str)
def test_dot_in_a_loop_over_a_runtime_number(dtype):
    x, y = torch.randint(-2, 3, (16, 16)).float().to(dtype), torch.empty(16, 16)  # exact in every format
    _square_sum[(1,)](x, y, 3, 16)
    assert torch.equal(y, 3 * (x.float() @ x.float()))


@triton.jit
def _arithmetic(x, y, larger, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    values = tl.load(x + place)
    tl.store(y + place, -(values + values) * values)
    tl.store(larger + place, values > 1.0)


def test_arithmetic_on_bf16_rounds_each_operation():
    x, larger = torch.randn(64).bfloat16(), torch.empty(64, dtype=torch.bool)
    y = torch.empty_like(x)
    _arithmetic[(1,)](x, y, larger, 64)
    assert torch.equal(y, -(x + x) * x)
    assert torch.equal(larger, x > 1)


@triton.jit
def _load_without_other(x, y, count, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(y + place, tl.load(x + place, place < count))


def test_a_masked_load_without_other_is_poisoned():
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        x = torch.ones(8, dtype=dtype)
        y = torch.empty_like(x)
        _load_without_other[(1,)](x, y, 3, 8)
        assert (y[:3] == 1).all()
        assert (y[3:].isnan() if dtype.is_floating_point else y[3:] == 0x7F7F7F7F).all()


@triton.jit
def _masked_by_a_number(x, y, first, count, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place, (tl.program_id(0) + first < count) & (place < count), other=-1.0))


def test_a_mask_may_come_from_a_number():
    x, y = torch.rand(8), torch.empty(8)
    _masked_by_a_number[(1,)](x, y, 0, 5, 8)
    assert torch.equal(y, torch.cat([x[:5], torch.full((3,), -1.0)]))
    _masked_by_a_number[(1,)](x, y, 5, 5, 8)
    assert torch.equal(y, torch.full((8,), -1.0))


@pytest.mark.parametrize(("source", "target"), [(7, 8), (8, 7)])
def test_places_beyond_the_tensors_are_refused(source, target):
    x, y = torch.ones(source), torch.zeros(target)
    _convert[(1,)](x, y, 7, 8)
    assert y.sum() == 7
    with pytest.raises(triton.runtime.errors.InterpreterError, match="1 of 8 places are beyond the tensors"):
        _convert[(1,)](x, y, 8, 8)


@gluon.jit
def _copied_by_tma(matrix, BYTES: gl.constexpr, WAITS: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.int8, [16, 16], matrix.layout)
    barrier = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(barrier, count=1)
    mbarrier.expect(barrier, BYTES)
    tma.async_copy_global_to_shared(matrix, [0, 0], barrier, memory)
    if WAITS:
        mbarrier.wait(barrier, 0)


def test_a_copy_that_no_one_awaits_is_refused():
    matrix = Descriptor(torch.zeros(16, 16, dtype=torch.int8), (16, 16))
    run(_copied_by_tma, 1, matrix, 256, True)
    with pytest.raises(AssertionError, match="not awaited"):
        run(_copied_by_tma, 1, matrix, 256, False)


def test_a_copy_of_more_bytes_than_expected_is_refused():
    with pytest.raises(AssertionError, match="more bytes"):
        run(_copied_by_tma, 1, Descriptor(torch.zeros(16, 16, dtype=torch.int8), (16, 16)), 255, True)


@gluon.jit
def _three_products(left, right, sums, out, RUNNING: gl.constexpr):
    """Store the second product, which adds to the first one; it may still run if RUNNING is 2."""
    first = warpgroup_mma(left, right, sums, is_async=True)
    second = warpgroup_mma(left, right, first, is_async=True)
    warpgroup_mma(left, right, sums, is_async=True)
    gl.store(out, warpgroup_mma_wait(RUNNING, deps=[second]))


def test_a_product_that_may_still_run_is_not_read():
    left, sums, out = Values(torch.ones(2, 3)), Values(torch.zeros(2, 2)), torch.empty(2, 2)
    given = left, Shared(torch.ones(3, 2)), sums, Pointers(out.view(-1), torch.arange(4).view(2, 2))
    for running in (1, 0):
        run(_three_products, 1, *given, running)
        assert (out == 6).all()
    with pytest.raises(AssertionError, match="before it was awaited"):
        run(_three_products, 1, *given, 2)


@gluon.jit
def _bring_twice(matrix, memory, filled, freed, WAITS: gl.constexpr):
    for number in range(2):
        if WAITS:
            await_freed(freed, number)
        mbarrier.expect(filled.index(0), 256)
        tma.async_copy_global_to_shared(matrix, [number * 16, 0], filled.index(0), memory)


@gluon.jit
def _store_twice(out, memory, filled, freed, TELLS: gl.constexpr):
    place = gl.expand_dims(gl.arange(0, 16) * 16, 1) + gl.expand_dims(gl.arange(0, 16), 0)
    for number in range(2):
        await_filled(filled, number)
        if TELLS == 0:
            tell(freed, number)
        gl.store(out + (number * 256 + place), memory.load(None))
        if TELLS == 1:
            tell(freed, number)


@gluon.jit
def _one_slot(matrix, out, WAITS: gl.constexpr, TELLS: gl.constexpr):
    """Copy two blocks. TELLS: whether the slot is freed before it is read (0) or after it (1)."""
    memory = gl.allocate_shared_memory(gl.int8, [16, 16], matrix.layout)
    filled, freed = ring(1, 1, 1)
    gl.warp_specialize(
        [(_store_twice, (out, memory, filled, freed, TELLS)), (_bring_twice, (matrix, memory, filled, freed, WAITS))],
        [1], [40],
    )  # fmt: skip


def test_races_are_found_in_whichever_order_threads_run(monkeypatch):
    values, out = torch.randint(-128, 128, (32, 16), dtype=torch.int8), torch.zeros(32, 16, dtype=torch.int8)
    matrix = Descriptor(values, (16, 16))
    run(_one_slot, 1, matrix, out, True, 1)
    assert torch.equal(out, values)
    monkeypatch.setattr(gluon_interpreter, "PATIENCE", 0.1)  # of the thread that is left
    for waits, tells in ((False, 1), (True, 0)):
        with pytest.raises(AssertionError, match="a race"):
            run(_one_slot, 1, matrix, out, waits, tells)


@gluon.jit
def _copied_to_a_slot(matrix, ROWS: gl.constexpr, OTHER: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.int8, [2, ROWS, 16], matrix.layout)
    barrier = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(barrier, count=1)
    mbarrier.expect(barrier, ROWS * 16)
    tma.async_copy_global_to_shared(matrix, [0, 0], barrier, memory.index(1))
    mbarrier.wait(barrier, 0)
    if OTHER:
        memory._reinterpret(gl.int8, [ROWS, 32], gl.NVMMASharedLayout(32, 8, 2))


def test_copies_by_tma_are_aligned_and_keep_their_layout():
    values = torch.zeros(16, 48, dtype=torch.int8)
    run(_copied_to_a_slot, 1, Descriptor(values, (8, 16)), 8, False)
    with pytest.raises(AssertionError, match="not aligned"):
        run(_copied_to_a_slot, 1, Descriptor(values, (4, 16)), 4, False)
    with pytest.raises(AssertionError, match="other swizzle"):
        run(_copied_to_a_slot, 1, Descriptor(values, (8, 16)), 8, True)
    for matrix, block in ((values, (16, 8)), (values[:, 1:], (16, 16)), (values[:, :40].contiguous(), (16, 16))):
        with pytest.raises(AssertionError):
            Descriptor(matrix, block)
