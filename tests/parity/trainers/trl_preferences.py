"""trl_preferences.py - preference objectives of moetrain against TRL's own trainers, ten steps in fp32 on the CPU.

  python trl_preferences.py --text BOOK.txt [--family gpt_oss qwen3] [--cases 3] [--only dpo kto ...]
      [--moetrain build/moetrain] [--keep DIR]

A case is a checkpoint and an adapter of random_cases.py. Each objective trains it with DPOTrainer, KTOTrainer,
ORPOTrainer or CPOTrainer and with moetrain, on the same rows in the same order. Starts: `fresh` (B = 0, reference:
base), `initial` (the case's adapter, reference: its copy), `base` (the case's adapter, reference: base). moetrain
divides its steps into micro-batches and ranks at random. Prompts have 1 to 130 words, answers one token to 15 words; a
ninth of the pairs has equal answers. Prints the largest error of each kind.

Where TRL's mean depends on the division into micro-batches, TRL runs with the division that gives moetrain's mean
(PER_STEP below):
- DPO's sft term is a mean over the tokens of a micro-batch, KTO's z (the KL baseline) one over its rows: a step, and
  the held-out rows of DPO, are one micro-batch.
- ORPO's cross-entropy is a mean over the tokens of a micro-batch, moetrain's a mean over pairs: a micro-batch of TRL is
  one pair.
- TRL 1.16 has no label smoothing of the sigmoid loss. 1.6 of that loss minus 0.6 of its robust loss is
  -0.8 log sigmoid(x) - 0.2 log sigmoid(-x), moetrain's loss with label_smoothing = 0.2.
- TRL's ORPO has no cross-entropy of the completion alone: CompletionTrainer takes CPOTrainer's forward pass.
- TRL drops the end of a prompt that merges with the answer and adds a begin-of-sequence token (ORPO, CPO): the rows
  have completions that begin at a token, and TRL's tokenizer gets no such token.
- KTOTrainer's held-out rewards are means of the means of its batches, moetrain's are means over rows: not compared.
- DPOTrainer and KTOTrainer add the auxiliary loss with the coefficient of config.json: it is set to 0.

Needs torch, transformers >= 5, peft >= 0.20, trl 1.16, datasets.
"""
import argparse
import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile

import datasets
import transformers
from peft import LoraConfig, PeftModel
from safetensors.numpy import load_file
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import compare
import peer
import random_cases

STEPS, PER_STEP, HELD_OUT = 10, 4, 8
TOLERANCE = {"loss": 1e-4, "grad_norm": 1e-3, "adapter": 1e-3, "rewards": 1e-3, "logps": 1e-5, "kl": 1e-3,
             "eval_loss": 1e-4, "eval_logps": 1e-5, "eval_rewards": 1e-3, "eval_kl": 1e-3}
ABSOLUTE = ("rewards", "kl", "eval_rewards", "eval_kl")


class CompletionTrainer(ORPOTrainer):
    """ORPO with the cross-entropy over the completion."""
    loss_type, cpo_alpha = "simpo", 1.0
    concatenated_forward = CPOTrainer.concatenated_forward
    pad_token_id = property(lambda self: self.padding_value)


class Objective:
    """An objective: settings of moetrain, TRL's trainer and its settings. micro: pairs or rows in a micro-batch of
    TRL."""

    def __init__(self, ours, trainer, config, theirs, micro=PER_STEP, starts=("fresh", "initial", "base")):
        self.ours, self.trainer, self.config, self.theirs = ours, trainer, config, theirs
        self.micro, self.starts = micro, starts
        self.kto = trainer is KTOTrainer
        self.held_out = PER_STEP if self.kto else 1 if micro == 1 else HELD_OUT


NO_AUX, ALONE = {"router_aux_loss_coef": 0.0}, ("fresh", "initial")
SMOOTH = {"loss_type": ["sigmoid", "robust"], "loss_weights": [1.6, -0.6], "label_smoothing": 0.2, **NO_AUX}
OBJECTIVES = {
    "dpo": Objective(["kind=dpo"], DPOTrainer, DPOConfig, NO_AUX),
    "dpo_micro": Objective(["kind=dpo", "beta=0.5"], DPOTrainer, DPOConfig, {"beta": 0.5, **NO_AUX}, micro=1),
    "ipo": Objective(["kind=ipo", "beta=0.3"], DPOTrainer, DPOConfig, {"beta": 0.3, "loss_type": ["ipo"], **NO_AUX}, 2),
    "rpo": Objective(["kind=dpo", "sft_weight=0.7"], DPOTrainer, DPOConfig,
                     {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7], **NO_AUX}),
    "simpo": Objective(["kind=simpo", "gamma=0.8"], CPOTrainer, CPOConfig,
                       {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.8}, 2, ALONE),
    "orpo": Objective(["kind=orpo", "beta=0.4"], ORPOTrainer, ORPOConfig, {"beta": 0.4}, 1, ALONE),
    "orpo_completion": Objective(["kind=orpo", "orpo_nll=completion"], CompletionTrainer, ORPOConfig, {}, 1, ALONE),
    "kto": Objective(["kind=kto"], KTOTrainer, KTOConfig, NO_AUX),
    "kto_weights": Objective(["kind=kto", "beta=0.3", "desirable_weight=1.4", "undesirable_weight=0.6"], KTOTrainer,
                             KTOConfig, {"beta": 0.3, "desirable_weight": 1.4, "undesirable_weight": 0.6, **NO_AUX}),
    "smooth": Objective(["kind=dpo", "label_smoothing=0.2"], DPOTrainer, DPOConfig, SMOOTH),
}


