"""Tests what the SGLang plugin does without SGLang: attention over its tables, what is refused, the entry point.

.dev/serving_check.sh holds the rest against SGLang's own classes.
"""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pages
import pytest
import torch
from ffpa_attn import env
from ffpa_attn.integrations import sglang as plugin
from ffpa_attn.integrations.sglang import refusals, step

ROOT = Path(__file__).parents[2]
E4M3 = torch.float8_e4m3fn
TOKENS = 320  # of a request, at most


def test_importing_it_imports_nothing_of_sglang():
    modules = "ffpa_attn, ffpa_attn.integrations.sglang, ffpa_attn.integrations.sglang.step"
    code = f"import sys, {modules}; print([x for x in sys.modules if x.split('.')[0] == 'sglang'])"
    environment = env.child_environment(PYTHONPATH=os.pathsep.join(sys.path))
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.strip().endswith("[]"), run.stdout + run.stderr


def test_the_entry_point_leads_to_the_plugin():
    declared = re.search(
        r'\[project\.entry-points\."sglang\.srt\.plugins"\]\n(\w+) = "([\w.]+):(\w+)"',
        (ROOT / "pyproject.toml").read_text(),
    )
    name, module, function = declared.groups()
    assert name == refusals.NAME and getattr(importlib.import_module(module), function) is plugin.register


@pytest.mark.parametrize(
    "found, named",
    [
        ("0.5.9", "SGLang is 0.5.9, which lacks"),
        ("9.0.0", "SGLang is 9.0.0, which lacks"),
        (None, "SGLang is not installed, which lacks"),
    ],
)
def test_other_releases_are_named(monkeypatch, found, named):
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setattr(plugin, "_version", lambda: found)
    with pytest.raises(
        ImportError, match=rf"{named} what .* builds on.*tried with {re.escape(plugin.TRIED[0])}.*pip install"
    ):
        plugin.register()


@pytest.fixture
def server(monkeypatch):
    """Has the names of SGLang that the plugin looks for, and what it leaves there."""
    hooks, functions, factories, choices, mode = {}, [], {}, ["triton"], SimpleNamespace(value="static")

    def backends_of(args):
        return args.prefill, args.decode

    def keep(where: dict, name: str):
        return lambda function: where.setdefault(name, function)

    parts = {
        "arg_groups": {},
        "arg_groups.choices": {"ATTENTION_BACKEND_CHOICES": choices, "add_attention_backend_choices": choices.extend},
        "arg_groups.model_hook": {"attention_backends_of": backends_of},
        "arg_groups.overrides": {
            "resolved_view": lambda args: args,
            "declare_resolution": lambda args, source, **given: vars(args).update(given),
        },
        "arg_groups.resolution_hooks": {"register_resolution_hook": lambda name: keep(hooks, name)},
        "layers.attention.attention_registry": {"register_attention_backend": lambda name: keep(factories, name)},
        "plugins.hook_registry": {
            "HookRegistry": SimpleNamespace(register=lambda *hook: functions.append(hook)),
            "HookType": SimpleNamespace(BEFORE="before"),
        },
        "speculative.ragged_verify": {"read_ragged_verify_mode": lambda: mode},
    }
    modules = {f"sglang.srt.{name}": SimpleNamespace(**names) for name, names in parts.items()}
    for name, module in modules.items():
        above, _, own = name.rpartition(".")
        if above in modules:
            setattr(modules[above], own, module)
        for i in range(1, len(name.split("."))):
            monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:i]), SimpleNamespace(__path__=[]))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(
        hooks=hooks, functions=functions, factories=factories, choices=choices, modules=modules, mode=mode
    )


def test_it_registers_once(server, monkeypatch):
    monkeypatch.setattr(plugin, "_version", lambda: plugin.TRIED[0])
    plugin.register()
    plugin.register()
    assert server.choices == ["triton", "ffpa"] and list(server.factories) == ["ffpa"] and len(server.functions) == 1
    target, hook, kind = server.functions[0]
    assert target.endswith("DraftBackendFactory._create_backend") and kind == "before"
    backends = {}
    hook(SimpleNamespace(draft_model_runner=None, speculative_num_steps=3), "a name", backends, "an error")
    assert list(backends) == ["ffpa"]


def test_a_part_that_a_release_cannot_carry_names_it(monkeypatch):
    monkeypatch.setattr(plugin, "_version", lambda: "9.0.0")
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ImportError, match="SGLang is 9.0.0, which lacks what the backend 'ffpa' builds on"):
        plugin._backend(None)


