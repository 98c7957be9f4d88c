"""What the bit patterns of the stored formats mean; no torch.

Sources: OCP Microscaling (e2m1, e8m0), OCP 8-bit floating point (e4m3), official kernel.py (floors, blocks).
"""

# e2m1 codes 0..15; bit 3 is the sign; low nibble of a byte = even column
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
# its first NaN; behind it are the numbers with a sign
E4M3_NAN = 0x7F
# the powers of two that e4m3 has
E4M3_MIN_POWER, E4M3_MAX_POWER = -9, 8
# e8m0: byte b stands for 2 ** (b - 127), 255 for NaN
E8M0_BIAS = 127
E8M0_NAN = 255
# one scale per 128 x 128 block of an FP8 weight, per row and 32 columns of an FP4 weight
FP8_BLOCK = 128
FP4_BLOCK = 32
# NVFP4: one e4m3 scale per row and 16 columns, one fp32 scale per tensor (ModelOpt)
NVFP4_BLOCK = 16
# the FP8 simulation of keys and values takes 64 columns a scale
KV_BLOCK = 64
# smallest amax that a scale is taken from (official act_quant and fp4_act_quant)
FP8_AMAX_FLOOR = 1e-4
FP4_AMAX_FLOOR = 6 * 2.0**-126
