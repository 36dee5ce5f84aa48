"""The simulation of a fleet against answers that can be written down, and laws that hold whatever the numbers are."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.policy_store import relay_tree

SOURCE = Path(__file__).parents[3] / "benchmarks" / "fleet_simulation.py"
spec = importlib.util.spec_from_file_location("fleet_simulation", SOURCE)
assert spec is not None
assert spec.loader is not None
fleet = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = fleet  # dataclasses look their module up
spec.loader.exec_module(fleet)

FREE = 1e-9
FAST = 1e18
NOTHING = fleet.Fleet(engines=1, learners=1, learner_link=FAST, store_in=FAST, store_out=FAST, engine_link=FAST, latency_s=0.0, durable_s=0.0,
                      window=1000)


def update(packs: int = 10, *, pack_bytes: float = 100.0, encode_s: float = 0.0, apply_s: float = 0.0) -> fleet.Update:
    return fleet.Update(packs, pack_bytes, 1000.0, encode_s, apply_s)


@pytest.mark.parametrize(
    ("slow", "stage"),
    [
        ({"learner_link": 50.0}, "UPLOAD"), ({"store_in": 50.0}, "STORE_IN"), ({"store_out": 50.0}, "STORE_OUT"),
        ({"engine_link": 50.0}, "ENGINE_IN"),
    ],
)
def test_one_slow_link_takes_its_bytes_over_its_rate_and_is_the_bottleneck(slow: dict[str, float], stage: str) -> None:
    found = fleet.simulate(update(), replace(NOTHING, **slow))
    assert found.last_s == pytest.approx(10 * 100 / 50)
    assert found.bottleneck is fleet.Stage[stage]
    assert found.busy_s[found.bottleneck] == pytest.approx(20)


def test_a_slow_coder_or_engine_takes_its_seconds_for_every_pack() -> None:
    encoded = fleet.simulate(update(encode_s=3.0), NOTHING)
    assert (encoded.last_s, encoded.bottleneck) == (pytest.approx(30), fleet.Stage.ENCODE)
    assert fleet.simulate(update(encode_s=3.0), replace(NOTHING, learners=5)).last_s == pytest.approx(6)
    applied = fleet.simulate(update(apply_s=3.0), NOTHING)
    assert (applied.last_s, applied.pause_s, applied.bottleneck) == (pytest.approx(30), pytest.approx(30), fleet.Stage.APPLY)


def test_with_the_head_the_stages_before_it_and_after_it_add_up_and_without_it_they_overlap() -> None:
    both = replace(NOTHING, learner_link=50.0, engine_link=50.0)
    assert fleet.simulate(update(), both).last_s == pytest.approx(20 + 20)
    assert fleet.simulate(update(), replace(both, announce=fleet.Announce.PACK)).last_s == pytest.approx(20 + 2)


def test_a_store_read_by_all_engines_sends_every_byte_to_each() -> None:
    found = fleet.simulate(update(), replace(NOTHING, engines=8, store_out=100.0))
    assert found.last_s == pytest.approx(8 * 10)
    assert found.store_out_bytes == 8 * 1000
    assert found.relayed_bytes == 0


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_chain_of_engines_costs_one_pack_more_for_each_hop_and_not_the_whole_update(depth: int) -> None:
    found = fleet.simulate(update(packs=50), replace(NOTHING, engines=depth, engine_link=100.0, store_out=100.0, tree=fleet.Tree.FIXED, fanout=1))
    assert found.last_s == pytest.approx(50 + (depth - 1))
    assert found.store_out_bytes == 5000
    assert found.relayed_bytes == (depth - 1) * 5000


def test_a_fixed_tree_is_as_slow_as_one_engine_serving_its_children_and_a_tree_for_each_pack_is_not() -> None:
    tree = replace(NOTHING, engines=21, engine_link=100.0, fanout=4)
    fixed = fleet.simulate(update(packs=200), replace(tree, tree=fleet.Tree.FIXED))
    assert fixed.bottleneck is fleet.Stage.RELAY
    assert fixed.last_s == pytest.approx(4 * 200, abs=8)
    spread = fleet.simulate(update(packs=200), replace(tree, tree=fleet.Tree.BY_PACK))
    assert spread.last_s < 0.5 * fixed.last_s
    assert spread.relayed_bytes == fixed.relayed_bytes


def test_every_hop_of_a_request_is_paid_for_when_one_pack_at_a_time_is_asked_for() -> None:
    """Each pack: the request, the bytes' way back, nothing else. The news of the head travels once; the first requests wait there."""
    found = fleet.simulate(update(), replace(NOTHING, latency_s=1.0, window=1))
    durable = 1 + 2 * 2  # the upload's way, then manifest and head, each there and back
    assert found.durable_s == pytest.approx(durable)
    assert found.last_s == pytest.approx(durable + 1 + 1 + 9 * 2)


