"""Router replay in the model: recorded experts, gates of now. Each test is a way in which replay has gone wrong somewhere."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from model_cases import PUBLIC, random_model, random_tokens, small

from driftline.kernels.moe import route as moe_route
from driftline.models import routes as routes_module
from driftline.models.config import K3Config
from driftline.models.logprob import token_logprobs
from driftline.models.lora import add_lora
from driftline.models.mlp import LatentMoe, route_shape
from driftline.models.model import K3ForCausalLM
from driftline.models.packed import Packed
from driftline.models.recompute import Recompute
from driftline.models.routes import FlipCount, RouteShape, counting_flips, routed

EXPERTS, TOP_K = 6, 2


def moe(seed: int = 0) -> LatentMoe:
    """The first MoE layer of a random model, in float64."""
    return next(m for m in random_model(seed=seed).modules() if isinstance(m, LatentMoe))


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, small().hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def other_ids(ids: torch.Tensor) -> torch.Tensor:
    """A whole choice in every row that is not the one given."""
    return (ids + 1) % EXPERTS


def score(model: K3ForCausalLM, tokens: torch.Tensor, replay: torch.Tensor | None) -> torch.Tensor:
    hidden = model(tokens[:, :-1], replay=replay).hidden
    return token_logprobs(model.logits(hidden), tokens[:, 1:])[0]


def test_gates_are_the_current_scores_at_the_recorded_ids() -> None:
    """Published example: logits [2, 1, 0, -1], ids {0, 2}; here with sigmoids, and in either order of the ids."""
    weight = torch.tensor([[2.0], [1.0], [0.0], [-1.0]], dtype=torch.float64)
    x, bias = torch.ones(1, 1, dtype=torch.float64), torch.tensor([0.0, 9.0, 0.0, 0.0], dtype=torch.float64)
    s = torch.sigmoid(torch.tensor([2.0, 0.0], dtype=torch.float64))
    for order in ([0, 1], [1, 0]):
        recorded = torch.tensor([[0, 2]])[:, order]
        ids, gates = routed(x, weight, bias, 2, 1.0, recorded.to(torch.int16))
        assert torch.equal(ids, recorded)
        assert torch.allclose(gates[0], (s / s.sum())[order], atol=1e-15)


def test_a_recorded_expert_outside_the_live_choice_keeps_its_weight_and_its_gradient() -> None:
    """Gates gathered from scores that were zeroed off the live top k would be zero there, and so would the gradient."""
    layer, x = moe(), rows(5)
    own = layer(x)[1]
    forced = torch.stack([torch.tensor([e for e in range(EXPERTS) if e not in row.tolist()][:TOP_K]) for row in own])
    gate = layer.gate
    _, gates = routed(x, gate.weight, gate.e_score_correction_bias, TOP_K, 1.0, forced)
    assert (gates > 0.01).all()
    gates[:, 0].sum().backward()  # type: ignore[no-untyped-call]
    assert gate.weight.grad is not None
    touched = gate.weight.grad.abs().sum(1) > 0
    assert set(torch.nonzero(touched).flatten().tolist()) == set(forced.flatten().tolist())


def test_the_order_recorded_is_the_order_of_the_sum() -> None:
    """K3 adds the experts' outputs in the order of the list: two orders agree to rounding, each with itself to the bit."""
    layer, x = moe().float(), rows(64).float()
    _, ids = layer(x)
    forward, same, back = (layer(x, order.to(torch.int16)) for order in (ids, ids, ids.flip(-1)))
    assert torch.equal(forward[0], same[0])
    assert torch.equal(back[1], ids.flip(-1)), "what was used is what was recorded, in its order"
    assert torch.allclose(forward[0], back[0], atol=1e-5)


def test_replaying_the_own_choice_changes_no_bit() -> None:
    model, tokens = random_model(dtype=torch.float32), random_tokens(3, 9)
    free = model(tokens)
    again = model(tokens, replay=free.routes.to(torch.int16))
    assert torch.equal(free.hidden, again.hidden)
    assert torch.equal(free.routes, again.routes)


