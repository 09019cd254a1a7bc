"""files.py - hostile versions of every file that the program reads, through each command that reads it."""
import gzip
import json
import os
import random
import re
import shutil
import struct
import zlib

from mutate import SPECIAL, hostile, special
from runner import finite_metrics

HERE = os.path.dirname(os.path.abspath(__file__))
CORPUS = os.path.join(os.path.dirname(HERE), "fuzz", "corpus")
EACH = 60  # hostile versions of a file, besides the special files
TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
            "{% if m.role == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
            "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}")
CONVERSATION = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]

TRAIN, PLAN, TOKENS = ["case.ini"], ["plan", "case.ini"], ["tokens", "case.ini"]
EVAL = ["eval", "case.ini", "--adapter", "run/adapter"]
GENERATE = ["generate", "case.ini", "--prompt", "a", "--tokens", "1", "--adapter", "run/adapter"]
MERGE = ["export", "case.ini", "--to", "merged-bf16", "--adapter", "run/adapter", "--out", "made"]
EXPORT = ["export", "case.ini", "--to", "peft", "--adapter", "run/adapter", "--out", "made"]
NF4 = TRAIN + ["--set", "model.path=nf4"]
SHARDED = TRAIN + ["--set", "model.path=sharded"]
PACKED = TRAIN + ["--set", "model.path=packed", "--set", "model.quantize=nf4"]
RENDER = ["tokens", "--checkpoint", "model", "--messages", "messages.json", "--json"]
INIT = ["case.ini", "--set", "lora.init_from=run/adapter"]
RESUME = ["case.ini", "--set", "output.dir=run", "--set", "train.steps=2"]
VERIFY = ["export", "case.ini", "--to", "merged-bf16", "--adapter", "run/adapter", "--verify", "merged"]
CHAT = ["--set", "data.train=chat.jsonl", "--set", "data.format=messages", "--set", "data.seq_len=1024"]
COMPARE = ["compare", "run", "run2", "--html", "page.html"]
WEIGHTS = ["model", "nf4", "sharded", "checkpoint", "finite", "verification"]
STEP = "run/checkpoints/step-000001/"

# file, kind (of mutate.py), commands that read it, words (an error contains the file's name or one of these)
TARGETS = [
    ("model/config.json", "json", [PLAN, TRAIN, ["inspect", "model"], MERGE], WEIGHTS),
    ("model/model.safetensors", "safetensors", [TRAIN, ["inspect", "model"], PLAN, MERGE], WEIGHTS),
    ("model/tokenizer.json", "json", [TOKENS, TRAIN, GENERATE], ["tokenizer"]),
    ("model/tokenizer_config.json", "json", [TOKENS + CHAT, TRAIN + CHAT, MERGE], ["tokenizer"]),
    ("model/generation_config.json", "json", [GENERATE, MERGE], []),
    ("nf4/model.safetensors", "safetensors", [NF4, ["inspect", "nf4"]], WEIGHTS),
    ("nf4/config.json", "json", [NF4], WEIGHTS),
    ("sharded/model.safetensors.index.json", "json", [["inspect", "sharded"], SHARDED], WEIGHTS),
    ("sharded/model-00002-of-00002.safetensors", "safetensors", [SHARDED], WEIGHTS),
    ("packed/moetrain-cache/", "bytes", [PACKED], ["packed"]),
    ("rows.jsonl", "lines", [TOKENS, TRAIN], []),
    ("chat.jsonl", "lines", [TOKENS + CHAT, TRAIN + CHAT], []),
    ("rows.jsonl.gz", "gzip", [TRAIN + ["--set", "data.train=rows.jsonl.gz"]], []),
    ("run/cache/", "bytes", [RESUME], ["cache"]),
    ("template.jinja", "text", [TOKENS + CHAT + ["--set", "data.chat_template=template.jinja"],
                                RENDER + ["--template", "template.jinja"]], ["template", "chat.jsonl"]),
    ("messages.json", "json", [["generate", "case.ini", "--messages", "messages.json", "--base", "--tokens", "1"],
                               RENDER], ["messages"]),
    ("prompts.jsonl", "lines", [["generate", "case.ini", "--input", "prompts.jsonl", "--output", "answers.jsonl",
                                 "--base", "--tokens", "1"],
                                ["eval", "case.ini", "--base", "--generate", "--verifier", "exact", "--tokens", "1",
                                 "--input", "prompts.jsonl"]], ["answers"]),
    ("rollouts.jsonl", "lines", [["rewards", "case.ini", "rollouts.jsonl", "--prompts", "asked.jsonl", "--output",
                                  "scored.jsonl"]], ["scored"]),
    ("asked.jsonl", "lines", [["rewards", "case.ini", "rollouts.jsonl", "--prompts", "asked.jsonl"]], []),
    ("case.ini", "text", [PLAN, TRAIN], ["model", "data", "train", "lora", "optim", "output", "log", "parallel"]),
    ("run/adapter/adapter_config.json", "json", [EVAL, EXPORT, INIT, ["inspect", "run/adapter"], GENERATE],
     ["adapter"]),
    ("run/adapter/adapter_model.safetensors", "safetensors", [EVAL, EXPORT, INIT, ["inspect", "run/adapter"]],
     ["adapter", "finite"]),
    (STEP + "state.json", "json", [RESUME], ["checkpoints"]),
    (STEP + "optimizer.safetensors", "safetensors", [RESUME], ["checkpoints"]),
    (STEP + "manifest.json", "json", [RESUME], ["checkpoints"]),
    (STEP + "adapter/adapter_model.safetensors", "safetensors", [RESUME], ["checkpoints"]),
    ("run/metrics.jsonl", "lines", [COMPARE, RESUME], ["run"]),
    ("run/config.ini", "text", [COMPARE], ["run"]),
    ("run/.lock", "bytes", [RESUME], ["run"]),
    ("merged/model.safetensors", "safetensors", [VERIFY], ["merged", "checkpoint"]),
    ("merged/config.json", "json", [VERIFY], ["merged", "checkpoint"]),
]
FROM_CORPUS = {"model/model.safetensors": "safetensors", "rows.jsonl": "jsonl", "case.ini": "ini",
               "template.jinja": "jinja", "messages.json": "chat", "model/tokenizer.json": "tokenizer",
               "model/config.json": "json"}


