"""Refuses to be imported where PyPI's package of the same module, `ffpa-attn`, is installed as well.

Both own the folder `ffpa_attn`: whichever came last has overwritten files of the other, and what is imported is neither.
"""

from importlib.metadata import distributions

NAME = "ffpa-cuda"  # this distribution's
OTHER = "ffpa-attn"


def conflict() -> str | None:
    """What is wrong, if both are installed, and the way out."""
    for other in distributions(name=OTHER):
        if "ffpa_attn/__init__.py" in map(str, other.files or ()):  # else a leftover, without the module
            return (
                f"{OTHER} {other.version} is installed as well as {NAME}, and both have the module ffpa_attn, so that files of "
                f"the two are mixed; the way out: pip uninstall -y {OTHER} {NAME}, and then install {NAME} again"
            )
    return None


if said := conflict():
    raise ImportError(said)