@pytest.mark.parametrize("found", ["0.9.0", "0.5.9", "0.0.0.dev1+g0123abc", None])
def test_a_release_that_was_not_tried_is_named(server, monkeypatch, found):
    monkeypatch.setattr(plugin, "_version", lambda: found)
    named = re.escape(found or "a release without a number")
    with pytest.warns(UserWarning, match=f"SGLang is {named}; .*tried with .*{re.escape(plugin.TRIED[-1])} alone"):
        plugin.register()
    assert "ffpa" in server.choices


def chosen(prefill: str, decode: str, draft: str | None = None, page_size: int | None = 64) -> SimpleNamespace:
    """Returns arguments by which backends are chosen."""
    return SimpleNamespace(
        prefill=prefill, decode=decode, speculative_draft_attention_backend=draft, page_size=page_size
    )


@pytest.mark.parametrize(
    "args, size",
    [
        (chosen("ffpa", "ffpa", page_size=None), 64),
        (chosen("fa3", "ffpa", page_size=None), 64),
        (chosen("triton", "triton", "ffpa", page_size=None), 64),
        (chosen("triton", "fa3", page_size=None), None),
        (chosen("ffpa", "ffpa", page_size=16), 16),
        (chosen("ffpa", "ffpa", page_size=1), 1),
    ],
    ids=str,
)
def test_pages_have_a_size_where_none_is_given(server, monkeypatch, args, size):
    monkeypatch.setattr(plugin, "_version", lambda: plugin.TRIED[0])
    plugin.register()
    seen = []
    server.hooks["handle_model_specific_adjustments"](args, lambda args: seen.append(args.page_size))
    assert seen == [size], "the model's step is to see the size"


def test_models_lists_see_another_name_for_as_long_as_they_look(server, monkeypatch):
    monkeypatch.setattr(plugin, "_version", lambda: plugin.TRIED[0])
    plugin.register()
    model_hook, args = server.modules["sglang.srt.arg_groups.model_hook"], chosen("fa4", "ffpa")
    seen = []

    def compare(args):
        seen.append(model_hook.attention_backends_of(args))
        assert args.prefill == "fa4"  # SGLang's own way to refuse

    step_of_models = server.hooks["handle_model_specific_adjustments"]
    step_of_models(args, compare)
    assert seen == [("fa4", "triton")] and model_hook.attention_backends_of(args) == ("fa4", "ffpa")
    with pytest.raises(AssertionError):
        step_of_models(chosen("flashinfer", "ffpa"), compare)
    assert model_hook.attention_backends_of(args) == ("fa4", "ffpa")


def test_arguments_are_checked_where_the_backend_is_chosen(server, monkeypatch):
    monkeypatch.setattr(plugin, "_version", lambda: plugin.TRIED[0])
    plugin.register()
    last, ran = server.hooks["handle_model_capability_adjustments"], []
    last(SimpleNamespace(**ARGUMENTS | {"prefill": "triton", "decode": "fa3", "page_size": 1}), ran.append)
    with pytest.raises(ValueError, match="--page-size 64"):
        last(SimpleNamespace(**ARGUMENTS | {"prefill": "triton", "decode": "ffpa", "page_size": 1}), ran.append)
    assert len(ran) == 2, "SGLang's own step runs first"
    server.mode.value = "compact"
    given = ARGUMENTS | {"prefill": "triton", "decode": "ffpa", "speculative_algorithm": "DSPARK"}
    with pytest.raises(ValueError, match="SGLANG_RAGGED_VERIFY_MODE is compact; .*set it to static"):
        last(SimpleNamespace(**given), ran.append)
    last(SimpleNamespace(**given | {"speculative_algorithm": "EAGLE"}), ran.append)  # it has no such drafts


def layer(**given):
    """Returns what has a layer's attributes, as SGLang's RadixAttention has them."""
    plain = {
        "layer_id": 3, "is_cross_attention": False, "attn_type": SimpleNamespace(value="decoder"), "logit_cap": 0.0,
        "logit_capping_method": "tanh", "xai_temperature_len": -1, "head_dim": 512, "v_head_dim": 512,
        "sliding_window_size": -1, "tp_q_head_num": 4, "tp_k_head_num": 2, "scaling": 1.0,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **given})


