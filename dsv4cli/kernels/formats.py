"""Constants of the storage formats. No torch.

Sources: OCP Microscaling (e2m1, e8m0), OCP 8-bit floating point (e4m3), official kernel.py (floors, blocks).
"""

# e2m1 codes 0..15; bit 3 is the sign; low nibble of a byte = even column
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
# first NaN code of e4m3; larger codes are negative
E4M3_NAN = 0x7F
# exponents of the smallest and largest power of two in e4m3
E4M3_MIN_POWER, E4M3_MAX_POWER = -9, 8
# e8m0: byte b means 2 ** (b - 127); 255 means NaN
E8M0_BIAS = 127
E8M0_NAN = 255
# one scale per 128 x 128 block of an FP8 weight, per row and 32 columns of an FP4 weight
FP8_BLOCK = 128
FP4_BLOCK = 32
# NVFP4: one e4m3 scale per row and 16 columns, one fp32 scale per tensor (ModelOpt)
NVFP4_BLOCK = 16
# columns per scale when keys and values are rounded to FP8
KV_BLOCK = 64
# lower bounds of a block's amax, from which its scale is computed (official act_quant and fp4_act_quant)
FP8_AMAX_FLOOR = 1e-4
FP4_AMAX_FLOOR = 6 * 2.0**-126
