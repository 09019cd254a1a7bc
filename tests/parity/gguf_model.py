"""gguf_model.py - llama.cpp reads the output of `moetrain export --to gguf-model`, and writes the same greedy tokens as
transformers with the dequantised tensors of that file.

  python gguf_model.py CHECKPOINT EXPORT ROWS.jsonl [--tokens 24]
  python gguf_model.py CHECKPOINT OUT ROWS.jsonl --moetrain build/moetrain --adapter DIR [--tokens 24]

The second form compares `moetrain generate` before the export with the exports, which it writes below OUT: llama.cpp
with gguf-model (F32), llama.cpp with the adapter of gguf over a gguf-model of an adapter whose B is 0, and PEFT with
the adapter of vllm, since vLLM has no wheel that runs on these CPUs. Greedy tokens must be equal; it prints the largest
difference of their log-probabilities.

EXPORT: the directory of the export. ROWS: `text` rows; the first half of each is the prompt. llama.cpp gets it as text,
so tokenisation is compared too. The gguf package decodes the tensors and has llama.cpp's names for those of
transformers; both are independent of moetrain. As in llama.cpp, transformers' model of gpt-oss gets rounded bounds of
YaRN, and that of Nemotron-H steps without a minimum. llama.cpp gets beta_fast and beta_slow of YaRN as options.
Kimi-K2's class is that of DeepSeek-V3. Prints the largest difference of log-probabilities over the tokens written.
Exit 1 when a token differs although the log-probabilities of the two best tokens differ by more than this.
Needs torch, transformers >= 5, gguf, xllamacpp, tiktoken.
"""
import argparse
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import urllib.request

import gguf
import numpy as np
import torch
import xllamacpp
from peft import PeftModel
from safetensors.torch import load_file, save_file

import make_tiktoken_vectors
import peer
from llama_peer import load_peer

NAMES = {"gpt_oss": "gpt-oss", "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "mixtral": "llama",
         "minimax_m2": "minimax-m2", "glm4_moe": "glm4moe",
         "glm4_moe_lite": "deepseek2", "deepseek_v3": "deepseek2", "lfm2_moe": "lfm2moe",
         "qwen3_next": "qwen3next", "qwen3_5_moe_text": "qwen35moe", "nemotron_h": "nemotron_h_moe",
         "gemma4_text": "gemma4"}


def tensors_of(path):
    reader = gguf.GGUFReader(path)
    return {t.name: torch.from_numpy(np.array(gguf.quants.dequantize(t.data, t.tensor_type), dtype=np.float32))
            for t in reader.tensors}