def tables(pool: pages.Pool, of_window: torch.Tensor | None = None):
    """Returns what SGLang has instead of the pool's table: the slots of each request's tokens, in rows that come in
    another order than the batch; with `of_window`, each page's number elsewhere, also the slots there by slots here.
    """
    rows, batch = pool.k.shape[1], len(pool.used)
    needed = [-(-n // rows) for n in pool.used.tolist()]
    slots_of = torch.full((batch + 1, TOKENS), -1, dtype=torch.int32)
    requests = torch.arange(batch, 0, -1)
    for i, (request, count) in enumerate(zip(requests.tolist(), needed, strict=True)):
        own = (pool.table[i, :count, None].cpu() * rows + torch.arange(rows)).flatten()
        slots_of[request, : len(own)] = own
    if of_window is None:
        return slots_of, requests, None
    there = (of_window[:, None] * rows + torch.arange(rows)).flatten()
    return slots_of, requests, torch.cat([there, torch.tensor([-1])])  # the last stands for tokens that are nowhere


def sequences(of_q, entries: int, longer: int, device, windows=False) -> step.Sequences:
    offsets = torch.tensor([0, *of_q], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)

    def empty(*shape):
        return torch.full(shape, -7, dtype=torch.int32, device=device)

    s = step.Sequences(offsets, empty(len(of_q)), empty(len(of_q), entries), max(of_q), TOKENS, longer)
    if windows:
        s.window_table, s.window_slots = empty(len(of_q), entries), empty(sum(of_q)).long()
    return s


CASES = [
    # rows of q, keys that count, keys that do not yet, rows of a page, keywords of the layer
    pytest.param([1, 1, 1], [37, 130, 17], 0, 16, {}, id="decoding"),
    pytest.param(
        [5, 1, 12], [42, 131, 28], 0, 64, {"logit_cap": 20.0, "head_dim": 192, "v_head_dim": 128}, id="prefill"
    ),
    pytest.param(
        [3, 3, 3], [37, 130, 17], 3, 32, {"sliding_window_size": 20, "head_dim": 256, "v_head_dim": 256}, id="chains"
    ),
]


@pytest.mark.parametrize("cache", [None, E4M3], ids=["as queries", "e4m3"])
@pytest.mark.parametrize("of_q, of_k, longer, rows, given", CASES)
def test_a_step_attends(device, of_q, of_k, longer, rows, given, cache):
    rule = refusals.rule_of(layer(**given), None, False)
    side = rule.window[0]
    pool = pages.make([n + longer for n in of_k], rows, 2, rule.d, rule.d_v)
    scales = {}
    if cache is not None:
        pool = pool._replace(k=pool.k.to(cache), v=pool.v.to(cache))
        scales = {"k_scale": torch.tensor(0.5, device=device), "v_scale": torch.tensor(2.0, device=device)}
    slots_of, requests, _ = tables(pool)
    s = sequences(of_q, step.entries(slots_of, rows), longer, device)
    step.fill(s, torch.tensor(of_k, device=device), slots_of.to(device), requests.to(device), rows)
    assert s.seqused_k.tolist() == pool.used.tolist()
    on = pool.to(device)
    q, _ = pages.queries(of_q, 4, rule.d, device=device)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1)).to(device)
    out = step.attend(q, on.k, on.v, rule, s, sinks=sinks, **scales)
    if cache is not None:
        on = on._replace(k=(on.k.float() * 0.5).bfloat16(), v=(on.v.float() * 2).bfloat16())
    asked = {
        "causal": True,
        "window": (side, 0 if side >= 0 else -1),
        "softcap": rule.softcap,
        "scale": 1.0,
        "sinks": sinks,
    }
    for keys, some in zip(on.sequences(), torch.arange(sum(of_q)).split(of_q), strict=True):
        pages.assert_attends(q[some], keys, out[some], **asked)


