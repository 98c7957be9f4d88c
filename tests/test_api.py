"""`from dsv4cli import Model`: the example of docs/python.md, and what surrounds it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dsv4cli
from dsv4cli import Model
from dsv4cli.errors import ModelNotFound, UnsupportedHardware, UsageError
from tests.support.golden_data import remember_weights

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "python.md"
HI = [{"role": "user", "content": "What is 17 + 25?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}}
WEATHER = {"name": "get_weather", "description": "Get the weather in a city.", "parameters": CITY}


@pytest.fixture(scope="module")
def loaded():
    with Model("nano", device="cpu") as model:
        yield model


@pytest.fixture
def nano(loaded, monkeypatch):
    remember_weights(monkeypatch)
    return loaded


def test_the_example_of_the_documentation(capsys):
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(DOCUMENT), "exec"), {})
    assert capsys.readouterr() == (shown, "")


def test_a_reply_in_pieces(nano):
    reply = nano.stream(HI, temperature=0)
    assert reply.finish_reason is None
    with pytest.raises(UsageError, match="has not ended"):
        _ = reply.message
    pieces = list(reply)
    assert len(pieces) > 3
    assert reply.message == nano.chat("What is 17 + 25?", temperature=0)
    said = {"role": "assistant", "content": "".join(pieces)}
    assert reply.message == {**said, "reasoning_content": "", "tool_calls": []}
    assert reply.finish_reason == "stop"


def test_thinking_and_tools(nano):
    thought = nano.chat("What is 2 + 3?", think="high", temperature=0)
    assert "5" in thought["content"]
    assert thought["reasoning_content"]
    called = nano.chat(
        "What is the weather in Paris?", tools=[{"type": "function", "function": WEATHER}], temperature=0
    )
    [call] = called["tool_calls"]
    assert (call["function"]["name"], call["id"]) == ("get_weather", "call_1_0")
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"temperature": 5}'}
    messages = [{"role": "user", "content": "What is the weather in Paris?"}, called, result]
    assert "5" in nano.chat(messages, tools=[{"type": "function", "function": WEATHER}], temperature=0)["content"]


@pytest.mark.parametrize(("draft", "drafter", "most"), [("off", "none", 0), (2, "mtp", 2), ("2", "mtp", 2)])
def test_drafts(draft, drafter, most):
    with Model("random:tiny,layers=1", device="cpu", draft=draft) as model:
        conversation = model._open()
        assert conversation.model.config.drafter == drafter
        report = conversation.engine.draft_report()
        assert (0 if report is None else len(report.per_position)) == most


@pytest.mark.parametrize("draft", ["off", 2])
def test_a_caller_with_another_default_device(draft):
    # a tensor of the meta device has no values: whatever is created there by mistake cannot be read
    with torch.device("meta"), Model("random:tiny,layers=1", device="cpu", draft=draft) as model:
        assert model.chat("hi", max_tokens=3)["role"] == "assistant"


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_exact(dtype, exact):
    with Model("random:tiny,layers=1", device="cpu", dtype=dtype, exact=exact) as model:
        assert model._open().model.numerics.exact == exact


@pytest.mark.parametrize("draft", ["on", 8, -1, True])
def test_drafts_that_cannot_be(draft):
    with pytest.raises(UsageError, match="--draft cannot be"):
        Model("random:tiny,layers=1", draft=draft)


def test_limits(nano):
    reply = nano.stream(HI, max_tokens=2, temperature=0)
    assert list(reply)
    assert reply.finish_reason == "length"
    assert nano.chat(HI, stop=["="], temperature=0)["content"] == "17 + 25 "
    assert nano.chat(HI, stop="= 4", temperature=0)["content"] == "17 + 25 "


def test_a_reply_that_another_ends(nano):
    first = nano.stream(HI, temperature=0)
    next(first)
    assert nano.chat(HI, temperature=0)["content"] == "17 + 25 = 42."
    assert list(first) == []


def test_a_score(nano):
    found = nano.score("17 + 25 = 42.", logprobs=2)
    assert found.ids == nano.score(found.ids).ids
    assert found.logprobs[0] is None
    assert len(found.top) == len(found.ids)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda model: model.chat([]), UsageError),
        (lambda model: model.chat([{"role": "nobody", "content": "Hi"}]), UsageError),
        (lambda model: model.chat(HI, think="hard"), UsageError),
        (lambda model: model.chat(HI, temperature=-1), UsageError),
        (lambda model: model.chat("a b " * 9000), UsageError),
        (lambda model: model.score([]), UsageError),
        (lambda model: Model("no/such/folder/at/all"), ModelNotFound),
        (lambda model: Model(device="cuda:99"), UnsupportedHardware),
        (lambda model: Model(device="tpu"), UsageError),
        (lambda model: Model(dtype="int8"), UsageError),
        (lambda model: Model(backend="cuda"), UsageError),
        (lambda model: Model(gpu_memory=-1), UsageError),
    ],
)
def test_refusals(nano, call, error):
    with pytest.raises(error) as caught:
        call(nano)
    assert caught.value.remedy
    assert nano.chat(HI, temperature=0, max_tokens=1)["content"] == "1"


def test_a_closed_model():
    model = Model("random:tiny,layers=1", device="cpu")
    model.close()
    model.close()
    with pytest.raises(UsageError, match="closed"):
        model.chat(HI)


def test_the_package_itself_loads_no_torch_and_is_typed():
    code = "import sys, dsv4cli; assert dsv4cli.__version__; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert (Path(dsv4cli.__file__).parent / "py.typed").exists()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dsv4cli.nothing
