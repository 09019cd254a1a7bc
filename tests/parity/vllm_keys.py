"""vllm_keys.py - checks that vLLM's adapter code reads the output of `moetrain export --to vllm` correctly.

  python vllm_keys.py CASE EXPORT_DIR --vllm DIR [--adapter DIR]      --vllm: an unpacked vLLM wheel

--adapter: the trained adapter, default CASE/adapter_final. Runs vLLM's PEFTHelper, LoRAModel.from_local_checkpoint and
LoRAModelManager._create_merged_loras_inplace on the CPU with the names, packed modules and layout of experts of the
model's class, without a model or an engine; third-party modules that are not installed are replaced by mocks. The class
must take adapters. Every adapter must belong to a module of the checkpoint; of DeepSeek-V4, to a module that the class
constructs, which needs openai and openai_harmony. The script compares the result with scale * B A of the adapter's
file, matrix by matrix. Exit 1 when a value differs or is not there.
"""
import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
from types import SimpleNamespace
from unittest import mock

import torch

import export_peers
import peer
import vllm_deepseek_v4

CLASSES = {"gpt_oss": "gpt_oss.GptOssForCausalLM", "qwen3_moe": "qwen3_moe.Qwen3MoeForCausalLM",
           "olmoe": "olmoe.OlmoeForCausalLM", "mixtral": "mixtral.MixtralForCausalLM",
           "minimax_m2": "minimax_m2.MiniMaxM2ForCausalLM", "lfm2_moe": "lfm2_moe.Lfm2MoeForCausalLM",
           "glm4_moe": "glm4_moe.Glm4MoeForCausalLM", "glm4_moe_lite": "glm4_moe_lite.Glm4MoeLiteForCausalLM",
           "deepseek_v3": "deepseek_v2.DeepseekV3ForCausalLM",
           "qwen3_vl_moe": "qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration",
           "gemma4": "gemma4_mm.Gemma4ForConditionalGeneration", "gemma4_text": "gemma4.Gemma4ForCausalLM",
           "qwen3_5_moe": "qwen3_5.Qwen3_5MoeForConditionalGeneration",
           "qwen3_5_moe_text": "qwen3_5.Qwen3_5MoeForCausalLM", "qwen3_next": "qwen3_next.Qwen3NextForCausalLM",
           "deepseek_v4": "vllm.models.deepseek_v4.nvidia.model.DeepseekV4ForCausalLM"}
# vLLM's names of DeepSeek-V4's matrices, by transformers'.
PUBLISHED = {"q_a_proj": "wq_a", "q_b_proj": "wq_b", "kv_proj": "wkv", "o_b_proj": "wo_b", "gate_proj": "w1",
             "up_proj": "w3"}


