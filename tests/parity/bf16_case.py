"""bf16_case.py - measures the difference between transformers + PEFT in bf16 and in fp32, on a case of make_case.py.
tests/model/test_parity.c derives the bounds for a GPU from it. The base model is bf16; the adapter is fp32, as in PEFT.

  python bf16_case.py CASE

Writes CASE/bf16.json, relative errors: "loss" and "grad_norm" (root mean square over the steps; the held-out losses
count as steps), "hidden" (each layer's input, then the final norm), "gradients" and "adapter" (each tensor, Frobenius).
Training amplifies rounding differences at random. Each error is therefore the largest of three runs, with
transformers' three implementations of the experts.
"""
import json
import sys

import torch
from peft import PeftModel
from safetensors.torch import load_file

import peer


def error(x, reference):
    reference = reference.double()
    return ((x.double() - reference).norm() / reference.norm().clamp(min=1e-30)).item()


def errors(model, reference, pick):
    found = {n.replace(".default", ""): pick(p) for n, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == reference.keys()
    return {n: error(found[n], reference[n]) for n in sorted(found)}


@torch.no_grad()
def hidden_errors(model, forward):
    out = model(input_ids=forward["input_ids"][None].long(), output_hidden_states=True)
    return [error(h[0], forward[f"hidden_{i}"]) for i, h in enumerate(out.hidden_states)]


def train(model, documents, setup, grads, record):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=setup["lr"], betas=(setup["beta1"], setup["beta2"]), eps=setup["eps"],
                                  weight_decay=setup["weight_decay"])
    model.train()
    for step in range(setup["steps"]):
        micro = documents[setup["grad_accum"] * step:setup["grad_accum"] * (step + 1)]
        tokens = sum(len(ids) - 1 for ids in micro)
        total = 0.0
        for ids in micro:
            loss, _ = peer.cross_entropy(model, ids)
            (loss / tokens).backward()
            total += loss.item()
        if step == 0:
            record["gradients"] = errors(model, grads, lambda p: p.grad)
        norm = torch.nn.utils.clip_grad_norm_(trained, setup["clip_norm"]).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield total / tokens, norm


def rms(pairs):
    return (sum(((x - y) / y) ** 2 for x, y in pairs) / len(pairs)) ** 0.5


def measure(case, expected, experts):
    """The errors with one implementation of the experts."""
    setup = expected["setup"]
    tokenizer = peer.load_tokenizer(case)
    rows, held_out = ([peer.encode(tokenizer, row, setup["seq_len"]) for row in peer.read_rows(f"{case}/{name}.jsonl")]
                      for name in ("train", "eval"))
    base = peer.load_model(case, experts)
    for p in base.parameters():  # buffers stay fp32, as transformers keeps RoPE's frequencies so
        p.data = p.data.bfloat16()
    losses = [(peer.held_out_loss(base, held_out), expected["eval_base"])]
    model = PeftModel.from_pretrained(base, f"{case}/adapter_init", is_trainable=True)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    losses.append((peer.held_out_loss(model, held_out), expected["eval_init_adapter"]))
    record = {"hidden": hidden_errors(model, load_file(f"{case}/forward.safetensors"))}
    steps = list(train(model, rows, setup, load_file(f"{case}/grads_step0.safetensors"), record))
    losses += [(loss, step["loss"]) for (loss, _), step in zip(steps, expected["steps"])]
    losses.append((peer.held_out_loss(model, held_out), expected["eval_final"]))
    record["loss"] = rms(losses)
    record["grad_norm"] = rms([(norm, step["grad_norm"]) for (_, norm), step in zip(steps, expected["steps"])])
    final = load_file(f"{case}/adapter_final/adapter_model.safetensors")
    record["adapter"] = errors(model, final, lambda p: p.detach())
    return record


def worst(a, b):
    """The larger of two numbers, or of two records element by element."""
    if isinstance(a, dict):
        return {k: worst(a[k], b[k]) for k in a}
    return [worst(x, y) for x, y in zip(a, b)] if isinstance(a, list) else max(a, b)


def main():
    case = sys.argv[1]
    with open(f"{case}/expected.json") as f:
        expected = json.load(f)
    record = None
    for experts in ("eager", "batched_mm", "grouped_mm"):
        one = measure(case, expected, experts)
        print(experts, {k: max(v.values()) if isinstance(v, dict) else v for k, v in one.items()})
        record = worst(record, one) if record else one
    with open(f"{case}/bf16.json", "w") as f:
        json.dump(record, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()
