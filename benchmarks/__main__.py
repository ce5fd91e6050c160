"""`python -m benchmarks NAME... [flags]`: measures; `python -m benchmarks` lists what there is."""

from __future__ import annotations

import ast
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import get_type_hints

from benchmarks.arguments import add_flags, given
from emberkeep.cli.bench import KINDS, Benchmark, run_all
from emberkeep.cli.commands import settle
from emberkeep.cli.main import run

_HERE = Path(__file__).parent
OURS = (
    *("accuracy", "agents", "bits", "busy", "cluster", "crowd", "decoding", "doors", "endless", "gpu", "hf_turns"),
    *("hosts", "limit", "memory", "miss", "rag", "replay", "shared", "speculation", "store", "streams", "swap"),
    *("trace", "watched"),
)
ALL = (
    "restart",
    "turns",
    "load",
    "limit",
    "decoding",
    "shared",
    "miss",
    "bits",
    "store",
    "memory",
    "crowd",
    "endless",
)


def main(arguments: Sequence[str]) -> None:
    """Raises EmberkeepError, OSError."""
    asked = list(takewhile(lambda argument: not argument.startswith("-"), arguments))
    names = [name for one in asked for name in (ALL if one == "all" else (one.replace("-", "_"),))]
    unknown = [name for name in names if name not in {*KINDS, *OURS}]
    if unknown or not names:
        print(_listing(), file=sys.stderr)
        sys.exit(f"There is no {unknown[0]}." if unknown else 2)
    modules = {name: f"{'emberkeep.bench' if name in KINDS else 'benchmarks'}.{name}" for name in names}
    plans = [get_type_hints(import_module(module).run)["plan"] for module in modules.values()]
    parser = ArgumentParser(prog=f"python -m benchmarks {' '.join(asked)}", allow_abbrev=False)
    parser.add_argument("--model", help="an installed name, a .gguf file, or a folder of safetensors")
    parser.add_argument("--data-dir", type=Path, help="a folder on the disk to measure (default: temporary)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every sample, the machine and the versions")
    parser.add_argument("--quick", action="store_true", help="does it run? The numbers mean little")
    add_flags(parser, *plans)
    found = parser.parse_args(arguments[len(asked) :])
    flags = given(found, *plans)
    benchmarks = [Benchmark.load(name, module, flags, quick=found.quick) for name, module in modules.items()]
    run_all(benchmarks, settle(model=found.model).config, found.data_dir, found.json)


def _listing() -> str:
    lines = [f"{name:<13}{about}" for name, about in KINDS.items()]
    lines += [f"{name:<13}{_first_sentence(name)}" for name in OURS]
    return "\n".join([*lines, f"{'all':<13}{', '.join(ALL)}", "python -m benchmarks NAME --help lists its flags."])


def _first_sentence(name: str) -> str:
    """The docstring's, of a module that is not imported for that."""
    file = _HERE / f"{name}.py"
    source = (file if file.exists() else _HERE / name / "__init__.py").read_text(encoding="utf-8")
    about = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0]
    return " ".join(about.partition(": ")[2].split())


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
