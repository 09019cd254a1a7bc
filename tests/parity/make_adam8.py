"""make_adam8.py - AdamW with 8-bit moments as bitsandbytes' blockwise kernels compute it (csrc/kernels.cu,
kOptimizerStatic8bit2StateBlockwise), in numpy: fixture of tests/kernels/test_optim.c. The maps are bitsandbytes' own.
Scales are rounded to 16 bits, as in moetrain: at most 2^-17 from those of bitsandbytes.

    python make_adam8.py OUT_FILE        (needs numpy, torch and bitsandbytes; the CPU is enough)

Lines: name, then f32 bits or codes: p and g of each step, then p, codes and scales after the last one.
"""
import struct
import sys

import bitsandbytes.functional as F
import numpy

N, STEPS, BLOCK = 300, 4, 256
f32 = numpy.float32
LR, BETAS, EPS = 1e-2, (f32(0.9), f32(0.999)), 1e-8


def nearest(table, x):
    return numpy.searchsorted((table[1:] + table[:-1]) / f32(2), x)


def step(p, g, state, t):
    tables = [F.create_dynamic_map(signed=signed).numpy() for signed in (True, False)]
    c1, c2 = 1 - float(BETAS[0]) ** t, (1 - float(BETAS[1]) ** t) ** 0.5
    for first in range(0, N, BLOCK):
        at, block = slice(first, first + BLOCK), first // BLOCK
        m, v = (table[codes[at]] * scales[block] for table, (codes, scales) in zip(tables, state))
        m = m * BETAS[0] + (f32(1) - BETAS[0]) * g[at]
        v = v * BETAS[1] + (f32(1) - BETAS[1]) * g[at] * g[at]
        p[at] += f32(-LR * c2 / c1) * (m / (numpy.sqrt(v) + f32(c2 * EPS)))
        for table, x, (codes, scales) in zip(tables, (m, v), state):
            most = numpy.abs(x).max()
            scales[block] = ((most.view(numpy.uint32) + 0x80) & ~numpy.uint32(0xff)).view(f32)
            codes[at] = nearest(table, x / scales[block])
            wrong = numpy.signbit(table[codes[at]]) != numpy.signbit(x)  # the sign of m is kept
            codes[at] += numpy.where(wrong, numpy.where(x > 0, 1, -1), 0)


def bits(values):
    return " ".join(struct.pack(">f", v).hex() for v in values.tolist())


def main():
    rng = numpy.random.default_rng(3)
    p = rng.standard_normal(N).astype(f32)
    zero = nearest(F.create_dynamic_map().numpy(), f32(0))
    state = [(numpy.full(N, start), numpy.zeros(2, f32)) for start in (zero, 0)]
    with open(sys.argv[1], "w") as out:
        out.write(f"p {bits(p)}\n")
        for t in range(1, STEPS + 1):
            g = (rng.standard_normal(N) * 10 ** rng.uniform(-4, 0, N)).astype(f32)
            out.write(f"g {bits(g)}\n")
            step(p, g, state, t)
        out.write(f"p {bits(p)}\n")
        for name, (codes, scales) in zip("mv", state):
            out.write(f"{name} {' '.join(map(str, codes))}\nscale {bits(scales)}\n")


if __name__ == "__main__":
    main()
