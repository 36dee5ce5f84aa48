"""The short form of the chaos test: each kind of process killed, the broker killed, an engine paused until its leases lapse, work
published twice, all through a slow network; and nothing is lost, nothing counted twice, nobody left hanging.

Field failures of these kinds: H3, H6, H7, H8, H16, H19, H28, L1, L3, L4, L6, L8, L12, L20, S8, W5.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from chaos_schedule import SHORT, schedule
from chaos_stage import perform

pytestmark = pytest.mark.slow

SEED, STEPS = 187, 8  # whose faults come early, each on a target that is free: a slow machine misses none
WAIT_S = 480.0


async def test_a_run_under_fire_ends_with_every_trajectory_ended_once(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT_S):
        result = await perform(SEED, STEPS, schedule(SEED, STEPS, SHORT), tmp_path, kills=1)
    assert result.problems == [], result.json()
    assert (result.versions, result.lost, result.doubled, result.left_over) == (STEPS + 1, 0, 0, 0), result.json()
    assert result.ids > 0
    assert result.broker_kills == 1
    assert result.pauses == 1
    assert all(result.duplicates.values()), result.duplicates
    assert result.outcomes["trained"] >= STEPS
