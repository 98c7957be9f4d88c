"""With exact numerics a captured step of up to eight rows leaves what steps of one row leave, bit for bit."""

from copy import deepcopy

import pytest
import torch

from dsv4cli.commands.job import open_job
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.graphs.decode_graphs import GraphRunner
from dsv4cli.engine.runtime.sequence import Sequence
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.weights.load import load_model
from dsv4cli.kernels.rows import planned_rows
from dsv4cli.options import ModelOptions
from dsv4cli.output import Colours, Output
from tests.support.cache_state import same, state

LONGEST = 640
# what sequences hold, and the rows of each in the step
STEPS = [((300,), 2), ((127,), 3), ((510,), 8), ((130, 5), 4), (tuple(range(250, 258)), 1)]
ON_CPU = ("random:tiny,layers=4", "cpu", (127, 5), 2)
# the shapes of Flash in the stored formats
FLASH = "random:flash,layers=6,experts=16"
ON_GPU = [pytest.param(FLASH, "cuda", *step, marks=pytest.mark.gpu) for step in STEPS]


def prefilled(model: Transformer, device: str, lengths: tuple[int, ...]) -> tuple[Cache, list[Sequence]]:
    cache = Cache(model.config, model.numerics, slots=len(lengths) + 1, device=device)
    sequences = [cache.allocate() for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        model(make_batch(cache, [(sequence, text(model, length, length))]), cache.layers)
        cache.advance(sequence, length)
    return cache, sequences


def text(model: Transformer, count: int, seed: int) -> list[int]:
    return torch.randint(model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def step(graphs: GraphRunner, work: list[tuple[Sequence, list[int]]]) -> list[torch.Tensor]:
    """Streams and logits of the rows; the sequences go on."""
    output = graphs.filled(work).run()
    for sequence, ids in work:
        graphs.cache.advance(sequence, len(ids))
    rows = sum(len(ids) for _, ids in work)
    return [output.hidden.streams[:rows].clone(), output.logits[:rows].clone()]


@torch.no_grad()
@pytest.mark.parametrize(("name", "device", "lengths", "rows"), [ON_CPU, *ON_GPU])
def test_a_captured_step_of_several_rows_is_several_steps_of_one(name, device, lengths, rows):
    model = load_model(resolve_model(name), Numerics.reference(exact=True), device=device)
    before = prefilled(model, device, lengths)
    following = [text(model, rows, 1000 + length) for length in lengths]
    cache, sequences = deepcopy(before)
    given = step(GraphRunner(model, cache, LONGEST), list(zip(sequences, following, strict=True)))
    alone, own = deepcopy(before)
    graphs = GraphRunner(model, alone, LONGEST)
    each = [step(graphs, [(one, [token])]) for one, ids in zip(own, following, strict=True) for token in ids]
    for ours, parts in zip(given, zip(*each, strict=True), strict=True):
        assert same(ours, torch.cat(parts))
    for sequence, other in zip(sequences, own, strict=True):
        assert all(same(*pair) for pair in zip(state(cache, sequence), state(alone, other), strict=True))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_option_reaches_the_model(dtype, exact):
    options = ModelOptions(model="random:tiny,layers=1", device="cpu", dtype=dtype, exact=exact)
    with open_job(Output(Colours()), options).model() as model:
        assert model.numerics.exact == exact


@pytest.mark.parametrize("exact", [False, True])
def test_a_model_plans_its_kernels_as_its_numerics_say(exact, monkeypatch):
    model = load_model(resolve_model("random:tiny,layers=1"), Numerics.plain(exact=exact))
    planned = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: planned.append(planned_rows(2, 1)))
    model.head.register_forward_hook(lambda *_: planned.append(planned_rows(2, 1)))
    with torch.no_grad():
        cache, _ = prefilled(model, "cpu", ())
        batch = make_batch(cache, [(cache.allocate(), [3, 4])])
        model.logits(model(batch, cache.layers).streams)
    assert planned == [1 if exact else 2] * 2
    assert planned_rows(2, 1) == 2
