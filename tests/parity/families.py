"""families.py - the model families of make_case.py: transformers' configuration, the scale of the random weights, the
names and layout of weights in published files."""
import torch
from transformers import (DeepseekV3Config, DeepseekV4Config, Gemma4Config, Gemma4TextConfig, Glm4MoeConfig,
                          Glm4MoeLiteConfig, GptOssConfig, Kimi_K25Config, Lfm2MoeConfig, MiniMaxM2Config,
                          Mistral4Config, Mistral3Config, MixtralConfig, NemotronHConfig, OlmoeConfig, Qwen3_5MoeConfig,
                          Qwen3_5MoeTextConfig, Qwen3MoeConfig, Qwen3NextConfig, Qwen3VLMoeConfig)

import peer

DENSE_TIMES = 3  # width of a dense layer (qwen3, --dense-layers), in widths of an expert


def gpt_oss_config(a, common):
    return GptOssConfig(
        intermediate_size=a.inter, num_local_experts=a.experts, head_dim=a.head_dim, sliding_window=a.window,
        rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0,
                         "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 256}, **common)


def qwen3_config(a, common):
    return Qwen3MoeConfig(
        intermediate_size=DENSE_TIMES * a.inter, moe_intermediate_size=a.inter, num_experts=a.experts,
        head_dim=a.head_dim, norm_topk_prob=a.norm_topk_prob != "false", attention_bias=a.attention_bias,
        mlp_only_layers=a.dense_layers, decoder_sparse_step=a.sparse_step,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **common)


def qwen3_vl_config(a, common):
    """Qwen3-MoE as the text part of the conditional-generation class."""
    text = qwen3_config(a, common).to_dict() | {"model_type": "qwen3_vl_moe_text"}
    pairs = a.head_dim // 2
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": a.theta or 5e6, "mrope_interleaved": True,
                               "mrope_section": [(pairs + i) // 3 for i in (2, 1, 0)]}
    return Qwen3VLMoeConfig(text_config=text, tie_word_embeddings=a.tied, vision_config=dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, num_position_embeddings=16, patch_size=4,
        out_hidden_size=a.hidden, deepstack_visual_indexes=[0]))


def olmoe_config(a, common):
    if a.heads * a.head_dim != a.hidden:
        raise SystemExit("olmoe: its q_norm is as wide as the hidden state, so heads x head_dim must be hidden")
    return OlmoeConfig(
        intermediate_size=a.inter, num_experts=a.experts, norm_topk_prob=a.norm_topk_prob == "true",
        attention_bias=a.attention_bias, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **common)


def mixtral_config(a, common):
    return MixtralConfig(
        intermediate_size=a.inter, num_local_experts=a.experts, head_dim=a.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **common)


def minimax_m2_config(a, common):
    return MiniMaxM2Config(
        intermediate_size=a.inter, num_local_experts=a.experts, head_dim=a.head_dim,
        rope_parameters=rope(a, 5e6) | {"partial_rotary_factor": a.rotated}, **common)


def lfm2_config(a, common):
    """Attention in --full-layers, by default in the last layer; the class reads head_dim, although published files lack
    this key."""
    full = [a.layers - 1] if a.full_layers is None else a.full_layers
    kinds = ["full_attention" if i in full else "conv" for i in range(a.layers)]
    common = dict(common)
    eps = {"norm_eps": common.pop("rms_norm_eps")} if "rms_norm_eps" in common else {}
    return Lfm2MoeConfig(
        intermediate_size=DENSE_TIMES * a.inter, moe_intermediate_size=a.inter, num_experts=a.experts,
        head_dim=a.head_dim, num_dense_layers=len(a.dense_layers), layer_types=kinds, conv_L_cache=a.taps,
        conv_bias=a.conv_bias, use_expert_bias=not a.no_choice_bias, routed_scaling_factor=a.routed_scale,
        norm_topk_prob=a.norm_topk_prob != "false", rope_parameters=rope(a, 1e6), **eps, **common)


def glm4_config(a, common):
    return Glm4MoeConfig(
        intermediate_size=DENSE_TIMES * a.inter, moe_intermediate_size=a.inter, n_routed_experts=a.experts,
        head_dim=a.head_dim, attention_bias=a.attention_bias, use_qk_norm=a.qk_norm, n_group=a.groups,
        topk_group=a.topk_groups, n_shared_experts=a.shared_experts, routed_scaling_factor=a.routed_scale,
        norm_topk_prob=a.norm_topk_prob != "false", first_k_dense_replace=len(a.dense_layers), num_mtp_layers=0,
        rope_parameters=rope(a, 1e6) | {"partial_rotary_factor": a.rotated}, **common)


def rope(a, theta):
    theta = a.theta or theta
    if not a.yarn:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "yarn", "rope_theta": theta, "factor": a.yarn, "original_max_position_embeddings": 64}


