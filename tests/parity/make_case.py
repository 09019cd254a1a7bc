"""make_case.py - makes a parity case: a small random checkpoint in the published layout of its family, an initial PEFT
adapter, and what transformers + PEFT compute with them in fp32.

  python make_case.py OUT --text ANY_TEXT_FILE [--family gpt_oss] [--seed 7] [--hidden 128] [--shards 1] ...

OUT then holds the checkpoint, train.jsonl and eval.jsonl, adapter_init/ and adapter_final/, forward.safetensors (logits
and hidden states of the first held-out row), grads_step0.safetensors (before clipping), expected.json (losses, norms,
set-up). Needs torch, transformers >= 5, peft >= 0.19.1.
"""
import argparse
import contextlib
import json
import os
import random
import shutil
import sys

import numpy
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import save_file
from transformers.integrations.neftune import activate_neftune

import families
import peer

SIZES = dict(hidden=128, inter=96, layers=2, experts=8, topk=2, heads=4, kv_heads=2, head_dim=32, window=8, seq_len=96,
             steps=10, accum=2, r=8, alpha=16, shards=1, seed=7, vocab=4096)
STORAGE = ("bfloat16", "float16", "float32")
ADAMW = dict(weight_decay=0.01, eps=1e-8)
CLIP_NORM = 1.0
U64 = numpy.uint64


def mix64(x):
    x = (x ^ (x >> U64(30))) * U64(0xbf58476d1ce4e5b9)
    x = (x ^ (x >> U64(27))) * U64(0x94d049bb133111eb)
    return x ^ (x >> U64(31))


def rng_u64(key, counter):
    """rng_u64 of kernels/base.c; a number or an array of counters."""
    with numpy.errstate(over="ignore"):
        key, counter = U64(key), numpy.asarray(counter, dtype=U64)
        x = mix64(key + (counter + U64(1)) * U64(0x9e3779b97f4a7c15))
        return mix64(x ^ (key * U64(0xd1342543de82ef95) + U64(0x632be59bd9b4e019)))


def rng_key(seed, purpose):
    code = 0xcbf29ce484222325
    for byte in purpose.encode():
        code = (code ^ byte) * 0x100000001b3 % 2 ** 64
    with numpy.errstate(over="ignore"):
        return rng_u64(mix64(U64(seed) + U64(0x9e3779b97f4a7c15)), code)


class Noise:
    """transformers' NEFTune, whose hook computes the size of the noise and adds it, with the random numbers of
    moetrain: op_embed_noise with one document per sequence and train.seed = 0. Active until end()."""

    def __init__(self, model, alpha):
        self.stack = contextlib.ExitStack()
        self.stack.callback(activate_neftune(model, alpha, None).remove)
        uniform = torch.Tensor.uniform_
        self.stack.callback(setattr, torch.Tensor, "uniform_", uniform)
        torch.Tensor.uniform_ = lambda x, low, high: self.fill(x, low, high)

    def begin(self, step):
        """Before the micro-batches of a step, from 0."""
        self.key, self.micro = rng_u64(rng_key(0, "neftune"), step), 0

    def fill(self, x, low, high):
        bits = rng_u64(rng_u64(self.key, self.micro), numpy.arange(x.numel())) >> U64(40)
        self.micro += 1
        unit = torch.from_numpy(bits.astype(numpy.float32) * numpy.float32(2.0 ** -23) - numpy.float32(1))
        assert low == -high
        return x.copy_(high * unit.view(x.shape))

    def end(self):
        self.stack.close()


