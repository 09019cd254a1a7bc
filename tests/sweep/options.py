"""options.py - every configuration key, by --set and in a file, and every option and argument of every command, at
extreme values. With an accepted value the run trains a step; values from a file are only read."""
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
# These may run for ever: they count steps, passes or tokens.
ENDLESS = {"train.steps", "train.epochs", "train.grad_accum", "--steps", "--tokens", "--repeats", "--seq"}

# A short run of each command; {x} is a fixture.
COMMANDS = {
    "train": ["{config}"],
    "eval": ["{config}"],
    "generate": ["{config}", "--prompt", "a", "--base", "--tokens", "1"],
    "export": ["{config}", "--to", "peft", "--adapter", "{adapter}"],
    "plan": ["{config}"],
    "check": ["{config}"],
    "tokens": ["{config}"],
    "inspect": ["{model}"],
    "compare": ["{run}", "{run}"],
    "synth": ["gpt-oss-tiny", "made", "--layers", "1"],
    "bench step": ["--arch", "gpt-oss-tiny", "--layers", "1", "--tokens", "64", "--seq", "32", "--steps", "1"],
    "bench ops": ["--arch", "gpt-oss-tiny", "--layers", "1", "--tokens", "64", "--seq", "32", "--steps", "1"],
    "bench lora": ["--arch", "gpt-oss-tiny", "--tokens", "8", "--repeats", "1", "--rank", "8"],
    "bench dequant": ["--arch", "gpt-oss-tiny", "--tokens", "8", "--repeats", "1"],
    "config": [],
    "help": [],
    "version": [],
}
# An option that needs others, or excludes one of those above.
INSTEAD = {
    ("generate", "--messages"): ["{config}", "--base", "--tokens", "1"],
    ("generate", "--adapter"): ["{config}", "--prompt", "a", "--tokens", "1"],
    ("tokens", "--tokenizer"): ["--json"],
    ("tokens", "--checkpoint"): ["--messages", "{messages}", "--json"],
    ("tokens", "--messages"): ["--checkpoint", "{model}", "--json"],
    ("tokens", "--template"): ["--checkpoint", "{model}", "--messages", "{messages}", "--json"],
}


def keys_of(s):
    table = s.run(["config", "--markdown"], s.root).out.decode()
    return re.findall(r"^\| `([a-z_]+\.[a-z0-9_]+)` \|", table, re.M)


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
        self.words = {"model": s.path("model"), "folder": s.path("folder"), "empty": s.path("empty"),
                      "fifo": s.path("fifo"), "zero": s.path("zero"), "run": s.path("run"),
                      "adapter": s.path("run", "adapter"),
                      "messages": s.path("messages.json")}
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
    """Settings that make moetrain read the value."""
    return {"data.eval": ["data.eval_split=0"], "eval.every": [], "train.epochs": ["train.steps=0"],
            "optim.warmup_steps": ["train.steps=0", "train.epochs=0.1"],
            "model.quantize_attention": ["model.quantize=nf4"]}.get(key, [])


def sweep(s):
    fix = Fixtures(s)
    cases = [(way, key, v) for key in keys_of(s) for v in VALUES for way in ("--set", "file")]
    cases += [(command, option, v) for command, option in options_of(s) for v in VALUES]

    def judge_all(case, r, names, folder):
        stop = case[1] in ENDLESS
        wrong = s.judge(r, names, stop)
        metrics = os.path.join(folder, "a", "b", "out", "deep", "run", "metrics.jsonl")
        if not wrong and r.code == 0 and os.path.exists(metrics) and not finite_metrics(metrics):
            wrong = "a loss is not finite"
        s.add(" ".join(f"{w!a:.40}" if i == 2 else w for i, w in enumerate(case)), r, wrong)

    def do(case, folder):
        way, name, value = case
        value = fix.put(value)
        inner = os.path.join(folder, "a", "b")  # ../.. stays in the scratch folder
        os.makedirs(inner)
        printed = re.sub("[^ -~]", "?", value)  # errors show control characters as ?
        names = [name, value[:30], value.split(",")[0], printed[:20], re.sub(r"\?+", "??", printed)]
        timeout = 10 if name in ENDLESS else None
        names += ["train.grad_accum"] if name.startswith("parallel.") else []  # micro-batches are shared by the ranks
        if way in ("--set", "file"):
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
