"""An external engine as a run's settings describe it. ConfigError for what no server of another system can do."""

from __future__ import annotations

from pathlib import Path

from driftline.messages.errors import ConfigError
from driftline.models.families import model_config
from driftline.models.lora.adapter import Scaling
from driftline.models.tokenizer import Tokenizer
from driftline.services.config import Config, EngineKind
from driftline.services.rollout.external.engine import ExternalEngine
from driftline.services.rollout.external.files import HandOver
from driftline.services.rollout.external.server import Http, Server
from driftline.services.rollout.external.sglang import Sglang
from driftline.services.rollout.external.vllm import Vllm
from driftline.services.starting import starting_files

__all__ = ["open_engine"]


def open_engine(config: Config, *, tokenizer: Tokenizer, name: str, api_key: str = "") -> ExternalEngine:
    """Of the starting checkpoint only config.json is read. Versions are laid in `rollout.engine_files`, under a directory of the engine's name. Nothing is asked of the
    server yet: `load` is the first."""
    rollout, learner = config.rollout, config.learner
    if config.learner.router_replay:
        raise ConfigError("another server returns no routes", field="learner.router_replay", value=True, remedy=f"false with rollout.engine = {rollout.engine.value}")
    if rollout.engines > 1 and not learner.lora_rank:
        raise ConfigError("each would replace the weights of the one server", field="rollout.engines", value=rollout.engines,
                          remedy="1, with a larger max_batch; or train adapters (learner.lora_rank), which lie there side by side")
    http = Http(rollout.engine_url, api_key=api_key, connections=2 * rollout.max_batch)
    server: Server
    match rollout.engine:
        case EngineKind.VLLM:
            server = Vllm(http)
        case EngineKind.SGLANG:
            server = Sglang(http)
        case EngineKind.DRIFTLINE:
            raise ConfigError("is our own", field="rollout.engine", value=rollout.engine.value, remedy="vllm or sglang")
    lora = {}
    if learner.lora_rank:
        alpha = float(learner.lora_rank if learner.lora_alpha is None else learner.lora_alpha)
        lora = {"alpha": alpha, "scaling": Scaling(learner.lora_scaling.value), "base": config.policy.init}
    model, files = model_config(config.policy.init), Path(rollout.engine_files) / config.run.name / name
    hand_over = HandOver(files, beside=starting_files(config), **lora)  # type: ignore[arg-type]
    return ExternalEngine(server, hand_over, tokenizer=tokenizer, context=model.max_position_embeddings, vocab=model.vocab_size, max_batch=rollout.max_batch, name=name,
                          outage_s=config.broker.lost_after_s, temperatures=(config.sampling.temperature,))
