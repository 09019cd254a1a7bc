"""random_cases.py - random configurations of a family: makes each case (make_case.py), trains on it with moetrain
(compare.py), and computes a case that is out of tolerance in f64 too.

  python random_cases.py --family qwen3_5 --cases 30 --seed 1 --text ANY_TEXT_FILE [--moetrain build/moetrain]

A case within the tolerances of compare.py passes. Rounding of fp32 grows from step to step: AdamW's first updates have
the sign of the gradient, and a gated norm divides by outputs near zero. A case outside the tolerances passes only if
its single steps agree: each step is repeated from the adapter that the run in f64 has at this step. All losses must be
within tolerance of f64, and moetrain's gradients at most twice as far from f64 as those of transformers in fp32, by
geometric means over the steps.

Prints a line per case; --keep DIR keeps the cases that fail. Exit 1 when a case fails.
"""
import argparse
import contextlib
import io
import json
import math
import os
import random
import shutil
import sys
import tempfile

from peft import PeftModel
from safetensors.torch import load_file, save_file

import compare
import families
import make_case
import peer


def flag(rng, name, share=0.5):
    return [name] if rng.random() < share else []


def experts(rng):
    """Groups of at least two experts; the chosen groups have at least topk experts."""
    groups = rng.choice([1, 1, 2, 4])
    per_group = rng.choice([2, 3, 4]) if groups > 1 else rng.choice([3, 5, 8, 12])
    chosen = rng.randint(1, groups)
    topk = rng.randint(1, min(4, chosen * per_group))
    return ["--experts", groups * per_group, "--groups", groups, "--topk-groups", chosen, "--topk", topk]


def router(rng):
    """Sigmoid routers, and what stands beside the routed experts."""
    return experts(rng) + flag(rng, "--old-config") + ["--norm-topk-prob", rng.choice(["true", "true", "false"]),
                                                       "--routed-scale", rng.choice([0.7, 1, 1.8, 2.5]),
                                                       "--shared-experts", rng.choice([0, 1, 1, 2])]


def dense(rng, layers):
    return ["--layers", layers, "--dense-layers", *range(rng.randint(0, layers))]


def yarn(rng):
    return ["--yarn", rng.choice([1.5, 4, 32])] if rng.random() < 0.3 else []


def latent(rng):
    heads = rng.choice([1, 2, 3, 4])
    q_lora = rng.choice([0, 12, 24])
    args = ["--heads", heads, "--kv-heads", heads, "--head-dim", rng.choice([4, 12, 24, 48]),
            "--rope-dim", rng.choice([2, 8, 16]), "--value-dim", rng.choice([6, 10, 32, 40]), "--q-lora", q_lora,
            "--kv-lora", rng.choice([8, 16, 40])] + flag(rng, "--half-split", 0.3)
    return args + (flag(rng, "--attention-bias", 0.3) if q_lora else [])


def glm4(rng):
    kv = rng.choice([1, 2])
    return (dense(rng, rng.choice([2, 3])) + router(rng) + yarn(rng) + flag(rng, "--attention-bias") +
            flag(rng, "--qk-norm") + ["--kv-heads", kv, "--heads", kv * rng.choice([1, 2, 3]), "--head-dim",
                                      rng.choice([8, 16, 24]), "--rotated", rng.choice([0.25, 0.5, 0.75, 1])])


def glm4_lite(rng):
    args = dense(rng, rng.choice([2, 3])) + router(rng) + latent(rng) + yarn(rng)
    if args.index("--experts") - args.index("--dense-layers") != 2:  # transformers does not read first_k_dense_replace
        args = [x for x in args if x != "--old-config"]
    return args


def deepseek_v3(rng):
    return (dense(rng, rng.choice([2, 3])) + router(rng) + latent(rng) +
            ["--mscale", rng.choice([0.5, 0.707, 1, 1.3])])


def mistral4(rng):
    """Its router is a softmax, with neither groups nor a scale."""
    n = rng.choice([2, 3, 5, 8, 12])
    return (dense(rng, rng.choice([2, 3])) + latent(rng) + flag(rng, "--old-config", 0.3) +
            ["--experts", n, "--topk", rng.randint(1, min(4, n)), "--norm-topk-prob", rng.choice(["true", "false"]),
             "--shared-experts", rng.choice([0, 1, 1, 2]), "--mscale", rng.choice([0.5, 1, 1.3])])


