"""Kinds of attention layers by their compression ratio in `compress_ratios`; no torch."""

# sliding window only
WINDOW = 0
# compressed sparse attention: entries of 4 tokens, which the indexer selects
CSA = 4
# heavily compressed attention: entries of 128 tokens, all of them attended
HCA = 128
LAYER_KINDS = (WINDOW, CSA, HCA)