def test_gradients_match_finite_differences_at_fixed_ids() -> None:
    """At ids that the router would not choose, of the router's weights and of everything before and after it; at free ids the loss has jumps, and no such test."""
    model, tokens = random_model(), random_tokens(2, 7)
    replay = other_ids(model(tokens[:, :-1]).routes)
    weights = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def value() -> torch.Tensor:
        return (score(model, tokens, replay) * weights).sum()

    value().backward()  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(4)
    chosen = [(n, p) for n, p in model.named_parameters() if n.endswith(("gate.weight", "routed_expert_down_proj.weight", "experts.w2", "embed_tokens.weight"))]
    assert sum(n.endswith("gate.weight") for n, _ in chosen) == small().moe_layers
    for name, parameter in chosen:
        direction = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        grad = parameter.grad
        assert grad is not None
        step = 1e-5
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            above = value()
            parameter.sub_(direction, alpha=2 * step)
            below = value()
            parameter.add_(direction, alpha=step)
        numeric, exact = float(above - below) / (2 * step), float((grad * direction).sum())
        assert abs(exact) > 1e-6, f"{name} has a gradient to be compared"
        assert numeric == pytest.approx(exact, rel=1e-6), name


def test_the_selection_bias_neither_weighs_nor_learns_nor_is_read_in_replay() -> None:
    """Statistics for balancing must not be made of replayed routes: there are none, and the bias is frozen."""
    model, tokens = random_model(), random_tokens(1, 6)
    replay = other_ids(model(tokens[:, :-1]).routes)
    first = score(model, tokens, replay)
    first.sum().backward()  # type: ignore[no-untyped-call]
    biases = [p for n, p in model.named_parameters() if n.endswith("e_score_correction_bias")]
    assert all(not b.requires_grad and b.grad is None for b in biases)
    with torch.no_grad():
        for bias in biases:
            bias.normal_()
    assert torch.equal(score(model, tokens, replay), first)


def test_a_token_without_a_record_chooses_for_itself() -> None:
    layer, x = moe(), rows(7)
    out, own = layer(x)
    table = other_ids(own).to(torch.int16)
    table[2::3] = -1
    mixed, used = layer(x, table)
    every, _ = layer(x, other_ids(own))
    absent = torch.zeros(7, dtype=torch.bool)
    absent[2::3] = True
    assert torch.equal(used[absent], own[absent])
    assert torch.equal(used[~absent], other_ids(own)[~absent])
    assert torch.allclose(mixed[absent], out[absent], atol=1e-12)
    assert torch.allclose(mixed[~absent], every[~absent], atol=1e-12)


def test_half_a_record_is_none() -> None:
    layer, x = moe(), rows(3)
    own = layer(x)[1]
    table = other_ids(own)
    table[1, 1] = -1
    assert torch.equal(layer(x, table)[1][1], own[1])


def test_what_padding_holds_changes_no_real_token() -> None:
    """A buffer that was used before leaves ids in the rows of padding: they may be anything."""
    model, tokens = random_model(), random_tokens(3, 8)
    lengths = torch.tensor([8, 3, 5])
    real = torch.arange(8) < lengths[:, None]
    replay = other_ids(model(tokens, lengths=lengths).routes)
    clean = torch.where(real[..., None, None], replay, -1)
    poisoned = torch.where(real[..., None, None], replay, (replay + 3) % EXPERTS)
    one, two = (model(tokens, lengths=lengths, replay=r).hidden[real] for r in (clean, poisoned))
    assert torch.allclose(one, two, atol=1e-12)
    alone = model(tokens[1:2, :3], replay=replay[1:2, :3]).hidden[0]
    assert torch.allclose(one[8:11], alone, atol=1e-12)


