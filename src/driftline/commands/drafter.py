"""`driftline drafter`: train a drafter for a run's model, and say what one is worth.

Exit codes: 0 done; 2 used wrongly, or files that do not fit; 4 a damaged file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftline.commands.common import AsJson
from driftline.commands.policy_text import emit, table
from driftline.messages.errors import ConfigError

if TYPE_CHECKING:
    from driftline.models.causal_lm import CausalLM
    from driftline.models.tokenizer import Tokenizer
    from driftline.services.config import Config
    from driftline.services.rollout.speculation.texts import Grouped

__all__ = ["register"]

_CONTEXTS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    drafter = typer.Typer(no_args_is_help=True, help="Drafters for speculative decoding: train one, measure one.")
    for command in (train, measure):
        drafter.command(command.__name__)(command)
    app.add_typer(drafter, name="drafter")


_RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run whose model, tasks and temperature it is for.")]
_Policy = Annotated[str, typer.Option("--policy", help="Another checkpoint than the run's policy.init: a later version, exported.")]
_Groups = Annotated[int, typer.Option("--groups", min=0, help="Groups of the run's tasks that the model samples for it.")]
_Members = Annotated[int, typer.Option("--members", min=1, help="Members of each.")]
_Longest = Annotated[int, typer.Option("--max-tokens", min=0, help="Longest answer; 0: the run's.")]
_Recording = Annotated[list[Path] | None, typer.Option("--recording", metavar="FILE.dlr", help="Trajectories of `driftline record`, besides or instead; may be repeated.")]
_Device = Annotated[str, typer.Option("--device", help="Where the model runs.")]
_Drafts = Annotated[int, typer.Option("--draft-tokens", min=1, max=15, help="Drafts in a chain.")]


def train(
    run_file: _RunFile,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The drafter's directory: rollout.drafter.")],
    policy: _Policy = "", groups: _Groups = 64, members: _Members = 4, max_tokens: _Longest = 0, recording: _Recording = None,
    steps: Annotated[int, typer.Option("--steps", min=1)] = 400,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Texts in a step.")] = 16,
    lr: Annotated[float, typer.Option("--lr")] = 1e-3,
    draft_tokens: _Drafts = 3,
    draft_vocab: Annotated[int, typer.Option("--draft-vocab", min=0, help="Tokens that can be drafted, the most sampled ones; 0: at most 16,384.")] = 0,
    window: Annotated[int, typer.Option("--window", min=16, help="Positions that its attention sees.")] = 256,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="DIR", help="Go on from this drafter.")] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    device: _Device = "cpu", as_json: AsJson = False,
) -> None:
    """Train a drafter on texts of the model itself, and measure it on groups that it has not seen."""
    import torch

    from driftline.models.drafter import Drafter, DrafterConfig, Taps, load_drafter, save_drafter
    from driftline.models.drafter.text import frequent
    from driftline.models.drafter.training import Schedule
    from driftline.models.drafter.training import train as fit

    config, model, tokenizer = _opened(run_file, policy, device)
    schedule = Schedule(steps=steps, texts=batch, lr=lr, unrolled=draft_tokens, seed=seed, warmup=min(20, steps // 10 + 1))
    seen, unseen = _texts(config, model, tokenizer, groups, members, max_tokens, recording or [])
    torch.manual_seed(seed)
    if resume is not None:
        drafter = load_drafter(resume, model.config, device=device)
    else:
        drafter = Drafter(DrafterConfig.of(model.config, draft_vocab_size=draft_vocab or None, window=window)).to(device)
        drafter.begin(model.lm_head.weight.detach(), frequent([text.text for text in seen], model.config.vocab_size, drafter.config.draft_vocab_size))

    def say(step: int, losses: Any) -> None:
        if not as_json:
            typer.echo(f"step {step:>6}  " + "  ".join(f"{loss:.3f}" for loss in losses))

    with Taps(model, drafter.config.taps) as taps:
        done = fit(drafter, model, taps, [text.text for text in seen], schedule, say=say)
    save_drafter(drafter, out)
    found = _measured(model, drafter, unseen, draft_tokens)
    _show({"directory": str(out), "texts": len(seen), "steps": done.steps, "losses": list(done.losses), **found}, as_json)


def measure(
    run_file: _RunFile,
    drafter: Annotated[Path | None, typer.Option("--drafter", metavar="DIR", help="Of `driftline drafter train`; without it n-grams alone.")] = None,
    policy: _Policy = "", groups: _Groups = 16, members: _Members = 4, max_tokens: _Longest = 0, recording: _Recording = None, draft_tokens: _Drafts = 3,
    device: _Device = "cpu", as_json: AsJson = False,
) -> None:
    """Acceptance length (tokens a step, 1 without drafts) of n-grams and of a drafter, by context length, on texts of the model."""
    from driftline.models.drafter import load_drafter

    config, model, tokenizer = _opened(run_file, policy, device)
    seen, unseen = _texts(config, model, tokenizer, groups, members, max_tokens, recording or [])
    loaded = None if drafter is None else load_drafter(drafter, model.config, device=device)
    _show(_measured(model, loaded, [*seen, *unseen], draft_tokens), as_json)


def _opened(run_file: Path, policy: str, device: str) -> tuple[Config, CausalLM, Tokenizer]:
    from driftline.models.families import open_model
    from driftline.models.tokenizers.loading import load_tokenizer
    from driftline.services.config import load
    from driftline.services.policy_model import compute_dtype
    from driftline.services.starting import starting_place

    config = load(run_file)
    model = open_model(policy or config.policy.init, dtype=compute_dtype(config, device), device=device)
    model.eval()
    return config, model.requires_grad_(False), load_tokenizer(starting_place(config))


def _texts(
    config: Config, model: CausalLM, tokenizer: Tokenizer, groups: int, members: int, max_tokens: int, recordings: list[Path]
) -> tuple[list[Grouped], list[Grouped]]:
    """To learn from, and an eighth of the groups to judge by."""
    from driftline.services.rollout.speculation.texts import recorded, self_sampled

    texts = list(recorded(recordings))
    if groups:
        texts += self_sampled(config, model, tokenizer, first=0, groups=groups, members=members, max_tokens=max_tokens)
    names = list(dict.fromkeys(text.group for text in texts))
    kept = set(names[-max(1, len(names) // 8) :])
    if len(names) < 2:
        raise ConfigError("one group to learn from and one to judge by, at least", field="--groups", value=len(names), remedy="sample more, or give a --recording")
    return [text for text in texts if text.group not in kept], [text for text in texts if text.group in kept]


def _measured(model: CausalLM, drafter: Any, texts: list[Grouped], length: int) -> dict[str, Any]:
    from driftline.models.drafter import Taps
    from driftline.models.drafter.text import observed
    from driftline.services.rollout.speculation import NgramDrafter, Speculator
    from driftline.services.rollout.speculation.learned import Choice, TrainedDrafter
    from driftline.services.rollout.speculation.rehearsal import rehearse

    plain, families = [text.text for text in texts], [text.group for text in texts]
    drafters: dict[str, Any] = {"ngram": NgramDrafter(), "ngram, own text": NgramDrafter(families=False)}
    features = None
    if drafter is not None:
        drafters |= {f"trained, {choice.value}": TrainedDrafter(drafter, model, choice=choice) for choice in Choice}
        with Taps(model, drafter.config.taps) as taps:
            features = [observed(model, taps, [text]).features[0] for text in plain]
    lengths: dict[str, Any] = {}
    for name, each in drafters.items():
        speculator = Speculator(each, length=length)
        done = rehearse(speculator, plain, families, features if each.taps else None)
        parts = {f"{a}": round(done.length(a, b), 3) for a, b in zip(_CONTEXTS, [*_CONTEXTS[1:], 1 << 40], strict=True) if ((done.context >= a) & (done.context < b)).any()}
        lengths[name] = {"length": round(done.length(), 3), "drafted": speculator.acceptance.rows, "steps": len(done.context), "by context": parts}
    return {"judged": len(plain), "acceptance": lengths}


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(found)
        return
    rows = [[name, f"{part['length']:.3f}", f"{part['drafted']} of {part['steps']}", "  ".join(f"{at}+: {length:.2f}" for at, length in part["by context"].items())]
            for name, part in found["acceptance"].items()]
    table(f"tokens a step on {found['judged']} texts", [("drafter", "left"), ("length", "right"), ("steps with drafts", "right"), ("by context", "left")], rows)
    if "directory" in found:
        typer.echo(f"{found['directory']}: {found['steps']} steps on {found['texts']} texts")
