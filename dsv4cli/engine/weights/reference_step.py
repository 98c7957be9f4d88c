"""An upper estimate of what one step allocates beside weights and cache, with the reference kernels; no torch.

Each term counts the tensors that are alive together at the widest point of one part of the model, in bytes. T tokens of
B sequences; D hidden, N streams, H heads of width d, K chosen experts of inner width I.
"""

from dsv4cli.engine.config.capacity import LIST_BLOCK, PRODUCT_ROWS, ROLLBACK
from dsv4cli.engine.config.formats import STORAGE, FormatName, is_quantised
from dsv4cli.engine.config.layer_kind import CSA, HCA
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats

# bytes of an activation (bf16), of fp32, of an index (int64)
ACTIVATION, FP32, INDEX = 2, 4, 8
# bytes for each value of a matrix while it is dequantised, and once it is
WIDENED = {form: (6, 4) for form in STORAGE if is_quantised(form)} | {"bf16": (4, 4), "f32": (0, 0)}
# fp8_round, and the Hadamard rotation with fp4_round, for each value: at most so many copies in fp32
ROUNDED = 4 * FP32
ROTATED = 8 * FP32
# for each score that is sorted: the mask, the scores masked, sorted and as they were, their order; on a GPU the buffers
# of the sort beside them (33 bytes in all on an H200, torch 2.13)
SORTED = 1 + 3 * ACTIVATION + INDEX
SORTED_ON_GPU = SORTED + 19


