"""GGUF blocks in Triton: decoding in registers, and products with it. `gemm` and `experts` launch them."""
