"""The trainer: one optimizer step from one batch, and the policy that comes out of it.

Guarantees: the forward computes with exactly the weights that are published (fp32 masters are rounded to the policy's dtype once, after the step, and
start as the rounded policy of version 0, so that what was published is all a replay needs), whether the model holds them in that dtype or in fp32; masters, their
gradients and moments are fp32 beside the parameters and only of what is trained; a batch's loss and gradient do not depend on how it is cut into micro-batches,
beyond rounding; a prompt shared by a group is computed once. A step whose gradient is not finite changes nothing and is counted; so does one that is not allowed.

Shapes: G groups in a micro-batch, M members of them, P the longest prompt, R the longest completion, N action tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from driftline.messages.errors import IntegrityError
from driftline.models.causal_lm import CausalLM
from driftline.models.flips import Flips
from driftline.models.recompute import Recompute
from driftline.models.routes import counting_flips
from driftline.models.state import (
    export_state,
    exported,
    load_state,
    policy_dtype,
    policy_tensors,
    public_tensors,
    round_to_policy_,
)
from driftline.policy_store.tensor import Layout
from driftline.services.config import LearnerConfig, Proximal
from driftline.services.learner.advantage import Estimator, group_advantages
from driftline.services.learner.assembler import Batch
from driftline.services.learner.correction import CorrectionConfig, correct
from driftline.services.learner.device_delta import DeviceDelta, ShardContent, Source, Started
from driftline.services.learner.drift_metrics import Lags, drift_by_lag, lags
from driftline.services.learner.gradients import summed_into
from driftline.services.learner.micro_batches import MicroBatch, by_groups, by_tokens
from driftline.services.learner.objective import Denominators, ObjectiveConfig, Tally, loss
from driftline.services.learner.shared_prompts import FlatTokens, forward_groups
from driftline.services.learner.watch import StepDrift
from driftline.services.tensors import host_layout

__all__ = ["Allow", "Emit", "Emitted", "StepReport", "Trainer"]


@dataclass(frozen=True)
class StepReport:
    """Numbers of one step, under the names that metrics and the summary use; `drift`: how far the learner was from the rollout before it. `halted`: the step
    was not allowed, and changed nothing."""

    values: Mapping[str, float]
    lag_histogram: tuple[float, ...]
    drift: StepDrift
    halted: bool = False


class _Measured(NamedTuple):
    """Of all action tokens of a batch: what the passes say before the optimizer is asked."""

    drift: StepDrift
    ages: Lags
    entropy: float
    tokens: int


Allow: TypeAlias = Callable[[StepDrift], bool]

Emitted: TypeAlias = torch.Tensor | Sequence[ShardContent]
"""A tensor of the new policy: a CPU copy, or per shard what changed."""

Emit: TypeAlias = Callable[[str, Emitted], None]

CHUNK_ELEMENTS = 1 << 24
"""Parameters stepped together: enough to keep the optimizer's kernels busy, few enough that the first are encoded early."""


