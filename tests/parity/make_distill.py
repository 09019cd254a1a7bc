"""make_distill.py - what plain PyTorch computes in fp32 for a distillation on a parity case: losses, CE and KL of every
step and of the held-out rows, and the gradients of the first step.

  python make_distill.py CASE OUT --teacher base|adapter|rows [--alpha 0.3] [--temperature 2] [--kl reverse] [--topk 8]

The student starts from CASE/adapter_init, with the set-up of CASE/expected.json. The teacher is the base model, the
adapter CASE/adapter_final, or rows of the base model's likeliest tokens, which OUT then holds. The KL is summed in f64.
Needs torch, transformers >= 5, peft >= 0.19.1.
"""
import argparse
import gzip
import json
import os

import torch
from peft import PeftModel
from safetensors.torch import save_file

import peer


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("out")
    parser.add_argument("--teacher", choices=("base", "adapter", "rows"), required=True)
    parser.add_argument("--alpha", type=float, default=0.0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--kl", choices=("forward", "reverse"), default="forward")
    parser.add_argument("--topk", type=int, default=8)
    return parser.parse_args()


def logits_of(model, ids):
    return model(input_ids=torch.tensor([ids])).logits[0, :-1].float()


def kl_of(a, student, teacher):
    """The divergence, summed over the tokens, as `distill.kl` defines it; for teacher rows over K ids and one bucket
    for all other ids."""
    p = torch.log_softmax(student.double() / a.temperature, -1)
    q = torch.log_softmax(teacher.double() / a.temperature, -1)
    if a.teacher != "rows":
        return (q.exp() * (q - p)).sum() if a.kl == "forward" else (p.exp() * (p - q)).sum()
    total = 0
    for lp, lq in zip(p, q):
        ids = lq.topk(a.topk).indices.sort().values
        lq = lq[ids].float().double()  # as the rows hold them
        rest = (1 - lq.exp().sum()).clamp(min=0)
        others = torch.ones(len(lp), dtype=torch.bool)
        others[ids] = False
        total = total + (lq.exp() * (lq - lp[ids])).sum()
        if rest > 0:
            total = total + rest * (rest.log() - torch.logsumexp(lp[others], 0))
    return total


def write_rows(a, path, documents, teacher):
    with gzip.GzipFile(path, "wb", mtime=0) as f:
        for ids, logits in zip(documents, teacher):
            lq = torch.log_softmax(logits.double() / a.temperature, -1)
            tops = [row.topk(a.topk).indices.sort().values for row in lq]
            row = {"input_ids": ids, "loss_mask": [0] + [1] * (len(ids) - 1), "temperature": a.temperature,
                   "topk_ids": [None] + [t.tolist() for t in tops],
                   "topk_logprobs": [None] + [[float(f"{v:.9g}") for v in l[t].float().tolist()]
                                              for l, t in zip(lq, tops)]}
            f.write((json.dumps(row) + "\n").encode())


@torch.no_grad()
def held_out(a, model, documents, teacher):
    ce = kl = count = 0
    for ids, of_teacher in zip(documents, teacher):
        logits = logits_of(model, ids)
        ce += torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
        kl += float(kl_of(a, logits, of_teacher))
        count += len(ids) - 1
    return {"ce": ce / count, "kl": kl / count}


def train(a, setup, model, documents, teacher):
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=setup["lr"], betas=(setup["beta1"], setup["beta2"]),
                                  weight_decay=setup["weight_decay"], eps=setup["eps"])
    steps, accum = [], setup["grad_accum"]
    model.train()
    for step in range(setup["steps"]):
        part = slice(accum * step, accum * (step + 1))
        tokens = sum(len(ids) - 1 for ids in documents[part])
        ce = kl = 0.0
        for ids, of_teacher in zip(documents[part], teacher[part]):
            logits = logits_of(model, ids)
            one = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")
            other = kl_of(a, logits, of_teacher)
            ((a.alpha * one + (1 - a.alpha) * a.temperature ** 2 * other) / tokens).backward()
            ce += one.item()
            kl += other.item()
        if step == 0:
            save_file({n.replace(".default", ""): p.grad.contiguous() for n, p in trained.items()},
                      f"{a.out}/grads_step0.safetensors")
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), setup["clip_norm"]).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps.append({"loss": (a.alpha * ce + (1 - a.alpha) * a.temperature ** 2 * kl) / tokens, "ce": ce / tokens,
                      "kl": kl / tokens, "grad_norm": norm})
    model.eval()
    return steps


def main():
    a = arguments()
    os.makedirs(a.out, exist_ok=True)
    with open(f"{a.case}/expected.json") as f:
        setup = json.load(f)["setup"]
    tokenizer = peer.load_tokenizer(a.case)
    sets = [[peer.encode(tokenizer, row, setup["seq_len"]) for row in peer.read_rows(f"{a.case}/{name}.jsonl")]
            for name in ("train", "eval")]
    guide = peer.load_model(a.case)
    if a.teacher == "adapter":
        guide = PeftModel.from_pretrained(guide, f"{a.case}/adapter_final").float()
    guide.eval()
    with torch.no_grad():
        teacher = [[logits_of(guide, ids) for ids in documents] for documents in sets]
    if a.teacher == "rows":
        for name, documents, logits in zip(("train", "eval"), sets, teacher):
            write_rows(a, f"{a.out}/{name}.jsonl.gz", documents, logits)
    model = PeftModel.from_pretrained(peer.load_model(a.case), f"{a.case}/adapter_init", is_trainable=True).float()
    model.eval()
    expected = {"eval_start": held_out(a, model, sets[1], teacher[1])}
    expected["steps"] = train(a, setup, model, sets[0], teacher[0])
    expected["eval_end"] = held_out(a, model, sets[1], teacher[1])
    expected["setup"] = setup
    expected["distill"] = dict(teacher=a.teacher, alpha=a.alpha, temperature=a.temperature, kl=a.kl, topk=a.topk)
    with open(f"{a.out}/expected.json", "w") as f:
        json.dump(expected, f, indent=1)
        f.write("\n")
    print(json.dumps({k: expected[k] for k in ("eval_start", "eval_end")}))


if __name__ == "__main__":
    main()
