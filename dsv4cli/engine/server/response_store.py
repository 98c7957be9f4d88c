"""Stored responses, which clients can continue, read and delete until the server stops. Does not import torch."""

import json
from asyncio import Task, wait
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

from dsv4cli.engine.server.accounts import Account
from dsv4cli.engine.server.refusals import Refusal, bad_field, to_bytes

# the most responses, and bytes of their JSON. The least recently used response is removed first.
MOST_RESPONSES, MOST_BYTES = 4096, 128 << 20
PREVIOUS = "previous_response_id"


@dataclass(frozen=True)
class StoredInput:
    """The items of a response's own input, as JSON, and their ids."""

    content: bytes
    ids: Sequence[str]

    @classmethod
    def of(cls, items: Sequence[dict[str, Any]]) -> "StoredInput":
        """Return items in the form in which they are stored. For a long input, call it outside of the event loop."""
        return cls(to_bytes({"items": items}), [item["id"] for item in items])

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items."""
        items: list[dict[str, Any]] = json.loads(self.content)["items"]
        return items


@dataclass(frozen=True)
class StoredResponse:
    """A response, as JSON, with its input.

    Attributes:
        owner: the account of the API key that created it. Others cannot see it.
        previous: the response that it continues.
        items: the ids of all its items.
    """

    document: bytes
    inputs: StoredInput
    owner: Account
    previous: str | None
    items: Sequence[str]

    @property
    def size(self) -> int:
        """Number of bytes."""
        return len(self.document) + len(self.inputs.content)


class ResponseStore:
    """A bounded store of responses in memory.

    Attributes:
        tasks: the tasks that answer background responses, by response.
    """

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._held: OrderedDict[str, StoredResponse] = OrderedDict()  # least recently used first
        self._response_of: dict[str, str] = {}  # the response that each item belongs to
        self._bytes = 0
        self._lock = RLock()  # long bodies are read in other threads
        self.tasks: dict[str, Task[None]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, document: dict[str, Any], inputs: StoredInput, owner: Account) -> None:
        """Store a response, or replace it. The least recently used ones are removed if there are too many."""
        name = document["id"]
        ids = [*inputs.ids, *(item["id"] for item in document["output"])]
        held = StoredResponse(to_bytes(document), inputs, owner, document[PREVIOUS], ids)
        with self._lock:
            self.remove(name)
            self._held[name] = held
            self._bytes += held.size
            for item in ids:
                self._response_of.setdefault(item, name)
            while self._held and (len(self._held) > self._most or self._bytes > self._most_bytes):
                self.remove(next(iter(self._held)))

    def remove(self, name: str) -> bool:
        """Remove a response. Return True if it was stored."""
        with self._lock:
            held = self._held.pop(name, None)
            if held is None:
                return False
            self._bytes -= held.size
            for item in held.items:
                if self._response_of.get(item) == name:
                    del self._response_of[item]
        return True

    def replace(self, document: dict[str, Any]) -> None:
        """Replace a response and keep its input. Does nothing if it was removed in the meantime."""
        held = self._held.get(document["id"])
        if held is not None:
            self.put(document, held.inputs, held.owner)

    def cancel(self, name: str) -> Task[None] | None:
        """Cancel the task that answers a background response. Return the task, None if it has ended."""
        task = self.tasks.get(name)
        if task is not None:
            task.cancel()
        return task

    async def cancelled(self, name: str) -> None:
        """Cancel the task that answers a background response, and wait until it has ended."""
        task = self.cancel(name)
        if task is not None:
            await wait({task})

    def document(self, name: str, owner: Account) -> dict[str, Any]:
        """Return a response. Raises `Refusal` if it is not stored."""
        document: dict[str, Any] = json.loads(self._find(name, owner).document)
        return document

    def inputs(self, name: str, owner: Account) -> list[dict[str, Any]]:
        """Return the items of a response's own input. Raises `Refusal` if it is not stored."""
        return self._find(name, owner).inputs.items

    def conversation(self, name: str, owner: Account) -> list[dict[str, Any]]:
        """Return the items of a response and of all responses before it: their inputs and outputs in order.

        Raises:
            Refusal: one of them is not stored, or is still being generated.
        """
        chain: list[StoredResponse] = []
        at: str | None = name
        while at is not None:
            held = self._touch(at, owner)
            if held is None:
                what = "it" if at == name else f"response {at!r}, which it continues,"
                reason = f"cannot continue {name!r}: {what} is not stored; send the whole conversation as input"
                raise Refusal(400, f"{PREVIOUS}: {reason}", PREVIOUS, "previous_response_not_found")
            if at in self.tasks:
                raise bad_field(PREVIOUS, f"cannot continue {name!r}: its answer is not complete")
            chain.append(held)
            at = held.previous
        return [item for held in reversed(chain) for item in [*held.inputs.items, *json.loads(held.document)["output"]]]

    def item(self, name: str, owner: Account) -> dict[str, Any] | None:
        """Return the item with an id, None if it is not stored."""
        response = self._response_of.get(name)
        held = None if response is None else self._touch(response, owner)
        if held is None:
            return None
        outputs = json.loads(held.document)["output"]
        found = next((item for item in outputs if item["id"] == name), None)
        return found or next(item for item in held.inputs.items if item["id"] == name)

    def _touch(self, name: str, owner: Account) -> StoredResponse | None:
        """Return a response, which is now the most recently used one; None if it is not stored."""
        with self._lock:
            held = self._held.get(name)
            if held is None or held.owner is not owner:
                return None
            self._held.move_to_end(name)
            return held

    def _find(self, name: str, owner: Account) -> StoredResponse:
        held = self._touch(name, owner)
        if held is None:
            raise Refusal(404, f"no response {name!r} is stored", "response_id", "response_not_found")
        return held
