"""Tests the bench part by part: FLOPs, the timer, ceilings, tables and pictures of a recorded run, host overhead."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import chip
import compare
import emulation
import flops
import forced
import oracle
import overhead
import paged
import plots
import providers
import pytest
import readme
import record
import shapes
import timing
import torch
import training_shapes
from ceilings import CeilingCalls, Ceilings
from chip import ChipUse
from ffpa_attn import env, explain
from ffpa_attn.building import build
from ffpa_attn.launching import emulated, native
from ffpa_attn.specs.spec import ForwardMmaRows, aot_specs
from provider import Provider
from record import Record, Result, Row
from tables import chip_table, markdown
from truth import Truth, Verdict
from workload import Workload, halved, make_inputs, rows_of

SQUARE = Workload(1, 48, 48, 8192, 8192, 512, 512)


@pytest.mark.parametrize("n_q", [1, 2, 7, 30, 64])
@pytest.mark.parametrize("n_kv", [1, 5, 30, 31, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_pairs(n_q, n_kv, causal):
    assert flops.visible_pairs(n_q, n_kv, causal) == oracle.visible_pairs(n_q, n_kv, causal=causal)


def test_flops():
    assert flops.nominal_flops(SQUARE) == 4 * 512 * 8192**2 * 48
    causal = Workload(2, 4, 2, 100, 100, 64, 32, causal=True, backward=True)
    assert flops.nominal_flops(causal) == 2.5 * 2 * (64 + 32) * 5050 * 2 * 4
    assert flops.halved_flops(causal) == 2.5 * 2 * (64 + 32) * 5000 * 2 * 4
    packed = Workload(3, 1, 1, 90, 60, 8, 8, packed=True)
    assert packed.sequences == [(30, 20), (60, 40), (90, 60)]
    assert flops.nominal_flops(packed) == 4 * 8 * (30 * 20 + 60 * 40 + 90 * 60)
    assert flops.least_bytes(packed) == 2 * 16 * (180 + 120)


def test_the_bound_of_a_workload():
    ceilings = Ceilings("mm", gemm_tflops=100.0, copy="copy", copy_gb_per_s=1000.0)
    assert ceilings.of(SQUARE) == ("GEMM", pytest.approx(4 * 512 * 8192**2 * 48 / 100e12 * 1e3))
    decode = Workload(1, 1, 1, 1, 8192, 512, 512)
    assert ceilings.of(decode) == ("copy", pytest.approx(2 * 1024 * 8193 / 1000e9 * 1e3))


def test_ceilings_from_times(device):
    calls = CeilingCalls(device)
    for call in calls.calls.values():
        call()
    ceilings = calls.from_times({"GEMM": [3.0, 1.0, 2.0], "copy": [1.0]})
    assert ceilings.gemm_tflops == pytest.approx(2 * calls.side**3 / 2e-3 * 1e-12)
    assert ceilings.copy_gb_per_s == pytest.approx(2 * calls.bytes / 1e-3 * 1e-9)


def test_subjects_take_turns_and_an_interrupt_loses_nothing():
    order, times = [], {}
    calls = []

    def subject(name):
        return lambda: calls.append(name) or 20.0 + len(calls)

    timing.measure_in_turn({name: subject(name) for name in "abcdef"}, 40, times, order.append, settle=True)
    rounds = [order[i : i + 6] for i in range(0, len(order), 6)]
    assert all(sorted(names) == list("abcdef") for names in rounds) and len({"".join(names) for names in rounds}) > 3
    # Three calls settle the clock, 21 + 22 + 23 ms; three count.
    assert calls[:7] == [*"aaaaaab"] and times["a"][:3] == [24.0, 25.0, 26.0]
    assert all(len(of_name) == 40 for of_name in times.values())

    def broken():
        if len(times.get("b", ())) == 3:
            raise RuntimeError("in the second round")
        return 2.0

    times, failures = {}, []
    timing.measure_in_turn(
        {"a": lambda: 1.0, "b": broken},
        6,
        times,
        order.append,
        False,
        lambda name, error: failures.append((name, str(error))),
    )
    assert times == {"a": [1.0] * 6} and failures == [("b", "in the second round")]

    def stop():
        raise KeyboardInterrupt

    times = {}
    with pytest.raises(KeyboardInterrupt):
        timing.measure_in_turn({"a": lambda: 2.0, "b": stop}, 2, times, order.append, settle=False)
    assert times == {"a": [2.0, 2.0]}


def test_timer(device):
    x = torch.ones(1000, device=device)
    assert 0 < timing.Timer(device).milliseconds(lambda: x + 1) < 1000
    peak = timing.peak_bytes(lambda: x + 1, device)
    assert peak is None if device == "cpu" else peak >= 4000


def test_inputs_come_again_and_ones_are_ones():
    w = Workload(2, 4, 2, 6, 10, 16, 8, backward=True)
    first, second = make_inputs(w, "cpu", seed=3), make_inputs(w, "cpu", seed=3, ones=("k",))
    assert torch.equal(first.q, second.q) and (second.k == 1).all() and not (first.k == 1).all()
    assert first.grad.shape == (2, 4, 6, 8) and first.v.shape == (2, 2, 10, 8)
    packed = Workload(2, 4, 2, 6, 10, 16, 8, packed=True)
    x = make_inputs(packed, "cpu", seed=0)
    assert x.offsets[0].tolist() == [0, 3, 9] and x.offsets[1].tolist() == [0, 5, 15] and x.offsets[2:] == (6, 10)
    assert torch.equal(rows_of(packed, x.k, 1, of_keys=True)[0], x.k[5:].transpose(0, 1))


def test_halving_ends_and_keeps_the_kind():
    w = Workload(4, 32, 4, 1, 8192, 320, 320, causal=True)
    while (smaller := halved(w)) is not None:
        assert flops.nominal_flops(smaller) < flops.nominal_flops(w)
        w = smaller
    assert w == Workload(1, 8, 1, 1, 64, 320, 320, causal=True)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_truth_judges_every_row_it_claims_to(backward, packed):
    """The sampled blocks are those of the whole problem: the oracle itself passes, one wrong value does not."""
    w = Workload(2, 4, 2, 300, 200, 16, 16, "bf16", causal=True, packed=packed, backward=backward)
    truth = Truth(w, "cpu", seed=0)

    def dense(x):
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        parts = [
            oracle.attention(*(rows_of(w, t, i, j > 0) for j, t in enumerate(leaves)), causal=True)[0]
            for i in range(w.batch)
        ]
        out = torch.cat([part[0].transpose(0, 1) for part in parts]) if packed else torch.cat(parts)
        return torch.autograd.grad(out, leaves, x.grad.double()) if backward else (out.bfloat16(),)

    assert truth.verdict(dense).problem is None

    def broken(x):
        results = [t.clone() for t in dense(x)]
        for t in results:
            t[-1, -1] = torch.nan
        return tuple(results)

    verdict = truth.verdict(broken)
    assert verdict.max_error == float("inf") and all(
        name in verdict.problem for name in (["dq", "dk", "dv"] if backward else ["out"])
    )


# ---- a recorded run of a GPU that nobody has ----


@pytest.fixture
def recorded(tmp_path) -> Record:
    """Makes up speeds: SDPA has 100 T, each of ours a round number of times that; FlexAttention ends at 384."""
    method = {"iters": 3, "chip": "B=1, H=48, N=8192, fp16 on sm_90"}
    run = Record({"device": "Imaginary GPU", "kind": "cuda"}, {"tree": "0" * 40, "flags": {}}, method)
    ceilings = Ceilings("torch.mm bfloat16 8192^3", 800.0, "copy", 4000.0)
    for d in (320, 384, 448):
        w = Workload(1, 48, 48, 8192, 8192, d, d)

        def row(tag, tflops, w=w, **facts):
            ms = flops.nominal_flops(w) / tflops * 1e-9
            provider = Provider(tag, facts.pop("kernel", "made_up"), lambda x: x.q, **facts)
            return Row.of(provider, w, [ms, 1.1 * ms, 0.9 * ms], ceilings, 1 << 30, Verdict(1e-3, None))

        ours = {"is_ffpa": True, "own_kernel": True}
        rows = [row("(sdpa)", 100, kernel="efficient")]
        for acc, speed in (("f32", 200), ("f16", 300), ("mixed", 250)):
            for level in (1, 3):
                for stage in (1, 2):
                    tag = f"(ffpa+acc+{acc}+L{level}+stage{stage})"
                    rows.append(row(tag, speed + 20 * level + stage, acc=acc, level=level, num_stages=stage, **ours))
        rows.append(row("(ffpa+auto)", 400, **ours))
        rows += [row("(flex)", 90)] if d <= 384 else []
        used = {"kernel": "made_up", "most_shared_bytes": 227 << 10, "registers": 255, "spill_bytes": 8}
        chip = [ChipUse(level, "f32", shared_bytes=200 << 10, accumulators=150 + level, **used) for level in (1, 2, 3)]
        run.results.append(Result(w, ceilings, rows, [], chip))
    run.save(tmp_path / "recorded")
    return Record.load(tmp_path / "recorded.json")


def test_table(recorded):
    lines = markdown(recorded).splitlines()
    assert lines[:2] == ["|Algorithm|320|384|448|", "|:---:|:---:|:---:|:---:|"]
    assert lines[2] == "|SDPA EA|100T|100T|100T|"
    assert lines[3:5] == ["|FFPA L1*|222T|222T|222T|", "|Speedup|2.22x|2.22x|2.22x|"]
    names = [line.split("|")[1] for line in lines[2:] if line.startswith("|")]
    assert [name for name in names if name != "Speedup"] == [
        "SDPA EA", "FFPA L1*", "FFPA L1^", "FFPA L1*^", "FFPA L3*", "FFPA L3^", "FFPA L3*^", "FFPA auto", "flex", "Ceiling",
    ]  # fmt: skip
    assert "|flex|90T|90T|-|" in lines
    assert "Imaginary GPU, B=1, H=48, N=8192, fp16; medians of 3 calls" in lines[-2]
    assert "†" not in markdown(recorded)


def fall_back(rows: list[Row], otherwise=()) -> None:
    """Makes the automatic row what it is where no kernel of ours runs, or where SDPA is chosen beside that `otherwise`."""
    auto = next(row for row in rows if row.tag == "(ffpa+auto)")
    rows[rows.index(auto)] = replace(auto, kernel="sdpa", own_kernel=False, settings={"otherwise": list(otherwise)})


def test_a_fallback_is_no_number_of_ours(recorded):
    fall_back(recorded.results[0].rows)
    shown = markdown(recorded)
    assert "|FFPA auto|400T†|400T|400T|" in shown and "† ran on sdpa, not on a kernel of this project." in shown


def test_pictures(recorded, tmp_path):
    names = [path.name for path in plots.save_plots(recorded, tmp_path / "x")]
    speedups = [f"x_ffpa+acc+{acc}_Speedup.png" for acc in ("f32", "f16", "mixed")]
    assert names == ["x_TFLOPS.png", *speedups, "x_on_chip.png"]
    lines = plots.tflops_figure(recorded).axes[0].get_lines()
    assert len(lines) == 10 and list(lines[-1].get_ydata()) == [800.0] * 3
    bars = plots.speedup_figure(recorded, "f32").axes[0]
    assert "Imaginary GPU" in bars.get_title(loc="left")
    assert [text.get_text() for text in bars.get_legend().get_texts()] == ["SDPA EA", "FFPA L1", "FFPA L3", "FFPA auto"]
    assert [round(float(bar.get_height()), 2) for bar in bars.patches] == [2.22] * 3 + [2.62] * 3 + [4.0] * 3


def test_the_picture_of_the_chip(recorded):
    """Our lines stay below what the chip has; that of whole rows crosses it."""
    shared, registers = plots.chip_figure(recorded).axes
    lines = [{line.get_label(): list(line.get_ydata()) for line in axes.get_lines()} for axes in (shared, registers)]
    assert lines[0]["FFPA L3"] == [200.0] * 3 and lines[1]["FFPA L3"] == [153] * 3
    whole_rows = "FlashAttention-2 tiling, 64 x 64"
    # The tiling holds Q, K and V of 64 rows each; and O and S of 64 rows for 128 threads.
    assert [round(x) for x in lines[0][whole_rows]] == [24, 48, 72, 96, 120, 144, 168]
    assert lines[1][whole_rows] == [64, 96, 128, 160, 192, 224, 256]


def test_the_table_of_the_chip(recorded):
    shown = chip_table(recorded).splitlines()
    assert shown[0] == "|On chip|320|384|448|" and len(shown) == 2 + 3 * 3
    assert shown[2:5] == [
        "|L1* shared memory, KB|200|200|200|",
        "|L1* registers for O and S|151|151|151|",
        "|L1* registers (B spilled)|255 (8)|255 (8)|255 (8)|",
    ]
    assert chip_table(recorded) not in markdown(recorded)  # the tables of a GPU have speeds to tell


def shape_of(plan, d):
    numbers = {name: getattr(plan, name) for name in ("stages", "q_resident", "value_stages")}
    return emulated.launch_shape(plan.spec, d_qk=d, **numbers)


@pytest.mark.parametrize("d", [64, 320, 512, 1024])
def test_what_kernels_take_of_the_chip(d):
    """Shared memory is what the kernel itself asks for; O and S are what the tile has."""
    for tag, use, plan in chip.chip_uses(Workload(1, 48, 48, 8192, 8192, d, d), "sm_90"):
        smem, _ = shape_of(plan, d)
        assert use.shared_bytes == smem <= use.most_shared_bytes == 227 << 10
        assert 64 <= use.accumulators <= 212 and use.kernel == plan.spec.name
        if use.acc == "f16":  # half of what f32 sums take in the same tile
            assert 2 * use.accumulators == chip.accumulators(replace(plan.spec, acc_qk="f32", acc_pv="f32"))
        assert use.level == plan.level and use.tag == tag
    assert not list(chip.chip_uses(Workload(1, 1, 1, 64, 64, d, d, backward=True), "sm_90"))


def test_a_ring_of_vs_own_takes_shared_memory(monkeypatch):
    monkeypatch.setenv("FFPA_PV_STAGES", "1")
    _, use, plan = next(chip.chip_uses(Workload(1, 48, 48, 8192, 8192, 320, 320), "sm_90"))
    assert plan.value_stages == 1
    assert use.shared_bytes == shape_of(plan, 320)[0]


def test_whole_rows_are_our_own_kernels_where_these_exist():
    for d in (64, 128, 192, 256):
        smem, accumulators = chip.flash_attention_2(d)
        spec = ForwardMmaRows("f16", "f32", "f32", d, 64, 64)
        assert (
            smem == emulated.launch_shape(replace(spec, q_in_registers=d == 192), d_qk=d, stages=1, q_resident=True)[0]
        )
        assert accumulators == d // 2 + 32


def test_f16_sums_are_judged_as_such(monkeypatch):
    """PyTorch's own error with such sums judges them, wherever they are."""
    asked = []

    def baseline(*tensors, acc_qk, acc_pv, **rule):
        asked.append((acc_qk, acc_pv))
        return compare_baseline(*tensors, acc_qk=acc_qk, acc_pv=acc_pv, **rule)

    compare_baseline = compare.baseline
    monkeypatch.setattr(compare, "baseline", baseline)
    truth = Truth(Workload(1, 1, 1, 64, 300, 256, 256), "cpu", seed=0)

    def with_f16_sums(x):
        return (compare_baseline(x.q, x.k, x.v, acc_qk="f16", acc_pv="f16")[0],)

    assert truth.verdict(with_f16_sums, ("f16", "f16")).problem is None
    truth.verdict(with_f16_sums)
    assert set(asked) == {("f16", "f16"), ("f32", "f32")}
    choices = {p.tag: p.sums for p in providers.our_providers(truth.w, truth.inputs, [])}
    assert choices == {"(ffpa+auto)": ("f32", "f32")}


