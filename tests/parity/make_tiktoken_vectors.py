#!/usr/bin/env python3
"""make_tiktoken_vectors.py - encodes texts with tiktoken and Kimi's pattern, for tests/data/test_tiktoken.c.

Writes tests/fixtures/tokenizer/tiktoken: a random vocabulary, its tokenizer_config.json, texts and ids. Prints the
number of ids and a sum for the long texts of the test. Needs `pip install tiktoken`.

    python tests/parity/make_tiktoken_vectors.py
"""
import base64
import itertools
import json
import random
import re
from pathlib import Path

import tiktoken

OUT = Path(__file__).resolve().parents[2] / "tests/fixtures/tokenizer/tiktoken"
LEAD, WORD = r"[^\r\n\p{L}\p{N}]?", r"[\p{%s}\p{%s}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
UPPER, LOWER, SHORT = WORD % ("Lu", "Lt"), WORD % ("Ll", "Ll"), "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join([r"[\p{Han}]+", LEAD + UPPER + "*" + LOWER + "+" + SHORT, LEAD + UPPER + "+" + LOWER + "*" + SHORT,
                    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
CORPUS = ("The quick brown fox's tail 1234 jumps,\n\n  over the lazy dog. 日本語 テスト 汉字 éè Ünïcode "
          "don't WON'T   \t end\r\n ").encode() * 3
WORDS = ["The", "quick", " brown", "'s", "'LL", " ", "  ", "\n", "\r\n", "\t", "日本", "テスト", "汉", "é", "Ü", "123", "4",
         ",", ".", "!!", "<|im_end|>", "[BOS]", "<|reserved_token_563|>", "<think>", "[EOS]x", "𐐀", "ǅ", "ʰ", "\u0301",
         "\u3000", "\x1c", "々", "〇", "reached never as merges"]
LONG = [("a" * 25001 + " ") * 3, " " * 60000 + "b", "The quick " * 50000, "x " * 199999 + "The quick brown"]


def vocabulary(rng):
    tokens = [bytes([i]) for i in range(256)]
    rng.shuffle(tokens)
    while len(tokens) < 556:
        i = rng.randrange(len(CORPUS) - 8)
        new = CORPUS[i:i + rng.randint(2, 7)] if rng.random() < 0.6 else rng.choice(tokens) + rng.choice(tokens)
        if len(new) <= 12 and new not in tokens:
            tokens.append(new)
    return tokens + [b"reached never as merges", b" " * 9]


def parts(text):
    """Cuts a text as Kimi's tokenizer does: after 400,000 characters and, within these, after 25,000 characters of a
    run that is all white space or has none."""
    for begin in range(0, len(text), 400000):
        chunk, cuts, at = text[begin:begin + 400000], [0], 0
        for _, run in itertools.groupby(chunk, str.isspace):
            n = len(list(run))
            cuts += range(at + 25000, at + n, 25000)
            at += n
        yield from (chunk[a:b] for a, b in zip(cuts, cuts[1:] + [len(chunk)]))


def encoder(tokens, named):
    """The function that gives the ids of a text, for tokens by rank and the names of ids after them."""
    n = len(tokens)
    special = {named.get(i, "<|reserved_token_%d|>" % i): i for i in range(n, n + 256)}
    encoding = tiktoken.Encoding("test", pat_str=PATTERN, mergeable_ranks={t: i for i, t in enumerate(tokens)},
                                 special_tokens=special)
    cut = re.compile("(" + "|".join(map(re.escape, named.values())) + ")")

    def ids(text):
        out = []
        for i, piece in enumerate(cut.split(text)):
            for part in parts(piece):
                out += [special[piece]] if i % 2 else encoding.encode(part, allowed_special="all")
        return out
    return ids


def load(path):
    """The encoder of a directory."""
    lines = (path / "tiktoken.model").read_text().splitlines()
    config = json.loads((path / "tokenizer_config.json").read_text())
    named = {int(i): token["content"] for i, token in config["added_tokens_decoder"].items()}
    return encoder([base64.b64decode(line.split()[0]) for line in lines], named)


def main():
    rng = random.Random(5)
    tokens = vocabulary(rng)
    n = len(tokens)
    named = {n: "[BOS]", n + 1: "[EOS]", n + 2: "<|im_end|>", n + 3: "<|im_user|>", n + 11: "<think>", n + 254: "[UNK]",
             n + 255: "[PAD]"}
    ids = encoder(tokens, named)

    def odd():
        return chr(rng.randrange(*rng.choice([(32, 0x250), (0x2000, 0xd7ff), (0x10000, 0x1ffff)])))

    texts = ["".join(rng.choice(WORDS) if rng.random() < 0.8 else odd() for _ in range(rng.randint(1, 24)))
             for _ in range(300)] + ["", "a" * 30, " " * 40 + "x"]
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {str(i): {"content": c, "special": c != "<think>", **flags} for i, c in named.items()}
    config = {"added_tokens_decoder": added,
              "additional_special_tokens": ["<|im_end|>", "<|im_user|>"], "bos_token": "[BOS]", "eos_token": "[EOS]",
              "pad_token": "[PAD]", "unk_token": "[UNK]", "tokenizer_class": "TikTokenTokenizer"}
    OUT.mkdir(exist_ok=True)
    lines = ["%s %d\n" % (base64.b64encode(t).decode(), i) for i, t in enumerate(tokens)]
    (OUT / "tiktoken.model").write_text("".join(lines))
    (OUT / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (OUT / "ids.json").write_text(json.dumps([{"text": t, "ids": ids(t)} for t in texts], separators=(",", ":")))
    for text in LONG:
        found = ids(text)
        print(len(found), sum(k * v for k, v in enumerate(found)) % 1000003)


if __name__ == "__main__":
    main()
