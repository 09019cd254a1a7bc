"""peers_step.py - one peer of peers.py: loads a checkpoint of the gpt-oss family, adds LoRA to attention and all
experts, and times training steps.

  python peers_step.py PEER CHECKPOINT --shapes 4x2048,... --layers 4,8 --steps 5 --rank 16 --device cuda
                        --limit 60 [--first] [--compile]

Prints {"shape", "layers", "ms", "allocator", "card", "note"} for each measurement, {"problem"} for each failure, as
soon as it is known, so that a process that is killed has printed its measurements. All peers train with gradient
checkpointing, their fastest back ends, fused AdamW in PyTorch, and the same random tokens.

The larger model is measured first: its first shape, then other shapes while less than 0.6 of --limit has passed. The
smaller model follows in the same shapes. --compile runs one step of each shape and prints no measurements: its compiled
kernels stay in the caches of Triton and PyTorch for a later process.
"""
import argparse
import contextlib
import gc
import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import types

WARM_UP, TRIAL, LR = 3, 2, 1e-4
BEGAN = time.monotonic()
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=LOADERS)
    parser.add_argument("checkpoint")
    parser.add_argument("--shapes", type=lambda text: [tuple(map(int, s.split("x"))) for s in text.split(",")])
    parser.add_argument("--layers", type=lambda text: sorted(map(int, text.split(","))))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--device")
    parser.add_argument("--limit", type=float, help="after 0.6 of it, the larger model is measured no further")
    parser.add_argument("--first", action="store_true", help="no trial of back ends: the first")
    parser.add_argument("--compile", action="store_true", help="one step of each shape, for the compile caches alone")
    return parser.parse_args()


# ---- loading: (model with adapters, back ends); a back end is a name and a function that selects it


def transformers_model(a, experts):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        a.checkpoint, dtype=torch.bfloat16 if a.device == "cuda" else torch.float32, experts_implementation=experts,
        attn_implementation="eager", device_map=a.device)
    model = get_peft_model(model, LoraConfig(r=a.rank, lora_alpha=2 * a.rank, target_modules=ATTENTION,
                                             target_parameters=EXPERTS))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model


def ways_of(a, model, all_experts):
    base = model.get_base_model()

    def choose(experts, attention):
        base.set_experts_implementation(experts)
        base.set_attn_implementation(attention)

    attentions = ("flex_attention", "eager") if a.device == "cuda" else ("eager",)
    pairs = [(all_experts[0], attention) for attention in attentions]
    pairs += [(experts, attentions[0]) for experts in all_experts[1:]]
    return [(f"{experts}, {attention}", lambda pair=(experts, attention): choose(*pair))
            for experts, attention in pairs]


def load_transformers(a):
    model = transformers_model(a, "grouped_mm")
    return model, ways_of(a, model, ("grouped_mm", "eager"))


def load_axolotl(a):
    """transformers + PEFT with axolotl's ScatterMoE-LoRA kernels as the implementation of the experts. Empty modules
    take the place of the packages that contain axolotl's kernel library, since these packages import all of axolotl."""
    spec = importlib.util.find_spec("axolotl")
    if not spec:
        raise ImportError("no module named axolotl")
    root = list(spec.submodule_search_locations)[0]
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.kernels", "axolotl.utils"):
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(root, *name.split(".")[1:])]
        sys.modules[name] = package
    kernels = importlib.import_module("axolotl.integrations.kernels.libs.scattermoe_lora.experts")
    kernels.register_scattermoe_experts()
    model = transformers_model(a, "scattermoe")
    return model, ways_of(a, model, ("scattermoe",))


def load_unsloth(a):
    from unsloth import FastLanguageModel  # before transformers, which it patches

    model, _ = FastLanguageModel.from_pretrained(
        a.checkpoint, max_seq_length=max(seq for _, seq in a.shapes), load_in_4bit=a.peer == "unsloth-4bit",
        load_in_16bit=a.peer == "unsloth-bf16")
    model = FastLanguageModel.get_peft_model(
        model, r=a.rank, lora_alpha=2 * a.rank, lora_dropout=0, bias="none", use_gradient_checkpointing="unsloth",
        target_modules=[*ATTENTION, "gate_proj", "up_proj", "down_proj"],
        target_parameters=EXPERTS if a.peer == "unsloth-bf16" else None)  # else it finds the experts
    return model, [("its own", lambda: None)]


LOADERS = {"transformers": load_transformers, "axolotl": load_axolotl, "unsloth-mxfp4": load_unsloth,
           "unsloth-4bit": load_unsloth, "unsloth-bf16": load_unsloth}
PACKAGES = {"transformers": ("transformers", "peft"), "axolotl": ("transformers", "peft"),
            "unsloth-mxfp4": ("unsloth",), "unsloth-4bit": ("unsloth", "bitsandbytes"), "unsloth-bf16": ("unsloth",)}


def versions(names):
    from importlib.metadata import PackageNotFoundError, version

    def of(name):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return name
    return ", ".join(map(of, names))


# ---- steps


def drop_layers(model, n):
    """Keeps the first n layers."""
    import torch

    inner = model.get_base_model().model
    inner.layers = torch.nn.ModuleList(list(inner.layers)[:n])
    for config in (inner.config, model.get_base_model().config):
        config.num_hidden_layers = n
        config.layer_types = config.layer_types[:n]
    gc.collect()


