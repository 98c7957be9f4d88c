"""Launches that overlap: on which GPUs they do, and that each such kernel waits for its inputs before it stores."""

import ast
from functools import cache
from pathlib import Path

import pytest
import torch

from dsv4cli.kernels.pdl import FEW, overlap, overlap_beside, overlap_of_few, wait_for_inputs

# arguments of kernels that never change
PARAMETERS = ("weight", "bias", "fn", "sink")
KERNELS = Path(__file__).resolve().parents[2] / "dsv4cli" / "kernels"


def test_only_a_gpu_overlaps():
    x = torch.zeros(1, device="cpu")
    assert overlap(x) == overlap_beside(x, 64) == {"OVERLAP": False}


@pytest.mark.gpu
def test_a_hopper_overlaps():
    new = torch.cuda.get_device_capability() >= (9, 0)
    x = torch.zeros(1, device="cuda")
    assert overlap(x) == ({"OVERLAP": True, "launch_pdl": True} if new else {"OVERLAP": False})
    assert overlap_beside(x, 64) == overlap(x) | ({"maxnreg": 64} if new else {})
    assert overlap_of_few(x, FEW) == overlap(x)
    assert overlap_of_few(x, FEW + 1) == {"OVERLAP": False}


@cache
def parsed():
    """The functions of the kernels' files: file, name, node."""
    return [
        (file, node.name, node)
        for file in sorted(KERNELS.rglob("*.py"))
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    ]


def launched():
    """Those that are given OVERLAP, all but the one that waits."""
    for file, name, node in parsed():
        if name != "wait_for_inputs" and any(argument.arg == "OVERLAP" for argument in node.args.args):
            yield file, name, node


def called(call):
    """The name of a function, or of one of Triton's or Gluon's; a view of shared memory has methods like theirs."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr if getattr(call.func.value, "id", "") in ("tl", "gl") else ""
    return getattr(call.func, "id", "")


@cache
def calls(node):
    return [one for one in ast.walk(node) if isinstance(one, ast.Call)]


def waits(node):
    """The lines where a function waits, or hands OVERLAP on to one that does."""
    return [
        call.lineno
        for call in calls(node)
        if any(isinstance(argument, ast.Name) and argument.id == "OVERLAP" for argument in call.args)
    ]


@cache
def storing():
    """The names of functions that store, themselves or by what they call."""
    names, more = set(), {"store", "atomic_add"}
    while more - names:
        names |= more
        more = {name for _, name, node in parsed() if names & {called(call) for call in calls(node)}}
    return names


def first_name(node):
    """The name of the argument whose pointers an expression adds to."""
    while isinstance(node, ast.BinOp):
        node = node.left
    return node.id if isinstance(node, ast.Name) else ""


def test_what_takes_the_option_waits():
    assert list(launched())
    assert [(file.name, name) for file, name, node in launched() if not waits(node)] == []


def test_nothing_is_stored_before_the_wait():
    names = storing()
    early = [
        (file.name, name, called(call))
        for file, name, node in launched()
        for call in calls(node)
        if called(call) in names and call.lineno < min(waits(node))
    ]
    assert early == []


def test_loads_before_the_wait_bypass_the_cache_unless_they_are_of_parameters():
    cached = [
        (file.name, name, first_name(call.args[0]))
        for file, name, node in launched()
        for call in calls(node)
        if called(call) == "load" and call.lineno < min(waits(node))
        and first_name(call.args[0]) not in PARAMETERS
        and not any(one.arg == "cache_modifier" and ast.literal_eval(one.value) == ".cg" for one in call.keywords)
    ]  # fmt: skip
    assert cached == []


@pytest.fixture
def early(triton_backend, monkeypatch):
    """The loads of Triton kernels before they wait for the previous launch: the first address and the cache modifier.

    Each kernel waits once in every program.
    """
    if triton_backend != "interpreter":
        pytest.skip("reads the interpreter's loads")
    from triton.runtime.interpreter import InterpreterBuilder

    loads, has_waited = set(), [True]
    begin, load = InterpreterBuilder.set_grid_idx, InterpreterBuilder.create_masked_load

    def begun(self, *numbers):
        assert has_waited[0], "the next kernel may start before the previous one has ended"
        has_waited[0] = False
        begin(self, *numbers)

    def loaded(self, pointers, mask, other, modifier, *rest):
        if not has_waited[0]:
            loads.add((int(pointers.data.min()), modifier.name if modifier else ""))
        return load(self, pointers, mask, other, modifier, *rest)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", begun)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", loaded)
    monkeypatch.setattr(wait_for_inputs, "rewrite", lambda: lambda *_, **__: has_waited.__setitem__(0, True))
    yield loads
    assert has_waited[0]


@pytest.mark.parametrize("is_shared", [True, False])
def test_experts_load_early_what_earlier_launches_than_the_previous_one_have_written(is_shared, early):
    from dsv4cli.kernels.experts.kernel import few_tokens_gemm, fp8_hopper
    from tests.kernels.test_experts_many_tokens import fp4, routed, stacked

    def tensors(loads):
        """Return the tensors that were loaded from, and the cache modifiers."""
        held = {"x": x, "place": work.place, "parts": parts, "experts": experts, "routing": routing}
        return {
            (name, modifier)
            for address, modifier in loads
            for name, one in held.items()
            if one.data_ptr() <= address < one.data_ptr() + one.nbytes
        }

    x, weights, (experts, routing) = torch.randn(3, 1024).bfloat16(), stacked(fp4, 4, 32, 512), routed(3, 4, 2)
    experts, parts = experts.contiguous(), torch.zeros(9, 512).bfloat16()
    # launched after the router, which reads x as well
    work = fp8_hopper._prepared(x, weights, experts, routing, is_shared)
    assert tensors(early) == {("x", "CG")}
    early.clear()
    # launched after w2, which follows w1 and w3 and `prepare`
    few_tokens_gemm.add[(3, 1)](
        parts, parts[6:], work.place, torch.empty(3, 512), 512, 2, is_shared, 512, OVERLAP=False
    )  # fmt: skip
    assert tensors(early) == {("place", "CG")}
