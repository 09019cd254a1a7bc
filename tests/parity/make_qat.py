"""make_qat.py - what plain PyTorch computes in fp32 for quantisation-aware training on a gpt-oss parity case: losses
and gradient norms of every step, held-out losses, and the gradients of the first step.

  python make_qat.py CASE OUT [--format mxfp4|nvfp4|fp8|int8|int4] [--mode base] [--targets all] [--amax static]
                     [--activations fp8|int8|nvfp4] [--calibration N] [--seq N] [--lr X] [--noise SEED]

The quantisers are written from the formulas of kernels/format/README.md, int8 and int4 with narrow codes. The model
reads Q(W + scale B A), or Q(W) + scale B A with --mode base; Q has gradient 1. With --amax static the largest
magnitudes stay those of the start. With --activations the products read their inputs x as Q(x) too, with one amax per
product for all rows: the largest of the first N training documents, which run without quantised inputs. The gradient of
x is that of Q(x) where |x| <= amax, and 0 elsewhere. OUT/gradients.safetensors has every seventh element of each
flattened gradient.

A difference in the last bit moves a value to the next code, so no two programs agree better than the noise of a run.
--noise multiplies every initial value by 1 + 1e-7 N(0, 1). Three seeds change the loss of the first step of every
case in fixtures/qat by at most 2.3e-7; later losses and gradient norms by at most, relative:
  mxfp4   losses 2.1e-03, gradient norms 2.7e-02
  nvfp4   losses 2.9e-03, gradient norms 1.6e-02
  fp8     losses 2.0e-03, gradient norms 1.9e-02
  int8    losses 1.3e-03, gradient norms 1.2e-02
  int4    losses 1.6e-04, gradient norms 2.3e-03
  base    losses 2.9e-07, gradient norms 1.1e-05
  all     losses 3.6e-03, gradient norms 3.6e-02
  static  losses 2.2e-07, gradient norms 4.0e-06
With --activations a difference in the last bit of any value in the network may move a code. in_fp8, in_int8 and in_nv4
have few tokens and a small learning rate, so that their noise stays below the tests' bounds:
  in_fp8  losses 5.1e-04, gradient norms 1.8e-02
  in_int8 losses 6.0e-04, gradient norms 1.3e-02
  in_nv4  losses 1.4e-04, gradient norms 2.3e-05
Needs torch, transformers >= 5.
"""
import argparse
import json
import os

import torch
from safetensors.torch import load_file, save_file

import peer

PREFIX = "base_model.model."
SCALE_OF_EMPTY = 2.0 ** -24
EVERY = 7


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("out")
    parser.add_argument("--format", choices=["none"] + sorted(QUANTISERS), default="none")
    parser.add_argument("--activations", choices=("none", "fp8", "int8", "nvfp4"), default="none")
    parser.add_argument("--calibration", type=int, default=16)
    parser.add_argument("--mode", choices=("merged", "base"), default="merged")
    parser.add_argument("--targets", choices=("experts", "all"), default="experts")
    parser.add_argument("--amax", choices=("current", "static"), default="current")
    parser.add_argument("--seq", type=int, help="tokens of a document, at most; default: the case's")
    parser.add_argument("--lr", type=float, help="default: the case's")
    parser.add_argument("--noise", type=int)
    return parser.parse_args()


# ---- the formats: x [..., out, in], amax [...]; every operation rounds to fp32