@pytest.mark.parametrize(
    "arch, d, changes, family",
    [
        ("sm_90", 512, {}, "forward_wgmma_pair"),
        ("sm_90", 640, {}, "forward_wgmma_two_phase"),
        ("sm_80", 1024, {}, "forward_mma_two_phase"),
        ("sm_80", 512, {}, "forward_mma_split"),
        ("sm_90", 512, {"backward": True}, "backward_wgmma_scores"),
    ],
)
def test_a_row_of_every_family(arch, d, changes, family, monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda spec, gpu: None)
    w = Workload(1, 32, 32, 8192, 8192, d, d, "fp16", **changes)
    x = torch.empty(1, 32, 8192, d, dtype=torch.float16, device="meta")
    choice = explain(x, x, x, direction="backward" if w.backward else "forward", arch=arch)
    ours = providers._ours(w, "(ffpa+auto)", choice)
    assert ours.kernel.startswith(f"{family}_f16") and ours.own_kernel and ours.sums == ("f32", "f32")


def test_kernels_of_other_sources_make_the_tree_dirty(monkeypatch):
    monkeypatch.setattr(record, "_output", lambda *command: "" if "status" in command else "0" * 40)
    for sources, tree in ((build.sources_hash(), "0" * 40), ("others", "0" * 40 + "-dirty")):
        monkeypatch.setattr(native, "record", lambda sources=sources: {"sources": sources})
        assert record.source()["tree"] == tree


