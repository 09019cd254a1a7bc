"""llama_peer.py - the model of transformers with which llama.cpp is compared."""
import json
import os

from transformers import GptOssConfig

import peer


def load_peer(path):
    """With YaRN's bounds rounded, as llama.cpp has them."""
    with open(os.path.join(path, "config.json")) as f:
        settings = json.load(f)
    if settings["model_type"] == "gpt_oss":
        plain = GptOssConfig.__init__

        def rounded(self, **words):
            words["rope_parameters"] = dict(words["rope_parameters"], truncate=True)
            plain(self, **words)
        peer.GptOssConfig = type("GptOssConfig", (GptOssConfig,), {"__init__": rounded})
    return peer.load_model(path)
