"""What a step is made of: its weights, the layer schedule, launches, compilations, and waits for the host."""

import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from dsv4cli.engine.config.presets import TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.profiling import step
from dsv4cli.engine.profiling.clock import Timing, _waits_for_host
from dsv4cli.engine.profiling.compiling import nothing_compiles
from dsv4cli.engine.profiling.launches import count_launches, owners_of
from dsv4cli.engine.profiling.ranges import BLOCK, CONNECTIONS, OTHER, Ranges, expected_counts
from dsv4cli.engine.profiling.step import StepShape, _check_schedule, choose_load, profile_step
from dsv4cli.engine.weights.load import build_random
from dsv4cli.errors import UnsoundResult

CPU = torch.device("cpu")


def test_timing():
    found = Timing.of([5.0, *[1.0] * 9, 2.0, *[3.0] * 9], "host")
    assert (found.median, found.low, found.high, found.samples) == (2.5, 1.0, 3.0, 20)


@pytest.fixture(scope="module")
def model():
    return build_random(parse_config(TINY, "tiny"), Numerics.reference())


def test_step_reads_the_weights_that_it_uses(model, monkeypatch):
    monkeypatch.setattr(step, "SECONDS", 0)
    found = profile_step(model, StepShape(1, 5, 1), CPU)
    parameters = {name: p for name, p in model.named_parameters() if not name.startswith("mtp.")}
    used = 0
    for name, parameter in parameters.items():
        if ".ffn.experts." in name:
            used += 2 * parameter[0].nbytes  # 2 of 8 for the one token
        elif name == "embed.weight" or name.endswith("tid2eid"):
            used += parameter[0].nbytes
        else:
            used += parameter.nbytes
    assert found.weight_bytes == used
    assert found.launches is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_step_that_differs_from_the_schedule_is_unsound(model):
    ranges = Ranges(CPU)
    ranges.spans = [(name, 0.0, 1.0) for name, count in expected_counts(model.config).items() for _ in range(count)]
    assert _check_schedule(model.config, ranges)["block"] == 5
    other = replace(model.config, compress_ratios=(0, 4, 4, 128, 4, 0))
    with pytest.raises(UnsoundResult, match="sliding attention"):
        _check_schedule(other, ranges)


def test_where_a_step_begins(model):
    nano = replace(model.config, max_position_embeddings=100)
    assert choose_load(model.config, 1, None, 1).context == 4096
    assert choose_load(nano, 1, None, 1).context == 99
    assert choose_load(model.config, 7, None, 1).context == 0
    assert choose_load(model.config, 7, 3, 2) == StepShape(7, 3, 2)


def traced(*trace):
    """What the profiler makes of events as a Chrome trace has them: (cat, name, ts, dur, correlation)."""
    on_device = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
    return [
        FunctionEvent(
            correlation, name, thread=1, start_us=ts, end_us=ts + dur,
            device_type=DeviceType.CUDA if cat in on_device else DeviceType.CPU,
        )
        for cat, name, ts, dur, correlation in trace
    ]  # fmt: skip


def counted(*trace):
    events = traced(*trace)
    return count_launches(events, owners_of(events))


# a block with attention and MoE inside: 901 and on are numbers of ranges and operators, 1 and on those of CUDA's calls
STEP = (
    ("user_annotation", "dsv4: block", 100, 100, 901),
    ("cuda_driver", "cuLaunchKernelEx", 105, 2, 1),
    ("user_annotation", "dsv4: CSA attention", 110, 40, 902),
    ("cpu_op", "aten::mm", 112, 10, 905),
    ("cuda_runtime", "cudaLaunchKernelExC", 113, 2, 2),
    ("cuda_driver", "cuLaunchKernel", 130, 2, 3),
    ("cuda_runtime", "cudaMemcpyAsync", 140, 2, 4),
    ("cuda_runtime", "cudaEventRecord", 149, 1, 5),
    ("user_annotation", "dsv4: MoE, hash", 160, 30, 903),
    ("cuda_runtime", "cudaGraphLaunch", 165, 2, 6),
    ("cpu_op", "aten::empty", 170, 5, 3),  # the number of another call
    ("cuda_runtime", "cudaMemsetAsync", 195, 2, 7),
    ("cuda_runtime", "cudaLaunchKernel", 210, 2, 8),
    ("user_annotation", "dsv4: head", 220, 10, 904),
    ("cuda_runtime", "cudaDeviceSynchronize", 300, 100, 9),
    ("gpu_user_annotation", "dsv4: block", 300, 60, 901),
    # launched before; when they run says nothing
    ("kernel", "_connect", 300, 10, 1),
    ("kernel", "gemm", 305, 15, 2),
    ("kernel", "_attend", 306, 2, 3),
    ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 309, 3, 4),
    ("kernel", "first of a graph", 330, 10, 6),
    ("kernel", "second of a graph", 340, 5, 6),
    ("gpu_memset", "Memset (Device)", 345, 1, 7),
    ("kernel", "between", 346, 4, 8),
    ("kernel", "its call is lost", 350, 10, 10),
)