@pytest.mark.parametrize("which", ["workload", "tiles"])
def test_a_wrong_kernel_shows_in_the_emulator_wherever(which, monkeypatch):
    """The error shows on the workload, or on several tiles of keys alone."""
    w = Workload(1, 1, 1, 70, 90, 320, 320)
    _, use, plan = next(chip.chip_uses(w, "sm_90"))

    def wrong(plan, p, x, out):
        forced.run(plan, p, x, out)
        if (p.n_k == 90) == (which == "workload"):
            out += 0.1

    monkeypatch.setattr(emulation, "run", wrong)
    assert emulation.Emulation(w, "sm_90", seed=0).run(use, plan).problem is not None


def test_a_wrong_kernel_shows_in_the_emulator(monkeypatch):
    """A kernel that drops the last key shows, and a right one does not."""
    w = Workload(1, 1, 1, 70, 90, 320, 320)
    _, use, plan = next(chip.chip_uses(w, "sm_90"))
    found = emulation.Emulation(w, "sm_90", seed=0).run(use, plan)
    assert found.problem is None and 0 < found.max_error < 1e-2 and found.bank_conflicts == 1.0
    rows, keys = plan.spec.rows, 3 * plan.spec.keys
    least = 2 * 2 * 320 * (rows + keys) / (4 * rows * keys * 320)  # bytes for each FLOP, if every tensor moves once
    assert least <= found.bytes_per_flop < 1.1 * least

    def short(plan, p, x, out):
        forced.run(plan, p, x._replace(k=x.k[:, :, :-1], v=x.v[:, :, :-1]), out)

    monkeypatch.setattr(emulation, "run", short)
    assert emulation.Emulation(w, "sm_90", seed=0).run(use, plan).problem is not None


