"""Stored responses: what is kept, and what is removed first."""

import pytest

from dsv4cli.engine.server.accounts import ANYONE, Account
from dsv4cli.engine.server.refusals import Refusal
from dsv4cli.engine.server.response_store import ResponseStore, StoredInput


def put(store, name, previous=None, text="a", owner=ANYONE):
    inputs = [{"type": "message", "id": f"in_{name}", "role": "user", "content": text}]
    output = [{"type": "message", "id": f"out_{name}", "role": "assistant", "content": text}]
    store.put({"id": name, "previous_response_id": previous, "output": output}, StoredInput.of(inputs), owner)


def ids(items):
    return [item["id"] for item in items]


def test_a_conversation_is_its_inputs_and_outputs_in_order():
    store = ResponseStore()
    put(store, "a")
    put(store, "b", "a")
    put(store, "c", "b")
    assert ids(store.conversation("c", ANYONE)) == ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"]
    assert store.item("out_b", ANYONE)["id"] == "out_b"
    assert store.item("in_b", ANYONE)["id"] == "in_b"
    assert store.remove("b")
    assert not store.remove("b")
    assert (store.item("out_b", ANYONE), ids(store.conversation("a", ANYONE))) == (None, ["in_a", "out_a"])
    with pytest.raises(Refusal, match="response 'b', which it continues, is not stored"):
        store.conversation("c", ANYONE)


def test_the_least_recently_used_is_removed_first():
    store = ResponseStore(most=3)
    for name in "abc":
        put(store, name)
    put(store, "d", "a")  # as a continuation is stored: after its conversation was read
    assert [store.item(f"out_{name}", ANYONE) is not None for name in "abcd"] == [False, True, True, True]
    assert store.conversation("b", ANYONE)
    put(store, "e")
    assert [store.item(f"out_{name}", ANYONE) is not None for name in "bcde"] == [True, False, True, True]
    assert len(store) == 3


def test_the_bytes_are_limited():
    store = ResponseStore(most_bytes=3000)
    put(store, "a", text="a" * 600)
    put(store, "b", text="b" * 600)
    assert len(store) == 2
    put(store, "a", text="c" * 600)  # replaced
    assert len(store) == 2
    put(store, "c", text="d" * 600)
    assert [store.item(f"out_{name}", ANYONE) is not None for name in "abc"] == [True, False, True]
    put(store, "d", text="e" * 3000)  # too large by itself
    assert len(store) == 0
    put(store, "e")
    assert len(store) == 1


def test_an_item_of_another_response_is_not_taken_over():
    store = ResponseStore()
    put(store, "a")
    output = [{"type": "message", "id": "out_a", "role": "assistant", "content": "other"}]
    store.put({"id": "b", "previous_response_id": None, "output": output}, StoredInput.of([]), ANYONE)
    assert store.item("out_a", ANYONE)["content"] == "a"


def test_another_account_does_not_see_it():
    store, other = ResponseStore(), Account()
    put(store, "a")
    put(store, "b", "a", owner=other)
    assert store.document("a", ANYONE)["id"] == "a"
    assert store.item("out_a", other) is None
    for look in (store.document, store.inputs, store.conversation):
        with pytest.raises(Refusal, match="'a'"):
            look("a", other)
    with pytest.raises(Refusal, match="response 'a', which it continues, is not stored"):
        store.conversation("b", other)
