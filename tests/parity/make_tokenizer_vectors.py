#!/usr/bin/env python3
"""make_tokenizer_vectors.py - encodes texts with Hugging Face's tokenizers, for tests/data/test_tokenizer.c.

Writes tests/fixtures/tokenizer: small tokenizers with features that the large one lacks, and *.ids.json with texts and
ids for each tokenizer. Three have the pre-tokenizers of published models, with merges across every boundary of pieces,
so that a wrong boundary changes the ids. Needs `pip install tokenizers`; random characters are those of Unicode 14.

    python tests/parity/make_tokenizer_vectors.py
"""
import json
import random
import unicodedata
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "tests/fixtures/tokenizer"
LARGE = "configs/tiny-gptoss/tokenizer.json"

TEXTS = [
    "", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", " \n", "\n ", "a", "Z", "0", "!", "\0", "\x7f", "\x1b[0m",
    "Hello world", " Hello World", "Hello, world!", "HELLO WORLD", "helloWorld HTTPServer camelCase x86 ABCdef",
    "The quick brown fox jumps over the lazy dog. It was, of course, never lazy before.",
    "I'm you're he'd we'll they've it's don't I'M YOU'RE HE'D 'tis ’s 'ſ o'clock rock'n'roll",
    "for (int i = 0; i < n; i++) {\n\tx[i] += y[i] * 2.5e-3f; // done\n}\n\n\n#include <stdio.h>\r\n",
    "def f(x):\n    return x ** 2\n\n\nif __name__ == '__main__':\n        print(f\"{f(3)!r}\")\n",
    "1 12 123 1234 12345 1,234,567.89 0x1F 3.14159 2²=4 ½ ⅷ ٣٤٥ १२३ 𝟘𝟙",
    "http://example.org/a//b/?q=1&r=2#frag  path/to/file.txt ../..//\n///\n/ \n",
    "trailing   ", "   leading", "in   the    middle", "tab\t\ttab", "mixed \t \n \r\n \u00a0 \u2003\u3000 end",
    " \u180e \u200b\u200c\u200d\u2060\ufeff", "\u0085next\u2028line\u2029para",
    "déjà vu, naïve façade, Übermut, Ærøskøbing, İstanbul, ſtraße, ǅungla, ﬁnd",
    "e\u0301e\u0301\u0323 a\u0308\u0304 \u0301start \u0344 n\u0303\u0303\u0303\u0303",
    "你好，世界！我想在apple工作1314151天～", "こんにちは、世界。カタカナ ﾊﾝｶｸ", "안녕하세요 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "Привет, мир! Нещо на Български", "Καλημέρα κόσμε ἄνθρωπος", "مرحبا بالعالم ١٢٣ لا إله", "שָׁלוֹם עולם",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีชาวโลก ที่นี่", "བོད་ཡིག", "ሰላም ልዑል", "Chào thế giới", "ᏣᎳᎩ ꮳꮃꭹ",
    "😀 😶‍🌫️ 👩🏽‍🚀 🇩🇪🇫🇷 ✅ 🚀 ❤️‍🔥 1️⃣", "∀x∈ℝ: ⌈x⌉ ≥ x → ∑ᵢ₌₁ⁿ i² ≈ 𝔸𝓑𝕮", "€ £ ¥ ₿ © ® ™ § ¶ † ‡ …",
    "𐐀𐐨 𒀀 𓂀 𠜎𠜱 \U000e0041 \ue000 \U0010ffff \ufffd\ufffe",
    "<|start|>user<|message|>What is 2 + 2?<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
    "<|start|><|start|><|end|>", "<|start<|start|>|>", "a<|end|>b <|end|> c\n<|end|>\n", "<|startoftext|><|endoftext|>",
    "<|notatoken|> <| end |> <|END|> |> <|", "<|call|>", "<|constrain|>json", "<|return|",
    # Unicode 15 and 16: symbols, letters, a mark, digits
    "\U0001fa77\U0001fa77 \U0001fae8!\u1c8a\u1c89\u0897 \U000323af\u2ffc a\U0001f6dcb \U00011f50\U00011f501 \u31ef",
]
RUNS = ["a", "A", " ", "\n", " \n", "\t", "ab", "aA", "1", ".", "é", "e\u0301", "中", "😀", "'s", "the ", "\u0301", "\0"]
LENGTHS = [2, 5, 31, 63, 64, 65, 129]
ALPHABETS = [(0x20, 0x7E), (0, 0x1F), (0x7F, 0xFF), (0x100, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF),
             (0x900, 0x9FF), (0xE00, 0xE7F), (0x1100, 0x11FF), (0x1E00, 0x206F), (0x2070, 0x22FF), (0x2460, 0x27BF),
             (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xF900, 0xFFFD), (0x1D400, 0x1D7FF),
             (0x1F300, 0x1F64F), (0x20000, 0x2A6DF)]


def random_texts(count, seed):
    rng = random.Random(seed)
    out = []
    while len(out) < count:
        chosen = rng.sample(ALPHABETS, 3) + [ALPHABETS[0]]
        text = "".join(chr(rng.randint(*rng.choice(chosen))) if rng.random() < 0.6 else
                       rng.choice([" ", "  ", "\n", "the", " of", "ing", "'s", "12", "<|end|>", "/", "A", "x"])
                       for _ in range(rng.randint(1, 40)))
        if not any(unicodedata.category(c) == "Cn" for c in text):
            out.append(text)
    return out


def cases(path, texts):
    tok = Tokenizer.from_file(str(ROOT / path))
    out = []
    for text in texts:
        for special in (True, False):
            tok.encode_special_tokens = not special
            ids = tok.encode(text, add_special_tokens=False).ids
            if special or ids != out[-1]["ids"]:
                out.append({"text": text, "special": special, "ids": ids})
    return out


def write(path, data, **how):
    path.write_text(json.dumps(data, ensure_ascii=True, separators=(",", ":"), **how) + "\n")


def write_cases(name, path, texts):
    lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases(path, texts))
    (OUT / f"{name}.ids.json").write_text(f'{{"tokenizer":"{path}","cases":[\n{lines}\n]}}\n')
    print(f"{name}: {lines.count(chr(10)) + 1} cases")