class Processors(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replaces transformers' image processors, which need libraries for images, and Whisper, whose help of arguments
    reads theirs."""

    def find_spec(self, name, path=None, target=None):
        last = name.rpartition(".")[2]
        image = name.startswith("transformers.models.") and ("processing" in last or last == "modeling_whisper")
        return importlib.machinery.ModuleSpec(name, self) if image else None

    def create_module(self, spec):
        return mock.MagicMock(name=spec.name)

    def exec_module(self, module):
        pass


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder for modules that are not installed. vLLM's hardware detection must find nothing."""

    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        asks = frame.f_code.co_filename
        top = name.split(".")[0]
        if "/vllm/" not in asks or "/platforms/" in asks or top in ("torch", "transformers", "triton"):
            return sys.modules.get(top) and isinstance(sys.modules[top], mock.MagicMock) and self.spec(name) or None
        return self.spec(name) if top != "vllm" or name.startswith("vllm._") else None

    def spec(self, name):
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = mock.MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__file__ = [], spec, spec.name
        return module

    def exec_module(self, module):
        pass


def model_names(model_type, settings):
    """For the model's class in vLLM: the mapper of names or None, the packed modules, whether experts are fused."""
    from vllm.model_executor.models.interfaces import supports_lora

    file, _, name = CLASSES[model_type].rpartition(".")
    cls = getattr(importlib.import_module(file if "." in file else f"vllm.model_executor.models.{file}"), name)
    if not supports_lora(cls):
        sys.exit(f"{CLASSES[model_type]} takes no adapters")
    names = getattr(cls, "hf_to_vllm_mapper", None)
    packed = {k: list(v) for k, v in cls.packed_modules_mapping.items()}
    if settings.get("q_lora_rank") and settings.get("kv_lora_rank"):
        packed["fused_qkv_a_proj"] = ["q_a_proj", "kv_a_proj_with_mqa"]  # __init__ of the class
    return names and names.get_rename_mapper(), packed, cls.is_3d_moe_weight


def vllm_name(module, names, packed):
    """The module of vLLM's model that has the matrix of a module of the checkpoint."""
    parents = {child: parent for parent, children in packed.items() for child in children}
    block, _, last = (names._map_name(module + ".weight")[:-7] if names else module).rpartition(".")
    return ".".join(filter(None, (block, parents.get(last, last))))


def vllm_modules(case, names, packed):
    """The modules of vLLM's model that have the matrices of the checkpoint."""
    out = set()
    for tensor in peer.read_tensors(case):
        stem, _, last = tensor.rpartition(".")
        if ".experts" in tensor:
            out.add(vllm_name(tensor.split(".experts")[0] + ".experts", names, packed))
        elif last == "weight":
            out.add(vllm_name(stem, names, packed))
    return out


def expected_modules(modules, packed):
    """As vllm/lora/worker_manager.py has it: the packed modules by their parts."""
    out = set()
    for module in {m.rpartition(".")[2] for m in modules}:
        out.update(packed.get(module, [module]))
    return out | {"experts"}


def make_manager(modules, packed, n_exp, is_3d):
    from vllm.lora.layers import FusedMoE3DWithLoRA
    from vllm.lora.model_manager import LoRAModelManager

    manager = LoRAModelManager.__new__(LoRAModelManager)
    experts = FusedMoE3DWithLoRA.__new__(FusedMoE3DWithLoRA)
    ranks = SimpleNamespace(num_experts=n_exp, moe_parallel_config=SimpleNamespace(ep_rank=0))
    experts.__dict__.update(w13_lora_a_stacked=[torch.empty(1, n_exp)], moe_config=ranks)
    manager.__dict__.update(
        is_pooling_model=False, _is_3d_moe_model=is_3d, _is_non_gated_moe=False, _use_ep=False,
        _enable_moe_shared_loras=False, _enable_mixed_moe_lora_format=False, packed_modules_mapping=packed,
        packed_modules={}, modules={m: experts for m in modules if is_3d and m.endswith(".experts")})
    for module in modules:
        manager._register_packed_modules(module)
    return manager


def delta(a, b):
    return b.double() @ a.double()


def linear_delta(lora, i, shape):
    """dW of a Linear, which is part i of a packed module; the slices of the first part may be several."""
    if torch.is_tensor(lora.lora_a):
        return delta(lora.lora_a, lora.lora_b)
    if lora.lora_a[i] is None:
        return torch.zeros(shape, dtype=torch.float64)
    return delta(lora.lora_a[i], lora.lora_b[i])


def expert_delta(lora, module, is_3d):
    if is_3d:
        i = 0 if module == "gate_up" else 1
        return delta(lora.lora_a[i], lora.lora_b[i])
    parts = [delta(a, b) for a, b in zip(lora.lora_a, lora.lora_b)]  # w1, w2, w3
    return torch.cat((parts[0], parts[2]), dim=1) if module == "gate_up" else parts[1]


def check_slices(model, settings):
    """MergedColumnParallelLinearWithLoRA gives the rows of q, k, v and z of gated DeltaNet the right parts of B."""
    from vllm.lora.layers import MergedColumnParallelLinearWithLoRA

    key = settings["linear_num_key_heads"] * settings["linear_key_head_dim"]
    value = settings["linear_num_value_heads"] * settings["linear_value_head_dim"]
    layer = SimpleNamespace(n_slices=4, output_sizes=[key, key, value, value])
    for name, lora in model.loras.items():
        if not name.endswith("in_proj_qkvz"):
            continue
        a, b = MergedColumnParallelLinearWithLoRA.expand_packed_lora(layer, lora.lora_a, lora.lora_b)
        rows = torch.cat([x for x in b if x is not None])
        if not torch.equal(rows, torch.cat([x for x in lora.lora_b if x is not None])) or len(b) != 4:
            sys.exit(f"{name}: vLLM places the rows elsewhere")
        if not all(torch.equal(a[i], lora.lora_a[i > 2]) for i in range(4) if a[i] is not None):
            sys.exit(f"{name}: vLLM pairs other matrices")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("export")
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--adapter")
    a = parser.parse_args()
    settings = export_peers.text_settings(a.case)
    family = settings["model_type"]
    n_exp = next(settings[k] for k in ("num_local_experts", "num_experts", "n_routed_experts") if k in settings)
    sys.path.insert(0, a.vllm)
    sys.meta_path.append(Mocks())
    sys.meta_path.insert(0, Processors())
    import vllm.lora.lora_model
    import vllm.lora.model_manager
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    vllm.lora.lora_model.PIN_MEMORY = vllm.lora.model_manager.PIN_MEMORY = False  # no GPU
    names, packed, is_3d = model_names(family, settings)
    if not is_3d:
        short = family in ("mixtral", "minimax_m2", "lfm2_moe", "deepseek_v4")
        w = ("w1", "w2", "w3") if short else ("gate_proj", "down_proj", "up_proj")
        packed["experts"] = [f"experts.{e}.{part}" for e in range(n_exp) for part in w]
    v4 = family == "deepseek_v4"
    modules = vllm_deepseek_v4.modules(a.case) if v4 else vllm_modules(a.case, names, packed)
    helper = PEFTHelper.from_local_dir(a.export, None)
    helper.validate_legal(SimpleNamespace(max_lora_rank=512))
    model = LoRAModel.from_local_checkpoint(a.export, expected_modules(modules, packed), helper, lora_model_id=1,
                                            device="cpu", dtype=torch.float32, weights_mapper=names)
    make_manager(modules, packed, n_exp, is_3d)._create_merged_loras_inplace(model)
    strange = {n for n in model.loras if n.removesuffix(".base_layer") not in modules or n.endswith("kv_b_proj")}
    if strange:
        sys.exit(f"adapters that vLLM does not apply: {sorted(strange)}")
    if family.startswith("qwen3_5"):
        check_slices(model, settings)
    worst, n = 0.0, 0
    adapter = a.adapter or os.path.join(a.case, "adapter_final")
    for (layer, module), want in export_peers.deltas_of_peft(adapter, settings).items():
        if module in ("gate_up", "down"):
            key = next(m for m in modules if f"layers.{layer}." in m and m.endswith(".experts"))
            got = expert_delta(model.loras[key], module, is_3d)
        else:
            shared = "shared_expert" in module
            last = "_".join(module.split("_")[-2:]) if shared else module
            last = PUBLISHED.get(last, last) if v4 else last
            parent = next((p for p, children in packed.items() if last in children), last)
            key = next(m for m in model.loras if f"layers.{layer}." in m and m.endswith(f".{parent}")
                       and ("shared_expert" in m) == shared)
            children = packed.get(parent, [last])
            got = linear_delta(model.loras[key], children.index(last), want.shape)
        worst, n = max(worst, ((got - want).norm() / want.norm()).item()), n + 1
    print(f"{CLASSES[family]}: {n} products, {len(model.loras)} modules, worst |dW of vLLM - dW| / |dW| {worst:.2g}")
    if not worst <= 1e-6:
        sys.exit("vLLM would run another adapter")


if __name__ == "__main__":
    main()
