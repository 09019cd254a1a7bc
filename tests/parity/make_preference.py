"""make_preference.py - what plain PyTorch computes in fp32 for a preference objective on a parity case: loss, rewards,
log-probabilities and gradient norm of every step and of held-out rows, and gradients of the first step.

  python make_preference.py CASE OUT --kind dpo|ipo|simpo|orpo|kto [--reference base|initial] [--beta 0.1]
      [--label-smoothing 0] [--sft-weight 0] [--gamma 0.5] [--orpo-nll all|completion] [--weights 1 1]

The policy starts from CASE/adapter_init, with the set-up of CASE/expected.json; a step has two pairs, of KTO four rows.
OUT gets the rows, which are made of the texts of the case. Formulas: those of TRL 1.16 (DPOTrainer, ORPOTrainer,
CPOTrainer, KTOTrainer), without padding. Needs torch, transformers >= 5, peft >= 0.19.1.
"""
import argparse
import json
import os

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch.nn.functional import logsigmoid

import peer

STRIDE = 8  # of the gradients that are kept


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("out")
    parser.add_argument("--kind", choices=("dpo", "ipo", "simpo", "orpo", "kto"), required=True)
    parser.add_argument("--reference", choices=("base", "initial"), default="base")
    parser.add_argument("--beta", type=float)
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--sft-weight", type=float, default=0.0)
    parser.add_argument("--gamma", type=float, default=0.5)
    parser.add_argument("--orpo-nll", choices=("all", "completion"), default="all")
    parser.add_argument("--weights", type=float, nargs=2, default=(1.0, 1.0))
    a = parser.parse_args()
    a.beta = a.beta or (2.0 if a.kind == "simpo" else 0.1)
    return a


def make_rows(texts, kind):
    """Prompts are first halves of lines of the case's texts; the rejected answer is that of another row."""
    pieces = []
    for text in texts:
        words = text.split(" ")
        for begin in range(0, len(words) - 12, 12):
            pieces.append((" ".join(words[begin:begin + 6]), " " + " ".join(words[begin + 6:begin + 9 + begin % 4])))
    rows = []
    for i, (prompt, completion) in enumerate(pieces):
        other = pieces[(i + 3) % len(pieces)][1]
        if kind == "kto":
            rows.append({"prompt": prompt, "completion": completion if i % 3 else other, "label": bool(i % 3)})
        else:
            rows.append({"prompt": prompt, "chosen": completion, "rejected": other})
    return rows


class Side:
    """A prompt and a completion as tokens."""

    def __init__(self, prompt, completion):
        self.prompt, self.completion = prompt, completion
        self.ids = prompt + completion


def sides(tokenizer, row):
    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def side(answer):
        prompt, both = ids(row["prompt"]), ids(row["prompt"] + answer)
        if both[:len(prompt)] != prompt:
            both = prompt + ids(answer)
        return Side(prompt, both[len(prompt):] + [tokenizer.eos_token_id])

    return [side(row[key]) for key in (("completion",) if "label" in row else ("chosen", "rejected"))]


def token_logps(model, ids):
    x = torch.tensor([ids])
    logits = model(input_ids=x).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, x[0, 1:, None])[:, 0]


def logp(model, side):
    """Sum over the completion, mean over all tokens."""
    each = token_logps(model, side.ids)
    return each[len(side.prompt) - 1:].sum(), each.mean()


class Objective:
    def __init__(self, a, model, reference):
        self.a, self.model, self.reference = a, model, reference
        self.needs = a.kind in ("dpo", "ipo", "kto")

    @torch.no_grad()
    def of_reference(self, side):
        if not self.needs:
            return torch.tensor(0.0)
        if self.reference is None:
            with self.model.disable_adapter():
                return logp(self.model, side)[0]
        return logp(self.reference, side)[0]

    @torch.no_grad()
    def baseline(self, rows):
        """KTO's z: completions behind the prompt of the next row."""
        total = 0.0
        for i, (side,) in enumerate(rows):
            mixed = Side(side.prompt, rows[i - 1][0].completion)
            total += (logp(self.model, mixed)[0] - self.of_reference(mixed)).item()
        return max(0.0, total / len(rows))

    def pair(self, two, chosen_tokens):
        """The part of a pair in the mean loss over pairs, and the values that are logged for the pair."""
        a = self.a
        (pc, all_c), (pr, _) = (logp(self.model, side) for side in two)
        rc, rr = (self.of_reference(side) for side in two)
        nc, nr = (len(side.completion) for side in two)
        sums = {"tokens_c": nc, "tokens_r": nr, "total_c": pc.item(), "total_r": pr.item()}
        sft = torch.tensor(0.0)
        if a.kind == "dpo":
            x = a.beta * ((pc - rc) - (pr - rr))
            loss = -(1 - a.label_smoothing) * logsigmoid(x) - a.label_smoothing * logsigmoid(-x)
            sft = -a.sft_weight * pc / chosen_tokens
        elif a.kind == "ipo":
            loss = ((pc - rc) / nc - (pr - rr) / nr - 1 / (2 * a.beta)) ** 2
        else:
            pc, pr = pc / nc, pr / nr
            if a.kind == "simpo":
                loss = -logsigmoid(a.beta * (pc - pr) - a.gamma)
            else:
                nll = -all_c if a.orpo_nll == "all" else -pc
                odds = (pc - pr) - (torch.log1p(-torch.exp(pc)) - torch.log1p(-torch.exp(pr)))
                loss = nll - a.beta * logsigmoid(odds)
                sums["nll_loss"] = nll.item()
        good, bad = a.beta * (pc - rc).item(), a.beta * (pr - rr).item()
        sums.update({"rewards/chosen": good, "rewards/rejected": bad, "rewards/margins": good - bad,
                     "rewards/accuracies": float(good > bad), "logps/chosen": pc.item(), "logps/rejected": pr.item()})
        return loss, sft, sums

    def row(self, side, good, z):
        p, _ = logp(self.model, side)
        ratio = p - self.of_reference(side)
        weight = self.a.weights[0 if good else 1]
        loss = weight * (1 - torch.sigmoid(self.a.beta * ((ratio - z) if good else (z - ratio))))
        name, short = ("chosen", "c") if good else ("rejected", "r")
        return loss, torch.tensor(0.0), {f"rewards/{name}": self.a.beta * ratio.item(), f"logps/{name}": p.item(),
                                         f"tokens_{short}": len(side.completion), f"total_{short}": p.item()}

    def step(self, rows, labels, backward):
        chosen_tokens = sum(len(row[0].completion) for row in rows)
        z = self.baseline(rows) if self.a.kind == "kto" else 0.0
        loss, each = 0.0, []
        for row, label in zip(rows, labels):
            part, sft, sums = self.row(row[0], label, z) if self.a.kind == "kto" else self.pair(row, chosen_tokens)
            if backward:
                (part / len(rows) + sft).backward()
            loss += part.item() / len(rows) + sft.item()
            each.append(sums)
        return loss, each, z