def latent_sizes(a, common):
    return dict(common, num_key_value_heads=a.heads, intermediate_size=DENSE_TIMES * a.inter,
                moe_intermediate_size=a.inter, n_routed_experts=a.experts, n_shared_experts=a.shared_experts,
                n_group=a.groups, topk_group=a.topk_groups, routed_scaling_factor=a.routed_scale,
                norm_topk_prob=a.norm_topk_prob != "false", attention_bias=a.attention_bias,
                q_lora_rank=a.q_lora or None, kv_lora_rank=a.kv_lora, qk_nope_head_dim=a.head_dim,
                qk_rope_head_dim=a.rope_dim, v_head_dim=a.value_dim)


def glm4_lite_config(a, common):
    kinds = ["dense" if i in a.dense_layers else "sparse" for i in range(a.layers)]
    return Glm4MoeLiteConfig(mlp_layer_types=kinds, rope_interleave=not a.half_split,
                             rope_parameters=rope(a, 1e6), **latent_sizes(a, common))


def mscale_yarn(a, original):
    return {"rope_type": "yarn", "rope_theta": a.theta or 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": a.mscale, "mscale_all_dim": 1.0, "original_max_position_embeddings": original}


def deepseek_v3_config(a, common):
    return DeepseekV3Config(
        first_k_dense_replace=len(a.dense_layers), num_mtp_layers=0, rope_interleave=not a.half_split,
        rope_parameters=mscale_yarn(a, 256),
        **latent_sizes(a, common))


def kimi_k25_config(a, common):
    """DeepSeek-V3 as the text part of the conditional-generation class."""
    text = deepseek_v3_config(a, common)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, patch_size=4,
                  num_position_embeddings=16)
    return Kimi_K25Config(text_config=text.to_dict(), tie_word_embeddings=a.tied, projection_hidden_size=16,
                          vision_config=vision)


