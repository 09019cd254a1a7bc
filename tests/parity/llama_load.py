"""llama_load.py - checks that llama.cpp reads the GGUF adapter of `moetrain export --to gguf` correctly. llama.cpp's
own converter writes the base model as a GGUF in F32. llama.cpp loads both files, and the script compares its logits of
the held-out rows with those of transformers + PEFT, for base and base + adapter.

  python llama_load.py CHECKPOINT ADAPTER ROWS.jsonl --moetrain build/moetrain --llama-cpp DIR [--out DIR]

ADAPTER: a PEFT directory; targets that llama.cpp does not apply are left out. ROWS: `text` rows. --llama-cpp: its
source tree (vendor/llama.cpp of llama-cpp-python's source archive). Everything is F32, key-value cache too; llama.cpp
rounds YaRN's bounds, so transformers' model of gpt-oss gets rounded ones. Exit 1 when a difference of log-probabilities
is over 2e-3, or the adapter changes nothing. Needs torch, transformers >= 5, peft >= 0.19.1, gguf, llama-cpp-python.
"""
import argparse
import ctypes
import json
import os
import subprocess
import sys

import llama_cpp as llama
import numpy as np
import torch
from peft import PeftModel

import peer
from export_peers import REFUSED, kl, log_probs, text_settings, without
from llama_peer import load_peer

TOLERANCE = 2e-3

# ---- the base model as a GGUF

CONVERT = """
import sys
from pathlib import Path
source, checkpoint, out = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
import gguf, torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
settings = ModelBase.load_hparams(Path(checkpoint), False)
base = get_model_class(get_model_architecture(settings, ModelType.TEXT))

class Model(base):
    model_arch, no_mtp = base.model_arch, True

    def set_vocab(self):
        self._set_vocab_none()

    def set_gguf_parameters(self):
        super().set_gguf_parameters()
        if not any(key.endswith(".vocab_size") for part in self.gguf_writer.kv_data for key in part):
            self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

with torch.inference_mode():
    Model(Path(checkpoint), gguf.LlamaFileType.ALL_F32, Path(out)).write()
"""


def readable(checkpoint, model, out):
    """A checkpoint that the converter keeps in F32 and whose dense layers and router it knows."""
    if model.config.model_type == "gpt_oss":
        model.save_pretrained(out)
        return out
    os.makedirs(out, exist_ok=True)
    for name in os.listdir(checkpoint):
        if name.endswith((".safetensors", ".index.json")) and not os.path.exists(f"{out}/{name}"):
            os.symlink(f"{checkpoint}/{name}", f"{out}/{name}")
    with open(f"{checkpoint}/config.json") as f:
        config = json.load(f)
    if "mlp_layer_types" in config:
        config["first_k_dense_replace"] = config["mlp_layer_types"].count("dense")
    if "kv_lora_rank" in config:
        config["scoring_func"] = "sigmoid"  # published files have it, transformers does not write it
    with open(f"{out}/config.json", "w") as f:
        json.dump(config, f)
    return out


def write_base(path, checkpoint, source):
    done = subprocess.run([sys.executable, "-c", CONVERT, source, checkpoint, path], capture_output=True, text=True)
    if done.returncode:
        sys.exit("llama.cpp's converter failed:\n" + done.stderr[-2000:])


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

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("adapter")
    parser.add_argument("rows")
    parser.add_argument("--moetrain", required=True)
    parser.add_argument("--llama-cpp", required=True)
    parser.add_argument("--out", default="/tmp/llama_cpp")
    parser.add_argument("--seq-len", type=int, default=96)
    a = parser.parse_args()
    out = os.path.abspath(a.out)
    os.makedirs(out, exist_ok=True)
    tokenizer = peer.load_tokenizer(a.checkpoint)
    documents = [peer.encode(tokenizer, row, a.seq_len) for row in peer.read_rows(a.rows)]

    settings = text_settings(a.checkpoint)
    adapter = a.adapter
    if "kv_lora_rank" in settings:
        adapter = without(a.adapter, REFUSED["gguf"], f"{out}/adapter")
    config = os.path.join(out, "run.ini")
    with open(config, "w") as f:
        f.write(f"[model]\npath = {a.checkpoint}\n[data]\neval = {a.rows}\nformat = text\nseq_len = {a.seq_len}\n"
                f"[output]\ndir = {out}/run\n")
    subprocess.run(["rm", "-rf", f"{out}/gguf"], check=True)
    subprocess.run([a.moetrain, "export", config, "--adapter", adapter, "--to", "gguf", "--out", f"{out}/gguf"],
                   check=True, capture_output=True)

    model = load_peer(a.checkpoint)
    checkpoint = readable(os.path.abspath(a.checkpoint), model, f"{out}/checkpoint")
    write_base(f"{out}/base.gguf", checkpoint, os.path.abspath(a.llama_cpp))
    want = log_probs(model, documents)
    adapted = log_probs(PeftModel.from_pretrained(model, adapter), documents)
    engine = Llama(f"{out}/base.gguf")
    got = engine.log_probs(documents)
    engine.set_adapter(f"{out}/gguf/adapter.gguf")
    got_adapted = engine.log_probs(documents)

    effect = kl(adapted, want)[0]
    print(f"{a.checkpoint}: {len(want)} tokens, {settings['model_type']} in llama-cpp-python "
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
