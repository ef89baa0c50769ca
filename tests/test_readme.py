"""Every Python example of the README and of docs/ runs as it stands, and every file that they name exists."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
}
EXAMPLES = [
    pytest.param(example, id=f"{page}-line{text[: text.index(example)].count(chr(10)) + 1}")
    for page, text in PAGES.items()
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example):
    for library in re.findall(r"from (transformers|diffusers) import", example):
        pytest.importorskip(library)
    if "restore_flash_attention_impl" in example and not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        pytest.skip("PyTorch 2.11 is the first release that has it")
    scope = {}
    exec(compile(example, "an example", "exec"), scope)
    assert "out" in scope and scope["out"].isfinite().all()


def test_there_are_examples():
    assert len(EXAMPLES) >= 15


@pytest.mark.parametrize("script", sorted({x for text in PAGES.values() for x in re.findall(r"bash (\S+\.sh)", text)}))
def test_scripts_exist(script):
    assert (ROOT / script).exists()


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


LINKS = sorted({(page, link) for page, text in PAGES.items() for link in re.findall(r"\]\((?!http)([^)]+)\)", text)})


@pytest.mark.parametrize("page, link", LINKS)
def test_links_lead_somewhere(page, link):
    name, _, anchor = link.partition("#")
    target = (ROOT / page).parent / name if name else ROOT / page
    assert target.exists()
    assert not anchor or anchor in anchors(target.read_text())


def test_the_readme_is_short():
    assert PAGES["README.md"].count("\n") <= 280
