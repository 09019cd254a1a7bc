"""vllm_keys.py - checks that vLLM's adapter code reads the output of `moetrain export --to vllm` correctly.

  python vllm_keys.py CASE EXPORT_DIR --vllm DIR      DIR: an unpacked vLLM wheel (its Python files are enough)

Runs vLLM's PEFTHelper, LoRAModel.from_local_checkpoint, PackedLoRALayerWeights.pack_moe and _stack_moe_lora_weights on
the CPU, without a model or an engine; third-party modules that are not installed are replaced by mocks. The script
compares the result with scale * B A of the adapter's file, expert by expert. Exit 1 when a value differs.
"""
import argparse
import importlib.abc
import importlib.machinery
import json
import os
import sys
from types import SimpleNamespace
from unittest import mock

import torch

import export_peers


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("export")
    parser.add_argument("--vllm", required=True)
    a = parser.parse_args()
    with open(os.path.join(a.case, "config.json")) as f:
        settings = json.load(f)
    family, n_exp = settings["model_type"], settings.get("num_local_experts") or settings.get("num_experts")
    sys.path.insert(0, a.vllm)
    sys.meta_path.append(Mocks())
    import vllm.lora.lora_model
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import PackedLoRALayerWeights
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper

    vllm.lora.lora_model.PIN_MEMORY = False  # no GPU
    names = ("w1", "w2", "w3") if family == "mixtral" else ("gate_proj", "down_proj", "up_proj")
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    expected = {"q_proj", "k_proj", "v_proj", "o_proj", "experts"}
    expected |= {f"experts.{e}.{n}" for e in range(n_exp) for n in names}
    helper = PEFTHelper.from_local_dir(a.export, None)
    helper.validate_legal(SimpleNamespace(max_lora_rank=512))
    model = LoRAModel.from_local_checkpoint(a.export, expected, helper, lora_model_id=1, device="cpu",
                                            dtype=torch.float32)
    worst, n = 0.0, 0
    for (layer, module), want in export_peers.deltas_of_peft(a.case, settings).items():
        prefix = f"model.layers.{layer}."
        if module not in ("gate_up", "down"):
            lora = model.loras[f"{prefix}self_attn.{module}"].optimize()
            got = lora.lora_b.double() @ lora.lora_a.double()
        elif family == "gpt_oss":
            name = prefix + "mlp.experts"
            if torch.is_tensor(model.loras[name].lora_a):
                model.loras[name].optimize()
                model.loras[name + ".base_layer"].optimize()
                stacked = SimpleNamespace(w13_lora_a_stacked=[torch.empty(1, n_exp)], global_num_experts=n_exp,
                                          ep_rank=0)
                manager = SimpleNamespace(_is_3d_moe_model=True,
                                          _get_lora_layer_weights=lambda m, key: m.loras.get(key))
                LoRAModelManager._stack_moe_lora_weights(manager, model, stacked, name)
            i = 0 if module == "gate_up" else 1
            got = model.loras[name].lora_b[i].double() @ model.loras[name].lora_a[i].double()
        else:
            loras = [model.loras[f"{prefix}{block}.experts.{e}.{name}"] for e in range(n_exp) for name in names]
            packed = PackedLoRALayerWeights.pack_moe(loras, prefix + "experts").optimize()
            parts = [b.double() @ x.double() for x, b in zip(packed.lora_a, packed.lora_b)]  # w1, w2, w3
            got = torch.cat((parts[0], parts[2]), dim=1) if module == "gate_up" else parts[1]
        worst, n = max(worst, ((got - want).norm() / want.norm()).item()), n + 1
    print(f"{family}: {n} products, worst |dW of vLLM - dW| / |dW| {worst:.2g}")
    if not worst <= 1e-6:
        sys.exit("vLLM would run another adapter")


if __name__ == "__main__":
    main()
