"""`driftline pretrain`: a supervised warm start by `cross_entropy`, through the objective and the forward that RL uses.

RL needs a policy that sometimes succeeds and still explores. This makes one: a mixture of task families at easy difficulties, seen briefly enough that the
harder ones stay open. The result is a checkpoint directory and `pretrain.json` with what was trained, on what, and the course of the loss.
"""

from __future__ import annotations

import json
import math
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from driftline.environments.source import MixturePart
from driftline.messages.errors import ConfigError
from driftline.models.causal_lm import CausalLM
from driftline.models.checkpoint import save_checkpoint
from driftline.models.config import tiny
from driftline.models.model import K3ForCausalLM
from driftline.services.learner.corpus import Corpus, build_corpus
from driftline.services.learner.objective import Aggregation, Denominators, Objective, ObjectiveConfig, loss

__all__ = ["PretrainConfig", "pretrain"]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    params: dict[str, Any] = Field(default_factory=dict)
    weight: float = Field(default=1.0, gt=0)


class Train(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    examples: int = Field(default=400_000, ge=1)
    max_tokens: int = Field(default=128, ge=8)
    steps: int = Field(default=1000, ge=1)
    stop_after: int = Field(default=0, ge=0)
    batch: int = Field(default=1024, ge=1)
    lr: float = Field(default=3e-3, gt=0)
    warmup: int = Field(default=100, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    seed: int = 0


class PretrainConfig(BaseModel):
    """`[model]` overrides of the tiny preset, `[train]`, and `[[mixture]]` parts.

    `train.steps` is the length of the learning-rate schedule; `train.stop_after` (0: all of it) ends it early, for a policy that still explores.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: dict[str, Any] = Field(default_factory=dict)
    train: Train = Train()
    mixture: tuple[Part, ...] = Field(min_length=1)

    @classmethod
    def load(cls, path: Path) -> PretrainConfig:
        try:
            return cls.model_validate(tomllib.loads(path.read_text()))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot be read: {error}", field="config", value=str(path)) from error
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(first["msg"], field=".".join(map(str, first["loc"])), value=first.get("input"),
                              remedy="see examples/pretrain.toml") from error

    def parts(self) -> tuple[MixturePart, ...]:
        return tuple(MixturePart(p.family, p.params, p.weight) for p in self.mixture)


def _batches(corpus: Corpus, size: int, seed: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Endless (tokens [B, T], prompt [B], total [B]); rows of similar length share a batch, so little is padding."""
    tokens = torch.from_numpy(corpus.tokens.astype("int64")).to(device)
    prompt, total = (torch.from_numpy(x.astype("int64")).to(device) for x in (corpus.prompt, corpus.total))
    rng = torch.Generator().manual_seed(seed)
    window = 16
    while True:
        rows = torch.randint(len(corpus), (size * window,), generator=rng).to(device)
        rows = rows[torch.argsort(total[rows])]
        for part in torch.randperm(window, generator=rng).tolist():
            picked = rows[part * size : (part + 1) * size]
            yield tokens[picked, : int(total[picked].max())], prompt[picked], total[picked]


def answer_loss(model: CausalLM, tokens: torch.Tensor, prompt: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Mean negative log-probability in nats over answer tokens (eos included)."""
    out = model(tokens[:, :-1], lengths=total - 1)
    at = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    mask = (at >= prompt[:, None] - 1) & (at < total[:, None] - 1)
    logp, _ = model.logprobs(out.hidden[mask], tokens[:, 1:][mask])
    seq_id = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(mask)[mask]
    ones = torch.ones(len(tokens), device=tokens.device, dtype=logp.dtype)
    return loss(
        ObjectiveConfig(name=Objective.CROSS_ENTROPY, aggregation=Aggregation.TOKEN_MEAN),
        logp_new=logp, logp_prox=logp.detach(), mask=torch.ones_like(logp, dtype=torch.bool), advantages=ones, seq_id=seq_id,
        denominators=Denominators(len(tokens), logp.numel()),
    ).loss


def pretrain(config: PretrainConfig, out: Path, *, corpus: Corpus | None = None, device: str = "cpu", save_every: int = 0) -> dict[str, Any]:
    """Train and write the checkpoint to `out`; returns the summary it also writes to `out/pretrain.json`."""
    train = config.train
    corpus = corpus or build_corpus(config.parts(), train.examples, train.seed, train.max_tokens)
    torch.manual_seed(train.seed)
    model = K3ForCausalLM(tiny(**config.model)).to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=(0.9, 0.98))
    last = min(train.steps, train.stop_after or train.steps)
    started, curve = time.monotonic(), []
    for step, batch in zip(range(1, last + 1), _batches(corpus, train.batch, train.seed, torch.device(device)), strict=False):
        warm = min(1.0, step / max(1, train.warmup))
        for group in optimizer.param_groups:
            group["lr"] = train.lr * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / train.steps)))
        value = answer_loss(model, *batch)
        optimizer.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, train.grad_clip)
        optimizer.step()
        if step % 50 == 0 or step == last:
            curve.append({"step": step, "loss": round(value.item(), 4), "wall_s": round(time.monotonic() - started, 1)})
            print(json.dumps(curve[-1]), file=sys.stderr, flush=True)
        if save_every and step % save_every == 0 and step < last:
            save_checkpoint(model, out / f"step-{step}")
    save_checkpoint(model, out)
    summary = {
        "config": config.model_dump(mode="json"), "parameters": sum(p.numel() for p in model.parameters()), "examples": len(corpus),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu", "wall_s": round(time.monotonic() - started, 1),
        "curve": curve,
    }
    (out / "pretrain.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def main(config: Path, out: Path, *, corpus: Path | None = None, corpus_only: Path | None = None, device: str = "", save_every: int = 0) -> None:
    """Glue for the command line."""
    settings = PretrainConfig.load(config)
    if corpus_only is not None:
        train = settings.train
        build_corpus(settings.parts(), train.examples, train.seed, train.max_tokens).save(corpus_only)
        return
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    pretrain(settings, out, corpus=Corpus.load(corpus) if corpus else None, device=chosen, save_every=save_every)
