"""Groups sampled by fakes of vLLM and SGLang: versions, aborts, failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import group
from fake_servers import VOCAB, Fake, FakeSglang, FakeVllm, digest_of, distribution

from driftline.messages.errors import ConfigError, DriftlineError, IntegrityError
from driftline.messages.types import Finish, Group, Sampling, Task, Trajectory
from driftline.models.tokenizer import ByteTokenizer
from driftline.services.rollout.external import (
    ExternalEngine,
    HandOver,
    ServerRefused,
    ServerUnavailable,
    Sglang,
    Vllm,
)
from driftline.services.rollout.external.server import Http
from driftline.services.rollout.quarantine import is_infrastructure

KINDS = [(FakeVllm, Vllm), (FakeSglang, Sglang)]
both = pytest.mark.parametrize("kind", KINDS, ids=["vllm", "sglang"])
ways = pytest.mark.parametrize("adapters", [False, True], ids=["files", "adapters"])
Kind = tuple[type[Fake], Callable[[Http], Any]]


def state(version: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(version)
    return {"model.layers.0.self_attn.q_proj.weight": torch.randn(4, 4).bfloat16(), "model.layers.0.self_attn.q_proj.lora_A": torch.randn(2, 4),
            "model.layers.0.self_attn.q_proj.lora_B": torch.randn(4, 2), "model.layers.0.mlp.experts.delta.w1.lora_A": torch.randn(2, 2, 4),
            "model.layers.0.mlp.experts.delta.w1.lora_B": torch.randn(2, 4, 2)}


@contextmanager
def opened(kind: Kind, place: Path, *, adapters: bool = False, outage_s: float = 0.2, load: bool = True, **settings: Any) -> Iterator[tuple[ExternalEngine, Any]]:
    fake = kind[0](**settings)
    with fake.served() as url:
        files = HandOver(place / "versions", beside={"config.json": b"{}"}, alpha=4.0 if adapters else None)
        engine = ExternalEngine(kind[1](Http(url)), files, tokenizer=ByteTokenizer(), context=1024, vocab=VOCAB, version=0, max_batch=8, outage_s=outage_s)
        try:
            if load:
                engine.load(0, state(0))
            yield engine, fake
        finally:
            fake.release()
            engine.close()


def finish_all(engine: ExternalEngine, within_s: float = 20.0) -> list[Trajectory]:
    until, done = time.monotonic() + within_s, list[Trajectory]()
    while not engine.idle:
        assert time.monotonic() < until, "it does not end"
        done += engine.step()
    return sorted(done, key=lambda t: (t.group, t.member))


def stepping(engine: ExternalEngine, condition: Callable[[], object], within_s: float = 20.0) -> list[Trajectory]:
    until, done = time.monotonic() + within_s, list[Trajectory]()
    while not condition():
        assert time.monotonic() < until, "it does not come to it"
        done += engine.step()
    return done


def drawn_by(trajectory: Trajectory, digests: dict[int, str]) -> None:
    """Every token's log-probability is that of the version it is stamped with, and of no other."""
    tokens = trajectory.tokens.tolist()
    for at in range(trajectory.prompt_tokens, len(tokens)):
        version = int(trajectory.versions[at])
        told = float(trajectory.logprobs[at])
        for other, digest in digests.items():
            expected = distribution(digest, tokens[:at], trajectory.temperature)[tokens[at]]
            if other == version:
                assert told == pytest.approx(expected, abs=1e-5)
            else:
                assert abs(told - expected) > 1e-5


def digests(place: Path, *versions: int) -> dict[int, str]:
    return {version: digest_of(place / "versions" / f"v{version:08d}") for version in versions}


@both
@ways
def test_groups_come_back_as_trajectories(kind: Kind, adapters: bool, tmp_path: Path) -> None:
    with opened(kind, tmp_path, adapters=adapters) as (engine, fake):
        engine.submit(group(0, members=4, max_tokens=30))
        engine.submit(group(1, members=3, max_tokens=3), (0, 2))
        assert engine.waiting == 6
        done = finish_all(engine)
        assert [(t.group, t.member) for t in done] == [("g00000000", m) for m in range(4)] + [("g00000001", 0), ("g00000001", 2)]
        for trajectory in done:
            drawn_by(trajectory, digests(tmp_path, 0))
            ended = trajectory.tokens[-1] == ByteTokenizer.eos
            assert trajectory.finish is (Finish.STOP if ended else Finish.LENGTH)
            assert trajectory.action_mask[trajectory.prompt_tokens :].all()
            assert not trajectory.action_mask[: trajectory.prompt_tokens].any()
        assert len({t.text for t in done if t.group == "g00000000"}) > 1
        assert engine.tokens_sampled == sum(len(t.tokens) - t.prompt_tokens for t in done)
        assert len({str(request.get("seed", request.get("sampling_params"))) for request in fake.requests}) >= 5


