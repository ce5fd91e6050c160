"""The event loop behind ordinary calls."""

from __future__ import annotations

import asyncio

import pytest

from emberkeep.library.bridge import Bridge


async def leave() -> None:
    raise SystemExit(3)


async def seven() -> int:
    await asyncio.sleep(0)
    return 7


def test_a_task_that_ends_the_loop_ends_no_other_wait() -> None:
    bridge = Bridge()
    with pytest.raises(SystemExit):
        bridge.run(leave())
    assert bridge.run(seven()) == 7
    bridge.close()
    assert not bridge._thread.is_alive()
