"""Prefill pairing: attention groups that share an expert group compute their prompts in the same steps. See docs/handover.md."""

from driftline.services.rollout.pairing.rules import Decision, Load, Pairing, Why
from driftline.services.rollout.pairing.simulation import Costs, Outcome, Workload, simulate

__all__ = ["Costs", "Decision", "Load", "Outcome", "Pairing", "Why", "Workload", "simulate"]