@both
@ways
def test_what_runs_goes_on_under_the_next_version_and_every_token_says_which(kind: Kind, adapters: bool, tmp_path: Path) -> None:
    with opened(kind, tmp_path, adapters=adapters) as (engine, fake):
        fake.hold_at = 3
        engine.submit(group(0, members=3, max_tokens=60, prompt="a prompt"))
        stepping(engine, lambda: len(fake.running) == 3)
        time.sleep(0.05)
        fake.hold_at = None if not adapters else 3
        engine.load(1, state(1))
        old = digests(tmp_path, 1) if not adapters else digests(tmp_path, 0, 1)
        engine.submit(group(1, members=2, max_tokens=10))
        fake.release()
        done = finish_all(engine)
        begun, later = done[:3], done[3:]
        for trajectory in later:
            assert set(trajectory.versions[trajectory.action_mask].tolist()) == {1}
            drawn_by(trajectory, old)
        for trajectory in begun:
            versions = trajectory.versions[trajectory.action_mask].tolist()
            if adapters:  # a request ends with the adapter that it began with
                assert set(versions) == {0}
                drawn_by(trajectory, old)
            else:
                assert versions[:3] == [0, 0, 0]
                assert set(versions[3:]) <= {1}
        if not adapters:
            assert any(len(t.tokens) - t.prompt_tokens > 3 for t in begun)
            continued = [request for request in fake.requests if len(request.get("prompt", request.get("input_ids"))) > begun[0].prompt_tokens + 2]
            assert len(continued) >= 2