def rotated_back(w, n_head):
    """Rows of q or k: llama.cpp interleaves the halves of each head of a `llama`."""
    rows, cols = w.shape
    return w.reshape(n_head, rows // n_head // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def fused(t, prefix, end, interleaved):
    """gate and up as one tensor; the joined axis is that of the rows, the second last one for matrices and the last for
    biases."""
    gate, up = t.pop(f"{prefix}.ffn_gate_exps.{end}"), t.pop(f"{prefix}.ffn_up_exps.{end}")
    axis = 1
    if interleaved:
        return torch.stack((gate, up), axis + 1).flatten(axis, axis + 1)
    return torch.cat((gate, up), axis)


def heads_back(w, config, first, size):
    """Value heads on axis 0, `size` rows each, after `first` rows: llama.cpp has the first of every key head, then the
    second of each."""
    n_key = config.linear_num_key_heads
    heads = w[first:].reshape(config.linear_num_value_heads // n_key, n_key, size, *w.shape[1:])
    return torch.cat((w[:first], heads.swapaxes(0, 1).reshape(w[first:].shape)))


def delta_net(t, prefix, name, config):
    """A tensor of gated DeltaNet as transformers has it."""
    next_, width = config.model_type == "qwen3_next", config.linear_value_head_dim
    n_key, keys = config.linear_num_key_heads, 2 * config.linear_num_key_heads * config.linear_key_head_dim

    def back(w, first, size):
        return w if next_ else heads_back(w, config, first, size)

    if name == "A_log":
        return back(torch.log(-t.pop(prefix + ".ssm_a")), 0, 1)
    if name == "dt_bias":
        return back(t.pop(prefix + ".ssm_dt.bias"), 0, 1)
    if name == "conv1d.weight":
        return back(t.pop(prefix + ".ssm_conv1d.weight"), keys, width)[:, None]
    if name == "in_proj_qkvz.weight":
        qkv, z = t.pop(prefix + ".attn_qkv.weight"), t.pop(prefix + ".attn_gate.weight")
        parts = [*torch.split(qkv, [keys // 2, keys // 2, len(qkv) - keys]), z]
        return torch.cat([p.reshape(n_key, -1, p.shape[-1]) for p in parts], 1).flatten(0, 1)
    w = t.pop(prefix + {"in_proj_ba": ".ssm_ba", "in_proj_qkv": ".attn_qkv", "in_proj_z": ".attn_gate",
                        "in_proj_b": ".ssm_beta", "in_proj_a": ".ssm_alpha", "norm": ".ssm_norm",
                        "out_proj": ".ssm_out"}[name.removesuffix(".weight")] + ".weight")
    if name == "out_proj.weight":
        return back(w.T, 0, width).T
    if name in ("in_proj_ba.weight", "norm.weight"):
        return w
    return back(w, keys if "qkv" in name else 0, 1 if name[8] in "ab" else width)


def mamba(w, name):
    """A tensor of Nemotron-H as transformers has it: llama.cpp keeps A, and vectors as matrices."""
    if name.endswith("A_log"):
        return torch.log(-w).flatten()
    if name.endswith("conv1d.weight"):
        return w[:, None]
    return w.flatten() if name.endswith((".D", "mixer.norm.weight")) else w


def scale_of_gemma(t, prefix, name):
    """A tensor of Gemma-4 for which the gguf package has no name, or None."""
    ends = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
            "layer_scalar": "layer_output_scale.weight", "router.proj.weight": "ffn_gate_inp.weight",
            "experts.gate_up_proj": "ffn_gate_up_exps.weight"}
    found = next((value for end, value in ends.items() if name.endswith(end)), None)
    return t.pop(f"{prefix}.{found}") if found else None


def check_rope(t, config):
    """Proportional RoPE: the first pairs rotate, the others almost not."""
    freqs = t.pop("rope_freqs.weight")
    n = int(config.rope_parameters["full_attention"]["partial_rotary_factor"] * len(freqs))
    if (freqs[:n] != 1).any() or (freqs[n:] < 1e29).any():
        sys.exit(f"rope_freqs: {freqs}")


def load(model, path):
    """Fills the parameters of a model of transformers; every tensor of the file is used."""
    config = model.config.get_text_config()
    kind = config.model_type
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == NAMES[kind])
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    t, oss = tensors_of(path), kind == "gpt_oss"
    state = {}
    for name, have in list(model.named_parameters()) + list(model.named_buffers()):
        prefix = "blk." + name.split(".layers.")[1].split(".")[0] if ".layers." in name else ""
        if "vision" in name:
            continue
        if kind == "gemma4_text" and (given := scale_of_gemma(t, prefix, name)) is not None:
            w = given
        elif name.endswith("experts.gate_up_proj"):
            w = fused(t, prefix, "weight", oss)
        elif name.endswith("experts.gate_up_proj_bias"):
            w = fused(t, prefix, "bias", oss)
        elif name.endswith("experts.up_proj"):
            w = t.pop(prefix + ".ffn_up_exps.weight")
        elif name.endswith("experts.down_proj"):
            w = t.pop(prefix + ".ffn_down_exps.weight")
        elif name.endswith("experts.down_proj_bias"):
            w = t.pop(prefix + ".ffn_down_exps.bias")
        elif name.endswith(("e_score_correction_bias", "expert_bias")):
            w = t.pop(prefix + ".exp_probs_b.bias")
        elif name.endswith("conv.conv.weight"):
            w = t.pop(prefix + ".shortconv.conv.weight")[:, None]
        elif name.endswith(("inv_freq", "embed_scale")):
            continue
        elif ".linear_attn." in name:
            w = delta_net(t, prefix, name.split(".linear_attn.")[1], config)
        elif name.endswith("shared_expert_gate.weight"):
            w = t.pop(prefix + ".ffn_gate_inp_shexp.weight")[None]
        elif name.endswith("kv_b_proj.weight"):
            keys, values = t.pop(prefix + ".attn_k_b.weight"), t.pop(prefix + ".attn_v_b.weight")
            w = torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)
        else:
            wanted = (name + ".weight" if name.endswith("sinks") else name).replace("language_model.", "")
            if kind == "nemotron_h":  # the names of published checkpoints
                wanted = name.replace("model.", "backbone.").replace("dt_bias", "dt.bias")
            found = names.get_name(wanted, try_suffixes=(".weight", ".bias"))
            if not found and ".gate." in name or ".router." in name:
                found = prefix + ".ffn_gate_inp." + name.rsplit(".", 1)[1]
            w = t.pop(found if found in t or not found else found + ".weight")
            if kind == "nemotron_h":
                w = mamba(w, name)
            if kind == "mixtral" and name.endswith("q_proj.weight"):
                w = rotated_back(w, config.num_attention_heads)
            if kind == "mixtral" and name.endswith("k_proj.weight"):
                w = rotated_back(w, config.num_key_value_heads)
        if NAMES[kind] in ("qwen3next", "qwen35moe") and name.endswith("norm.weight") and "linear_attn" not in name:
            w = w - 1
        if oss and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            w = w.transpose(1, 2)
        if w.shape != have.shape:
            sys.exit(f"{name}: {tuple(w.shape)} instead of {tuple(have.shape)}")
        state[name] = w
    if kind == "gemma4_text":
        check_rope(t, config)
    embed = next(w for name, w in state.items() if name.endswith("embed_tokens.weight"))
    if config.tie_word_embeddings and torch.equal(t["output.weight"], embed):
        del t["output.weight"]
    if t:
        sys.exit(f"tensors that transformers has not: {sorted(t)}")
    model.load_state_dict(state, strict=False)


class Llama:
    def __init__(self, path, config, adapter=None):
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_parallel = 512, 512, 512, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.warmup = False
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        if "beta_fast" in rope:  # as options, since llama.cpp does not read them from files of these families
            params.yarn_beta_fast, params.yarn_beta_slow = rope["beta_fast"], rope.get("beta_slow", 1.0)
        if adapter:
            lora = xllamacpp.CommonAdapterLoraInfo()
            lora.path, lora.scale = adapter, 1.0
            params.lora_adapters = [lora]
        self.server = xllamacpp.Server(params)

    def post(self, path, body):
        request = urllib.request.Request(self.server.listening_address + path, json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    def ask(self, prompt, n):
        return self.post("/completion", {"prompt": prompt, "n_predict": n, "temperature": 0, "n_probs": 1,
                                         "return_tokens": True})

    def tokens(self, text):
        return self.post("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]

    def write(self, ids, n):
        """Generates token by token, since llama.cpp gives no probability if the text ends within a character."""
        written, probabilities = [], []
        for _ in range(n):
            answer = self.ask(ids + written, 1)
            if not answer["tokens"]:
                break  # the end of the text
            written += answer["tokens"]
            given = answer.get("completion_probabilities")
            probabilities.append(given[0]["logprob"] if given else math.nan)
        return written, torch.tensor(probabilities)


def load_tokenizer(path):
    """A tiktoken.model is read by tiktoken, with Kimi's pattern."""
    if os.path.exists(os.path.join(path, "tokenizer.json")):
        return peer.load_tokenizer(path)
    ids = make_tiktoken_vectors.load(pathlib.Path(path))
    return lambda text, **_: {"input_ids": ids(text)}


def compare(model, tokenizer, engine, prompt, n):
    """Returns the largest difference of log-probabilities; the largest amount by which a token of llama.cpp is less
    likely than the peer's choice; and the number of such tokens."""
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    found = engine.tokens(prompt)
    if found != ids:
        sys.exit(f"{prompt[:60]!r}: tokens {found}, with transformers {ids}")
    written, got = engine.write(ids, n)
    with torch.no_grad():
        rows = model(torch.tensor([ids + written[:-1]])).logits[0, len(ids) - 1:].float().log_softmax(-1)
    want = rows[torch.arange(len(written)), written]
    difference = (want - got).nan_to_num().abs().max().item()
    gap = (rows.max(-1).values - want).max().item()  # 0: each is the best of the peer
    return difference, gap, (rows.argmax(-1) != torch.tensor(written)).sum().item(), len(written)


# ---- generate before and after exports

def rounded(checkpoint, out):
    """A copy whose bounds of YaRN are rounded, as llama.cpp has them."""
    shutil.copytree(checkpoint, out, dirs_exist_ok=True)
    with open(os.path.join(out, "config.json")) as f:
        config = json.load(f)
    if config["model_type"] == "gpt_oss":
        config["rope_parameters"]["truncate"] = True
        with open(os.path.join(out, "config.json"), "w") as f:
            json.dump(config, f)
    return out


def without_effect(adapter, out):
    """The adapter with B = 0: its gguf-model is the base model."""
    shutil.copytree(adapter, out, dirs_exist_ok=True)
    path = os.path.join(out, "adapter_model.safetensors")
    save_file({k: torch.zeros_like(t) if "lora_B" in k else t for k, t in load_file(path).items()}, path)
    return out


def run(a, *words):
    done = subprocess.run([a.moetrain, *words, "--set", f"model.path={a.checkpoint}"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(" ".join(words) + ":\n" + done.stderr[-2000:])


def export(a, ini, adapter, fmt, *words):
    out = os.path.join(a.export, fmt + os.path.basename(adapter))
    shutil.rmtree(out, ignore_errors=True)
    run(a, "export", ini, "--adapter", adapter, "--to", fmt, "--out", out, "--force", *words)
    return out


def generated(a, ini, prompts):
    """Tokens and log-probabilities of `moetrain generate`."""
    rows, out = os.path.join(a.export, "rows.jsonl"), os.path.join(a.export, "answers.jsonl")
    with open(rows, "w") as f:
        for ids in prompts:
            f.write(json.dumps({"prompt_ids": ids, "max_tokens": a.tokens, "ignore_eos": True}) + "\n")
    for name in (out, out + ".run.json"):
        if os.path.exists(name):
            os.remove(name)
    run(a, "generate", ini, "--adapter", a.adapter, "--input", rows, "--output", out)
    with open(out) as f:
        return [(answer["ids"], torch.tensor(answer["logprobs"])) for answer in map(json.loads, f)]


def by_peft(a, adapter, prompts):
    """Greedy tokens and log-probabilities with the adapter of an export."""
    model = PeftModel.from_pretrained(load_peer(a.checkpoint), adapter).eval()
    answers = []
    for prompt in prompts:
        ids, got = list(prompt), []
        for _ in range(a.tokens):
            with torch.no_grad():
                row = model(input_ids=torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            ids.append(row.argmax().item())
            got.append(row[ids[-1]].item())
        answers.append((ids[len(prompt):], torch.tensor(got)))
    return answers


def compare_exports(a):
    os.makedirs(a.export, exist_ok=True)
    a.export, a.adapter, a.moetrain = (os.path.abspath(p) for p in (a.export, a.adapter, a.moetrain))
    a.checkpoint = rounded(a.checkpoint, os.path.join(a.export, "checkpoint"))
    ini = os.path.join(a.export, "run.ini")
    with open(ini, "w") as f:
        f.write(f"[data]\neval = {os.path.abspath(a.rows)}\nformat = text\nseq_len = 96\n"
                f"[output]\ndir = {a.export}/run\n")
    base = without_effect(a.adapter, os.path.join(a.export, "nothing"))
    tokenizer = load_tokenizer(a.checkpoint)
    prompts = [tokenizer(row["text"], add_special_tokens=False)["input_ids"][:24] for row in peer.read_rows(a.rows)[:8]]
    want = generated(a, ini, prompts)
    f32, config = ("--quantize", "f32"), load_peer(a.checkpoint).config
    engines = {"gguf-model": Llama(export(a, ini, a.adapter, "gguf-model", *f32) + "/model.gguf", config),
               "gguf over its base": Llama(export(a, ini, base, "gguf-model", *f32) + "/model.gguf", config,
                                           export(a, ini, a.adapter, "gguf") + "/adapter.gguf")}
    answers = {what: [engine.write(ids, a.tokens) for ids in prompts] for what, engine in engines.items()}
    answers["vllm in PEFT"] = by_peft(a, export(a, ini, a.adapter, "vllm"), prompts)
    failed = False
    for what, got in answers.items():
        others = sum(x != y for (w, _), (g, _) in zip(want, got) for x, y in zip(w, g))
        short = sum(len(w) != len(g) for (w, _), (g, _) in zip(want, got))
        most = max((w - g).nan_to_num().abs().max().item() for (_, w), (_, g) in zip(want, got) if len(w) == len(g))
        total = sum(len(ids) for ids, _ in want)
        print(f"{what}: of {total} greedy tokens {others} differ; log-probabilities differ by at most {most:.2g}")
        failed |= others > 0 or short > 0 or most > a.tolerance
    if failed:
        sys.exit("not the same text")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("export")
    parser.add_argument("rows")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--moetrain")
    parser.add_argument("--adapter")
    a = parser.parse_args()
    if a.moetrain:
        compare_exports(a)
        return
    path = os.path.join(os.path.abspath(a.export), "model.gguf")
    model = load_peer(a.checkpoint)
    load(model, path)
    tokenizer = load_tokenizer(a.checkpoint)
    engine = Llama(path, model.config)
    most, worst, others, total = 0, 0, 0, 0
    for row in peer.read_rows(a.rows)[:8]:
        prompt = row["text"][:max(20, len(row["text"]) // 2)]
        difference, gap, other, n = compare(model, tokenizer, engine, prompt, a.tokens)
        most, worst, others, total = max(most, difference), max(worst, gap), others + other, total + n
    print(f"{a.export}: {model.config.model_type}, {total} tokens written; {others} other than the peer's, worse by at "
          f"most {worst:.2g}; log-probabilities differ by at most {most:.2g}")
    if not total or most > a.tolerance or worst > a.tolerance:
        sys.exit("not the same text")


if __name__ == "__main__":
    main()
