"""make_scaled_vectors.py - one Linear in the NVFP4 and FP8 formats of ModelOpt and compressed-tensors, for
tests/model/test_scaled.c.

    python make_scaled_vectors.py OUT.safetensors        (needs torch, nvidia-modelopt and compressed-tensors)

NAME.weight... are the tensors that a checkpoint has for the Linear NAME; NAME.decoded is what the library itself reads
from them, in bf16.
"""
import sys

import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from safetensors.torch import save_file

OUT = {}


def put(name, decoded, **tensors):
    OUT[name + ".decoded"] = decoded.to(torch.bfloat16).contiguous()
    for key, tensor in tensors.items():
        OUT[f"{name}.{key}"] = tensor.contiguous()


def values(rows, cols):
    torch.manual_seed(rows)
    x = torch.randn(rows, cols) * torch.logspace(-2, 1, rows)[:, None]
    x[3, 16:32] = 0
    return x.to(torch.bfloat16)


def modelopt_nvfp4(x):
    q, scale, scale2 = NVFP4QTensor.quantize(x, 16)
    decoded = q.dequantize(torch.float32, scale=scale, double_scale=scale2, block_sizes={-1: 16})
    put("modelopt_nvfp4", decoded, weight=q._quantized_data, weight_scale=scale, weight_scale_2=scale2)


def scheme(**args):
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(type="float", symmetric=True, **args))


def compressed_nvfp4(x):
    how = scheme(num_bits=4, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)
    g = generate_gparam(x.min(), x.max()).reshape(1)
    blocks = x.reshape(x.shape[0], -1, 16)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), how.weights, global_scale=g)
    state = {"weight": x, "weight_scale": scale, "weight_global_scale": g}
    state = NVFP4PackedCompressor.compress(state, how)
    put("compressed_nvfp4", NVFP4PackedCompressor.decompress(state, how)["weight"], **state)


def modelopt_fp8(name, x, axis):
    q, scale = FP8QTensor.quantize(x, axis=axis)
    codes, scale = q._quantized_data, scale.float()
    put(name, codes.float() * scale, weight=codes, weight_scale=scale.squeeze())


def compressed_fp8(x):
    how = scheme(num_bits=8, strategy="channel")
    scale, _ = calculate_qparams(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), how.weights)
    state = FloatQuantizationCompressor.compress({"weight": x, "weight_scale": scale}, how)
    put("compressed_fp8", state["weight"].float() * state["weight_scale"].float(), **state)


def block_fp8(x):
    """As DeepSeek and Qwen publish it; both readers multiply in fp32."""
    rows, cols = ((n + 127) // 128 * 128 for n in x.shape)
    padded = torch.zeros(rows, cols)
    padded[: x.shape[0], : x.shape[1]] = x.float()
    blocks = padded.reshape(rows // 128, 128, cols // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: x.shape[0], : x.shape[1]]
    codes = (x.float() / wide).to(torch.float8_e4m3fn)
    put("block_fp8", codes.float() * wide, weight=codes, weight_scale_inv=scale)


x = values(20, 144)
modelopt_nvfp4(x)
compressed_nvfp4(x)
modelopt_fp8("modelopt_fp8", x, None)
modelopt_fp8("modelopt_fp8_rows", x, 0)
compressed_fp8(x)
block_fp8(values(132, 144))
save_file(OUT, sys.argv[1])
for name, tensor in sorted(OUT.items()):
    print(name, tuple(tensor.shape), tensor.dtype)