def e4m3(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def e2m1(x):
    """Nearest of 0, 1/2, 1, 3/2, 2, 3, 4, 6, ties to the even code."""
    a = x.abs()
    y = torch.zeros_like(a)
    for limit, value, closed in ((0.25, 0.5, 0), (0.75, 1, 1), (1.25, 1.5, 0), (1.75, 2, 1), (2.5, 3, 0), (3.5, 4, 1),
                                 (5, 6, 0)):
        y = torch.where(a >= limit if closed else a > limit, torch.tensor(float(value)), y)
    return torch.copysign(y, x)


def integer(bits):
    def quantise(x, amax):
        top = 2.0 ** (bits - 1) - 1
        a = amax[..., None, None]
        s = torch.tensor(top) / a
        y = torch.round(x * s).clamp(-top, top) / s
        return torch.where(a <= SCALE_OF_EMPTY, torch.zeros(()), y)
    return quantise


def fp8(x, amax):
    a = torch.where(amax <= SCALE_OF_EMPTY, torch.ones(()), amax)[..., None, None]
    s = torch.tensor(448.0) / a
    return e4m3(x * s) * (torch.ones(()) / s)


def nvfp4(x, amax):
    blocks = x.unflatten(-1, (-1, 16))
    g = (amax / torch.tensor(2688.0))[..., None, None, None]
    r = blocks.abs().amax(-1, keepdim=True) / (torch.tensor(6.0) * g)
    scale = torch.where((r == 0) | (g == 0), torch.ones(()), e4m3(r.clamp(2.0 ** -9, 448)))
    t = scale * g
    return (e2m1(blocks / t) * t).flatten(-2)


def mxfp4(x, amax):
    blocks = x.unflatten(-1, (-1, 32))
    most = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.where(most == 0, torch.tensor(-127), torch.frexp(most).exponent - 3).clamp(-127, 127)
    return torch.ldexp(e2m1(torch.ldexp(blocks, -exponent)), exponent).flatten(-2)


QUANTISERS = {"int8": integer(8), "int4": integer(4), "fp8": fp8, "nvfp4": nvfp4, "mxfp4": mxfp4}


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, m, quantise, amax):
        return quantise(m, amax)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class ClippedStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, quantise, amax):
        ctx.save_for_backward(x.abs() <= amax)
        return quantise(x, amax)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None, None


# ---- the adapted model


class Inputs:
    """The inputs of one product: their amax is recorded during calibration, then they are quantised."""

    def __init__(self, form):
        self.quantise, self.amax, self.calibrating = QUANTISERS[form], torch.zeros(()), True

    def __call__(self, x):
        if self.calibrating:
            self.amax = torch.maximum(self.amax, x.detach().abs().max())
            return x
        return ClippedStraightThrough.apply(x, self.quantise, self.amax)


def read_inputs(model, form, targets):
    """Makes the experts of the model, or all projections, read quantised inputs."""
    inputs = []

    def add():
        inputs.append(Inputs(form))
        return inputs[-1]

    def before(module, of):
        module.register_forward_pre_hook(lambda _, args: (of(args[0]), *args[1:]))

    for layer in model.model.layers:
        experts, attention = layer.mlp.experts, layer.self_attn
        gate, of_down = experts._apply_gate, add()
        experts._apply_gate = lambda x, gate=gate, of=of_down: of(gate(x))
        before(experts, add())
        if targets == "all":
            of_qkv = add()
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                before(projection, of_qkv)
            before(attention.o_proj, add())
    return inputs



class Matrix:
    """A weight of the model, [out, in] or experts [E, out, in], and its adapter."""

    def __init__(self, name, weight, lora_a, lora_b, scale, experts):
        self.name, self.experts, self.scale, self.amax = name, experts, scale, None
        self.weight = weight.transpose(1, 2) if experts else weight
        self.lora_a, self.lora_b = lora_a, lora_b

    def delta(self):
        if not self.experts:
            return self.scale * (self.lora_b @ self.lora_a)
        n, out = self.weight.shape[0], self.weight.shape[1]
        a = self.lora_a.unflatten(0, (n, -1))
        b = self.lora_b.reshape(out, -1, n).permute(2, 0, 1)
        return self.scale * (b @ a)

    def effective(self, a):
        if a.format == "none":
            m = self.weight + self.delta()
            return m.transpose(1, 2) if self.experts else m
        m = self.weight + self.delta() if a.mode == "merged" else self.weight
        if self.experts or a.targets == "all":
            if self.amax is None or a.amax == "current":
                self.amax = m.detach().abs().amax((-2, -1))
            m = StraightThrough.apply(m, QUANTISERS[a.format], self.amax)
        elif a.mode == "merged":
            return m
        if a.mode == "base":
            m = m + self.delta()
        return m.transpose(1, 2) if self.experts else m


