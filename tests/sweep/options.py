"""options.py - every configuration key, by --set and in a file, at valid and at extreme values, and every option and
argument of every command at extreme values. With --set a valid value, and any other value that is accepted, must train
a step; a configuration file with the value is only parsed."""
import json
import os
import re

from runner import finite_metrics

LONG = "x" * 5000
# {fixture} stands for a file or folder made below.
VALUES = [
    "", " ", "0", "-0", "1", "-1", "2", "3.5", "007", "+5", "0x10", "1e2", "65536", "2147483647", "2147483648",
    "-2147483649", "4294967296", "9007199254740993", "9223372036854775807", "9223372036854775808",
    "-9223372036854775808",
    "1" + "0" * 300, "1e308", "1e309", "-1e308", "4.9e-324", "1e-400", "nan", "-nan", "inf", "-inf", "0.1.2", "1,5",
    "5 %", "true", "TRUE", "none", "auto", "null", ";", "# x", "a=b=c", ",,,,", "\"'`$(id)\\", "%s%n%x%99999d", "../..",
    "\\0\\x00%00",
    "\u00e9\U0001f600\u202e", "\udcff\udcfe", "\x1b[31m\x07", "{empty}", "{folder}", "{fifo}", "{zero}", LONG,
]
TEMPLATE = ("{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}{% generation %}"
            "{{ m.content + '<end>' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
            "{% if extra %}{{ 'x' }}{% endif %}")
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ROWS = {
    "chat": {"messages": CHAT},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "alpaca": {"instruction": "a", "output": "b"},
    "completion": {"prompt": "a", "completion": "b"},
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "labelled": {"prompt": "a", "completion": "b", "label": True},
    "tokens": {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
    "teacher": {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "topk_ids": [None, [2], [3]],
                "topk_logprobs": [None, [-0.5], [-0.5]]},
    "prompts": {"prompt": "a 1"},
}
# These may run for ever: they count steps, passes or tokens.
ENDLESS = {"train.steps", "train.epochs", "train.grad_accum", "--steps", "--tokens", "--repeats", "--seq",
           "--samples"}

# A short run of each command; {x} is a fixture.
COMMANDS = {
    "train": ["{config}"],
    "eval": ["{config}"],
    "generate": ["{config}", "--prompt", "a", "--base", "--tokens", "1"],
    "chat": ["{config}", "--base", "--set", "data.chat_template={template}"],
    "export": ["{config}", "--to", "peft", "--adapter", "{adapter}"],
    "plan": ["{config}"],
    "check": ["{config}"],
    "tokens": ["{config}"],
    "inspect": ["{model}"],
    "compare": ["{run}", "{run}"],
    "pairs": ["{prompts}", "{judged}", "--out", "pairs.jsonl"],
    "rewards": ["{config}", "{rollouts}", "--prompts", "{prompts}", "--set", "reward.a=exact"],
    "synth": ["gpt-oss-tiny", "made", "--layers", "1"],
    "bench step": ["--arch", "gpt-oss-tiny", "--layers", "1", "--tokens", "64", "--seq", "32", "--steps", "1"],
    "bench ops": ["--arch", "gpt-oss-tiny", "--layers", "1", "--tokens", "64", "--seq", "32", "--steps", "1"],
    "bench decode": ["--arch", "gpt-oss-tiny", "--layers", "1", "--tokens", "64", "--seq", "32", "--steps", "1"],
    "bench lora": ["--arch", "gpt-oss-tiny", "--tokens", "8", "--repeats", "1", "--rank", "8"],
    "bench dequant": ["--arch", "gpt-oss-tiny", "--tokens", "8", "--repeats", "1"],
    "config": [],
    "help": [],
    "version": [],
}
VERIFY = ["{config}", "--base", "--generate", "--tokens", "1", "--input", "{prompts}"]
# Arguments for options that need others, or exclude one of the arguments above.
INSTEAD = {
    ("generate", "--messages"): ["{config}", "--base", "--tokens", "1"],
    ("generate", "--adapter"): ["{config}", "--prompt", "a", "--tokens", "1"],
    ("generate", "--input"): ["{config}", "--base", "--tokens", "1", "--output", "answers.jsonl"],
    **{("generate", option): ["{config}", "--base", "--tokens", "1", "--input", "{prompts}", "--output",
                              "answers.jsonl"] for option in ("--format", "--samples", "--prompt-logprobs",
                                                               "--routing")},
    ("generate", "--output"): ["{config}", "--base", "--tokens", "1", "--input", "{prompts}"],
    ("chat", "--adapter"): ["{config}", "--set", "data.chat_template={template}"],
    **{("eval", option): [*VERIFY, "--verifier", "exact", "--reference", "prompt"]
       for option in ("--generate", "--ignore-case", "--output", "--samples", "--tokens", "--rows", "--temperature",
                      "--top-p", "--top-k", "--seed")},
    ("eval", "--verifier"): VERIFY,
    ("eval", "--pattern"): [*VERIFY, "--verifier", "regex"],
    ("eval", "--tolerance"): [*VERIFY, "--verifier", "last_number", "--reference", "prompt"],
    ("eval", "--input"): ["{config}", "--base", "--generate", "--tokens", "1", "--verifier", "exact"],
    ("eval", "--reference"): [*VERIFY, "--verifier", "exact"],
    ("tokens", "--tokenizer"): ["--json"],
    ("tokens", "--checkpoint"): ["--messages", "{messages}", "--json"],
    ("tokens", "--messages"): ["--checkpoint", "{model}", "--json"],
    ("tokens", "--template"): ["--checkpoint", "{model}", "--messages", "{messages}", "--json"],
}

# Settings that valid values of a section's keys or of one key need.
NEEDS = {
    "distill": ["distill.teacher=base"],
    "objective": ["objective.kind=dpo", "data.train={pairs}"],
    "quant": ["quant.weights=mxfp4"],
    "parallel": ["parallel.cpu_ranks=2", "train.grad_accum=2"],
    "eval": ["eval.every=1"],
    "model.revision": ["model.path={model}"],
    "model.quantize": ["model.path={bf16}"],
    "model.quantize_attention": ["model.path={bf16}", "model.quantize=nf4"],
    "data.eval": ["data.eval_split=0"],
    "lora.dora": ["lora.targets=q_proj"],
    "data.eval_format": ["data.eval_split=0", "data.eval={rows}", "data.seq_len=256"],
    "data.eval_columns": ["data.eval_split=0", "data.eval={rows}"],
    "data.format": ["data.seq_len=256"],
    "train.epochs": ["train.steps=0"],
    "optim.warmup_steps": ["train.steps=2"],
    "eval.prompts": ["eval.prompt_tokens=2"],
}
# Only online RL reads these keys; with other objectives only their defaults are valid.
ONLINE_RL = {
    "num_generations": "8", "num_iterations": "1", "steps_per_generation": "1", "max_completion_length": "512",
    "temperature": "1", "epsilon": "auto", "epsilon_high": "auto", "delta": "0", "kl": "auto", "scale_rewards": "auto",
    "is_mode": "auto", "is_cap": "3", "is_floor": "0", "old": "trainer", "mask_truncated": "false",
    "top_entropy_quantile": "1", "entropy_coef": "0",
}
KTO_WEIGHTS = [("2", "objective.kind=kto", "data.train={labelled}")]
# Valid values of the keys that are text, and of others for which type and range do not say enough. A tuple also has the
# settings that the value needs.
VALID = {
    "model.path": ["{model}", "{bf16}"],
    "model.revision": ["main", "v1.0"],
    "data.train": ["{rows}", "{rows}*0.5", "{rows},{rows}"],
    "data.eval": ["{rows}"],
    "data.columns": ["text=text"],
    "data.eval_columns": ["same", "text=text"],
    "data.eval_format": ["same", "auto", "text", ("messages", "data.eval={chat}"), ("tokens", "data.eval={tokens}")],
    "data.format": ["auto", "text", ("messages", "data.train={chat}"), ("tokens", "data.train={tokens}"),
                    ("sharegpt", "data.train={sharegpt}"), ("alpaca", "data.train={alpaca}"),
                    ("preference", "objective.kind=dpo", "data.train={pairs}"),
                    ("prompt_completion", "data.train={completion}")],
    "data.loss_on": ["assistant", "last", "all"],
    "data.chat_template": [("{template}", "data.train={chat}")],
    "data.chat_kwargs": [('{"extra": true}', "data.train={chat}", "data.chat_template={template}")],
    "data.chat_date": ["2025-06-28", "2024-02-29"],
    "data.system": [("Be brief.", "data.train={chat}", "data.seq_len=256")],
    "data.max_samples": ["0", "8"],
    "lora.targets": ["attention,experts", "q_proj", "attention", "all-linear"],
    "lora.rank_pattern": ["experts=1,q_proj=3"],
    "lora.alpha_pattern": ["experts=1,q_proj=3.5"],
    "lora.r_budget": ["0.25", ("0.5", "lora.r_by=routing")],
    "lora.layers": ["all", "0", "0-0"],
    "lora.init_from": ["{adapter}"],
    "objective.kind": ["sft", *((kind, "data.train={pairs}") for kind in ("dpo", "ipo", "simpo", "orpo")),
                       ("kto", "data.train={labelled}")],
    "objective.reference": ["base", ("initial", "lora.init_from={adapter}")],
    "objective.label_smoothing": ["0", "0.2"],
    "eval.best": ["loss", ("accuracy", "objective.kind=dpo", "data.train={pairs}")],
    "objective.orpo_nll": ["all", ("completion", "objective.kind=orpo")],
    "objective.desirable_weight": ["1", *KTO_WEIGHTS],
    "objective.undesirable_weight": ["1", *KTO_WEIGHTS],
    **{f"objective.{key}": [value] for key, value in ONLINE_RL.items()},
    "objective.gamma": ["0.5", ("1", "objective.kind=simpo")],
    "distill.teacher": ["none", "base", "adapter:{adapter}", ("rows", "data.train={teacher}", "data.format=tokens")],
    "quant.start": ["0", ("1", "train.steps=2")],
    "quant.activations": ["none", *((v, "quant.weights=" + w) for v, w in
                                    (("fp8", "fp8"), ("int8", "int8"), ("nvfp4", "nvfp4")))],
    "quant.narrow": ["false", ("true", "quant.weights=int8")],
    "train.device": ["auto", "cpu"],
    "train.dtype": ["auto", "fp32"],
    "train.expert_dtype": ["bf16", "fp8", "fp8-backward"],
    "train.epochs": ["1", "0.5"],
    "train.resume": ["auto", "never", ("{run}/checkpoints/step-000001", "train.steps=2")],
    "train.profile": ["1:1"],
    "train.decoded_layers": ["-1"],
    "parallel.gpus": ["1"],
    "parallel.ep": ["1", "2"],
    "eval.prompts": ["{prompts}"],
    "log.command": ["cat > lines", "exit 3"],
    "reward.NAME": ["right=last_number", "right=exact ignore_case=true"],
    "environment.command": ["cat", "python3 -c pass"],
    "log.name": ["a run", "r&d"],
    "output.dir": ["elsewhere", "a b/c"],
}


def table_of(s):
    """{key: (type, default, range)} of `moetrain config`."""
    table = s.run(["config", "--markdown"], s.root).out.decode()
    rows = re.findall(r"^\| `([a-z_]+\.[A-Za-z0-9_]+)` \| (\w+) \| `?(.*?)`? \| (.*?) \| ", table, re.M)
    return {key: (kind, default, limits.replace("\\|", "|")) for key, kind, default, limits in rows}


def valid_values(key, kind, default, limits):
    """(value, settings) that the key must accept: the rows of VALID, or what the type and range say."""
    if key in VALID:
        return [(v, []) if isinstance(v, str) else (v[0], list(v[1:])) for v in VALID[key]]
    if kind in ("enum", "bool"):
        return [(v, []) for v in limits.split("|")]
    if kind == "text":
        return []
    limits = limits.removeprefix("auto|")  # auto is the default of these
    low, high = (float(v) for v in limits[1:-1].split(","))
    between = (low + high) / 2 if kind == "real" and high <= 10 else low + 1
    numbers = [f"{v:g}" for v in ([low] if limits[0] == "[" else []) + [min(between, high)]]
    return [(v, []) for v in dict.fromkeys([*numbers, default])]


def valid_cases(s):
    table = table_of(s)
    for key in VALID:
        if key not in table:
            raise RuntimeError(f"{key} of VALID is not a key of `moetrain config`")
    for key, row in table.items():
        values = valid_values(key, *row)
        if not values:
            raise RuntimeError(f"{key}: add its valid values to VALID")
        needs = NEEDS.get(key.split(".")[0], []) + NEEDS.get(key, [])
        for value, more in values:
            yield ("valid", key, value, tuple(needs + more))


def options_of(s):
    """(command, option or None for an argument), read from --help, so that new options are included."""
    found = []
    for command in COMMANDS:
        text = s.run([*command.split(), "--help"], s.root).out.decode()
        names = re.findall(r"^  (--[a-z-]+|[A-Z][A-Za-z0-9.]*)(?: ([A-Za-z.,=]+))?(?:  |$)", text, re.M)
        found += [(command, name) for name, value in names
                  if name != "--help" and name != "--set" and (value or not name.startswith("--"))]
    return found


class Fixtures:
    def __init__(self, s):
        s.synth("gpt-oss-tiny", "model")
        s.synth("qwen3-tiny", "bf16")
        self.words = {"adapter": s.path("run", "adapter"), "messages": s.path("messages.json")}
        for name in ("model", "bf16", "folder", "empty", "fifo", "zero", "run"):
            self.words[name] = s.path(name)
        for name, row in ROWS.items():
            self.words[name] = s.path(name + ".jsonl")
            with open(self.words[name], "w") as f:
                f.write(4 * (json.dumps(row) + "\n"))
        self.words["judged"] = s.path("judged.jsonl")
        with open(self.words["judged"], "w") as f:
            f.writelines(json.dumps({"id": 0, "reward": reward, "text": "a"}) + "\n" for reward in (0, 1))
        self.words["rollouts"] = s.path("rollouts.jsonl")
        with open(self.words["rollouts"], "w") as f:
            f.write(json.dumps({"prompt_ids": [1], "completion_ids": [2], "text": "a"}) + "\n")
        self.words["template"] = s.path("template.jinja")
        with open(s.path("template.jinja"), "w") as f:
            f.write(TEMPLATE)
        os.mkdir(s.path("folder"))
        open(s.path("empty"), "w").close()
        os.mkfifo(s.path("fifo"))
        os.symlink("/dev/zero", s.path("zero"))  # run as root, a program that replaces files would replace the device
        with open(s.path("messages.json"), "w") as f:
            f.write('[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]')
        sections = {
            "model": {"path": s.path("model")},
            "data": {"train": s.write_rows(), "eval_split": "0.25", "seq_len": "32"},
            "lora": {"r": "2", "targets": "q_proj,experts"},
            "train": {"device": "cpu", "threads": "1", "steps": "1", "memory_gb": "1"},
            "output": {"dir": "out/deep/run"},
        }
        self.sections = sections
        self.words["rows"] = sections["data"]["train"]
        self.words["config"] = s.write_config("base.ini", **sections)
        r = s.run(["base.ini", "--set", f"output.dir={s.path('run')}"], s.root)
        if r.code:
            raise RuntimeError(r.err)

    def put(self, text):
        return re.sub(r"\{(\w+)\}", lambda m: self.words.get(m.group(1), m.group(0)), text)

    def file_with(self, folder, key, value):
        """The base configuration with one changed value, as bytes."""
        section, name = key.split(".")
        all_keys = {s: dict(keys) for s, keys in self.sections.items()}
        all_keys.setdefault(section, {})[name] = value
        with open(os.path.join(folder, "case.ini"), "w", encoding="utf-8", errors="surrogateescape") as f:
            for s, keys in all_keys.items():
                f.write(f"[{s}]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items()))
        return ["case.ini"]


def needs_more(key):
    """Settings that make moetrain read an extreme value."""
    return {"data.eval": ["data.eval_split=0"], "eval.every": [], "train.epochs": ["train.steps=0"],
            "optim.warmup_steps": ["train.steps=0", "train.epochs=0.1"],
            "model.quantize_attention": ["model.quantize=nf4"]}.get(key, [])


def sweep(s):
    fix = Fixtures(s)
    cases = list(valid_cases(s))
    cases += [(way, key, v) for key in table_of(s) for v in VALUES for way in ("--set", "file")]
    cases += [(command, option, v) for command, option in options_of(s) for v in VALUES]

    def judge_all(case, r, names, folder):
        stop = case[1] in ENDLESS
        wrong = s.judge(r, names, stop, codes=(0,) if case[0] == "valid" else (0, 1, 2))
        metrics = os.path.join(folder, "a", "b", "out", "deep", "run", "metrics.jsonl")
        if not wrong and r.code == 0 and os.path.exists(metrics) and not finite_metrics(metrics):
            wrong = "a loss is not finite"
        s.add(" ".join(f"{w!a:.40}" if i == 2 else w for i, w in enumerate(case[:3])), r, wrong)

    def do(case, folder):
        way, name, value = case[:3]
        value = fix.put(value)
        inner = os.path.join(folder, "a", "b")  # ../.. stays in the scratch folder
        os.makedirs(inner)
        printed = re.sub("[^ -~]", "?", value)  # errors show control characters as ?
        names = [name, value[:30], value.split(",")[0], printed[:20], re.sub(r"\?+", "??", printed)]
        timeout = 10 if name in ENDLESS else None
        names += ["train.grad_accum"] if name.startswith("parallel.") else []  # micro-batches are shared by the ranks
        if way == "valid":
            words = [fix.words["config"]]
            for setting in (*case[3], f"{name}={value}"):
                words += ["--set", fix.put(setting)]
        elif way in ("--set", "file"):
            words = [fix.words["config"]] if way == "--set" else fix.file_with(inner, name, value)
            for more in needs_more(name):
                words += ["--set", more]
            words += ["--set", f"{name}={value}"] if way == "--set" else ["--dump-config"]
            names += [name.split(".")[1], "case.ini:", "model.quantize" if name.startswith("model.quantize") else ""]
        else:
            base = INSTEAD.get((way, name), COMMANDS[way])
            words = [fix.put(w) for w in base]
            if name in words:
                at = words.index(name)
                del words[at:at + 2]
            if name.startswith("--"):
                words += [name, value]
            else:  # an argument: its words stand first
                at = {"CONFIG.ini": 0, "PATH": 0, "RUN": 0, "ARCH": 0, "DIR": 1}.get(name, len(words))
                words[at:at + 1] = [value]
            words = [*way.split(), *words]
            names.append("--" if value.startswith("--") else way)
            # An empty file has no model.path; the plan rejects too many tokens or too little memory.
            names.append({"CONFIG.ini": "model.path", "--tokens": "train.memory_gb", "--prompt": "UTF-8"}.get(name, ""))
        judge_all(case, s.run(words, inner, timeout=timeout), names, folder)

    return s.all(cases, do)
