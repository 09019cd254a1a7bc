"""vllm_deepseek_v4.py - the modules of vLLM's class of DeepSeek-V4 for NVIDIA GPUs, from its own constructors.

For vllm_keys.py. The constructors run on PyTorch's meta device, without a GPU, a kernel or ranks: every layer of the
case with the kinds of its config.json, but with the head sizes and ratios that vLLM supports. Only the names are used.
"""
from types import SimpleNamespace
from unittest import mock

import torch
from transformers import AutoConfig


class Experts(torch.nn.Module):
    """In place of the fused experts, which need a kernel."""


def make_settings(config):
    """A VllmConfig as the constructors read it."""
    settings = mock.MagicMock()
    settings.model_config.hf_config = config
    settings.model_config.max_model_len = 4096
    settings.quant_config = None
    settings.cache_config.cache_dtype = "fp8"
    settings.kernel_config.moe_backend = "auto"
    settings.kernel_config.enable_jit_warmup = False
    settings.attention_config.resolve_indexer_kv_dtype.return_value = "fp8"
    settings.scheduler_config.max_num_batched_tokens = 64
    settings.scheduler_config.max_num_seqs = 4
    settings.compilation_config.static_forward_context = {}
    parallel = settings.parallel_config
    parallel.enable_expert_parallel = False
    parallel.pipeline_parallel_size = parallel.tensor_parallel_size = parallel.data_parallel_size = 1
    parallel.eplb_config.num_redundant_experts = 0
    return settings


def modules(case):
    """Names of the modules that vLLM wraps for adapters: its Linears and the fused experts."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear
    from vllm.models.deepseek_v4 import attention, compressor
    from vllm.models.deepseek_v4.nvidia import flashmla, model

    config = AutoConfig.from_pretrained(case)
    config.head_dim, config.index_head_dim, config.qk_rope_head_dim = 512, 128, 64
    config.compress_rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    for module in (attention, model, linear, parameter):
        module.get_tensor_model_parallel_rank = lambda: 0
        module.get_tensor_model_parallel_world_size = lambda: 1
    model.get_ep_group = lambda: SimpleNamespace(world_size=1, rank_in_group=0)
    model.FusedMoEFactory = lambda **_: Experts()
    model._select_dsv4_attn_cls = lambda _: flashmla.DeepseekV4FlashMLAAttention
    flashmla.compute_fp8_einsum_recipe = lambda: ((1, 128, 128), False)
    attention.SparseAttnIndexer = lambda *_, **__: torch.nn.Module()
    compressor.current_platform.device_type = "meta"
    settings, out = make_settings(config), set()
    with (mock.patch.multiple(torch.cuda, Event=mock.MagicMock, Stream=mock.MagicMock), torch.device("meta"),
          set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu")))):
        for i in range(config.num_hidden_layers):
            layer = model.DeepseekV4DecoderLayer(settings, f"model.layers.{i}")
            out |= {f"model.layers.{i}.{name}" for name, module in layer.named_modules()
                    if isinstance(module, (linear.LinearBase, Experts))}
    return out
