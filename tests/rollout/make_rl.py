"""make_rl.py - what TRL's own loss functions give for an objective of online RL over recorded rollouts on a parity
case, in fp32: loss, metrics and gradient norm of every step, gradients of the first step, the adapter after the last.

  python make_rl.py CASE OUT NAME   (NAME: a set of settings below)
  python make_rl.py FOLDER          (all of them, on the cases beside FOLDER: fixtures/parity)

The policy starts from CASE/adapter_init, with the set-up of CASE/expected.json; a step has eight rows in groups of
four. OUT gets the rows: tokens of the texts of the case. A whole step is one batch of TRL, so its means are those of
the step. Needs torch, transformers >= 5, peft >= 0.19.1, trl 1.16.
"""
import collections
import json
import os
import sys
import types

import torch
from peft import PeftModel
from safetensors.torch import save_file
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import nanstd

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "parity"))
import peer  # noqa: E402

STRIDE = 8  # of the gradients and parameters that are kept
GROUP, ROWS = 4, 8
DEFAULTS = dict(num_generations=GROUP, num_iterations=1, steps_per_generation=1, temperature=1.0, epsilon=0.2,
                epsilon_high=None, delta=None, beta=0.0, kl="k3", reference="base", scale_rewards="group",
                is_mode="none", is_cap=3.0, is_floor=None, mask_truncated=False, old="trainer",
                max_completion_length=16, top_entropy_quantile=1.0, entropy_coef=0.0)
SETS = {
    "grpo": ("qwen3", dict(kind="grpo", num_iterations=2)),
    "grpo_kl": ("qwen3", dict(kind="grpo", num_iterations=2, beta=0.1, kl="k3_ratio", epsilon=0.02, delta=1.05,
                              reference="initial", scale_rewards="batch")),
    "dr_grpo": ("case_a", dict(kind="dr_grpo", steps_per_generation=2, scale_rewards="none", beta=0.05)),
    "dapo": ("qwen3", dict(kind="dapo", epsilon_high=0.28, is_mode="sequence_mask", beta=0.05, num_iterations=2,
                           top_entropy_quantile=0.35, entropy_coef=0.01)),
    "gspo": ("case_a", dict(kind="gspo", epsilon=3e-4, epsilon_high=4e-4, is_mode="token_truncate", is_floor=0.5,
                            num_iterations=2)),
    "rloo": ("qwen3", dict(kind="rloo", beta=0.05, num_iterations=2, scale_rewards="none")),
    "cispo": ("case_a", dict(kind="cispo", epsilon_high=1.01, temperature=0.8, is_mode="token_mask", is_cap=1.2,
                             num_iterations=2, mask_truncated=True)),
    "old_rows": ("qwen3", dict(kind="grpo", old="rows", epsilon=0.1)),
}


