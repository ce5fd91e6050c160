"""Benchmarks for those who work on Emberkeep: single parts against their limits, and against other ways.

Each module measures one thing: its `Workload` says how much, its `run` does it. `python -m benchmarks` lists them
and those of `emberkeep bench`, from which (`emberkeep.bench`) come client, server, figures and report.
"""