def mistral4_config(a, common):
    """The text part of the conditional-generation class; queries grow every 24 positions."""
    text = Mistral4Config(
        first_k_dense_replace=len(a.dense_layers), rope_interleave=not a.half_split,
        rope_parameters=mscale_yarn(a, 24) | {"llama_4_scaling_beta": 0.3}, **latent_sizes(a, common))
    return Mistral3Config(text_config=text.to_dict(), tie_word_embeddings=a.tied, vision_config=dict(
        model_type="pixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        head_dim=8, image_size=16, patch_size=4))


def qwen3_5_config(a, common):
    """By default three layers of gated DeltaNet, then one of attention; key heads are half of the value heads."""
    key_heads, value_heads = a.linear_heads or (a.heads // 2, a.heads)
    key_dim, value_dim = a.linear_dims or (a.head_dim, a.head_dim // 4 * 3)
    kinds = None if a.full_layers is None else [
        "full_attention" if i in a.full_layers else "linear_attention" for i in range(a.layers)]
    return Qwen3_5MoeTextConfig(
        moe_intermediate_size=a.inter, shared_expert_intermediate_size=a.shared_width or a.inter + 8,
        num_experts=a.experts, head_dim=a.head_dim, linear_num_value_heads=value_heads,
        linear_num_key_heads=key_heads, linear_key_head_dim=key_dim, linear_value_head_dim=value_dim,
        linear_conv_kernel_dim=a.taps, layer_types=kinds,
        rope_parameters=rope(a, 1e7) | {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0],
                                        "mrope_interleaved": True}, **common)


def qwen3_5_nested_config(a, common):
    """The conditional-generation class, which has a vision tower."""
    text = qwen3_5_config(a, common).to_dict()
    return Qwen3_5MoeConfig(text_config=text, tie_word_embeddings=a.tied, vision_config=dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, num_position_embeddings=16, patch_size=4,
        out_hidden_size=a.hidden))


def qwen3_next_config(a, common):
    """Gated DeltaNet with fused matrices; attention in every --interval-th layer."""
    full = a.full_layers or range(a.interval - 1, a.layers, a.interval)
    kinds = ["full_attention" if i in full else "linear_attention" for i in range(a.layers)]
    key_dim, value_dim = a.linear_dims or (a.head_dim, a.head_dim // 4 * 3)
    return Qwen3NextConfig(
        intermediate_size=DENSE_TIMES * a.inter, moe_intermediate_size=a.inter, num_experts=a.experts,
        shared_expert_intermediate_size=a.shared_width or a.inter + 8, head_dim=a.head_dim,
        norm_topk_prob=a.norm_topk_prob != "false",
        attention_bias=a.attention_bias, mlp_only_layers=a.dense_layers, decoder_sparse_step=a.sparse_step,
        linear_num_key_heads=a.key_heads, linear_num_value_heads=a.value_heads, linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim, linear_conv_kernel_dim=a.taps, layer_types=kinds,
        rope_parameters=rope(a, 1e7) | {"partial_rotary_factor": a.rotated}, **common)


V4_KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def deepseek_v4_config(a, common):
    """--kinds takes 0, 4 and 128, as in the published compress_ratios, also when --ratios sets other ratios."""
    rotated = a.rope_dim / a.head_dim
    main = {"rope_type": "default", "rope_theta": a.theta or 10000.0, "partial_rotary_factor": rotated}
    entries = rope(a, 160000.0) | {"partial_rotary_factor": rotated} | ({"attention_factor": 1.0} if a.yarn else {})
    return DeepseekV4Config(
        rope_theta=main["rope_theta"], compress_rope_theta=entries["rope_theta"],
        moe_intermediate_size=a.inter, n_routed_experts=a.experts, n_shared_experts=1, head_dim=a.head_dim,
        q_lora_rank=a.q_lora, o_groups=a.o_groups, o_lora_rank=a.o_lora, partial_rotary_factor=rotated,
        layer_types=[V4_KINDS[kind] for kind in a.kinds],
        compress_rates={V4_KINDS[4]: a.ratios[0], V4_KINDS[128]: a.ratios[1]},
        mlp_layer_types=["hash_moe" if i < a.hash_layers else "moe" for i in range(a.layers)],
        sliding_window=a.window, index_n_heads=a.index_heads, index_head_dim=a.index_dim, index_topk=a.index_top,
        hc_mult=a.streams, hc_sinkhorn_iters=a.rounds, swiglu_limit=a.limit, routed_scaling_factor=a.routed_scale,
        rope_parameters={"main": main, "compress": entries}, **(common | {"num_key_value_heads": 1}))


PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def nemotron_config(a, common):
    """--layers must be the length of --pattern."""
    common = {k: v for k, v in common.items() if k != "num_hidden_layers"}
    return NemotronHConfig(
        layers_block_type=[PATTERN[c] for c in a.pattern], layer_norm_epsilon=common.pop("rms_norm_eps", 1e-5),
        head_dim=a.head_dim, intermediate_size=DENSE_TIMES * a.inter, moe_intermediate_size=a.inter,
        moe_shared_expert_intermediate_size=a.shared_width or 2 * a.inter, moe_latent_size=a.latent,
        n_routed_experts=a.experts, n_group=a.groups, topk_group=a.topk_groups, routed_scaling_factor=a.routed_scale,
        norm_topk_prob=a.norm_topk_prob != "false", mamba_num_heads=a.value_heads, n_groups=a.key_heads,
        mamba_head_dim=(a.linear_dims or (16, 12))[1], ssm_state_size=(a.linear_dims or (16, 12))[0],
        conv_kernel=a.taps, chunk_size=a.chunk, time_step_min=a.step_min, use_bias=a.attention_bias,
        use_conv_bias=not a.no_conv_bias, **common)


def gemma4_config(a, common):
    """Every --interval-th layer and the last have full attention, with other heads and proportional RoPE."""
    common = dict(common)
    common["top_k_experts"] = common.pop("num_experts_per_tok")
    full = a.full_layers or [i for i in range(a.layers) if (i + 1) % a.interval == 0]
    kinds = ["full_attention" if i in full or i == a.layers - 1 else "sliding_attention" for i in range(a.layers)]
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
             "full_attention": {"rope_type": "proportional", "rope_theta": a.theta or 1e6,
                                "partial_rotary_factor": a.rotated}}
    return Gemma4TextConfig(
        intermediate_size=a.dense_width or a.inter + 8, moe_intermediate_size=a.inter, num_experts=a.experts,
        enable_moe_block=True, hidden_size_per_layer_input=0, head_dim=a.head_dim, sliding_window=a.window,
        layer_types=kinds, rope_parameters=ropes, final_logit_softcapping=a.cap or None,
        attention_k_eq_v=not a.own_values, attention_bias=a.attention_bias,
        global_head_dim=a.global_head_dim or 2 * a.head_dim,
        num_global_key_value_heads=a.global_kv_heads or None, **common)


def gemma4_nested_config(a, common):
    """The conditional-generation class, which has a vision tower."""
    text = gemma4_config(a, common).to_dict()
    return Gemma4Config(text_config=text, tie_word_embeddings=a.tied, audio_config=None, vision_config=dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, patch_size=4, position_embedding_size=64))


def encode_mxfp4(w):
    """w [E, out, in] -> blocks u8 [E, out, in/32, 16], scales u8 [E, out, in/32]; the largest sets the scale."""
    groups = w.reshape(*w.shape[:-1], -1, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True).clamp_min(1e-30))) - 2
    codes = ((groups / torch.exp2(exponent)).unsqueeze(-1) - peer.FP4).abs().argmin(-1)
    blocks = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    return blocks.contiguous(), (exponent.squeeze(-1) + 127).to(torch.uint8).contiguous()


