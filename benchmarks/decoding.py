"""`decoding`: eight clients at once, against a bare decode loop over the same prompts.

The prompts are in the server's store before the clock starts, and the bare loop has evaluated them. It runs in a
process of its own while the server stands still.
"""

from __future__ import annotations

from benchmarks.bare import decode_seconds_elsewhere
from emberkeep.bench.load import LoadPlan, decode, new_prompts
from emberkeep.bench.report import BenchResult, Row, Table, ratios, series
from emberkeep.bench.servers import OwnServer
from emberkeep.bench.workspace import Workspace


async def run(workspace: Workspace, plan: LoadPlan) -> BenchResult:
    workspace.require_context(plan.context)
    served, bare = list[float](), list[float]()
    with OwnServer(workspace, parallel=plan.clients) as server:
        await decode(server, await new_prompts(workspace, server, plan, plan.clients, "warm-up"), 2)
        for number in range(plan.repeat):
            workspace.say(f"round {number + 1} of {plan.repeat}")
            prompts = await new_prompts(workspace, server, plan, plan.clients, number)
            served.append(await decode(server, prompts, plan.answer_tokens))
            lengths = [plan.answer_tokens] * plan.clients
            with server.pause():
                bare.append(sum(lengths) / decode_seconds_elsewhere(workspace.model, prompts, lengths))
    rate, limit = series(served, "tokens/s"), series(bare, "tokens/s")
    row = Row("streaming", {"throughput": rate, "bare loop": limit, "share": ratios(rate, limit)})
    title = f"{plan.clients} clients, {plan.answer_tokens} tokens each"
    return BenchResult("decoding", (Table(title, (row,)),), ("share: throughput / that of the bare loop.",))
