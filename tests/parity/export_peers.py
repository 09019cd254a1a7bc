"""export_peers.py - checks that other programs read the exports of `moetrain export` correctly. The reference is
transformers + PEFT with the original adapter, whose losses tests/model/test_parity.c compares with moetrain's.

  python export_peers.py CASE --moetrain build/moetrain [--out DIR]      CASE: a directory of make_case.py

peft, vllm    loaded by PEFT (per-expert keys through transformers' own conversion): logits. vllm_keys.py reads the
              vllm format instead for GLM and DeepSeek with shared experts, because PEFT takes their names for the
              routed ones, and for the families in NOT_BY_PEFT, whose per-expert keys PEFT does not know
gguf          every tensor read back with the gguf package, dW of every matrix against PEFT's; rows of q and k of
              "llama" and of gate and up as llama.cpp's converters lay out the base model
merged-*      loaded by transformers.from_pretrained: logits, and for bf16 also those of PEFT's merge, rounded; tensors
              that are not of the text model equal the source's

A format whose reader does not apply all targets refuses the adapter, and gets one without them. Exit 1 when an error
exceeds its tolerance. Needs torch, transformers >= 5, peft >= 0.19.1, gguf.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys

import gguf
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import peer

SEQ_LEN = 96
LATENT = {"vllm": ["kv_b_proj"], "gguf": ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]}
EXPERTS = {"vllm": ["experts", "base_layer"]}  # the two stacks by their names in the adapter
NOT_BY_PEFT = ("qwen3_5_moe_text", "deepseek_v4", "lfm2_moe", "nemotron_h")
failed = []


def check(what, value, allowed):
    print(f"  {what:<64} {value:.3g}   allowed {allowed:.0e}")
    if not value <= allowed:
        failed.append(what)


def text_settings(case):
    with open(os.path.join(case, "config.json")) as f:
        settings = json.load(f)
    return settings.get("text_config", settings) | {"model_type": settings["model_type"]}


def without(adapter, targets, out):
    """A copy of the adapter without these targets."""
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(adapter, "adapter_config.json")) as f:
        config = json.load(f)
    config["target_modules"] = [m for m in config["target_modules"] if m not in targets]
    if "experts" in targets:
        config["target_parameters"] = [m for m in config["target_parameters"] if "experts." not in m]
    with open(os.path.join(out, "adapter_config.json"), "w") as f:
        json.dump(config, f)
    tensors = peer.load_file(os.path.join(adapter, "adapter_model.safetensors"))
    save_file({name: t for name, t in tensors.items() if name.split(".")[-3] not in targets},
                   os.path.join(out, "adapter_model.safetensors"))
    return out


def export(a, case, adapter, fmt, out):
    shutil.rmtree(out, ignore_errors=True)
    config = os.path.join(a.out, "run.ini")
    with open(config, "w") as f:
        f.write(f"[model]\npath = {case}\n[data]\neval = {case}/eval.jsonl\nformat = text\nseq_len = {SEQ_LEN}\n"
                f"[output]\ndir = {a.out}/run\n")
    words = [a.moetrain, "export", config, "--adapter", adapter, "--to", fmt, "--out", out]
    return subprocess.run(words, capture_output=True, text=True)


@torch.no_grad()
def log_probs(model, documents):
    model.eval()
    return torch.cat([model(input_ids=torch.tensor([d])).logits[0].float().log_softmax(-1) for d in documents])


def kl(p, q):
    """Mean and largest KL of rows of log-probabilities."""
    rows = (p.exp() * (p - q)).sum(-1)
    return rows.mean().item(), rows.max().item()


def adapter_model(case, adapter):
    return PeftModel.from_pretrained(peer.load_model(case), adapter)


def adapts_shared(adapter):
    """Shared experts of the families whose adapters name the weights (families.SHARED_BY_WEIGHT)."""
    with open(os.path.join(adapter, "adapter_config.json")) as f:
        return "_proj.weight" in f.read()


# ---- GGUF

def deltas_of_peft(adapter, settings):
    """dW [E, out, in] or [out, in] per (layer, matrix) from the adapter's file, by PEFT's formulas."""
    tensors = peer.load_file(os.path.join(adapter, "adapter_model.safetensors"))
    with open(os.path.join(adapter, "adapter_config.json")) as f:
        config = json.load(f)
    per_alpha = 1 / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    alphas = config["alpha_pattern"]
    n_exp = next(settings[k] for k in ("num_local_experts", "num_experts", "n_routed_experts") if k in settings)
    out = {}
    for name, a in tensors.items():
        if not name.endswith("lora_A.weight"):
            continue
        b = tensors[name.replace("lora_A", "lora_B")]
        layer, _, module = name.split("layers.")[1].removesuffix(".lora_A.weight").partition(".")
        if "shared_expert" in module:
            module = module.replace(".", "_")
        elif "experts" in module:
            a = a.reshape(n_exp, -1, a.shape[1])
            b = b.reshape(b.shape[0], -1, n_exp).permute(2, 0, 1)
            module = "gate_up" if module.endswith("base_layer") else "down"
        matrix = module if module.startswith("conv.") else module.split(".")[-1]
        alpha = alphas.get(matrix if matrix.endswith("_proj") else matrix + "_proj", config["lora_alpha"])
        out[int(layer), matrix] = alpha * per_alpha * (b.double() @ a.double())
    return out


def llama_rows(w, n_head):
    """LlamaModel.permute of llama.cpp's converter."""
    return w.reshape(n_head, 2, w.shape[0] // n_head // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def llama_values(w, settings, module):
    """_reorder_v_heads of llama.cpp's converter: the value heads of gated DeltaNet, counted by key heads first."""
    keys, values = settings["linear_num_key_heads"], settings["linear_num_value_heads"]
    width = 1 if module in ("in_proj_a", "in_proj_b") else settings["linear_value_head_dim"]
    if module == "out_proj":
        return llama_values(w.T, settings, None).T
    before = w.shape[0] - values * width
    moved = w[before:].reshape(keys, values // keys, width, -1).transpose(0, 1).reshape(values * width, -1)
    return torch.cat((w[:before], moved))


def split_by_key_head(w, settings):
    """q | k | v and z of in_proj_qkvz, as Qwen3NextModel of llama.cpp's converter has them."""
    keys, d = settings["linear_num_key_heads"], settings["linear_key_head_dim"]
    v = settings["linear_num_value_heads"] // keys * settings["linear_value_head_dim"]
    parts = [p.reshape(-1, w.shape[1]) for p in w.reshape(keys, -1, w.shape[1]).split([d, d, v, v], dim=1)]
    return torch.cat(parts[:3]), parts[3]


def wanted_of_gguf(deltas, settings):
    """The matrices of `deltas` under GGUF names, with rows in the order in which llama.cpp's converters write base
    weights."""
    family = settings["model_type"]
    shared = {f"{block}_shared_expert{s}_{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")
              for s in ("", "s") for block in ("mlp", "mixer")}
    mixers = {"in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_b": "ssm_beta", "in_proj_a": "ssm_alpha",
              "out_proj": "ssm_out"}
    dense = {f"{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    lfm2 = {"conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj", "out_proj": "attn_output",
            "w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down"}
    names = {**shared, **mixers, **dense, "in_proj_ba": "ssm_ba", "q_proj": "attn_q", "k_proj": "attn_k",
             "v_proj": "attn_v", "o_proj": "attn_output", "in_proj": "ssm_in", "fc1_latent_proj": "ffn_latent_down",
             "fc2_latent_proj": "ffn_latent_up", **(lfm2 if family == "lfm2_moe" else {})}
    heads = {"q_proj": settings["num_attention_heads"],
             "k_proj": settings.get("num_key_value_heads") or settings["num_attention_heads"]}
    out = {}
    for (layer, module), w in deltas.items():
        if module == "down":
            out[f"blk.{layer}.ffn_down_exps.weight"] = w
        elif module == "gate_up" and family == "nemotron_h":
            out[f"blk.{layer}.ffn_up_exps.weight"] = w
        elif module == "gate_up" and family.startswith("gemma4"):
            out[f"blk.{layer}.ffn_gate_up_exps.weight"] = w
        elif module == "gate_up":
            gate, up = (w[:, 0::2], w[:, 1::2]) if family == "gpt_oss" else w.chunk(2, dim=1)
            out[f"blk.{layer}.ffn_gate_exps.weight"], out[f"blk.{layer}.ffn_up_exps.weight"] = gate, up
        elif module == "in_proj_qkvz":
            qkv, z = split_by_key_head(w, settings)
            out[f"blk.{layer}.attn_qkv.weight"], out[f"blk.{layer}.attn_gate.weight"] = qkv, z
        elif module in mixers and family not in ("qwen3_next", "lfm2_moe"):
            out[f"blk.{layer}.{names[module]}.weight"] = llama_values(w, settings, module)
        else:
            out[f"blk.{layer}.{names[module]}.weight"] = \
                llama_rows(w, heads[module]) if family == "mixtral" and module in heads else w
    return out


def check_gguf(adapter, out, settings):
    reader = gguf.GGUFReader(os.path.join(out, "adapter.gguf"))
    value = {name: field.contents() for name, field in reader.fields.items()}
    arch = {"gpt_oss": "gpt-oss", "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "mixtral": "llama",
            "minimax_m2": "minimax-m2", "lfm2_moe": "lfm2moe", "glm4_moe": "glm4moe", "glm4_moe_lite": "deepseek2",
            "deepseek_v3": "deepseek2", "qwen3_vl_moe": "qwen3vlmoe",
            "qwen3_5_moe": "qwen35moe", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next",
            "nemotron_h": "nemotron_h_moe", "gemma4": "gemma4", "gemma4_text": "gemma4"}
    assert value["general.architecture"] == arch[settings["model_type"]], value
    assert value["general.type"] == "adapter" and value["adapter.type"] == "lora", value
    tensors = {t.name: torch.tensor(t.data) for t in reader.tensors}
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH_NAMES and next(
        k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == value["general.architecture"]),
        settings.get("num_hidden_layers") or len(settings["layers_block_type"]))
    base_names = {v[1] + ".weight" for v in known.mapping.values()}
    wanted = wanted_of_gguf(deltas_of_peft(adapter, settings), settings)
    worst = 0.0
    assert {n[:-7] for n in tensors} == set(wanted), set(wanted) ^ {n[:-7] for n in tensors}
    for name, w in wanted.items():
        assert name in base_names, name
        a, b = tensors[name + ".lora_a"].double(), tensors[name + ".lora_b"].double()
        scale = value["adapter.lora.alpha"] / b.shape[-1]  # rank = ne_b[0], as llama-adapter.h has it
        worst = max(worst, ((scale * (b @ a) - w).norm() / w.norm()).item())
    check(f"gguf {gguf.__name__} package: {len(tensors)} tensors, worst |dW - dW of PEFT| / |dW|", worst, 1e-6)


