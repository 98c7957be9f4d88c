"""What is asked of the model: a prompt, and how what follows it is drawn; no torch."""

from dataclasses import dataclass

from dsv4cli.engine.settings import Limits, Sampling


@dataclass(frozen=True)
class Request:
    """The tokens of a prompt, how what follows them is drawn, and when it ends at the latest."""

    ids: list[int]
    sampling: Sampling
    limits: Limits
