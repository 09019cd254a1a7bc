"""peer.py - the reference for moetrain: transformers' model in fp32 with PEFT's LoRA, on the CPU.

transformers decodes MXFP4 only on a GPU. This module therefore decodes a gpt-oss checkpoint by the format's
definition and loads it as a dense model; every MXFP4 value is exact in fp32. transformers' own loader loads the other
families. Sinks need transformers' "eager" attention on a CPU.
"""
import contextlib
import json
import os
import sys

import torch
from safetensors.torch import load_file
from transformers import (AutoModelForCausalLM, AutoModelForImageTextToText, DeepseekV3Config, GptOssConfig,
                          GptOssForCausalLM, PreTrainedTokenizerFast)

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # e2m1, by code


def read_tensors(path):
    """All tensors of a checkpoint directory: one file, or the shards that the index names."""
    index = os.path.join(path, "model.safetensors.index.json")
    names = ["model.safetensors"]
    if os.path.exists(index):
        with open(index) as f:
            names = sorted(set(json.load(f)["weight_map"].values()))
    tensors = {}
    for name in names:
        tensors.update(load_file(os.path.join(path, name)))
    return tensors


def decode_mxfp4(blocks, scales):
    """blocks u8 [E, out, in/32, 16] low nibble first, scales e8m0 [E, out, in/32] -> fp32 [E, in, out]."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    values = torch.ldexp(FP4[codes], scales.int().sub(127).unsqueeze(-1))
    return values.flatten(-2).transpose(1, 2).contiguous()


def model_class(model_type):
    """Classes with a vision tower have other names of adapters than their text part."""
    with_vision = model_type in ("qwen3_5_moe", "qwen3_vl_moe", "mistral3", "kimi_k25", "gemma4")
    return AutoModelForImageTextToText if with_vision else AutoModelForCausalLM


def load_model(path, experts="eager"):
    """The model of a checkpoint directory, fp32; experts: transformers' experts_implementation."""
    with open(os.path.join(path, "config.json")) as f:
        settings = json.load(f)
    if settings["model_type"] != "gpt_oss":
        kimi = settings["model_type"] == "kimi_k2"  # the class of DeepSeek-V3 under another name
        config = DeepseekV3Config.from_dict(settings | {"model_type": "deepseek_v3"}) if kimi else None
        model, info = model_class(settings["model_type"]).from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation="eager", experts_implementation=experts,
            output_loading_info=True)
        wrong = {kind: keys for kind, keys in info.items() if keys}
        if wrong:
            raise SystemExit(f"{path}: {wrong}")
        return model
    settings.pop("quantization_config", None)
    model = GptOssForCausalLM._from_config(GptOssConfig(**settings), attn_implementation="eager",
                                           experts_implementation=experts).float()
    state = {}
    tensors = read_tensors(path)
    for name, value in tensors.items():
        if name.endswith("_blocks"):
            state[name[:-7]] = decode_mxfp4(value, tensors[name[:-7] + "_scales"])
        elif not name.endswith("_scales"):
            state[name] = value.float()
    model.load_state_dict(state)  # strict: an additional or missing tensor is an error
    return model


class ExactTorch:
    """torch, whose float32 is float64."""
    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def exact(model):
    """Computes in f64, also where transformers' code casts to fp32. The model stays in f64."""
    names = {type(module).__module__ for module in model.modules()}
    files = [sys.modules[name] for name in names if name.startswith("transformers.models.")]
    single = torch.Tensor.float
    model.double()
    try:
        torch.Tensor.float = torch.Tensor.double
        for file in files:
            file.torch = ExactTorch()
        yield
    finally:
        torch.Tensor.float = single
        for file in files:
            file.torch = torch


def load_tokenizer(path):
    with open(os.path.join(path, "tokenizer_config.json")) as f:
        settings = json.load(f)
    special = {k: settings[k] for k in ("eos_token", "bos_token", "pad_token") if k in settings}
    return PreTrainedTokenizerFast(tokenizer_file=os.path.join(path, "tokenizer.json"), **special)


def read_rows(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


def encode(tokenizer, row, seq_len):
    """A `text` row as moetrain reads it: its ids, then eos, cut at seq_len."""
    ids = tokenizer(row["text"], add_special_tokens=False)["input_ids"]
    return (ids + [tokenizer.eos_token_id])[:seq_len]


def cross_entropy(model, ids):
    """Summed cross-entropy of one document, and the number of its tokens."""
    x = torch.tensor([ids])
    logits = model(input_ids=x).logits[0].float()
    return torch.nn.functional.cross_entropy(logits[:-1], x[0, 1:], reduction="sum"), len(ids) - 1


def backward(model, documents):
    """Adds the gradient of the mean loss; returns the summed loss and the number of its tokens."""
    tokens = sum(len(ids) - 1 for ids in documents)
    total = 0.0
    for ids in documents:
        loss, _ = cross_entropy(model, ids)
        (loss / tokens).backward()
        total += loss.item()
    return total, tokens


@torch.no_grad()
def held_out_loss(model, documents):
    model.eval()
    total = count = 0
    for ids in documents:
        loss, n = cross_entropy(model, ids)
        total += loss.item()
        count += n
    return total / count
