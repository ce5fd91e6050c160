"""`python -m benchmarks.gpu`: the benchmark `gpu` where the command line's packages are not installed."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

from benchmarks.arguments import add_flags, given
from benchmarks.gpu import GpuPlan, measure


def main() -> None:
    parser = ArgumentParser(prog="python -m benchmarks.gpu", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("/dev/stdout"))
    add_flags(parser, GpuPlan)
    found = parser.parse_args()
    flags = given(found, GpuPlan)
    plan = replace(GpuPlan().quick(), **flags) if found.quick else GpuPlan(**flags)
    for result in measure(plan, lambda what: print(f"… {what}", file=sys.stderr, flush=True)):
        found.json.write_text(json.dumps(result.json(), indent=2) + "\n")


if __name__ == "__main__":
    main()