def make_rows(tokenizer, texts, vocab, setup, s):
    """Groups of four completions: one group has equal rewards, one a null reward, some rows environment tokens."""
    generator = torch.Generator().manual_seed(7)
    end = tokenizer.eos_token_id
    n_generation = setup["steps"] // s["num_iterations"] // s["steps_per_generation"]
    n = n_generation * s["steps_per_generation"] * ROWS

    def number(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    rows = []
    for group in range(n // GROUP):
        ids = tokenizer(texts[group % len(texts)], add_special_tokens=False)["input_ids"]
        prompt = ids[:number(3, 9)]
        for k in range(GROUP):
            completion = ids[len(prompt):len(prompt) + number(2, 8)] + [number(0, vocab) for _ in range(number(1, 4))]
            ended = number(0, 4) > 0
            row = dict(prompt_ids=prompt, completion_ids=completion + [end] if ended else completion,
                       reward=float(number(0, 5)) / 4, group=group,
                       finish_reason="stop" if ended else "length")
            if group == 1:
                row["reward"] = 0.25
            if group == 0 and k == 2:
                row["reward"] = None
            if k == 1:
                row["mask"] = [int(number(0, 3) > 0) for _ in row["completion_ids"]]
            rows.append(row)
    return rows


def pad(lists, value):
    width = max(len(x) for x in lists)
    return torch.tensor([list(x) + [value] * (width - len(x)) for x in lists])


class Policy:
    """Log-probabilities and entropies of the completion tokens of rows, [rows, longest]."""

    def __init__(self, model, temperature):
        self.model, self.temperature = model, temperature

    def __call__(self, rows):
        width = max(len(row["completion_ids"]) for row in rows)
        logps, entropies = [], []
        for row in rows:
            ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
            logits = self.model(input_ids=ids).logits[0, len(row["prompt_ids"]) - 1:-1].float() / self.temperature
            all_logps = torch.log_softmax(logits, -1)
            own = all_logps.gather(1, torch.tensor(row["completion_ids"])[:, None])[:, 0]
            filled = torch.nn.functional.pad
            logps.append(filled(own, (0, width - len(own))))
            entropies.append(filled(-(all_logps.exp() * all_logps).sum(-1), (0, width - len(own))))
        return torch.stack(logps), torch.stack(entropies)


class Fake:
    """What _compute_loss reads of a trainer."""

    def __init__(self, s, policy):
        loss_types = {"gspo": "grpo"}
        self.s, self.policy, self.rows = s, policy, None
        self.model = types.SimpleNamespace(training=True)
        self.args = types.SimpleNamespace(delta=s["delta"], use_bias_correction_kl=s["kl"] == "k3_ratio",
                                          steps_per_generation=1)
        self.accelerator = types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x,
                                                 pad_across_processes=lambda x, dim, pad_index: x, sync_gradients=True)
        self.loss_type = loss_types.get(s["kind"], s["kind"])
        self.importance_sampling_level = "sequence" if s["kind"] == "gspo" else "token"
        self.epsilon_low = s["epsilon"]
        self.epsilon_high = s["epsilon"] if s["epsilon_high"] is None else s["epsilon_high"]
        self.beta = s["beta"]
        self.top_entropy_quantile = s["top_entropy_quantile"]
        self.max_completion_length = s["max_completion_length"]
        self.use_vllm = self.vllm_importance_sampling_correction = s["is_mode"] != "none"
        self.aux_loss_enabled = False
        self.off_policy_mask_threshold = None
        self.current_gradient_accumulation_steps = 1
        self._entropy_bonus_enabled = s["entropy_coef"] != 0
        self.entropy_coef, self.use_adaptive_entropy = s["entropy_coef"], False
        self._metrics = {"train": collections.defaultdict(list)}

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        logps, entropies = self.policy(self.rows)
        return logps, entropies, None

    def get_high_entropy_mask(self, entropies, mask, threshold):
        return GRPOTrainer.get_high_entropy_mask(self, entropies, mask, threshold)


class Generation:
    """What a generation of rows has before its first step."""

    def __init__(self, s, rows, policy, reference):
        self.rows = rows
        self.mask = pad([row.get("mask") or [1] * len(row["completion_ids"]) for row in rows], 0)
        if s["mask_truncated"]:
            self.mask *= torch.tensor([[int(row["finish_reason"] == "stop")] for row in rows])
        with torch.no_grad():
            self.old = policy(rows)[0]
            self.ref = reference(rows)[0] if s["beta"] else None
        sampler = pad([[float("nan") if x is None else x for x in row["logprobs"]] for row in rows], 0.0)
        self.ratio, self.difference = None, None
        if s["is_mode"] != "none":
            self.correct(s, sampler)
        if s["old"] == "rows":
            self.old = sampler
        rewards = torch.tensor([float("nan") if row["reward"] is None else row["reward"] for row in rows])
        self.reward = torch.nanmean(rewards).item(), nanstd(rewards).item()
        if s["kind"] == "rloo":
            self.rloo(s, rewards)
            return
        grouped = rewards.view(-1, GROUP)
        std = nanstd(grouped, dim=1).repeat_interleave(GROUP)
        if s["scale_rewards"] == "batch":
            std = nanstd(rewards).expand_as(rewards)
        self.advantages = rewards - torch.nanmean(grouped, dim=1).repeat_interleave(GROUP)
        if s["scale_rewards"] != "none":
            self.advantages = self.advantages / (std + 1e-4)
        self.advantages = torch.nan_to_num(self.advantages, nan=0.0)

    def correct(self, s, sampler):
        d = torch.nan_to_num((self.old - sampler) * self.mask, nan=0.0)
        if s["is_mode"].startswith("sequence"):
            d = d.sum(-1, keepdim=True)
        ratio = d.exp()
        if s["is_mode"].endswith("truncate"):
            ratio = ratio.clamp(min=s["is_floor"], max=s["is_cap"])
        else:
            floor = s["is_floor"] if s["is_floor"] is not None else -float("inf")
            ratio = ratio.masked_fill((ratio < floor) | (ratio > s["is_cap"]), 0.0)
        self.ratio = ratio
        known = self.mask.bool() & ~torch.isnan(sampler)
        self.difference = (self.old - sampler).abs()[known]

    def rloo(self, s, rewards):
        self.kl = ((self.old - self.ref) * self.mask).sum() / self.mask.sum()
        rewards = rewards - s["beta"] * ((self.old - self.ref) * self.mask).sum(-1)
        grouped = rewards.view(-1, GROUP)
        count = (~torch.isnan(grouped)).sum(1, keepdim=True)
        baseline = (torch.nansum(grouped, 1, keepdim=True) - grouped) / (count - 1)
        self.advantages = torch.nan_to_num(rewards - baseline.view(-1), nan=0.0)

    def inputs(self, part):
        ids = pad([row["completion_ids"] for row in self.rows[part]], 0)
        width = ids.shape[1]
        mask = self.mask[part][:, :width]
        out = dict(prompt_ids=ids[:, :1], prompt_mask=torch.ones_like(ids[:, :1]), completion_ids=ids,
                   completion_mask=mask, advantages=self.advantages[part], num_items_in_batch=mask.sum(),
                   old_per_token_logps=self.old[part][:, :width],
                   old_logps=(self.old[part][:, :width] * mask).sum(1))
        if self.ref is not None:
            out["ref_per_token_logps"] = self.ref[part][:, :width]
        if self.ratio is not None:
            out["importance_sampling_ratio"] = self.ratio[part] if self.ratio.shape[1] == 1 \
                else self.ratio[part][:, :width]
        return out


def step_loss(fake, generation, part):
    fake.rows = generation.rows[part]
    fake._metrics["train"].clear()
    trainer = RLOOTrainer if fake.s["kind"] == "rloo" else GRPOTrainer
    loss = trainer._compute_loss(fake, None, generation.inputs(part))
    numbers = {name: values[0] for name, values in fake._metrics["train"].items() if values[0] is not None}
    return loss, numbers


def numbers_of(generation, numbers, loss, s):
    out = {"loss": loss, "entropy": numbers["entropy"], "reward": generation.reward[0],
           "reward_std": generation.reward[1]}
    out.update({name: value for name, value in numbers.items() if name.startswith("clip_ratio") or name == "kl"
                or name == "cispo_clip_ratio"})
    if s["kind"] == "rloo":
        out["kl"] = generation.kl.item()
    if generation.ratio is not None:
        ratio = generation.ratio.flatten() if generation.ratio.shape[1] == 1 \
            else generation.ratio[generation.mask.bool()]
        out.update({"sampling/importance_sampling_ratio/min": ratio.min().item(),
                    "sampling/importance_sampling_ratio/mean": ratio.mean().item(),
                    "sampling/importance_sampling_ratio/max": ratio.max().item(),
                    "sampling/sampling_logp_difference/mean": generation.difference.mean().item(),
                    "sampling/sampling_logp_difference/max": generation.difference.max().item()})
    return out


def keep(named, path):
    save_file({n.replace(".default", ""): x.detach().flatten()[::STRIDE].contiguous() for n, x in named}, path)


def train(out, setup, s, model, reference, rows):
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=setup["lr"], betas=(setup["beta1"], setup["beta2"]),
                                  weight_decay=setup["weight_decay"], eps=setup["eps"])
    policy, steps = Policy(model, s["temperature"]), []
    fake = Fake(s, policy)
    size = ROWS * s["steps_per_generation"]
    for first in range(0, len(rows), size):
        generation = Generation(s, rows[first:first + size], policy, Policy(reference, s["temperature"]))
        for _ in range(s["num_iterations"]):
            for at in range(0, size, ROWS):
                loss, numbers = step_loss(fake, generation, slice(at, at + ROWS))
                loss.backward()
                if not steps:
                    keep(((n, p.grad) for n, p in trained.items()), f"{out}/gradients.safetensors")
                norm = torch.nn.utils.clip_grad_norm_(trained.values(), setup["clip_norm"]).item()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                steps.append({**numbers_of(generation, numbers, loss.item(), s), "grad_norm": norm})
    keep(trained.items(), f"{out}/final.safetensors")
    return steps