def test_the_readme_shows_what_was_recorded(recorded, tmp_path):
    text = "# x\n<!-- bench: recorded -->\nan old table\n<!-- /bench -->\ny\n"
    shown = readme.generated(text, tmp_path)
    assert shown == f"# x\n<!-- bench: recorded -->\n{markdown(recorded)}<!-- /bench -->\ny\n"
    assert readme.generated(shown, tmp_path) == shown
    for page in readme.PAGES:
        text = page.read_text()
        assert readme.generated(text, readme.RESULTS, readme.up_from(page)) == text
        for stored, pictures in readme.pictured(text, readme.RESULTS).items():
            assert all(readme.mark_of(stored).encode() in picture.read_bytes() for picture in pictures), (
                "run `python bench/readme.py`"
            )


def test_pictures_and_cases_of_the_readme(recorded, tmp_path):
    recorded.save(tmp_path / "gpu_gemma")
    text = "<!-- plots: recorded -->\n<!-- /plots -->\n<!-- cases: gpu_gemma -->\n<!-- /cases -->"
    shown = readme.generated(text, tmp_path)
    assert shown.count("![") == 3 and f"(bench/{tmp_path.name}/recorded_TFLOPS.png)" in shown
    cases = [line for line in shown.splitlines() if line.startswith("| gemma | B=1, H=48, N=8192, D=")]
    assert len(cases) == 3 and "| 10.3 | 400 | 50% of GEMM | efficient 41.2, made_up 45.8 | `made_up` |" in cases[0]
    readme.draw(text, tmp_path)
    ((stored, pictures),) = readme.pictured(text, tmp_path).items()
    assert sorted(tmp_path.glob("*.png")) == sorted(pictures)
    assert all(readme.mark_of(stored).encode() in picture.read_bytes() for picture in pictures)
    before, (record,) = readme.mark_of(stored), stored
    record.write_text(record.read_text() + "\n")
    assert readme.mark_of(stored) != before


