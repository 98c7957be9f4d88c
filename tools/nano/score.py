"""Scores nano: `python -m tools.nano.score [MODEL]` asks the held-out questions and prints a line for each task."""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dsv4cli.engine.chat.answers import generate_answers
from dsv4cli.engine.chat.dialogue import Dialogue, open_dialogue
from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource, resolve_model
from dsv4cli.engine.model.attention import Attention
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.state import LayerCache
from dsv4cli.engine.runtime.drafts.drafters import default_drafts
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.engine.system.device import resolve_device
from dsv4cli.engine.text.prompt import EFFORTS, with_tools
from dsv4cli.engine.weights.load import load_model
from tools.nano.acceptance import Acceptance, acceptance
from tools.nano.heldout import BANDS, load
from tools.nano.judge import is_right

Item = dict[str, Any]
# conversations in one batch; a long one needs most of the memory of a step
TOGETHER = 8
LIMITS = Limits(max_tokens=400)


class Asking:
    """A model's prompt formats, with and without thinking."""

    def __init__(self, source: FolderSource | RandomSource) -> None:
        # the lowest effort adds nothing to the prompt in either release
        least = EFFORTS[source.identity.release][0]
        self.dialogues = {thinking: open_dialogue(source, least if thinking else "off") for thinking in (False, True)}

    def dialogue(self, item: Item) -> Dialogue:
        """Return the prompt format for the item."""
        return self.dialogues[bool(item["thinking"])]

    def prompt(self, item: Item) -> list[int]:
        """Return the ids that `dsv4 run` would pass to the model."""
        return self.dialogue(item).prompt(with_tools(item["messages"], item["tools"])).ids


class Examinee(Asking):
    """A loaded model that answers items."""

    def __init__(self, name: str, device: str) -> None:
        source = resolve_model(name)
        super().__init__(source)
        self.device = resolve_device(device)
        self.model = load_model(source, Numerics.reference(), device=self.device)

    def replies(self, items: Sequence[Item]) -> Iterator[tuple[Item, dict[str, Any]]]:
        """Yield the greedy reply to each item, as `Answer.record()` returns it, in any order."""
        for thinking in (False, True):
            # batch conversations of similar length
            asked = sorted((i for i in items if bool(i["thinking"]) == thinking), key=lambda i: len(self.prompt(i)))
            for start in range(0, len(asked), TOGETHER):
                yield from self._together(asked[start : start + TOGETHER])

    def _together(self, items: Sequence[Item]) -> Iterator[tuple[Item, dict[str, Any]]]:
        requests = [Request(self.prompt(item), Sampling(0.0), LIMITS) for item in items]
        for number, answer, _ in generate_answers(self.model, self.dialogue(items[0]), requests, self.device):
            if answer.finish:
                yield items[number], answer.record()

    def right(self, items: Sequence[Item]) -> dict[str, list[bool]]:
        """Return whether each reply is right, by task; retrieval by distance band."""
        found: dict[str, list[bool]] = defaultdict(list)
        for item, reply in self.replies(items):
            found[kind(item)].append(is_right(item, reply))
        return dict(found)

    def acceptance(self, items: Sequence[Item]) -> dict[str, Acceptance]:
        """Return the acceptance of drafts after each token of the replies, by task."""
        found: dict[str, Acceptance] = {}
        for item, reply in self.replies(items):
            prompt = self.prompt(item)
            one = acceptance(self.model, prompt + reply["ids"], len(prompt), default_drafts(self.model.config))
            found[kind(item)] = found[kind(item)] + one if kind(item) in found else one
        return found


def kind(item: Item) -> str:
    """Return the task and, for retrieval, the distance band in tokens."""
    if "distance" not in item:
        return str(item["task"])
    low, high = max((band for band in BANDS if band[0] <= item["distance"]), default=BANDS[0])
    return f"{item['task']} {low} to {high}"


@contextmanager
def window_only() -> Iterator[None]:
    """Make every layer attend only to its sliding window, so that earlier tokens are lost."""

    def nothing(self: Attention, rows: Any, index_q: Any, batch: Batch, cache: LayerCache) -> Any:
        return self.attn_sink.new_zeros(0, self.config.head_dim, dtype=self.numerics.dtype), batch.window_index

    entries = Attention.entries
    Attention.entries = nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        Attention.entries = entries  # type: ignore[method-assign]


def report(title: str, found: dict[str, list[bool]]) -> None:
    """Return a line for each task."""
    for name, right in sorted(found.items()):
        print(f"{title}{name:32} {sum(right):4} of {len(right):4}  {sum(right) / len(right):6.1%}", flush=True)


def report_drafts(found: dict[str, Acceptance]) -> None:
    """Return a line for each task, and one for all."""
    print("accepted of all drafts of a step, the share by place, and the tokens of a step that verifies them:")
    every = [*found.values()]
    for name, one in [*sorted(found.items()), ("all", sum(every[1:], every[0]))]:
        shares = " ".join(f"{share:6.1%}" for share in one.shares)
        print(f"{name:32} {one.length:5.2f}  {shares}  {one.tokens / one.steps:5.2f} of {one.tokens}", flush=True)


def main() -> None:
    """Parse the arguments, ask the questions, print the scores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="nano")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--every", type=int, default=1, help="ask every N-th question")
    arguments = parser.parse_args()
    started, examinee = time.monotonic(), Examinee(arguments.model, arguments.device)
    items = load()[:: arguments.every]
    report("", examinee.right(items))
    far = [item for item in items if item.get("distance", 0) >= BANDS[1][0]]
    with window_only():
        report("without entries: ", examinee.right(far))
    report_drafts(examinee.acceptance(items[::4]))
    print(f"{time.monotonic() - started:.0f} s on {examinee.device}")


if __name__ == "__main__":
    main()