def arguments(argv):
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokenizer", default=os.path.join(here, "../../configs/tiny-gptoss"), help="its directory")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--lr-ratio-b", type=float, default=1, help="LoRA+: the learning rate of B over that of A")
    parser.add_argument("--neftune", type=float, default=0, help="train.neftune_alpha")
    parser.add_argument("--family", choices=families.FAMILIES, default="gpt_oss")
    parser.add_argument("--norm-topk-prob", choices=("true", "false"), help="qwen3, olmoe; default: as published")
    parser.add_argument("--attention-bias", action="store_true", help="qwen3, olmoe, glm4")
    parser.add_argument("--dense-layers", type=int, nargs="*", default=[], help="qwen3: mlp_only_layers; glm4: 0 1 ..")
    parser.add_argument("--groups", type=int, default=1, help="glm4: groups of experts")
    parser.add_argument("--topk-groups", type=int, default=1, help="glm4: of them, a token chooses in so many")
    parser.add_argument("--shared-experts", type=int, default=1, help="glm4")
    parser.add_argument("--adapt-shared", action="store_true", help="adapters on the shared experts too")
    parser.add_argument("--adapt-dense", action="store_true", help="adapters on the dense layers too")
    parser.add_argument("--routed-scale", type=float, default=1.0, help="glm4: routed_scaling_factor")
    parser.add_argument("--rotated", type=float, default=0.5, help="glm4: partial_rotary_factor")
    parser.add_argument("--qk-norm", action="store_true", help="glm4: use_qk_norm")
    parser.add_argument("--q-lora", type=int, default=48, help="latent attention: q_lora_rank; 0: null")
    parser.add_argument("--kv-lora", type=int, default=40, help="latent attention: kv_lora_rank")
    parser.add_argument("--rope-dim", type=int, default=16, help="latent attention: qk_rope_head_dim")
    parser.add_argument("--value-dim", type=int, default=24, help="latent attention: v_head_dim")
    parser.add_argument("--half-split", action="store_true", help="latent attention: rope_interleave = false")
    parser.add_argument("--mscale", type=float, default=1.0, help="deepseek_v3: mscale; mscale_all_dim is 1")
    parser.add_argument("--key-heads", type=int, default=2, help="qwen3_next: linear_num_key_heads")
    parser.add_argument("--value-heads", type=int, default=4, help="qwen3_next: linear_num_value_heads")
    parser.add_argument("--taps", type=int, default=4, help="qwen3_5, qwen3_next: linear_conv_kernel_dim")
    parser.add_argument("--interval", type=int, default=4, help="qwen3_next: attention in every so many layers")
    parser.add_argument("--sparse-step", type=int, default=1, help="qwen3, qwen3_next: decoder_sparse_step")
    parser.add_argument("--tied", action="store_true", help="tie_word_embeddings")
    parser.add_argument("--yarn", type=float, help="glm4, glm4_lite, qwen3_5, qwen3_next: YaRN with this factor")
    parser.add_argument("--linear-heads", type=int, nargs=2, help="qwen3_5: linear_num_key_heads, _value_heads")
    parser.add_argument("--linear-dims", type=int, nargs=2, help="qwen3_5, qwen3_next: linear_key_head_dim, _value_")
    parser.add_argument("--full-layers", type=int, nargs="*", help="qwen3_5, qwen3_next: layers with attention")
    parser.add_argument("--shared-width", type=int, help="qwen3_5, qwen3_next: shared_expert_intermediate_size")
    parser.add_argument("--pattern", default="M*E-", help="nemotron: hybrid_override_pattern")
    parser.add_argument("--latent", type=int, help="nemotron: moe_latent_size")
    parser.add_argument("--chunk", type=int, default=32, help="nemotron: chunk_size")
    parser.add_argument("--step-min", type=float, default=0.001, help="nemotron: time_step_min")
    parser.add_argument("--no-conv-bias", action="store_true", help="nemotron: use_conv_bias = false")
    parser.add_argument("--kinds", type=int, nargs="*", default=[0, 4, 128], help="deepseek_v4: compress_ratios")
    parser.add_argument("--ratios", type=int, nargs=2, default=[4, 8], help="deepseek_v4: compress_rates")
    parser.add_argument("--hash-layers", type=int, default=1, help="deepseek_v4: num_hash_layers")
    parser.add_argument("--streams", type=int, default=4, help="deepseek_v4: hc_mult")
    parser.add_argument("--rounds", type=int, default=20, help="deepseek_v4: hc_sinkhorn_iters")
    parser.add_argument("--limit", type=float, default=10.0, help="deepseek_v4: swiglu_limit")
    parser.add_argument("--o-groups", type=int, default=2, help="deepseek_v4: o_groups")
    parser.add_argument("--o-lora", type=int, default=16, help="deepseek_v4: o_lora_rank")
    parser.add_argument("--index-heads", type=int, default=4, help="deepseek_v4: index_n_heads")
    parser.add_argument("--index-dim", type=int, default=16, help="deepseek_v4: index_head_dim")
    parser.add_argument("--index-top", type=int, default=6, help="deepseek_v4: index_topk")
    parser.add_argument("--cap", type=float, default=30.0, help="gemma4: final_logit_softcapping; 0: null")
    parser.add_argument("--own-values", action="store_true", help="gemma4: attention_k_eq_v = false")
    parser.add_argument("--global-head-dim", type=int, help="gemma4: global_head_dim; default: twice head_dim")
    parser.add_argument("--global-kv-heads", type=int, help="gemma4: num_global_key_value_heads")
    parser.add_argument("--dense-width", type=int, help="gemma4: intermediate_size")
    parser.add_argument("--conv-bias", action="store_true", help="lfm2: conv_bias")
    parser.add_argument("--no-choice-bias", action="store_true", help="lfm2: use_expert_bias = false")
    parser.add_argument("--eps", type=float, help="rms_norm_eps; default: of the family")
    parser.add_argument("--theta", type=float, help="rope_theta; default: of the family's function in families.py")
    parser.add_argument("--storage", choices=STORAGE, default="bfloat16", help="dtype of the weights that are not fp32")
    parser.add_argument("--choice-bias", type=float, default=0.2, help="deviation of e_score_correction_bias")
    parser.add_argument("--keys", nargs="*", default=[], metavar="NAME[=JSON]", help="keys of the text part of "
                        "config.json, set to this or removed; /NAME: outside text_config; NAME.PART: in an object")
    parser.add_argument("--no-head", action="store_true", help="the files lack the head: for --tied")
    parser.add_argument("--few-keys", action="store_true", help="config.json without keys that have their default")
    parser.add_argument("--adapt-layers", type=int, nargs="*", help="lora.layers; default: all")
    parser.add_argument("--targets", nargs="*", help="lora.targets; default: all of attention, and experts")
    parser.add_argument("--alpha-pattern", default="", help="lora.alpha_pattern: q_proj=8,down_proj=4")
    parser.add_argument("--init", choices=("default", "pissa", "olora"), default="default", help="lora.init: with "
                        "--targets of attention, as PEFT has no other inits for experts")
    parser.add_argument("--dora", action="store_true", help="lora.dora, with --targets of attention")
    parser.add_argument("--rslora", action="store_true")
    parser.add_argument("--exact", action="store_true", help="train in f64; keeps the adapter before each step")
    parser.add_argument("--old-config", action="store_true", help="config.json in the spellings of transformers 4")
    parser.add_argument("--logit-rows", type=int, help="keep the logits of so many first positions only")
    for name, default in SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    return parser.parse_args(argv)