def test_records_name_kernels_as_they_are_called_now():
    shipped = {spec.family for spec in aot_specs(env.all_flags())}
    stored = [Record.load(path) for path in readme.RESULTS.glob("*.json")]
    ours = {
        row.kernel
        for record in stored
        for result in record.results
        for row in result.rows
        if row.own_kernel and row.is_ffpa
    }
    grids = [shapes.load(path.stem) for path in shapes.RESULTS.glob("*.json")]
    ours |= {m.kernel for found in grids for m in found if m.kernel.startswith("forward_")}
    assert stored and grids and all(any(name.startswith(f"{family}_") for family in shipped) for name in ours)


def test_the_table_and_the_bars_of_several_directions(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "BAR_DIMS", (320, 448))
    recorded.save(tmp_path / "gpu_forward")
    recorded.source["commit"] = "1234abcd"
    first = recorded.results[0].rows
    first[-1] = replace(first[-1], problem="an error of 1")
    recorded.save(tmp_path / "gpu_backward_causal")
    names = "gpu_forward gpu_backward_causal"
    text = f"<!-- front: {names} -->\n<!-- /front -->\n<!-- bars: {names} -->\n<!-- /bars -->"
    shown = readme.generated(text, tmp_path)
    lines = [line for line in shown.splitlines() if line.startswith("| 3") or line.startswith("| 4")]
    assert [line.split("|")[1:3] for line in lines[:2]] == [[" 320 ", " forward "], [" 320 ", " backward, causal "]]
    assert "| **400T** | 100T | 90T (made_up) | 800T |" in lines[0] and "| none runs |" in lines[-1]
    assert "| 90T(wrong) (made_up) |" in lines[1] and "wrong: more than twice" in shown
    assert f"commit 1234abcd, source {'0' * 40}." in shown and "†" not in shown
    fall_back(first, otherwise=[{"columns": 320}])
    recorded.save(tmp_path / "gpu_backward_causal")
    shown = readme.generated(text, tmp_path)
    assert "| **400T†** |" in shown and "; † ran on sdpa, not on a kernel of this project; commit" in shown
    readme.draw(text, tmp_path)
    ((stored, (picture,)),) = readme.pictured(text, tmp_path).items()
    assert len(stored) == 2 and readme.mark_of(stored).encode() in picture.read_bytes()
    bars = plots.bars_figure({"forward": recorded, "backward": recorded}).axes[0]
    assert [label.get_text() for label in bars.get_xticklabels()] == [
        "320\nforward",
        "320\nbackward",
        "448\nforward",
        "448\nbackward",
    ]
    assert [round(float(bar.get_height())) for bar in bars.patches] == [400] * 4 + [100] * 4 + [90] * 2


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda record: record.source.update(tree="0-dirty"), "no commit"),
        (lambda record: setattr(record, "interrupted", True), "interrupted"),
        (
            lambda record: [result.rows.__delitem__(slice(1, None)) for result in record.results],
            "no row is of this project",
        ),
        (lambda record: fall_back(record.results[0].rows), "ran on sdpa, not on a kernel of this project"),
    ],
)
def test_the_readme_shows_nothing_that_is_not_ours(change, message, recorded, tmp_path):
    change(recorded)
    recorded.save(tmp_path / "changed")
    with pytest.raises(ValueError, match=message):
        readme.generated("<!-- bench: changed -->\n<!-- /bench -->", tmp_path)