class WidestStep:
    """The widest points of a step; `config` is one rank's part of the model."""

    def __init__(
        self, config: ModelConfig, formats: Formats, *, tokens: int, batch: int, context: int, on_gpu: bool
    ) -> None:
        self.config = config
        self.formats = formats
        self.tokens = tokens
        self.multiplied = -(-tokens // PRODUCT_ROWS) * PRODUCT_ROWS
        self.batch = batch
        self.sorted = SORTED_ON_GPU if on_gpu else SORTED
        self.entries = {ratio: context // ratio if ratio in config.compress_ratios else 0 for ratio in (CSA, HCA)}
        self.hidden = tokens * config.hidden_size
        self.queries = tokens * config.num_attention_heads * config.head_dim

    def peak(self) -> int:
        """The lists of the batch, which last for the step, and the widest point."""
        return int(
            self.lists()
            + max(self.connections(), self.projections(), self.indexer(), self.attention(), self.experts(), self.head())
        )

    def lists(self) -> float:
        """Ids, positions, blocks, window rows, rotations, the table of entries, the lists of HCA layers."""
        c, listed = self.config, self.entries[HCA]
        rows = 8 + c.sliding_window + (c.sliding_window + 2 * listed if listed else 0)
        rotations = 3 * c.qk_rope_head_dim // 2  # complex64
        blocks = self.entries[HCA] + 4
        return INDEX * (self.tokens * (rows + rotations) + self.batch * (blocks + sum(self.entries.values())))

    def base(self) -> int:
        """The streams before a block, in it and after it, their weights; a sublayer's input and output."""
        streams = self.config.hc_mult
        return ACTIVATION * self.hidden * (3 * streams + 2) + 3 * FP32 * self.tokens * streams * (streams + 1)

    def connections(self) -> float:
        """connect_post: the streams, the sum and the product [T, N, N, D], all in fp32."""
        streams = self.config.hc_mult
        return self.base() + FP32 * self.hidden * (streams * (streams + 2) + 1)

    def linear(self, rows: int, columns: int, form: FormatName) -> float:
        """A linear of the reference: its matrix in fp32, input and output in fp32 and rounded."""
        widening, held = WIDENED[form]
        product = held * rows * columns + FP32 * self.multiplied * (columns + rows)
        return max(
            widening * rows * columns,
            product,
            (FP32 + ACTIVATION) * self.tokens * rows,
            ROUNDED * self.tokens * columns,
        )

    def projections(self) -> float:
        """Queries up, their norm, and the grouped output beside the window keys."""
        c, form = self.config, self.formats
        inner, width = c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim
        widening, held = WIDENED[form.output]
        matrix = inner * width // c.o_groups
        grouped = max(widening * matrix, held * matrix + FP32 * self.tokens * (width // c.o_groups + 2 * inner))
        rotated = 3 * ACTIVATION * self.queries
        return (
            self.base()
            + self.inputs()
            + max(
                ACTIVATION * self.tokens * c.q_lora_rank + self.linear(width, c.q_lora_rank, form.linear),
                (2 * FP32 + 2 * ACTIVATION) * self.queries,
                rotated + 4 * FP32 * self.tokens * c.num_attention_heads * c.qk_rope_head_dim,
                rotated + grouped,
                rotated + 2 * ACTIVATION * self.tokens * inner + self.linear(c.hidden_size, inner, form.linear),
            )
        )

    def compressor(self, ratio: int, width: int) -> float:
        """Values and scores of the step, then behind those of the rings, then of the members of each new group."""
        channels, span = (2 * width, 2 * ratio) if ratio == CSA else (width, ratio)
        rings = self.batch * (span + ROLLBACK)
        members = self.tokens + self.batch * ratio
        rows = 4 * self.tokens + 3 * rings + 4 * members
        return FP32 * (channels * (rows + self.config.hidden_size) + self.multiplied * self.config.hidden_size)

    def indexer(self) -> float:
        """The compressors; then queries of the indexer, scores of all entries, their order, the chosen ones."""
        c, entries, tokens = self.config, self.entries[CSA], self.tokens
        before = self.base() + self.inputs() + ACTIVATION * (self.queries + tokens * c.q_lora_rank)
        pools = [self.compressor(ratio, c.head_dim) for ratio in (CSA, HCA) if ratio in c.compress_ratios]
        if 4 not in c.compress_ratios:
            return before + max(pools, default=0)
        heads = tokens * c.index_n_heads
        padded = -(-entries // LIST_BLOCK) * LIST_BLOCK
        scored = padded * (self.batch * INDEX + tokens * ACTIVATION) + (FP32 + ACTIVATION) * heads * c.index_head_dim
        candidates = [
            *pools,
            self.linear(c.index_n_heads * c.index_head_dim, c.q_lora_rank, self.formats.linear),
            ROTATED * heads * c.index_head_dim,
            scored + LIST_BLOCK * (4 * FP32 * heads + (ACTIVATION + FP32) * tokens * c.index_head_dim),
            scored + ACTIVATION * tokens * padded,
            tokens * entries * self.sorted,
            INDEX * tokens * (6 * min(c.index_topk, entries) + 3 * c.sliding_window),
        ]
        return before + max(candidates)

    def inputs(self) -> int:
        """What attention holds to its end: latent queries, keys, raw rows of compressors, queries of the indexer; for
        long chunks the rings of the sequences with the step's keys behind them."""
        c, wide = self.config, 0
        if 4 in c.compress_ratios:
            wide = 4 * (c.head_dim + c.index_head_dim) + c.index_n_heads * c.index_head_dim // 2
        elif 128 in c.compress_ratios:
            wide = 2 * c.head_dim
        made = self.tokens * ACTIVATION * (c.q_lora_rank + 2 * c.head_dim) + self.multiplied * FP32 * wide
        if self.tokens <= self.batch * (ROLLBACK + 1):
            return made
        ring = c.sliding_window + ROLLBACK
        return made + ACTIVATION * (2 * self.batch * ring + self.tokens) * c.head_dim

    def attention(self) -> float:
        """One block of rows beside the block before it; then the running sums in fp32 with the block added."""
        c = self.config
        lists = INDEX * self.tokens * (c.sliding_window + min(c.index_topk, self.entries[CSA]))
        rows = LIST_BLOCK * self.tokens * c.head_dim
        scores = FP32 * LIST_BLOCK * self.tokens * c.num_attention_heads
        reading = 2 * FP32 * self.queries + (FP32 + 3 * ACTIVATION) * rows + 2 * scores
        adding = 5 * FP32 * self.queries + FP32 * rows + 4 * scores
        return self.base() + self.inputs() + lists + ACTIVATION * self.queries + max(reading, adding)

    def experts(self) -> float:
        """One expert over its tokens beside the outputs of those before it, the input and the rows of it that are its;
        then all outputs, put in order. The attention's output, which is in the streams by now, is still there."""
        c, form = self.config, self.formats
        chosen = self.hidden * c.num_experts_per_tok
        order = 11 * INDEX * self.tokens * c.num_experts_per_tok
        router = FP32 * (self.hidden + c.n_routed_experts * (c.hidden_size + 4 * self.tokens))
        return (
            self.base()
            + ACTIVATION * self.hidden
            + max(
                ACTIVATION * (chosen + 3 * self.hidden) + order + self.expert(form.experts),
                (3 * ACTIVATION + FP32) * chosen + order + 2 * FP32 * self.hidden,
                (FP32 + 2 * ACTIVATION) * self.hidden + self.expert(form.linear),
                router,
            )
        )

    def expert(self, form: FormatName) -> float:
        """One expert over all tokens: gate, up, their product, and a linear; the clamps take no more than rounding."""
        hidden, inner = self.config.hidden_size, self.config.moe_intermediate_size
        return 3 * ACTIVATION * self.tokens * inner + max(
            self.linear(inner, hidden, form), self.linear(hidden, inner, form)
        )

    def head(self) -> float:
        """The head in fp32, the logits of the sequences and what is drawn from them."""
        c = self.config
        matrix = WIDENED[self.formats.dense][1] * c.vocab_size * c.hidden_size
        return self.base() + matrix + 6 * FP32 * self.batch * c.vocab_size
