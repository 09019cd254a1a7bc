"""llama_peer.py - the model of transformers with which llama.cpp is compared."""
import json
import os

from transformers import GptOssConfig

import peer


def load_peer(path):
    """With what llama.cpp computes differently: YaRN's bounds are rounded, and steps of Mamba-2 have no minimum."""
    with open(os.path.join(path, "config.json")) as f:
        settings = json.load(f)
    if settings["model_type"] == "gpt_oss":
        plain = GptOssConfig.__init__

        def rounded(self, **words):
            words["rope_parameters"] = dict(words["rope_parameters"], truncate=True)
            plain(self, **words)
        peer.GptOssConfig = type("GptOssConfig", (GptOssConfig,), {"__init__": rounded})
    model = peer.load_model(path)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    return model
