"""A writer of small GGUF files, and a llama in one: sizes, weights in any form, a byte-level vocabulary with a chat template."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from driftline.models.gguf.blocks import BLOCKS, Kind

SIZES = {"block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4, "attention.head_count_kv": 2,
         "rope.dimension_count": 16, "vocab_size": 300}
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}<|start|>system\nBe brief.<|stop|>\n{% endif %}"
    "{{ '<|start|>' + message.role + '\n' + message['content'] + '<|stop|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def byte_characters() -> list[str]:
    """GPT-2's character of each byte, in the order of bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(256, 512))
    return [chr(b if b in printable else next(moved)) for b in range(256)]


def vocabulary(pre: str = "smollm") -> dict[str, Any]:
    """Bytes, some merged pieces, five control tokens at the front."""
    special = ["<|none|>", "<|start|>", "<|stop|>", "<|turn|>", "<|pad|>"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "l d", "or ld", "Ġw orld", "1 2", "12 3", "Ġ Ġ", "Ċ Ċ", "Ã ©", "' t", "b it", "i t", "bit s"]
    merges = [m for m in merges if m != "b it"] + ["b it"]
    pieces = [*byte_characters(), *dict.fromkeys(m.replace(" ", "") for m in merges)]
    tokens = [*special, *pieces]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3] * 5 + [1] * len(pieces), np.int32), "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 4,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": TEMPLATE,
    }


def metadata(**changes: Any) -> dict[str, Any]:
    """`changes`: by key with __ for a point; None removes one."""
    body: dict[str, Any] = {"general.architecture": "llama", "general.alignment": 32, **{f"llama.{k}": v for k, v in SIZES.items()},
                            "llama.rope.freq_base": 10000.0, "llama.attention.layer_norm_rms_epsilon": 1e-5, **vocabulary()}
    body |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in body.items() if value is not None}


def shapes(sizes: Mapping[str, int] = SIZES, *, tied: bool = True) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = sizes["embedding_length"], sizes["feed_forward_length"], sizes["vocab_size"]
    kv = sizes["attention.head_count_kv"] * hidden // sizes["attention.head_count"]
    layer = {"attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, hidden), "ffn_gate": (inner, hidden),
             "ffn_up": (inner, hidden), "ffn_down": (hidden, inner), "attn_norm": (hidden,), "ffn_norm": (hidden,)}
    found = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,), **({} if tied else {"output.weight": (vocab, hidden)})}
    return found | {f"blk.{i}.{name}.weight": shape for i in range(sizes["block_count"]) for name, shape in layer.items()}


def weights(kind: Kind = Kind.Q8_0, *, tied: bool = True, seed: int = 0) -> dict[str, tuple[Kind, tuple[int, ...], bytes]]:
    """Matrices of one form with random codes and small scales, norms near 1 in fp32."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes(tied=tied).items():
        form = Kind.F32 if len(shape) == 1 else kind
        made[name] = (form, shape, (1 + 0.1 * rng.standard_normal(shape)).astype("<f4").tobytes() if len(shape) == 1 else blocks(form, shape, rng))
    return made


def blocks(kind: Kind, shape: tuple[int, ...], rng: np.random.Generator, scale: float = 0.004) -> bytes:
    """Random bytes of a form, its half-precision scales small and finite."""
    if kind in (Kind.F32, Kind.F16):
        return (scale * 20 * rng.standard_normal(shape)).astype("<f4" if kind is Kind.F32 else "<f2").tobytes()
    block = BLOCKS[kind]
    count = int(np.prod(shape)) // block.weights
    raw = rng.integers(0, 256, (count, block.nbytes), dtype=np.uint8)
    if kind is Kind.BF16:
        wide = (scale * 20 * rng.standard_normal(count)).astype("<f4").view("<u4") >> 16
        return wide.astype("<u2").tobytes()
    for at in HALVES[kind]:
        raw[:, at : at + 2] = (scale * rng.standard_normal((count, 1))).astype("<f2").view(np.uint8)
    return raw.tobytes()


HALVES = {Kind.Q4_0: (0,), Kind.Q5_0: (0,), Kind.Q8_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_1: (0, 2), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
"""Where each form's half-precision numbers are in a block."""


def write(
    path: Path, body: Mapping[str, Any], tensors: Mapping[str, tuple[Kind, tuple[int, ...], bytes]], *, version: int = 3, order: str = "<", alignment: int = 32
) -> Path:
    head = b"GGUF" + struct.pack(f"{order}IQQ", version, len(tensors), len(body))
    for key, value in body.items():
        head += text(key) + typed(value)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        head += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in reversed(shape)) + struct.pack("<IQ", int(kind), len(data))
        data += raw
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)
    return path


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + text(value)
        case np.ndarray():
            return struct.pack("<IIQ", 9, 5, len(value)) + value.astype("<i4").tobytes()
        case list():
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(entry) for entry in value)
    raise TypeError(type(value))


def small_llama(folder: Path, kind: Kind = Kind.Q8_0, *, tied: bool = True, **changes: Any) -> Path:
    return write(folder / "small.gguf", metadata(**changes), weights(kind, tied=tied))