def test_layers_with_windows_have_tables_of_their_own(device):
    of_q, of_k, rows = [1, 2], [100, 33], 16
    rule = refusals.rule_of(layer(sliding_window_size=20, head_dim=64, v_head_dim=64), None, True)
    pool = pages.make(of_k, rows, 2, 64)
    there = torch.randperm(len(pool.k), generator=torch.Generator().manual_seed(2))
    slots_of, requests, mapping = tables(pool, there)
    elsewhere = pool._replace(k=torch.empty_like(pool.k), v=torch.empty_like(pool.v), table=pool.table.clone())
    elsewhere.k[there], elsewhere.v[there] = pool.k, pool.v
    mapping = mapping.to(device)
    new = torch.tensor([5, 17, 40], device=device)
    s = sequences(of_q, step.entries(slots_of, rows), 0, device, windows=True)
    slots_of, requests = slots_of.to(device), requests.to(device)
    step.fill(s, torch.tensor(of_k, device=device), slots_of, requests, rows, lambda slots: mapping[slots], new)
    assert (s.window_slots == mapping[new]).all()
    on = elsewhere.to(device)
    q, _ = pages.queries(of_q, 4, 64, device=device)
    out = step.attend(q, on.k, on.v, rule, s)
    for keys, some in zip(pool.to(device).sequences(), torch.arange(sum(of_q)).split(of_q), strict=True):
        pages.assert_attends(q[some], keys, out[some], causal=True, window=(20, 0), scale=1.0)


def test_a_captured_step_serves_other_requests(device):
    """On a GPU a graph replays the step, elsewhere it is called again, in the same buffers, with others in."""
    rule = refusals.rule_of(layer(), None, False)
    of_k, rows = [37, 130, 17], 16
    pool = pages.make(of_k, rows, 2, 512)
    slots_of, requests, _ = tables(pool)
    s = sequences([1, 1, 1], step.entries(slots_of, rows), 0, device)
    lengths, slots_of, requests = torch.tensor(of_k, device=device), slots_of.to(device), requests.to(device)
    on, keys = pool.to(device), pool.to(device).sequences()
    q, _ = pages.queries([1, 1, 1], 4, 512, device=device)

    def run():
        step.fill(s, lengths, slots_of, requests, rows)
        return step.attend(q, on.k, on.v, rule, s)

    out, held = run(), (s.table.data_ptr(), s.seqused_k.data_ptr())  # kernels are loaded before the capture
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
    for _ in range(3):
        if device == "cuda":
            graph.replay()
        else:
            out.copy_(run())
        for i, n in enumerate(lengths.tolist()):
            k, v = keys[i]
            pages.assert_attends(q[i : i + 1], (k[:n], v[:n]), out[i : i + 1], causal=True, scale=1.0)
        lengths.copy_(lengths.roll(1) - 5)
        requests.copy_(requests.roll(1))
        keys = keys[-1:] + keys[:-1]
    assert held == (s.table.data_ptr(), s.seqused_k.data_ptr())


def test_keys_that_come_with_the_call(device):
    of_q = [7, 20, 1]
    rule = refusals.rule_of(layer(head_dim=192, v_head_dim=128, tp_k_head_num=4), (576, 512), False)
    assert rule.is_dense and not rule.is_latent
    q, _ = pages.queries(of_q, 4, 192, device=device)
    k, v = pages.queries(of_q, 4, 192, seed=2, device=device)[0], pages.queries(of_q, 4, 128, seed=3, device=device)[0]
    out = step.attend_to_rows(q, k, v, rule, sequences(of_q, 1, 0, device))
    for some in torch.arange(sum(of_q)).split(of_q):
        pages.assert_attends(q[some], (k[some], v[some]), out[some], causal=True, scale=1.0)


def test_latents_are_known_by_their_columns():
    rule = refusals.rule_of(layer(head_dim=576, tp_k_head_num=1), (576, 512), False)
    assert rule.is_latent and not rule.is_dense
    assert not refusals.rule_of(layer(head_dim=192, v_head_dim=128, tp_k_head_num=1), (576, 512), False).is_latent


@pytest.mark.parametrize(
    "n, most, bound", [(0, 9, 1), (1, 9, 1), (3, 9, 4), (4, 9, 4), (5, 9, 8), (9, 9, 9), (500, 9, 9)]
)
def test_bounds(n, most, bound):
    assert step.bound(n, most) == bound


@pytest.mark.parametrize("tokens, rows, entries", [(32, 16, 2), (33, 16, 3), (1, 64, 1)])
def test_a_table_has_room_for_every_page(tokens, rows, entries):
    assert step.entries(torch.zeros(2, tokens), rows) == entries


ARGUMENTS = {
    "page_size": 64, "kv_cache_dtype": "auto", "speculative_eagle_topk": None, "dcp_size": 1, "attn_cp_size": 1,
    "dllm_algorithm": None, "speculative_algorithm": None, "cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="breakable")),
}  # fmt: skip


