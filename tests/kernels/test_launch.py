"""A launch like one before is the one that Triton would make: the same compiled kernel, the same arguments."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4cli.kernels.launch import READ, Kernel, cdiv, launched, next_power_of_2, specialised

FULL = torch.zeros(4096, dtype=torch.float32)


def two(x, y, count, EVEN: tl.constexpr, factor=1.5, again: tl.constexpr = 3):
    pass


def many(xs, count, numbers, SIZES: tl.constexpr):
    pass


@launched(do_not_specialize=["count"])
def add_up(xs, y, count, factor, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full([BLOCK], factor, tl.float32)
    for i in tl.static_range(len(NUMBERS)):
        total += tl.load(xs[i] + place, place < count, other=0).to(tl.float32) * NUMBERS[i]
    tl.store(y + place, total.to(y.dtype.element_ty), place < count)


@launched
def copy(source, target, BLOCK: tl.constexpr):
    tl.store(target + tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None], source.load([0, 0]))


@pytest.fixture
def gpu(monkeypatch):
    """A driver that notes what is launched, and a compiler that gives a kernel at once."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel

    launches: list[tuple[Any, ...]] = []

    class Compiled(CompiledKernel):
        def __init__(self, source: Any) -> None:
            self.function, self.packed_metadata, self.metadata, self.module = len(launches), (4, 1, 0), None, object()
            self.name, self.src = source.fn.__name__, source
            self._run = lambda *given: launches.append((self, *given))

    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: gpu.device,
        get_current_stream=lambda device: gpu.streams[device], device=0, streams=[7, 8], launches=launches,
    )  # fmt: skip
    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr("triton.compiler.compile", lambda source, **options: Compiled(source))
    return gpu


def plain(value: Any) -> Any:
    """An argument as the driver gets it: of a tensor its address."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return tuple(map(plain, value)) if type(value) is tuple else value


def launch(gpu: Any, kernel: Any, given: dict[str, Any], grid: tuple[int, ...] = (3,)) -> tuple[Any, ...]:
    """What the driver gets; tensors' addresses in place of tensors, hooks left out."""
    kernel[grid](*given.get("", ()), **{name: value for name, value in given.items() if name})
    compiled, width, height, depth, stream, function, packed, _, _, _, *arguments = gpu.launches.pop()
    assert not gpu.launches
    return compiled, (width, height, depth), stream, function, packed, plain(tuple(arguments))


# calls of `two`, each other than the one before it in one respect
CALLS = [
    {"": (FULL, FULL, 5, True)},
    {"": (FULL[1:], FULL, 5, True)},
    {"": (FULL, FULL[1:], 5, True)},
    {"": (FULL[2:], FULL, 5, True)},
    {"": (FULL, FULL[2:], 5, True)},
    {"": (FULL[4:], FULL[8:], 5, True)},
    {"": (FULL.bfloat16(), FULL, 5, True)},
    {"": (torch.nn.Parameter(FULL), FULL, 5, True)},
    {"": (FULL, None, 5, True)},
    *({"": (FULL, FULL, count, True)} for count in (0, 1, -1, 16, 17, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), 2**63)),
    {"": (FULL, FULL, True, True)},
    {"": (FULL, FULL, 1.0, True)},
    {"": (FULL, FULL, 5, False)},
    {"": (FULL, FULL, 5, 1)},
    {"": (FULL, FULL, 5, (True, 2))},
    {"": (FULL, FULL, 5, "on")},
    {"": (FULL, FULL, 5, torch.float32)},
    {"": (FULL, FULL, 5, tl.float32)},
    {"": (FULL, FULL, tl.constexpr(5), True)},
    {"": (FULL, FULL, tl.constexpr(6), True)},
    {"": (FULL, FULL, 5, True, 2.5)},
    {"": (FULL, FULL, 5, True), "factor": 3},
    {"": (FULL, FULL, 5), "again": 4, "EVEN": True},
    {"": (FULL, FULL, 5, True), "num_warps": 8},
    {"": (FULL, FULL, 5, True), "num_warps": 2},
    {"": (FULL, FULL, 5, True), "num_warps": 2, "num_stages": 4},
    {"": (FULL, FULL, 5, True), "num_warps": 2, "launch_pdl": True},
    {"": (FULL, FULL, 5, True), "launch_cooperative_grid": True},
    {"": (FULL, FULL, 5, True), "maxnreg": 128},
    {"": (), "count": 5, "y": FULL, "x": FULL, "EVEN": True},
    {"": (TensorDescriptor.from_tensor(FULL.view(64, 64), [16, 64]), FULL, 5, True)},
    {"": (TensorDescriptor.from_tensor(FULL.view(64, 64), [32, 64]), FULL, 5, True)},
    {"": (TensorDescriptor.from_tensor(FULL.view(64, 64).half(), [32, 64]), FULL, 5, True)},
]
# calls of `many`, with tuples
OPENED = [
    {"": ((FULL, FULL), 5, (1, 16), (True, False))},
    {"": ((FULL, FULL[1:]), 5, (1, 16), (True, False))},
    {"": ((FULL, FULL.half()), 5, (1, 16), (True, False))},
    {"": ((FULL, None), 5, (1, 16), (True, False))},
    {"": ((FULL,), 5, (FULL, 16), (True, False))},
    {"": ((FULL, FULL), 5, (2, 16), (True, False))},
    {"": ((FULL, FULL), 5, (1, 17), (True, False))},
    {"": ((FULL, FULL), 5, (tl.constexpr(3), 17), (True, False))},
    {"": ((FULL, FULL), 5, (tl.constexpr(4), 17), (True, False))},
    {"": ((FULL, FULL), 5, (), (True, False))},
    {"": ((), 5, 2.0, (True, False))},
    {"": ((FULL, (FULL, 3)), 5, (1,), (True, False))},
    {"": ((FULL, FULL), 5, (1, 16), (True, True))},
]