def mxfp4_tensors(state):
    """gpt-oss as published: experts in MXFP4, the rest in bf16."""
    tensors = {}
    for name, value in state.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = encode_mxfp4(value.transpose(1, 2).contiguous())
            tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales
        else:
            tensors[name] = value.bfloat16().contiguous()
    return tensors


def per_expert_tensors(state, block="mlp", gate="gate_proj", up="up_proj", down="down_proj"):
    """bf16, a matrix per expert; transformers holds gate and up of all experts as one [E, 2I, H]."""
    tensors = {}
    for name, value in state.items():
        name = name.replace(".mlp.", f".{block}.")
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts"):
            keep = name.endswith(("e_score_correction_bias", "expert_bias"))  # float32, as published
            tensors[name] = value.float() if keep else value.bfloat16().contiguous()
            continue
        for e, w in enumerate(value.bfloat16()):
            parts = zip((gate, up), w.chunk(2)) if last == "gate_up_proj" else [(down, w)]
            tensors.update({f"{stem}.{e}.{part}.weight": m.clone() for part, m in parts})
    return tensors


def mixtral_tensors(state):
    return per_expert_tensors(state, "block_sparse_moe", "w1", "w3", "w2")


def lfm2_tensors(state):
    """As published: w1, w3, w2 of every expert; without the head if it is the embedding."""
    tensors = per_expert_tensors(state, "mlp", "w1", "w3", "w2")
    if torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
        del tensors["lm_head.weight"]
    return tensors


def mistral4_tensors(state):
    """bf16, experts stacked, the text part below language_model.model."""
    tensors = {}
    for name, value in state.items():
        name = name.replace("model.language_model.", "language_model.model.")
        name = name.replace("lm_head", "language_model.lm_head")
        tensors[name.removeprefix("model.")] = value.bfloat16().contiguous()
    return tensors


