"""The model's operations as functions of tensors and numbers. They do not use ModelConfig.

Each family is a package. Its `__init__` is the contract (shapes, dtypes, rounding, errors), its `ref` implements the
contract in plain PyTorch, and its `kernel` (a file or a package) implements it in Triton. `dispatch` chooses between
the two. Families: block_scale (FP8, FP4, e8m0, Hadamard), recode (conversion between storage formats), gemm (linears
over quantized weights), norm, rope, qk_norm_rope (norm and RoPE of queries and keys, fused), hyper_connections,
compressor, indexer, attention, routing, experts, expert_cache (routed experts offloaded to host memory), embedding,
sampling, step_metadata (slots and positions of a step's tokens), all_reduce (sums over tensor-parallel ranks;
torch.distributed is the reference). ggml is no family: it decodes GGUF's block types.

On a CPU, plain PyTorch is batch-invariant for steps of up to rows.ROWS_ALIKE rows: the bits of a row do not depend on
the other rows. alike.py implements this; tests/kernels/test_alike.py checks it for every family.
"""
