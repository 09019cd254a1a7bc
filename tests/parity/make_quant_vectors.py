"""make_quant_vectors.py - quantizes a known signal with bitsandbytes, for tests/kernels/test_quant.c.

    python make_quant_vectors.py OUT_FILE        (needs torch and bitsandbytes; the CPU is enough)

A case is "case FORMAT BLOCK N NESTED", then lines "packed", "absmax" (f32 bits, what decoding uses), for a nested
case "q8", "outer" (f32 bits) and "offset", and "decoded" (f32 bits of the first values). The file does not have the
signal: its values are exact in f32, and the test computes them again.
"""
import struct
import sys

import torch
import bitsandbytes.functional as F

DECODED = 256


def noise(i):
    """18 bits that look random, in [-2^17, 2^17)."""
    h = i * 2654435761 % 2**32
    h = (h ^ h >> 15) * 2246822519 % 2**32
    return (h >> 14) - 2**17


def signal(n):
    """Noise in [-1, 1) times a scale of 1 .. 61 that changes every 16 values."""
    return torch.tensor([noise(i) * (1 + i // 16 % 61) / 2**17 for i in range(n)], dtype=torch.float32)


def bits(values):
    return " ".join(struct.pack(">f", v).hex() for v in values.tolist())


def case(out, kind, block, n, nested):
    x = signal(n)
    packed, state = F.quantize_4bit(x, blocksize=block, compress_statistics=nested, quant_type=kind)
    absmax = state.absmax
    if nested:
        absmax = F.dequantize_blockwise(state.absmax, state.state2) + state.offset
    decoded = F.dequantize_4bit(packed, state).flatten()[:DECODED]
    print(f"case {kind} {block} {n} {int(nested)}", file=out)
    print("packed", bytes(packed.flatten().tolist()).hex(), file=out)
    print("absmax", bits(absmax), file=out)
    if nested:
        print("q8", bytes(state.absmax.tolist()).hex(), file=out)
        print("outer", bits(state.state2.absmax), file=out)
        print("offset", bits(state.offset.reshape(1)), file=out)
    print("decoded", bits(decoded), file=out)


with open(sys.argv[1], "w", encoding="ascii") as f:
    for kind in ("nf4", "fp4"):
        case(f, kind, 64, 1024, False)
        case(f, kind, 32, 8416, True)  # 263 blocks: more than one group of 256
    case(f, "nf4", 128, 1000, False)  # the last block is not full