def delta(rng, layers):
    """Layers with gated DeltaNet, and with attention: transformers needs one."""
    kv = rng.choice([1, 2])
    return ["--layers", layers, "--kv-heads", kv, "--heads", kv * rng.choice([1, 2, 3]), "--head-dim",
            rng.choice([8, 16, 24]), "--linear-dims", rng.choice([8, 16, 24]), rng.choice([8, 16, 40]), "--taps",
            rng.choice([2, 3, 4, 5]), "--shared-width", rng.choice([8, 24, 40]), "--experts", rng.choice([3, 6, 12]),
            "--topk", rng.choice([1, 2, 3]), "--full-layers", *rng.sample(range(layers), rng.randint(1, layers))]


def linear_heads(rng):
    n = rng.choice([1, 2, 3])
    return n, n * rng.choice([1, 2, 4])


def qwen3_5(rng):
    return (delta(rng, rng.choice([2, 3, 4])) + ["--linear-heads", *linear_heads(rng)] + yarn(rng) +
            flag(rng, "--attention-bias", 0.2) + flag(rng, "--old-config", 0.3))


def qwen3_next(rng):
    layers, (key_heads, value_heads) = rng.choice([2, 3, 4]), linear_heads(rng)
    return (delta(rng, layers) + ["--key-heads", key_heads, "--value-heads", value_heads, "--rotated",
                                  rng.choice([0.25, 0.5, 1]), "--norm-topk-prob", rng.choice(["true", "false"]),
                                  "--sparse-step", rng.choice([1, 1, 2]), "--dense-layers",
                                  *rng.sample(range(layers), rng.choice([0, 0, 1]))] +
            yarn(rng) + flag(rng, "--attention-bias", 0.2))


def deepseek_v4(rng):
    """The indexer has at least 16 heads: with few heads, entries tie at a score of 0."""
    layers, groups, heads = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3]), rng.choice([1, 2])
    rotated = rng.choice([2, 4, 8])
    published = rng.random() < 0.3  # in the spellings of the published file
    ratios = [4, 128] if published else [rng.choice([1, 2, 3, 4, 6]), rng.choice([5, 8, 16, 40])]
    return (["--layers", layers, "--kinds", *rng.choices([0, 4, 128], k=layers), "--ratios", *ratios, "--hash-layers",
             rng.randint(0, layers), "--heads", groups * heads, "--head-dim", rng.choice([8, 12, 16, 24]), "--rope-dim",
             rotated, "--q-lora", rng.choice([8, 12, 24]), "--o-groups", groups, "--o-lora", rng.choice([4, 8, 12]),
             "--window", rng.choice([1, 3, 8, 32, 300]), "--index-heads", rng.choice([16, 20, 32]), "--index-dim",
             rng.choice([8, 12, 24]), "--index-top", rng.choice([1, 2, 5, 12, 64]), "--streams",
             rng.choice([1, 2, 3, 4, 4]), "--rounds", rng.choice([1, 2, 5, 20]), "--limit", rng.choice([0.7, 1.5, 10]),
             "--experts", rng.choice([3, 5, 8]), "--topk", rng.choice([1, 2, 3]), "--routed-scale",
             rng.choice([0.7, 1, 1.5, 2.5])] +
            ["--old-config"] * published + yarn(rng))


def nemotron(rng):
    """Layers in any order and number; transformers needs one of attention."""
    layers = rng.choice([2, 3, 5, 6])
    pattern = "*" + "".join(rng.choices("MMMEE*-", k=layers - 1))
    pattern = "".join(rng.sample(pattern, layers))
    kv, groups = rng.choice([1, 2]), rng.choice([1, 2, 4])
    return (["--pattern=" + pattern, "--layers", layers, "--kv-heads", kv, "--heads", kv * rng.choice([1, 2, 3]),
             "--head-dim", rng.choice([8, 12, 16]), "--key-heads", groups, "--value-heads",
             groups * rng.choice([1, 2, 3]), "--linear-dims", rng.choice([4, 8, 16, 24]), rng.choice([4, 6, 8, 16]),
             "--taps", rng.choice([2, 3, 4, 8]), "--chunk", rng.choice([1, 8, 32, 64, 256]), "--shared-width",
             rng.choice([8, 24, 40]), "--step-min", rng.choice([1e-4, 0.001, 0.3])] +
            router(rng)[:-2] + flag(rng, "--attention-bias", 0.2) +
            flag(rng, "--no-conv-bias", 0.2) + (["--latent", rng.choice([8, 16])] if rng.random() < 0.3 else []))