# ---- rows

PROMPT_WORDS, ANSWER_WORDS = (1, 3, 6, 20, 60, 130), (1, 3, 6, 15)


def answer(rng, words, tokenizer, prompt):
    """An answer that begins at a token; half of the answers of one word are one token."""
    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    while True:
        n, start = rng.choice(ANSWER_WORDS), rng.randrange(len(words) - 200)
        text, before = " " + " ".join(words[start:start + n]), ids(prompt)
        if n == 1 and rng.random() < 0.5:
            text = rng.choice([" the", " and", "."])
        if ids(prompt + text)[:len(before)] == before:
            return text


def draw_row(rng, words, tokenizer, kto):
    """A prompt of 1 to 130 words. A ninth of the pairs has equal answers."""
    start = rng.randrange(len(words) - 200)
    prompt = " ".join(words[start:start + rng.choice(PROMPT_WORDS)])
    first, second = (answer(rng, words, tokenizer, prompt) for _ in range(2))
    if kto:
        return {"prompt": prompt, "completion": first, "label": rng.random() < 0.6}
    return {"prompt": prompt, "chosen": first, "rejected": first if rng.random() < 1 / 9 else second}


def write_rows(case, folder, kto, rng):
    """train.jsonl and eval.jsonl with rows of the words of the case's texts."""
    tokenizer, words = peer.load_tokenizer(case), []
    for name in ("train", "eval"):
        words += [word for row in peer.read_rows(f"{case}/{name}.jsonl") for word in row["text"].split()]
    for name, n in (("train", STEPS * PER_STEP), ("eval", HELD_OUT)):
        with open(f"{folder}/{name}.jsonl", "w") as f:
            f.writelines(json.dumps(draw_row(rng, words, tokenizer, kto)) + "\n" for _ in range(n))


# ---- TRL