def test_every_launch_belongs_to_the_innermost_range_around_its_call():
    found = counted(*STEP)
    assert found.by_class == {
        "hyper-connections": 2, "CSA attention": 3, "MoE, hash": 2, "between them": 2
    }  # fmt: skip
    assert found.count == sum(found.by_class.values()) == 9


def test_a_gpu_is_busy_while_anything_runs():
    found = counted(*STEP)
    # some overlap, some lie inside others: 300 to 320 and 330 to 360
    assert found.busy == pytest.approx(50e-6)
    record = found.record(120e-6, 2)
    assert record["gap_seconds"] == pytest.approx(70e-6)
    assert record["per_token"]["count"] == 4.5


def layered(*kernels):
    """Kernels of blocks, each launched within 100 us on the host: (block, attention, name, ts, dur)."""
    blocks = {block: attention for block, attention, *_ in kernels}
    ranges = [("user_annotation", "dsv4: block", 100 * block, 100, 900 + block) for block in blocks]
    ranges += [("user_annotation", f"dsv4: {kind}", 100 * block, 50, 950 + block) for block, kind in blocks.items()]
    calls = [("cuda_driver", "cuLaunchKernel", 100 * block + n, 1, n) for n, (block, *_) in enumerate(kernels, 1)]
    return counted(*ranges, *calls, *(("kernel", name, ts, dur, n) for n, (*_, name, ts, dur) in enumerate(kernels, 1)))


def test_a_layer_of_each_kind_from_kernel_to_kernel():
    csa, hca = "CSA attention", "HCA attention"
    found = layered(
        (0, csa, "other", 1000, 50),
        # begins with the end of what was before, and within its last kernel the next begins
        (1, csa, "a", 1050, 10),
        (1, csa, "b", 1062, 8),
        (2, hca, "c", 1068, 4),
        (3, csa, "a", 1080, 10),
        (3, csa, "b", 1090, 4),
    ).layers
    assert [(one.kind, one.layers, [kernel.name for kernel in one.kernels]) for one in found] == [
        (csa, 2, ["a", "b"]), (hca, 1, ["c"])
    ]  # fmt: skip
    [a, b], [c] = (one.kernels for one in found)
    assert (a.seconds, a.idle) == pytest.approx((14e-6, 4e-6))
    assert (b.seconds, b.idle) == pytest.approx((7e-6, 1e-6))
    assert (c.seconds, c.idle) == pytest.approx((2e-6, 0.0))
    assert found[0].record()["idle_seconds"] == pytest.approx(5e-6)


def test_a_call_that_waits_for_the_host_is_found_without_a_notice(monkeypatch):
    modes = []

    def set_mode(mode):
        modes.append(mode)
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations",
            stacklevel=1,
        )
        warnings.warn("of torch", stacklevel=1)

    def wait():
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with warnings.catch_warnings(record=True, action="always") as shown:
        assert _waits_for_host(wait)
        assert not _waits_for_host(lambda: warnings.warn("of the operation", stacklevel=1))
    assert modes == ["error", "default"] * 2
    assert [str(one.message) for one in shown] == [*["of torch"] * 3, "of the operation", "of torch"]


def test_a_compilation_while_time_is_taken_is_unsound(monkeypatch):
    runtime = SimpleNamespace(jit_post_compile_hook=None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime)))
    with nothing_compiles():
        pass

    def compile_one():
        with nothing_compiles():
            runtime.jit_post_compile_hook(key="", fn=SimpleNamespace(name="_gemm"))

    with pytest.raises(UnsoundResult, match="_gemm"):
        compile_one()
    assert runtime.jit_post_compile_hook is None


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_step_on_a_gpu(backend):
    device = torch.device("cuda")
    model = build_random(parse_config(TINY, "tiny"), Numerics.reference(), device="cuda")
    found = profile_step(model, StepShape(1, 300, 2), device, backend)
    assert found.launches is not None
    assert found.launches.count == sum(found.launches.by_class.values())
    classes = {CONNECTIONS if name == BLOCK else name for name in expected_counts(model.config)}
    assert found.launches.by_class.keys() - {OTHER} == classes
    assert found.captured == (backend == "triton")
    assert 0 < found.launches.busy < found.total.high
