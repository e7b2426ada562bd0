"""The table of reported cases names tests that exist, and leaves no case of its sections out."""

import re
from pathlib import Path

from .support import SHARED, needs_shared

ROOT = Path(__file__).resolve().parents[1]
TABLE = (ROOT / "tests" / "CASES.md").read_text(encoding="utf-8")
NODES = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE)
ROWS = {int(number): tests for number, tests in re.findall(r"^\| (\d+) \| (.*) \|$", TABLE, re.MULTILINE)}


def test_every_test_named_exists() -> None:
    assert len(NODES) > 50
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file, _ in NODES}
    missing = [f"{file}::{name}" for file, name in NODES if f"\ndef {name}(" not in sources[file]]
    assert missing == []


def test_every_row_names_a_test_or_says_why_not() -> None:
    assert [number for number, tests in ROWS.items() if "::test_" not in tests and "not yet:" not in tests] == []


@needs_shared
def test_no_case_of_these_sections_is_left_out() -> None:
    cases = (SHARED / "cases.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## ([A-Z])\..*?\n(.*?)(?=^## |\Z)", cases, re.MULTILINE | re.DOTALL))
    numbers = {
        int(number) for letter in "ABCDEFGHI" for number in re.findall(r"^(\d+)\.", sections[letter], re.MULTILINE)
    }
    assert {number for number in numbers if number not in ROWS} == set()
