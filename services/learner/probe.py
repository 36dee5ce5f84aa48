"""The numerics probe: at every step, the same tokens under the same weights, rollout beside learner.

With work in flight a batch is rarely at lag 0, so a difference between learner and rollout mixes numerics with staleness. The probe keeps the last policies
the bound allows, takes members sampled wholly by one of them, and recomputes their log-probabilities under that very policy. What differs then is arithmetic.

Memory: what is trained, `max_lag + 1` times in the policy's dtype on the CPU and once more as the model computes with it. What is frozen (the base under adapters,
packed experts) is the learner's own, and never copied. `members = 0` turns it off.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch

from driftline.messages.errors import IntegrityError
from driftline.messages.types import Trajectory
from driftline.models.causal_lm import CausalLM
from driftline.models.routes import counting_flips
from driftline.models.state import exported, public_tensors
from driftline.services.learner.assembler import Batch, BatchGroup
from driftline.services.learner.drift_metrics import drift_by_lag
from driftline.services.learner.shared_prompts import forward_groups
from driftline.services.learner.watch import StepDrift

__all__ = ["NumericsProbe"]


class NumericsProbe:
    """`members` a step at most, of the newest `keep` policies; `dtype` is the policy's. `count_flips`: also count, where routes are replayed, how often the same
    weights would have chosen otherwise than the rollout did."""

    def __init__(
        self, model: CausalLM, *, members: int, keep: int, replay: bool = False, count_flips: bool = False, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._model = _twin(model)
        self._weights = {
            public: view for name, parameter in self._model.named_parameters() if name in trained for public, view in public_tensors(name, parameter)
        }
        self._members, self._keep, self._replay, self._count, self._dtype = members, keep, replay, count_flips, dtype
        self._policies: OrderedDict[int, Mapping[str, torch.Tensor]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of the policies kept."""
        return sum(tensor.nbytes for policy in self._policies.values() for tensor in policy.values())

    def remember(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Keep what is trained of a published policy; those tensors must not change afterwards. Raises IntegrityError when one is missing or misshapen."""
        kept = {}
        for name, view in self._weights.items():
            if name not in state:
                raise IntegrityError("the policy lacks a trained tensor", field=name, value=f"version {version}", remedy="remember policies of this model")
            if state[name].shape != view.shape:
                raise IntegrityError("shape differs from the model's", field=name, value=tuple(state[name].shape), remedy=f"expected {tuple(view.shape)}")
            kept[name] = state[name]
        self._policies[version] = kept
        while len(self._policies) > self._keep:
            self._policies.popitem(last=False)

    def remember_model(self, version: int, model: CausalLM) -> None:
        """Keep a copy of what is trained of the model the probe was made of, which holds the weights of `version` now."""
        self.remember(version, {
            public: exported(public, view, self._dtype)
            for name, parameter in model.named_parameters() if parameter.requires_grad for public, view in public_tensors(name, parameter)
        })

    @torch.no_grad()
    def measure(self, batch: Batch) -> StepDrift | None:
        """Compare up to `members` members of the batch, by the lag of the version that sampled them; None when none was sampled by one remembered policy alone."""
        chosen = self._choose(batch)
        if not chosen:
            return None
        ours, theirs, versions = [], [], []
        with counting_flips() if self._count and self._replay else nullcontext() as flips:
            for version, groups in sorted(chosen.items()):
                self._load(version)
                flat = forward_groups(self._model, groups, 0, replay=self._replay)
                ours.append(flat.logp.float().cpu().numpy())
                theirs.append(flat.behave.float().cpu().numpy())
                versions.append(flat.versions)
        learner, rollout = np.concatenate(ours), np.concatenate(theirs)
        report = drift_by_lag(learner, rollout, np.ones(len(learner), dtype=bool), np.concatenate(versions), batch.head)
        return StepDrift(report, None if flips is None else flips.total())

    def _load(self, version: int) -> None:
        for name, value in self._policies[version].items():
            self._weights[name].copy_(value)

    def _choose(self, batch: Batch) -> dict[int, Sequence[BatchGroup]]:
        """As many members of each remembered version as there are, if they all fit, and else shared out evenly: no lag is left without."""
        found: dict[int, list[tuple[int, int]]] = {}
        for g, group in enumerate(batch.groups):
            for m, graded in enumerate(group.members):
                version = _single_version(graded.trajectory)
                if version in self._policies:
                    found.setdefault(version, []).append((g, m))
        room = _shares(self._members, [len(places) for places in found.values()])
        return {
            version: _part_of(batch.groups, places[:count]) for (version, places), count in zip(found.items(), room, strict=True) if count
        }


def _part_of(groups: Sequence[BatchGroup], places: Sequence[tuple[int, int]]) -> list[BatchGroup]:
    """The members at these (group, member) places, which are in order."""
    members: dict[int, list[int]] = {}
    for g, m in places:
        members.setdefault(g, []).append(m)
    return [BatchGroup(groups[g].group, tuple(groups[g].members[m] for m in chosen), ()) for g, chosen in members.items()]


def _shares(total: int, wanted: Sequence[int]) -> list[int]:
    """`total` shared out evenly, nobody getting more than is wanted and what is left over going to the first."""
    given = [0] * len(wanted)
    for _ in range(min(total, sum(wanted))):
        given[min((i for i, want in enumerate(wanted) if given[i] < want), key=given.__getitem__)] += 1
    return given


def _twin(model: CausalLM) -> CausalLM:
    """The model with trained parameters of its own, and the frozen ones and the buffers of `model`."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    shared = {id(tensor): tensor for tensor in (*frozen, *model.buffers())}
    return copy.deepcopy(model, shared).requires_grad_(False)  # what the memo holds is not copied


def _single_version(trajectory: Trajectory) -> int:
    """The version of every sampled token, or -1 if several made it."""
    versions = trajectory.versions[trajectory.action_mask]
    return int(versions[0]) if (versions == versions[0]).all() else -1