def plain_experts(rng):
    """Softmax routers without groups or shared experts."""
    n = rng.choice([2, 3, 5, 8, 12])
    return ["--experts", n, "--topk", rng.randint(1, min(5, n)), "--shared-experts", 0]


def plain_heads(rng):
    kv = rng.choice([1, 2, 3])
    return ["--kv-heads", kv, "--heads", kv * rng.choice([1, 2, 3, 7]), "--head-dim",
            rng.choice([4, 6, 8, 16, 20, 24, 64])]


def drawn_rope(rng, share):
    """An argument of --keys: plain RoPE or, with probability `share`, YaRN with random values of all its parameters."""
    value = {"rope_type": "default", "rope_theta": rng.choice([30.0, 1e4, 150000.0, 1e6])}
    if rng.random() < share:
        value |= {"rope_type": "yarn", "factor": rng.choice([1.0, 1.5, 8.0, 32.0]),
                  "original_max_position_embeddings": rng.choice([16, 64, 256, 4096]),
                  "beta_fast": rng.choice([32.0, 8.0, 2.0]), "beta_slow": rng.choice([1.0, 0.5, 2.0]),
                  "truncate": rng.random() < 0.5}
        value |= rng.choice([{}, {"attention_factor": rng.choice([0.8, 1.0, 1.4])}])
    return f"rope_parameters={json.dumps(value)}"


def gpt_oss(rng):
    """Sizes that MXFP4 divides; layers with and without a window in any order."""
    layers = rng.choice([1, 2, 3, 4])
    kinds = rng.choices(["sliding_attention", "full_attention"], k=layers)
    return (["--layers", layers, "--hidden", rng.choice([32, 64, 96]), "--inter", rng.choice([32, 64, 96]), "--window",
             rng.choice([1, 2, 5, 16, 32, 300])] + plain_experts(rng) + plain_heads(rng) +
            ["--keys", drawn_rope(rng, 0.7), f"layer_types={json.dumps(kinds)}"])


def qwen3(rng):
    layers = rng.choice([1, 2, 3])
    return (["--layers", layers, "--norm-topk-prob", rng.choice(["true", "false"]), "--sparse-step",
             rng.choice([1, 1, 2]), "--dense-layers", *rng.sample(range(layers), rng.choice([0, 0, 1]))] +
            plain_experts(rng) + plain_heads(rng) + flag(rng, "--attention-bias") + ["--keys", drawn_rope(rng, 0.3)])


def qwen3_vl(rng):
    """As qwen3, with experts that are wider than the hidden state: of square matrices the layout is not known."""
    return qwen3(rng) + ["--inter", rng.choice([56, 80])]


def olmoe(rng):
    """The norm of queries is as wide as the hidden state, the norm of keys may be narrower."""
    heads, per_key = rng.choice([(1, 1), (2, 1), (2, 2), (6, 1), (6, 3), (6, 6), (4, 2)])
    head_dim = rng.choice([4, 6, 8, 10])
    return (["--layers", rng.choice([1, 2, 3]), "--heads", heads, "--kv-heads", heads // per_key,
             "--head-dim", head_dim, "--hidden", heads * head_dim, "--norm-topk-prob",
             rng.choice(["true", "false"])] + plain_experts(rng) +
            flag(rng, "--attention-bias") + ["--keys", drawn_rope(rng, 0.3)])


def mixtral(rng):
    """With a window of 1 the gradient of q and k is 0: AdamW would follow its rounding error."""
    window = rng.choice([[], ["sliding_window=2"], ["sliding_window=7"], ["sliding_window=40"], ["sliding_window=500"]])
    return (["--layers", rng.choice([1, 2, 3])] + plain_experts(rng) + plain_heads(rng) +
            ["--keys", drawn_rope(rng, 0.3), *window])


def minimax_m2(rng):
    return (["--layers", rng.choice([1, 2, 3])] + plain_experts(rng) + plain_heads(rng) +
            ["--head-dim", rng.choice([8, 16, 24, 64]), "--rotated", rng.choice([0.25, 0.5, 0.75, 1])] + yarn(rng) +
            flag(rng, "--old-config"))


