"""The experts of a few tokens on a CPU get the bits of the general reference."""

import pytest
import torch

from dsv4cli.kernels.experts import ExpertWeights, one_tile, ref
from dsv4cli.kernels.recode import to_fp4
from dsv4cli.kernels.stored_matrix import StoredMatrix

EXPERTS, WIDTH, INNER = 6, 128, 256
TABLES = {
    "one token": [[4, 1]],
    "the same experts": [[0, 5], [5, 0]],
    "one expert in common": [[3, 1], [1, 4], [2, 1]],
    "other experts": [[0, 1, 2], [3, 4, 5], [5, 0, 3], [1, 2, 4]],
}


def fp8(*shape: int) -> StoredMatrix:
    scale = torch.randint(120, 124, (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)), dtype=torch.uint8)
    return StoredMatrix(torch.randn(shape).to(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))


def fp4(*shape: int) -> StoredMatrix:
    return StoredMatrix(*(torch.stack(part) for part in zip(*map(to_fp4, 0.1 * torch.randn(shape)), strict=True)))


def plain(*shape: int) -> StoredMatrix:
    return StoredMatrix(0.1 * torch.randn(shape))


def weights_of(form, *stack: int, rows: torch.Tensor | None = None) -> ExpertWeights:
    return ExpertWeights(form(*stack, INNER, WIDTH), form(*stack, WIDTH, INNER), form(*stack, INNER, WIDTH), rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("form", "shared_form"), [(fp4, fp8), (plain, plain)])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_few_tokens_get_the_bits_of_the_reference(monkeypatch, table, form, shared_form, dtype):
    experts = torch.tensor(table)
    x, routing = torch.randn(len(table), WIDTH).to(dtype), torch.rand(experts.shape)
    routing[-1, 0] = 0.0  # a chosen expert all the same: its output is added
    rows = torch.randperm(EXPERTS)
    given = x, weights_of(form, EXPERTS, rows=rows), weights_of(shared_form), experts, routing, 0.5, form is fp4, dtype
    assert one_tile.suits(x, experts, *given[1:3])
    few = ref.mixture(*given)
    monkeypatch.setattr(one_tile, "suits", lambda *_: False)
    assert few.dtype == dtype
    assert torch.equal(few.view(torch.uint8), ref.mixture(*given).view(torch.uint8))


def test_zeros_keep_their_sign(monkeypatch):
    experts, routing = torch.tensor([[0], [1]]), torch.full((2, 1), 1e-20)
    # negative sums that bf16 rounds to zero: those of the routed experts by `routing`, those of the shared one by w1
    down, small = torch.full((EXPERTS, WIDTH, INNER), -1e-24), torch.full((INNER, WIDTH), 1e-12)
    up = torch.full((EXPERTS, INNER, WIDTH), 0.01)
    weights = ExpertWeights(StoredMatrix(up), StoredMatrix(down), StoredMatrix(up))
    shared = ExpertWeights(StoredMatrix(small), StoredMatrix(down[0]), StoredMatrix(small))
    given = torch.ones(2, WIDTH).bfloat16(), weights, shared, experts, routing, 0.0, False, torch.bfloat16
    assert ref.mixture(*given).signbit().all()
    monkeypatch.setattr(one_tile, "suits", lambda *_: False)
    assert ref.mixture(*given).signbit().all()


@pytest.mark.parametrize("tokens", [0, 5])
def test_other_numbers_of_tokens_are_left_to_the_reference(tokens):
    experts = torch.zeros(tokens, 1, dtype=torch.int64)
    assert not one_tile.suits(torch.zeros(tokens, WIDTH), experts, weights_of(plain, EXPERTS), weights_of(plain))


def test_an_expert_that_is_chosen_twice_is_left_to_the_reference():
    experts = torch.tensor([[2, 2]])
    assert not one_tile.suits(torch.zeros(1, WIDTH), experts, weights_of(plain, EXPERTS), weights_of(plain))


@pytest.mark.parametrize(("form", "shared_form"), [(fp4, plain), (plain, fp8)])
def test_a_shared_expert_that_rounds_otherwise_is_left_to_the_reference(form, shared_form):
    given = torch.zeros(1, WIDTH), torch.tensor([[2]]), weights_of(form, EXPERTS), weights_of(shared_form)
    assert not one_tile.suits(*given)


def test_gradients_need_the_routing_weights_as_a_tensor():
    experts = torch.tensor([[0, 1]])
    given = weights_of(plain, EXPERTS), weights_of(plain)
    assert one_tile.suits(torch.zeros(1, WIDTH), experts, *given)
    assert not one_tile.suits(torch.zeros(1, WIDTH, requires_grad=True), experts, *given)