def split_model(folder):
    """One safetensors file becomes two and an index."""
    path = os.path.join(folder, "model.safetensors")
    with open(path, "rb") as f:
        data = f.read()
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8:8 + size]), data[8 + size:]
    names = [n for n in header if n != "__metadata__"]
    where = {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        shard, pieces, used = f"model-0000{i}-of-00002.safetensors", [], 0
        new = {"__metadata__": {"format": "pt"}}
        for n in part:
            a, b = header[n]["data_offsets"]
            new[n] = dict(header[n], data_offsets=[used, used + b - a])
            pieces.append(body[a:b])
            used += b - a
            where[n] = shard
        text = json.dumps(new).encode()
        with open(os.path.join(folder, shard), "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text + b"".join(pieces))
    os.remove(path)
    with open(path + ".index.json", "w") as f:
        json.dump({"metadata": {"total_size": len(body)}, "weight_map": where}, f)


def make_fixtures(s):
    """A folder with every file of TARGETS, in which every command of it succeeds."""
    home = s.path("home")
    os.mkdir(home)
    s.synth("gpt-oss-tiny", "home/model")
    s.synth("qwen3-tiny", "home/nf4", "--quant", "nf4")
    s.synth("qwen3-tiny", "home/packed")
    shutil.copytree(s.path("home", "model"), s.path("home", "sharded"))
    split_model(s.path("home", "sharded"))
    rows = s.write_rows("home/rows.jsonl", 6)
    with open(rows, "rb") as f, open(rows + ".gz", "wb") as z:
        z.write(gzip.compress(f.read(), mtime=0))
    with open(s.path("home", "chat.jsonl"), "w") as f:
        f.write(6 * (json.dumps({"messages": CONVERSATION}) + "\n"))
    with open(s.path("home", "messages.json"), "w") as f:
        json.dump({"messages": CONVERSATION, "tools": []}, f)
    with open(s.path("home", "prompts.jsonl"), "w") as f:
        f.write(json.dumps({"prompt": "a", "id": "b", "n": 2, "temperature": 0.5, "top_p": 0.9, "seed": 3,
                            "stop": ["x"], "top_logprobs": 2, "repetition_penalty": 1.1}) + "\n")
        f.write(json.dumps({"prompt_ids": [1, 2], "max_tokens": 1, "prompt_logprobs": True}) + "\n")
    with open(s.path("home", "rollouts.jsonl"), "w") as f:
        for i in range(3):
            f.write(json.dumps({"prompt_ids": [1, 2], "completion_ids": [3, 4], "reward": None, "group": i // 2,
                                "text": "a 7", "finish_reason": "stop", "columns": {"answer": 7}}) + "\n")
    with open(s.path("home", "asked.jsonl"), "w") as f:
        f.write(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
        f.write(json.dumps({"prompt": "c", "answer": ["d", 1.5, None]}) + "\n")
    with open(s.path("home", "template.jinja"), "w") as f:
        f.write(TEMPLATE)
    with open(s.path("home", "model", "generation_config.json"), "w") as f:
        json.dump({"eos_token_id": [962, 961], "temperature": 1.0, "do_sample": True}, f)
    s.write_config("home/case.ini", model={"path": "model"},
                   data={"train": "rows.jsonl", "eval_split": "0.4", "seq_len": "32"},
                   lora={"r": "2", "targets": "q_proj,experts"}, optim={"lr": "1e-3"},
                   train={"device": "cpu", "threads": "1", "steps": "1", "memory_gb": "1"}, output={"dir": "out"},
                   reward={"right": "last_number", "form": "regex pattern=a", "same": "json", "short": "length max=2 "
                           "cache=1"})
    verify_merged = [w if w != "made" else "merged" for w in MERGE]
    for words in (TRAIN + ["--set", "output.dir=run"], TRAIN + ["--set", "output.dir=run2"], verify_merged,
                  PACKED):
        r = s.run(words, home)
        if r.code:
            raise RuntimeError(f"{words}: {r.err}")
    shutil.rmtree(s.path("home", "out"))
    return home


def target_file(home, name):
    """A name that ends in / stands for the largest file below it."""
    if not name.endswith("/"):
        return name
    found = [os.path.join(at, n) for at, _, names in os.walk(os.path.join(home, name)) for n in names]
    return os.path.relpath(max(found, key=os.path.getsize), home)


def link_tree(source, to):
    """Copies folders and small files and links large ones, so that a command cannot change the originals."""
    for at, _, names in os.walk(source):
        folder = os.path.join(to, os.path.relpath(at, source))
        os.makedirs(folder, exist_ok=True)
        for n in names:
            path = os.path.join(at, n)
            (os.symlink if os.path.getsize(path) > 100000 else shutil.copyfile)(path, os.path.join(folder, n))


def renew_manifest(step):
    """Writes the manifest of the changed files, so that the command reads them."""
    path = os.path.join(step, "manifest.json")
    with open(path) as f:
        text = f.read()
    for name in re.findall(r'"(.*)": \{"size"', text):
        try:
            with open(os.path.join(step, name), "rb") as f:
                data = f.read()
        except OSError:
            return
        text = re.sub(re.escape(f'"{name}": ') + r"\{.*?\}",
                      f'"{name}": {{"size": {len(data)}, "crc32": "{zlib.crc32(data):08x}"}}', text)
    with open(path, "w") as f:
        f.write(text)


def cases_of(name, kind, commands):
    cases = [(name, kind, "unchanged", words) for words in commands]
    cases += [(name, kind, how, commands[i % len(commands)]) for i, how in enumerate(SPECIAL)]
    cases += [(name, kind, i, commands[i % len(commands)]) for i in range(EACH)]
    folder = os.path.join(CORPUS, FROM_CORPUS[name]) if name in FROM_CORPUS else None
    for i, n in enumerate(sorted(os.listdir(folder)) if folder else ()):
        cases.append((name, kind, os.path.join(folder, n), commands[i % len(commands)]))
    return cases


def sweep(s):
    home = make_fixtures(s)
    cases = [c for name, kind, commands, _ in TARGETS for c in cases_of(name, kind, commands)]
    also = {name: words for name, _, _, words in TARGETS}

    def do(case, folder):
        name, kind, how, words = case
        file = target_file(home, name)
        link_tree(home, folder)
        path = os.path.join(folder, file)
        with open(path, "rb") as f:
            data = f.read()
        if how != "unchanged":
            os.remove(path)
        if isinstance(how, int):
            with open(path, "wb") as f:
                f.write(hostile(kind, f"{name} {how}", data))
            if "checkpoints" in name and not name.endswith("manifest.json") and how % 4:
                renew_manifest(os.path.join(folder, STEP))
        elif os.path.isabs(how):
            shutil.copyfile(how, path)
        elif how != "unchanged":
            special(how, path)
        stop = how == "sparse" and kind in ("lines", "gzip")  # moetrain reads a terabyte of rows to its end
        r = s.run(words, folder, timeout=10 if stop else None)
        wrong = s.judge(r, [os.path.basename(file), *also[name]], stop, (0,) if how == "unchanged" else (0, 1))
        metrics = os.path.join(folder, "out", "metrics.jsonl")
        if not wrong and r.code == 0 and os.path.exists(metrics) and not finite_metrics(metrics):
            wrong = "a loss is not finite"
        s.add(f"{name} {os.path.basename(str(how))}: {' '.join(words)}", r, wrong)

    return s.all(cases, do)
