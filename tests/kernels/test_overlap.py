"""Launches that overlap: where they do, and that every kernel which can waits before anything else may go wrong."""

import ast
from pathlib import Path

import pytest
import torch

from dsv4cli.kernels.overlap import overlap

KERNELS = Path(__file__).resolve().parents[2] / "dsv4cli" / "kernels"


def test_only_a_gpu_overlaps():
    assert overlap(torch.zeros(1, device="cpu")) == {"OVERLAP": False}


@pytest.mark.gpu
def test_a_hopper_overlaps():
    new = torch.cuda.get_device_capability() >= (9, 0)
    assert overlap(torch.zeros(1, device="cuda")) == (
        {"OVERLAP": True, "launch_pdl": True} if new else {"OVERLAP": False}
    )


def launched():
    """The functions that are launched with OVERLAP, by file: those that decide on it themselves."""
    for file in sorted(KERNELS.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        for name, node in functions.items():
            if any(argument.arg == "OVERLAP" for argument in node.args.args):
                yield file, functions, name


def hands_on(node):
    """Whether a function waits itself, or hands OVERLAP on to one that does."""
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    return any(isinstance(one, ast.Name) and one.id == "OVERLAP" for call in calls for one in ast.walk(call))


def test_what_takes_the_option_waits():
    found = [(file.name, name) for file, functions, name in launched() if not hands_on(functions[name])]
    assert list(launched())
    assert [place for place in found if place[1] != "wait_for_inputs"] == []
