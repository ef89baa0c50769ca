"""Makes arguments of a server of SGLang and resolves them by SGLang's own steps.

check_sglang.py imports this once SGLang can be imported.
"""

from __future__ import annotations

import importlib
import inspect

import torch
from sglang.srt.arg_groups import overrides, resolution_hooks
from sglang.srt.server_args import ServerArgs


class Config:
    """Is the config of a model of which SGLang asks what it likes: nothing else is set."""

    def __init__(self, **known):
        vars(self).update(known)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


def arguments(architecture: str = "Gemma4ForCausalLM", **given):
    """Returns arguments that nobody has resolved, for a model of such a class."""
    args = ServerArgs(
        **{"model_path": "a/model", "attention_backend": "ffpa", "device": "cpu", "page_size": 64, **given}
    )
    hf = Config(architectures=[architecture])
    args._model_config = Config(hf_config=hf, hf_text_config=hf)
    args._resolved_overrides = []
    return args


def resolved_by_the_last_step(given: dict, **more):
    """Runs the step of SGLang's resolution that ours follows, after others have declared what is given."""

    def handle_model_capability_adjustments(args):
        """Has the name of the step."""

    args = arguments(**more)
    args._resolved_overrides.append(("a step before", given))
    resolution_hooks.run_hook(handle_model_capability_adjustments, args)


def resolved_as_a_whole(monkeypatch, **given):
    """Runs all steps of SGLang's resolution, and returns the arguments as they are then."""
    args = arguments(**{"device": "cuda", "page_size": None, **given})
    vars(args._model_config).update(
        is_encoder_decoder=False, context_len=4096, dtype=torch.bfloat16, num_hidden_layers=2
    )
    pipeline = importlib.import_module("sglang.srt.arg_groups.pipeline")
    if "apply_muse_spark_env_defaults" in inspect.getsource(pipeline):  # it would load the model's config from files
        of_one_model = importlib.import_module("sglang.srt.arg_groups.muse_spark_hook")
        monkeypatch.setattr(of_one_model, "apply_muse_spark_env_defaults", lambda args: None)
    args.resolve_once()
    return overrides.resolved_view(args)
