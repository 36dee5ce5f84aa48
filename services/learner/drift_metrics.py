"""How far the learner's log-probabilities are from the recorded ones: numerics at lag 0, staleness at the others.

With d = learner - behaviour at an action token sampled from the behaviour policy, KL(behaviour || learner) is estimated by
k1 = -d and k3 = expm1(d) - d. Guarantees: sums are in float64 and k3 uses expm1 (in float32, exp(d) - 1 - d is noise below
|d| = 1e-4 and often negative); means are over tokens, not over sequences; equality is of bits, not of values (0.0 == -0.0, NaN);
positions off the mask are not read; a non-finite log-probability at an action token is counted and left out, never filled in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftline.messages.errors import DriftlineError

__all__ = ["Drift", "DriftReport", "Lags", "drift", "drift_by_lag", "lags"]

EXTREME = math.log(2.0)  # a ratio beyond 2 or below 1/2: nearly always a flipped router or a wrong weight, not rounding
EXP_LIMIT = 700.0  # exp overflows float64 above 709


@dataclass(frozen=True)
class Drift:
    """Over `tokens` action tokens with finite values on both sides; all means are nan-free, zero when there is no token.

    `k3_stderr` is the standard error of `k3`; `ess` the effective sample size of exp(d) over tokens, as a fraction; `pearson`
    the correlation of the two log-probabilities (1 if either is constant and they are equal, 0 if constant and not).
    """

    tokens: int
    k1: float
    k3: float
    k3_stderr: float
    max_abs: float
    extreme: float
    bitwise_equal: float
    ess: float
    pearson: float
    non_finite: int


@dataclass(frozen=True)
class DriftReport:
    """`all` over every action token; `by_lag` over those whose version is that many versions behind the head."""

    all: Drift
    by_lag: Mapping[int, Drift]

    @property
    def numerics(self) -> Drift | None:
        """Lag 0: the same weights on both sides, so any distance is arithmetic."""
        return self.by_lag.get(0)


@dataclass(frozen=True)
class Lags:
    """`oldest`: how many sequences have their oldest token at that lag (what the bound judges); `token`: how many tokens."""

    oldest: Mapping[int, int]
    token: Mapping[int, int]
    oldest_max: int
    token_mean: float


def drift(learner: NDArray[np.floating[Any]], behaviour: NDArray[np.floating[Any]], mask: NDArray[np.bool_]) -> Drift:
    """Compare two arrays of log-probabilities of one dtype (float32 or float64) and any one shape."""
    if learner.dtype != behaviour.dtype or learner.dtype not in (np.float32, np.float64):
        raise DriftlineError("both sides need one dtype, float32 or float64", field="log-probabilities",
                             value=f"{learner.dtype}, {behaviour.dtype}",
                             remedy="compare what each side computed, not a conversion of it")
    if not learner.shape == behaviour.shape == mask.shape:
        raise DriftlineError("shapes differ", field="log-probabilities",
                             value=(learner.shape, behaviour.shape, mask.shape))
    ours, theirs = learner[mask], behaviour[mask]
    finite = np.isfinite(ours) & np.isfinite(theirs)
    skipped = int(finite.size - finite.sum())
    ours, theirs = ours[finite], theirs[finite]
    n = len(ours)
    if n == 0:
        return Drift(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, skipped)
    bits = np.int32 if ours.dtype == np.float32 else np.int64
    equal = float((ours.view(bits) == theirs.view(bits)).mean())
    p, q = ours.astype(np.float64), theirs.astype(np.float64)
    d = np.clip(p - q, -EXP_LIMIT, EXP_LIMIT)
    k3 = np.expm1(d) - d
    # Scaled by the largest weight, which cancels, so that squares cannot overflow.
    w = np.exp(d - d.max())
    return Drift(
        tokens=n,
        k1=float(-d.mean()),
        k3=float(k3.mean()),
        k3_stderr=_stderr(k3),
        max_abs=float(np.abs(d).max()),
        extreme=float((np.abs(d) > EXTREME).mean()),
        bitwise_equal=equal,
        ess=float(w.sum() ** 2 / (n * np.square(w).sum())),
        pearson=_pearson(p, q),
        non_finite=skipped,
    )


def drift_by_lag(
    learner: NDArray[np.floating[Any]],
    behaviour: NDArray[np.floating[Any]],
    mask: NDArray[np.bool_],
    versions: NDArray[np.integer[Any]],
    head: int,
) -> DriftReport:
    """`head` is the version whose weights made `learner`; a token of version v has lag head - v."""
    lag = _token_lag(mask, versions, head)
    values = np.unique(lag[mask])
    by_lag = {int(value): drift(learner, behaviour, mask & (lag == value)) for value in values}
    return DriftReport(drift(learner, behaviour, mask), MappingProxyType(by_lag))


def lags(mask: NDArray[np.bool_], versions: NDArray[np.integer[Any]], seq_id: NDArray[np.integer[Any]], head: int) -> Lags:
    """Lag histograms of flat tokens [N]; `seq_id` [N] names each token's sequence. Prompt and tool tokens do not count."""
    lag = _token_lag(mask, versions, head)[mask]
    if lag.size == 0:
        return Lags(MappingProxyType({}), MappingProxyType({}), 0, 0.0)
    ids = seq_id[mask]
    sequences, place = np.unique(ids, return_inverse=True)
    oldest = np.zeros(len(sequences), dtype=np.int64)
    np.maximum.at(oldest, place.reshape(-1), lag)
    return Lags(_histogram(oldest), _histogram(lag), int(oldest.max()), float(lag.mean()))


def _token_lag(mask: NDArray[np.bool_], versions: NDArray[np.integer[Any]], head: int) -> NDArray[np.int64]:
    if mask.shape != versions.shape:
        raise DriftlineError("shapes differ", field="versions", value=(versions.shape, mask.shape))
    lag = head - versions.astype(np.int64)
    if mask.any() and (int(lag[mask].min()) < 0 or int(versions[mask].min()) < 0):
        raise DriftlineError(f"an action token's version is not in 0..{head}", field="versions",
                             value=(int(versions[mask].min()), int(versions[mask].max())))
    return lag


def _histogram(values: NDArray[np.int64]) -> Mapping[int, int]:
    keys, counts = np.unique(values, return_counts=True)
    return MappingProxyType({int(key): int(count) for key, count in zip(keys, counts, strict=True)})


def _stderr(values: NDArray[np.float64]) -> float:
    if len(values) < 2:
        return 0.0
    scale = float(np.abs(values).max())
    return float((values / scale).std(ddof=1) * scale / math.sqrt(len(values))) if scale else 0.0


def _pearson(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    x, y = a - a.mean(), b - b.mean()
    norm = math.sqrt(float(np.square(x).sum())) * math.sqrt(float(np.square(y).sum()))
    if norm == 0.0:
        return 1.0 if bool((a == b).all()) else 0.0
    return float(np.clip((x * y).sum() / norm, -1.0, 1.0))
