"""trl_speed.py - speed and memory of TRL's DPOTrainer and SFTTrainer with LoRA (PEFT) on attention and all experts of a
model of the gpt-oss family with random weights.

  python trl_speed.py [--arch gpt-oss-20b] [--layers 24] [--variants sft/full,dpo/full,...] [--micro 4,2,1]
                      [--attention flex_attention,eager] [--steps 5] [--limit 200] [--device cuda|cpu] [--site DIR]
  python trl_speed.py --write DIR [--arch gpt-oss-20b]

A variant is OBJECTIVE/CHECKPOINTING. Objectives: sft; dpo, which computes the reference in each step by the model
without adapters; dpo-cached (precompute_ref_log_probs). full: with gradient checkpointing, none: without. A variant
runs with the first of --attention that works and the first of --micro that fits. With two --layers, the row of the
whole model is extrapolated on the straight line through both. After --limit seconds no further measurement begins.

A step has 4 pairs (sft: 4 chosen answers). Prompts have 1,024 random tokens, answers 512 with the end token. A step
begins when the one before it ends; its time is the median of --steps after two. Memory is the peak of PyTorch's
allocator in these steps. Tokens are those of the rows: the prompt of a pair counts twice.

--write DIR writes the same rows for moetrain, pairs.jsonl and sft.jsonl, and a tokenizer.json, which replaces that of
`moetrain synth`. --site adds a folder of packages that this Python lacks. Needs torch, transformers >= 5, peft >= 0.20,
trl 1.16, datasets.
"""
import argparse
import gc
import itertools
import json
import math
import os
import random
import statistics
import string
import sys
import tempfile
import time

BEGAN = time.monotonic()
WARM_UP, RANK, PAIRS = 2, 16, 4
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
VARIANTS = "sft/full,dpo/full,dpo-cached/full,dpo/none,dpo-cached/none,sft/none"
# model; letters of a word, ids of end of sequence and padding as in `moetrain synth`, tokens of prompt and answer
ARCHS = {
    "gpt-oss-20b": (dict(num_hidden_layers=24, num_local_experts=32, hidden_size=2880, intermediate_size=2880,
                         vocab_size=201088, num_attention_heads=64, num_key_value_heads=8, head_dim=64),
                    dict(letters=3, eos=200002, pad=199999, prompt=1024, answer=512)),
    "gpt-oss-tiny": (dict(num_hidden_layers=4, num_local_experts=16, hidden_size=256, intermediate_size=256,
                          vocab_size=2048, num_attention_heads=8, num_key_value_heads=2, head_dim=64),
                     dict(letters=2, eos=962, pad=959, prompt=48, answer=16)),
}


def say(text):
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)


# ---- rows: words of random letters, each one token


def words(letters):
    return ["".join(word) for word in itertools.product(string.ascii_lowercase, repeat=letters)]


def rows(text, n):
    """n pairs, the same in each call."""
    draw, all_words = random.Random(7), words(text["letters"])

    def some(count):
        return "".join(f" {word}" for word in draw.choices(all_words, k=count))
    return [{"prompt": some(text["prompt"]), "chosen": some(text["answer"] - 1), "rejected": some(text["answer"] - 1)}
            for _ in range(n)]


def answers(pairs):
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs]