def card_bytes(a):
    """Memory in use on the GPU, by nvidia-smi where it runs, else by the driver's library."""
    import torch

    if a.device != "cuda":
        return None
    try:
        used = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], check=True,
                              capture_output=True, text=True, timeout=10).stdout
        return int(used.splitlines()[0]) << 20
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        free, total = torch.cuda.mem_get_info()
        return total - free


class Steps:
    """A model, its optimizer and the clock."""

    def __init__(self, a, model):
        import torch

        self.a, self.model, self.torch = a, model, torch
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=LR, fused=a.device == "cuda")
        self.vocab = model.get_base_model().config.vocab_size
        model.train()

    def wait(self):
        if self.a.device == "cuda":
            self.torch.cuda.synchronize()

    def tokens(self, shape):
        generator = self.torch.Generator().manual_seed(7)
        return self.torch.randint(0, self.vocab, shape, generator=generator).to(self.a.device)

    def one(self, x):
        self.wait()
        start = time.perf_counter()
        loss = self.model(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.wait()
        ms = 1e3 * (time.perf_counter() - start)
        if not math.isfinite(loss.item()):
            raise ValueError(f"loss {loss.item()}")
        return ms

    def measure(self, shape, n):
        """(median ms of n steps, the allocator's peak, memory of the card)"""
        x = self.tokens(shape)
        if self.a.device == "cuda":
            self.torch.cuda.empty_cache()
            self.torch.cuda.reset_peak_memory_stats()
        ms = [self.one(x) for _ in range(WARM_UP + n)][WARM_UP:]
        peak = self.torch.cuda.max_memory_allocated() if self.a.device == "cuda" else None
        return statistics.median(ms), peak, card_bytes(self.a)


def expected_adapters(config, r):
    """Parameters of the adapters of a layer."""
    d, f, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    return r * (2 * (d + q) + 2 * (d + kv) + config.num_local_experts * ((d + 2 * f) + (f + d)))


def frozen_bytes(model, n):
    """Bytes of the frozen weights per layer: shows whether the experts are in 4 bits."""
    layers = model.get_base_model().model.layers
    return sum(p.numel() * p.element_size() for p in layers.parameters() if not p.requires_grad) / n


@contextlib.contextmanager
def ends_after(seconds):
    """Raises TimeoutError in the body after so many seconds, as soon as Python code runs; None: no limit."""
    def stop(signum, frame):
        raise TimeoutError("no time")
    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def say(**values):
    print(json.dumps(values), flush=True)


def reason(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def fastest(steps, ways, shape):
    """Chooses the fastest back end and returns its name; prints why others failed."""
    times = {}
    for name, choose in ways:
        try:
            choose()
            times[name] = steps.measure(shape, TRIAL)[0]
            print(f"{name}: {times[name]:.1f} ms at {shape[0]} x {shape[1]}", flush=True)
        except Exception as error:  # whatever a back end raises: the others are tried
            say(problem=f"{name}: {reason(error)}")
            steps.optimizer.zero_grad(set_to_none=True)
    if not times:
        return None
    best = min(times, key=times.get)
    dict(ways)[best]()
    return best


def best_way(a, steps, ways):
    if len(ways) > 1 and not a.first:
        return fastest(steps, ways, a.shapes[0])
    ways[0][1]()
    return ways[0][0]


def check_adapters(a, model, steps, n):
    """Parameters of the adapters per layer, in millions; prints a problem if the number differs from that of the other
    peers."""
    have = sum(p.numel() for p in steps.trained) / n
    wanted = expected_adapters(model.get_base_model().config, a.rank)
    if have != wanted:
        say(problem=f"adapters of {have / 1e6:.2f} M parameters a layer, the others have {wanted / 1e6:.2f} M")
    return have / 1e6


def measure_all(a, model, ways):
    """Measures every shape with each number of layers, the largest first. A shape that failed is not tried with fewer
    layers."""
    best, left = None, list(a.shapes)
    for n in sorted(a.layers, reverse=True):
        if n < len(model.get_base_model().model.layers):
            drop_layers(model, n)
        steps = Steps(a, model)
        size = check_adapters(a, model, steps, n)
        best = best or best_way(a, steps, ways)
        if best is None:
            return
        note = (f"{versions(PACKAGES[a.peer])}: {best}; adapters of {size:.2f} M, weights of "
                f"{frozen_bytes(model, n) / 2**20:,.0f} MiB a layer")
        measured = []
        for shape in left:
            limited = measured and n > a.layers[0]
            try:
                with ends_after(0.6 * a.limit - (time.monotonic() - BEGAN) if limited else None):
                    ms, peak, card = steps.measure(shape, a.steps)
                say(shape=shape, layers=n, ms=ms, allocator=peak, card=card, note=note)
                measured.append(shape)
            except Exception as error:  # the smaller model is still measured in the other shapes
                say(problem=f"{n} layers, {shape[0]} x {shape[1]}: {reason(error)}")
                steps.optimizer.zero_grad(set_to_none=True)
        left = measured


def compile_all(a, model, ways):
    """Runs one step of each shape, with the smaller model and the first back end."""
    drop_layers(model, a.layers[0])
    ways[0][1]()
    steps = Steps(a, model)
    for shape in a.shapes:
        steps.one(steps.tokens(shape))


def main():
    a = arguments()
    try:
        model, ways = LOADERS[a.peer](a)
    except Exception as error:  # whatever a package raises while it is imported or loads: the peer is skipped
        say(problem=f"skipped: {reason(error)}")
        return
    (compile_all if a.compile else measure_all)(a, model, ways)


if __name__ == "__main__":
    main()
