"""Two real trainings, each a stream of policy versions as bytes: every next one is one optimizer step after the last.

`tiny_k3` is the project's own model, engine and trainer on its demo's task; `smollm2` is SmolLM2-135M-Instruct on a CUDA device, bfloat16 weights and float32
masters, its own group samples, the project's advantages and GSPO objective. Both are on-policy, all weights are trained, and nothing is scripted: what
changes is what the gradients of sampled and graded groups changed.

Where the masters start decides how often a bfloat16 weight moves in the first hundreds of steps. ROUNDED: at the published weights, in the middle of their
rounding intervals, as a run starts from a bfloat16 checkpoint; most weights must drift for long before they round to something else. SPREAD: anywhere in
those intervals, with equal probability, as training leaves them; this is the steady state, and the larger update.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from driftline.models.checkpoint import load_checkpoint
from driftline.models.state import policy_dtype
from driftline.policy_store.tensor import State
from driftline.services.config import LearnerConfig
from driftline.services.learner.advantage import Estimator, group_advantages
from driftline.services.learner.objective import Denominators, ObjectiveConfig, loss
from driftline.services.tensors import to_host

__all__ = ["Masters", "Setting", "Step", "ahead", "smollm2", "spread_", "tiny_k3"]

CLIP = 0.2  # of the sequence ratio; answers are short
SEED = 0
RUN = "updates"


class Masters(StrEnum):
    ROUNDED = "rounded"
    SPREAD = "spread"


class Setting(NamedTuple):
    lr: float
    masters: Masters

    def __str__(self) -> str:
        return f"lr {self.lr:g}, masters {self.masters}"

    @classmethod
    def parse(cls, text: str) -> Setting:
        lr, _, masters = text.partition(":")
        return cls(float(lr), Masters(masters or Masters.SPREAD))


class Step(NamedTuple):
    """A version's weights, the caller's from now on, and what the step that made it was like; nothing for the first."""

    state: State
    facts: dict[str, float]


def ahead(training: Callable[..., Iterator[Step]], *arguments: Any, versions: int = 2, patience_s: float = 300.0) -> Iterator[Step]:
    """The same steps, made in a process of its own up to `versions` ahead: the device does not wait for what is measured of them.

    Raises queue.Empty when the training is silent for `patience_s`.
    """
    context = multiprocessing.get_context("spawn")
    steps = context.Queue(versions)
    process = context.Process(target=_produce, args=(steps, training, arguments), daemon=True)
    process.start()
    while (step := steps.get(timeout=patience_s)) is not None:
        yield step
    process.join()


def _produce(steps: Any, training: Callable[..., Iterator[Step]], arguments: tuple[Any, ...]) -> None:
    for step in training(*arguments):
        steps.put(step)
    steps.put(None)


def spread_(masters: list[torch.Tensor], generator: torch.Generator) -> None:
    """Move each float32 that is a bfloat16 value to anywhere that rounds to the same one. Zeros stay."""
    for master in masters:
        bits = master.view(torch.int32)
        shift = torch.randint(-32767, 32768, master.shape, generator=generator, dtype=torch.int32).to(master.device)
        bits += torch.where(master == 0, torch.zeros_like(shift), shift)


def tiny_k3(setting: Setting, steps: int, *, groups: int = 16, members: int = 8) -> Iterator[Step]:
    """The base policy on the demo's words, by the engine and the trainer; one thread."""
    from driftline.environments.source import load_scorer, load_source
    from driftline.messages.types import Graded, Group, Sampling
    from driftline.services.learner.assembler import Batch, BatchGroup
    from driftline.services.learner.trainer import Trainer
    from driftline.services.rollout.engine import Engine

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    source = load_source("reasoning_gym", "spell_backward", {"min_word_len": 9, "max_word_len": 10})
    scorer = load_scorer(["reasoning_gym"])
    trainer = Trainer(load_checkpoint("base"), LearnerConfig(lr=setting.lr, adv_std=True, eps_low=CLIP, eps_high=CLIP, micro_batch_groups=groups))
    if setting.masters is Masters.SPREAD:
        rounded = [m for n, m in zip(trainer.names, trainer.masters, strict=True) if policy_dtype(n, trainer.dtype) is torch.bfloat16]
        spread_(rounded, torch.Generator().manual_seed(SEED))
    engine = Engine(load_checkpoint("base"), version=0, max_batch=128)
    engine.load(0, trainer.state())
    yield Step(to_host(trainer.state()), {})
    for version in range(steps):
        asked: dict[str, Group] = {}
        for index in range(version * groups, (version + 1) * groups):
            group = Group(run=RUN, group=f"g{index:08d}", index=index, task=source.task(index, SEED), members=members,
                          sampling=Sampling(max_tokens=14), seed=SEED)
            asked[group.group] = group
            engine.submit(group)
        done: dict[str, list[Graded]] = {name: [] for name in asked}
        while not engine.idle:
            for trajectory in engine.step():
                score = scorer.score(trajectory.task, trajectory.text.strip())
                done[trajectory.group].append(Graded(run=RUN, trajectory=trajectory, reward=score.reward))
        batch = Batch(version, tuple(
            BatchGroup(group, tuple(sorted(done[name], key=lambda graded: graded.trajectory.member)), ()) for name, group in asked.items()
        ))
        report = trainer.step(batch).values
        state = trainer.state()
        engine.load(version + 1, state)
        signal = sum(len(set(entry.rewards)) > 1 for entry in batch.groups) / groups
        yield Step(to_host(state), {"reward": report["reward_train"], "grad_norm": report["grad_norm"], "signal": signal})


