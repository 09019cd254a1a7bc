"""quant_peers.py - `moetrain quant` against the quantisers of nvidia-modelopt, torchao and compressed-tensors.

    python quant_peers.py --moetrain build/moetrain      (needs torch, safetensors, ml_dtypes and the three packages)

Prints how many of 65,536 elements differ for bf16 and for f32, and what is expected: 0 where moetrain and the library
use the same formula (kernels/format/README.md), else "its own rule". The exit status is 1 when elements differ in spite
of the same formula, or when the codes and scales of --pack do not decode to the values of the same format.
"""
import argparse
import subprocess
import sys
import tempfile

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file, save_file

E, OUT, IN = 32, 16, 128
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def data():
    torch.manual_seed(3)
    x = torch.randn(E, OUT, IN) * torch.exp(2 * torch.randn(E, 1, 1)) * torch.exp(torch.randn(E, OUT, 1))
    return {"bf16": x.bfloat16(), "f32": x}


class Quant:
    def __init__(self, binary, folder, x):
        self.binary, self.folder, self.n = binary, folder, 0
        self.source = f"{folder}/in.safetensors"
        save_file({"w.weight": x.contiguous()}, self.source)

    def run(self, name, *options):
        self.n += 1
        out = f"{self.folder}/{self.n}.safetensors"
        subprocess.run([self.binary, "quant", name, self.source, out, *options], check=True, stdout=subprocess.DEVNULL)
        return out

    def values(self, name):
        return load_file(self.run(name))["w.weight"]


def per_expert(function, x):
    return torch.stack([function(e) for e in x])


def modelopt_int(bits):
    def run(e):
        from modelopt.torch.quantization.tensor_quant import fake_tensor_quant

        return fake_tensor_quant(e, e.abs().amax().float(), None, bits, False, False)

    return run


def modelopt_fp8(e):
    from modelopt.torch.quantization.tensor_quant import scaled_e4m3

    return scaled_e4m3(e, e.abs().amax().float(), None, 4, 3)


def modelopt_nvfp4(e):
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    q, scale, scale_2 = NVFP4QTensor.quantize(e, 16)
    return q.dequantize(dtype=e.dtype, scale=scale, double_scale=scale_2, block_sizes={-1: 16})


def modelopt_mxfp4(e):
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    q, scale = MXFP4QTensor.quantize(e, 32)
    return q.dequantize(dtype=e.dtype, scale=scale, block_sizes={-1: 32})


def torchao_mx(mode):
    def run(e):
        from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

        return MXTensor.to_mx(e, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode[mode]).dequantize(e.dtype)

    return run


def torchao_nvfp4(e):
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    return NVFP4Tensor.to_nvfp4(e, per_tensor_scale=per_tensor_amax_to_scale(e.abs().amax())).dequantize(e.dtype)


def torch_int(e):
    scale = e.abs().amax().float() / 127
    return torch.fake_quantize_per_tensor_affine(e.float(), scale.item(), 0, -128, 127).to(e.dtype)


def compressed_tensors_int8(e):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=8, type="int", strategy="tensor", symmetric=True)
    scale, zero = calculate_qparams(e.amin().reshape(1), e.amax().reshape(1), args)
    return fake_quantize(e, scale.to(e.dtype), zero, args)


# moetrain's format, name and function of the library, whether the formulas are the same
PEERS = [
    ("int8", "modelopt fake_tensor_quant", modelopt_int(8), True),
    ("int4", "modelopt fake_tensor_quant", modelopt_int(4), True),
    ("int8", "torch fake_quantize, q times scale", torch_int, False),
    ("int8", "compressed-tensors, scale amax / 127.5", compressed_tensors_int8, False),
    ("fp8-recip", "modelopt scaled_e4m3", modelopt_fp8, True),
    ("fp8", "modelopt scaled_e4m3, s by a reciprocal", modelopt_fp8, False),
    ("nvfp4", "modelopt NVFP4QTensor", modelopt_nvfp4, True),
    ("nvfp4", "torchao, r in another order", torchao_nvfp4, False),
    ("mxfp4", "torchao FLOOR", torchao_mx("FLOOR"), True),
    ("mxfp4-ceil", "torchao RCEIL", torchao_mx("RCEIL"), True),
    ("mxfp4", "torchao EVEN", torchao_mx("EVEN"), False),
    ("mxfp4", "torchao CEIL", torchao_mx("CEIL"), False),
    ("mxfp4-ceil", "modelopt MXFP4QTensor, ties to the smaller", modelopt_mxfp4, False),
]


