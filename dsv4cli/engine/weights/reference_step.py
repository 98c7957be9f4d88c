"""An upper bound of the memory that one step of the reference kernels allocates besides weights and cache; no torch.

Each term is the bytes of the tensors alive at the peak of one part of the model. T tokens of B sequences; D hidden
size, N streams, H heads of width d, K experts per token of intermediate size I.
"""

from dsv4cli.engine.config.capacity import LIST_BLOCK, PRODUCT_ROWS, ROLLBACK
from dsv4cli.engine.config.formats import STORAGE, FormatName, is_quantised
from dsv4cli.engine.config.layer_kind import CSA, HCA
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats

# bytes of an activation (bf16), of fp32, of an index (int64)
ACTIVATION, FP32, INDEX = 2, 4, 8
# bytes per value of a matrix, while it is dequantized and afterwards
WIDENED = {form: (6, 4) for form in STORAGE if is_quantised(form)} | {"bf16": (4, 4), "f32": (0, 0)}
# bytes per value of fp8_round, and of the Hadamard rotation with fp4_round: fp32 copies alive at once
ROUNDED = 4 * FP32
ROTATED = 8 * FP32
# bytes per sorted score: the mask, the scores (original, masked and sorted) and their order; on a GPU also the sort's
# buffers (33 bytes in total on an H200, torch 2.13)
SORTED = 1 + 3 * ACTIVATION + INDEX
SORTED_ON_GPU = SORTED + 19


class WidestStep:
    """Peak memory of each part of a step. `config` has one rank's shard of the dimensions."""

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
        """Return the bytes of the batch's index lists, which live for the whole step, plus the largest peak."""
        return int(
            self.lists()
            + max(self.connections(), self.projections(), self.indexer(), self.attention(), self.experts(), self.head())
        )

    def lists(self) -> float:
        """Return the bytes of ids, positions, blocks, window rows, rotations, entry table and lists of HCA layers."""
        c, listed = self.config, self.entries[HCA]
        rows = 8 + c.sliding_window + (c.sliding_window + 2 * listed if listed else 0)
        rotations = 3 * c.qk_rope_head_dim // 2  # complex64
        blocks = self.entries[HCA] + 4
        return INDEX * (self.tokens * (rows + rotations) + self.batch * (blocks + sum(self.entries.values())))

    def base(self) -> int:
        """Return the bytes of the streams before, in and after a block, and of a sublayer's input and output."""
        streams = self.config.hc_mult
        return ACTIVATION * self.hidden * (3 * streams + 2) + 3 * FP32 * self.tokens * streams * (streams + 1)

    def connections(self) -> float:
        """Return the peak memory of connect_post: the streams, the sum and the product [T, N, N, D], all in fp32."""
        streams = self.config.hc_mult
        return self.base() + FP32 * self.hidden * (streams * (streams + 2) + 1)

    def linear(self, rows: int, columns: int, form: FormatName) -> float:
        """Return the peak memory of a reference linear: its matrix in fp32, input and output in fp32 and rounded."""
        widening, held = WIDENED[form]
        product = held * rows * columns + FP32 * self.multiplied * (columns + rows)
        return max(
            widening * rows * columns + FP32 * self.tokens * columns,
            product,
            (FP32 + ACTIVATION) * self.tokens * rows,
            ROUNDED * self.tokens * columns,
        )

    def projections(self) -> float:
        """Return the peak memory of attention's projections: queries and their norm; or output with window keys."""
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
        """Return the peak memory of a compressor: values and scores of the step, the rings and new groups' members."""
        channels, span = (2 * width, 2 * ratio) if ratio == CSA else (width, ratio)
        rings = self.batch * (span + ROLLBACK)
        members = self.tokens + self.batch * ratio
        rows = 4 * self.tokens + 3 * rings + 4 * members
        return FP32 * (channels * (rows + self.config.hidden_size) + self.multiplied * self.config.hidden_size)

    def indexer(self) -> float:
        """Return the peak memory of the compressors and the indexer: its queries, scores, sort order and selection."""
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
        """Return the bytes that attention keeps until its end: latent queries, keys, compressor rows, indexer queries.

        For long chunks also the sequences' rings with the step's keys appended.
        """
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
        """Return the peak memory of attention: while it reads list rows, or while it adds a block to the sums."""
        c = self.config
        lists = INDEX * self.tokens * (c.sliding_window + min(c.index_topk, self.entries[CSA]))
        rows = LIST_BLOCK * self.tokens * c.head_dim
        scores = FP32 * LIST_BLOCK * self.tokens * c.num_attention_heads
        reading = 2 * FP32 * self.queries + (FP32 + 3 * ACTIVATION) * rows + 2 * scores
        adding = 5 * FP32 * self.queries + FP32 * rows + 4 * scores
        return self.base() + self.inputs() + lists + ACTIVATION * self.queries + max(reading, adding)

    def experts(self) -> float:
        """Return the peak memory of the experts.

        It is one expert over its tokens, with the outputs of earlier experts, the input and the expert's rows of it; or
        all outputs while they are put in order. Attention's output is still alive, although already added to the
        streams.
        """
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
        """Return the peak memory of one expert over all tokens: gate, up, their product, and a linear.

        The clamps need no more memory than rounding.
        """
        hidden, inner = self.config.hidden_size, self.config.moe_intermediate_size
        return 3 * ACTIVATION * self.tokens * inner + max(
            self.linear(inner, hidden, form), self.linear(hidden, inner, form)
        )

    def head(self) -> float:
        """Return the peak memory of the head: its fp32 matrix, the sequences' logits, and sampling."""
        c = self.config
        matrix = WIDENED[self.formats.dense][1] * c.vocab_size * c.hidden_size
        return self.base() + matrix + 6 * FP32 * self.batch * c.vocab_size
