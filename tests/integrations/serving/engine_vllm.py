"""Serves a tiny random Gemma 3 in vLLM's own engine on this CPU, with ffpa as its attention; check_vllm.py runs it.

The scheduler, the manager of the pages and the model's runner are vLLM's. What is compiled is stubbed, or is here in
PyTorch where the engine cannot do without it. It prints how many of its tokens are transformers' choice, and how many
are not, but for rounding. `engine_vllm.py 512 wrong` gives all windows one key more, which has to be seen in this.
"""

import os
import sys
import tempfile
import types

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}

for _name in ("_C", "_C_stable_libtorch", "_moe_C", "vllm_flash_attn", "vllm_flash_attn.flash_attn_interface"):
    _stub = sys.modules[f"vllm.{_name}"] = types.ModuleType(f"vllm.{_name}")
    _stub.__path__ = ()
    for _function in ("flash_attn_varlen_func", "get_scheduler_metadata", "fa_version_unsupported_reason"):
        setattr(_stub, _function, None)
    _stub.is_fa_version_supported = lambda *args: True

import torch  # noqa: E402

_C = torch.library.Library("_C", "FRAGMENT")
_CACHE = torch.library.Library("_C_cache_ops", "FRAGMENT")


def _operator(library, schema: str, function) -> None:
    library.define(schema)
    library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


def _gelu_and_mul(out, x) -> None:
    gate, up = x.chunk(2, -1)
    out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


def _slots(offsets, positions, table, slots, size) -> None:
    slots.fill_(-1)
    for i, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        if begin < end <= len(positions):
            at = positions[begin:end].long()
            slots[begin:end] = table[i].long()[at // size] * size + at % size


def _write(key, value, k_pages, v_pages, slots, cache_dtype, k_scale, v_scale) -> None:
    there, size = slots >= 0, k_pages.shape[1]
    at = slots[there] // size, slots[there] % size
    k_pages[at], v_pages[at] = key[: len(slots)][there], value[: len(slots)][there]


for _name in ("supports_fp8", "supports_block_fp8", "supports_fp4"):
    _operator(_C, f"cutlass_scaled_mm_{_name}(int capability) -> bool", lambda capability: False)
_operator(_C, "cutlass_group_gemm_supported(int capability) -> bool", lambda capability: False)
_operator(_C, "init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None)
_operator(_C, "init_cpu_threads_env(str cores) -> str", lambda cores: "")
_operator(_C, "greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1))
_operator(_C, "gelu_tanh_and_mul(Tensor(a!) out, Tensor x) -> ()", _gelu_and_mul)
_slots_of = (
    "compute_slot_mapping_kernel_impl(Tensor offsets, Tensor positions, Tensor table, Tensor(a!) slots, int size)"
)
_operator(_C, f"{_slots_of} -> ()", _slots)
_written = "Tensor key, Tensor value, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor slots, str cache_dtype"
_operator(_CACHE, f"reshape_and_cache_flash({_written}, Tensor k_scale, Tensor v_scale) -> ()", _write)

import vllm.platforms as platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402


class _Cpu(CpuPlatform):
    """This CPU takes the backend that it is asked for, which vLLM's own does not."""

    @classmethod
    def is_pin_memory_available(cls):
        return False

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        asked = attn_selector_config._asdict()
        assert not selected_backend.get_class().validate_configuration(device_capability=None, **asked)
        return selected_backend.get_path()


platforms._current_platform = _Cpu()

import vllm.utils.torch_utils as torch_utils  # noqa: E402

torch_utils.PIN_MEMORY = False

from ffpa_attn.integrations import vllm as plugin  # noqa: E402
from ffpa_attn.integrations.vllm import attention  # noqa: E402
from transformers import Gemma3ForCausalLM, Gemma3TextConfig  # noqa: E402

plugin.register()
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding  # noqa: E402

WINDOW = 16
RotaryEmbedding.forward_cpu = lambda self, *args, **named: self.forward_native(*args, **named)


def serve(folder: str, d: int) -> tuple[int, int, int]:
    """Returns how many tokens of the engine are transformers' choice on the same text, how many are not, though rounding
    does not explain it, and how many there are.
    """
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=d, query_pre_attn_scalar=d, sliding_window=WINDOW, max_position_embeddings=1024,
        layer_types=["sliding_attention", "full_attention"] * 2, tie_word_embeddings=False,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            # With these, attention counts, and few logits are close to one another.
            weight.data.normal_(0, weight.shape[-1] ** -0.5)
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    limits = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128}  # prompts come in chunks
    names = {"skip_tokenizer_init": True, "dtype": "bfloat16", "attention_backend": "FFPA", "enforce_eager": True}
    engine = LLM(folder, **limits, **names)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 2000, (n,), generator=generator).tolist() for n in (3, 17, 90, 300)]
    how = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    outs = engine.generate([{"prompt_token_ids": x} for x in prompts], how, use_tqdm=False)
    texts = [[*prompt, *out.outputs[0].token_ids] for prompt, out in zip(prompts, outs, strict=True)]

    def logits() -> torch.Tensor:
        """Returns those that each token of the engine is chosen by, [tokens, vocabulary]."""
        rows = [model(torch.tensor([x])).logits[0, len(y) - 1 : -1] for x, y in zip(texts, prompts, strict=True)]
        return torch.cat(rows).float()

    with torch.no_grad():
        rounded = logits()
        model.float()
        exact = logits()
    slack = 2 * (exact - rounded).abs().amax()
    tokens = torch.tensor([x[len(y) :] for x, y in zip(texts, prompts, strict=True)]).flatten()
    behind = exact.amax(1) - exact.gather(1, tokens[:, None])[:, 0]
    print(f"rounding explains {slack:.3f}; tokens lie behind the best by", behind[behind > 0].sort()[0].tolist())
    return int((behind == 0).sum()), int((behind > slack).sum()), len(tokens)


if __name__ == "__main__":
    calls, attend = [], attention.ffpa_varlen

    def counted(q, *args, window, **named):
        calls.append(args[4])
        if "wrong" in sys.argv and window[0] >= 0:
            window = (window[0] + 1, window[1])
        return attend(q, *args, window=window, **named)

    attention.ffpa_varlen = counted
    with tempfile.TemporaryDirectory() as folder:
        same, wrong, total = serve(folder, int(sys.argv[1]))
    print(f"of {total} tokens {same} are the same, {wrong} are wrong;", end=" ")
    print(f"{len(calls)} calls of ffpa, {sum(n > 1 for n in calls)} with prompts")