def kimi_k25_tensors(state):
    """bf16, a matrix per expert, the text part below language_model.model."""
    tensors = {}
    for name, value in per_expert_tensors(state).items():
        name = name.replace("model.language_model.", "language_model.model.")
        tensors[name.replace("lm_head", "language_model.lm_head").removeprefix("model.")] = value
    return tensors


def qwen3_5_tensors(state):
    """bf16, experts stacked; A_log and the norm of gated DeltaNet in fp32; a tensor of multi-token prediction."""
    tensors = {"mtp.fc.weight": torch.zeros(4, 4)}
    for name, value in state.items():
        exact = name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))
        tensors[name] = (value if exact else value.bfloat16()).contiguous()
    return tensors


def qwen3_vl_tensors(state):
    """bf16, experts stacked as [E, in, out]."""
    experts = (".experts.gate_up_proj", ".experts.down_proj")
    return {name: (value.transpose(1, 2) if name.endswith(experts) else value).bfloat16().contiguous()
            for name, value in state.items()}


def gemma4_tensors(state):
    """bf16, experts stacked; without the head if it is the embedding."""
    tensors = {name: value.bfloat16().contiguous() for name, value in state.items()}
    embed = next(value for name, value in tensors.items() if name.endswith("embed_tokens.weight"))
    if "lm_head.weight" in tensors and torch.equal(tensors["lm_head.weight"], embed):
        del tensors["lm_head.weight"]
    return tensors


def qwen3_next_tensors(state):
    """bf16, a matrix per expert; two tensors of multi-token prediction; without the head if it is the embedding."""
    tensors = per_expert_tensors(state)
    if torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
        del tensors["lm_head.weight"]
    return tensors | {"mtp.fc.weight": torch.zeros(4, 4), "mtp.norm.weight": torch.zeros(4)}


def nemotron_tensors(state):
    """bf16, a matrix per expert, below backbone.; A_log, D and dt_bias in fp32; a tensor of multi-token prediction."""
    tensors = {"mtp.layers.0.norm.weight": torch.zeros(4)}
    for name, value in state.items():
        name = name.replace("model.", "backbone.")
        stem, _, last = name.rpartition(".")
        if stem.endswith(".experts"):
            tensors.update({f"{stem}.{e}.{last}.weight": w.clone() for e, w in enumerate(value.bfloat16())})
        else:
            exact = last in ("A_log", "D", "dt_bias", "e_score_correction_bias")
            tensors[name] = value.float() if exact else value.bfloat16().contiguous()
    return tensors