def write_tokenizer(a):
    """Writes the tokenizer's files. A smaller vocabulary keeps the first merges and all special tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(a.tokenizer, name), a.out)
    with open(f"{a.out}/tokenizer.json") as f:
        content = json.load(f)
    model, special = content["model"], content["added_tokens"]
    dropped = len(model["vocab"]) + len(special) - a.vocab
    if dropped <= 0:
        return
    kept = len(model["vocab"]) - dropped
    model["vocab"] = {word: i for word, i in model["vocab"].items() if i < kept}
    model["merges"] = model["merges"][:-dropped]  # the merge of rank i makes word 256 + i
    for token in special:
        token["id"] -= dropped
    with open(f"{a.out}/tokenizer.json", "w") as f:
        json.dump(content, f, ensure_ascii=False)


def random_model(a, tokenizer):
    """Random weights of a scale that reaches every branch."""
    make_config, _, experts = families.FAMILIES[a.family]
    config = make_config(a, dict(
        vocab_size=a.vocab, hidden_size=a.hidden, num_hidden_layers=a.layers, num_experts_per_tok=a.topk,
        num_attention_heads=a.heads, num_key_value_heads=a.kv_heads, max_position_embeddings=2048,
        tie_word_embeddings=a.tied, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id) | ({"rms_norm_eps": a.eps} if a.eps else {}))
    model = peer.model_class(config.model_type).from_config(config, attn_implementation="eager",
                                                            experts_implementation="eager").float()
    deviation = {"bias": 0.5, "sinks": 1.0, "router.weight": 0.3, ".gate.weight": 0.3, "experts": experts,
                 "lm_head": 0.3, "embed": 1.0, "conv1d": 0.5, "conv.conv": 0.5, "A_log": 1.5, ".D": 1.0,
                 "scale": 0.5, "base": 0.5}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("per_expert_scale"):
                p.uniform_(0.5, 1.5)
            elif "norm" in name:
                zero_centred = a.family in families.ZERO_CENTRED and "linear_attn" not in name
                p.copy_((0 if zero_centred else 1) + 0.2 * torch.randn_like(p))
            else:
                p.normal_(0, next((d for part, d in deviation.items() if part in name), 1.5 / a.hidden ** 0.5))
        for name, b in model.named_buffers():
            if name.endswith("layer_scalar"):
                b.uniform_(0.7, 1.3)
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                b.normal_(0, a.choice_bias)
            if name.endswith("tid2eid"):
                b.copy_(torch.rand(len(b), a.experts).argsort(-1)[:, :a.topk])
    return model


def edit(config, words):
    """--keys removes or sets keys of the text part of config.json; /NAME is a key of the whole file."""
    for word in words:
        path, given, value = word.partition("=")
        whole = path.startswith("/") or "text_config" not in config
        *holders, last = path.removeprefix("/").split(".")
        inner = config if whole else config["text_config"]
        for name in holders:
            inner = inner.setdefault(name, {})
        if given:
            inner[last] = json.loads(value)
        else:
            inner.pop(last, None)


# Keys that moetrain requires.
REQUIRED = ("num_hidden_layers hidden_size num_attention_heads num_key_value_heads num_experts_per_tok vocab_size "
            "moe_intermediate_size intermediate_size n_routed_experts num_local_experts num_experts model_type "
            "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim dtype architectures layer_types "
            "shared_expert_intermediate_size").split()


def without_defaults(config, text):
    """--few-keys: removes the keys of the text part whose value is the default of transformers' class."""
    defaults = type(text)().to_dict()
    inner = config.get("text_config", config)
    for key in list(inner):
        if key not in REQUIRED and key in defaults and inner[key] == defaults[key]:
            del inner[key]