def make_tokenizer(text):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for letters in range(1, text["letters"] + 1):
        for word in words(letters):
            merges.append(("Ġ" + word[:-1], word[-1]))
            vocab["Ġ" + word] = len(vocab)
    special = {"<|endoftext|>": text["pad"], "<|return|>": text["eos"]}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, **special}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def write(a, text):
    os.makedirs(a.write, exist_ok=True)
    make_tokenizer(text).save(os.path.join(a.write, "tokenizer.json"))
    pairs = rows(text, PAIRS * (WARM_UP + a.steps))
    for name, made in (("pairs", pairs), ("sft", answers(pairs))):
        with open(os.path.join(a.write, f"{name}.jsonl"), "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in made)


# ---- model and trainers


def build(a, layers, attention):
    """The model with random weights, made on the device."""
    import torch
    from transformers import AutoModelForCausalLM, GptOssConfig
    from transformers.initialization import no_init_weights

    shape, text = ARCHS[a.arch]
    config = GptOssConfig(**{**shape, "num_hidden_layers": layers}, num_experts_per_tok=4, sliding_window=128,
                          eos_token_id=text["eos"], pad_token_id=text["pad"], use_cache=False)
    with torch.device(a.device), no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if a.device == "cuda" else torch.float32, attn_implementation=attention,
            experts_implementation="grouped_mm")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                p.fill_(1)
            elif name.endswith("bias"):
                p.zero_()
            else:
                p.normal_(0, config.initializer_range)
    return model.train()


def make_clock(a):
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """The milliseconds of each step."""

        def __init__(self):
            self.ms = []

        def on_train_begin(self, args, state, control, **kwargs):
            self.end = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            if a.device == "cuda":
                torch.cuda.synchronize()
            begin, self.end = self.end, time.perf_counter()
            self.ms.append(1e3 * (self.end - begin))
            say(f"  step {len(self.ms)}: {self.ms[-1]:.0f} ms")
            if len(self.ms) == WARM_UP and a.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
    return Clock()


def make_trainer(a, variant, micro, model, out, clock):
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerFast

    objective, checkpointing = variant.split("/")
    text = ARCHS[a.arch][1]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(text), eos_token="<|return|>",
                                        pad_token="<|endoftext|>")
    data = rows(text, PAIRS * (WARM_UP + a.steps))
    args = dict(output_dir=out, max_steps=WARM_UP + a.steps, per_device_train_batch_size=micro,
                gradient_accumulation_steps=PAIRS // micro, learning_rate=2e-5, lr_scheduler_type="constant",
                gradient_checkpointing=checkpointing == "full", max_length=None, router_aux_loss_coef=0.0,
                bf16=a.device == "cuda", use_cpu=a.device == "cpu", report_to="none", save_strategy="no",
                disable_tqdm=True, logging_strategy="no")
    if objective == "sft":
        data = answers(data)
        trainer, config = trl.SFTTrainer, trl.SFTConfig(**args)
    else:
        # Names the file of the cached reference. TRL would hash all weights on the host
        trl.trainer.dpo_trainer.hash_module = lambda module: str(time.time_ns())
        trainer, config = trl.DPOTrainer, trl.DPOConfig(beta=0.1, precompute_ref_log_probs=objective == "dpo-cached",
                                                        **args)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=ATTENTION, target_parameters=EXPERTS)
    return trainer(model=model, args=config, train_dataset=Dataset.from_list(data), processing_class=tokenizer,
                   peft_config=lora, callbacks=[clock])


def measure(a, variant, layers, micro, attention):
    """{ms, allocated, reserved} of a variant."""
    import torch

    began = time.perf_counter()
    torch._dynamo.reset()  # kernels for this shape only
    model = build(a, layers, attention)
    built, clock = time.perf_counter(), make_clock(a)
    with tempfile.TemporaryDirectory() as out:
        trainer = make_trainer(a, variant, micro, model, out, clock)
        prepared = time.perf_counter()
        loss = trainer.train().training_loss
    if not math.isfinite(loss):
        raise ValueError(f"loss {loss}")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(f"  model {built - began:.1f} s, trainer {prepared - built:.1f} s, loss {loss:.4f}, "
        f"{trained / layers / 1e6:.3f} M trained parameters a layer")
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if a.device == "cuda" else (0, 0)
    return dict(ms=statistics.median(clock.ms[WARM_UP:]), allocated=peaks[0] / 2**30, reserved=peaks[1] / 2**30,
                how=f"micro {micro}, {attention}")


