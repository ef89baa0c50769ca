"""The bench people run, `python tests/test_ffpa_attn.py --gen-bench --plot`; under pytest, the proof that it works."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# This tree's package first, installed or not: the record names the commit that was measured.
sys.path.insert(0, str(ROOT / "ffpa"))
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "bench"))

import cli

if __name__ == "__main__":
    sys.exit(cli.main())
