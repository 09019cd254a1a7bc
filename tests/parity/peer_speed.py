"""peer_speed.py - measures tokens per second of moetrain and of transformers + PEFT on one machine, in fp32 on the CPU,
with the same model, adapters, threads and batches. Rows have exactly seq_len tokens, so the peer has no padding.

  python peer_speed.py [CHECKPOINT] [--moetrain build/moetrain] [--seq-len 256] [--batch 4] [--steps 8] [--turns 3]
                       [--threads 2]

The peer runs with its fastest settings: eager attention (the only one with sinks on a CPU), no gradient
checkpointing, the faster of transformers' implementations of the experts. ("batched_mm" is left out: it copies a whole
expert for every routed row, forty times slower here.) The two programs alternate. The
result of each is its fastest turn, by the median of the steps after the first two.
"""
import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time

import torch
from peft import LoraConfig, get_peft_model

import peer

HERE = os.path.dirname(os.path.abspath(__file__))
LORA = dict(r=16, alpha=32)
LR = 1e-4
WARM_UP = 2  # steps left out

CONFIG = """[model]
path = {checkpoint}
[data]
train = {rows}
format = text
seq_len = {seq_len}
packing = false
shuffle = false
[lora]
r = {r}
alpha = {alpha}
targets = q_proj,k_proj,v_proj,o_proj,experts
[optim]
lr = {lr}
schedule = constant
[train]
device = cpu
dtype = fp32
steps = {steps}
micro_batch = {batch}
grad_accum = 1
threads = {threads}
recompute = none
resume = never
[eval]
every = 0
at_start = false
at_end = false
[output]
dir = {out}
save_every = 0
"""


def make_rows(a, tokenizer):
    """steps * batch rows of English, each longer than seq_len tokens, so that both sides cut it to exactly that."""
    source = os.path.join(HERE, "..", "fixtures", "parity", "case_a", "train.jsonl")
    words = " ".join(row["text"] for row in peer.read_rows(source)).split(" ")
    rows = []
    for i in range(a.steps * a.batch):
        start = 37 * i % len(words)
        text = words[start:] + words[:start]
        while len(peer.encode(tokenizer, {"text": " ".join(text)}, a.seq_len)) < a.seq_len:
            text = text + text
        rows.append({"text": " ".join(text)})
    return rows


def run_moetrain(a, rows):
    with tempfile.TemporaryDirectory() as scratch:
        paths = dict(rows=os.path.join(scratch, "rows.jsonl"), out=os.path.join(scratch, "out"))
        with open(paths["rows"], "w") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
        config = os.path.join(scratch, "speed.ini")
        with open(config, "w") as f:
            f.write(CONFIG.format(lr=LR, **LORA, **paths, **vars(a)))
        subprocess.run([a.moetrain, config], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(os.path.join(paths["out"], "metrics.jsonl")) as f:
            steps = [e for e in map(json.loads, f) if e["event"] == "step"]
    return [e["ms"] / 1000 for e in steps], [e["loss"] for e in steps]


def run_peer(a, documents, experts, steps):
    """Seconds and loss of each step."""
    torch.manual_seed(1)
    model = get_peft_model(peer.load_model(a.checkpoint, experts), LoraConfig(
        r=LORA["r"], lora_alpha=LORA["alpha"], target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
    model.config.use_cache = False
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR)
    model.train()
    seconds, losses = [], []
    for step in range(steps):
        x = torch.tensor(documents[step * a.batch:(step + 1) * a.batch])
        start = time.perf_counter()
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    return seconds, losses


def fastest_experts(a, documents):
    times = {}
    for experts in ("eager", "grouped_mm"):
        times[experts] = min(run_peer(a, documents, experts, 3)[0])
        print(f"  peer's experts: {experts:10s} {times[experts]:7.2f} s a step")
    return min(times, key=times.get)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=os.path.join(HERE, "..", "..", "configs", "tiny-gptoss"))
    parser.add_argument("--moetrain", default="build/moetrain")
    for name, default in dict(seq_len=256, batch=4, steps=8, turns=3, threads=2).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    a = parser.parse_args()
    a.checkpoint = os.path.abspath(a.checkpoint)

    torch.set_num_threads(a.threads)
    tokenizer = peer.load_tokenizer(a.checkpoint)
    rows = make_rows(a, tokenizer)
    documents = [peer.encode(tokenizer, row, a.seq_len) for row in rows]
    tokens = a.batch * a.seq_len
    print(f"{a.steps} steps of {a.batch} x {a.seq_len} tokens, {a.threads} threads, fp32")
    experts = fastest_experts(a, documents)
    sides = {"moetrain": lambda: run_moetrain(a, rows),
             "transformers + PEFT": lambda: run_peer(a, documents, experts, a.steps)}
    best = {}
    for _ in range(a.turns):
        for name, run in sides.items():
            seconds, losses = run()
            rate = tokens / statistics.median(seconds[WARM_UP:])
            best[name] = max(best.get(name, (0, losses)), (rate, losses))
    for name, (rate, losses) in best.items():
        print(f"  {name:20s} {rate:8.0f} tokens/s   loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