def gemma4(rng):
    """Layers with and without a window in any order; the last has none. Layers without a window have v_proj only with
    --own-values."""
    layers = rng.choice([1, 2, 3, 5])
    full = sorted(rng.sample(range(layers), rng.randint(0, layers - 1)))
    heads = rng.choice([1, 2, 4, 6])
    parts = [n for n in (1, 2, 3, 6) if heads % n == 0]
    own = ["--own-values"] if len({*full, layers - 1}) == layers or rng.random() < 0.3 else []
    return (["--layers", layers, "--full-layers", *full, "--interval", layers, "--window",
             rng.choice([2, 5, 16, 40, 300]), "--heads", heads, "--kv-heads", rng.choice(parts), "--global-kv-heads",
             rng.choice(parts), "--head-dim", rng.choice([8, 12, 16, 24]), "--global-head-dim",
             rng.choice([8, 16, 24, 40]), "--rotated", rng.choice([0.25, 0.5, 1]), "--cap", rng.choice([0, 3, 30]),
             "--dense-width", rng.choice([8, 24, 40])] +
            own + flag(rng, "--attention-bias", 0.2) + plain_experts(rng)[:-2])


def lfm2(rng):
    """Convolutions of any width, longer than documents too; layers of both kinds in any order."""
    layers, n, kv = rng.choice([1, 2, 3, 4]), rng.choice([2, 3, 5, 8, 12]), rng.choice([1, 2])
    full = rng.sample(range(layers), rng.randint(1, layers))  # transformers needs one
    return (dense(rng, layers) + yarn(rng) + flag(rng, "--conv-bias", 0.3) + flag(rng, "--no-choice-bias", 0.2) +
            flag(rng, "--old-config") +
            ["--taps", rng.choice([1, 2, 3, 3, 4, 5, 9]), "--experts", n, "--topk", rng.randint(1, min(4, n)),
             "--shared-experts", 0, "--norm-topk-prob", rng.choice(["true", "true", "false"]), "--routed-scale",
             rng.choice([0.7, 1, 2.5]), "--kv-heads", kv, "--heads", kv * rng.choice([1, 2, 3]), "--head-dim",
             rng.choice([4, 8, 16, 24]), "--full-layers", *full])


DRAW = {"gpt_oss": gpt_oss, "qwen3": qwen3, "qwen3_vl": qwen3_vl, "olmoe": olmoe, "mixtral": mixtral,
        "minimax_m2": minimax_m2, "lfm2": lfm2, "glm4": glm4, "glm4_lite": glm4_lite,
        "deepseek_v3": deepseek_v3, "kimi_k25": deepseek_v3,
        "mistral4": mistral4, "qwen3_5": qwen3_5, "qwen3_5_text": qwen3_5,
        "qwen3_next": qwen3_next, "deepseek_v4": deepseek_v4, "nemotron": nemotron,
        "gemma4": gemma4, "gemma4_text": gemma4}


def targets(rng, a):
    """All, some at random, the shared experts alone, the routed ones, or the mixers."""
    mixers = families.attention_targets(a)
    if a.family in families.ZERO_CENTRED:
        mixers = mixers[:4] + (mixers[4:] if len(a.full_layers) < a.layers else [])
    if a.family == "lfm2":
        mixers = mixers[:4] * (len(a.full_layers) > 0) + mixers[4:] * (len(a.full_layers) < a.layers)
    parts = families.PARTS.get(a.family, ("gate", "up", "down"))
    dense = set(a.dense_layers) | {i for i in range(a.layers) if (i + 1) % a.sparse_step}
    routed = ["gate_up_proj", "down_proj"] if len(dense) < a.layers else []
    if a.family == "nemotron":
        dense = "-" in a.pattern
        routed = routed * ("E" in a.pattern)
    has_shared = routed and "gemma4" not in a.family and (a.shared_experts or a.family in families.ZERO_CENTRED)
    groups = {"mixers": mixers, "experts": routed,
              "shared": [f"shared_{part}_proj" for part in parts] if has_shared else [],
              "dense": [f"dense_{part}_proj" for part in parts] if dense or "gemma4" in a.family else []}
    everything = sum(groups.values(), [])
    choice = rng.choice(["all", "all", "some", "some", "one", "one", *groups])
    some = [name for name in everything if rng.random() < 0.5]
    return {"all": everything, "some": some, "one": [rng.choice(everything)], **groups}[choice] or mixers


