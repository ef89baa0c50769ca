"""Every Python example of the README runs as it stands, and every file it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=[f"line{README[: README.index(e)].count(chr(10)) + 1}" for e in EXAMPLES]
)
def test_example(example):
    for library in re.findall(r"from (transformers|diffusers) import", example):
        pytest.importorskip(library)
    scope = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert "out" in scope and scope["out"].isfinite().all()


def test_there_are_examples():
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("script", sorted(set(re.findall(r"bash (\S+\.sh)", README))))
def test_scripts_exist(script):
    assert (ROOT / script).exists()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