def added(token, content, normalized, special):
    return {"id": token, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": normalized, "special": special}


def small(name, normalizer, pre_tokenizer, words, specials, pairs=False, leave_out=(), **options):
    """A vocabulary of single characters and of `words`, whose merges join from the left."""
    vocab, merges = {}, []
    for c in sorted({c for w in words for c in w} | set("Ġ")):
        vocab[c] = len(vocab)
    for word in words:
        for n in range(2, len(word) + 1):
            if word[:n] not in vocab:
                vocab[word[:n]] = len(vocab)
                if word not in leave_out:
                    merges.append([word[:n - 1], word[n - 1]])
    tokens = [added(len(vocab) + i, *s) for i, s in enumerate(specials)]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, **options, "vocab": vocab,
             "merges": merges if pairs else [" ".join(m) for m in merges]}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    write(OUT / f"{name}.json", {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer(level), "post_processor": level, "decoder": level, "model": model})


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


MARKS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = [MARKS + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES]
CL100K = [MARKS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES]
TEKKEN = [r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
          r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
          r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES]
MARKS_AFTER = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
KIMI = [r"[\p{Han}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+" +
        MARKS_AFTER +
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*" +
        MARKS_AFTER + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES]
DEEPSEEK = [r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES]


def published(name, normalizer, rules, specials, post, texts, more=(), **how):
    """A vocabulary of all bytes, and merges learned from the texts without a pre-tokenizer, so they cross words. `more`
    is only encoded."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.train_from_iterator([t.replace("<|", "") for t in texts], trainers.BpeTrainer(
        vocab_size=640, show_progress=False, max_token_length=12,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    data = json.loads(tok.to_str())
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    n = len(data["model"]["vocab"])
    data |= {"normalizer": normalizer, "decoder": level, "post_processor": post(level),
             "added_tokens": [added(n + i, *s) for i, s in enumerate(specials)],
             "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*(split(r) | how for r in rules), level]}}
    write(OUT / f"{name}.json", data)
    write_cases(name, f"tests/fixtures/tokenizer/{name}.json", [*more, *texts])


SPACE = "\u2581"


def chars(name, normalizer, pre_tokenizer, words):
    """A vocabulary of characters with a token for each byte; the merges of `words` join from the left."""
    vocab = {t: i for i, t in enumerate(["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256))])}
    merges = []
    for c in sorted({c for w in words for c in w}):
        vocab[c] = len(vocab)
    for word in words:
        for n in range(2, len(word) + 1):
            if word[:n] not in vocab:
                vocab[word[:n]] = len(vocab)
                merges.append([word[:n - 1], word[n - 1]])
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab,
             "merges": merges}
    post = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                     {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}
    write(OUT / f"{name}.json", {
        "version": "1.0", "added_tokens": [added(1, "<s>", False, True)], "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": {**post, "pair": post["single"]}, "decoder": None,
        "model": model})


def texts_of(alphabet, fragments, count, seed):
    rng = random.Random(seed)
    return ["".join(rng.choice(fragments) if rng.random() < 0.5 else rng.choice(alphabet)
                    for _ in range(rng.randint(1, 12))) for _ in range(count)]


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    runs = [r * n for r in RUNS for n in LENGTHS]
    write_cases("tiny-gptoss", LARGE, TEXTS + runs + random_texts(300, 1))

    texts = TEXTS + [r * n for r in RUNS for n in (2, 5)] + random_texts(100, 5)
    bos = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
           "special_tokens": {}}
    published("deepseek", {"type": "Sequence", "normalizers": []}, DEEPSEEK,
              [("<\uff5cUser\uff5c>", False, False), ("<|end|>", False, True)],
              lambda level: {"type": "Sequence", "processors": [level, {**bos, "pair": bos["single"]}]}, texts)
    published("qwen35", {"type": "NFC"}, QWEN35, [("<|im_start|>", False, True), ("<|end|>", False, False)],
              lambda level: level, texts)
    published("olmo2", None, CL100K, [("<|end|>", False, True)], lambda level: None, texts,
              behavior="Removed", invert=True)
    published("tekken", None, TEKKEN, [("[INST]", False, True)], lambda level: level, texts)
    # GLM-4.5: a command in the text is a special token, marks of reasoning and calls are not
    glm = ["[gMASK]<sop><|system|>\n# Tools<|user|>\n2+2?/nothink<|assistant|>\n<think></think>\n4<|user|>",
           "[gMASK]<sop><|user|>q<|assistant|><think>why\n</think>a<tool_call>f<arg_key>k</arg_key></tool_call>"
           "<|observation|>", "a/nothink/nothink b /nothinking", "[gMASK] <sop>[gMASK<sop", "<think>\n</think>\n\n"]
    published("glm4", None, CL100K,
              [(t, False, True) for t in ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>",
                                          "<|assistant|>", "<|observation|>", "/nothink")] +
              [(t, False, False) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>",
                                           "</arg_key>")],
              lambda level: level, TEXTS + [r * n for r in RUNS for n in (2, 5)] + random_texts(20, 6), glm)
    # Kimi-K2: runs of Han characters are separate pieces, also with characters that Unicode 14 lacks
    han = ["a中b 中 !中!", "中a文b a中 中b", "a\U0002ebf0b \U0002ee5db a\U00031350b \U0002b739a", "aあ中カb か中",
           "Ａ中ｂ々〆〇 a々b a〇b ⺀a 㐀b"] * 3
    published("kimi", None, KIMI, [("<|im_end|>", False, True), ("<|im_user|>", False, True)], lambda level: level,
              han + TEXTS + [r * n for r in RUNS for n in (2, 5)] + random_texts(20, 7))

    # NFC, the GPT-2 pattern, tokens looked for after the normalizer, merges as strings
    small("nfc", {"type": "NFC"}, lambda level: {**level, "use_regex": True},
          ["Ġthe", "hello", "Ã©", "Ì", "ģ", "'s", "ĊĊ", "1", "2", "ĠĠ", "Ġa", "Ìģ", "<", ">"],
          [("<s>", False, True), ("  ", True, False), ("    ", True, False), ("caf\u0065\u0301", True, False)])
    write_cases("nfc", "tests/fixtures/tokenizer/nfc.json",
                texts_of("hela's12 \n\u00e9", ["the", " the", "hello", "e\u0301", "\u00e9", "  ", "    ", "\n\n", "'s",
                                               "<s>", "cafe\u0301", "caf\u00e9"], 150, 2))

    # two Splits one after the other, merges as pairs, a vocabulary item that no sequence of merges produces
    words = ["abc", "bcd", "Ġab", "12", "123", "zz", "4", "5", "<", "|", ">", "x"]
    rules = [split("\\p{N}{1,3}"), split("[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\s+(?!\\S)|\\s+|\\p{N}+")]
    for name, options in (("splits", {}), ("whole", {"ignore_merges": True})):
        small(name, {"type": "Sequence", "normalizers": []} if options else None,
              lambda level: {"type": "Sequence", "pretokenizers": [*rules, level]}, words,
              [("<|x|>", False, True), ("<|x|>y", False, False), ("zab", False, False), ("|>4", False, False)],
              pairs=True, leave_out=["zz"], **options)
        write_cases(name, f"tests/fixtures/tokenizer/{name}.json",
                    texts_of("abcd123z ", ["ab", "abc", " ab", "  ", "12345", "zz", "<|x|>"], 120, 3)
                    + ["zz", "zzz", " zz", "<|x|>zz", "zzab", "12 zz 3", "<|x|>4", "|>4<|x|>4"])

    # characters and bytes: spaces by the normalizer, or by Metaspace with a vocabulary item that contains a space
    texts = texts_of("abcd \u00e9\u4e2d\U0001f600\n<\u2581", ["ab", " ab", "  ", "abc", "<s>", " c",
                                                                   "<0x41>", "a b"], 90, 4)
    texts += ["", " ", "<s>", "<s> a", " <s>a", "ab " * 40, "a" * 70, "  " * 40, "\u4e2d" * 30 + " ab"]
    words = [SPACE + "ab", "abc", "bcd", SPACE * 2, SPACE + "c", "\u00e9a"]
    prepend = {"type": "Prepend", "prepend": SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    chars("chars", {"type": "Sequence", "normalizers": [prepend, replace]}, None, words)
    write_cases("chars", "tests/fixtures/tokenizer/chars.json", texts)
    chars("metaspace", None, {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False},
          [*words, "a" + SPACE + "b"])
    write_cases("metaspace", "tests/fixtures/tokenizer/metaspace.json", texts)
    # Gemma: the normalizer leaves no space at which the pre-tokenizer could cut
    chars("gemma", replace, {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                             "invert": False}, [*words, "\n\n", "\n\n\n"])
    write_cases("gemma", "tests/fixtures/tokenizer/gemma.json", texts + ["a\n\nb\n", "\n" * 5, " \n \n"])


if __name__ == "__main__":
    main()
