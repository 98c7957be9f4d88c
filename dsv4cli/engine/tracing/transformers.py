"""Records what transformers' DeepseekV4ForCausalLM computes, by hooks on its modules. Does not import transformers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from dsv4cli.engine.tracing.manifest import Text, TraceManifest
from dsv4cli.engine.tracing.recording import Writer, make_folder
from dsv4cli.engine.tracing.stages import AFTER_ATTENTION, BY_NAME, LOGITS, STREAMS

# (arguments of a module, its result, the model's configuration) -> rows of a stage
Read = Callable[[Sequence[Any], Any, Any], torch.Tensor]


class Seen(NamedTuple):
    """How to observe a stage of a layer: the module to hook, and how to extract the stage from its call."""

    stage: str
    module: str
    rows: Read


def _ordered(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sort experts' values by expert number."""
    return values.gather(-1, indices.argsort(-1))


def _entries(chosen: torch.Tensor) -> torch.Tensor:
    """Return chosen entries [1, T, k] in ascending order, -1 last."""
    none = torch.iinfo(chosen.dtype).max
    found = chosen.masked_fill(chosen < 0, none).sort(-1).values
    return found.masked_fill(found == none, -1)[0]


# transformers' module -> our stage, in order of computation. Queries and keys of attention are missing: functions
# rotate them, which hooks cannot see
TABLE = (
    Seen("hc_attn.post", "attn_hc", lambda _, given, __: given[0][0]),
    Seen("hc_attn.comb", "attn_hc", lambda _, given, __: given[1][0]),
    Seen("attn.input", "input_layernorm", lambda _, given, __: given[0]),
    Seen("attn.wq_a", "self_attn.q_a_proj", lambda _, given, __: given[0]),
    Seen("attn.entries", "self_attn.compressor", lambda _, given, __: given[0][0, 0]),
    Seen("indexer.q", "self_attn.compressor.indexer.scorer", lambda args, _, __: args[0][0]),
    Seen("indexer.entries", "self_attn.compressor.indexer.scorer", lambda args, _, __: args[1][0]),
    Seen("indexer.weights", "self_attn.compressor.indexer.scorer.weights_proj", lambda _, given, __: given[0]),
    Seen("indexer.chosen", "self_attn.compressor.indexer", lambda _, given, __: _entries(given)),
    Seen(
        "attn.o",
        "self_attn.o_a_proj",
        lambda args, _, config: args[0][0].flatten(1).unflatten(1, (-1, config.head_dim)),
    ),
    Seen("attn.output", "self_attn", lambda _, given, __: given[0][0]),
    Seen(AFTER_ATTENTION, "ffn_hc", lambda args, _, __: args[0][0]),
    Seen("hc_ffn.post", "ffn_hc", lambda _, given, __: given[0][0]),
    Seen("hc_ffn.comb", "ffn_hc", lambda _, given, __: given[1][0]),
    Seen("ffn.input", "post_attention_layernorm", lambda _, given, __: given[0]),
    Seen("gate.chosen", "mlp.gate", lambda _, given, __: given[2].sort(-1).values),
    Seen("gate.weights", "mlp.gate", lambda _, given, __: _ordered(given[2], given[1])),
    Seen("ffn.output", "mlp", lambda _, given, __: given[0]),
)


@contextmanager
def recorded_transformers(model: Any, ids: Sequence[int], folder: Path, prompt: int | None = None) -> Iterator[None]:
    """Record everything that `model(input_ids=...)` computes in the block, as one text.

    Calls must pass these ids in order, with or without a KV cache. Requires transformers 5.17 or later.

    Args:
        ids: all token ids of the text.
        prompt: how many ids are the prompt; all by default. Logits are recorded of its last token and later tokens.

    Raises:
        UsageError: the folder is not empty.
    """
    config = model.config
    text = Text(tuple(ids), len(ids) if prompt is None else prompt)
    rates = {**config.compress_rates, "sliding_attention": 0}
    count = config.num_hidden_layers
    manifest = TraceManifest(
        model=type(model).__name__,
        texts=(text,),
        layers=(0, count),
        layers_of_model=count,
        ratios=tuple(rates[kind] for kind in config.layer_types),
        hidden=config.hidden_size,
        streams=config.hc_mult,
        dtype=str(model.dtype).removeprefix("torch."),
        simulate=False,
    )
    make_folder(folder)
    recorder = _Recorder(model, manifest, Writer(folder, manifest))
    hooks = list(recorder.hooks())
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    manifest.write(folder)


class _Recorder:
    """Counts the tokens that have gone through the model, and passes rows to a writer."""

    def __init__(self, model: Any, manifest: TraceManifest, writer: Writer) -> None:
        self.model, self.manifest, self.writer = model, manifest, writer
        self.first = self.tokens = 0

    def hooks(self) -> Iterator[Any]:
        """Hook the modules of every layer, the hyper-head and the LM head."""
        for layer, block in enumerate(self.model.model.layers):
            yield block.register_forward_pre_hook(lambda _, args, layer=layer: self._streams(layer, args[0][0]))
            for seen in TABLE:
                module = self._find(block, seen.module)
                if module is not None:
                    yield module.register_forward_hook(self._hook(layer, seen))
            yield block.register_forward_hook(lambda *_, layer=layer: self.writer.end_layer(layer))
        last = len(self.model.model.layers)
        yield self.model.model.hc_head.register_forward_pre_hook(lambda _, args: self._streams(last, args[0][0]))
        yield self.model.lm_head.register_forward_hook(lambda _, __, given: self._end(last, given[0]))

    @staticmethod
    def _find(block: nn.Module, path: str) -> nn.Module | None:
        module: nn.Module | None = block
        for name in path.split("."):
            module = getattr(module, name, None)
        return module

    def _hook(self, layer: int, seen: Seen) -> Callable[..., None]:
        def hook(_: nn.Module, args: Sequence[Any], given: Any) -> None:
            self._take(layer, seen.stage, seen.rows(args, given, self.model.config))

        return hook

    def _streams(self, layer: int, rows: torch.Tensor) -> None:
        self.tokens = len(rows)
        self._take(layer, STREAMS, rows)

    def _take(self, layer: int, stage: str, rows: torch.Tensor) -> None:
        one = BY_NAME[stage]
        if stage == "indexer.chosen":
            width = min(self.model.config.index_topk, len(self.manifest.texts[0].ids) // self.manifest.ratios[layer])
            rows = F.pad(rows, (0, width - rows.shape[-1]), value=-1)
        # each call has all entries so far
        self.writer.take(layer, stage, 0 if one.per == "entry" else self.first, rows.int() if one.choices else rows)

    def _end(self, layer: int, logits: torch.Tensor) -> None:
        """Record the logits of a call: of all its tokens, or of the last ones."""
        end = self.first + self.tokens
        last = self.manifest.texts[0].prompt - 1
        rows = logits[max(0, last - (end - len(logits))) :]
        self.writer.take(layer, LOGITS, max(0, end - len(rows) - last), rows.float())
        self.writer.end_layer(layer)
        self.first = end
