"""A conversation on several ranks: the leader names every reply that it begins, and followers compute it too."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

import torch

from dsv4cli.engine.chat.conversation import Reply, Talk
from dsv4cli.engine.chat.dialogue import Dialogue
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.followers import Followers
from dsv4cli.engine.parallel.processes import lost_others
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.engine.text.prompt import Message
from dsv4cli.errors import NotEnoughMemory, RankLost, UnsoundResult

GO_ON = "dsv4 chat --continue goes on after the last finished turn"


class LeadingTalk(Talk):
    """A conversation that followers compute too; it has the same model, dialogue and limits as theirs at first."""

    def __init__(
        self,
        model: Transformer,
        dialogue: Dialogue,
        limits: Limits,
        device: torch.device | str,
        followers: Followers,
    ) -> None:
        super().__init__(model, dialogue, limits, device)
        self._followers = followers
        followers.rest()

    def reply(self, messages: Sequence[Message], sampling: Sampling, *, think_budget: int | None = None) -> Reply:
        """As of any conversation; but where memory is short RankLost, for the others may have had enough."""
        reply = super().reply(messages, sampling, think_budget=think_budget)
        self._followers.tell(
            {
                "messages": list(messages),
                "sampling": asdict(sampling),
                "think_budget": think_budget,
                "limits": asdict(self.limits),
                "thinking": self.dialogue.thinking,
                "effort": self.dialogue.effort,
            }
        )
        self._reply = self._led(reply)
        return self._reply

    def _led(self, reply: Reply) -> Reply:
        watched = False
        try:
            yield from reply
        except NotEnoughMemory as error:
            raise RankLost(error.message, GO_ON) from None
        except Exception as error:
            watched = lost_others(error)  # whoever watches the ranks sees which one has ended, and how
            raise
        finally:
            if not watched:
                self._followers.rest()


def follow(talk: Talk, orders: Iterable[str]) -> None:
    """Computes every reply that the orders name. Raises NotEnoughMemory."""
    for line in orders:
        order = json.loads(line)
        talk.limits = Limits(**{**order["limits"], "stops": tuple(order["limits"]["stops"])})
        talk.dialogue = replace(talk.dialogue, thinking=order["thinking"], effort=order["effort"])
        with suppress(UnsoundResult):  # of which rank 0 tells
            for _ in talk.reply(order["messages"], Sampling(**order["sampling"]), think_budget=order["think_budget"]):
                pass