@pytest.mark.parametrize(
    "given, way_out",
    [
        ({"page_size": 1}, "`--page-size` is 1; .*multiple of 16 rows: pass --page-size 64"),
        ({"page_size": 40}, "`--page-size` is 40"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "`--kv-cache-dtype` is fp8_e5m2.*pass --kv-cache-dtype fp8_e4m3"),
        ({"speculative_eagle_topk": 4}, "drafts are trees.*pass 1"),
        ({"dcp_size": 2}, "`--dcp-size` is 2"),
        ({"attn_cp_size": 2}, "`--attn-cp-size` is 2"),
        ({"dllm_algorithm": "a"}, "`--dllm-algorithm` is a"),
        (
            {"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="full"))},
            "--cuda-graph-backend-prefill",
        ),
    ],
)
def test_arguments_are_refused(given, way_out):
    refusals.check_arguments(SimpleNamespace(**ARGUMENTS))
    with pytest.raises(ValueError, match=way_out):
        refusals.check_arguments(SimpleNamespace(**{**ARGUMENTS, **given}))


@pytest.mark.parametrize(
    "given, named",
    [
        ({"is_cross_attention": True}, "layer 3 is cross attention"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "layer 3 is encoder_only"),
        ({"logit_cap": 5.0, "logit_capping_method": "relu"}, "caps logits by relu"),
        ({"xai_temperature_len": 1024}, "a temperature for each length"),
        ({"head_dim": 36}, "a head dim of 36"),
        ({"v_head_dim": 36}, "a value dim of 36"),
    ],
)
def test_layers_are_refused(given, named):
    with pytest.raises(NotImplementedError, match=f"{named}.*name another --attention-backend"):
        refusals.rule_of(layer(**given), None, False)


@pytest.mark.parametrize("given, named", [({"head_dim": 72}, "head"), ({"v_head_dim": 72}, "value")])
def test_pages_of_eight_bits_take_fewer_head_dims(given, named):
    words = f"a {named} dim of 72; .*multiples of 16: pass --kv-cache-dtype auto"
    with pytest.raises(NotImplementedError, match=words):
        refusals.rule_of(layer(**given), None, False, True)
    refusals.rule_of(layer(**given), None, False)
    refusals.rule_of(layer(head_dim=80, v_head_dim=48), None, False, True)
    refusals.rule_of(layer(head_dim=72, v_head_dim=72), (576, 512), False, True)  # such keys come with the call


def test_what_else_a_model_passes_is_refused():
    refusals.no_others({"topk_indices": None, "return_lse": False})
    with pytest.raises(NotImplementedError, match="SGLang passes `topk_indices`"):
        refusals.no_others({"topk_indices": torch.zeros(1)})


ALSO = "sparse attention"
RUNNER = {"page_size": 64, "kv_cache_dtype": E4M3, "dtype": torch.bfloat16, "prefill_aware_swa": False}
MODEL = {"is_encoder_decoder": False, "is_local_attention_model": False}


@pytest.mark.parametrize(
    "given, named",
    [
        ({"page_size": 1}, "--page-size 64"),
        ({"kv_cache_dtype": torch.uint8}, "The cache of keys is torch.uint8;"),
        ({"kv_cache_dtype": torch.float16}, "is torch.float16, and the model torch.bfloat16.*--kv-cache-dtype auto"),
        ({"kv_cache_dtype": torch.bfloat16, "dtype": torch.float16}, "is torch.bfloat16, and the model torch.float16"),
        ({"dtype": torch.float32}, "The model is torch.float32.*--dtype bfloat16"),
        ({"prefill_aware_swa": True}, "prefill-aware SWA"),
        ({"is_encoder_decoder": True}, "asks for cross attention"),
        ({"is_local_attention_model": True}, "chunked local attention"),
        ({"is_translating": True}, "--enable-unified-memory"),
        ({"also": {ALSO: True}}, "asks for sparse attention"),
        ({"topk": 2}, "drafts are trees"),
    ],
)
def test_runners_are_refused(given, named):
    def check(**given):
        runner = SimpleNamespace(**{name: given.get(name, value) for name, value in RUNNER.items()})
        runner.model_config = SimpleNamespace(**{name: given.get(name, value) for name, value in MODEL.items()})
        runner.kv_index_translator = SimpleNamespace(is_translating=given.get("is_translating", False))
        refusals.check_runner(runner, given.get("topk", 1), given.get("also", {ALSO: False}))

    check()
    check(kv_cache_dtype=torch.bfloat16)
    check(kv_cache_dtype=torch.float16, dtype=torch.float16)
    with pytest.raises(ValueError, match=named):
        check(**given)