def compare(quants, xs):
    wrong = 0
    print(f"{'format':12} {'library':46} {'bf16':>8} {'f32':>8}  expected")
    for name, library, function, same in PEERS:
        counts = []
        for kind, x in xs.items():
            try:
                counts.append(int((quants[kind].values(name) != per_expert(function, x)).sum()))
            except Exception as error:  # a package that is missing, or has another interface
                counts.append(-1)
                print(f"skip: {library}: {type(error).__name__}: {error}", file=sys.stderr)
        wrong += same and any(c > 0 for c in counts)
        print(f"{name:12} {library:46} {counts[0]:8} {counts[1]:8}  {'0' if same else 'its own rule'}")
    return wrong


def nibbles(u8):
    return np.stack([u8 & 15, u8 >> 4], -1).reshape(*u8.shape[:-1], -1)


def wide(x, like):
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def decoded(name, t):
    """The values in fp32, as a reader of the packed tensors computes them."""
    if name.startswith("mxfp4"):
        e = t["w.weight_scales"].astype(np.int32) - 127
        q = E2M1[nibbles(t["w.weight_blocks"].reshape(*e.shape, 16))]
        return np.ldexp(q, e[..., None]).astype(np.float32).reshape(E, OUT, IN)
    if name == "nvfp4":
        scale = t["w.weight_scale"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        scale = scale * wide(t["w.weight_scale_2"], scale)
        return E2M1[nibbles(t["w.weight"])] * np.repeat(scale, 16, -1)
    if name.startswith("fp8"):
        q = t["w.weight"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    elif name.startswith("int8"):
        q = t["w.weight"].view(np.int8).astype(np.float32)
    else:
        q = nibbles(t["w.weight_packed"].view(np.uint8)).astype(np.float32) - 8
    scale = t["w.weight_scale"]
    return q * (np.repeat(scale, IN // scale.shape[-1], -1) if scale.ndim == 3 else wide(scale, q))


PACKED = ("int8", "int8-32", "int4", "int4-128", "fp8", "fp8-recip", "fp8-stored", "nvfp4", "mxfp4", "mxfp4-ceil")


def check_packed(quants):
    wrong = 0
    for name in PACKED:
        q = quants["f32"]
        got, want = decoded(name, read(q.run(name, "--pack"))), q.values(name).numpy()
        ulps = np.abs(got.view(np.int32).astype(np.int64) - (want + np.float32(0)).view(np.int32)) * (got != want)
        allowed = 1 if name.startswith("int") else 0
        print(f"--pack {name:12} at most {ulps.max()} ulp from the values, allowed {allowed}")
        wrong += ulps.max() > allowed
    return wrong


def read(path):
    """As numpy arrays; e4m3 as bytes."""
    tensors = load_file(path)
    return {k: (v.view(torch.uint8) if v.dtype == torch.float8_e4m3fn else v).numpy() for k, v in tensors.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--moetrain", default="build/moetrain")
    args = parser.parse_args()
    xs = data()
    with tempfile.TemporaryDirectory() as folder:
        quants = {}
        for kind, x in xs.items():
            subprocess.run(["mkdir", f"{folder}/{kind}"], check=True)
            quants[kind] = Quant(args.moetrain, f"{folder}/{kind}", x)
        return compare(quants, xs) + check_packed(quants)


sys.exit(1 if main() else 0)