def test_a_wider_window_hides_the_latency() -> None:
    slow = replace(NOTHING, latency_s=1.0, engine_link=100.0)
    one, three = (fleet.simulate(update(packs=100), replace(slow, window=window)).last_s for window in (1, 3))
    assert one - 6 == pytest.approx(100 * 3, abs=3)
    assert three - 6 == pytest.approx(100, abs=3)


@pytest.mark.parametrize("tree", [fleet.Tree.FIXED, fleet.Tree.BY_PACK])
def test_parents_form_one_tree_in_which_nobody_serves_more_than_the_fanout(tree: fleet.Tree) -> None:
    found = fleet.parents(64, tree, 4, 5)
    assert found.count(fleet.STORE) == 1
    assert max(found.count(engine) for engine in range(64)) == 4
    for engine in range(64):
        hops = 0
        while engine != fleet.STORE:
            engine, hops = found[engine], hops + 1
        assert hops <= 4


def test_the_tree_of_a_pack_is_the_relays() -> None:
    names = [str(engine) for engine in range(20)]
    found = fleet.parents(20, fleet.Tree.BY_PACK, 3, 7)
    for engine, name in enumerate(names):
        asked = relay_tree.parent(f"{7:032x}", name, [other for other in names if other != name], 3)
        assert found[engine] == (fleet.STORE if asked is None else int(asked))


rates = st.floats(1.0, 1000.0)


@st.composite
def fleets(draw: st.DrawFn) -> fleet.Fleet:
    return fleet.Fleet(
        engines=draw(st.integers(1, 9)), learners=draw(st.integers(1, 4)), learner_link=draw(rates), store_in=draw(rates),
        store_out=draw(rates), engine_link=draw(rates), latency_s=draw(st.floats(0, 2)), durable_s=draw(st.floats(0, 2)),
        window=draw(st.integers(1, 5)), tree=draw(st.sampled_from(fleet.Tree)), fanout=draw(st.sampled_from([1, 2, 4])),
        announce=draw(st.sampled_from(fleet.Announce)),
    )


@given(fleets(), st.integers(1, 12), st.floats(0, 3), st.floats(0, 3))
@settings(max_examples=150, deadline=None)
def test_bytes_are_conserved_and_no_case_is_quicker_than_its_busiest_stage(
    given_fleet: fleet.Fleet, packs: int, encode_s: float, apply_s: float
) -> None:
    one = update(packs, encode_s=encode_s, apply_s=apply_s)
    found = fleet.simulate(one, given_fleet)
    assert found.received_bytes == pytest.approx(given_fleet.engines * packs * one.pack_bytes)
    assert found.store_out_bytes + found.relayed_bytes == pytest.approx(found.received_bytes)
    assert found.store_out_bytes == pytest.approx(packs * one.pack_bytes * (given_fleet.engines if given_fleet.tree is fleet.Tree.NONE else 1))
    assert found.last_s >= max(found.busy_s.values()) - 1e-6
    assert found.last_s >= found.fetched_s >= packs * one.pack_bytes / given_fleet.engine_link - 1e-6
    assert found.pause_s >= found.apply_s - 1e-6


@given(fleets(), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_hearing_of_packs_before_the_head_is_never_slower(given_fleet: fleet.Fleet, packs: int) -> None:
    one = update(packs, encode_s=0.5, apply_s=0.5)
    head, pack = (fleet.simulate(one, replace(given_fleet, announce=announce)).last_s for announce in (fleet.Announce.HEAD, fleet.Announce.PACK))
    assert pack <= head + 1e-6
