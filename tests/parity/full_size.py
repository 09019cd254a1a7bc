"""full_size.py - compares moetrain with transformers + PEFT on one GPU, on a random gpt-oss-20b of full size (`moetrain
synth`): held-out losses of the same rows, LoRA gradients of the first step, losses of some training steps.

  python full_size.py --moetrain BIN [--arch gpt-oss-20b] [--layers N] [--work DIR] [--rows 16] [--steps 20]
                      [--batch 4] [--seq-len 512] [--device cuda|cpu] [--reference auto|fp32|bf16]

moetrain's error in bf16 may be twice that of transformers in bf16. A reference and a second computation by
transformers measure the latter; it includes routing that changes near a tie:
  fp32  The reference is transformers in fp32 (every weight of the checkpoint is exact in bf16, so in fp32 too); the
        second computation is transformers with its defaults, in bf16. Needs 4 bytes a parameter: 110 GiB for
        gpt-oss-20b.
  bf16  For an 80 GB card. The reference is transformers in bf16 with its defaults. The second computation is bf16
        too, but with attention scores and softmax in fp32, and expert by expert.
  auto  fp32 if the memory suffices, else bf16.
Required, with FLOOR stated below and everything relative to the reference:
  losses     of every step, |moetrain - reference| <= 2 * |second - reference| + FLOOR (the worst step of each)
  gradients  per kind of matrix over all layers: the Frobenius norm of the difference, with no floor; and, since noise
             cancels in it, the factor <gradient, reference> / <reference, reference> less 1, with FLOOR
  held out   |moetrain - transformers in bf16 as used| <= EVAL, of the base model and of the adapter
Prints every number; exit 1 when one exceeds its bound. DIR takes 20 GB and is not deleted.
"""
import argparse
import glob
import json
import math
import os
import random
import re
import resource
import shutil
import string
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from typing import NamedTuple

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AttentionMaskInterface, GptOssConfig, GptOssForCausalLM
from transformers.masking_utils import eager_mask
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

import peer

EVAL = 5e-3
FLOOR = {"loss": 1e-3, "gradient norm": 1e-2, "gradient": 0, "factor": 1e-2}
RECOVERED = 1e-4  # tolerance of the norm of the recovered gradient against the one that moetrain logs
R, ALPHA, LR, CLIP_NORM, SEED = 16, 32, 2e-4, 1.0, 7
RESERVE_GIB = 24  # beside the weights: one layer's merged experts and their gradients, adapter, moments, logits

CONFIG = """[model]
path = {checkpoint}
[data]
train = {work}/train.jsonl
eval = {work}/eval.jsonl
format = text
seq_len = {seq_len}
packing = false
shuffle = false
[lora]
r = {r}
alpha = {alpha}
targets = q_proj,k_proj,v_proj,o_proj,experts
init_from = {work}/adapter
[optim]
lr = {lr}
schedule = constant
warmup_ratio = 0
weight_decay = 0
beta1 = {beta1}
beta2 = {beta2}
eps = {eps}
clip_norm = {clip_norm}
[train]
device = {device}
steps = {steps}
micro_batch = {batch}
resume = never
[eval]
at_start = false
at_end = false
[output]
dir = {out}
[log]
report = false
"""


class Way(NamedTuple):
    name: str
    dtype: torch.dtype
    attention: str
    experts: str


