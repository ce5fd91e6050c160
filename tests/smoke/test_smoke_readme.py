"""Every example of the README does what it shows, against the real server and with the default model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8080"
EXAMPLES = re.findall(
    r"^```(sh|python)\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
SHELL = [code for kind, code in EXAMPLES if kind == "sh" and "make run" not in code]
PYTHON = [code for kind, code in EXAMPLES if kind == "python"]


def run(*command: str, data_dir: Path, model: Path) -> str:
    settings = {"EMBERKEEP_DATA_DIR": str(data_dir), "EMBERKEEP_MODEL": str(model), "EMBERKEEP_THREADS": "1"}
    done = subprocess.run(
        command, env=os.environ | settings, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", SHELL, ids=lambda code: code.split()[0])
def test_what_is_typed_into_a_shell(code: str, server: ServerProcess, data_dir: Path, smollm2: Path) -> None:
    code = code.replace(ADDRESS, server.url).replace(".venv/bin/emberkeep", f"'{sys.executable}' -m emberkeep")
    code = re.sub(r"(launch \w+)", r"\1 --print", code)
    assert run("sh", "-ec", code, data_dir=data_dir, model=smollm2)


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.split()[1])
def test_what_is_written_in_python(code: str, server: ServerProcess, data_dir: Path, smollm2: Path) -> None:
    assert run(sys.executable, "-c", code.replace(ADDRESS, server.url), data_dir=data_dir, model=smollm2)


def test_every_kind_of_example_is_found() -> None:
    assert len(SHELL) >= 2
    assert len(PYTHON) >= 2