def test_another_format_is_refused(tmp_path):
    (tmp_path / "old.json").write_text('{"format": 0}')
    with pytest.raises(ValueError, match="no record of format"):
        Record.load(tmp_path / "old.json")


def test_host_overhead():
    with overhead._no_kernels():
        found = overhead.measure("cpu", rounds=2, calls=20, n=16, head_dims=(64,))
    assert not overhead.again._known
    modes = ["no grad", "inference mode", "forward with grad", "forward and backward", "packed, no grad"]
    modes += ["pages, no grad", "pages, into `out`", "8-bit pages, no grad", "new rows and pages, no grad"]
    assert [x.mode for x in found] == modes
    assert all(0 < x.ours_us < 9000 and (x.sdpa_us is None or x.sdpa_us > 0) for x in found)
    assert overhead.table(found).count("\n") == 10
    short = overhead.Short("B=1", "forward", (10.0, 5.0), (20.0, 30.0))
    assert "| B=1 | forward | 10.0 | 5.0 | 0.50 | 20.0 | 30.0 |" in overhead.short_table([short])


def test_host_overhead_runs_as_a_program():
    command = [sys.executable, overhead.__file__, "--quick"]
    done = subprocess.run(command, env=env.child_environment(), capture_output=True, text=True, timeout=80)
    assert done.returncode == 0 and "| forward with grad |" in done.stdout, done.stderr


