"""Trains a drafter: `python -m tools.nano.train_drafter MODEL TEXT --out FOLDER` writes its log to FOLDER/log.jsonl.

MODEL is nano (its MTP block, for chains of drafts) or nano-0731 (DSpark). TEXT is a file of tools.nano.pool. The trunk
is nano's: it reads TEXT once and does not change. The schedule depends on the fraction of --minutes that has passed, so
that any budget ends with a finished drafter.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.runtime.drafts.drafters import default_drafts
from tools.nano import pool
from tools.nano.drafter import DrafterTwin
from tools.nano.drafting import Blocks, DraftLoss, Seen, draft_loss
from tools.nano.dspark import DSparkTwin
from tools.nano.export import DRAFTER, export_drafter, parameters_of, read_masters
from tools.nano.model import Loads, Mode
from tools.nano.mtp import MTPTwin
from tools.nano.quantise import Rounding, working_weights
from tools.nano.shape import VALUES, VALUES_0731, initial_parameters, parameter_table
from tools.nano.state import save_masters, state_of

NANO = Path(__file__).resolve().parents[2] / "dsv4cli" / "nano"
WARM_UP_STEPS, DECAY, CLIP, BIAS_STEP = 100, 0.7, 1.0, 4e-3
LOG_STEPS, SAVE_S = 50, 300.0
# rows per batch of the trunk, and rows at the end of the text that training never sees
TRUNK_ROWS, HELD_BACK = 40, 40
# everything is rounded from the first step on, because the trunk's weights are
MODE = Mode(activations=True, sparse=True)


@dataclass(frozen=True)
class Model:
    """A model with nano's trunk.

    Attributes:
        values: its config.json.
        twin: class of its drafter's twin.
        begun: training continues from nano's own drafter.
    """

    values: Mapping[str, Any]
    twin: type[DrafterTwin]
    begun: bool


MODELS = {"nano": Model(VALUES, MTPTwin, begun=True), "nano-0731": Model(VALUES_0731, DSparkTwin, begun=False)}


class Trainer:
    """A training run with its state, text and log."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.device = arguments, torch.device(arguments.device)
        self.started = time.monotonic()
        torch.manual_seed(arguments.seed)
        self.model = MODELS[arguments.model]
        self.config = parse_config(self.model.values, arguments.model)
        self.size = default_drafts(self.config)
        self.table = parameter_table(self.config)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        nano = parameters_of(NANO)
        given = {name: tensor.to(self.device) for name, tensor in nano.items() if not name.startswith(DRAFTER)}
        self.trunk = working_weights(given, self.table, Rounding(False, True), self.dtype)
        first = nano if self.model.begun else initial_parameters(self.config, arguments.seed)
        first = read_masters(arguments.resume) if arguments.resume else first
        found = {name: tensor for name, tensor in first.items() if name.startswith(DRAFTER)}
        self.state = state_of(found, self.device, arguments.rate)
        # weights of a step: leaf tensors, whose gradients are applied to the fp32 parameters
        self.weights = {name: tensor.requires_grad_() for name, tensor in self.rounded().items()}
        self.twin = self.model.twin(self.config, self.device)
        self.ids, self.learned = self.text(arguments.text)
        self.seen = self.read()
        self.begun = self.seconds
        self.total = torch.zeros(2 + 3 * self.size, device=self.device)

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self.started

    @property
    def share(self) -> float:
        """The fraction of the time for training steps that has passed."""
        left = max(60 * self.arguments.minutes - self.begun, 1.0)
        return min(1.0, (self.seconds - self.begun) / left)

    def text(self, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids int64 and learned bool [N, S] on the device."""
        ids, learned = pool.read(path)
        return ids.to(self.device).long(), learned.to(self.device)

    def read(self) -> Seen:
        """Run the trunk over the whole text."""
        parts = [self.twin.see(self.trunk, ids, MODE) for ids in self.ids.split(TRUNK_ROWS)]
        return Seen(torch.cat([part.context for part in parts]), torch.cat([part.main for part in parts]))

    @torch.no_grad()
    def rounded(self) -> dict[str, torch.Tensor]:
        """Return the weights of a step: rounded as stored, in the dtype of the computation."""
        return working_weights(self.state.parameters, self.table, Rounding(True, True), self.dtype)

    def train(self) -> None:
        """Train until the time is over."""
        names = ("model", "minutes", "seed", "rate", "rows", "places", "device")
        self.log({"torch": torch.__version__} | {name: getattr(self.arguments, name) for name in names})
        inputs = self.inputs(self.random_rows())
        run = self.launched(inputs)
        saved = self.seconds
        while self.share < 1:
            for ours, theirs in zip(flat(inputs), flat(self.inputs(self.random_rows())), strict=True):
                ours.copy_(theirs)
            loss, loads = run()
            self.update(loads)
            self.total += loss.numbers()
            if self.state.step % LOG_STEPS == 0:
                self.log(self.averages(LOG_STEPS))
            if self.seconds - saved > SAVE_S:
                self.save()
                saved = self.seconds
        self.save()
        self.log({"held_back": self.evaluate()})

    def random_rows(self) -> torch.Tensor:
        """Return random row numbers for a step: int64 [B]."""
        return torch.randint(len(self.ids) - HELD_BACK, (self.arguments.rows,), device=self.device)

    def inputs(self, rows: torch.Tensor) -> tuple[Seen, Blocks]:
        """Return the inputs of a step for rows int64 [B]."""
        blocks = Blocks.choose(self.ids[rows], self.learned[rows], self.arguments.places, self.size)
        return Seen(self.seen.context[rows], self.seen.main[rows]), blocks

    def forward_backward(self, seen: Seen, blocks: Blocks) -> tuple[DraftLoss, Loads]:
        """Compute the loss of a batch, and leave gradients in the weights."""
        for tensor in self.weights.values():
            tensor.grad = None
        loss, loads = self.loss(seen, blocks)
        loss.total.backward()
        return loss, loads

    def loss(self, seen: Seen, blocks: Blocks) -> tuple[DraftLoss, Loads]:
        """Return the loss of a batch and the loads of the experts."""
        drafted = self.twin(self.trunk, self.weights, seen.context, blocks, MODE)
        return draft_loss(drafted, blocks, seen.main, self.trunk["head.weight"]), drafted.loads

    def launched(self, inputs: tuple[Seen, Blocks]) -> Callable[[], tuple[DraftLoss, Loads]]:
        """Return a call of forward_backward over these inputs; on a GPU as a CUDA graph if it can be captured."""
        if self.device.type != "cuda":
            return lambda: self.forward_backward(*inputs)
        try:
            graph, results = self.captured(inputs)
        except RuntimeError:
            traceback.print_exc()
            self.log({"graph": False})
            return lambda: self.forward_backward(*inputs)

        def replay() -> tuple[DraftLoss, Loads]:
            graph.replay()
            return results

        return replay

    def captured(self, inputs: tuple[Seen, Blocks]) -> tuple[torch.cuda.CUDAGraph, tuple[DraftLoss, Loads]]:
        """Capture forward_backward over these inputs as a CUDA graph. Return it and its result tensors."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.forward_backward(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = self.forward_backward(*inputs)
        return graph, results

    def update(self, loads: Loads) -> None:
        """Update the parameters from the gradients of the weights, and the routers' biases from the loads."""
        decay = min(1.0, (1 - self.share) / DECAY)
        for name, parameter in self.state.parameters.items():
            gradient = self.weights[name].grad
            # a router's bias has no gradient
            parameter.grad = None if gradient is None else gradient.float()
        torch.nn.utils.clip_grad_norm_(self.state.trained(), CLIP, foreach=True)
        for group in self.state.optimiser.param_groups:
            group["lr"] = self.arguments.rate * min((self.state.step + 1) / WARM_UP_STEPS, decay)
        self.state.optimiser.step()
        for prefix, load in loads.items():
            self.state.parameters[f"{prefix}ffn.gate.bias"].add_(
                torch.sign(load.mean() - load), alpha=BIAS_STEP * decay
            )
        with torch.no_grad():
            torch._foreach_copy_([*self.weights.values()], [*self.rounded().values()])
        self.state.step += 1

    def averages(self, steps: int) -> dict[str, Any]:
        """Return means over the last steps. right, accepted: share of drafts by place in a block."""
        entropy, confidence = (self.total[:2] / steps).tolist()
        wanted, right, accepted = self.total[2:].view(3, -1)
        shares = {"right": right / wanted, "accepted": accepted / wanted}
        found: dict[str, Any] = {"entropy": round(entropy, 4), "confidence": round(confidence, 4)}
        found |= {name: [round(x, 4) for x in share.tolist()] for name, share in shares.items()}
        self.total.zero_()
        return found

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Return the same values for text that training never sees."""
        self.total.zero_()
        rows = torch.arange(len(self.ids) - HELD_BACK, len(self.ids), device=self.device)
        self.total += self.loss(*self.inputs(rows))[0].numbers()
        return self.averages(1)

    def save(self) -> None:
        """Save the fp32 parameters and the current checkpoint."""
        save_masters(self.state, self.arguments.out)
        export_drafter(self.state.parameters, self.model.values, NANO, self.arguments.out / "checkpoint")

    def log(self, values: dict[str, Any]) -> None:
        """Write one line to the log and to the terminal."""
        line = {"step": self.state.step, "seconds": round(self.seconds, 1), "share": round(self.share, 4)} | values
        text = json.dumps(line)
        with (self.arguments.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text, flush=True)


def flat(inputs: tuple[Seen, Blocks]) -> list[torch.Tensor]:
    """Return all tensors of a step's inputs."""
    return [tensor for part in inputs for tensor in vars(part).values()]


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("text", type=Path, help="a file of tools.nano.pool")
    parser.add_argument("--out", type=Path, required=True, help="folder of the log, the parameters and the checkpoint")
    parser.add_argument("--resume", type=Path, help="folder of an earlier run, whose parameters this one begins with")
    parser.add_argument("--minutes", type=float, default=1.0, help="the whole time, reading the text included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--rows", type=int, default=24, help="rows of text in a step")
    parser.add_argument("--places", type=int, default=96, help="blocks in a row")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # products of bf16 values are exact in TF32, and the rest of training needs no more precision
    torch.set_float32_matmul_precision("high")
    Trainer(arguments).train()


if __name__ == "__main__":
    main()
