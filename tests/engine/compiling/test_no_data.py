"""Tensors without data: they say where they would be, and everything else about them is real."""

import pytest
import torch

from dsv4cli.engine.compiling.no_data import NoData
from dsv4cli.engine.model.linear import unfilled

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_data():
    with NoData():
        yield


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.empty(4, 6, device="cuda"),
        lambda: torch.zeros(4, 6, device=torch.device("cuda")),
        lambda: torch.ones(4, 6).to("cuda"),
        lambda: torch.ones(4, 6).pin_memory().to(CUDA, non_blocking=True),
        lambda: torch.empty(4, 6, device="cuda") @ torch.empty(6, 6, device=CUDA),
    ],
)
def test_a_tensor_of_the_gpu_says_so(made):
    x = made()
    assert (x.device, x.is_cuda, x.shape) == (CUDA, True, (4, 6))


def test_an_address_is_what_it_would_be_behind_the_first_byte():
    x = torch.empty(2, 7, dtype=torch.int64, device="cuda")
    assert (x.data_ptr(), x[1].data_ptr(), x[1, 1:].view(torch.int32).data_ptr()) == (0, 56, 64)


def test_what_is_read_is_1():
    x = torch.empty(2, dtype=torch.int64, device="cuda")
    assert (x.tolist(), x[0].item(), int(x[1]), bool(x.isfinite().all()), x.cpu().tolist()) == (
        [1, 1],
        1,
        1,
        True,
        [1, 1],
    )
    assert x.to("cpu").numpy().tolist() == [1, 1]


def test_tensors_of_the_cpu_are_real():
    x = torch.tensor([3, 4])
    x[0] = 5
    assert (x.device.type, x.sum().item(), x.data_ptr() % 8) == ("cpu", 9, 0)


def test_a_parameter_that_nothing_has_filled_is_known():
    assert unfilled().is_meta
    assert not torch.empty(3, device="cuda").is_meta
