"""This module writes the C++ that a KernelSpec stands for: its Config, the small file to compile, the wheel's table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from ..specs.spec import KernelSpec

# A string in a spec names one of these: an element type, or what tensor cores accumulate in.
_TYPES = {"f16": "ffpa::Half", "bf16": "ffpa::BFloat16", "f32": "float", "e4m3": "ffpa::E4M3", "e5m2": "ffpa::E5M2"}


def _pascal(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _member(name: str, value) -> str:
    if isinstance(value, str):
        return f"using {_pascal(name)} = {_TYPES[value]};"
    if isinstance(value, bool):
        return f"static constexpr bool k{_pascal(name)} = {str(value).lower()};"
    return f"static constexpr int k{_pascal(name)} = {value};"


def instance_symbol(spec: KernelSpec) -> str:
    return f"ffpa_instance_{spec.name}"


def config_source(spec: KernelSpec) -> str:
    """Returns the include of the kernel and the Config type; the emulator compiles the same text."""
    members = "\n".join(f"  {_member(field.name, getattr(spec, field.name))}" for field in fields(spec))
    return f"""#include "{spec.header}"

struct {spec.name}_fields {{
{members}
}};
struct {spec.name} : ffpa::{_pascal(spec.family)}Config<{spec.name}_fields> {{}};
"""


def instance_source(spec: KernelSpec) -> str:
    """Returns the file of one kernel: its text is the same for the wheel and for a library compiled on demand."""
    symbol = instance_symbol(spec)
    return f"""// Written by ffpa_attn/building/generation.py.
#include "launch/launcher.cuh"
{config_source(spec)}
extern "C" __attribute__((visibility("default"))) const ffpa::Instance {symbol};
const ffpa::Instance {symbol} =
    ffpa::Launcher<{spec.name}, ffpa::{spec.family}<{spec.name}>>::instance("{spec.name}");
"""


def emulated_source(specs: Iterable[KernelSpec]) -> str:
    """Returns the same Configs and kernels, as instances of the emulator's module."""
    texts = [
        f"""{config_source(spec)}
static const bool {spec.name}_registered =
    ffpa::emulated_instances()
        .emplace("{spec.name}", ffpa::emulated_instance<{spec.name}, ffpa::{spec.family}<{spec.name}>>())
        .second;
"""
        for spec in specs
    ]
    return "\n".join(['// Written by ffpa_attn/building/generation.py.\n#include "launch/emulated/instance.h"', *texts])


def table_source(specs: Iterable[KernelSpec]) -> str:
    """Returns the registry's table of what is compiled into the wheel's library."""
    symbols = [instance_symbol(spec) for spec in specs]
    declarations = "\n".join(f'extern "C" const ffpa::Instance {symbol};' for symbol in symbols)
    entries = "\n".join(f"    &{symbol}," for symbol in symbols)
    return f"""// Written by ffpa_attn/building/generation.py.
#include "launch/instance.h"

{declarations}

static const ffpa::Instance* const instances[] = {{
{entries}
}};
const ffpa::InstanceTable ffpa::kBuiltInInstances{{instances, {len(symbols)}}};
"""
