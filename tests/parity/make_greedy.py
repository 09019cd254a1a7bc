"""make_greedy.py - generates greedy tokens with transformers (+ PEFT) in fp32, for tests/train/test_generate.c.

  python make_greedy.py > tests/fixtures/generate/greedy.json

The script refuses a row where the two most likely logits differ by less than 1e-3, as rounding would decide.
"""
import json
import os
import sys

import torch
from peft import PeftModel

import peer

FIXTURES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures")
ROWS = [("../../configs/tiny-gptoss", None, "It was the best of times", 48),
        ("../../configs/tiny-gptoss", None, "\u201cMy dear", 48),
        ("parity/qwen3", "parity/qwen3/adapter_final", "The house", 32),
        ("parity/mixtral", "parity/mixtral/adapter_final", "The house", 32),
        ("parity/case_a", "parity/case_a/adapter_final", "The house", 32),
        ("parity/deepseek_v4", "parity/deepseek_v4/adapter_final", "The house", 48)]


@torch.no_grad()
def greedy(model, ids, n):
    begin = len(ids)
    for _ in range(n):
        best = model(input_ids=torch.tensor([ids])).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] < 1e-3:
            sys.exit("a tie: choose another prompt")
        ids = ids + [int(best.indices[0])]
    return ids[begin:]


def main():
    out = []
    for path, adapter, prompt, n in ROWS:
        directory = os.path.join(FIXTURES, path)
        tokenizer = peer.load_tokenizer(directory)
        model = peer.load_model(directory)
        if adapter:
            model = PeftModel.from_pretrained(model, os.path.join(FIXTURES, adapter))
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ids = greedy(model.eval(), prompt_ids, n)
        assert tokenizer.eos_token_id not in ids
        out.append({"model": path, "adapter": adapter, "prompt": prompt, "prompt_ids": prompt_ids, "ids": ids,
                    "text": tokenizer.decode(ids)})
    print("[\n" + ",\n".join(json.dumps(row) for row in out) + "\n]")


if __name__ == "__main__":
    main()
