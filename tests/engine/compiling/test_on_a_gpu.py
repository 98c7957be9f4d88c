"""After what was compiled ahead, nothing is compiled in a step, whatever its prompts, drafts and neighbours."""

import random

import pytest
import torch

pytest.importorskip("triton")

from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.compiling.card import card_of
from dsv4cli.engine.compiling.compile_ahead import Compilation, found_memory
from dsv4cli.engine.compiling.demand import demand_of
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import AUTO_DRAFTING, Limits, Sampling
from dsv4cli.engine.system.backend import use
from dsv4cli.engine.weights.load import load_model
from dsv4cli.engine.weights.placement import MemoryLimits

SAMPLINGS = [Sampling(), Sampling(0.0), Sampling(1.0, 0.5)]
LIMITS = Limits(max_tokens=12, max_context=700)


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [1, 5])
def test_nothing_is_compiled_in_a_step(monkeypatch, tmp_path, sequences):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source, device, numerics = resolve_model("random:tiny"), torch.device("cuda"), Numerics.reference()
    lengths = None if sequences == 1 else [700] * sequences
    config, formats = source.identity.config, source.identity.formats
    demand = demand_of(
        config,
        formats,
        numerics,
        LIMITS,
        SAMPLINGS,
        AUTO_DRAFTING,
        lengths,
        memory=found_memory(device, MemoryLimits()),
    )
    draw = random.Random(sequences)
    with use("triton"), Compilation(demand, card_of(device), 0) as ahead:
        model = load_model(source, numerics, device=device, drafting=AUTO_DRAFTING)
        counts = ahead.wait(lambda counts: None)
        assert (counts.failed, counts.compiled) == ([], counts.found)
        engine = Engine(model, Capacity(sequences, 700), device, drafting=AUTO_DRAFTING)
        for sampling in SAMPLINGS * 3:
            for _ in range(sequences):
                prompt = [draw.randrange(256) for _ in range(draw.choice((1, 5, 40, draw.randrange(1, 600))))]
                engine.add(Request(prompt, sampling, LIMITS, stop_ids=()))
            while engine.busy:
                engine.step()
    assert engine.compiled == 0
