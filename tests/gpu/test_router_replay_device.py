"""Router replay through the kernels, in bfloat16 on a CUDA device: recorded ids change no bit where they are the model's own, and holes choose for themselves."""

from __future__ import annotations

import pytest
import torch
from test_k3_model_device import CONFIG, model

from driftline.kernels.mode import Numerics, using
from driftline.messages.types import Graded, Group, Sampling, Task
from driftline.models.logprob import token_logprobs
from driftline.models.model import K3ForCausalLM
from driftline.models.packed import Packed
from driftline.models.recompute import Recompute
from driftline.models.routes import counting_flips
from driftline.services.learner.assembler import Batch, BatchGroup
from driftline.services.learner.probe import NumericsProbe
from driftline.services.learner.shared_prompts import forward_groups
from driftline.services.rollout.engine import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def ours() -> K3ForCausalLM:
    return model("cuda", torch.bfloat16)


def tokens(rows: int, steps: int) -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab_size, (rows, steps), generator=torch.Generator().manual_seed(1)).cuda()


def sampled(made: K3ForCausalLM, groups: int = 4, members: int = 8) -> list[BatchGroup]:
    engine = Engine(made, version=0, max_batch=groups * members, record_routes=True)
    asked = [
        Group(run="r", group=f"g{i:08d}", index=i, task=Task(id=f"t{i}", source="s", family="f", prompt="a question " * (i + 2)), members=members,
              sampling=Sampling(max_tokens=48), seed=1) for i in range(groups)
    ]
    for one in asked:
        engine.submit(one)
    done = []
    while not engine.idle:
        done += engine.step()
    by_group = {one.group: sorted((t for t in done if t.group == one.group), key=lambda t: t.member) for one in asked}
    return [BatchGroup(one, tuple(Graded(run="r", trajectory=t, reward=float(t.member)) for t in by_group[one.group]), ()) for one in asked]


@torch.no_grad()
@pytest.mark.parametrize("holes", [False, True])
def test_the_own_choice_replayed_changes_no_bit(ours: K3ForCausalLM, holes: bool) -> None:
    x = tokens(4, 96)
    free = ours(x)
    table = free.routes.to(torch.int16)
    if holes:
        table[:, ::3] = -1
        table[2] = -1
    again = ours(x, replay=table)
    assert torch.equal(free.hidden, again.hidden)
    assert torch.equal(free.routes, again.routes)
    with counting_flips() as count:
        ours(x, replay=table)
    total = count.total()
    assert (total.sets, total.orders) == (0, 0)
    assert total.rows == int((table >= 0).all(-1).sum())


@torch.no_grad()
def test_forced_experts_are_used_padded_and_packed(ours: K3ForCausalLM) -> None:
    x, lengths = tokens(3, 64), [64, 17, 40]
    table = ((ours(x).routes + 7) % CONFIG.num_experts).to(torch.int16)
    real = torch.arange(64).cuda() < torch.tensor(lengths).cuda()[:, None]
    padded = ours(x, lengths=torch.tensor(lengths).cuda(), replay=torch.where(real[..., None, None], table, -1))
    assert torch.equal(padded.routes[real], table[real].long())
    packed = ours(x[real][None], packed=Packed.of(lengths, "cuda"), replay=table[real][None])
    assert torch.equal(packed.routes[0], table[real].long())
    far = (packed.hidden[0].float() - padded.hidden[real].float()).abs().max()
    assert far < 0.05 * padded.hidden[real].float().abs().max()


def test_recomputed_layers_replay_the_same_ids(ours: K3ForCausalLM) -> None:
    x = tokens(2, 64)
    with torch.no_grad():
        table = ((ours(x[:, :-1]).routes + 3) % CONFIG.num_experts).to(torch.int16)
    table[:, ::4] = -1
    grads = []
    try:
        for how in (Recompute.NONE, Recompute.LAYERS):
            ours.recompute = how
            ours.zero_grad()
            hidden = ours(x[:, :-1], replay=table).hidden
            token_logprobs(ours.logits(hidden), x[:, 1:])[0].sum().backward()  # type: ignore[no-untyped-call]
            grads.append({n: p.grad.clone() for n, p in ours.named_parameters() if p.grad is not None})
    finally:
        ours.recompute = Recompute.NONE
        ours.zero_grad()
    assert grads[0].keys() == grads[1].keys()
    differ = [n for n in grads[0] if not torch.equal(grads[0][n], grads[1][n])]
    assert differ == []


@torch.no_grad()
def test_the_probe_of_a_device_replays_and_counts(ours: K3ForCausalLM) -> None:
    """Decoded one token at a time by the engine, in one pass by the probe: what is left of the difference under replay is arithmetic."""
    groups = sampled(ours)
    found = []
    for replay in (False, True):
        probe = NumericsProbe(ours, members=64, keep=1, replay=replay, count_flips=True)
        probe.remember_model(0, ours)
        found.append(probe.measure(Batch(0, tuple(groups))))
    free, replayed = found
    assert free is not None
    assert replayed is not None
    assert replayed.flips is not None
    assert replayed.flips.rows > 0
    assert replayed.flips.share < 0.2
    assert 2 * replayed.drift.all.k3 < free.drift.all.k3
    assert replayed.drift.all.k3 < 1e-2
    packed = forward_groups(ours, groups, replay=True, packed=True)
    padded = forward_groups(ours, groups, replay=True)
    assert (packed.logp - padded.logp).abs().mean() < 0.02


@torch.no_grad()
def test_in_deterministic_mode_no_route_flips(ours: K3ForCausalLM) -> None:
    with using(Numerics.DETERMINISTIC):
        groups = sampled(ours, groups=2)
        probe = NumericsProbe(ours, members=64, keep=1, replay=True, count_flips=True)
        probe.remember_model(0, ours)
        found = probe.measure(Batch(0, tuple(groups)))
    assert found is not None
    assert found.flips is not None
    assert found.flips.rows > 0
    assert (found.flips.sets, found.flips.orders) == (0, 0)
    assert (found.drift.all.k3, found.drift.all.bitwise_equal) == (0.0, 1.0)