def stored(a, tensors):
    """The tensors in bf16, in the dtype of --storage."""
    return {k: v.to(getattr(torch, a.storage)) if v.dtype == torch.bfloat16 else v for k, v in tensors.items()}


def write_checkpoint(a, model):
    """Writes the model as it is published; returns the one that transformers reads from the files."""
    tensors = stored(a, families.FAMILIES[a.family][1](model.state_dict()))
    if a.no_head:
        tensors = {k: v for k, v in tensors.items() if not k.endswith("lm_head.weight") and k != "head.weight"}
    if a.shards == 1:
        save_file(tensors, f"{a.out}/model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        for i in range(a.shards):
            shard = f"model-{i + 1:05d}-of-{a.shards:05d}.safetensors"
            part = {k: tensors[k] for k in sorted(tensors)[i::a.shards]}
            save_file(part, f"{a.out}/{shard}", metadata={"format": "pt"})
            weight_map.update({k: shard for k in part})
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        write_json(f"{a.out}/model.safetensors.index.json",
                   {"metadata": {"total_size": total}, "weight_map": weight_map})
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    config["dtype"] = a.storage
    if a.family == "gpt_oss":
        config["quantization_config"] = {"quant_method": "mxfp4"}
    if a.old_config:
        config = families.as_transformers_4(config)
    if a.few_keys:
        without_defaults(config, model.config.get_text_config())
    edit(config, a.keys)
    write_json(f"{a.out}/config.json", config)
    return peer.load_model(a.out)


def write_json(path, value):
    with open(path, "w") as f:
        json.dump(value, f, indent=1, default=str)
        f.write("\n")


def words_of(a):
    """The words of 200,000 characters of the text, which begin at a place that depends on the seed; the words of the
    whole text if too few follow."""
    least = 201
    with open(a.text, errors="ignore") as f:
        text = f.read()
    words = text[a.seed * 20000:a.seed * 20000 + 200000].split(" ")
    if len(words) < least:
        words = text.split(" ")
    if len(words) < least:
        sys.exit(f"{a.text} has {len(words)} words, of which spans are drawn at random: name a text of {least} or more")
    return words


def write_rows(a):
    """Random spans of the text, each of 12 to 109 words."""
    words = words_of(a)
    sets = []
    for name, count, seed in (("train", a.steps * a.accum, 1), ("eval", 8, 2)):
        rng = random.Random(seed)
        rows = []
        for _ in range(count):
            start = rng.randrange(len(words) - 200)
            rows.append({"text": " ".join(words[start:start + rng.randrange(12, 110)])})
        with open(f"{a.out}/{name}.jsonl", "w") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
        sets.append(rows)
    return sets


def targets_of(a):
    """lora.targets of the case, and a name for each matrix."""
    words = a.targets or (families.attention_targets(a) + ["experts"] + ["shared_experts"] * a.adapt_shared +
                          ["dense"] * a.adapt_dense)
    parts = families.PARTS.get(a.family, ("gate", "up", "down"))
    groups = {"experts": ["gate_up_proj", "down_proj"],
              "shared_experts": [f"shared_{part}_proj" for part in parts],
              "dense": [f"dense_{part}_proj" for part in parts]}
    return words, [name for word in words for name in groups.get(word, [word])]


def layers_of(a):
    return "all" if a.adapt_layers is None else ",".join(map(str, a.adapt_layers))


def words_in(text):
    return text.split(",") if text else []


def random_adapter(a, model):
    modules, parameters, block = [], [], families.BLOCK.get(a.family, "mlp")
    for name in targets_of(a)[1]:
        if name in ("gate_up_proj", "down_proj"):
            name = name.removeprefix("gate_") if a.family in families.PARTS else name
            parameters.append(f"{families.EXPERTS.get(a.family, f'{block}.experts')}.{name}")
        elif name in families.MODULES.get(a.family, {}):
            modules.append(families.MODULES[a.family][name])
        elif name.startswith("dense_") and a.family in families.EXPERTS:
            modules.append(f"mlp.{name[6:]}")
        elif name.startswith("dense_"):
            parameters.append(f"{block}.{name[6:]}.weight")
        elif not name.startswith("shared_"):
            modules.append(families.PREFIX.get(a.family, "") + name)
        elif a.family in families.SHARED_BY_WEIGHT:
            parameters.append(f"{families.SHARED[a.family]}.{name[7:]}.weight")
        else:
            modules.append(f"{families.SHARED[a.family]}.{name[7:]}")
    if a.adapt_layers is not None:
        names = [name for name, _ in model.named_modules()]
        modules = [name for name in names if any(f".layers.{i}." in name for i in a.adapt_layers) and
                   any(name.endswith("." + module) for module in modules)]
        parameters = [f"layers.{i}.{name}" for i in a.adapt_layers for name in parameters]
    adapted = get_peft_model(model, LoraConfig(
        r=a.r, lora_alpha=a.alpha, lora_dropout=0.0, use_rslora=a.rslora, use_dora=a.dora,
        target_modules=modules,
        init_lora_weights=True if a.init == "default" else a.init,
        alpha_pattern={name: float(alpha) for name, alpha in (word.split("=") for word in words_in(a.alpha_pattern))},
        target_parameters=parameters, exclude_modules=families.EXCLUDED.get(a.family))).float()
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if a.init != "default":
                break
            if "lora_A" in name:
                p.normal_(0, 0.15)
            if "lora_B" in name:
                p.normal_(0, 0.05)
            if "lora_magnitude_vector" in name:
                p.mul_(torch.empty_like(p).uniform_(0.8, 1.25))
    return adapted


@torch.no_grad()
def write_forward(a, model, ids):
    model.eval()
    out = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    tensors = {"input_ids": torch.tensor(ids, dtype=torch.int32),
               "logits": out.logits[0, :a.logit_rows].float().contiguous()}
    for i, h in enumerate(out.hidden_states):
        tensors[f"hidden_{i}"] = h[0].float().contiguous()
    save_file(tensors, f"{a.out}/forward.safetensors")


def train(a, model, documents):
    """Loss and gradient norm of every step; the gradients of the first go to a file."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=a.lr, loraplus_lr_ratio=a.lr_ratio_b, betas=(0.9, 0.999), eps=ADAMW["eps"],
        loraplus_weight_decay=ADAMW["weight_decay"] * (a.init == "default"))
    steps = []
    model.train()
    noise = Noise(model, a.neftune) if a.neftune else None
    for step in range(a.steps):
        micro = documents[a.accum * step:a.accum * (step + 1)]
        if a.exact:
            model.save_pretrained(f"{a.out}/before_{step + 1}")
        if noise:
            noise.begin(step)
        total, tokens = peer.backward(model, micro)
        if step == 0:
            names = {n: n.replace("vector.default.weight", "vector").replace(".default", "") for n in trained}
            save_file({names[n]: p.grad.contiguous() for n, p in trained.items()},
                      f"{a.out}/grads_step0.safetensors")
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), CLIP_NORM).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps.append({"loss": total / tokens, "grad_norm": norm, "tokens": tokens})
    if noise:
        noise.end()
    return steps


def main(argv=None):
    a = arguments(argv)
    os.makedirs(a.out, exist_ok=True)
    torch.manual_seed(a.seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    write_tokenizer(a)
    tokenizer = peer.load_tokenizer(a.out)
    model = random_model(a, tokenizer)
    model = write_checkpoint(a, model)
    train_rows, eval_rows = write_rows(a)
    documents = [peer.encode(tokenizer, row, a.seq_len) for row in train_rows]
    held_out = [peer.encode(tokenizer, row, a.seq_len) for row in eval_rows]
    expected = {"eval_base": peer.held_out_loss(model, held_out)}
    model = random_adapter(a, model)
    if a.init != "default":  # so that PEFT takes it for the initial adapter, and converts the trained one with it
        model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(f"{a.out}/adapter_init")
    model.peft_config["default"].init_lora_weights = True if a.init == "default" else a.init
    with peer.exact(model) if a.exact else contextlib.nullcontext():
        expected["eval_init_adapter"] = peer.held_out_loss(model, held_out)
        write_forward(a, model, held_out[0])
        expected["steps"] = train(a, model, documents)
        expected["eval_final"] = peer.held_out_loss(model, held_out)
    model.save_pretrained(f"{a.out}/adapter_final", path_initial_model_for_weight_conversion=None
                          if a.init == "default" else f"{a.out}/adapter_init")
    for folder in ("adapter_init", "adapter_final"):  # PEFT's empty model card
        os.remove(f"{a.out}/{folder}/README.md")
    expected["setup"] = dict(seq_len=a.seq_len, micro_batch=1, grad_accum=a.accum, steps=a.steps, lr=a.lr,
                             lr_ratio_b=a.lr_ratio_b, neftune_alpha=a.neftune, schedule="constant", beta1=0.9,
                             beta2=0.999, clip_norm=CLIP_NORM, **ADAMW, packing=False, shuffle=False, format="text",
                             loss_on="all", r=a.r, alpha=a.alpha, rslora=a.rslora, alpha_pattern=a.alpha_pattern,
                             init=a.init, dora=a.dora, layers=layers_of(a), targets=",".join(targets_of(a)[0]))
    write_json(f"{a.out}/expected.json", expected)
    print(json.dumps({k: expected[k] for k in ("eval_base", "eval_init_adapter", "eval_final")}))


if __name__ == "__main__":
    main()
