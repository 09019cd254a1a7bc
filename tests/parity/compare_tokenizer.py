#!/usr/bin/env python3
"""compare_tokenizer.py - compares ids of `moetrain tokens --tokenizer FILE --json` with those of Hugging Face's
tokenizers, for whole files and for every character.

Needs `pip install tokenizers`. Exit 1 when an id differs.

    python tests/parity/compare_tokenizer.py build/moetrain TOKENIZER.json [TEXT_FILE ...]
"""
import json
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer


def main():
    binary, path, *files = sys.argv[1:]
    tok = Tokenizer.from_file(path)
    every = map(chr, (*range(0xD800), *range(0xE000, 0x32400), *range(0xE0000, 0xE0200)))  # the others are unassigned
    texts = {"every character": "".join(f"{c}{c} {c}1 a{c}b !{c}\n" for c in every)}
    texts |= {name: Path(name).read_bytes().decode(errors="replace") for name in files}
    failed = False
    for name, text in texts.items():
        for flags in ([], ["--no-special"]):
            tok.encode_special_tokens = bool(flags)
            theirs = tok.encode(text, add_special_tokens=False).ids
            out = subprocess.run([binary, "tokens", "--tokenizer", path, "--json", *flags], input=text.encode(),
                                 capture_output=True, check=False)
            if out.returncode:
                sys.exit(f"{name}: {out.stderr.decode()}")
            ours = json.loads(out.stdout)["ids"]
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            same = ours == theirs
            failed |= not same
            what = "the same" if same else f"token {at} is {ours[at:at + 3]} and not {theirs[at:at + 3]}"
            print(name, *flags, f": {len(theirs)} tokens, {what}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
