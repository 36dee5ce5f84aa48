"""The numerics probe: at every step, the same tokens under the same weights, rollout beside learner.

With work in flight a batch is rarely at lag 0, so a difference between learner and rollout mixes numerics with staleness. The probe keeps the last policies
the bound allows, takes members sampled wholly by one of them, and recomputes their log-probabilities under that very policy. What differs then is arithmetic.

Memory: `max_lag + 1` policies in the policy's dtype and one more model. `members = 0` turns it off.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from driftline.messages.types import Trajectory
from driftline.models.model import K3ForCausalLM
from driftline.models.state import load_state
from driftline.services.learner.assembler import Batch, BatchGroup
from driftline.services.learner.drift_metrics import Drift, drift
from driftline.services.learner.shared_prompts import forward_groups

__all__ = ["NumericsProbe"]


class NumericsProbe:
    def __init__(self, model: K3ForCausalLM, *, members: int, keep: int, replay: bool = False) -> None:
        self._model = copy.deepcopy(model).requires_grad_(False)
        self._members, self._keep, self._replay = members, keep, replay
        self._policies: OrderedDict[int, Mapping[str, torch.Tensor]] = OrderedDict()

    def remember(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Keep a published policy; `state` must not change afterwards."""
        self._policies[version] = state
        while len(self._policies) > self._keep:
            self._policies.popitem(last=False)

    @torch.no_grad()
    def measure(self, batch: Batch) -> Drift | None:
        """Compare up to `members` members of the batch; None when no member was sampled by one remembered policy alone."""
        chosen = self._choose(batch)
        if not chosen:
            return None
        ours, theirs = [], []
        for version, groups in sorted(chosen.items()):
            load_state(self._model, self._policies[version])
            flat = forward_groups(self._model, groups, 0, replay=self._replay)
            ours.append(flat.logp.float().cpu().numpy())
            theirs.append(flat.behave.float().cpu().numpy())
        learner, rollout = np.concatenate(ours), np.concatenate(theirs)
        return drift(learner, rollout, np.ones(len(learner), dtype=bool))

    def _choose(self, batch: Batch) -> dict[int, Sequence[BatchGroup]]:
        chosen: dict[int, list[BatchGroup]] = {}
        left = self._members
        for group in batch.groups:
            by_version: dict[int, list[int]] = {}
            for i, graded in enumerate(group.members):
                version = _single_version(graded.trajectory)
                if version in self._policies:
                    by_version.setdefault(version, []).append(i)
            for version, members in by_version.items():
                taken = tuple(group.members[i] for i in members[:left])
                if taken:
                    chosen.setdefault(version, []).append(BatchGroup(group.group, taken, ()))
                    left -= len(taken)
        return dict(chosen)


def _single_version(trajectory: Trajectory) -> int:
    """The version of every sampled token, or -1 if several made it."""
    versions = trajectory.versions[trajectory.action_mask]
    return int(versions[0]) if (versions == versions[0]).all() else -1