# ---- merged checkpoints

def merged_by_peft(case, adapter):
    """W + scale B A of PEFT, rounded to bf16 as the files hold it."""
    model = adapter_model(case, adapter).merge_and_unload()
    base = peer.load_model(case).state_dict()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not torch.equal(p, base[name]):
                p.copy_(p.bfloat16().float())
    return model


def check_others(case, out):
    """Tensors of the vision tower and of multi-token prediction are those of the source, bit by bit."""
    source, merged = peer.read_tensors(case), peer.read_tensors(out)
    others = [n for n in source if n.startswith(("model.visual.", "mtp."))]
    wrong = [n for n in others if n not in merged or not torch.equal(source[n], merged[n])]
    if others:
        check(f"merged-bf16: of {len(others)} tensors of other parts, different", len(wrong), 0)
    check("merged-bf16: names that only one of source and export has", len(set(source) ^ set(merged)), 0)


def check_merged(case, adapter, fmt, out, want, documents, effect):
    if fmt == "merged-bf16":
        loaded = peer.load_model(out)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    got = log_probs(loaded, documents)
    mean, most = kl(want, got)
    share = 0.25 if fmt == "merged-bf16" else 1
    check(f"{fmt}: mean KL in transformers (largest {most:.3g})", mean, max(1e-3, share * effect))
    if fmt == "merged-bf16" and text_settings(case)["model_type"] != "gpt_oss":
        same = log_probs(merged_by_peft(case, adapter), documents)
        check(f"{fmt}: mean KL from PEFT's merge (largest {kl(same, got)[1]:.3g})", kl(same, got)[0], 1e-3)
        check_others(case, out)


