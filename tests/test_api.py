"""`from dsv4cli import Model`: the example of docs/reference/python.md, and what surrounds it."""

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import dsv4cli
from dsv4cli import Model
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.errors import ModelNotFound, NotEnoughMemory, UnsupportedHardware, UsageError
from tests.support.golden_data import remember_weights
from tests.support.slow import slow, slow_rows

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "reference" / "python.md"
HI = [{"role": "user", "content": "What is 17 + 25?"}]
TINY = "random:tiny,layers=1"
ANSWER = "17 + 25 = 42."
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
    with pytest.raises(UsageError, match="not complete yet"):
        _ = reply.message
    pieces = list(reply)
    assert len(pieces) > 3
    assert reply.message == nano.chat("What is 17 + 25?", temperature=0)
    said = {"role": "assistant", "content": "".join(pieces)}
    assert reply.message == {**said, "reasoning_content": "", "tool_calls": []}
    assert (reply.finish_reason, reply.repairs) == ("stop", [])


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


@pytest.mark.parametrize(("draft", "drafter", "most"), [("off", "none", 0), (2, "mtp", 2), *slow_rows(("2", "mtp", 2))])
def test_drafts(draft, drafter, most):
    with Model("random:tiny,layers=1", device="cpu", draft=draft) as model:
        conversation = model._open()
        assert conversation.model.config.drafter == drafter
        report = conversation.engine.draft_report()
        assert (0 if report is None else len(report.per_position)) == most


@pytest.mark.parametrize("draft", [*slow("off"), 2])
def test_a_caller_with_another_default_device(draft):
    # a tensor of the meta device has no values: whatever is created there by mistake cannot be read
    with torch.device("meta"), Model("random:tiny,layers=1", device="cpu", draft=draft) as model:
        assert model.chat("hi", max_tokens=3)["role"] == "assistant"


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", ["auto", *slow("float32")])
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


def test_a_reply_goes_on_after_another(nano):
    first = nano.stream(HI, temperature=0)
    begun = next(first)
    assert nano.chat(HI, temperature=0)["content"] == ANSWER
    assert begun + "".join(first) == ANSWER
    assert (first.finish_reason, first.message["content"]) == ("stop", ANSWER)


@pytest.fixture
def tiny():
    with Model(TINY, device="cpu", parallel=2) as model:
        yield model


def test_a_reply_that_is_closed_or_deleted_gives_up_its_place(tiny, steps):
    closed, deleted = tiny.stream(HI, seed=1), tiny.stream(HI, seed=2)
    next(closed)
    closed.close()
    assert (list(closed), closed.finish_reason) == ([], None)
    next(deleted)
    del deleted
    steps.clear()
    tiny.chat(HI, seed=3, max_tokens=3)
    assert {len(step) for step in steps} == {1}
    assert not tiny._open().engine.busy


@pytest.fixture
def steps(monkeypatch):
    """The results of each step of any engine from now on."""
    found, step = [], Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: found.append(step(engine)) or found[-1])
    return found


def in_threads(*calls):
    """What each call returns, or the error that it raises, with all of them begun before any has ended."""
    begin, found = threading.Barrier(len(calls)), [None] * len(calls)

    def run(number, call):
        begin.wait(60)
        try:
            found[number] = call()
        except Exception as error:  # noqa: BLE001 - what it raises is the answer
            found[number] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("parallel", [2, *slow(1)])
def test_each_of_several_threads_gets_what_it_gets_alone(parallel, steps):
    with Model(TINY, device="cpu", parallel=parallel) as model:
        chats = [lambda seed=seed: model.chat(HI, seed=seed, max_tokens=5)["content"] for seed in range(3)]
        alone = [*(chat() for chat in chats), model.score("text").ids]
        steps.clear()
        assert in_threads(*chats, lambda: model.score("text").ids) == alone
    assert len({*alone[:3]}) == 3
    assert max(len(step) for step in steps) <= parallel


def test_replies_share_steps_or_wait(tiny, steps):
    replies = [tiny.stream(HI, seed=seed, max_tokens=5) for seed in range(3)]
    for reply in replies[:2]:
        next(reply)
    steps.clear()
    assert all("".join(reply) for reply in reversed(replies))
    # two at once, and the third when there is a place
    assert len(steps[0]) == 2
    assert len(steps[-1]) == 1
    assert len({reply.message["content"] for reply in replies}) == 3


def test_a_step_that_fails_ends_the_calls_that_wait_and_no_later_one(tiny, monkeypatch):
    waiting = [tiny.stream(HI, seed=seed) for seed in range(3)]
    for one in waiting[:2]:
        next(one)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", lambda _: (_ for _ in ()).throw(NotEnoughMemory("no memory", "take less")))
        found = in_threads(*(lambda one=one: list(one) for one in waiting))
    assert [type(error) for error in found] == [NotEnoughMemory] * 3
    assert tiny.chat(HI, seed=1, max_tokens=3)["role"] == "assistant"


def test_a_model_that_is_closed_ends_replies():
    model = Model(TINY, device="cpu")
    reply = model.stream(HI, seed=1)
    next(reply)
    model.close()
    with pytest.raises(UsageError, match="closed"):
        list(reply)


@pytest.mark.parametrize("parallel", [0, 65])
def test_a_number_of_calls_that_cannot_be(parallel):
    with pytest.raises(UsageError, match="parallel cannot be"):
        Model("random:tiny,layers=1", parallel=parallel)


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
    ],
)
def test_refusals(nano, call, error):
    with pytest.raises(error) as caught:
        call(nano)
    assert caught.value.remedy
    assert nano.chat(HI, temperature=0, max_tokens=1)["content"] == "1"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: Model("no/such/folder/at/all"), ModelNotFound),
        (lambda: Model(device="cuda:99"), UnsupportedHardware),
        (lambda: Model(device="tpu"), UsageError),
        (lambda: Model(dtype="int8"), UsageError),
        (lambda: Model(backend="cuda"), UsageError),
        (lambda: Model(gpu_memory=-1), UsageError),
    ],
)
def test_models_that_cannot_be(call, error):
    with pytest.raises(error) as caught:
        call()
    assert caught.value.remedy


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
