#!/usr/bin/env python3
"""quant_speed.py - time of fake quantisation by a loop of PyTorch operations over the experts, on a GPU.

  python3 tests/parity/quant_speed.py > torch.json     for the shapes and formats of `moetrain bench quant`

Per expert the operations that a quantiser without its own kernel runs: amax is given; scale, round, clamp, scale
back, in fp32, result in bf16. A copy of 256 MiB evicts the caches before each timed run; median of 9 runs."""
import json
import sys

import torch

SHAPES = [(5120, 8192), (3712, 2688), (2688, 1856)]
EXPERTS = [4, 8, 32, 128]
RUNS = 9
E2M1 = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def integer(x, amax, y, qmax, block):
    v = x.float()
    if block:
        v = v.view(-1, block)
        amax = v.abs().amax(dim=1, keepdim=True)
    s = qmax / amax
    y.copy_((torch.clamp(torch.round(v * s), -qmax - 1, qmax) / s).view_as(y))


def fp8(x, amax, y):
    s = 448 / amax
    y.copy_(torch.clamp(x.float() * s, -448, 448).to(torch.float8_e4m3fn).float() * (1 / s))


def e2m1(v, bounds, values):
    return torch.sign(v) * values[torch.bucketize(v.abs(), bounds)]


def nvfp4(x, amax, y, bounds, values):
    g = amax / 2688
    v = x.float().view(-1, 16)
    scale = torch.clamp(v.abs().amax(dim=1, keepdim=True) / (6 * g), 2.0**-9, 448).to(torch.float8_e4m3fn).float() * g
    y.copy_((e2m1(v / scale, bounds, values) * scale).view_as(y))


def mxfp4(x, y, bounds, values):
    v = x.float().view(-1, 32)
    scale = torch.exp2(torch.floor(torch.log2(v.abs().amax(dim=1, keepdim=True))) - 2)
    y.copy_((e2m1(v / scale, bounds, values) * scale).view_as(y))


def milliseconds(run, sweep):
    times = []
    for _ in range(RUNS + 2):
        sweep[0].copy_(sweep[1])
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[2:])[RUNS // 2]


def main():
    if not torch.cuda.is_available():
        print("quant_speed.py: PyTorch finds no GPU", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    bounds = torch.tensor(E2M1, device="cuda")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0], device="cuda")
    sweep = torch.empty(2, 1 << 27, dtype=torch.int8, device="cuda")
    rows = []
    for n_out, n_in in SHAPES:
        for n_exp in EXPERTS:
            x = (torch.randn(n_exp, n_out, n_in, device="cuda", dtype=torch.bfloat16) * 0.02)
            y = torch.empty_like(x)
            amax = torch.stack([x[e].abs().amax().float() for e in range(n_exp)])
            ops = {
                "amax": lambda e, x=x: x[e].abs().amax(),
                "int8": lambda e, x=x, y=y, a=amax: integer(x[e], a[e], y[e], 127, 0),
                "int4-32": lambda e, x=x, y=y, a=amax: integer(x[e], a[e], y[e], 7, 32),
                "int4-128": lambda e, x=x, y=y, a=amax: integer(x[e], a[e], y[e], 7, 128),
                "fp8": lambda e, x=x, y=y, a=amax: fp8(x[e], a[e], y[e]),
                "nvfp4": lambda e, x=x, y=y, a=amax: nvfp4(x[e], a[e], y[e], bounds, values),
                "mxfp4": lambda e, x=x, y=y: mxfp4(x[e], y[e], bounds, values),
            }
            for name, op in ops.items():
                ms = milliseconds(lambda op=op, n=n_exp: [op(e) for e in range(n)], sweep)
                rows.append({"op": name, "experts": n_exp, "out": n_out, "in": n_in, "ms": ms})
            del x, y, amax, ops
    print(json.dumps({"torch": torch.__version__, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