def test_packed_tokens_replay_what_they_replay_alone() -> None:
    model = random_model()
    parts = [random_tokens(1, n, seed=n) for n in (5, 1, 4)]
    tables = [other_ids(model(p).routes).to(torch.int16) for p in parts]
    tables[2][:, 1] = -1
    packed = Packed.of([5, 1, 4], "cpu")
    out = model(torch.cat(parts, 1), packed=packed, replay=torch.cat(tables, 1))
    want = [model(p, replay=t) for p, t in zip(parts, tables, strict=True)]
    assert torch.allclose(out.hidden, torch.cat([w.hidden for w in want], 1), atol=1e-10)
    assert torch.equal(out.routes, torch.cat([w.routes for w in want], 1))


def test_a_prefix_from_a_cache_replays_like_a_whole_sequence() -> None:
    """Routes are per token: those of a cached prefix were used when it was computed, and are not asked for again."""
    model, tokens = random_model(), random_tokens(2, 9)
    replay = other_ids(model(tokens).routes)
    whole = model(tokens, replay=replay)
    first = model(tokens[:, :4], replay=replay[:, :4])
    rest = model(tokens[:, 4:], cache=first.cache, replay=replay[:, 4:])
    assert torch.allclose(rest.hidden, whole.hidden[:, 4:], atol=1e-10)
    other = model(tokens[:, 4:], cache=model(tokens[:, :4]).cache, replay=replay[:, 4:])
    assert not torch.allclose(other.hidden, whole.hidden[:, 4:], atol=1e-6), "a prefix that chose for itself shows in what comes after it"


def test_dense_layers_have_no_place_in_a_table() -> None:
    """92 layers of routes for 93 layers, the first of which is dense; an index over all layers would be off by one."""
    assert K3Config.model_validate(PUBLIC).moe_layers == 92
    for dense in (0, 1, 3):
        model = random_model(small(first_k_dense_replace=dense))
        routes = model(random_tokens(1, 4)).routes
        shape = route_shape(model)
        assert shape == RouteShape(5 - dense, TOP_K, EXPERTS)
        assert tuple(routes.shape[2:]) == (5 - dense, TOP_K)
        moved = routes.clone()
        moved[:, :, -1] = other_ids(moved[:, :, -1])  # of the last layer alone
        tokens = random_tokens(1, 4)
        layers = [m for m in model.modules() if isinstance(m, LatentMoe)]
        seen: list[torch.Tensor] = []
        for layer in layers:
            layer.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out[1]))
        model(tokens, replay=moved)
        assert all(torch.equal(ids, moved[:, :, i]) for i, ids in enumerate(seen))


def test_a_model_without_experts_has_no_routes() -> None:
    model = random_model(small(first_k_dense_replace=5))
    assert route_shape(model) is None
    assert model(random_tokens(1, 3)).routes.numel() == 0


def test_no_layer_records_only_zeros() -> None:
    """A layer that reads another group's buffer records zeros."""
    routes = random_model()(random_tokens(4, 16)).routes
    assert all(routes[:, :, layer].unique().numel() > 1 for layer in range(routes.shape[2]))
    assert (routes.sort(-1).values.diff(dim=-1) > 0).all(), "no expert twice in a list"


