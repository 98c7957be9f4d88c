"""An upper bound of the memory that one step of the reference kernels allocates besides weights and cache; no torch.

Each term is the bytes of the tensors alive at the peak of one part of the model. T tokens of B sequences; D hidden
size, N streams, H heads of width d, K experts per token of intermediate size I.
"""

from dsv4cli.engine.config.capacity import BLOCK_TOKENS, HEAD_VALUES, LIST_BLOCK, PRODUCT_ROWS, ROLLBACK, TILED_ROWS
from dsv4cli.engine.config.formats import STORAGE, FormatName, is_quantised
from dsv4cli.engine.config.layer_kind import CSA, HCA
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats

# bytes of an activation (bf16), of fp32, of an index (int64)
ACTIVATION, FP32, INDEX = 2, 4, 8
# bytes per value of a matrix, while it is dequantized and afterwards; a GPU converts FP8 without a table lookup
WIDENED = {form: (6, 4) for form in STORAGE if is_quantised(form)} | {"bf16": (4, 4), "f32": (0, 0)}
WIDENED_ON_GPU = WIDENED | {"fp8": (4, 4), "fp8_f32": (4, 4)}
# bytes per value of fp8_round, and of the Hadamard rotation with fp4_round: fp32 copies alive at once
ROUNDED = 4 * FP32
ROTATED = 8 * FP32
# bytes per sorted score: the mask, the scores (original, masked and sorted) and their order; on a GPU also the sort's
# buffers (33 bytes in total on an H200, torch 2.13)
SORTED = 1 + 3 * ACTIVATION + INDEX
SORTED_ON_GPU = SORTED + 19
# bytes per sampled logit: the counts of penalized tokens and, on a CPU, the penalties in fp64; on a GPU three kinds of
# logits, noise, probabilities, and 44 bytes for their sort with its buffers (from PyTorch's code, not measured)
SAMPLED = 15 * FP32
SAMPLED_ON_GPU = 17 * FP32


