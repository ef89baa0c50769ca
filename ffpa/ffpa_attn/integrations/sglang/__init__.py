"""Makes `--attention-backend ffpa` known to SGLang, which finds `register` by the entry point `sglang.srt.plugins`.

Importing this imports nothing of SGLang.
"""

from __future__ import annotations

import importlib
import importlib.metadata

from ...support import progress
from . import refusals
from .refusals import NAME

TRIED = ("0.5.22", "0.5.23")  # the releases whose own classes .dev/serving_check.sh has run


def register() -> None:
    """Adds the attention backend "ffpa" to SGLang, which calls this in each process, before it reads arguments."""
    found = _version()
    try:
        from sglang.srt.arg_groups import choices, model_hook, overrides
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.speculative.ragged_verify import read_ragged_verify_mode

        known, add_choices = choices.ATTENTION_BACKEND_CHOICES, choices.add_attention_backend_choices
        resolved, of_backends = overrides.resolved_view, model_hook.attention_backends_of
        declare = overrides.declare_resolution
    except (ImportError, AttributeError) as error:
        raise ImportError(_other_release(found, error)) from error
    if NAME in known:
        return
    if found not in TRIED:
        progress.warn(
            f"ffpa_attn: SGLang is {found or 'a release without a number'}; the backend {NAME!r} was tried with "
            f"{', '.join(TRIED)} alone",
            stacklevel=2,
        )

    def let_models_have_it(server_args, previous) -> None:
        """Runs SGLang's step that compares backends with a list for each model, Gemma 4's and GPT-OSS's: "ffpa" stands
        there where "triton" does. SGLang's own hook for functions would replace it in every module that imports it.
        Before that, pages get a size where nobody has given one: all that follows then sees what a user would write.
        """
        args = resolved(server_args)
        if args.page_size is None and NAME in (*of_backends(args), args.speculative_draft_attention_backend):
            declare(server_args, NAME, page_size=refusals.PAGE_SIZE)
        now = model_hook.attention_backends_of

        def as_known(args) -> tuple:
            return tuple("triton" if name == NAME else name for name in now(args))

        model_hook.attention_backends_of = as_known
        try:
            previous(server_args)
        finally:
            model_hook.attention_backends_of = now

    def refuse_what_is_not_here(server_args, previous) -> None:
        previous(server_args)
        args = resolved(server_args)
        if NAME in of_backends(args):
            refusals.check_arguments(args)
            refusals.check_verification(args.speculative_algorithm, read_ragged_verify_mode().value)

    # The second step is one of the last: page sizes and types of caches are known then, and no model has been loaded.
    register_resolution_hook("handle_model_specific_adjustments")(let_models_have_it)
    register_resolution_hook("handle_model_capability_adjustments")(refuse_what_is_not_here)
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
    HookRegistry.register(factory, _offer_to_drafts, HookType.BEFORE)
    register_attention_backend(NAME)(_backend)
    add_choices([NAME])


def _version() -> str | None:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def _other_release(found: str | None, error: Exception) -> str:
    return (
        f"SGLang is {found or 'not installed'}, which lacks what the backend {NAME!r} builds on ({error}); it was tried "
        f"with {', '.join(TRIED)}: pip install 'sglang=={TRIED[-1]}', or name another --attention-backend"
    )


def _part(name: str):
    """Returns a module of this folder that imports SGLang."""
    try:
        return importlib.import_module(f".{name}", __name__)
    except ImportError as error:
        raise ImportError(_other_release(_version(), error)) from error


def _backend(model_runner):
    """Makes the backend of a model's runner."""
    return _part("backend").FfpaBackend(model_runner)


def _offer_to_drafts(factory, backend_name, backend_map, error_template, stamps_children=False) -> None:
    """Adds the backend to those that a draft model may have; SGLang asks for that of all steps, or of an extend."""
    runner = factory.draft_model_runner

    def make():
        if stamps_children:
            return NAME, _part("drafts").FfpaDraftSteps(runner, factory.speculative_num_steps)
        return NAME, _backend(runner)

    backend_map[NAME] = make
