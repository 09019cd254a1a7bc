"""checkpoint_peers.py - whole checkpoints that Model-Optimizer and llm-compressor write, loaded by moetrain.

    python checkpoint_peers.py OUT --moetrain PATH [--only NAME ...]
        (needs torch, transformers, nvidia-modelopt, compressed-tensors, llmcompressor)

A small random Qwen3-MoE, or gpt-oss, is quantised and exported by the library itself. The reference is transformers in
fp32 with the weights that the library's own code decodes from the exported tensors. moetrain loads the export
(`teach --base`), and the log-probabilities of the likeliest tokens are compared. Neither side quantises activations.
The exit status is 1 when a difference is above LIMIT.
"""
import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import peer

CASE = Path(__file__).parents[1] / "fixtures/parity/qwen3"
LIMIT = 1e-4  # of a log-probability: sums in fp32 in another order
TOPK = 32


def make_model(gpt_oss=False):
    torch.manual_seed(0)
    common = dict(
        vocab_size=1024, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, num_experts_per_tok=3, tie_word_embeddings=False, bos_token_id=1015, eos_token_id=1017,
        pad_token_id=1016, max_position_embeddings=2048)
    if gpt_oss:
        rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 256}
        model = GptOssForCausalLM._from_config(
            GptOssConfig(intermediate_size=96, num_local_experts=6, sliding_window=16, rope_parameters=rope,
                         architectures=["GptOssForCausalLM"], **common), attn_implementation="eager")
    else:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(intermediate_size=192, moe_intermediate_size=64, num_experts=6, norm_topk_prob=True,
                           architectures=["Qwen3MoeForCausalLM"], **common))
    model = model.to(torch.bfloat16).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 or "bias" in name or "sinks" in name:
                p.normal_(0, 1 if "embed" in name else 0.1)
    return model


def documents():
    tokenizer = peer.load_tokenizer(CASE)
    return [peer.encode(tokenizer, row, 64) for row in peer.read_rows(CASE / "eval.jsonl")]


def calibrate(model):
    with torch.no_grad():
        for ids in documents():
            model(input_ids=torch.tensor([ids]))


def copy_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CASE / name, folder / name)


# ---- exporters


def modelopt(out, config, gpt_oss=False):
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = make_model(gpt_oss)
    mtq.quantize(model, getattr(mtq, config), calibrate)
    with torch.inference_mode():
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=str(out))


def modelopt_gpt_oss(out, config):
    modelopt(out, config, gpt_oss=True)


def llmcompressor(out, scheme):
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import load_quantizable_moe
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    dense = out.with_name(out.name + "-dense")
    make_model().save_pretrained(dense)
    copy_tokenizer(dense)
    with load_quantizable_moe():
        model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head", "re:.*mlp.gate$"])
    oneshot(model=model, recipe=recipe)
    model.save_pretrained(out, save_compressed=True)


EXPORTERS = {
    "modelopt-nvfp4": (modelopt, "NVFP4_DEFAULT_CFG"),
    "modelopt-nvfp4-gpt-oss": (modelopt_gpt_oss, "NVFP4_DEFAULT_CFG"),
    "modelopt-fp8": (modelopt, "FP8_DEFAULT_CFG"),
    "llmcompressor-nvfp4": (llmcompressor, "NVFP4A16"),
    "llmcompressor-fp8": (llmcompressor, "FP8_DYNAMIC"),
    "llmcompressor-fp8-blocks": (llmcompressor, "FP8_BLOCK"),
}


# ---- what the libraries decode


