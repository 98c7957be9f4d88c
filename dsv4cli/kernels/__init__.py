"""The operations of the model: tensors and numbers in, tensors out; no ModelConfig.

A family is a package: its `__init__` is the contract (shapes, dtypes, rounding, errors), its `ref` the same in plain
PyTorch, its `kernel`, a file or a package, the same in Triton; `dispatch` chooses between the two. Families:
block_scale (FP8, FP4, e8m0, Hadamard), recode (changes of a weight's storage format), gemm (linears over stored
formats), norm, rope, qk_norm_rope (queries and keys made ready at once), hyper_connections, compressor, indexer,
attention, routing, experts, expert_cache (experts that come from host memory), embedding, sampling, step_metadata
(where a step's tokens lie), all_reduce (sums over ranks, with torch.distributed as their plain twin).

In plain PyTorch on a CPU a row's bits depend on nothing but that row, for steps of up to rows.ROWS_ALIKE rows: alike.py
says how, tests/kernels/test_alike.py holds every family to it.
"""