def smollm2(setting: Setting, steps: int, weights: Path, *, prompts: int = 16, members: int = 8, tokens: int = 16,
            device: str = "cuda") -> Iterator[Step]:
    """SmolLM2-135M-Instruct adds two numbers; the right number is worth 1, another a quarter. Needs transformers and gguf."""
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    model, tokenizer = load_gguf(weights)
    model = model.to(device, torch.bfloat16)
    parameters = list(model.parameters())
    masters = [p.detach().float().clone() for p in parameters]
    if setting.masters is Masters.SPREAD:
        spread_(masters, torch.Generator().manual_seed(SEED))
    defaults = LearnerConfig(lr=setting.lr)
    optimizer = torch.optim.AdamW(masters, lr=setting.lr, betas=defaults.betas, eps=defaults.eps, weight_decay=defaults.weight_decay)
    yield Step(_published(model), {})
    for _ in range(steps):
        terms = rng.integers(1, 10, (prompts, 2))
        batch = _sample(model, tokenizer, [f"What is {a} + {b}? Answer with only the number." for a, b in terms.tolist()], members, tokens)
        texts = [tokenizer.decode(row) for row in batch.completions()]
        rewards = np.array([_reward(text, int(terms[i // members].sum())) for i, text in enumerate(texts)]).reshape(prompts, members)
        advantages = torch.tensor([group_advantages(row, Estimator.STD).advantages for row in rewards.tolist()], dtype=torch.float32).flatten()
        _backward(model, batch, advantages.to(device))
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        norm = float(torch.nn.utils.clip_grad_norm_(masters, defaults.grad_clip))
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
        yield Step(_published(model), {"reward": float(rewards.mean()), "grad_norm": norm, "signal": float((np.ptp(rewards, 1) > 0).mean())})


def _published(model: Any) -> State:
    return to_host({name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()})


def _reward(text: str, answer: int) -> float:
    numbers = re.findall(r"[0-9]+", text)
    if not numbers:
        return 0.0
    return 1.0 if int(numbers[-1]) == answer else 0.25


class Sampled(NamedTuple):
    """`tokens` int64 [B, P + R], prompts padded on the left; `there` bool [B, P + R]: no padding, and nothing after the end."""

    tokens: torch.Tensor
    there: torch.Tensor
    prompt: int

    def completions(self) -> list[list[int]]:
        rows = zip(self.tokens[:, self.prompt :].tolist(), self.there[:, self.prompt :].tolist(), strict=True)
        return [[token for token, real in zip(*row, strict=True) if real] for row in rows]


@torch.no_grad()
def _sample(model: Any, tokenizer: Tokenizer, questions: list[str], members: int, tokens: int) -> Sampled:
    """`members` completions of each question at temperature 1, in order of question."""
    encoded = [tokenizer.encode_chat(question) for question in questions for _ in range(members)]
    longest = max(map(len, encoded))
    prompts = torch.tensor([[tokenizer.end] * (longest - len(row)) + row for row in encoded], device=model.device)
    at = torch.arange(longest, device=model.device)
    there = at >= longest - torch.tensor([len(row) for row in encoded], device=model.device)[:, None]
    out = model.generate(input_ids=prompts, attention_mask=there.long(), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                         max_new_tokens=tokens, eos_token_id=tokenizer.end, pad_token_id=tokenizer.end)
    made = out[:, longest:]
    ended = (made == tokenizer.end).cumsum(1) - (made == tokenizer.end).long() > 0
    return Sampled(out, torch.cat([there, ~ended], 1), longest)


def _backward(model: Any, batch: Sampled, advantages: torch.Tensor) -> None:
    """GSPO against the policy the step starts from, which is the one that sampled."""
    position = (batch.there.long().cumsum(1) - 1).clamp_min(0)
    hidden = model.model(input_ids=batch.tokens, attention_mask=batch.there.long(), position_ids=position).last_hidden_state
    logits = model.lm_head(hidden[:, batch.prompt - 1 : -1]).float()
    made, mask = batch.tokens[:, batch.prompt :], batch.there[:, batch.prompt :]
    logp = torch.log_softmax(logits, -1).gather(-1, made[..., None]).squeeze(-1)
    out = loss(ObjectiveConfig(eps_low=CLIP, eps_high=CLIP), logp_new=logp, logp_prox=logp.detach(), mask=mask, advantages=advantages,
               denominators=Denominators.of(mask))
    out.loss.backward()


class Tokenizer:
    """A GGUF file's byte-level BPE that takes digits one by one."""

    def __init__(self, tokens: list[str], kinds: list[int], merges: list[str], end: int) -> None:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Model

        self.end = end
        self._model = Model(models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges]))
        self._model.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
        self._model.decoder = decoders.ByteLevel()
        control = 3
        self._model.add_special_tokens([AddedToken(t, normalized=False) for t, kind in zip(tokens, kinds, strict=True) if kind == control])

    def encode_chat(self, question: str) -> list[int]:
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        turns = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids: list[int] = self._model.encode(turns).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._model.decode(ids, skip_special_tokens=True)
        return text


def load_gguf(path: Path) -> tuple[Any, Tokenizer]:
    """A llama's GGUF as transformers' model in float32, quantised tensors expanded, and its tokenizer."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(path)

    def field(name: str) -> Any:
        return reader.get_field(name).contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"), hidden_size=field("llama.embedding_length"), intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"), num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=field("llama.context_length"), rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")}, tie_word_embeddings=True,
        bos_token_id=field("tokenizer.ggml.bos_token_id"), eos_token_id=field("tokenizer.ggml.eos_token_id"),
    )
    places = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    parts = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj"}
    state = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        stem = tensor.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            stem = f"model.layers.{layer}.{parts[part]}"
            if part in ("attn_q", "attn_k"):  # the file interleaves the two halves of a rotated pair
                rows = values.shape[0] // (heads if part == "attn_q" else kv_heads) // 2
                values = values.reshape(-1, rows, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        else:
            stem = places[stem]
        state[f"{stem}.weight"] = torch.from_numpy(np.array(values, np.float32))
    model = LlamaForCausalLM(config)
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    tokens = Tokenizer(field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type"), field("tokenizer.ggml.merges"),
                       field("tokenizer.ggml.eos_token_id"))
    return model.eval(), tokens
