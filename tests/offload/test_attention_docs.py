"""The table of docs/attention.md is that of the registry."""

import sys
from pathlib import Path

from diffusion_core.offload.attention_backends import BACKENDS, capability_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "attention.md"
MARK = "capability_table -->\n"


def test_the_table_of_the_docs_is_the_registrys() -> None:
    """Run this file to write the table anew."""
    assert capability_table() in PAGE.read_text(encoding="utf-8")
    assert capability_table().count("\n") == len(BACKENDS) + 2


def write() -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(MARK)
    PAGE.write_text(head + MARK + capability_table() + "\n" + rest.split("\n\n", 1)[1], encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())