class Model:
    def __init__(self, a, setup):
        self.a = a
        self.model = peer.load_model(a.case).eval()
        self.model.requires_grad_(False)
        self.inputs = [] if a.activations == "none" else read_inputs(self.model, a.activations, a.targets)
        weights = dict(self.model.named_parameters())
        start = load_file(f"{a.case}/adapter_init/adapter_model.safetensors")
        if a.noise is not None:
            torch.manual_seed(a.noise)
            start = {k: v * (1 + 1e-7 * torch.randn(v.shape, dtype=torch.float64)).float() for k, v in start.items()}
        self.trained = {k: v.clone().requires_grad_() for k, v in start.items()}
        self.matrices = []
        for key in self.trained:
            if not key.endswith("lora_A.weight"):
                continue
            name = key[len(PREFIX):-len(".lora_A.weight")]
            experts = "experts" in name
            if experts:  # PEFT wraps twice: the inner adapter, of base_layer, is the first one's
                inner = name.endswith(".base_layer")
                name = name.removesuffix(".base_layer") + (".gate_up_proj" if inner else ".down_proj")
            else:
                name += ".weight"
            self.matrices.append(Matrix(name, weights[name], self.trained[key], self.trained[key.replace("_A.", "_B.")],
                                        setup["alpha"] / setup["r"], experts))

    def loss(self, ids):
        weights = {m.name: m.effective(self.a) for m in self.matrices}
        x = torch.tensor([ids])
        logits = torch.func.functional_call(self.model, weights, kwargs={"input_ids": x}).logits[0].float()
        return torch.nn.functional.cross_entropy(logits[:-1], x[0, 1:], reduction="sum")

    @torch.no_grad()
    def calibrate(self, documents):
        for ids in documents:
            self.loss(ids)
        for x in self.inputs:
            x.calibrating = False

    @torch.no_grad()
    def held_out(self, documents):
        return sum(self.loss(ids).item() for ids in documents) / sum(len(ids) - 1 for ids in documents)


def train(a, setup, model, documents):
    trained = model.trained
    optimizer = torch.optim.AdamW(trained.values(), lr=setup["lr"], betas=(setup["beta1"], setup["beta2"]),
                                  weight_decay=setup["weight_decay"], eps=setup["eps"])
    steps, accum = [], setup["grad_accum"]
    for step in range(setup["steps"]):
        part = documents[accum * step:accum * (step + 1)]
        tokens = sum(len(ids) - 1 for ids in part)
        total = 0.0
        for ids in part:
            loss = model.loss(ids)
            (loss / tokens).backward()
            total += loss.item()
        if step == 0:
            save_file({n: p.grad.flatten()[::EVERY].contiguous() for n, p in trained.items()},
                      f"{a.out}/gradients.safetensors")
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), setup["clip_norm"]).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps.append({"loss": total / tokens, "grad_norm": norm})
    return steps


def main():
    a = arguments()
    os.makedirs(a.out, exist_ok=True)
    with open(f"{a.case}/expected.json") as f:
        setup = json.load(f)["setup"]
    setup["seq_len"], setup["lr"] = a.seq or setup["seq_len"], a.lr or setup["lr"]
    tokenizer = peer.load_tokenizer(a.case)
    documents, held_out = [
        [peer.encode(tokenizer, row, setup["seq_len"]) for row in peer.read_rows(f"{a.case}/{name}.jsonl")]
        for name in ("train", "eval")]
    model = Model(a, setup)
    if model.inputs:
        model.calibrate(documents[:a.calibration])
    expected = {"eval_start": {"loss": model.held_out(held_out)}}
    expected["steps"] = train(a, setup, model, documents)
    expected["eval_end"] = {"loss": model.held_out(held_out)}
    expected["setup"] = setup
    narrow = "true" if a.format.startswith("int") or a.activations == "int8" else "false"
    expected["quant"] = dict(weights=a.format, narrow=narrow, mode=a.mode, targets=a.targets, amax=a.amax)
    if a.activations != "none":
        expected["quant"].update(activations=a.activations, calibration=str(a.calibration))
    with open(f"{a.out}/expected.json", "w") as f:
        json.dump(expected, f, indent=1)
        f.write("\n")
    print(json.dumps({k: expected[k] for k in ("eval_start", "eval_end")}))


if __name__ == "__main__":
    main()
