"""Supplies training batches: worker processes make them, and they are read in one fixed order."""

import multiprocessing
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

Kind = Literal["short", "long"]
Arrays = tuple[np.ndarray, np.ndarray]
# tools.nano.stream.packed: kind, seed, rows, length -> ids uint16 and weights float16, both [rows, length + 2]
Maker = Callable[[str, int, int, int], Arrays]
# number of batch seeds per training seed; seeds from EVALUATION_SEEDS on are for evaluation only
SEEDS_PER_RUN, EVALUATION_SEEDS = 10_000_000, 1_000_000_000
# batches that a worker makes in advance
AHEAD = 4
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Plan:
    """The sequence of batches.

    Attributes:
        shapes: rows and length of each kind, all of similar total size.
        order: the kinds, repeated.
    """

    shapes: dict[Kind, tuple[int, int]]
    order: tuple[Kind, ...]
    seed: int

    def kind(self, number: int) -> Kind:
        """Return the kind of the batch with this number."""
        return self.order[number % len(self.order)]

    def make(self, maker: Maker, number: int) -> Arrays:
        """Make the batch with this number."""
        kind = self.kind(number)
        return maker(kind, self.seed * SEEDS_PER_RUN + number, *self.shapes[kind])

    def held_back(self, maker: Maker, kind: Kind, number: int) -> Arrays:
        """Make a batch that training never sees."""
        return maker(kind, EVALUATION_SEEDS + number, *self.shapes[kind])


class Feed:
    """A context manager that yields batches from `first` on. Batches are assigned to workers in turn, by number."""

    def __init__(self, plan: Plan, maker: Maker, first: int, workers: int) -> None:
        self.plan = plan
        self.next = first
        context = multiprocessing.get_context("spawn")
        self.queues = [context.Queue(AHEAD) for _ in range(workers)]
        self.processes: list[BaseProcess] = [
            context.Process(target=_work, args=(plan, maker, number, first, workers, self.queues[number]), daemon=True)
            for number in range(workers)
        ]

    def __enter__(self) -> "Feed":
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.terminate()
            process.join()

    def take(self) -> tuple[Kind, np.ndarray, np.ndarray]:
        """Return the next batch: kind, ids, weights. Raises RuntimeError if its worker has died or hangs."""
        number, self.next = self.next, self.next + 1
        worker = number % len(self.queues)
        try:
            ids, weights = self.queues[worker].get(timeout=PATIENCE_S)
        except queue.Empty:
            state = "hangs" if self.processes[worker].is_alive() else "has died"
            raise RuntimeError(f"the worker of batch {number} {state}") from None
        return self.plan.kind(number), ids, weights


def _work(
    plan: Plan, maker: Maker, worker: int, first: int, workers: int, made: "multiprocessing.Queue[Arrays]"
) -> None:
    number = first + (worker - first) % workers
    while True:
        made.put(plan.make(maker, number))
        number += workers