class Logged(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.steps.append(dict(logs))


def trl_model(case, start, objective):
    """The arguments of a trainer that say what is trained and what its reference is."""
    model = peer.load_model(case)
    if start == "fresh":
        config = LoraConfig.from_pretrained(f"{case}/adapter_init")
        config.init_lora_weights, config.inference_mode = True, False
        return {"model": model, "peft_config": config}
    model = PeftModel.from_pretrained(model, f"{case}/adapter_init", is_trainable=True).float()
    reference = {"ref_model": peer.load_model(case)} if start == "base" else {}
    return {"model": model, **reference}


def trl_run(case, folder, start, objective, setup):
    """Trains with TRL; returns its logs. Leaves the adapters before and after in `folder`."""
    config = objective.config(
        output_dir=f"{folder}/trl", max_steps=STEPS, per_device_train_batch_size=objective.micro,
        gradient_accumulation_steps=PER_STEP // objective.micro, per_device_eval_batch_size=objective.held_out,
        learning_rate=setup["lr"], lr_scheduler_type="constant", warmup_steps=0, optim="adamw_torch",
        adam_beta1=setup["beta1"], adam_beta2=setup["beta2"], adam_epsilon=setup["eps"],
        weight_decay=setup["weight_decay"], max_grad_norm=setup["clip_norm"], train_sampling_strategy="sequential",
        logging_steps=1, logging_nan_inf_filter=False, save_strategy="no", report_to=[], bf16=False, use_cpu=True,
        gradient_checkpointing=False, seed=7, disable_tqdm=True, max_length=4096, **objective.theirs)
    rows = {name: datasets.Dataset.from_json(f"{folder}/{name}.jsonl", cache_dir=f"{folder}/datasets")
            for name in ("train", "eval")}
    logged, tokenizer = Logged(), peer.load_tokenizer(case)
    tokenizer.bos_token = None
    trainer = objective.trainer(args=config, train_dataset=rows["train"], eval_dataset=rows["eval"],
                                processing_class=tokenizer, callbacks=[logged],
                                **trl_model(case, start, objective))
    trainer.model.save_pretrained(f"{folder}/before", selected_adapters=["default"])
    trainer.train()
    trainer.model.save_pretrained(f"{folder}/after", selected_adapters=["default"])
    return logged.steps, trainer.evaluate()


# ---- moetrain

def divisions(rng):
    """A step of PER_STEP pairs or rows."""
    micro = rng.choice([1, 2, 4])
    out = [f"train.micro_batch={micro}", f"train.grad_accum={PER_STEP // micro}"]
    if micro < PER_STEP and rng.random() < 0.4:
        out += ["parallel.cpu_ranks=2"] + ["parallel.zero=true"] * (rng.random() < 0.5)
    return out + [f"train.recompute={rng.choice(['none', 'selective', 'full'])}",
                  f"objective.reference_cache={rng.choice(['auto', 'none'])}"]


def moetrain_run(a, case, folder, start, objective, settings):
    needs = objective.ours[0][5:] in ("dpo", "ipo", "kto")
    words = [f"objective.{word}" for word in objective.ours]
    words += [f"objective.reference={'initial' if start == 'initial' else 'base'}"] if needs else []
    words += [word for word in settings if needs or "reference_cache" not in word]
    words += [f"data.train={folder}/train.jsonl", f"data.eval={folder}/eval.jsonl", "data.format=auto",
              "data.seq_len=1024", "eval.at_start=false", "train.seed=1",
              f"lora.init_from={folder}/before"]
    compare.train(case, a.moetrain, f"{folder}/out", words)


# ---- comparison

def numbers(result, what, ours, theirs, before=""):
    for key in theirs:
        kind = before + key.split("/")[0]
        if kind not in TOLERANCE or "accuracies" in key or not isinstance(theirs[key], float):
            continue
        if key not in ours or ours[key] is None:
            result.add(kind, f"{what}: no {key}", float("nan"))
            continue
        scale = 1 if kind in ABSOLUTE else abs(theirs[key])
        text = f"{what} {key}: {ours[key]:.9g}, TRL {theirs[key]:.9g}"
        result.add(kind, text, abs(ours[key] - theirs[key]) / scale)


def against(folder, logs, held_out, kto):
    result = compare.Comparison()
    steps = compare.events(f"{folder}/out", "step")
    assert len(steps) == len(logs) == STEPS, (len(steps), len(logs))
    for ours, theirs in zip(steps, logs):
        numbers(result, f"step {ours['step']}", ours, theirs)
    last = compare.events(f"{folder}/out", "eval")[-1]
    named = {key.removeprefix("eval_"): value for key, value in held_out.items()}
    if kto:
        named = {key: named[key] for key in ("loss", "kl")}
    numbers(result, "held out", {key.removeprefix("eval_"): v for key, v in last.items()}, named, "eval_")
    compare.compare_adapters(result, load_file(f"{folder}/out/adapter/adapter_model.safetensors"),
                             load_file(f"{folder}/after/adapter_model.safetensors"))
    return result


def one(a, case, folder, start, objective, settings, rng):
    os.makedirs(folder)
    write_rows(case, folder, objective.kto, rng)
    setup = compare.expected_of(case)["setup"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        logs, held_out = trl_run(case, folder, start, objective, setup)
    moetrain_run(a, case, folder, start, objective, settings)
    result = against(folder, logs, held_out, objective.kto)
    bad = [f"{kind}: {what}" for kind, (error, what) in result.worst.items() if not error <= TOLERANCE[kind]]
    return bad, " ".join(f"{kind} {error:.1e}" for kind, (error, _) in result.worst.items())


def run_case(a, family, seed):
    """All objectives from every start; returns how many differ."""
    args, _ = random_cases.draw(family, seed, a.text, a.lr)
    rng, failed = random.Random(f"{family} {seed}"), 0
    with tempfile.TemporaryDirectory() as scratch:
        case = f"{scratch}/case"
        random_cases.quiet_case(case, args)
        for name in a.only or OBJECTIVES:
            for start in OBJECTIVES[name].starts:
                settings, folder = divisions(rng), f"{scratch}/{name}-{start}"
                bad, text = one(a, case, folder, start, OBJECTIVES[name], settings, rng)
                print(f"{'FAIL' if bad else 'ok  '} {family} {seed} {name} {start}: {text}", flush=True)
                for line in bad:
                    print(f"     {line}")
                if bad:
                    print("     " + " ".join(args + settings), flush=True)
                failed += bool(bad)
        if failed and a.keep:
            shutil.copytree(scratch, os.path.join(a.keep, f"{family}-{seed}"), dirs_exist_ok=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True)
    parser.add_argument("--family", nargs="*", default=["gpt_oss", "qwen3"])
    parser.add_argument("--cases", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--only", nargs="*", choices=OBJECTIVES)
    parser.add_argument("--moetrain", default="build/moetrain")
    parser.add_argument("--keep", help="folder for the cases that fail")
    a = parser.parse_args()
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    failed = 0
    for family in a.family:
        for seed in range(a.seed, a.seed + a.cases):
            failed += run_case(a, family, seed)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
