"""Small nets with both drafters, drafters that are right or wrong on purpose, and a gate that lets every draft pass."""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

from dsv4cli.engine.config.presets import TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.drafts.draft_controller import AlwaysDraft, DraftController
from dsv4cli.engine.runtime.drafts.drafters import Drafter, Drafts
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.weights.load import build_random
from tests.support.small_model import FP32, NARROW

VOCABULARY = 128
# every kind of layer and router; few entries chosen
SMALL = TINY | NARROW | {"index_topk": 8, "n_routed_experts": 4, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
CONFIGS = {
    "mtp": SMALL | {"compress_ratios": [0, 4, 128, 0]},
    "dspark": SMALL
    | {"compress_ratios": [0, 4, 128, 0, 0], "dspark_block_size": 5, "dspark_noise_token_id": 100}
    | {"dspark_target_layer_ids": [0, 1, 2], "dspark_markov_rank": 8},
}
# of a request and the place of its newest token: at which of the drafts behind it the mistake is
Mistake = Callable[[int, int], int]


@cache
def model_of(drafter: str, reference: bool = False) -> Transformer:
    """A small model of random weights with this drafter, in plain fp32 or with the reference's roundings."""
    config, numerics = parse_config(CONFIGS[drafter], "test"), Numerics.reference() if reference else Numerics.plain()
    return build_random(config, numerics, formats=FP32)


def text(length: int, seed: int) -> list[int]:
    """Any tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many drafts as there may be in every step, however long it takes."""

    monkeypatch.setattr(DraftController, "count", AlwaysDraft.count)
    monkeypatch.setattr(DraftController, "drafts", AlwaysDraft.drafts)


class Knowing:
    """A drafter that knows what comes, and makes a mistake where it is told to; its state is that of the real one."""

    def __init__(self, own: Drafter, engine: Engine, texts: Sequence[list[int]], mistake: Mistake) -> None:
        """texts: of each request, by its number, the prompt and its answer."""
        self.own, self._engine, self._texts, self._mistake = own, engine, texts, mistake
        self.name, self.most, self.default, self.reads_next = own.name, own.most, own.default, own.reads_next
        self.absorb = own.absorb

    def draft(self, newest, count, choose) -> Drafts:
        """The text of each sequence but for the mistake, and token 0 for sequences that are no request's."""
        made = self.own.draft(newest, count, choose)
        requests = {one.sequence.slot: one for one in self._engine.runner.scheduler.active if one.sequence is not None}
        rows = []
        for slot, place in zip(newest.slots.tolist(), newest.positions.tolist(), strict=True):
            request = requests.get(slot)
            rows.append([0] * count if request is None else self._row(request, place, count))
        return Drafts(torch.tensor(rows), made.chances)

    def _row(self, request: Request, place: int, count: int) -> list[int]:
        following = self._texts[request.number][place + 1 : place + 1 + count]
        row = following + [7] * (count - len(following))
        wrong = self._mistake(request.number, place)
        if wrong < count:
            row[wrong] = (row[wrong] + 1) % VOCABULARY
        return row


def know(engine: Engine, texts: Sequence[list[int]], mistake: Mistake) -> None:
    """Has an engine's drafter know these texts."""
    assert engine.runner.drafts is not None
    own = engine.runner.drafts.drafter
    own = own.own if isinstance(own, Knowing) else own
    engine.runner.drafts.drafter = Knowing(own, engine, texts, mistake)


def mask_of(allowed: Sequence[int], size: int) -> bytes:
    """The mask of a constraint that lets these tokens come, of so many."""
    bits = sum(1 << token for token in allowed)
    return bits.to_bytes(-(-size // 8), "little")