def test_grid_of_shapes(tmp_path, monkeypatch):
    cells = list(shapes._cells())
    assert len(set(cells)) == len(cells) > 300
    work = Workload(1, 2, 1, 16, 16, 64, 64, "bf16", causal=True)
    assert shapes.Cell("square", work).flops == 4 * 64 * 136 * 2
    assert shapes.Cell("window", work, window=3).flops == 4 * 64 * (10 + 12 * 4) * 2  # most rows see four keys
    assert shapes.Cell("window", replace(work, n_q=2), window=3).flops == 4 * 64 * 8 * 2
    square = shapes.Cell("square", work)
    slow = shapes.Measured(square, "k", {"chosen": 12.0, "hopper": 10.0, "mma": 11.0, shapes._SDPA: 6.0}, 0.5)
    assert slow.regret == 2.0 and "| 2.00 | 50% | k |" in shapes.line(slow)
    of_gradients = replace(slow, cell=replace(square, work=replace(work, backward=True)))
    assert of_gradients.regret == 1.2  # SDPA's backward needs its own forward
    assert shapes.summary([slow]) == (
        "1 cells: regret 2.000 in the median, 2.00 at most; 1 above 1.03; beside SDPA's best 0.50 to 0.50, median 0.50"
    )
    monkeypatch.setattr(shapes, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "machine", lambda device: {})
    both = [slow, replace(slow, cell=replace(square, work=replace(work, d=128)))]
    shapes.save(both, "grid")
    assert shapes.load("grid") == both
    shapes.main(["--draw", "grid"])
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("grid.png", "grid_small.png"))


def test_grid_of_shapes_as_measured():
    found = shapes.load("h100")
    assert "regret 1.00" in shapes.summary(found) and min(m.share for m in found) > 0


def test_grid_of_shapes_runs_as_a_program():
    command = [sys.executable, shapes.__file__, "--quick", "--iters", "2"]
    done = subprocess.run(command, env=env.child_environment(), capture_output=True, text=True, timeout=80)
    assert done.returncode == 0 and "2 cells: regret" in done.stdout, done.stderr