def read(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def decode_modelopt(tensors, stem):
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    codes, scale = tensors[stem + ".weight"], tensors[stem + ".weight_scale"]
    if codes.dtype == torch.float8_e4m3fn:
        return FP8QTensor(codes.shape, torch.float32, codes).dequantize(dtype=torch.float32, scale=scale)
    shape = torch.Size([codes.shape[0], 2 * codes.shape[1]])
    return NVFP4QTensor(shape, torch.float32, codes).dequantize(
        dtype=torch.float32, scale=scale, double_scale=tensors[stem + ".weight_scale_2"], block_sizes={-1: 16})


def decode_stack(tensors, name):
    """gpt-oss: all experts in one tensor, input axis before output axis."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    decoded = []
    for codes, scale in zip(tensors[name], tensors[name + "_weight_scale"]):
        codes = codes.T.contiguous()
        w = NVFP4QTensor(torch.Size([codes.shape[0], 2 * codes.shape[1]]), torch.float32, codes).dequantize(
            dtype=torch.float32, scale=scale.T.contiguous(), double_scale=tensors[name + "_weight_scale_2"],
            block_sizes={-1: 16})
        decoded.append(w.T)
    return torch.stack(decoded).contiguous()


def decode_compressed(tensors, stem, config):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = QuantizationArgs.model_validate(config["config_groups"]["group_0"]["weights"])
    scale = tensors[stem + ".weight_scale"].float()
    if stem + ".weight" in tensors:
        return dequantize(tensors[stem + ".weight"], scale, args=args, dtype=torch.float32)
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    packed = tensors[stem + ".weight_packed"]
    codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)
    return dequantize(codes, scale, args=args, global_scale=tensors[stem + ".weight_global_scale"],
                      dtype=torch.float32)


def write_decoded(folder, out):
    """The export as a plain fp32 checkpoint. Returns the number of decoded matrices."""
    tensors, plain = read(folder), {}
    config = json.loads((folder / "config.json").read_text())
    how = config.pop("quantization_config", {})
    stems = [n[: -len(".weight_scale")] for n in tensors if n.endswith(".weight_scale")]
    for stem in stems:
        compressed = how.get("quant_method") == "compressed-tensors"
        w = decode_compressed(tensors, stem, how) if compressed else decode_modelopt(tensors, stem)
        plain[stem + ".weight"] = w.float().contiguous()
    stacks = [n[: -len("_weight_scale")] for n in tensors if n.endswith("_proj_weight_scale")]
    plain.update({n: decode_stack(tensors, n) for n in stacks})
    for name, t in tensors.items():
        if "scale" not in name and name not in plain and t.is_floating_point():
            plain[name] = t.float()
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    save_file(plain, out / "model.safetensors", {"format": "pt"})
    return len(stems) + len(stacks)


# ---- moetrain


def teach(moetrain, model, out):
    copy_tokenizer(model)
    ini = out.with_suffix(".ini")
    ini.write_text(f"[model]\npath = {model}\n[data]\ntrain = {CASE / 'eval.jsonl'}\nformat = text\nseq_len = 64\n"
                   f"[train]\ndevice = cpu\ndtype = fp32\n[output]\ndir = {out.with_suffix('')}\n")
    subprocess.run([moetrain, "teach", ini, "--base", "--topk", str(TOPK), "--out", out], check=True)
    return [json.loads(line) for line in out.read_text().splitlines()]


@torch.no_grad()
def compare(model, rows):
    """Largest difference of a log-probability of moetrain's likeliest tokens; number of values."""
    worst, n = 0.0, 0
    for row in rows:
        log_p = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].float().log_softmax(-1)
        for i, ids in enumerate(row["topk_ids"]):
            if ids is None:
                continue
            got = torch.tensor(row["topk_logprobs"][i])
            worst = max(worst, (log_p[i - 1, ids] - got).abs().max().item())
            n += len(ids)
    return worst, n


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--moetrain", default="build/moetrain")
    p.add_argument("--only", nargs="*", choices=list(EXPORTERS), default=list(EXPORTERS))
    p.add_argument("--export", choices=list(EXPORTERS), help="only export to OUT")
    a = p.parse_args()
    if a.export:
        export, how = EXPORTERS[a.export]
        export(a.out, how)
        return 0
    bad = 0
    for name in a.only:
        folder = a.out / name
        folder.mkdir(parents=True)
        # llm-compressor changes how transformers loads in its process
        subprocess.run([sys.executable, __file__, folder, "--export", name], check=True)
        n = write_decoded(folder, a.out / f"{name}-decoded")
        rows = teach(a.moetrain, folder, a.out / f"{name}.jsonl")
        worst, count = compare(peer.load_model(a.out / f"{name}-decoded"), rows)
        print(f"{name}: {n} quantised matrices, {count} log-probabilities, largest difference {worst:.2e}", flush=True)
        bad += not (worst <= LIMIT and n > 0 and count > 0)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