class WidestStep:
    """Peak memory of each part of a step. `config` has one rank's shard of the dimensions."""

    def __init__(
        self, config: ModelConfig, formats: Formats, *, tokens: int, batch: int, context: int, on_gpu: bool
    ) -> None:
        self.config = config
        self.formats = formats
        self.tokens = tokens
        self.multiplied = -(-tokens // PRODUCT_ROWS) * PRODUCT_ROWS
        # a few tokens are multiplied in tiles, whose outputs are joined; the last one's rows are repeated to fill it
        self.tiles = 2 if PRODUCT_ROWS < tokens <= TILED_ROWS else 1
        last = tokens % PRODUCT_ROWS
        self.filled = -(-PRODUCT_ROWS // last) * last if last and tokens <= TILED_ROWS else 0
        self.batch = batch
        self.sorted = SORTED_ON_GPU if on_gpu else SORTED
        self.sampled = SAMPLED_ON_GPU if on_gpu else SAMPLED
        self.widened = WIDENED_ON_GPU if on_gpu else WIDENED
        self.blocks = -(-context // BLOCK_TOKENS)
        self.entries = {ratio: context // ratio if ratio in config.compress_ratios else 0 for ratio in (CSA, HCA)}
        self.hidden = tokens * config.hidden_size
        self.queries = tokens * config.num_attention_heads * config.head_dim

    def peak(self) -> int:
        """Return the bytes of the batch's index lists, which live for the whole step, plus the largest peak."""
        return int(
            self.lists()
            + max(self.connections(), self.projections(), self.indexer(), self.attention(), self.experts(), self.head())
        )

    def lists(self) -> int:
        """Return the bytes of ids, positions, blocks, window rows, rotations, entries and lists of HCA layers."""
        c = self.config
        rows = 8 + c.sliding_window
        if HCA in c.compress_ratios:
            rows += c.sliding_window + 2 * self.entries[HCA]
        rotation = c.qk_rope_head_dim // 2  # complex64
        listed = INDEX * (self.tokens * (rows + 3 * rotation) + self.batch * (self.blocks + 5))
        for ratio in self.entries.keys() & {*c.compress_ratios}:
            completed = self.tokens // ratio + self.batch
            # the five numbers of a group and its cell
            listed += INDEX * (completed * (6 + rotation) + self.batch * self.blocks * (BLOCK_TOKENS // ratio))
        return listed

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
        widening, held = self.widened[form]
        inputs, outputs = FP32 * (self.tokens + self.filled) * columns, FP32 * self.multiplied * rows
        return max(
            widening * rows * columns + inputs,
            held * rows * columns + inputs + self.tiles * outputs,
            inputs + outputs + max(ACTIVATION, FP32 * (form == "nvfp4")) * self.tokens * rows,
            ROUNDED * self.tokens * columns,
        )

    def projections(self) -> float:
        """Return the peak memory of attention's projections: queries and their norm; or output with window keys."""
        c, form = self.config, self.formats
        inner, width = c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim
        widening, held = self.widened[form.output]
        matrix = inner * width // c.o_groups
        # fewer tokens than a tile are copied for all groups at once
        copied = self.filled * (width if self.tokens < PRODUCT_ROWS else width // c.o_groups)
        products = FP32 * (copied + self.multiplied * (2 * inner + self.tiles * c.o_lora_rank))
        grouped = FP32 * self.queries + max(widening * matrix, held * matrix + products)
        rotated, attended = 3 * ACTIVATION * self.queries, 2 * ACTIVATION * self.queries + self.chosen()
        return (
            self.base()
            + self.inputs()
            + max(
                ACTIVATION * self.tokens * c.q_lora_rank + self.linear(width, c.q_lora_rank, form.linear),
                (2 * FP32 + 2 * ACTIVATION) * self.queries,
                rotated + 4 * FP32 * self.tokens * c.num_attention_heads * c.qk_rope_head_dim,
                attended + grouped,
                attended + 2 * ACTIVATION * self.tokens * inner + self.linear(c.hidden_size, inner, form.linear),
            )
        )

    def chosen(self) -> int:
        """Return the bytes of a layer's own list, which it keeps until its end: window rows and selected entries."""
        c = self.config
        return INDEX * self.tokens * (c.sliding_window + min(c.index_topk, self.entries[CSA]))

    def compressor(self, ratio: int, width: int) -> float:
        """Return the peak memory of a compressor: values and scores of the step, the rings and new groups' members."""
        channels, span = (2 * width, 2 * ratio) if ratio == CSA else (width, ratio)
        rings = self.batch * (span + ROLLBACK)
        members = self.tokens + self.batch * ratio
        rows = 4 * self.tokens + 3 * rings + 4 * members
        matrix = self.widened[self.formats.dense][1] * channels * self.config.hidden_size
        return matrix + FP32 * (channels * rows + self.multiplied * self.config.hidden_size)

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
            # the products of the linear before it, attention's queries, are still alive
            FP32 * self.tiles * self.multiplied * c.num_attention_heads * c.head_dim
            + self.linear(c.index_n_heads * c.index_head_dim, c.q_lora_rank, self.formats.linear),
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
        rows = LIST_BLOCK * self.tokens * c.head_dim
        scores = FP32 * LIST_BLOCK * self.tokens * c.num_attention_heads
        reading = 2 * FP32 * self.queries + (FP32 + 3 * ACTIVATION) * rows + 2 * scores
        adding = 5 * FP32 * self.queries + FP32 * rows + 4 * scores
        longest = c.sliding_window + max(min(c.index_topk, self.entries[CSA]), self.entries[HCA])
        lists = self.chosen() + INDEX * self.tokens * -(-longest // LIST_BLOCK) * LIST_BLOCK  # also padded
        return self.base() + self.inputs() + lists + ACTIVATION * self.queries + max(reading, adding)

    def experts(self) -> float:
        """Return the peak memory of the experts.

        It is one expert over its tokens, with the sum of the experts and the output of the one before, the input, also
        rounded, and the expert's rows of it; or the shared expert, with the sum; or both sums. The outputs of attention
        and of the previous layer are still alive, although already added to the streams.
        """
        c, form = self.config, self.formats
        # chosen experts with their order, and factors
        order = (3 * INDEX + 2 * FP32) * self.tokens * c.num_experts_per_tok
        router = self.widened[form.dense][1] * c.n_routed_experts * c.hidden_size
        router += FP32 * (self.hidden + 4 * self.tokens * c.n_routed_experts)
        rounded = (FP32 + ACTIVATION) * self.hidden
        return (
            self.base()
            + ACTIVATION * self.hidden
            + max(
                order + rounded + 2 * ACTIVATION * self.hidden + self.expert(form.experts),
                order + rounded + self.expert(form.linear),
                order + rounded + (ACTIVATION + 2 * FP32) * self.hidden,
                router,
                self.one_tile() if self.tokens <= PRODUCT_ROWS else 0,
            )
        )

    def one_tile(self) -> float:
        """Return the peak memory of all experts of a tile: their inner values or their outputs, and one matrix."""
        c = self.config
        count = min(c.n_routed_experts, self.tokens * c.num_experts_per_tok) + 1
        inner, outputs = (FP32 * PRODUCT_ROWS * count * width for width in (c.moe_intermediate_size, c.hidden_size))
        widened = max(self.widened[form][0] for form in (self.formats.experts, self.formats.linear))
        matrix = widened * c.hidden_size * c.moe_intermediate_size
        rounded = ACTIVATION * self.hidden + FP32 * self.filled * c.hidden_size
        return rounded + max(2 * inner + matrix, 6 * inner, 3 * inner + outputs + matrix, inner + 4 * outputs)

    def expert(self, form: FormatName) -> float:
        """Return the peak memory of one expert over all tokens: gate, up, their product, and a linear.

        The clamps need no more memory than rounding.
        """
        hidden, inner = self.config.hidden_size, self.config.moe_intermediate_size
        return 3 * ACTIVATION * self.tokens * inner + max(
            self.linear(inner, hidden, form), self.linear(hidden, inner, form)
        )

    def head(self) -> float:
        """Return the peak memory of the head: a part of its matrix in fp32 and the logits, and then sampling."""
        c = self.config
        matrix = self.widened[self.formats.dense][1] * min(c.vocab_size * c.hidden_size, HEAD_VALUES)
        multiplied = -(-self.batch // PRODUCT_ROWS) * PRODUCT_ROWS
        return self.base() + max(matrix + FP32 * multiplied * c.vocab_size, self.sampled * self.batch * c.vocab_size)
