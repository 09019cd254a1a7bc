"""vllm_experts.py - vLLM's loading code reads merged-nvfp4 and merged-fp8 exports.

  python vllm_experts.py EXPORT_DIR ... --vllm DIR      DIR: an unpacked vLLM wheel (its Python files are enough)

Runs vLLM's RoutedExperts.load_weights with the parameters of its ModelOpt NVFP4 and compressed-tensors FP8 methods on
the CPU, without a model or an engine; modules that are not installed are replaced by mocks (pydantic, msgspec, openai
and openai_harmony must be installed). Every parameter of the weights must be filled, and with quantised inputs their
scales. The weights must decode to code * scale of the file, and every module that is not quantised must be excluded by
the configuration. Exit 1 when one of these checks fails.
"""
import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

import packed_peers
from safetensors.torch import load_file
from vllm_keys import Mocks, Processors, model_names, vllm_name


def read(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def open_layer(name, n_exp, quant_config):
    """RoutedExperts without a device, a kernel or ranks."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    ranks = SimpleNamespace(tp_rank=0, tp_size=1, use_ep=False)
    moe = SimpleNamespace(num_experts=n_exp, num_logical_experts=n_exp, num_local_experts=n_exp, is_act_and_mul=True,
                          moe_parallel_config=ranks, tp_rank=0, tp_size=1, tp_shard_with_padding=False)
    experts = SimpleNamespace(num_fused_shared_experts=0, map_global_to_local=lambda e: e)
    for key, value in dict(
            layer_name=name, quant_config=quant_config, moe_config=moe, expert_map_manager=experts,
            ckpt_gate_proj_name="gate_proj", ckpt_down_proj_name="down_proj", ckpt_up_proj_name="up_proj",
            is_fused_checkpoint_transposed=False, lora_base_layer_prefix="", _fused_shared_expert_quantizer=None,
            _loaded_expert_biases=set()).items():
        object.__setattr__(layer, key, value)
    return layer


def nvfp4_method(settings, moe):
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config, ModelOptNvFp4FusedMoE

    config = ModelOptNvFp4Config.from_config(settings)
    method = ModelOptNvFp4FusedMoE.__new__(ModelOptNvFp4FusedMoE)
    method.quant_config, method.moe, method.use_global_sf = config, moe, False
    return config, method


def fp8_method(settings, moe):
    from compressed_tensors.quantization import QuantizationArgs
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as w8a8)

    cls = w8a8.CompressedTensorsW8A8Fp8MoEMethod
    method = cls.__new__(cls)
    group = settings["config_groups"]["group_0"]
    method.moe, method.block_quant, method.weight_block_size = moe, False, None
    method.weight_quant = QuantizationArgs.model_validate(group["weights"])
    method.input_quant = QuantizationArgs.model_validate(group["input_activations"])
    method.static_input_scales = not method.input_quant.dynamic
    return CompressedTensorsConfig.from_config(settings), method


def excluded(config, name, packed):
    if hasattr(config, "is_layer_excluded"):
        return config.is_layer_excluded(name)
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    return should_ignore_layer(name, ignore=config.ignore, fused_mapping=packed)


def decode(layer, method, nvfp4):
    """vLLM's parameters as fp32: w13 [E, 2F, D], w2 [E, D, F]."""
    if nvfp4:
        layer.params_dtype = torch.float32
        return method.dequantize_weight(layer)
    scale = layer.w13_weight_scale.repeat_interleave(layer.w13_weight.shape[1] // 2, 1).unsqueeze(-1)
    return layer.w13_weight.float() * scale, layer.w2_weight.float() * layer.w2_weight_scale.view(-1, 1, 1)


def check_layer(name, weights, settings, n_exp, width, dim):
    """Values that differ; values; the configuration."""
    nvfp4 = settings["quant_method"] == "modelopt"
    layer = open_layer(name, n_exp, None)
    config, method = (nvfp4_method if nvfp4 else fp8_method)(settings, layer.moe_config)
    object.__setattr__(layer, "quant_config", config)
    object.__setattr__(layer, "quant_method", method)
    method.create_weights(layer, n_exp, dim, width, torch.bfloat16, weight_loader=layer.weight_loader,
                          global_num_experts=n_exp)
    for p in layer.parameters():
        p.data.view(torch.uint8).fill_(0xff)  # NaN where it is a float
    loaded = set(layer.load_weights((n[len(name) + 1:], t) for n, t in weights.items()))
    inputs = any(n.endswith(".input_scale") for n in weights)
    needed = {n for n, _ in layer.named_parameters() if inputs or "input_scale" not in n}
    if not needed <= loaded:
        sys.exit(f"{name}: vLLM did not load {sorted(needed - loaded)}")

    def plain(e, part):
        n = f"{name}.{e}.{part}.weight"
        return packed_peers.plain(weights[n], weights[n + "_scale"], weights.get(n + "_scale_2"))

    bad = values = 0
    w13, w2 = decode(layer, method, nvfp4)
    for e in range(n_exp):
        want = torch.cat((plain(e, "gate_proj"), plain(e, "up_proj")))
        bad += int((w13[e] != want).sum()) + int((w2[e] != plain(e, "down_proj")).sum())
        values += w13[e].numel() + w2[e].numel()
        for part, scale in ("gate_proj", layer.w13_input_scale), ("down_proj", layer.w2_input_scale):
            if inputs and not (scale[e] == weights[f"{name}.{e}.{part}.input_scale"]).all():
                sys.exit(f"{name}.{e}.{part}: vLLM has another input scale")
    return bad, values, config


def check(folder):
    tensors, config = read(folder), json.loads((folder / "config.json").read_text())
    settings, bad, values = config["quantization_config"], 0, 0
    text = config.get("text_config", config)
    n_exp = next(text[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in text)
    blocks = sorted({n.split(".experts.")[0] for n in tensors if ".experts.0." in n})
    for name in (block + ".experts" for block in blocks):
        weights = {n: t for n, t in tensors.items() if n.startswith(name + ".")}
        sizes = n_exp, text["moe_intermediate_size"], text["hidden_size"]
        b, v, quant = check_layer(name, weights, settings, *sizes)
        bad, values = bad + b, values + v
    names, packed, _ = model_names(config["model_type"], text)
    if names:
        quant.apply_vllm_mapper(names)
    quant.packed_modules_mapping = packed
    linear = {n[: -len(".weight")] for n, t in tensors.items() if n.endswith(".weight") and t.ndim == 2}
    heads = {"lm_head"} if settings["quant_method"] == "compressed-tensors" else set()  # no Linear there
    others = (n for n in linear - heads if "embed" not in n and ".experts." not in n and not n.startswith("mtp."))
    for n in sorted(others):
        module = vllm_name(n, names, packed)
        if excluded(quant, module, packed) != (n + ".weight_scale" not in tensors):
            sys.exit(f"{folder}: the configuration {'includes' if n + '.weight_scale' not in tensors else 'excludes'} "
                     f"{module}")
    print(f"{folder}: {values} weights of experts in vLLM, {bad} differ; {len(linear)} modules as configured")
    return bad or not values


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", nargs="+", type=Path)
    parser.add_argument("--vllm", required=True)
    a = parser.parse_args()
    sys.path.insert(0, a.vllm)
    sys.meta_path.append(Mocks())
    sys.meta_path.insert(0, Processors())
    import vllm.model_executor.parameter as parameter

    parameter.get_tensor_model_parallel_rank = lambda: 0
    parameter.get_tensor_model_parallel_world_size = lambda: 1
    return int(any([check(folder) for folder in a.export]))


if __name__ == "__main__":
    sys.exit(main())