def means(a, loss, each, z):
    out = {"loss": loss}
    for key in sorted({key for sums in each for key in sums if "/" in key or key == "nll_loss"}):
        values = [sums[key] for sums in each if key in sums]
        out[key] = sum(values) / len(values)
    for name, short in (("chosen", "c"), ("rejected", "r")):
        tokens = sum(sums.get(f"tokens_{short}", 0) for sums in each)
        if tokens:
            out[f"logps/{name}_per_token"] = sum(sums.get(f"total_{short}", 0) for sums in each) / tokens
    if a.kind == "kto":
        out["kl"] = z
        if "rewards/chosen" in out and "rewards/rejected" in out:
            out["rewards/margins"] = out["rewards/chosen"] - out["rewards/rejected"]
    return out


@torch.no_grad()
def held_out(a, objective, rows, labels, per_step):
    """KTO's baseline is that of as many rows as a step has."""
    loss, each, kl = 0.0, [], 0.0
    chosen_tokens = sum(len(row[0].completion) for row in rows)
    for i in range(0, len(rows), per_step if a.kind == "kto" else len(rows)):
        part = slice(i, i + per_step) if a.kind == "kto" else slice(None)
        one, some, z = objective.step(rows[part], labels[part], False)
        loss += one * len(rows[part]) / len(rows)
        kl += z * len(rows[part]) / len(rows)
        each += some
    assert chosen_tokens
    out = means(a, loss, each, kl)
    return {k if k == "loss" else f"eval_{k}": v for k, v in out.items()}


def train(a, setup, objective, rows, labels, per_step):
    trained = {n: p for n, p in objective.model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=setup["lr"], betas=(setup["beta1"], setup["beta2"]),
                                  weight_decay=setup["weight_decay"], eps=setup["eps"])
    steps = []
    for step in range(setup["steps"]):
        part = slice(per_step * step, per_step * (step + 1))
        loss, each, z = objective.step(rows[part], labels[part], True)
        if step == 0:
            save_file({n.replace(".default", ""): p.grad.flatten()[::STRIDE].contiguous() for n, p in trained.items()},
                      f"{a.out}/gradients.safetensors")
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), setup["clip_norm"]).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps.append({**means(a, loss, each, z), "grad_norm": norm})
    return steps


def main():
    a = arguments()
    os.makedirs(a.out, exist_ok=True)
    with open(f"{a.case}/expected.json") as f:
        setup = json.load(f)["setup"]
    setup.update(micro_batch=2 if a.kind == "kto" else 1, grad_accum=2)
    per_step = setup["micro_batch"] * setup["grad_accum"]
    tokenizer = peer.load_tokenizer(a.case)
    files = {}
    for name, n in (("train", per_step * setup["steps"]), ("eval", 6)):
        rows = make_rows([row["text"] for row in peer.read_rows(f"{a.case}/{name}.jsonl")], a.kind)[:n]
        assert len(rows) == n, (name, len(rows))
        with open(f"{a.out}/{name}.jsonl", "w") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
        files[name] = [sides(tokenizer, row) for row in rows], [row.get("label") for row in rows]
    model = PeftModel.from_pretrained(peer.load_model(a.case), f"{a.case}/adapter_init", is_trainable=True).float()
    model.eval()
    reference = None
    if a.reference == "initial":
        reference = PeftModel.from_pretrained(peer.load_model(a.case), f"{a.case}/adapter_init").float()
        reference.eval()
    objective = Objective(a, model, reference)
    expected = {"eval_start": held_out(a, objective, *files["eval"], per_step)}
    expected["steps"] = train(a, setup, objective, *files["train"], per_step)
    expected["eval_end"] = held_out(a, objective, *files["eval"], per_step)
    expected["setup"] = setup
    expected["objective"] = dict(kind=a.kind, reference=a.reference, beta=a.beta, label_smoothing=a.label_smoothing,
                                 sft_weight=a.sft_weight, gamma=a.gamma, orpo_nll=a.orpo_nll,
                                 desirable_weight=a.weights[0], undesirable_weight=a.weights[1])
    with open(f"{a.out}/expected.json", "w") as f:
        json.dump(expected, f, indent=1)
        f.write("\n")
    print(a.kind, [round(s["loss"], 5) for s in expected["steps"]])


if __name__ == "__main__":
    main()