@pytest.mark.parametrize("partly", [False, True])
def test_recomputed_layers_read_the_ids_again_and_choose_nothing(partly: bool) -> None:
    model, tokens = random_model(), random_tokens(2, 7)
    table = other_ids(model(tokens[:, :-1]).routes)
    if partly:
        table[:, ::2] = -1
    grads = []
    for how in (Recompute.NONE, Recompute.LAYERS):
        model.recompute = how
        model.zero_grad()
        out = score(model, tokens, table)
        with mock.patch.object(routes_module, "route", wraps=moe_route) as route:
            out.sum().backward()  # type: ignore[no-untyped-call]
        called = route.call_args_list
        assert len(called) == (small().moe_layers if how is Recompute.LAYERS else 0)
        assert all(len(call.args) == 6 and call.args[5] is not None for call in called), "a choice in the backward pass"
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_adapters_move_the_gates_and_not_the_ids() -> None:
    """An adapter before the router changes what it reads: replay fixes the ids alone, the gates follow."""
    model, tokens = random_model(), random_tokens(1, 8)
    replay = model(tokens).routes
    add_lora(model, 2, targets=r".*proj$")
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.5)
    inputs: list[torch.Tensor] = []
    last = [m for m in model.modules() if isinstance(m, LatentMoe)][-1]
    last.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
    free, replayed = model(tokens).routes, model(tokens, replay=replay).routes
    assert not torch.equal(free, replay), "the adapters flip routes here"
    assert torch.equal(replayed, replay)
    x = inputs[1].flatten(0, 1)
    ids, gates = routed(x, last.gate.weight, last.gate.e_score_correction_bias, TOP_K, last.scaling, replay[:, :, -1].flatten(0, 1))
    scores = torch.sigmoid(x @ last.gate.weight.t()).gather(-1, ids)
    assert torch.allclose(gates, scores / scores.sum(-1, keepdim=True), atol=1e-12)


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("holes", [False, True])
def test_a_table_is_asked_for_holes_once_a_forward(holes: bool, recompute: Recompute) -> None:
    """And not in every layer: on a device the answer waits for all that was launched before."""
    model, tokens = random_model(), random_tokens(1, 8)
    model.recompute = recompute
    replay = other_ids(model(tokens).routes)
    assert replay.shape[2] > 1
    if holes:
        replay[:, 3] = -1
    waits: list[torch.Tensor] = []
    truth = torch.Tensor.__bool__

    def read(self: torch.Tensor) -> bool:
        waits.append(self)
        return truth(self)

    with mock.patch.object(torch.Tensor, "__bool__", read):
        out = model(tokens, replay=replay)
        assert len(waits) == 1
        out.hidden.sum().backward()
    assert len(waits) == 1
    assert torch.equal(out.routes[:, :3], replay[:, :3])
    assert bool((out.routes >= 0).all())


def test_flips_are_those_of_a_free_pass_over_the_same_rows() -> None:
    layer, x = moe(), rows(40)
    own = layer(x)[1]
    table = own.clone()
    table[:10] = own[:10].flip(-1)  # the same set in another order
    table[10:15] = other_ids(own[10:15])
    table[20:] = -1
    differ = int((table[10:15].sort(-1).values != own[10:15].sort(-1).values).any(-1).sum())
    with counting_flips() as count:
        layer(x, table)
    total = count.total()
    assert differ > 0
    assert (total.rows, total.sets, total.orders) == (20, differ, 10 + 5)


def test_flips_are_counted_once_and_only_when_asked() -> None:
    model, tokens = random_model(), random_tokens(2, 6)
    table = other_ids(model(tokens).routes)
    model.recompute = Recompute.LAYERS
    with counting_flips() as count:
        out = model(tokens, replay=table).hidden
    after = count.total()
    out.sum().backward()
    assert after.rows == 2 * 6 * small().moe_layers
    assert count.total() == after, "layers that are computed again are not counted again"
    model(tokens, replay=table)
    assert count.total() == after
    with counting_flips() as nothing:
        model(tokens)
    assert nothing.total().rows == 0, "without a record there is nothing to differ from"
    assert FlipCount().total().rows == 0


def test_counting_changes_no_bit() -> None:
    model, tokens = random_model(dtype=torch.float32), random_tokens(2, 6)
    table = other_ids(model(tokens).routes)
    plain = model(tokens, replay=table).hidden
    with counting_flips():
        assert torch.equal(model(tokens, replay=table).hidden, plain)


def test_a_table_of_another_width_is_refused() -> None:
    layer, x = moe(), rows(3)
    with pytest.raises(ValueError, match="replay"):
        layer(x, torch.zeros(3, 3, dtype=torch.int64))