@pytest.mark.parametrize(
    ("function", "calls", "options"),
    [
        (two, CALLS, {}),
        (two, CALLS, {"do_not_specialize": ["count"]}),
        (two, CALLS, {"do_not_specialize_on_alignment": ["x"]}),
        (many, OPENED, {}),
    ],
)
def test_a_launch_like_one_before_is_tritons(gpu, function, calls, options):
    kernel, told = Kernel(function, **options), []
    asked = kernel.run
    kernel.run = lambda *arguments, **named: told.append(named) or asked(*arguments, **named)
    first = [launch(gpu, kernel, given) for given in calls]
    told.clear()
    second = [launch(gpu, kernel, given) for given in calls]
    direct = len(calls) - len(told)
    kernel.pre_run_hooks.append(lambda *arguments, **named: told.append(named))  # all go Triton's way
    told.clear()
    third = [launch(gpu, kernel, given) for given in calls]
    assert first == second == third
    assert len(told) == 2 * len(calls)
    assert direct == len(calls) - (1 if function is many else 0)  # a tuple in a tuple
    assert len({id(compiled) for compiled, *_ in second}) > len(calls) // 2


def test_integers_are_what_triton_makes_of_them():
    from triton.backends.compiler import BaseBackend

    numbers = (0, 1, 2, 16, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63)
    expected = [triton.runtime.jit.native_specialize_impl(BaseBackend, number, False, True, True) for number in numbers]
    assert specialised(numbers) == tuple(expected)


def test_sizes_are_those_of_triton():
    assert [cdiv(x, 8) for x in (0, 1, 8, 9)] == [triton.cdiv(x, 8) for x in (0, 1, 8, 9)]
    assert [*map(next_power_of_2, range(70))] == [*map(triton.next_power_of_2, range(70))]


def test_device_and_stream_are_those_of_the_moment(gpu):
    kernel, given = Kernel(two), CALLS[0]
    one = [launch(gpu, kernel, given) for _ in range(2)]
    gpu.device = 1
    other = [launch(gpu, kernel, given) for _ in range(2)]
    gpu.streams[1] = 9
    assert (one[0], other[0]) == (one[1], other[1])
    assert one[0][0] is not other[0][0]
    assert (one[0][2], other[0][2], launch(gpu, kernel, given)[2]) == (7, 8, 9)


def test_a_grid_has_up_to_three_numbers(gpu):
    kernel, given = Kernel(two), CALLS[0]
    for grid in ((3,), (3, 4), (3, 4, 5), [6], (0,)):
        launch(gpu, kernel, given, grid)
        assert launch(gpu, kernel, given, grid)[1] == (*grid, 1, 1)[:3]


def test_who_hears_of_launches_hears_of_each(gpu, monkeypatch):
    kernel, given, heard = Kernel(two), CALLS[0], []
    launch(gpu, kernel, given)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            chain = triton.knobs.HookChain()
            chain.add(heard.append)
            for hook in (chain, heard.append):
                patch.setattr(triton.knobs.runtime, name, hook)
                kernel[3,](*given[""])
                assert hook in gpu.launches.pop()[8:10]
    kernel[3,](*given[""])
    assert gpu.launches.pop()[7:10] == (None, None, None)


