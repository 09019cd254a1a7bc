#!/usr/bin/env python3
"""portable_speed.py - what the libraries' kernels reach on this GPU with the instructions of the portable kernels
(mma.sync), for comparison with `moetrain bench step|attn --device cuda-portable` on the same GPU.

  python3 tests/parity/portable_speed.py

Products: every algorithm of cuBLASLt, each with every tile and number of stages, is timed on one product of bf16
matrices. The profiler names the kernel of the fastest choice of each algorithm: names of ampere, cutlass_80 and sm80
have mma.sync, the others are listed for comparison. Attention: FlashAttention 2 as PyTorch has it (causal, without
sinks), forward and backward, for heads of published models. Median of 9 runs, random values. FLOPs are counted as
`bench attn` counts them: 2 products forward and 5 backward over the visible pairs."""
import ctypes
import re
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

ROWS, IN, OUT = 16384, 2880, 5760
HEADS = [("gpt-oss-20b", 64, 8, 64), ("qwen3-30b-a3b", 32, 4, 128), ("qwen3.5-35b-a3b", 16, 2, 256)]
SEQUENCES, LENGTH, RUNS, WORKSPACE = 4, 4096, 9, 64 << 20
WITHOUT_WGMMA = re.compile(r"ampere|cutlass_80|sm80")

# of cublasLt.h and library_types.h
BF16, F32, COMPUTE_32F = 14, 0, 68
TRANSPOSE_A, TILES, STAGES, CONFIG_TILE, CONFIG_STAGES = 3, 6, 13, 1, 6


class Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class Result(ctypes.Structure):
    _fields_ = [("algorithm", Algorithm), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
                ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]


def median_ms(call, runs=RUNS, warm_up=2):
    times = []
    for _ in range(runs + warm_up):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[warm_up:])


