"""`python -m benchmarks.gpu`: the benchmark `gpu` where the command line's packages are not installed."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import Workload, measure
from benchmarks.gpu.workload import PARTS


def main() -> None:
    parser = ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--engine", choices=["hf", "llamacpp"])
    parser.add_argument("--device")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--tokens", type=int, nargs="+", dest="sizes")
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("/dev/stdout"))
    given = vars(parser.parse_args())
    report, quick = given.pop("json"), given.pop("quick")
    chosen: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v}
    plan = replace(Workload().quick() if quick else Workload(), **chosen)
    for result in measure(plan, lambda what: print(f"… {what}", file=sys.stderr, flush=True)):
        report.write_text(json.dumps(result.json(), indent=2) + "\n")


if __name__ == "__main__":
    main()