def has_target(a, layer, name):
    """Whether a layer has a matrix of this target: no layer has all of them."""
    if a.family == "nemotron":
        letter = ("-" if name.startswith("dense_") else "E" if name.startswith("shared_") or name in
                  ("gate_up_proj", "down_proj") else "M" if name == "in_proj" else "*")
        return a.pattern[layer] == letter
    if "gemma4" in a.family:
        return name != "v_proj" or a.own_values or (layer not in a.full_layers and layer < a.layers - 1)
    if name.startswith(("dense_", "shared_")) or name in ("gate_up_proj", "down_proj"):
        return name.startswith("dense_") == (layer in a.dense_layers or (layer + 1) % a.sparse_step > 0)
    attention = name in families.attention_targets(a)[:4]
    return a.family not in (*families.ZERO_CENTRED, "lfm2") or attention == (layer in a.full_layers)


def layouts(rng, a):
    """How the documents of a step are divided: one by one, two in a forward pass, or on several ranks."""
    world = rng.choice([n for n in (2, 3, 4, 6) if a.accum % n == 0])
    ranks = [f"parallel.cpu_ranks={world}"] + ["parallel.zero=true"] * (rng.random() < 0.3)
    shares = [n for n in (2, 3, 4, 6) if world % n == 0 and a.experts % n == 0]
    divided = ranks + ([f"parallel.ep={rng.choice(shares)}"] if shares else [])
    divided += rng.choice([[], ["parallel.capacity_factor=1"], ["parallel.chunks=3"]])
    return rng.choice([[], ["train.micro_batch=2", f"train.grad_accum={a.accum // 2}"], ranks, divided, divided])


def general(rng):
    """What every family has."""
    return (["--eps", rng.choice([1e-6, 1e-5, 1e-3, 0.03]), "--theta", rng.choice([50, 1e4, 5e5, 1e6]), "--storage",
             rng.choice(["bfloat16", "bfloat16", "float16", "float32"]), "--choice-bias", rng.choice([0.2, 1.5])] +
            flag(rng, "--few-keys", 0.3))


def draw(family, seed, text, lr):
    """Arguments of make_case.py without its output, and settings of moetrain that do not change the training."""
    rng = random.Random(f"{family} {seed}")
    args = ["--family", family, "--text", text, "--seed", seed % 17 + 1, "--vocab", 1024, "--logit-rows", 8,
            "--hidden", rng.choice([24, 32, 48]), "--inter", rng.choice([8, 16, 24]), "--seq-len",
            rng.choice([40, 64, 96, 150, 210]), "--r", rng.choice([1, 2, 4, 7, 40]), "--alpha", rng.choice([2, 8, 16]),
            "--lr", lr, "--shards", rng.choice([1, 1, 3]), "--accum", rng.choice([2, 2, 4, 6])]
    args += DRAW[family](rng) + general(rng) + flag(rng, "--tied", 0.3) + flag(rng, "--rslora", 0.3)
    args = [str(x) for x in args]
    a = make_case.arguments(["none", *args])
    some = sorted(rng.sample(range(a.layers), rng.randint(1, a.layers))) if rng.random() < 0.25 else []
    names = targets(rng, a)
    if any(has_target(a, layer, name) for layer in some for name in names):
        args += ["--adapt-layers", *map(str, some)]
    args += ["--targets"] + names
    settings = [f"train.recompute={rng.choice(['none', 'selective', 'full'])}", f"train.threads={rng.randint(1, 3)}"]
    return args, settings + layouts(rng, a)


def worst(result):
    return " ".join(f"{kind} {error:.1e}" for kind, (error, _) in result.worst.items())


def quiet_case(folder, args):
    with contextlib.redirect_stdout(io.StringIO()):
        make_case.main([folder, *args])


def copy_step(case, exact, step, folder):
    """A case with the documents of one step; its initial adapter is that of the f64 run before this step."""
    accum = compare.expected_of(case)["setup"]["grad_accum"]
    shutil.copytree(case, folder, ignore=shutil.ignore_patterns("adapter_*", "*.jsonl", "grads*", "forward*"))
    shutil.copy(f"{case}/eval.jsonl", folder)
    with open(f"{case}/train.jsonl") as f, open(f"{folder}/train.jsonl", "w") as out:
        out.writelines(f.readlines()[accum * (step - 1):accum * step])
    shutil.copytree(f"{exact}/before_{step}", f"{folder}/adapter_init")
    file = f"{folder}/adapter_init/adapter_model.safetensors"
    save_file({k: v.float().contiguous() for k, v in load_file(file).items()}, file)
    return load_file(file)