def attempt(a, *what):
    """(result of measure, whether memory was too small)"""
    import torch

    try:
        return measure(a, *what), False
    except Exception as error:  # whatever a trainer or a back end raises
        say(f"  {type(error).__name__}: {' '.join(str(error).split())[:400]}")
        return None, isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def clean(a):
    """Frees what a measurement left; after its frames are gone."""
    import torch

    gc.collect()
    if a.device == "cuda":
        torch.cuda.empty_cache()
        if (left := torch.cuda.memory_allocated()) > 2**30:
            say(f"  {left / 2**30:.1f} GiB are still allocated: the next peaks are too high by as much")


def first_that_runs(a, variant, layers, fits):
    """Result of the first back end that runs and the first micro-batch that fits. A back end that failed is not tried
    again. fits: per kind of variant, the micro-batch that was the first to fit."""
    kind = variant.startswith("sft"), variant.split("/")[1], layers
    for attention in list(a.attention):
        for micro in [n for n in a.micro if n <= fits.get(kind, PAIRS)]:
            say(f"{variant}, {layers} layers, micro {micro}, {attention}")
            result, too_small = attempt(a, variant, layers, micro, attention)
            clean(a)
            if result:
                fits[kind] = micro
                return result
            if not too_small:
                break
        else:
            return None
        if len(a.attention) > 1:
            a.attention.remove(attention)
    return None


def row_of(a, variant, layers, r, note=""):
    text = ARCHS[a.arch][1]
    tokens = PAIRS * (text["prompt"] + text["answer"]) * (1 if variant.startswith("sft") else 2)
    say(f"RESULT | {variant} | {layers} layers{note} | {r['ms']:.0f} ms | {1e3 * tokens / r['ms']:,.0f} tokens/s | "
        f"{r['allocated']:.1f} GiB allocated | {r['reserved']:.1f} GiB reserved | {r['how']} |")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=ARCHS, default="gpt-oss-20b")
    parser.add_argument("--layers", default=[24], type=lambda text: sorted(map(int, text.split(","))))
    parser.add_argument("--variants", default=VARIANTS.split(","), type=lambda text: text.split(","))
    parser.add_argument("--micro", default=[4, 2, 1], type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--attention", type=lambda text: text.split(","))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=200)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--site")
    parser.add_argument("--write", metavar="DIR")
    a = parser.parse_args()
    a.attention = a.attention or (["flex_attention", "eager"] if a.device == "cuda" else ["eager"])
    if unknown := set(a.variants) - set(VARIANTS.split(",")):
        parser.error(f"--variants: {', '.join(sorted(unknown))}: expected some of {VARIANTS}")
    if any(PAIRS % micro for micro in a.micro):
        parser.error(f"--micro: expected divisors of {PAIRS}")
    return a


def main():
    a = arguments()
    if a.site:
        sys.path.append(os.path.abspath(a.site))  # last: what is installed counts
    if a.write:
        return write(a, ARCHS[a.arch][1])
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    import accelerate
    import peft
    import torch
    import transformers
    import trl
    say(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}, "
        f"trl {trl.__version__}, accelerate {accelerate.__version__}")
    transformers.logging.set_verbosity_error()
    whole, fits = ARCHS[a.arch][0]["num_hidden_layers"], {}
    for variant in a.variants:
        measured = {}
        for layers in reversed(a.layers):
            if time.monotonic() - BEGAN > a.limit:
                say(f"{variant}, {layers} layers: left out, {a.limit:.0f} s are over")
                continue
            if result := first_that_runs(a, variant, layers, fits):
                measured[layers] = result
                row_of(a, variant, layers, result)
        if len(measured) == 2 and whole not in measured:
            (n, small), (m, large) = sorted(measured.items())
            row_of(a, variant, whole, {**large, **{key: small[key] + (large[key] - small[key]) * (whole - n) / (m - n)
                                                   for key in ("ms", "allocated", "reserved")}}, " (extrapolated)")
    say("done")


if __name__ == "__main__":
    main()
