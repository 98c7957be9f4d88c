"""A request's options: the server's defaults apply to every field that the body does not set."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.plan import sampling_of
from dsv4cli.engine.settings import Sampling


@dataclass(frozen=True)
class Extended(Sampling):
    """Sampling with one more field, which no code of the server names."""

    extra: int = 0


def test_the_servers_defaults_apply_to_every_field_that_a_body_does_not_set():
    usual = Extended(temperature=0.7, top_p=0.9, extra=5)
    service = SimpleNamespace(
        defaults=SimpleNamespace(sampling=usual),
        seed=lambda given: 3 if given is None else given,
        dialogue=SimpleNamespace(config=SimpleNamespace(vocab_size=10)),
    )
    assert sampling_of(Fields({}), service) == replace(usual, seed=3)
    assert sampling_of(Fields({"temperature": 0.2, "seed": 8}), service) == replace(usual, temperature=0.2, seed=8)
    assert sampling_of(Fields({"top_p": 0}), service) == replace(usual, temperature=0.0, top_p=1.0, seed=3)
    more = {"top_k": 5, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -2, "repetition_penalty": 1.5}
    assert sampling_of(Fields(more), service) == replace(usual, seed=3, **more)
    usual = replace(usual, top_k=9)
    service.defaults.sampling = usual
    assert sampling_of(Fields({"top_k": -1}), service) == replace(usual, top_k=0, seed=3)
    biased = sampling_of(Fields({"logit_bias": {"4": -1.5}}), service)
    assert biased == replace(usual, seed=3, logit_bias=((4, -1.5),))
