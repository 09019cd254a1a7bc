"""llama_load.py - checks that llama.cpp reads the GGUF adapter of `moetrain export --to gguf` correctly. It writes
the base model as a GGUF in F32, with llama.cpp's names and order of rows. llama.cpp loads both files, and the script
compares its logits of the held-out rows with those of transformers + PEFT, for base and base + adapter.

  python llama_load.py CHECKPOINT ADAPTER ROWS.jsonl --moetrain build/moetrain [--out DIR]

ADAPTER: a PEFT directory. ROWS: `text` rows. Everything is F32, key-value cache too; llama.cpp rounds YaRN's bounds, so
the peer does so here. Exit 1 when a difference of log-probabilities is over 2e-3, or the adapter changes nothing.
Needs torch, transformers >= 5, peft >= 0.19.1, gguf, llama-cpp-python.
"""
import argparse
import ctypes
import json
import os
import subprocess
import sys

import gguf
import llama_cpp as llama
import numpy as np
import torch
from peft import PeftModel
from transformers import GptOssConfig

import peer
from export_peers import kl, llama_rows, log_probs, split_by_key_head

TOLERANCE = 2e-3
ARCH = {"gpt_oss": "gpt-oss", "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "mixtral": "llama",
        "qwen3_next": "qwen3next"}


# ---- the base model as a GGUF

NAMES = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "mlp.router": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp",
         "post_attention_layernorm": "ffn_norm"}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
       "lm_head.weight": "output.weight"}


def expert_tensors(family, layer, name, w):
    """One of the fused experts' tensors under llama.cpp's names."""
    bias = name.endswith("_bias")
    kind = "bias" if bias else "weight"
    if family == "gpt_oss" and not bias:
        w = w.transpose(1, 2)
    if name.startswith("down"):
        return {f"blk.{layer}.ffn_down_exps.{kind}": w}
    gate, up = (w[:, 0::2], w[:, 1::2]) if family == "gpt_oss" else w.chunk(2, dim=1)
    return {f"blk.{layer}.ffn_gate_exps.{kind}": gate, f"blk.{layer}.ffn_up_exps.{kind}": up}


NEXT = {"linear_attn.in_proj_ba": "ssm_ba", "linear_attn.out_proj": "ssm_out", "linear_attn.norm": "ssm_norm",
        "linear_attn.conv1d": "ssm_conv1d", "post_attention_layernorm": "post_attention_norm",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp"}


def next_tensors(layer, rest, w, config):
    """A tensor of Qwen3-Next, as Qwen3NextModel of llama.cpp's converter has it."""
    module = rest.removesuffix(".weight")
    if rest == "linear_attn.A_log":
        return {f"blk.{layer}.ssm_a": -w.exp()}
    if rest == "linear_attn.dt_bias":
        return {f"blk.{layer}.ssm_dt.bias": w}
    if module == "linear_attn.in_proj_qkvz":
        qkv, z = split_by_key_head(w, config.to_dict())
        return {f"blk.{layer}.attn_qkv.weight": qkv, f"blk.{layer}.attn_gate.weight": z}
    if module.endswith("norm") and module != "linear_attn.norm":
        w = w + 1
    return {f"blk.{layer}.{(NAMES | NEXT)[module]}.weight": w.squeeze()}


def gguf_tensors(model, config):
    family, out = config.model_type, {}
    for name, w in model.state_dict().items():
        if family == "qwen3_next" and name == "model.norm.weight":
            w = w + 1
        if name in TOP:
            out[TOP[name]] = w
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        module, _, kind = rest.rpartition(".")
        if module == "mlp.experts":
            out.update(expert_tensors(family, layer, kind, w))
        elif family == "qwen3_next":
            out.update(next_tensors(layer, rest, w, config))
        elif rest == "self_attn.sinks":
            out[f"blk.{layer}.attn_sinks.weight"] = w
        else:
            heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
            if family == "mixtral" and module in heads:
                w = llama_rows(w, heads[module])
            target = NAMES[module]
            if family == "gpt_oss" and target == "ffn_norm":
                target = "post_attention_norm"
            out[f"blk.{layer}.{target}.{kind}"] = w
    return out


def head_dim(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def write_base(path, model):
    c = model.config
    w = gguf.GGUFWriter(path, ARCH[c.model_type])
    experts = getattr(c, "num_local_experts", None) or c.num_experts
    width = getattr(c, "moe_intermediate_size", None) or c.intermediate_size
    rope = c.rope_parameters
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_key_length(head_dim(c))
    w.add_value_length(head_dim(c))
    w.add_rope_dimension_count(int(head_dim(c) * rope.get("partial_rotary_factor", 1)))
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_expert_count(experts)
    w.add_expert_used_count(c.num_experts_per_tok)
    w.add_expert_feed_forward_length(width)
    w.add_vocab_size(c.vocab_size)
    w.add_tokenizer_model("no_vocab")
    if c.model_type == "qwen3_next":
        w.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
        w.add_ssm_state_size(c.linear_key_head_dim)
        w.add_ssm_group_count(c.linear_num_key_heads)
        w.add_ssm_time_step_rank(c.linear_num_value_heads)
        w.add_ssm_inner_size(c.linear_num_value_heads * c.linear_value_head_dim)
        w.add_full_attention_interval(c.layer_types.index("full_attention") + 1)
        w.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    if c.model_type == "gpt_oss":
        w.add_sliding_window(c.sliding_window)
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for name, t in gguf_tensors(model, c).items():
        w.add_tensor(name, np.ascontiguousarray(t.float().numpy()))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


# ---- llama.cpp

class Llama:
    def __init__(self, path, threads=2):
        self.log = []
        self.keep = llama.llama_log_callback(lambda level, text, data: self.log.append(text.decode(errors="replace")))
        llama.llama_log_set(self.keep, ctypes.c_void_p(0))
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        if not self.model:
            sys.exit("llama.cpp does not load the base model:\n" + "".join(self.log[-20:]))
        p = llama.llama_context_default_params()
        p.n_ctx = p.n_batch = p.n_ubatch = 512
        p.n_threads = p.n_threads_batch = threads
        p.type_k = p.type_v = 0  # F32
        p.flash_attn_type = 0
        self.ctx = llama.llama_init_from_model(self.model, p)
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))

    def set_adapter(self, path):
        adapter = llama.llama_adapter_lora_init(self.model, path.encode())
        if not adapter:
            sys.exit("llama.cpp refuses the adapter:\n" + "".join(self.log[-20:]))
        adapters, scales = (llama.llama_adapter_lora_p_ctypes * 1)(adapter), (ctypes.c_float * 1)(1.0)
        if llama.llama_set_adapters_lora(self.ctx, adapters, 1, scales):
            sys.exit("llama.cpp does not take the adapter")

    def log_probs(self, documents):
        rows = []
        for ids in documents:
            llama.llama_memory_clear(llama.llama_get_memory(self.ctx), True)
            batch = llama.llama_batch_init(len(ids), 0, 1)
            batch.n_tokens = len(ids)
            for i, token in enumerate(ids):
                batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
            if llama.llama_decode(self.ctx, batch):
                sys.exit("llama_decode failed")
            logits = llama.llama_get_logits(self.ctx)
            rows.append(np.ctypeslib.as_array(logits, (len(ids), self.n_vocab)).copy())
            llama.llama_batch_free(batch)
        return torch.tensor(np.concatenate(rows)).log_softmax(-1)


