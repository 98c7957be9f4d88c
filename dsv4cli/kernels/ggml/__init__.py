"""GGUF's tensor types: block layouts and exact decoding, in NumPy and in PyTorch; importing it loads neither.

`types.TYPES` is the only table: readers, `convert`, `inspect` and the kernels use its entries. A row of a matrix is a
whole number of blocks. Decoding computes in fp32, in the order of ggml, so that values equal those of the `gguf`
package bit for bit. How to add a type: write its decoder in `blocks.py`, and name it in its entry of `TYPES`.
"""
