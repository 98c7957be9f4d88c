"""Memory in which steps of many rows keep fp16 copies of a matrix of GGUF blocks and of inputs; no torch."""

# values of a part: fewer would leave multiprocessors idle in linears with several groups
PART = 1 << 25
# bytes of a part of a matrix and of one of the inputs, in fp16
SCRATCH = 2 * 2 * PART
