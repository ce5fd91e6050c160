"""Anybody may have filled the current folder: nothing in it is run."""

from __future__ import annotations

import re
from pathlib import Path

import emberkeep


def test_no_python_that_is_started_imports_from_the_current_folder() -> None:
    root = Path(emberkeep.__file__).parent
    started = {
        f"{path.relative_to(root)}: {found}"
        for path in root.rglob("*.py")
        for found in re.findall(r"\bsys\.executable,\s*[^,\]]*", path.read_text())
    }
    assert len(started) >= 8
    assert {found for found in started if not found.endswith(('"-P"', '"-I"', "sys.orig_argv"))} == set()
