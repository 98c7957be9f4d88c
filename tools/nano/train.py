"""Trains nano on one GPU: `python -m tools.nano.train --out FOLDER` writes its log to FOLDER/log.jsonl.

The schedule depends on the fraction of --minutes that has passed, so that any budget ends with a finished model.
"""

import argparse
import json
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from tools.nano.feed import Feed, Kind, Plan
from tools.nano.loss import Loss, Text, accuracy, loss_of
from tools.nano.model import Mode, Output, Twin
from tools.nano.quantise import Rounding, working_weights
from tools.nano.shape import nano_config, parameter_table
from tools.nano.state import State, load_state, new_state, save_state
from tools.nano.stream import packed

# rows and length of a batch: both have 69,632 tokens, so that functions of single tokens compile only once
SHAPES: dict[Kind, tuple[int, int]] = {"short": (136, 512), "long": (16, 4352)}
KINDS: dict[str, Kind] = {"S": "short", "L": "long"}
# fractions of the total time: start of rounding, start of sparse attention, duration of the final decay
ROUNDED_FROM, SPARSE_FROM, DECAY = 0.30, 0.45, 0.30
WARM_UP_STEPS = 200
CLIP = 1.0
# change of the router's biases per step (the sign rule of DeepSeek-V3, with fewer and larger steps)
BIAS_STEP = 4e-3
LOG_STEPS = 50
EVALUATE_S, SAVE_S = 120.0, 240.0
EVALUATION_BATCHES = 2


def phase(share: float) -> tuple[Rounding, Mode]:
    """Return what is rounded, and whether CSA is sparse, after this fraction of the time."""
    rounded = share >= ROUNDED_FROM
    return Rounding(rounded, rounded), Mode(activations=rounded, sparse=share >= SPARSE_FROM)


def decay(share: float) -> float:
    """Return 1, with linear decay to 0 over the last fraction DECAY of the time."""
    return min(1.0, max(0.0, (1 - share) / DECAY))


def rate(share: float, step: int) -> float:
    """Return the factor on the learning rate: warm-up over WARM_UP_STEPS, constant, then decay to 0."""
    return min((step + 1) / WARM_UP_STEPS, decay(share))