@pytest.mark.parametrize("d", paged.HEADS)
@pytest.mark.parametrize("kind, lengths, rows", [("chunks", (40, 40), 8), ("decoding", (40, 1, 17), 1)])
def test_calls_with_and_without_pages_are_the_same(kind, lengths, rows, d, device):
    case = paged.Case(kind, d, lengths, rows)
    x = paged.make_tensors(case, device)
    calls, pools = paged.calls_of(case, x)
    outs = {name: call() for name, call in calls.items()}
    heads, _, d_v = paged.HEADS[d]
    names = ["unpaged", "64", "16", *(["8 bits"] if d != 576 else [])]
    assert list(outs) == names and outs["16"].shape == (len(lengths), rows, heads, d_v)
    for out in outs.values():
        torch.testing.assert_close(out, outs["unpaged"], atol=0.02, rtol=0.02)
    assert pools[16].table.shape == (len(lengths), 3)


def test_rows_of_pages():
    case = paged.Case("decoding", 576, (100, 28), 1)
    assert case.bytes_of_keys == 2 * 128 * 576 and str(case) == "decoding, B=2, 1 on 100, H=128/1, D=576/512"
    of_all = {name: 2.0 for name in ("unpaged", "64", "16")}
    found = {"case": str(case), "ms": of_all, "ratios": of_all, "gb_per_s": of_all, "of_read": of_all}
    line = paged.row(found | {"append_us": 1.5, "append_adds_us": 2.25})
    assert line.count("|") == paged.HEADER.count("|") and line.endswith("| 1.5 | 2.2 |")
    chunks = paged.Case("chunks", 128, (40, 40), 8)
    assert chunks.flops == 2 * 32 * 4 * 128 * sum(range(33, 41))
    line = paged.row({"case": str(chunks), "ms": of_all, "ratios": of_all, "tflops": of_all})
    assert line.count("|") == paged.HEADER.count("|")
    assert len(list(paged.cases(paged.KINDS, paged.HEADS, quick=False))) == len(paged.HEADS) * 14
    assert max(paged.ragged(64, 4096)) == 4096 and min(paged.ragged(64, 4096)) >= 1


def test_pairs_of_shapes_that_train():
    """What is counted is what a mask of all pairs shows."""
    for case in training_shapes.cases(quick=True):
        n = torch.arange(max(case.lengths))
        behind = n[:, None] - n
        sees = behind >= (0 if case.causal or case.window is not None else -len(n))
        if case.window is not None:
            sees &= behind <= case.window
        assert case.pairs == sum(int(sees[:length, :length].sum()) for length in case.lengths), case


@pytest.mark.parametrize("mask", training_shapes.MASKS)
def test_masks_of_shapes_that_train(mask, device):
    case = training_shapes.Case("masks", mask, 64, (64, 64), 2, 2, causal=False, mask=mask)
    made = training_shapes.make_mask(case, device)
    shown = made.expand(2, 2, 64, 64)
    if mask == "additive":
        assert made.dtype == torch.bfloat16 and made.std() > 0.5
    else:
        assert made.dtype == torch.bool and 0.3 < shown.float().mean() < 0.95 and bool(shown.any(-1).all())
    forward, backward = training_shapes.calls_of(case, device)
    assert forward().shape == (2, 2, 64, 64) and [x.shape[-2] for x in backward()] == [64, 64, 64]


def test_shapes_that_train_run_as_a_program(tmp_path):
    command = [sys.executable, training_shapes.__file__, "--quick", "--iters", "1", "--kind", "softcap", "--d", "128"]
    command += ["--write", str(tmp_path / "found.json")]
    done = subprocess.run(command, env=env.child_environment(), capture_output=True, text=True, timeout=80)
    assert done.returncode == 0 and "| softcap 30, N=32, H=16/16, D=128 |" in done.stdout, done.stderr
    (found,) = json.loads((tmp_path / "found.json").read_text())["cases"]
    assert set(found["of_plain"]) == {"forward", "backward"} and found["tflops"]["backward"] > 0
