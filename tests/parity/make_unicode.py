#!/usr/bin/env python3
"""make_unicode.py - prints the rows of data/tokenizer/unicode.c: characters that Hugging Face's tokenizers know and
Unicode 14 does not, each with a replacement of the same properties.

Needs `pip install tokenizers` and a Python whose unicodedata is Unicode 14 (3.11).

    python tests/parity/make_unicode.py
"""
import unicodedata

from tokenizers import Regex, pre_tokenizers

CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So".split()


HAN = "\U00020000"


def stand_in(category, c):
    """A character of Unicode 14 with the same category and number of bytes; for a Han character a Han character.
    Patterns name no other script."""
    if pre_tokenizers.Split(Regex(r"\p{Han}"), "removed").pre_tokenize_str(chr(c)) == []:
        assert category == unicodedata.category(HAN) and c > 0xffff
        return ord(HAN)
    for other in range(0x1000, 0x10000) if c < 0x10000 else range(0x10000, 0x110000):
        if unicodedata.category(chr(other)) == category:
            return other


def main():
    assert unicodedata.unidata_version == "14.0.0", unicodedata.unidata_version
    unknown = "\n".join(chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) == "Cn")
    ranges = []
    for category in CATEGORIES:
        split = pre_tokenizers.Split(Regex(rf"\p{{{category}}}"), "isolated")
        for c in (ord(piece) for piece, _ in split.pre_tokenize_str(unknown) if len(piece) == 1 and piece != "\n"):
            other = stand_in(category, c)
            if ranges and ranges[-1][1:] == [c - 1, other]:
                ranges[-1][1] = c
            else:
                ranges.append([c, c, other])
    for row in sorted(ranges):
        print("{" + ", ".join(f"0x{c:x}" for c in row) + "},")


if __name__ == "__main__":
    main()