class Trainer:
    def __init__(self, model: CausalLM, config: LearnerConfig, *, dtype: torch.dtype = torch.bfloat16, count_flips: bool = False) -> None:
        """`model`: its parameters in `dtype`, the policy's, or in fp32. `count_flips`: compare the routers' own choices with the replayed ones."""
        self.model, self.config, self.dtype, self._count_flips = model, config, dtype, count_flips
        model.recompute = Recompute(config.recompute)
        self.device = next(model.parameters()).device
        self.names = [n for n, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        round_to_policy_(model, dtype)
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self._chunks = _chunks(self.masters)
        self.optimizer = torch.optim.AdamW(
            [{"params": self.masters[chunk]} for chunk in self._chunks], lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, foreach=True
        )
        self.objective = ObjectiveConfig(
            name=config.objective, eps_low=config.eps_low, eps_high=config.eps_high, dual_clip=config.dual_clip
        )
        self.skipped = 0
        self.by_changes = self.device.type == "cuda"
        """Whether `step` hands out what changed, found beside the parameters, instead of copies of them."""
        self._deltas: dict[int, DeviceDelta] = {}
        self._started: list[Started] = []

    def state(self) -> dict[str, torch.Tensor]:
        """The policy as it is published: named CPU tensors in policy dtypes."""
        return export_state(self.model, self.dtype)

    def layouts(self) -> dict[str, Layout]:
        """Of the tensors `step` emits, which are those of `state`."""
        return dict(entry for name, held in policy_tensors(self.model) for entry in self._layouts_of(name, held))

    def _layouts_of(self, name: str, parameter: torch.Tensor) -> Iterator[tuple[str, Layout]]:
        for public, tensor in public_tensors(name, parameter):
            yield public, host_layout(tensor.shape, policy_dtype(public, self.dtype))

    def load_policy(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a published policy: model and masters take its values, the optimizer starts fresh."""
        load_state(self.model, state)
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.copy_(parameter)
        self.optimizer.state.clear()

    def step(self, batch: Batch, emit: Emit | None = None, *, allow: Allow | None = None) -> StepReport:
        """One optimizer step. `batch.head` is the version whose weights the model holds. `emit` is handed every tensor of the new
        policy, under its public name, as soon as the optimizer has made it: a CPU copy in the policy's dtype, or what changed
        against the policy before the step. Nothing when the step is refused, or when `allow`, asked once before the optimizer, says no."""
        started = time.perf_counter()
        advantages, rewards = self._advantages(batch)
        masks = [t.action_mask for t in batch.trajectories]
        denominators = Denominators(len(masks), int(sum(m.sum() for m in masks)))
        tally: Tally | None = None
        total, parts, flips = 0.0, [], Flips()
        with summed_into(self.masters, self.parameters):
            for part in self._micro_batches(batch):
                with ExitStack() as stack:
                    count = stack.enter_context(counting_flips()) if self._count_flips else None
                    flat = self._forward(part)
                flips += count.total() if count is not None else Flips()
                prox, keep, weight = self._correct(flat)
                # Sequences are numbered over the whole batch, so every micro-batch sees all advantages; absent ones contribute zero.
                out = loss(
                    self.objective, logp_new=flat.logp, logp_prox=prox, mask=torch.ones_like(keep), advantages=advantages,
                    denominators=denominators, token_keep=keep, token_weight=weight, seq_id=flat.sequence,
                )
                out.loss.backward()  # type: ignore[no-untyped-call]
                total += float(out.loss.detach())
                tally = out.tally if tally is None else tally + out.tally
                parts.append(replace(flat, logp=flat.logp.detach()))
        assert tally is not None
        measured = self._measured(batch, parts, flips if self._count_flips else None)
        halted = allow is not None and not allow(measured.drift)
        if halted:
            self._drop_gradients()
            norm = float("nan")
        else:
            # A token-level objective clamps a -inf away, so only the count shows it.
            norm = self._update(emit) if tally.metrics()["new_non_finite"] == 0 else self._refuse()
        return self._report(batch, measured, tally, rewards, total, norm, time.perf_counter() - started, halted=halted)

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        if self.config.micro_batch_tokens:
            return by_tokens(batch.groups, self.config.micro_batch_tokens)
        return by_groups(batch.groups, self.config.micro_batch_groups)

    def _forward(self, part: MicroBatch) -> FlatTokens:
        return forward_groups(self.model, part.groups, replay=self.config.router_replay, packed=self.config.micro_batch_tokens > 0, numbers=part.numbers)

    def _advantages(self, batch: Batch) -> tuple[torch.Tensor, list[float]]:
        estimator = Estimator.STD if self.config.adv_std else Estimator.MEAN
        values: list[float] = []
        rewards: list[float] = []
        for group in batch.groups:
            values += group_advantages(group.rewards, estimator).advantages
            rewards += group.rewards
        return torch.tensor(values, dtype=torch.float32, device=self.device), rewards

    def _correct(self, flat: FlatTokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(proximal log-probabilities, tokens kept in the loss, token weights)."""
        everywhere = torch.ones_like(flat.logp, dtype=torch.bool)
        decoupled = self.config.proximal is Proximal.RECOMPUTE
        rule = CorrectionConfig(tis_cap=self.config.tis_cap if decoupled else None, icepop=self.config.icepop, weigh=decoupled)
        fixed = correct(rule, logp_prox=flat.logp.detach(), logp_behave=flat.behave, mask=everywhere)
        # One optimizer step per batch: the proximal policy of a recomputing learner is the current one.
        return (flat.logp.detach() if decoupled else flat.behave), fixed.keep, fixed.weight

    def _update(self, emit: Emit | None) -> float:
        """Clip, step the masters, round into the model. Returns the gradient norm before clipping."""
        for master in self.masters:
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, self.config.grad_clip))
        if not np.isfinite(norm):
            self._refuse()
            return norm
        groups = self.optimizer.param_groups
        try:
            for chunk, group in zip(self._chunks, groups, strict=True):
                self.optimizer.param_groups = [group]  # a chunk is on its way while the next is made
                self.optimizer.step()
                self._round(chunk, emit)
        finally:
            self.optimizer.param_groups = groups
        if emit is not None:
            self._emit_rest(emit)
        return norm

    @torch.no_grad()
    def _round(self, chunk: slice, emit: Emit | None) -> None:
        """On a device what changed is found there, while it is rounded, and only that is copied out."""
        if emit is not None and self.by_changes:
            self._started.append(self._delta(chunk).start())
            if len(self._started) > 1:  # the one before, while this one is found: all of them would take as much memory as the policy
                self._emit_changes(emit, self._started.pop(0))
            return
        for name, master, parameter in zip(self.names[chunk], self.masters[chunk], self.parameters[chunk], strict=True):
            parameter.copy_(master.to(policy_dtype(name, self.dtype)))
            if emit is not None:
                self._emit(emit, name, parameter)

    def _delta(self, chunk: slice) -> DeviceDelta:
        if chunk.start not in self._deltas:
            sources = [Source(*s) for s in zip(self.names[chunk], self.parameters[chunk], self.masters[chunk], strict=True)]
            self._deltas[chunk.start] = DeviceDelta(sources, self.dtype)
        return self._deltas[chunk.start]

    def _emit_changes(self, emit: Emit, changed: Started) -> None:
        for public, shards in changed.tensors():
            emit(public, shards)

    def _emit_rest(self, emit: Emit) -> None:
        """What is on its way from the device, and what is not trained."""
        while self._started:
            self._emit_changes(emit, self._started.pop(0))
        for name, parameter in policy_tensors(self.model):
            if parameter.requires_grad:
                continue
            if self.by_changes:
                for public, layout in self._layouts_of(name, parameter):
                    emit(public, [None] * layout.shard_count)
            else:
                self._emit(emit, name, parameter)

    def _emit(self, emit: Emit, name: str, parameter: torch.Tensor) -> None:
        for public, tensor in public_tensors(name, parameter):
            emit(public, exported(public, tensor, self.dtype))

    def _refuse(self) -> float:
        self.skipped += 1
        self._drop_gradients()
        return float("nan")

    def _drop_gradients(self) -> None:
        for master in self.masters:
            master.grad = None

    def _measured(self, batch: Batch, parts: Sequence[FlatTokens], flips: Flips | None) -> _Measured:
        learner = np.concatenate([p.logp.cpu().numpy() for p in parts])
        behave = np.concatenate([p.behave.cpu().numpy() for p in parts])
        versions = np.concatenate([p.versions for p in parts])
        sequence = np.concatenate([p.sequence.cpu().numpy() for p in parts])
        mask = np.ones(len(learner), dtype=bool)
        report = drift_by_lag(learner, behave, mask, versions, batch.head)
        entropy = float(torch.cat([p.entropy for p in parts]).mean())
        return _Measured(StepDrift(report, flips), lags(mask, versions, sequence, batch.head), entropy, len(learner))

    def _report(
        self, batch: Batch, measured: _Measured, tally: Tally, rewards: Sequence[float], total: float, norm: float, wall: float, *, halted: bool
    ) -> StepReport:
        report, ages, counts = measured.drift.drift, measured.ages, tally.metrics()
        values = {
            "reward_train": float(np.mean(rewards)), "loss": total, "grad_norm": norm, "skipped": float(self.skipped),
            "entropy": measured.entropy, "k3": report.all.k3, "extreme": report.all.extreme,
            "ess": counts["ess"], "clip_fraction": counts["clip"], "clip_high": counts["clip_high"], "clip_low": counts["clip_low"],
            "dual_clip": counts["dual_clip"], "masked": counts["masked"], "ratio_mean": counts["ratio_mean"],
            "lag_max": float(ages.oldest_max), "lag_mean": ages.token_mean, "tokens_trained": float(measured.tokens),
            "sequences_trained": float(len(rewards)), "groups_trained": float(len(batch.groups)),
            "length_mean": counts["length_mean"], "train_s": wall,
        }
        if report.numerics is not None:
            values |= {
                "k3_lag0": report.numerics.k3, "bitwise_equal": report.numerics.bitwise_equal, "tokens_lag0": float(report.numerics.tokens),
                "max_abs_lag0": report.numerics.max_abs,
            }
        flips = measured.drift.flips
        if flips is not None:
            values |= {"flips": flips.share, "flips_ordered": flips.ordered_share, "flip_rows": float(flips.rows)}
        histogram = tuple(float(ages.oldest.get(lag, 0)) for lag in range(max(ages.oldest, default=0) + 1))
        return StepReport(values, histogram, measured.drift, halted)

    def adopt(self, state: Mapping[str, torch.Tensor]) -> int:
        """Make the policy exactly `state`, keeping masters that round to it and all moments. Returns how many elements differed."""
        load_state(self.model, state)
        differed = 0
        with torch.no_grad():
            for name, master, parameter in zip(self.names, self.masters, self.parameters, strict=True):
                other = master.to(policy_dtype(name, self.dtype)).to(parameter.dtype) != parameter
                master.copy_(torch.where(other, parameter.to(master.dtype), master))
                differed += int(other.sum())
        return differed

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Masters, AdamW moments and the random generators: CPU copies that later steps do not change."""
        tensors = {f"master/{n}": m.detach().to("cpu", copy=True) for n, m in zip(self.names, self.masters, strict=True)}
        for name, master in zip(self.names, self.masters, strict=True):
            for key, value in self.optimizer.state.get(master, {}).items():
                tensors[f"{key}/{name}"] = value.detach().to("cpu", copy=True)
        tensors["rng/cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng/device"] = torch.cuda.get_rng_state(self.device)
        return tensors

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """What `snapshot` took; the model's weights become the rounded masters. Raises IntegrityError when it is another model's."""
        missing = sorted({f"master/{n}" for n in self.names} - tensors.keys())
        if missing:
            raise IntegrityError(f"{len(missing)} parameters missing", field="checkpoint", value=missing[:3])
        state: dict[torch.Tensor, dict[str, Any]] = {}
        with torch.no_grad():
            for name, master, parameter in zip(self.names, self.masters, self.parameters, strict=True):
                master.copy_(tensors[f"master/{name}"])
                parameter.copy_(master.to(policy_dtype(name, self.dtype)))
                saved = {k: tensors[f"{k}/{name}"] for k in ("step", "exp_avg", "exp_avg_sq") if f"{k}/{name}" in tensors}
                if saved:  # AdamW counts steps on the host and keeps the moments beside the masters
                    state[master] = {k: v.clone() if k == "step" else v.to(master.device, copy=True) for k, v in saved.items()}
        self.optimizer.state.clear()
        self.optimizer.state.update(state)
        torch.set_rng_state(tensors["rng/cpu"])
        if "rng/device" in tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng/device"], self.device)


def _chunks(masters: Sequence[torch.Tensor]) -> list[slice]:
    """Consecutive parameters of about `CHUNK_ELEMENTS` together."""
    chunks: list[slice] = []
    first = size = 0
    for i, master in enumerate(masters):
        size += master.numel()
        if size >= CHUNK_ELEMENTS or i == len(masters) - 1:
            chunks.append(slice(first, i + 1))
            first, size = i + 1, 0
    return chunks