def peer_gradient(case, seq_len, in_f64):
    """The mean loss of transformers and its gradient."""
    model = PeftModel.from_pretrained(peer.load_model(case), f"{case}/adapter_init", is_trainable=True).float()
    tokenizer = peer.load_tokenizer(case)
    model.train()
    with peer.exact(model) if in_f64 else contextlib.nullcontext():
        rows = peer.read_rows(f"{case}/train.jsonl")
        loss, tokens = peer.backward(model, [peer.encode(tokenizer, row, seq_len) for row in rows])
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return loss / tokens, {n.replace(".default", ""): p.grad.double() for n, p in trained.items()}


def our_gradient(case, moetrain, out, before, settings):
    """With lr = eps = 1 the first step of AdamW subtracts u = g / (|g| + 1)."""
    compare.train(case, moetrain, out, [*settings, "train.steps=1", "optim.lr=1", "optim.eps=1", "optim.clip_norm=0",
                                        "optim.weight_decay=0", "eval.at_start=false", "eval.at_end=false"])
    after = load_file(f"{out}/adapter/adapter_model.safetensors")
    moved = {name: before[name].double() - after[name] for name in before}
    return {name: u / (1 - u.abs()) for name, u in moved.items()}


def distance(g, reference):
    return (sum((g[n] - reference[n]).norm() ** 2 for n in reference) /
            sum(reference[n].norm() ** 2 for n in reference)).item() ** 0.5


def one_step(a, folder, step, settings):
    """Distances from f64 of moetrain's loss, moetrain's gradient, and transformers' gradient in fp32."""
    case, out = f"{folder}/step_{step}", f"{folder}/step_{step}_out"
    before = copy_step(f"{folder}/case", f"{folder}/exact", step, case)
    seq_len = compare.expected_of(case)["setup"]["seq_len"]
    loss, reference = peer_gradient(case, seq_len, True)
    ours = our_gradient(case, a.moetrain, out, before, settings)
    return (abs(compare.events(out, "step")[0]["loss"] / loss - 1), distance(ours, reference),
            distance(peer_gradient(case, seq_len, False)[1], reference))


def geometric_mean(values):
    return math.exp(sum(math.log(v) for v in values) / len(values))


def single_steps(a, folder, args, settings):
    quiet_case(f"{folder}/exact", args + ["--exact"])
    n = compare.expected_of(f"{folder}/exact")["setup"]["steps"]
    losses, ours, theirs = zip(*(one_step(a, folder, i + 1, settings) for i in range(n)))
    ours, theirs = geometric_mean(ours), geometric_mean(theirs)
    good = max(losses) <= compare.TOLERANCE["loss"] and ours <= 2 * theirs
    return good, f"single steps from f64: loss {max(losses):.1e}, gradient {ours:.1e}, of transformers {theirs:.1e}"


def run_case(a, folder, args, settings):
    quiet_case(f"{folder}/case", args)
    result = compare.compare(f"{folder}/case", a.moetrain, f"{folder}/out", settings)
    if all(error <= compare.TOLERANCE[kind] for kind, (error, _) in result.worst.items()) and not a.single_steps:
        return True, worst(result)
    good, text = single_steps(a, folder, args, settings)
    return good, f"{worst(result)}; {text}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=DRAW, required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--single-steps", action="store_true", help="repeat single steps of every case")
    parser.add_argument("--moetrain", default="build/moetrain")
    parser.add_argument("--keep", help="folder for the cases that fail")
    a = parser.parse_args()
    failed = 0
    for seed in range(a.seed, a.seed + a.cases):
        args, settings = draw(a.family, seed, a.text, a.lr)
        with tempfile.TemporaryDirectory() as folder:
            try:
                good, text = run_case(a, folder, args, settings)
            except (Exception, SystemExit) as e:
                good, text = False, f"{type(e).__name__}: {e}"
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} {a.family} {seed}: {text}", flush=True)
            if not good:
                print("     " + " ".join(args + settings), flush=True)
                if a.keep:
                    shutil.copytree(folder, os.path.join(a.keep, f"{a.family}-{seed}"), dirs_exist_ok=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
