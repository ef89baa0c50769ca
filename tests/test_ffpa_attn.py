"""The bench people run, `python tests/test_ffpa_attn.py --gen-bench --plot`; under pytest, the proof that it works."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import paths  # noqa: F401  (first: it finds the package)
import cli

if __name__ == "__main__":
    sys.exit(cli.main())