@both
def test_the_tokens_before_and_after_a_change_of_weights_are_each_versions_own(kind: Kind, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as (engine, fake):
        first = digests(tmp_path, 0)
        fake.hold_at = 4
        engine.submit(group(0, members=4, max_tokens=40))
        stepping(engine, lambda: len(fake.running) == 4)
        time.sleep(0.05)
        fake.hold_at = None
        engine.load(1, state(1))
        both_of = first | digests(tmp_path, 1)
        for trajectory in finish_all(engine):
            drawn_by(trajectory, both_of)


@both
def test_interrupt_has_what_runs_go_on_under_the_new_adapter(kind: Kind, tmp_path: Path) -> None:
    with opened(kind, tmp_path, adapters=True) as (engine, fake):
        fake.hold_at = 2
        engine.submit(group(0, members=3, max_tokens=30))
        stepping(engine, lambda: len(fake.running) == 3)
        engine.load(1, state(1), recompute=True)
        fake.release()
        done = finish_all(engine)
        assert len(done) == 3
        for trajectory in done:
            assert set(trajectory.versions[trajectory.action_mask].tolist()) == {1}
            drawn_by(trajectory, digests(tmp_path, 1))


@both
def test_an_old_adapter_is_unloaded_when_nothing_uses_it(kind: Kind, tmp_path: Path) -> None:
    with opened(kind, tmp_path, adapters=True) as (engine, fake):
        fake.hold_at = 2
        engine.submit(group(0, members=1, max_tokens=30))
        stepping(engine, lambda: len(fake.running) == 1)
        engine.load(1, state(1))
        assert len(fake.adapters) == 2
        assert len(list((tmp_path / "versions").iterdir())) == 2
        fake.release()
        finish_all(engine)
        engine.load(2, state(2))
        assert [name.rpartition("-")[2] for name in fake.adapters] == ["v2"]
        assert [path.name for path in (tmp_path / "versions").iterdir()] == ["v00000002"]


def test_two_lives_of_an_engine_give_adapters_two_names(tmp_path: Path) -> None:
    """Under one name, rows cached with the old adapter would be hit."""
    fake = FakeVllm()
    with fake.served() as url:
        for life in range(2):
            engine = ExternalEngine(Vllm(Http(url)), HandOver(tmp_path, beside={}, alpha=1.0), tokenizer=ByteTokenizer(), context=64, vocab=VOCAB)
            engine.load(0, state(life))
            engine.close()
        assert len(fake.adapters) == 2


@both
@ways
def test_a_refused_version_is_never_sampled_with(kind: Kind, adapters: bool, tmp_path: Path) -> None:
    with opened(kind, tmp_path, adapters=adapters) as (engine, fake):
        fake.refuse_updates = True
        with pytest.raises(ServerRefused):
            engine.load(1, state(1))
        assert engine.version == 0
        engine.submit(group(0, members=2))
        if adapters:  # nothing has changed: the old one is whole
            for trajectory in finish_all(engine):
                assert set(trajectory.versions[trajectory.action_mask].tolist()) == {0}
        else:
            with pytest.raises(DriftlineError, match="midway"):
                engine.step()
        fake.refuse_updates = False
        engine.load(1, state(1))
        if not adapters:
            for trajectory in finish_all(engine):
                drawn_by(trajectory, digests(tmp_path, 1))
        assert engine.version == 1


def test_a_server_that_another_run_updates_is_found_out(tmp_path: Path) -> None:
    with opened(KINDS[1], tmp_path) as (engine, fake):  # type: ignore[arg-type]
        fake.version = "41"
        engine.submit(group(0, members=1))
        with pytest.raises(IntegrityError, match="41"):
            finish_all(engine)


@both
def test_a_cancelled_group_is_aborted_at_the_server(kind: Kind, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as (engine, fake):
        fake.hold_at = 1
        engine.submit(group(0, members=3))
        engine.submit(group(1, members=9))
        stepping(engine, lambda: len(fake.running) == 8)
        assert engine.cancel("g00000000") == 3
        assert engine.cancel("g00000001") == 9
        assert engine.idle
        until = time.monotonic() + 10
        while fake.running:
            assert time.monotonic() < until
            time.sleep(0.01)
        if kind[0] is FakeSglang:
            assert fake.log.count("/abort_request") == 8
        else:
            assert fake.disconnected == 8


@both
def test_what_is_given_up_comes_back_with_what_it_had(kind: Kind, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as (engine, fake):
        fake.hold_at = 3
        engine.submit(group(0, members=2, max_tokens=50))
        stepping(engine, lambda: len(fake.running) == 2)
        time.sleep(0.05)
        engine.load(1, state(1))
        fake.hold_at = 10_000
        assert engine.overdue(0) == []
        assert engine.overdue(1) in ([], ["g00000000"])
        aborted = engine.give_up("g00000000")
        assert all(t.finish is Finish.ABORT for t in aborted)
        assert all(t.versions[t.prompt_tokens] == 0 for t in aborted)


@both
def test_a_server_that_is_away_for_a_while_is_waited_for(kind: Kind, tmp_path: Path) -> None:
    with opened(kind, tmp_path, outage_s=20.0) as (engine, fake):
        fake.away = True
        engine.submit(group(0, members=2))
        stepping(engine, lambda: len(fake.log) > 4)
        fake.away = False
        assert len(finish_all(engine)) == 2


@both
def test_a_server_that_stays_away_is_the_machines_failure(kind: Kind, tmp_path: Path) -> None:
    with opened(kind, tmp_path, outage_s=0.0) as (engine, fake):
        fake.away = True
        engine.submit(group(0, members=1))
        with pytest.raises(ServerUnavailable) as failure:
            finish_all(engine)
        assert is_infrastructure(failure.value)
        engine.forget()
        assert engine.idle


def test_nobody_at_the_address_is_the_machines_failure(tmp_path: Path) -> None:
    engine = ExternalEngine(Vllm(Http("http://127.0.0.1:9")), HandOver(tmp_path, beside={}), tokenizer=ByteTokenizer(), context=64, vocab=VOCAB, outage_s=0.0)
    with pytest.raises(ServerUnavailable, match="running there"):
        engine.load(0, state(0))
    engine.close()


@both
def test_an_answer_without_its_log_probabilities_is_refused(kind: Kind, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as (engine, fake):
        fake.drop_logprob = True
        engine.submit(group(0, members=1))
        with pytest.raises(IntegrityError):
            finish_all(engine)


@both
def test_a_completion_whose_end_token_is_kept_back_is_refused(kind: Kind, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as (engine, fake):
        fake.drop_end = True
        engine.submit(group(0, members=8, max_tokens=500))
        with pytest.raises(IntegrityError, match="end token"):
            finish_all(engine)


def test_a_refused_prompt_is_the_groups_failure_and_what_ended_beside_it_is_kept(tmp_path: Path) -> None:
    with opened(KINDS[0], tmp_path, context=40) as (engine, _):  # type: ignore[arg-type]
        engine.submit(group(0, members=2, max_tokens=4))
        engine.submit(group(2, members=1, max_tokens=4, prompt="x" * 60))
        done, failures = list[Trajectory](), list[ServerRefused]()
        until = time.monotonic() + 10
        while not engine.idle:
            assert time.monotonic() < until
            try:
                done += engine.step()
            except ServerRefused as error:
                failures.append(error)
        assert (len(done), len(failures)) == (2, 1)
        assert not is_infrastructure(failures[0])


def test_routes_that_are_switched_off_are_named(tmp_path: Path) -> None:
    for adapters, settings in ((True, {"lora": False}), (False, {"dev": False})):
        with opened(KINDS[0], tmp_path, adapters=adapters, load=False, **settings) as (engine, _), pytest.raises(ServerRefused, match="switched on"):  # type: ignore[arg-type]
            engine.load(0, state(0))


@both
def test_log_probabilities_of_another_distribution_than_the_sampling_one_are_found_out(kind: Kind, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as (engine, _):
        engine.check(0.7)
    with opened(kind, tmp_path / "raw", raw_logprobs=True) as (engine, _):
        engine.check(1.0)
        with pytest.raises(ConfigError, match="processed_logprobs"):
            engine.check(0.7)


def test_the_first_version_is_held_to_the_temperatures_that_will_be_asked_for(tmp_path: Path) -> None:
    fake = FakeVllm(raw_logprobs=True)
    with fake.served() as url:
        engine = ExternalEngine(Vllm(Http(url)), HandOver(tmp_path, beside={"config.json": b"{}"}), tokenizer=ByteTokenizer(), context=64, vocab=VOCAB, temperatures=(0.7,))
        with pytest.raises(ConfigError, match="processed_logprobs"):
            engine.load(0, state(0))
        engine.close()


@both
def test_a_prompt_that_does_not_fit_is_refused_before_it_is_sent(kind: Kind, tmp_path: Path) -> None:
    long = Group(run="r", group="g", index=0, task=Task(id="t", source="s", family="f", prompt="x" * 1020), members=1, sampling=Sampling(max_tokens=64))
    with opened(kind, tmp_path) as (engine, fake):
        with pytest.raises(DriftlineError, match="leaves 960"):
            engine.submit(long)
        assert not fake.requests


@both
def test_a_server_that_does_not_give_back_what_it_aborted_is_an_update_that_failed(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftline.services.rollout.external.engine.ABORTED_S", 0.2)
    with opened(kind, tmp_path) as (engine, fake):
        fake.hold_at = 1
        engine.submit(group(0, members=1))
        stepping(engine, lambda: len(fake.running) == 1)
        monkeypatch.setattr(type(fake), "pause", lambda self: None)
        with pytest.raises(ServerUnavailable, match="come back"):
            engine.load(1, state(1))
        with pytest.raises(DriftlineError, match="midway"):
            engine.step()


def test_closing_ends_the_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    engine = ExternalEngine(Vllm(Http("http://127.0.0.1:9")), HandOver(tmp_path, beside={}), tokenizer=ByteTokenizer(), context=64, vocab=VOCAB, name="one")
    assert threading.active_count() == before + 1
    engine.close()
    engine.close()
    assert threading.active_count() == before
    assert np.isfinite(engine.tokens_sampled)


@both
def test_closing_ends_a_call_that_another_thread_waits_in(kind: Kind, tmp_path: Path) -> None:
    with opened(kind, tmp_path, outage_s=1000.0) as (engine, fake):
        fake.away = True
        failures = list[Exception]()

        def load() -> None:
            try:
                engine.load(1, state(1))
            except DriftlineError as error:
                failures.append(error)

        loading = threading.Thread(target=load)
        loading.start()
        until = time.monotonic() + 10
        while len(fake.log) < 5:
            assert time.monotonic() < until
            time.sleep(0.01)
        engine.close()
        loading.join(10)
        assert not loading.is_alive()
        assert isinstance(failures[0], ServerUnavailable)
        with pytest.raises(ServerUnavailable, match="closed"):
            engine.submit(group(0))