FP32 = Way("transformers fp32", torch.float32, "eager", "grouped_mm")
BF16 = Way("transformers bf16", torch.bfloat16, "eager", "grouped_mm")
BF16_OTHER = Way("bf16, another way", torch.bfloat16, "fp32_scores", "eager")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moetrain", required=True)
    parser.add_argument("--arch", default="gpt-oss-20b", help="one of the gpt-oss family")
    parser.add_argument("--layers", type=int, help="only the first so many")
    parser.add_argument("--work", default=os.path.join(tempfile.gettempdir(), "moetrain-full-size"))
    for name, default in dict(rows=16, steps=20, batch=4, seq_len=512).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--device", default="cuda", help="of both: cuda, cuda-portable (moetrain's), cpu")
    parser.add_argument("--reference", choices=("auto", "fp32", "bf16"), default="auto")
    a = parser.parse_args()
    a.moetrain, a.work = os.path.abspath(a.moetrain), os.path.abspath(a.work)
    a.checkpoint = os.path.join(a.work, a.arch + (f"-{a.layers}" if a.layers else ""))
    a.torch_device = torch.device(a.device.split("-")[0])
    return a


@contextmanager
def part(what):
    print(f"{what} ...", flush=True)
    start = time.perf_counter()
    yield
    print(f"    {time.perf_counter() - start:.1f} s", flush=True)


# ---- inputs of both programs


def write_rows(a):
    """Printable ASCII, a token per byte: rows of 200 to 500 tokens, or up to seq_len where that is less."""
    draw = random.Random(SEED)
    alphabet = string.ascii_letters + string.digits + string.punctuation + " "
    longest = min(500, a.seq_len) - 1  # and the eos
    for name, n in (("eval", a.rows), ("train", a.steps * a.batch)):
        with open(f"{a.work}/{name}.jsonl", "w") as f:
            for _ in range(n):
                text = "".join(draw.choices(alphabet, k=draw.randint(min(200, longest // 2), longest)))
                f.write(json.dumps({"text": text}) + "\n")


def write_adapter(a):
    """A PEFT adapter whose A and B are both random, so that no gradient is zero; its delta is about a tenth of W. For
    experts it has PEFT's fused form: A [r * E, in] expert-major, B [out, r * E] rank-major."""
    with open(f"{a.checkpoint}/config.json") as f:
        c = json.load(f)
    hidden, width, n_exp = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    q, kv = (c[key] * c["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"self_attn.q_proj": (hidden, q, 1), "self_attn.k_proj": (hidden, kv, 1),
              "self_attn.v_proj": (hidden, kv, 1), "self_attn.o_proj": (q, hidden, 1),
              "mlp.experts.base_layer": (hidden, 2 * width, n_exp), "mlp.experts": (width, hidden, n_exp)}
    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    for layer in range(c["num_hidden_layers"]):
        for module, (n_in, n_out, n) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}.lora_"
            tensors[name + "A.weight"] = torch.randn(R * n, n_in, generator=generator) * (3 * n_in) ** -0.5
            tensors[name + "B.weight"] = torch.randn(n_out, R * n, generator=generator) * 0.01
    os.makedirs(f"{a.work}/adapter", exist_ok=True)
    save_file(tensors, f"{a.work}/adapter/adapter_model.safetensors", metadata={"format": "pt"})
    with open(f"{a.work}/adapter/adapter_config.json", "w") as f:
        json.dump({"peft_type": "LORA", "peft_version": "0.19.1", "task_type": "CAUSAL_LM", "r": R, "lora_alpha": ALPHA,
                   "lora_dropout": 0.0, "bias": "none", "base_model_name_or_path": a.checkpoint,
                   "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
                   "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}, f, indent=1)


# ---- moetrain


def moetrain(a, name, command, **settings):
    """Runs moetrain with its messages in WORK/NAME.log; returns the standard output."""
    defaults = dict(lr=LR, beta1=0.9, beta2=0.999, eps=1e-8, clip_norm=CLIP_NORM, steps=a.steps)
    out = f"{a.work}/{name}"
    shutil.rmtree(out, ignore_errors=True)
    with open(f"{out}.ini", "w") as f:
        f.write(CONFIG.format(work=a.work, checkpoint=a.checkpoint, seq_len=a.seq_len, r=R, alpha=ALPHA,
                              device=a.device, batch=a.batch, out=out, **(defaults | settings)))
    with open(f"{out}.log", "w") as log:
        done = subprocess.run([a.moetrain, command[0], f"{out}.ini", *command[1:]], stdout=subprocess.PIPE, stderr=log)
    if done.returncode:
        with open(f"{out}.log") as log:
            sys.exit(f"moetrain {command[0]} failed; {out}.log ends:\n{log.read()[-2000:]}")
    return done.stdout.decode()


def train_events(a, name):
    with open(f"{a.work}/{name}/metrics.jsonl") as f:
        return [e for e in map(json.loads, f) if e["event"] == "step"]


def recovered_gradients(a, norm):
    """The gradient of step 0, without a command that prints it: with beta1 = beta2 = 0, no decay and no clipping, AdamW
    makes of p the value p - lr * g / (|g| + eps), so that u = (p - p_new) / lr gives g = eps * u / (1 - |u|). With
    lr = 1 and eps a few times the usual |g| the update is neither lost beside p, whose entries are about 0.01, nor
    so close to 1 that 1 - |u| is: float32's precision stays. eps is a power of two, the same in float32."""
    init = load_file(f"{a.work}/adapter/adapter_model.safetensors")
    n = sum(p.numel() for p in init.values())
    eps = 2.0 ** min(0, math.ceil(math.log2(16 * norm / n ** 0.5)))
    moetrain(a, "gradients", ["train"], lr=1, beta1=0, beta2=0, eps=eps, clip_norm=0, steps=1)
    gradients = {}
    with safe_open(f"{a.work}/gradients/adapter/adapter_model.safetensors", "pt") as f:
        assert set(f.keys()) == init.keys()
        for name, p in init.items():
            u = p.double() - f.get_tensor(name).double()
            gradients[name] = (eps * u / (1 - u.abs())).float()
    return gradients


def run_moetrain(a):
    result = {}
    with part("moetrain: held-out loss of the base model, of the adapter"):
        for key, extra in (("base", ["--base"]), ("adapter", ["--adapter", f"{a.work}/adapter"])):
            result[key] = json.loads(moetrain(a, "eval_" + key, ["eval", *extra]))
    with part(f"moetrain: {a.steps} steps of {a.batch} rows"):
        moetrain(a, "train", ["train"])
        steps = train_events(a, "train")
    result["loss"], result["norm"] = ([e[key] for e in steps] for key in ("loss", "grad_norm"))
    with part("moetrain: the gradients of step 0"):
        result["gradients"] = recovered_gradients(a, result["norm"][0])
    result["tokens"] = result["base"]["tokens"]
    result["base"], result["adapter"] = result["base"]["loss"], result["adapter"]["loss"]
    return result


# ---- transformers


def decode_mxfp4(blocks, scales, dtype):
    """Like peer.decode_mxfp4, but decodes a byte (two codes) at a time, directly to dtype: e2m1 times 2^k is exact in
    bf16."""
    code = torch.arange(256)
    pair = torch.stack((peer.FP4[code & 15], peer.FP4[code >> 4]), -1).to(blocks.device, dtype)
    values = pair[blocks.int()].flatten(-2)
    values *= torch.exp2(scales.float() - 127).to(dtype).unsqueeze(-1)
    return values.flatten(-2).transpose(1, 2)


def model_config(a):
    with open(f"{a.checkpoint}/config.json") as f:
        settings = json.load(f)
    settings.pop("quantization_config")
    return GptOssConfig(**settings)


@torch.no_grad()
def load_model(a, dtype):
    """The model, made on the device and filled tensor by tensor: the host never holds more than one."""
    with a.torch_device:
        model = GptOssForCausalLM._from_config(model_config(a), dtype=dtype)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    shards = [safe_open(path, "pt", device=str(a.torch_device)) for path in glob.glob(f"{a.checkpoint}/*.safetensors")]
    shard_of = {name: shard for shard in shards for name in shard.keys()}

    def tensor(name):
        return shard_of.pop(name).get_tensor(name)

    for name, p in model.state_dict().items():
        packed = name + "_blocks" in shard_of
        value = decode_mxfp4(tensor(name + "_blocks"), tensor(name + "_scales"), dtype) if packed else tensor(name)
        assert value.shape == p.shape, name
        p.copy_(value)
    if shard_of:
        sys.exit(f"{a.checkpoint}: left over: {list(shard_of)[:4]}")
    return model


def with_adapter(a, model):
    """The model with PEFT's adapter from the same files, in fp32; compares each value."""
    model = PeftModel.from_pretrained(model, f"{a.work}/adapter", is_trainable=True)
    trained = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    init = load_file(f"{a.work}/adapter/adapter_model.safetensors")
    assert trained.keys() == init.keys()
    for name, p in trained.items():
        p.data = p.data.float()
        if not torch.equal(p.cpu(), init[name]):
            sys.exit(f"{name}: PEFT read other values than the file holds")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, trained, init


def fp32_scores(module, query, key, value, attention_mask, scaling, **kwargs):
    out, weights = eager_attention_forward(module, query.float(), key.float(), value.float(), attention_mask, scaling)
    return out.to(query.dtype), weights


def cross_entropy(model, documents):
    """Summed cross-entropy of a batch of documents, and the number of its tokens. Shorter documents are padded at the
    end, where causal attention never sees the padding."""
    pad = torch.nn.utils.rnn.pad_sequence
    device = next(model.parameters()).device
    x = pad([torch.tensor(ids) for ids in documents], batch_first=True).to(device)
    y = pad([torch.tensor(ids[1:]) for ids in documents], batch_first=True, padding_value=-100).to(device)
    logits = model(input_ids=x, use_cache=False).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), sum(
        len(ids) - 1 for ids in documents)


def in_batches(documents, n):
    return [documents[i:i + n] for i in range(0, len(documents), n)]


@torch.no_grad()
def held_out_loss(model, batches):
    sums = [cross_entropy(model, batch) for batch in batches]
    return sum(loss.item() for loss, _ in sums) / sum(n for _, n in sums)


def train(model, trained, batches, result):
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0)
    result["loss"], result["norm"] = [], []
    for batch in batches:
        loss, n = cross_entropy(model, batch)
        (loss / n).backward()
        if not result["loss"]:
            result["gradients"] = {name: p.grad.to("cpu", copy=True) for name, p in trained.items()}
        result["loss"].append(loss.item() / n)
        result["norm"].append(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP_NORM).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def run_way(a, way, model, trained, init, held_out, steps):
    """Computes the same quantities as moetrain, from the same adapter."""
    result = {}
    on_gpu = a.torch_device.type == "cuda"
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.to(way.dtype)
    for name, p in trained.items():
        p.data.copy_(init[name])
    config = model.get_base_model().config
    config._attn_implementation, config._experts_implementation = way.attention, way.experts
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with part(f"{way.name}: held-out loss of the base model, of the adapter"):
        model.eval()
        with model.disable_adapter():
            result["base"] = held_out_loss(model, held_out)
        result["adapter"] = held_out_loss(model, held_out)
    with part(f"{way.name}: {a.steps} steps of {a.batch} rows"):
        model.train()
        train(model, trained, steps, result)
    if on_gpu:
        print(f"    peak {torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB", flush=True)
    return result


def choose_ways(a):
    """The settings of the reference, then of the second computation."""
    if a.reference == "auto":
        have = torch.cuda.get_device_properties(0).total_memory if a.torch_device.type == "cuda" else math.inf
        with torch.device("meta"):
            n = sum(p.numel() for p in GptOssForCausalLM(model_config(a)).parameters())
        a.reference = "fp32" if have >= 4 * n + RESERVE_GIB * 2 ** 30 else "bf16"
    return (FP32, BF16) if a.reference == "fp32" else (BF16, BF16_OTHER)


def run_transformers(a):
    tokenizer = peer.load_tokenizer(a.checkpoint)
    held_out, rows = ([peer.encode(tokenizer, row, a.seq_len) for row in peer.read_rows(f"{a.work}/{name}.jsonl")]
                      for name in ("eval", "train"))
    ways = choose_ways(a)
    with part(f"transformers: loading in {a.reference}, PEFT's adapter"):
        model, trained, init = with_adapter(a, load_model(a, ways[0].dtype))
    results = [run_way(a, way, model, trained, init, in_batches(held_out, a.batch), in_batches(rows, a.batch))
               for way in ways]
    return ways, results, sum(len(ids) - 1 for ids in held_out)


# ---- comparison


def relative(x, reference):
    return abs(x - reference) / abs(reference)


def worst(xs, references):
    return max(relative(x, r) for x, r in zip(xs, references, strict=True))


def gradient_errors(gradients, reference, device):
    """For each kind of matrix, over all layers: the relative Frobenius error, and how far the factor is from 1."""
    sums = {}
    assert gradients.keys() == reference.keys()
    for name, r in reference.items():
        where = "attention" if "self_attn" in name else "gate_up" if "base_layer" in name else "down"
        g, r = gradients[name].to(device).double(), r.to(device).double()
        new = torch.stack(((g - r).square().sum(), (g * r).sum(), r.square().sum()))
        kind = f"{where} {re.search('lora_(.)', name)[1]}"
        sums[kind] = sums.get(kind, 0) + new
    errors = {}
    for kind, total in sums.items():
        difference, product, size = total.tolist()
        errors["gradient", kind] = (difference / size) ** 0.5
        errors["factor", kind] = abs(product / size - 1)
    return errors


def print_steps(ours, ways, results):
    print(f"\nstep  loss: moetrain  {ways[0].name:>17s}  {ways[1].name:>17s}   norm: moetrain {ways[0].name:>17s}  "
          f"{ways[1].name:>17s}")
    columns = [r[key] for key in ("loss", "norm") for r in (ours, *results)]
    for i, (l0, l1, l2, n0, n1, n2) in enumerate(zip(*columns, strict=True)):
        print(f"{i + 1:4d}  {l0:14.6f}  {l1:17.6f}  {l2:17.6f}  {n0:15.6g} {n1:17.6g}  {n2:17.6g}")


def verdict(a, ours, ways, results, tokens):
    """Prints the table: quantity, moetrain's error, that of the second computation, the bound."""
    reference, second = results
    used = results[ways.index(BF16)]
    rows = [("held-out tokens", relative(ours["tokens"], tokens), None, 0.0)]
    for key in ("base", "adapter"):
        rows.append((f"held-out loss, {key}, to {BF16.name}", relative(ours[key], used[key]), None, EVAL))
    for what, key in (("loss", "loss"), ("gradient norm", "norm")):
        spread = worst(second[key], reference[key])
        rows.append((f"{what} of {a.steps} steps, worst", worst(ours[key], reference[key]), spread,
                     2 * spread + FLOOR[what]))
    norm = sum(g.double().square().sum().item() for g in ours["gradients"].values()) ** 0.5
    rows.append(("gradients of moetrain as recovered, their norm", relative(norm, ours["norm"][0]), None, RECOVERED))
    errors, spreads = (gradient_errors(r["gradients"], reference["gradients"], a.torch_device) for r in (ours, second))
    rows += [(f"{what} of {kind}", error, spreads[what, kind], 2 * spreads[what, kind] + FLOOR[what])
             for (what, kind), error in sorted(errors.items(), reverse=True)]

    print_steps(ours, ways, results)
    print(f"\nheld-out loss of {tokens} tokens")
    for name, r in zip(("moetrain", *(way.name for way in ways)), (ours, *results)):
        print(f"  {name:18s} base {r['base']:.6f}, adapter {r['adapter']:.6f}")
    print(f"\nreference: {ways[0].name}; second: {ways[1].name}\n{'':5s}{'':58s}  moetrain    second   allowed")
    good = True
    for what, error, spread, allowed in rows:
        ok = error <= allowed  # false for NaN
        good &= ok
        second_text = f"{spread:9.2e}" if spread is not None else " " * 9
        print(f"{'ok  ' if ok else 'FAIL'} {what:58s} {error:9.2e} {second_text} {allowed:9.2e}")
    return good


def main():
    a = arguments()
    start = time.perf_counter()
    AttentionInterface.register("fp32_scores", fp32_scores)
    AttentionMaskInterface.register("fp32_scores", eager_mask)
    os.makedirs(a.work, exist_ok=True)
    if not os.path.exists(f"{a.checkpoint}/config.json"):
        with part(f"moetrain synth {a.arch}"):
            layers = ["--layers", str(a.layers)] if a.layers else []
            subprocess.run([a.moetrain, "synth", a.arch, a.checkpoint, *layers], check=True)
    with part("rows and adapter"):
        write_rows(a)
        write_adapter(a)
    ours = run_moetrain(a)
    good = verdict(a, ours, *run_transformers(a))
    here, there = (resource.getrusage(who).ru_maxrss / 2 ** 20 for who in
                   (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"\n{time.perf_counter() - start:.0f} s; host memory at most {here:.1f} GiB here, {there:.1f} in moetrain")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