def kernel_name(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [e.key for e in profile.key_averages()]
    return max(names, key=len) if names else "?"


class Product:
    """y [ROWS, OUT] = x [ROWS, IN] w [OUT, IN]^T, for cuBLASLt: column-major y^T = w x^T."""

    def __init__(self):
        self.w, self.x = (torch.randn(n, IN, device="cuda", dtype=torch.bfloat16) for n in (OUT, ROWS))
        self.y = torch.mm(self.x, self.w.T)  # loads cuBLASLt, too
        self.wanted = self.y.clone()
        self.workspace = torch.empty(WORKSPACE, device="cuda", dtype=torch.uint8)
        self.library = ctypes.CDLL("libcublasLt.so.13")
        self.handle, self.operation = ctypes.c_void_p(), ctypes.c_void_p()
        self.run("Create", ctypes.byref(self.handle))
        self.run("MatmulDescCreate", ctypes.byref(self.operation), COMPUTE_32F, F32)
        transpose = ctypes.c_int(1)
        self.run("MatmulDescSetAttribute", self.operation, TRANSPOSE_A, ctypes.byref(transpose), ctypes.c_size_t(4))
        self.layouts = [ctypes.c_void_p() for _ in range(3)]
        for layout, (rows, columns) in zip(self.layouts, ((IN, OUT), (IN, ROWS), (OUT, ROWS))):
            self.run("MatrixLayoutCreate", ctypes.byref(layout), BF16, ctypes.c_uint64(rows), ctypes.c_uint64(columns),
                     ctypes.c_int64(rows))

    def run(self, name, *arguments):
        status = getattr(self.library, "cublasLt" + name)(*arguments)
        if status:
            raise RuntimeError(f"cublasLt{name}: status {status}")

    def types(self):
        return self.handle, COMPUTE_32F, F32, BF16, BF16, BF16, BF16

    def algorithms(self):
        ids, n = (ctypes.c_int * 200)(), ctypes.c_int()
        self.run("MatmulAlgoGetIds", *self.types(), 200, ids, ctypes.byref(n))
        return ids[:n.value]

    def capability(self, algorithm, attribute):
        values, written = (ctypes.c_uint32 * 1024)(), ctypes.c_size_t()
        self.run("MatmulAlgoCapGetAttribute", ctypes.byref(algorithm), attribute, values, ctypes.c_size_t(4096),
                 ctypes.byref(written))
        return values[:written.value // 4] or [0]

    def choices(self, number):
        """Every supported tile and number of stages of algorithm `number`."""
        algorithm = Algorithm()
        self.run("MatmulAlgoInit", *self.types(), number, ctypes.byref(algorithm))
        for tile in self.capability(algorithm, TILES):
            for stages in self.capability(algorithm, STAGES):
                chosen, result = Algorithm(), Result()
                ctypes.memmove(ctypes.byref(chosen), ctypes.byref(algorithm), ctypes.sizeof(Algorithm))
                for attribute, value in ((CONFIG_TILE, tile), (CONFIG_STAGES, stages)):
                    self.run("MatmulAlgoConfigSetAttribute", ctypes.byref(chosen), attribute,
                             ctypes.byref(ctypes.c_uint32(value)), ctypes.c_size_t(4))
                a, b, c = self.layouts
                status = self.library.cublasLtMatmulAlgoCheck(self.handle, self.operation, a, b, c, c,
                                                              ctypes.byref(chosen), ctypes.byref(result))
                if status == 0 and result.workspace <= WORKSPACE:
                    yield chosen

    def multiply(self, algorithm):
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        a, b, c = self.layouts
        pointer = ctypes.c_void_p
        self.run("Matmul", self.handle, self.operation, ctypes.byref(one), pointer(self.w.data_ptr()), a,
                 pointer(self.x.data_ptr()), b, ctypes.byref(zero), pointer(self.y.data_ptr()), c,
                 pointer(self.y.data_ptr()), c, ctypes.byref(algorithm), pointer(self.workspace.data_ptr()),
                 ctypes.c_size_t(WORKSPACE), pointer(torch.cuda.current_stream().cuda_stream))

    def is_right(self):
        error = (self.y.float() - self.wanted.float()).norm() / self.wanted.float().norm()
        return error.item() < 1e-2

    def fastest(self, number):
        """(ms, kernel) of algorithm `number`, None without a choice that runs."""
        best = None
        for algorithm in self.choices(number):
            self.y.zero_()
            try:
                once = median_ms(lambda: self.multiply(algorithm), 1, 0)
            except RuntimeError:
                continue
            if self.is_right() and (not best or once < 1.5 * best[0]):
                ms = median_ms(lambda: self.multiply(algorithm))
                best = min(best or (ms, algorithm), (ms, algorithm), key=lambda pair: pair[0])
        return best and (best[0], kernel_name(lambda: self.multiply(best[1])))


def products():
    product, flops = Product(), 2 * ROWS * IN * OUT
    found = [f for f in map(product.fastest, product.algorithms()) if f]
    print(f"cuBLASLt, [{ROWS}, {IN}] x [{IN}, {OUT}], the fastest choice of each algorithm")
    for ms, name in sorted(found)[:12]:
        print(f"  {ms:7.3f} ms {flops / ms / 1e9:6.1f} TFLOP/s  {name[:90]}")
    of_ampere = [ms for ms, name in found if WITHOUT_WGMMA.search(name)]
    if of_ampere:
        print(f"fastest with mma.sync: {min(of_ampere):.3f} ms, {flops / min(of_ampere) / 1e9:.1f} TFLOP/s")


def attention(name, heads, kv_heads, width):
    def values(n):
        return torch.randn(SEQUENCES, n, LENGTH, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v, dout = values(heads), values(kv_heads), values(kv_heads), values(heads).detach()

    def forward():
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = forward()
        times = [median_ms(forward), median_ms(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))]
        kernel = kernel_name(forward)
    pairs = SEQUENCES * heads * LENGTH * (LENGTH + 1) / 2
    rates = [n * 2 * pairs * width / ms / 1e9 for n, ms in zip((2, 5), times)]
    print(f"  {name:16} {heads:3} {kv_heads:3} {width:4}  forward {times[0]:7.3f} ms {rates[0]:6.1f} TFLOP/s  "
          f"backward {times[1]:7.3f} ms {rates[1]:6.1f} TFLOP/s  {kernel[:60]}")


def main():
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    products()
    print(f"FlashAttention of PyTorch, {SEQUENCES} x {LENGTH} tokens, heads, kv heads, width")
    for heads in HEADS:
        attention(*heads)


if __name__ == "__main__":
    main()