def make(case, out, name):
    s = {**DEFAULTS, **SETS[name][1]}
    os.makedirs(out, exist_ok=True)
    with open(f"{case}/expected.json") as f:
        setup = json.load(f)["setup"]
    setup.update(micro_batch=2, grad_accum=4, steps=4)
    if os.path.basename(case) == "case_a":
        setup["lr"] = 3e-4  # ratios of this case grow fast
    tokenizer = peer.load_tokenizer(case)
    model = PeftModel.from_pretrained(peer.load_model(case), f"{case}/adapter_init", is_trainable=True).float()
    model.eval()
    reference = peer.load_model(case).float()
    if s["reference"] == "initial":
        reference = PeftModel.from_pretrained(reference, f"{case}/adapter_init").float()
    reference.eval()
    texts = [row["text"] for row in peer.read_rows(f"{case}/train.jsonl")]
    rows = make_rows(tokenizer, texts, model.config.vocab_size, setup, s)
    with torch.no_grad():
        logps = Policy(model, s["temperature"])(rows)[0]
    noise = 0.1 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(3))
    for i, row in enumerate(rows):
        row["logprobs"] = [round(float(x), 5) for x in (logps + noise)[i][:len(row["completion_ids"])]]
        if i % 5 == 0 and s["old"] != "rows":
            row["logprobs"][0] = None
    with open(f"{out}/train.jsonl", "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    expected = {"steps": train(out, setup, s, model, reference, rows), "setup": setup,
                "objective": {key: value for key, value in s.items() if value is not None}}
    with open(f"{out}/expected.json", "w") as f:
        json.dump(expected, f, indent=1)
        f.write("\n")
    print(name, [round(step["loss"], 6) for step in expected["steps"]])


def main():
    if len(sys.argv) == 4:
        make(*sys.argv[1:])
        return
    folder = sys.argv[1]
    for name, (case, _) in SETS.items():
        make(os.path.join(os.path.dirname(os.path.abspath(folder)), "parity", case), f"{folder}/{name}", name)


if __name__ == "__main__":
    main()