class Trainer:
    """A training run with its state, twin and log."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.config = nano_config()
        self.table = parameter_table(self.config)
        self.plan = Plan(SHAPES, tuple(KINDS[letter] for letter in arguments.order), arguments.seed)
        self.state: State = (
            load_state(arguments.resume, self.device, arguments.rate)
            if arguments.resume
            else new_state(self.config, arguments.seed, self.device, arguments.rate)
        )
        self.compiled = not arguments.no_compile
        self.twin = Twin(self.config, self.device, self.compiled)
        self.started = time.monotonic() - self.state.seconds
        self.recent: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.loads: dict[str, torch.Tensor] = {}
        self.tokens = 0

    @property
    def seconds(self) -> float:
        """Training time of all sessions."""
        return time.monotonic() - self.started

    @property
    def share(self) -> float:
        """The fraction of the total time that has passed."""
        return min(1.0, self.seconds / (60 * self.arguments.minutes))

    def train(self) -> None:
        """Train until the total time or this session's time is over."""
        end = self.seconds + 60 * (self.arguments.pause_after or float("inf"))
        evaluated = saved = logged = self.seconds
        names = ("minutes", "seed", "rate", "order", "device", "no_compile")
        self.log({"torch": torch.__version__} | {name: getattr(self.arguments, name) for name in names})
        with Feed(self.plan, packed, self.state.batches, self.arguments.workers) as feed:
            while self.share < 1 and self.seconds < end:
                kind, ids, weights = feed.take()
                self.step(kind, Text.of(ids, weights, self.device))
                self.state.batches = feed.next
                if self.state.step % LOG_STEPS == 0:
                    speed = self.tokens / (self.seconds - logged)
                    logged, self.tokens = self.seconds, 0
                    self.log({"tokens_per_s": round(speed)} | self.averages())
                if self.seconds - evaluated > EVALUATE_S:
                    self.log(self.evaluate())
                    evaluated = self.seconds
                if self.seconds - saved > SAVE_S:
                    self.save()
                    saved = self.seconds
        self.log(self.evaluate())
        self.save()

    def step(self, kind: Kind, text: Text) -> None:
        """Train on one batch. If compiled code fails, continue without compilation."""
        share, step = self.share, self.state.step
        result = self.try_compiled(text, share) if self.compiled else None
        loss, output = result or self.forward_backward(text, share)
        factor = rate(share, step - self.state.warmed_from)
        norm = torch.nn.utils.clip_grad_norm_(self.state.trained(), CLIP, foreach=True)
        for group in self.state.optimiser.param_groups:
            group["lr"] = self.arguments.rate * factor
        self.state.optimiser.step()
        self.state.optimiser.zero_grad()
        self.balance(output, BIAS_STEP * decay(share))
        self.state.step += 1
        self.tokens += text.ids.numel()
        self.recent[kind].append(loss.main)
        for name, value in (("draft", loss.draft), ("index", loss.index), ("norm", norm)):
            self.recent[name].append(value)

    def try_compiled(self, text: Text, share: float) -> tuple[Loss, Output] | None:
        """Call forward_backward. If it fails, switch to an uncompiled twin and return None."""
        try:
            return self.forward_backward(text, share)
        except RuntimeError:
            traceback.print_exc()
        self.compiled, self.twin = False, Twin(self.config, self.device)
        self.state.optimiser.zero_grad()
        self.log({"compiled": False})
        return None

    def forward_backward(self, text: Text, share: float) -> tuple[Loss, Output]:
        """Compute the loss of a batch, and leave gradients in the parameters."""
        rounding, mode = phase(share)
        weights = working_weights(self.state.parameters, self.table, rounding, self.dtype)
        output = text.run(self.twin, weights, mode)
        loss = loss_of(output, text, weights["head.weight"])
        loss.total.backward()
        return loss, output

    @torch.no_grad()
    def balance(self, output: Output, step: float) -> None:
        """Move each router's biases by one step towards equal loads."""
        for prefix, load in output.loads.items():
            bias = self.state.parameters[f"{prefix}ffn.gate.bias"]
            bias.add_(torch.sign(load.mean() - load), alpha=step)
        self.loads = output.loads

    def averages(self) -> dict[str, Any]:
        """Return means over the steps since the last log line, and the loads of the last step."""
        means = {name: round(torch.stack(values).mean().item(), 4) for name, values in self.recent.items()}
        self.recent.clear()
        loads = {name: [round(x, 3) for x in load.tolist()] for name, load in self.loads.items()}
        return {"loss": means, "loads": loads}

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Return the accuracy on batches that training never sees, rounded and sparse like the finished model."""
        rounding, mode = Rounding(True, True), Mode(activations=True, sparse=True)
        weights = working_weights(self.state.parameters, self.table, rounding, self.dtype)
        twin, results = Twin(self.config, self.device), {}
        for kind in SHAPES:
            found = defaultdict(list)
            for _ in range(EVALUATION_BATCHES):
                arrays = self.plan.held_back(packed, kind, self.state.evaluations)
                self.state.evaluations += 1
                text = Text.of(*arrays, self.device)
                for name, value in accuracy(text.run(twin, weights, mode), text, weights["head.weight"]).items():
                    found[name].append(value)
            results[kind] = {name: round(sum(values) / len(values), 4) for name, values in found.items()}
        return {"accuracy": results}

    def save(self) -> None:
        """Save everything needed to continue, and the current checkpoint."""
        self.state.seconds = self.seconds
        save_state(self.state, self.arguments.out)

    def log(self, values: dict[str, Any]) -> None:
        """Write one line to the log and to the terminal."""
        rounding, mode = phase(self.share)
        line: dict[str, Any] = {"step": self.state.step, "seconds": round(self.seconds, 1)}
        line |= {
            "share": round(self.share, 4),
            "rate": round(self.arguments.rate * rate(self.share, self.state.step), 6),
        }
        line |= {"rounded": rounding.weights, "sparse": mode.sparse} | values
        text = json.dumps(line)
        with (self.arguments.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text, flush=True)


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the log, the state and the checkpoint")
    parser.add_argument("--minutes", type=float, default=25.0, help="the whole time, sessions before a resume included")
    parser.add_argument("--pause-after", type=float, help="minutes of this session, after which it saves and ends")
    parser.add_argument("--resume", type=Path, help="folder of an earlier session")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--order", default="SLSLS", help="short and long batches, again and again")
    parser.add_argument("--workers", type=int, default=12, help="processes that make batches")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # products of bf16 values are exact in TF32, and the rest of training needs no more precision
    torch.set_float32_matmul_precision("high")
    # each function has one version for every kind of batch and phase
    torch._dynamo.config.recompile_limit = 64
    Trainer(arguments).train()


if __name__ == "__main__":
    main()