# ---- main

def run_format(a, case, fmt, base, documents, settings):
    adapter, out = os.path.join(case, "adapter_final"), os.path.join(a.out, fmt)
    done = export(a, case, adapter, fmt, out)
    if done.returncode:
        print(f"  {fmt}: {done.stderr.strip().splitlines()[-1]}")
        refused = LATENT if "kv_lora_rank" in settings else EXPERTS if "gemma4" in settings["model_type"] else {}
        if fmt not in refused:
            if fmt != "merged-mxfp4" or settings["model_type"] == "gpt_oss":
                failed.append(fmt)
            return
        adapter = without(adapter, refused[fmt], os.path.join(a.out, f"adapter_{fmt}"))
        done = export(a, case, adapter, fmt, out)
        if done.returncode:
            failed.append(f"{fmt}: {done.stderr}")
            return
    want = log_probs(adapter_model(case, adapter), documents)
    effect = kl(want, base)[0]
    print(f"  {fmt}: mean KL of the adapter from the base {effect:.3g}")
    if fmt == "vllm" and (adapts_shared(adapter) or settings["model_type"] in NOT_BY_PEFT):
        print("  vllm: not loaded in PEFT, which does not read these names; vllm_keys.py reads them")
    elif fmt == "gguf":
        check_gguf(adapter, out, settings)
    elif fmt in ("peft", "vllm"):
        got = log_probs(adapter_model(case, out), documents)
        check(f"{fmt}: largest KL in PEFT", kl(want, got)[1], 1e-6)
        check(f"{fmt}: largest |difference| of log-probabilities", (want - got).abs().max().item(), 1e-3)
    else:
        check_merged(case, adapter, fmt, out, want, documents, effect)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--moetrain", required=True)
    parser.add_argument("--out", default="/tmp/export_peers")
    a = parser.parse_args()
    case = os.path.abspath(a.case)
    os.makedirs(a.out, exist_ok=True)
    settings = text_settings(case)
    tokenizer = peer.load_tokenizer(case)
    documents = [peer.encode(tokenizer, row, SEQ_LEN) for row in peer.read_rows(os.path.join(case, "eval.jsonl"))]
    base = log_probs(peer.load_model(case), documents)
    print(f"{os.path.basename(case)}: {len(base)} tokens")
    for fmt in ("peft", "vllm", "gguf", "merged-bf16", "merged-mxfp4"):
        run_format(a, case, fmt, base, documents, settings)
    if failed:
        sys.exit("not within tolerance: " + ", ".join(failed))


if __name__ == "__main__":
    main()
