"""Makes ffpa a backend of vLLM by a plugin's entry point: `--attention-backend FFPA`, or `FFPA_MLA`.

`register` says where the classes are, and no more: vLLM imports them if somebody asks for them.
"""

from __future__ import annotations

import logging

BACKENDS = {"FFPA": f"{__name__}.backend.FfpaBackend", "FFPA_MLA": f"{__name__}.mla.FfpaMlaBackend"}


def register() -> None:
    """Tells vLLM of the backends. vLLM calls it in each of its processes, and may do so again."""
    from . import releases

    try:
        for name, path in BACKENDS.items():
            releases.member(name, path)
    except (ImportError, AttributeError) as error:  # this serves people, too, who never asked for ffpa
        logging.getLogger(__name__).warning("FFPA is no backend here: %s", releases.unfit(error))