# Published names of DeepSeek-V4: parts of transformers' names, in this order.
V4_NAMES = (
    ("model.", ""), ("lm_head.", "head."), ("embed_tokens.", "embed."), ("hc_head.hc_", "hc_head_"),
    (".attn_hc.", ".hc_attn_"), (".ffn_hc.", ".hc_ffn_"), (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."), (".self_attn.", ".attn."), (".mlp.", ".ffn."),
    (".compressor.indexer.scorer.weights_proj.", ".indexer.weights_proj."),
    (".compressor.indexer.q_b_proj.", ".indexer.wq_b."), (".compressor.indexer.", ".indexer.compressor."),
    (".compressor.kv_norm.", ".compressor.norm."), (".compressor.position_bias", ".compressor.ape"),
    (".q_a_proj.", ".wq_a."), (".q_b_proj.", ".wq_b."), (".q_a_norm.", ".q_norm."), (".kv_proj.", ".wkv."),
    (".compressor.gate_proj.", ".compressor.wgate."), (".o_a_proj.", ".wo_a."), (".o_b_proj.", ".wo_b."),
    (".sinks", ".attn_sink"), (".gate.e_score_correction_bias", ".gate.bias"),
    (".shared_experts.gate_proj.", ".shared_experts.w1."), (".shared_experts.up_proj.", ".shared_experts.w3."),
    (".shared_experts.down_proj.", ".shared_experts.w2."))
V4_EXACT = ("hc_", ".ape", "attn_sink", ".gate.bias")  # float32


def deepseek_v4_tensors(state):
    """Published names, bf16, a matrix per expert; a tensor of multi-token prediction."""
    tensors = {"mtp.0.norm.weight": torch.zeros(4)}
    for name, value in per_expert_tensors(state, gate="w1", up="w3", down="w2").items():
        for ours, theirs in V4_NAMES:
            name = name.replace(ours, theirs)
        exact = any(part in name for part in V4_EXACT)
        tensors[name] = value.float() if exact else value
    for name, value in state.items():
        if name.endswith("tid2eid"):
            tensors[name.replace("model.", "").replace(".mlp.", ".ffn.")] = value
    return tensors


# The norms of these model types multiply by 1 + weight, except the norm of linear attention.
ZERO_CENTRED = ("qwen3_5", "qwen3_5_text", "qwen3_next")


# Configuration; tensors as published; standard deviation of the experts' weights. gpt-oss's are so large that
# activations reach its clamp at 7.
FAMILIES = {
    "gpt_oss": (gpt_oss_config, mxfp4_tensors, 0.25),
    "qwen3": (qwen3_config, per_expert_tensors, 0.15),
    "qwen3_vl": (qwen3_vl_config, qwen3_vl_tensors, 0.15),
    "olmoe": (olmoe_config, per_expert_tensors, 0.15),
    "mixtral": (mixtral_config, mixtral_tensors, 0.15),
    "minimax_m2": (minimax_m2_config, mixtral_tensors, 0.15),
    "lfm2": (lfm2_config, lfm2_tensors, 0.15),
    "glm4": (glm4_config, per_expert_tensors, 0.15),
    "glm4_lite": (glm4_lite_config, per_expert_tensors, 0.15),
    "deepseek_v3": (deepseek_v3_config, per_expert_tensors, 0.15),
    "kimi_k25": (kimi_k25_config, kimi_k25_tensors, 0.15),
    "deepseek_v4": (deepseek_v4_config, deepseek_v4_tensors, 0.15),
    "mistral4": (mistral4_config, mistral4_tensors, 0.15),
    "qwen3_5": (qwen3_5_nested_config, qwen3_5_tensors, 0.15),
    "qwen3_5_text": (qwen3_5_config, per_expert_tensors, 0.15),
    "qwen3_next": (qwen3_next_config, qwen3_next_tensors, 0.15),
    "nemotron": (nemotron_config, nemotron_tensors, 0.15),
    "gemma4": (gemma4_nested_config, gemma4_tensors, 0.15),
    "gemma4_text": (gemma4_config, gemma4_tensors, 0.15),
}

# The modules of the shared experts, which --adapt-shared trains. PEFT takes the names gate_proj, up_proj and down_proj
# for the fused experts of the families in SHARED_BY_WEIGHT: its target_parameters name the weights.
SHARED_BY_WEIGHT = ("glm4", "glm4_lite", "deepseek_v3", "kimi_k25", "qwen3_next")
SHARED = dict.fromkeys(SHARED_BY_WEIGHT + ("mistral4", "deepseek_v4"), "mlp.shared_experts") | \
    dict.fromkeys(ZERO_CENTRED, "mlp.shared_expert") | {"nemotron": "mixer.shared_experts"}

# Families whose feed-forward module is not called mlp, and those whose networks do not have gate, up and down.
BLOCK = {"nemotron": "mixer"}
PARTS = {"nemotron": ("up", "down")}


# Modules of other parts that have the names of targets.
EXCLUDED = dict.fromkeys(("mistral4", "kimi_k25"), ".*vision_tower.*") | {"gemma4": ".*(vision|audio)_tower.*"}

# Families whose experts are not the module mlp.experts. PEFT adapts their dense networks as modules.
EXPERTS = dict.fromkeys(("gemma4", "gemma4_text"), "experts") | {"lfm2": "feed_forward.experts"}


# Prefixes for the targets of attention in families where other modules have the same names.
PREFIX = {"deepseek_v4": "self_attn."}


# Families in which the modules of these targets have other names than in the other families.
MODULES = {"lfm2": {"o_proj": "self_attn.out_proj", "conv_in_proj": "conv.in_proj", "conv_out_proj": "conv.out_proj",
                    "dense_gate_proj": "feed_forward.w1", "dense_up_proj": "feed_forward.w3",
                    "dense_down_proj": "feed_forward.w2"}}


def attention_targets(a):
    if a.family == "lfm2":
        return "q_proj k_proj v_proj o_proj conv_in_proj conv_out_proj".split()
    if a.family == "deepseek_v4":
        return "q_a_proj q_b_proj kv_proj o_b_proj".split()
    if a.family == "nemotron":
        return ["q_proj", "k_proj", "v_proj", "o_proj"] * ("*" in a.pattern) + ["in_proj"] * ("M" in a.pattern)
    if a.family == "qwen3_next":
        return "q_proj k_proj v_proj o_proj in_proj_qkvz in_proj_ba out_proj".split()
    if a.family in ZERO_CENTRED:
        return "q_proj k_proj v_proj o_proj in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj".split()
    if a.family not in ("glm4_lite", "deepseek_v3", "kimi_k25", "mistral4"):
        return ["q_proj", "k_proj", "v_proj", "o_proj"]
    return (["q_a_proj", "q_b_proj"] if a.q_lora else ["q_proj"]) + ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


def published_deepseek_v4(config):
    """config.json with the published keys: compress_ratios instead of layer_types, with a last entry for the layer of
    multi-token prediction; one rope_scaling for all layers instead of rope_parameters by kind of layer."""
    kinds = {name: ratio for ratio, name in V4_KINDS.items()}
    entries = config.pop("rope_parameters")["compress"]
    config["compress_ratios"] = [kinds[name] for name in config.pop("layer_types")] + [0]
    config["num_hash_layers"] = config.pop("mlp_layer_types").count("hash_moe")
    config["rope_scaling"] = None
    if entries["rope_type"] == "yarn":
        config["rope_scaling"] = {"type": "yarn", "factor": entries["factor"], "beta_fast": 32, "beta_slow": 1,
                                  "original_max_position_embeddings": entries["original_max_position_embeddings"]}
    for key in ("compress_rates", "partial_rotary_factor"):
        del config[key]
    config["torch_dtype"] = config.pop("dtype")
    return config


def as_transformers_4(config):
    """config.json with the spellings that the published files have."""
    if config["model_type"] == "deepseek_v4":
        return published_deepseek_v4(config)
    if config["model_type"] == "nemotron_h":
        letters = {name: letter for letter, name in PATTERN.items()}
        config["hybrid_override_pattern"] = "".join(letters[name] for name in config.pop("layers_block_type"))
        config["num_hidden_layers"] = len(config["hybrid_override_pattern"])
        config["torch_dtype"] = config.pop("dtype")
        return config | {"norm_eps": 1e-5, "rope_theta": 10000, "partial_rotary_factor": 1.0}
    if "text_config" in config:
        return config | {"text_config": as_transformers_4(config["text_config"])}
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    if config["model_type"] == "qwen3_next":
        config["full_attention_interval"] = config.pop("layer_types").index("full_attention") + 1
    if config["model_type"] in ("glm4_moe", "qwen3_next", "qwen3_5_moe_text", "minimax_m2"):
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if config["model_type"] == "minimax_m2":  # transformers 5.17 does not read rotary_dim
        config["rotary_dim"] = int(config["head_dim"] * config["partial_rotary_factor"])
        config |= {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "use_mtp": True,
                   "scoring_func": "sigmoid", "shared_intermediate_size": 0, "num_mtp_modules": 3,
                   "mtp_transformer_layers": 1, "attn_type_list": [1] * config["num_hidden_layers"]}
    if config["model_type"] == "lfm2_moe":
        config["tie_embedding"] = config.pop("tie_word_embeddings")
    if config["model_type"] == "glm4_moe_lite":
        config["first_k_dense_replace"] = config.pop("mlp_layer_types").count("dense")
    config["transformers_version"] = "4.51.0"
    return config
