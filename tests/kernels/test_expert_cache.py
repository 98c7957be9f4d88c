"""Experts that come from host memory against a model of the cache in plain Python."""

import pytest
import torch

from dsv4cli.kernels.expert_cache import ExpertCache, fetch
from tests.support.slow import slow_rows

# shape and dtype of each matrix of an expert
E2M1, E8M0, BF16 = torch.int8, torch.float8_e8m0fnu, torch.bfloat16
FORMS = {
    "fp4": [((3, 16), E2M1), ((3, 1), E8M0), ((5, 8), E2M1), ((5, 1), E8M0), ((3, 16), E2M1), ((3, 1), E8M0)],
    "bf16": [((2, 5), BF16), ((5, 2), BF16), ((2, 5), BF16)],
    "more than a block": [((1, 2 * 2048 * 8 + 8), E2M1), ((16, 1024), E2M1), ((3, 16), E2M1)],
}


@pytest.fixture(autouse=True)
def few_programs(request, monkeypatch):
    """Three that copy in the interpreter, where each of 128 takes its time with nothing to do."""
    if "interpreter" in request.node.name:
        from dsv4cli.kernels.expert_cache import kernel

        monkeypatch.setattr(kernel, "PROGRAMS", 3)


def in_host_memory(values: torch.Tensor) -> torch.Tensor:
    return values.cpu().pin_memory() if values.is_cuda else values.clone()


class Case:
    """A layer whose experts are told apart by their bytes, in stacks with rows before and behind its own."""

    def __init__(self, experts: int, stays: int, slots: int, form: str = "fp4") -> None:
        waiting, first = experts - stays, 2 + stays
        self.experts, self.stays, self.slots, staging = experts, stays, slots, first + slots
        rows = staging + waiting - slots + 1
        self.values = [
            torch.randint(0, 120, (experts, *shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)
            for shape, dtype in FORMS[form]
        ]
        self.host = [in_host_memory(value[stays:]) for value in self.values]
        self.stacks = [torch.zeros_like(value[:1]).repeat(rows, 1, 1) for value in self.values]
        place = torch.full((experts,), -1)
        place[: stays + slots] = torch.arange(2, 2 + stays + slots)
        for value, stack in zip(self.values, self.stacks, strict=True):
            stack.view(torch.uint8)[2 : 2 + stays + slots] = value.view(torch.uint8)[: stays + slots]
        owner = torch.arange(stays, stays + slots)
        self.state = ExpertCache(
            place, owner, torch.zeros_like(owner), torch.zeros(1).long(), torch.zeros(3).long(), first, staging
        )
        self.lru = {slot: (expert, 0) for slot, expert in enumerate(owner.tolist())}  # expert, last use
        self.now, self.counts = 0, [0, 0, 0]

    def expected(self, chosen: list[list[int]]) -> dict[int, int]:
        """The row of each chosen expert, by the rules."""
        self.now += 1
        wanted, state = sorted({expert for token in chosen for expert in token}), self.state
        rows = {expert: 2 + expert for expert in wanted if expert < self.stays}
        for slot, (expert, _) in self.lru.items():
            if expert in wanted:
                self.lru[slot] = (expert, self.now)
                rows[expert] = state.first_slot_row + slot
        missing, staged = [expert for expert in wanted if expert not in rows], 0
        for expert in missing:
            free = [slot for slot, (old, _) in self.lru.items() if old not in wanted]
            if free:
                slot = min(free, key=lambda slot: (self.lru[slot][1], slot))
                self.lru[slot] = (expert, self.now)
                rows[expert] = state.first_slot_row + slot
            else:
                rows[expert] = state.first_staging_row + staged
                staged += 1
        for index, more in enumerate((len(chosen), len(wanted), len(wanted) - len(missing))):
            self.counts[index] += more
        return rows

    def check(self, chosen: list[list[int]]) -> None:
        """A step, and all that must be true after it."""
        expected = self.expected(chosen)
        rows = fetch(torch.tensor(chosen), self.state, self.host, self.stacks)
        assert {expert: int(rows[expert]) for expert in expected} == expected
        assert rows.min() >= 0
        assert rows.max() < len(self.stacks[0])
        for value, stack in zip(self.values, self.stacks, strict=True):
            for expert, row in expected.items():
                assert torch.equal(stack[row].view(torch.uint8), value[expert].view(torch.uint8)), expert
            # of other layers
            assert not stack.view(torch.uint8)[[0, 1, -1]].any()
        owners = [expert for expert, _ in self.lru.values()]
        assert self.state.expert_of_slot.tolist() == owners
        assert self.state.last_used.tolist() == [last for _, last in self.lru.values()]
        places = {expert: self.state.first_slot_row + slot for slot, expert in enumerate(owners)}
        places |= {expert: 2 + expert for expert in range(self.stays)}
        assert self.state.row_of_expert.tolist() == [places.get(expert, -1) for expert in range(self.experts)]
        assert self.state.counts.tolist() == self.counts
        assert self.state.steps.tolist() == [self.now]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("experts", "stays", "slots", "k", "tokens"),
    [
        (7, 3, 2, 3, 1),
        (9, 2, 3, 2, 2),
        *slow_rows((6, 0, 2, 2, 1), (5, 0, 1, 1, 1)),
        *slow_rows((33, 16, 6, 6, 1), (40, 5, 20, 6, 3)),
    ],
)
def test_the_longest_unused_makes_room(experts, stays, slots, k, tokens):
    case = Case(experts, stays, slots)
    for _ in range(8):
        case.check(torch.rand(tokens, experts).argsort(-1)[:, :k].tolist())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("form", FORMS)
def test_every_format(form):
    case = Case(5, 1, 2, form)
    for chosen in ([[0, 4]], [[3, 1]], [[4, 2], [3, 1]]):
        case.check(chosen)


@pytest.mark.usefixtures("backend")
def test_a_prompt_leaves_the_slots_alone_and_stages_the_rest():
    case = Case(9, 3, 2)
    tokens = 600 if torch.get_default_device().type == "cuda" else 150
    case.check((torch.arange(tokens * 9) % 9).view(tokens, 9).tolist())
    assert case.state.expert_of_slot.tolist() == [3, 4]
    case.check([[7, 0]])
    assert case.state.expert_of_slot.tolist() == [7, 4]


@pytest.mark.usefixtures("backend")
def test_no_tokens_change_nothing_but_the_clock():
    case = Case(5, 1, 2)
    rows = fetch(torch.zeros(0, 2, dtype=torch.int64), case.state, case.host, case.stacks)
    assert (rows.shape, case.state.counts.tolist(), case.state.expert_of_slot.tolist()) == ((5,), [0, 0, 0], [1, 2])
