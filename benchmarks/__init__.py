"""Benchmarks for those who work on Emberkeep: single parts against their limits, and against other ways.

Each module measures one thing: `run` does it, and the plan that it takes says how much; fields of plans are flags.
`python -m benchmarks` lists them and those of `emberkeep bench`, from which come client, servers and report.
"""
