"""Refuses to be imported where PyPI's package of the same module, `ffpa-attn`, is installed as well.

Both own the folder `ffpa_attn`: whichever came last has overwritten the other's files, and what is imported is neither.
"""

from importlib.metadata import Distribution, distributions
from pathlib import Path

NAME = "ffpa-cuda"  # name of this distribution
OTHER = "ffpa-attn"
_MODULE = "ffpa_attn/__init__.py"


def conflict() -> str | None:
    """Says what is wrong if both are installed, and the way out."""
    for other in distributions(name=OTHER):
        if _has_the_module(other):
            return (
                f"{OTHER} {other.version} is installed as well as {NAME}, and both have the module ffpa_attn, so that files of "
                f"the two are mixed or hide one another; the way out: pip uninstall -y {OTHER} {NAME}, and then install {NAME} "
                "again"
            )
    return None


def _has_the_module(other: Distribution) -> bool:
    """Says whether a distribution has the module: a leftover has not; where nothing lists files they are looked for."""
    if other.files is None:
        return Path(other.locate_file(_MODULE)).exists()
    return _MODULE in map(str, other.files)


if said := conflict():
    raise ImportError(said)
