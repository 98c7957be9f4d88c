"""An upper bound of the memory that one step of the Triton kernels allocates besides weights and cache; no torch."""

from dsv4cli.engine.config.capacity import ROLLBACK
from dsv4cli.engine.config.layer_kind import CSA, HCA
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.weights.reference_step import ACTIVATION, FP32, INDEX
from dsv4cli.kernels.ggml.scratch import SCRATCH
from dsv4cli.kernels.shares import rows_each

# entries per token, with their numbers, that top-k keeps while it reads the others
KEPT = 8192


class TritonStep:
    """Peak memory of each part of a step with Triton's kernels: the bytes of the tensors alive at the same time.

    `config` has one rank's shard of the dimensions.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokens: int,
        batch: int,
        context: int,
        ranks: int,
        divides: bool,
        gguf: bool = False,
    ) -> None:
        """divides: whether the ranks divide the rows of the step's streams; gguf: whether matrices are GGUF blocks."""
        self.config, self.tokens, self.batch, self.ranks, self.divides = config, tokens, batch, ranks, divides
        self.entries = {ratio: context // ratio if ratio in config.compress_ratios else 0 for ratio in (CSA, HCA)}
        self.hidden = ACTIVATION * tokens * config.hidden_size
        # rows of the streams that a rank holds, and their bytes in one stream
        self.rows = rows_each(tokens, ranks) if divides else tokens
        self.own = ACTIVATION * self.rows * config.hidden_size
        self.queries = ACTIVATION * tokens * config.num_attention_heads * config.head_dim
        # fp16 copies of a linear's matrix and inputs
        self.scratch = SCRATCH if gguf else 0
        # layers whose mean over the streams DSpark reads
        self.targets = len(config.dspark.target_layer_ids) if config.dspark else 0

    def peak(self) -> int:
        """Return the peak memory of a step with its logits and sampling."""
        return max(self.layers(), self.lists() + self.head())

    def layers(self) -> int:
        """Return the largest peak of a layer, plus what lives for the whole step: index lists and DSpark's means."""
        return self.lists() + self.targets * self.own + max(self.indexer(), self.attention(), self.experts())

    def output(self) -> int:
        """Return the bytes that a captured step keeps: streams, DSpark's means and the batch's data for a drafter."""
        c = self.config
        batch = INDEX * self.tokens * (12 + c.sliding_window + 2 * c.qk_rope_head_dim)
        return (c.hc_mult + self.targets) * self.hidden + batch

    def lists(self) -> int:
        """Return the bytes of window rows, HCA entries, ids, positions, cells, rotations and the entry table."""
        c, listed = self.config, self.entries[HCA]
        rows = 12 + c.sliding_window + (c.sliding_window + listed + 2 * c.qk_rope_head_dim)
        return INDEX * (self.tokens * rows + self.batch * sum(self.entries.values()))

    def projected(self) -> int:
        """Return the bytes of attention's inputs.

        These are the streams before and in a block and its input; latent queries, keys, window keys, compressor rows
        and the indexer's weights; queries, and the indexer's queries for this rank's rows; copies of ring buffers.
        """
        c = self.config
        csa = 4 in c.compress_ratios
        channels = 4 * (c.head_dim + c.index_head_dim) + c.index_n_heads if csa else 2 * c.head_dim
        heads = c.index_n_heads * c.index_head_dim if csa else 0
        narrow = ACTIVATION * (c.q_lora_rank + 2 * c.head_dim) + FP32 * channels
        rings = 2 * ACTIVATION * self.batch * (c.sliding_window + ROLLBACK) * c.head_dim
        own = (2 * c.hc_mult + 2) * self.own + ACTIVATION * self.rows * heads
        return own + self.tokens * narrow + self.queries + rings

    def indexer(self) -> int:
        """Return the peak memory of the indexer: scores of a rank's rows, and the selection for these and all rows."""
        entries, k = self.entries[CSA], self.config.index_topk
        kept = min(KEPT, entries) if entries > KEPT else 0
        operands = self.config.index_n_heads * (self.config.index_head_dim + ACTIVATION)
        chosen = INDEX * (k + self.config.sliding_window)
        own = self.rows * (operands + ACTIVATION * (entries + kept) + FP32 * kept + chosen)
        return self.projected() + own + (self.tokens * chosen if self.divides else 0)

    def attention(self) -> int:
        """Return the peak memory of attention.

        It is the lists, and the heads with the queries; then the groups' output, also rounded, with the layer's output
        or with a dequantized matrix, or with scratch memory.
        """
        c = self.config
        inner = c.o_groups * c.o_lora_rank
        lists = INDEX * self.tokens * (c.sliding_window + min(c.index_topk, self.entries[CSA]))
        widened = ACTIVATION * c.num_attention_heads * c.head_dim * c.o_lora_rank
        summed = self.hidden + (self.own if self.divides else 2 * self.hidden if self.ranks > 1 else 0)
        out = self.tokens * inner * (ACTIVATION + 1) + summed
        product = ACTIVATION * self.tokens * inner + max(widened, summed + self.scratch)
        return self.projected() + lists + self.queries + max(out, product)

    def experts(self) -> int:
        """Return the peak memory of the experts.

        It is the streams before and after attention and in the block; the input, also rounded; the outputs of the
        shared and the routed experts with their inner values; their sum, which is fp32 with several ranks. GGUF experts
        have their inputs in fp16, one row per expert of a token: as much as the outputs, before which they are freed.
        """
        c, k = self.config, self.config.num_experts_per_tok
        inner = ACTIVATION * self.tokens * k * c.moe_intermediate_size
        outputs = k * self.hidden
        summed = 2 * self.hidden + (self.own if self.ranks > 1 else 0)
        return (3 * c.hc_mult + 3) * self.own + 2 * self.hidden + outputs + max(2 * inner, summed + self.scratch)

    def head(self) -> int:
        """Return the peak memory of the last streams, the sequences' logits and sampling.

        Sampling holds logits, with biases and penalties, of the likeliest tokens only, noise, probabilities and two
        temporary tensors, beside the token counts of penalized requests.
        """
        logits = FP32 * self.batch * self.config.vocab_size * self.ranks
        return self.config.hc_mult * (2 * self.own + self.hidden) + max(9 * logits, logits + self.scratch)