def test_what_a_hook_keeps_from_compiling_is_not_launched(gpu, monkeypatch):
    kernel, given, told = Kernel(two), CALLS[0], []
    keeps = lambda **details: told.append(details["fn"].name) or True  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", keeps)
    assert [kernel[3,](*given[""]) for _ in range(2)] == [None, None]
    assert (told, gpu.launches) == (["two", "two"], [])
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", None)
    assert launch(gpu, kernel, given)[0] is kernel[3,](*given[""])


def test_what_is_still_compiled_is_asked_for_again(gpu, monkeypatch):
    kernel, asked = Kernel(two), []
    monkeypatch.setattr(kernel, "run", lambda *arguments, **options: asked.append(options) or "a promise")
    assert [kernel[3,](*CALLS[0][""]) for _ in range(2)] == ["a promise"] * 2
    assert len(asked) == 2


class Fake(torch.Tensor):
    pass


def test_fake_tensors_go_tritons_way(gpu, monkeypatch):
    kernel, ran = Kernel(two), []
    monkeypatch.setattr(kernel, "run", lambda *arguments, **options: ran.append(options))
    fake = FULL.as_subclass(Fake)
    for _ in range(2):
        kernel[3,](fake, fake, 5, True, num_warps=8)
    assert ran == [{"grid": (3,), "warmup": False, "num_warps": 8}] * 2


def test_threads_launch_one_kernel(gpu):
    kernel, failed = Kernel(two), []

    def work() -> None:
        try:
            for count in range(200):
                kernel[3,](FULL, FULL, count, True)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is to fail
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (failed, len(gpu.launches)) == ([], 800)
    assert all((call[0].src.signature["count"] == "constexpr") == (call[12] == 1) for call in gpu.launches)


@pytest.mark.parametrize("version", ["3.5.1", "3.8.0", "4.0.0"])
def test_a_version_not_read_launches_triton_s_way(monkeypatch, version):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert type(launched(two)) is type(launched(do_not_specialize=["count"])(two)) is Kernel
    monkeypatch.setattr(triton, "__version__", version)
    assert type(launched(two)) is type(launched(do_not_specialize=["count"])(two)) is JITFunction


def test_this_version_is_read():
    """Read runtime/jit.py and compiler/compiler.py of a new one, add it to READ, and run this file with it."""
    assert triton.__version__.startswith(READ)


def test_interpreted_kernels_are_tritons(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert type(launched(two)) is type(triton.jit(two))


def sums(x: torch.Tensor, other: torch.Tensor, count: int, factor: float, warps: int) -> torch.Tensor:
    y = torch.zeros_like(x)
    add_up[(triton.cdiv(count, 64),)]((x, other), y, count, factor, (1, 2), 64, num_warps=warps)
    return y


def test_launches_again_with_other_numbers(triton_backend):
    x, other = torch.arange(300.0), torch.arange(300.0).half()
    for _ in range(2):
        for first in (0, 1, 4):
            for count in (1, 16, 17, 256):
                for factor, warps in ((0.5, 1), (2.0, 4)):
                    a, b = x[first:], other[first : first + 280]
                    expected = (a[:count] + 2 * b[:count].float() + factor).tolist()
                    assert sums(a, b, count, factor, warps)[:count].tolist() == expected


def test_launches_again_with_descriptors(triton_backend):
    for _ in range(2):
        for number in (3.0, 5.0):
            x, y = torch.full((16, 16), number), torch.zeros(16, 16)
            copy[1,](TensorDescriptor.from_tensor(x, [16, 16]), y, 16)
            assert torch.equal(x, y)


@pytest.mark.gpu
def test_launches_on_a_side_stream_and_in_a_graph():
    with torch.device("cuda"):
        x, other, stream = torch.arange(256.0), torch.ones(256).half(), torch.cuda.Stream()
    sums(x, other, 256, 1.0, 4)  # compiles
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        late = sums(x, other, 256, 1.0, 4)
        assert not stream.query()  # launched behind what takes long there
    stream.synchronize()
    assert torch.equal(late, x + 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sums(x, other, 256, 1.0, 4)
    for number in (5.0, 7.0):
        x.fill_(number)
        graph.replay()
        assert torch.equal(y, x + 3)
