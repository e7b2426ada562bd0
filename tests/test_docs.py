"""Every Python example of the README and the docs runs; the examples of a page share one namespace."""

import ast
import re
from pathlib import Path

import pytest

from diffusion_core.shapes import shapes_folder

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(python|py)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def examples(page: Path, kind: str) -> list[str]:
    """The code of the page's fences: `python` is run, `py` only has to be Python."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [re.sub(f"^{indent}", "", code, flags=re.MULTILINE) for indent, name, code in found if name == kind]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for code in examples(page, "py"):
        ast.parse(code)
    codes = examples(page, "python")
    if not codes:
        pytest.skip("no example to run on this page")
    if "simulator(" in "".join(codes):
        pytest.skip("needs the simulated accelerator, in a process of its own: tests/offload/simulator runs it")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "example"}
    for code in codes:
        exec(compile(code, f"{page.name}", "exec"), namespace)


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+\.(?:md|png))", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_embedded_model_is_here():
    assert (shapes_folder() / "model_index.json").is_file()
