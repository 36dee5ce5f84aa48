"""The digest of a whole state, taken by as many threads as there are: the same name `state_digest` gives it on one."""

from __future__ import annotations

from driftline.policy_store.tensor import State, state_digest_of, tensor_digest
from driftline.policy_store.workers import Workers, shared_workers

__all__ = ["digest_state"]


async def digest_state(state: State, workers: Workers | None = None) -> str:
    """Hex name of these weights, off the event loop. Tensors are read side by side; a state of one tensor is read by one thread."""
    names = sorted(state)
    return state_digest_of(await (workers or shared_workers()).map(lambda name: tensor_digest(name, state[name]), names))
