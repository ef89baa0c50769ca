"""Importing this puts the package (installed or not) and the tests' oracle and comparator on the import path.

This tree's package comes first: the record names the commit that was measured.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

for _folder in ("tests", "ffpa"):
    sys.path.insert(0, str(ROOT / _folder))