# ---- main

def load_peer(path):
    """With YaRN's bounds rounded, as llama.cpp has them."""
    with open(os.path.join(path, "config.json")) as f:
        settings = json.load(f)
    if settings["model_type"] == "gpt_oss":
        plain = GptOssConfig.__init__

        def rounded(self, **words):
            words["rope_parameters"] = dict(words["rope_parameters"], truncate=True)
            plain(self, **words)
        peer.GptOssConfig = type("GptOssConfig", (GptOssConfig,), {"__init__": rounded})
    return peer.load_model(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("adapter")
    parser.add_argument("rows")
    parser.add_argument("--moetrain", required=True)
    parser.add_argument("--out", default="/tmp/llama_cpp")
    parser.add_argument("--seq-len", type=int, default=96)
    a = parser.parse_args()
    out = os.path.abspath(a.out)
    os.makedirs(out, exist_ok=True)
    tokenizer = peer.load_tokenizer(a.checkpoint)
    documents = [peer.encode(tokenizer, row, a.seq_len) for row in peer.read_rows(a.rows)]

    config = os.path.join(out, "run.ini")
    with open(config, "w") as f:
        f.write(f"[model]\npath = {a.checkpoint}\n[data]\neval = {a.rows}\nformat = text\nseq_len = {a.seq_len}\n"
                f"[output]\ndir = {out}/run\n")
    subprocess.run(["rm", "-rf", f"{out}/gguf"], check=True)
    subprocess.run([a.moetrain, "export", config, "--adapter", a.adapter, "--to", "gguf", "--out", f"{out}/gguf"],
                   check=True, capture_output=True)

    model = load_peer(a.checkpoint)
    write_base(f"{out}/base.gguf", model)
    want = log_probs(model, documents)
    adapted = log_probs(PeftModel.from_pretrained(model, a.adapter), documents)
    engine = Llama(f"{out}/base.gguf")
    got = engine.log_probs(documents)
    engine.set_adapter(f"{out}/gguf/adapter.gguf")
    got_adapted = engine.log_probs(documents)

    effect = kl(adapted, want)[0]
    print(f"{a.checkpoint}: {len(want)} tokens, {ARCH[model.config.model_type]} in llama-cpp-python "
          f"{llama.__version__}; mean KL of the adapter from the base {effect:.3g}")
    failed = not effect > 1e-4
    for what, x, y in (("base", want, got), ("base + adapter", adapted, got_adapted)):
        difference = (x - y).abs().max().item()
        mean, most = kl(x, y)
        print(f"  {what:<15} largest difference of log-probabilities {difference:.2g}, KL mean {mean:.2g}, "
              f"max {most:.2g}")
        failed |= not difference <= TOLERANCE
    if failed:
        sys.exit("not within tolerance")


if __name__ == "__main__":
    main()
