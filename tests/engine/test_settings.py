"""What a user can choose is checked when it is chosen."""

from dataclasses import replace

import pytest

from dsv4cli.engine.checkpoint.generation_config import own_sampling
from dsv4cli.engine.config.capacity import ROLLBACK
from dsv4cli.engine.settings import (
    MAX_SEED,
    MIN_TEMPERATURE,
    MOST_DRAFTS,
    Drafting,
    Limits,
    Sampling,
    check_device,
    parse_drafting,
)
from dsv4cli.errors import CheckpointError, UsageError


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": MIN_TEMPERATURE / 2},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": float("nan")},
        {"presence_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": 101.0},
        {"repetition_penalty": float("nan")},
        {"seed": -1},
        {"seed": MAX_SEED + 1},
    ],
    ids=str,
)
def test_sampling_that_cannot_be(values):
    option = "--" + next(iter(values)).replace("_", "-")
    with pytest.raises(UsageError, match=f"^{option} cannot be "):
        Sampling(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 0},
        {"max_context": 1},
        {"prefill_chunk": 0},
        {"logprobs": -1},
        {"stops": ("a", "")},
    ],
    ids=str,
)
def test_limits_that_cannot_be(values):
    option = "--" + next(iter(values)).replace("_", "-").removesuffix("s")
    with pytest.raises(UsageError, match=f"^{option}s? cannot be ") as caught:
        Limits(**values)
    assert caught.value.remedy


@pytest.mark.parametrize("bias", [((1, 100.5),), ((1, float("nan")),), ((1, 2.0), (2, 1.0), (1, 2.0))], ids=str)
def test_a_bias_that_cannot_be(bias):
    with pytest.raises(UsageError, match=r"^logit_bias cannot be "):
        Sampling(logit_bias=bias)


def test_what_can_be():
    Sampling(logit_bias=((0, -100.0), (1, 100.0)))
    Sampling(0.0, 1e-9, 0)
    Sampling(MIN_TEMPERATURE, 1.0, MAX_SEED)
    Sampling(1e30)
    Sampling(top_k=2**40, min_p=1.0, presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=0.01)
    Limits(1, 2, 1, 0, ("a",))
    for name in ("auto", "cpu", "cuda", "cuda:0", "cuda:15"):
        check_device(name)


@pytest.mark.parametrize("name", ["", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:1234", "cuda:0\n", "CPU", "cuda:١"])
def test_a_device_that_is_called_so_nowhere(name):
    with pytest.raises(UsageError, match="--device cannot be "):
        check_device(name)


@pytest.mark.parametrize(
    ("text", "sampling"),
    [
        (None, Sampling(1.0, 1.0)),
        ("{}", Sampling(1.0, 1.0)),
        ('{"do_sample": true, "temperature": 0.6, "top_p": 0.95}', Sampling(0.6, 0.95)),
        ('{"do_sample": false, "temperature": 0.6}', Sampling(0.0, 1.0)),
        ('{"do_sample": null, "temperature": null, "top_p": null}', Sampling(1.0, 1.0)),
        ('{"temperature": null, "top_p": 0.95}', Sampling(1.0, 0.95)),
        (
            '{"top_k": 50, "min_p": 0.1, "repetition_penalty": 1.05}',
            Sampling(top_k=50, min_p=0.1, repetition_penalty=1.05),
        ),
    ],
)
def test_what_a_model_asks_for(tmp_path, text, sampling):
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert own_sampling(tmp_path) == sampling


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"temperature": -1}',
        '{"temperature": "warm"}',
        '{"top_p": [1]}',
        '{"temperature": true}',
        '{"top_k": 1.5}',
        "\udcff",
        "[" * 100_000,
        '{"temperature": 1' + "0" * 400 + "}",
    ],
    ids=range(10),
)
def test_a_generation_config_that_cannot_be_used(tmp_path, text):
    (tmp_path / "generation_config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be used"):
        own_sampling(tmp_path)


def test_what_is_given_is_chosen():
    own = Sampling(0.6, 0.95)
    assert own.chosen(None, None, 3) == Sampling(0.6, 0.95, 3)
    assert own.chosen(0.0, 0.5, 3) == Sampling(0.0, 0.5, 3)
    more = {"top_k": 0, "min_p": 0.1, "presence_penalty": None, "repetition_penalty": 1.5, "unknown": 3}
    expected = Sampling(0.6, 0.95, 3, top_k=0, min_p=0.1, frequency_penalty=0.5, repetition_penalty=1.5)
    assert replace(own, top_k=7, frequency_penalty=0.5).chosen(None, None, 3, more) == expected
    assert len({own.chosen(None, None, None).seed for _ in range(4)}) > 1
    assert Sampling(0.6, 0.95, logit_bias=((1, 2.0),)).chosen(0.0, None, 3) == Sampling(0.0, 0.95, 3, ((1, 2.0),))


@pytest.mark.parametrize(("text", "most"), [("auto", None), ("off", 0), ("1", 1), ("7", 7)])
def test_what_drafts_are_asked_for(text, most):
    assert parse_drafting(text) == Drafting(most)
    assert Drafting(most).required is (most in (1, 7))


@pytest.mark.parametrize("text", ["", "0", "8", "-1", "1.5", "on", "AUTO", "٣", "07", "9" * 5000])
def test_drafts_that_cannot_be(text):
    with pytest.raises(UsageError, match=r"^--draft cannot be ") as error:
        parse_drafting(text)
    assert error.value.remedy == "use auto, off or a number from 1 to 7"


def test_the_newest_token_and_its_drafts_can_be_taken_back():
    assert MOST_DRAFTS + 1 == ROLLBACK
