"""packed_peers.py - merged-nvfp4 and merged-fp8 exports read with the libraries whose layouts they have.

    python packed_peers.py DIR ...      (needs torch, safetensors, compressed-tensors; for NVFP4 nvidia-modelopt)

Every matrix of experts is decoded by the library and by plain code * scale in fp32. Prints how many values differ; the
exit status is 1 when one does. It also has compressed-tensors parse the quantization_config of FP8.
"""
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def plain(codes, scale, top):
    if top is None:
        return codes.float() * scale
    q = E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    return q * (scale.float() * top).repeat_interleave(16, 1)


def library(codes, scale, top):
    if top is None:
        from compressed_tensors.quantization import QuantizationArgs
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        args = QuantizationArgs(num_bits=8, type="float", strategy="tensor", symmetric=True)
        return dequantize(codes, scale, args=args, dtype=torch.float32)
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    shape = torch.Size([codes.shape[0], 2 * codes.shape[1]])
    packed = NVFP4QTensor(shape, torch.float32, codes)
    return packed.dequantize(dtype=torch.float32, scale=scale, double_scale=top, block_sizes={-1: 16})


def main():
    worst = 0
    for folder in map(Path, sys.argv[1:]):
        tensors = {}
        for file in folder.glob("*.safetensors"):
            tensors.update(load_file(file))
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        if config["quant_method"] == "compressed-tensors":
            from compressed_tensors.quantization import QuantizationConfig

            QuantizationConfig.model_validate(config)
        names = [n for n in tensors if n + "_scale" in tensors]
        bad = values = 0
        for n in names:
            parts = tensors[n], tensors[n + "_scale"], tensors.get(n + "_scale_2")
            want, got = plain(*parts), library(*parts)
            bad += int((want != got).sum())
            values += want.numel()
        print(f"{folder}: {len(names)} matrices, {values} values, {bad} differ")
        worst = max(worst, bad, not names)
    return int(worst > 0)


if __name__ == "__main__":
    sys.exit(main())
