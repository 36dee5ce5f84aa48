# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,attr-defined,assignment"
"""KDA decode in Gluon: a row's head at a time, its state in registers from its one read to its one write.

Decode, replay and fold inline the same `_prepare` and `_recur`, in one layout, with every multiply-add spelled out and the compiler's own contraction
off: the same token on the same state gives the same bits in all three. A row's bits depend on nothing but the row.

A warp owns 32 columns of the state, a thread 32 rows of four of them, so a sum over the key channels is a chain in a thread and two exchanges in the
warp, and between tokens no warp waits for another. What a token needs of its raw inputs (the norms, the gate, sqrt(beta)) is computed for the whole
window at once, before the first token, and lies in shared memory. With k' = sqrt(beta) k and v' = sqrt(beta) v the step needs no beta:
`S <- e^g S; u = v' - k' S; S <- S + k' u`.

Memory and arithmetic are to overlap: for a window the multiply-adds take two thirds of the time that the bytes take. So a few programs stay on each
multiprocessor and go through the heads of the rows; while one computes, its next state and raw inputs are on their way into shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from driftline.kernels.kda_decode.window import Window

__all__ = ["CANDIDATES", "CONFIGURATION", "Configuration", "fold", "kda_decode", "replay_decode", "takes"]


@dataclass(frozen=True)
class Configuration:
    """How programs are built; no choice changes a bit of a result.

    `programs`: how many stay on a multiprocessor, each with its next item in flight (64 KiB of shared memory for the state). `copies`: how often the keys
    lie in shared memory; with two, the rank-one update reads them again instead of holding 32 registers a thread from the dot product on. `share`: the part
    of the items that is dealt out to the programs that stay; the rest are programs of one item, which go where one that stays is through early."""

    programs: int
    copies: int
    share: float


CONFIGURATION = Configuration(programs=2, copies=1, share=0.85)
CANDIDATES = (CONFIGURATION, Configuration(2, 2, 0.85), Configuration(2, 2, 1.0))
"""What runs, for every shape, and what the benchmark's sweep times beside it."""

_wait = getattr(gl, "barrier", None) or gl.thread_barrier
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

_DIM = gl.constexpr(128)
_PARTS = gl.constexpr(8)
_PART = gl.constexpr(16)
"""The state is held as eight tiles of 16 key channels, so that a dot product is eight multiply-adds of whole tiles and a short sum."""

_STATE = gl.constexpr(gl.BlockedLayout([4, 4], [4, 8], [1, 4], [1, 0]))
_TOKEN = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
_TILE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_LOG2_E = gl.constexpr(1.4426950408889634)
_SCALE = gl.constexpr(128**-0.5)
_EPS = gl.constexpr(1e-6)


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp2(-_LOG2_E * x))


@gluon.jit
def _reciprocal_norm(x):
    return gl.rsqrt(gl.sum(x * x, axis=1) + _EPS)


@gluon.jit
def _ask_rows(buffer, tensor, offset, step, head, t, live):
    """Begin to bring the raw [tokens, 128] of one row and head, those that are live. offset, step: of the row and of a token, in heads."""
    n = gl.arange(0, _DIM, gl.SliceLayout(0, _TOKEN))
    _copy(buffer, tensor + offset * _DIM + ((t * step + head) * _DIM)[:, None] + n[None, :], mask=live[:, None])


@gluon.jit
def _put_rows(tensor, offset, step, head, t, live, value):
    n = gl.arange(0, _DIM, gl.SliceLayout(0, _TOKEN))
    gl.store(tensor + offset * _DIM + ((t * step + head) * _DIM)[:, None] + n[None, :], value, mask=live[:, None])


@gluon.jit
def _shared(x, ROWS: gl.constexpr):
    """A [ROWS, 128] tile in shared memory, to be read a row at a time after the next barrier."""
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, _DIM], _TILE)
    tile.store(x)
    return _reinterpret(tile, gl.float32, [ROWS, _DIM], _VECTOR)


@gluon.jit
def _prepare(k, z, v, beta, rate, bias, lower, ROWS: gl.constexpr, COPIES: gl.constexpr):
    """Of raw inputs [ROWS, 128] and [ROWS]: e^g, the keys for the dot product and for the update, the values; in shared memory."""
    root = gl.sqrt(_sigmoid(beta.to(gl.float32)))
    wide = k.to(gl.float32)
    key = wide * (_reciprocal_norm(wide) * root)[:, None]
    decay = _shared(gl.exp2(_LOG2_E * lower * _sigmoid(rate * (z.to(gl.float32) + bias[None, :]))), ROWS)
    keys = _shared(key, ROWS)
    again = keys
    if COPIES == 2:
        again = _shared(key, ROWS)
    return decay, keys, again, _shared(v.to(gl.float32) * root[:, None], ROWS)


@gluon.jit
def _prepare_queries(q, ROWS: gl.constexpr):
    wide = q.to(gl.float32)
    return _shared(wide * (_reciprocal_norm(wide) * _SCALE)[:, None], ROWS)


@gluon.jit
def _channels(vector, part: gl.constexpr):
    return vector.slice(part * _PART, _PART).load(gl.SliceLayout(1, _STATE))[:, None]


@gluon.jit
def _multiply_add(a, b, c):
    a, b = gl.broadcast(a, b)
    return gl.fma(a, b, c)


@gluon.jit
def _recur(state, decay, key, again, value):
    """One token: the state, eight [16, 128] tiles, after it."""
    tile = state[0] * _channels(decay, 0)
    decayed = (tile,)
    dot = tile * _channels(key, 0)
    for p in gl.static_range(1, _PARTS):
        tile = state[p] * _channels(decay, p)
        decayed = decayed + (tile,)  # noqa: RUF005
        dot = _multiply_add(tile, _channels(key, p), dot)
    u = value.load(gl.SliceLayout(0, _STATE)) - gl.sum(dot, axis=0)
    after = (_multiply_add(_channels(again, 0), u[None, :], decayed[0]),)
    for p in gl.static_range(1, _PARTS):
        after = after + (_multiply_add(_channels(again, p), u[None, :], decayed[p]),)  # noqa: RUF005
    return after


@gluon.jit
def _recur_read(state, decay, key, again, value, query):
    """`_recur`, and o [128]: the state after the token against a query. One pass for both, which spares the compiler copies of the state."""
    tile = state[0] * _channels(decay, 0)
    decayed = (tile,)
    dot = tile * _channels(key, 0)
    for p in gl.static_range(1, _PARTS):
        tile = state[p] * _channels(decay, p)
        decayed = decayed + (tile,)  # noqa: RUF005
        dot = _multiply_add(tile, _channels(key, p), dot)
    u = value.load(gl.SliceLayout(0, _STATE)) - gl.sum(dot, axis=0)
    tile = _multiply_add(_channels(again, 0), u[None, :], decayed[0])
    after = (tile,)
    out = tile * _channels(query, 0)
    for p in gl.static_range(1, _PARTS):
        tile = _multiply_add(_channels(again, p), u[None, :], decayed[p])
        after = after + (tile,)  # noqa: RUF005
        out = _multiply_add(tile, _channels(query, p), out)
    return after, gl.sum(out, axis=0)


@gluon.jit
def _places(pool, slot, head, heads):
    row = gl.arange(0, _PART, gl.SliceLayout(1, _STATE))
    column = gl.arange(0, _DIM, gl.SliceLayout(0, _STATE))
    return pool + (slot * heads + head) * (_DIM * _DIM) + row[:, None] * _DIM + column[None, :]


@gluon.jit
def _whose(slots, accepted, row, live, FOLD: gl.constexpr):
    """The slot of a row and how much of its window was accepted, as they lie there; -1 behind the last row. Nothing is done with them before the next
    turn, so that this one need not wait for them."""
    slot = gl.load(slots + row, mask=live, other=-1)
    count = slot
    if FOLD:
        count = gl.load(accepted + row, mask=live, other=0)
    return slot, count


@gluon.jit
def _few(a_log, dt_bias, held_beta, beta, slot, count, row, head, heads, tokens, beta_row, beta_step, capacity, FOLD: gl.constexpr, SCORE: gl.constexpr,
         OLD: gl.constexpr, NEW: gl.constexpr):
    """What an item needs besides its state and rows: too few bytes to be copied into shared memory."""
    n = gl.arange(0, _DIM, gl.SliceLayout(0, _TOKEN))
    t_old = gl.arange(0, OLD, gl.SliceLayout(1, _TOKEN))
    t_new = gl.arange(0, NEW, gl.SliceLayout(1, _TOKEN))
    rate = gl.load(a_log + head)
    bias = gl.load(dt_bias + head * _DIM + n)
    old = t_old < (count if FOLD else 0)
    old_beta = gl.load(held_beta + slot * capacity * heads + t_old * heads + head, mask=old & (slot >= 0), other=0.0)
    new = t_new < (tokens if SCORE else 0)
    new_beta = gl.load(beta + row.to(gl.int64) * beta_row + t_new * beta_step + head, mask=new & (slot >= 0), other=0.0)
    return rate, bias, old_beta, new_beta


@gluon.jit
def _take(buffer):
    state = (buffer.slice(0, _PART).load(_STATE),)
    for p in gl.static_range(1, _PARTS):
        state = state + (buffer.slice(p * _PART, _PART).load(_STATE),)  # noqa: RUF005
    return state


@gluon.jit
def _store_state(places, state):
    for p in gl.static_range(_PARTS):
        gl.store(places + p * (_PART * _DIM), state[p])


@gluon.jit
def _ask(buffer, raw_old, raw_new, held, fresh, pool, slot, count, row, head, heads, tokens, qkv_row, qkv_step, z_row, z_step, capacity, FOLD: gl.constexpr,
         SCORE: gl.constexpr, OLD: gl.constexpr, NEW: gl.constexpr):
    """Begin to bring an item into shared memory: its raw inputs and its state; nothing for a padding row. raw_old, held: k, z, v; raw_new, fresh: q too."""
    if slot >= 0:
        if FOLD:
            t_old = gl.arange(0, OLD, gl.SliceLayout(1, _TOKEN))
            for i in gl.static_range(3):
                _ask_rows(raw_old[i], held[i], slot * capacity * heads, heads, head, t_old, t_old < count)
        if SCORE:
            t_new = gl.arange(0, NEW, gl.SliceLayout(1, _TOKEN))
            wide = row.to(gl.int64)
            _ask_rows(raw_new[0], fresh[0], wide * qkv_row, qkv_step, head, t_new, t_new < tokens)
            _ask_rows(raw_new[1], fresh[1], wide * z_row, z_step, head, t_new, t_new < tokens)
            _ask_rows(raw_new[2], fresh[2], wide * qkv_row, qkv_step, head, t_new, t_new < tokens)
            _ask_rows(raw_new[3], fresh[3], wide * qkv_row, qkv_step, head, t_new, t_new < tokens)
        rows = gl.arange(0, _DIM, gl.SliceLayout(1, _TOKEN))
        columns = gl.arange(0, _DIM, gl.SliceLayout(0, _TOKEN))
        _copy(buffer, pool + (slot * heads + head) * (_DIM * _DIM) + rows[:, None] * _DIM + columns[None, :])
    async_copy.commit_group()


@gluon.jit
def _room(tensor, ROWS: gl.constexpr):
    return gl.allocate_shared_memory(tensor.dtype.element_ty, [ROWS, _DIM], _TILE)


@gluon.jit(do_not_specialize=["longs", "rounds", "heads", "tokens", "qkv_row", "qkv_step", "z_row", "z_step", "beta_row", "beta_step", "capacity"])
def _replay(q, k, v, z, beta, a_log, dt_bias, pool, slots, accepted, held_k, held_v, held_z, held_beta, out, longs, rounds, heads, tokens, qkv_row, qkv_step, z_row,
            z_step, beta_row, beta_step, capacity, lower, FOLD: gl.constexpr, SCORE: gl.constexpr, OLD: gl.constexpr, NEW: gl.constexpr, COPIES: gl.constexpr):
    """FOLD: the accepted tokens of the window held go into the state. SCORE: the new tokens are run from there; with FOLD their raw inputs are held and
    the state that is kept is the one before them, else (plain decode) the one after them. OLD, NEW: rows of the tiles, at least what they hold. An item
    is a row's head. Rows and steps of q, k, v and z are strides in heads; no integer is specialised, so one compilation is for any shape. All that an
    item needs is asked for while the one before it is worked on, and whose it is one earlier."""
    t_new = gl.arange(0, NEW, gl.SliceLayout(1, _TOKEN))
    new = t_new < tokens
    first = gl.program_id(0)
    stride = longs
    end = longs * rounds
    if first >= longs:
        first = end + first - longs
        end = first + 1
    buffer = gl.allocate_shared_memory(gl.float32, [_DIM, _DIM], _TILE)
    held = (held_k, held_z, held_v)
    fresh = (k, z, v, q)
    raw_old = (buffer,)
    raw_new = (buffer,)
    if FOLD:
        raw_old = (_room(held_k, OLD), _room(held_z, OLD), _room(held_v, OLD))
    if SCORE:
        raw_new = (_room(k, NEW), _room(z, NEW), _room(v, NEW), _room(q, NEW))
    slot, count = _whose(slots, accepted, first // heads, first < end, FOLD)
    raw_slot, raw_count = _whose(slots, accepted, (first + stride) // heads, first + stride < end, FOLD)
    slot, count = slot.to(gl.int64), gl.minimum(gl.maximum(count, 0), capacity)
    rate, bias, old_beta, new_beta = _few(a_log, dt_bias, held_beta, beta, slot, count, first // heads, first % heads, heads, tokens, beta_row, beta_step,
                                          capacity, FOLD, SCORE, OLD, NEW)
    _ask(buffer, raw_old, raw_new, held, fresh, pool, slot, count, first // heads, first % heads, heads, tokens, qkv_row, qkv_step, z_row, z_step, capacity,
         FOLD, SCORE, OLD, NEW)
    for item in range(first, end, stride):
        row = item // heads
        head = item % heads
        wide = row.to(gl.int64)
        next_row = (item + stride) // heads
        next_head = (item + stride) % heads
        next_slot, next_count = raw_slot.to(gl.int64), gl.minimum(gl.maximum(raw_count, 0), capacity)
        raw_slot, raw_count = _whose(slots, accepted, (item + 2 * stride) // heads, item + 2 * stride < end, FOLD)
        next_rate, next_bias, next_old_beta, next_new_beta = _few(a_log, dt_bias, held_beta, beta, next_slot, next_count, next_row, next_head, heads, tokens,
                                                                  beta_row, beta_step, capacity, FOLD, SCORE, OLD, NEW)
        # The item has come, and no warp reads the tiles of the one before any more.
        async_copy.wait_group(0)
        _wait()
        if slot >= 0:
            places = _places(pool, slot, head, heads)
            if FOLD:
                old_k, old_z, old_v = raw_old[0].load(_TOKEN), raw_old[1].load(_TOKEN), raw_old[2].load(_TOKEN)
            if SCORE:
                new_k, new_z, new_v, new_q = raw_new[0].load(_TOKEN), raw_new[1].load(_TOKEN), raw_new[2].load(_TOKEN), raw_new[3].load(_TOKEN)
            state = _take(buffer)
            # Every warp has its part of the item: the next one may come.
            _wait()
            _ask(buffer, raw_old, raw_new, held, fresh, pool, next_slot, next_count, next_row, next_head, heads, tokens, qkv_row, qkv_step, z_row, z_step,
                 capacity, FOLD, SCORE, OLD, NEW)
            if FOLD and SCORE:
                window = slot * capacity * heads
                _put_rows(held_k, window, heads, head, t_new, new, new_k)
                _put_rows(held_z, window, heads, head, t_new, new, new_z)
                _put_rows(held_v, window, heads, head, t_new, new, new_v)
                gl.store(held_beta + window + t_new * heads + head, new_beta, mask=new)
            speed = gl.exp2(_LOG2_E * rate)
            if FOLD:
                old_decays, old_keys, old_again, old_values = _prepare(old_k, old_z, old_v, old_beta, speed, bias, lower, OLD, COPIES)
            if SCORE:
                decays, keys, again, values = _prepare(new_k, new_z, new_v, new_beta, speed, bias, lower, NEW, COPIES)
                queries = _prepare_queries(new_q, NEW)
            # The tiles are there for every warp.
            _wait()
            if FOLD:
                for i in range(count):
                    state = _recur(state, old_decays.index(i), old_keys.index(i), old_again.index(i), old_values.index(i))
                _store_state(places, state)
            if SCORE:
                column = out + (wide * tokens * heads + head) * _DIM + gl.arange(0, _DIM, gl.SliceLayout(0, _STATE))
                for i in range(tokens):
                    state, o = _recur_read(state, decays.index(i), keys.index(i), again.index(i), values.index(i), queries.index(i))
                    gl.store(column + i * heads * _DIM, o.to(out.dtype.element_ty))
                if not FOLD:
                    _store_state(places, state)
        else:
            _ask(buffer, raw_old, raw_new, held, fresh, pool, next_slot, next_count, next_row, next_head, heads, tokens, qkv_row, qkv_step, z_row, z_step,
                 capacity, FOLD, SCORE, OLD, NEW)
            if SCORE:
                zero = gl.zeros([NEW, _DIM], gl.float32, _TOKEN).to(out.dtype.element_ty)
                _put_rows(out, wide * tokens * heads, heads, head, t_new, new, zero)
        slot, count, rate, bias, old_beta, new_beta = next_slot, next_count, next_rate, next_bias, next_old_beta, next_new_beta


def takes(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether these kernels are for such heads: 128 key and value channels."""
    return bool(q.shape[-1] == v.shape[-1] == _DIM.value)


@cache
def _multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; of a Hopper GPU where there is none, as when it is only compiled for."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _tile(tokens: int) -> int:
    return max(4, 1 << (tokens - 1).bit_length())


def _dense(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[B, T, H, 128] views of one stride that is of whole heads; what is not is copied."""
    row, step, head, one = tensors[0].stride()
    whole = one == 1 and head == tensors[0].shape[3] and row % head == 0 and step % head == 0
    return tensors if whole and all(t.stride() == tensors[0].stride() for t in tensors) else tuple(t.contiguous() for t in tensors)


def _launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, pool: torch.Tensor,
    slots: torch.Tensor, window: Window, accepted: torch.Tensor, out: torch.Tensor, lower_bound: float, configuration: Configuration, *, folds: bool,
    scores: bool,
) -> None:
    rows, tokens, heads = out.shape[:3]
    q, k, v = _dense(q, k, v)
    (z,) = _dense(z)
    beta = beta if beta.stride(-1) == 1 else beta.contiguous()
    items, whole = rows * heads, int(_DIM.value)
    longs = min(items, configuration.programs * _multiprocessors(pool.device))
    if items:
        rounds = max(1, int(configuration.share * items) // longs)
        _replay[(items - longs * (rounds - 1),)](
            q, k, v, z, beta, a_log, dt_bias, pool, slots, accepted, window.k, window.v, window.z, window.beta, out, longs, rounds, heads, tokens,
            k.stride(0) // whole, k.stride(1) // whole, z.stride(0) // whole, z.stride(1) // whole, beta.stride(0), beta.stride(1), window.capacity,
            float(lower_bound), FOLD=folds, SCORE=scores, OLD=_tile(window.capacity), NEW=_tile(tokens), COPIES=configuration.copies,
             num_warps=4, enable_fp_fusion=False,
        )


def kda_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, pool: torch.Tensor,
    slots: torch.Tensor, lower_bound: float, configuration: Configuration = CONFIGURATION,
) -> torch.Tensor:
    """As `reference.kda_decode`, for heads that `takes`."""
    q, k, v, z, beta = (t[:, None] for t in (q, k, v, z, beta))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    nothing = Window(k, v, z, beta)
    _launch(q, k, v, z, beta, a_log, dt_bias, pool, slots, nothing, slots, out, lower_bound, configuration, folds=False, scores=True)
    return out[:, 0]


def replay_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, pool: torch.Tensor,
    slots: torch.Tensor, window: Window, accepted: torch.Tensor, lower_bound: float, configuration: Configuration = CONFIGURATION,
) -> torch.Tensor:
    """As `reference.replay_decode`, for heads that `takes`."""
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    _launch(q, k, v, z, beta, a_log, dt_bias, pool, slots, window, accepted, out, lower_bound, configuration, folds=True, scores=True)
    return out


def fold(
    a_log: torch.Tensor, dt_bias: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, window: Window, accepted: torch.Tensor, lower_bound: float,
    configuration: Configuration = CONFIGURATION,
) -> None:
    """As `reference.fold`, for heads that `takes`."""
    held = (window.k, window.k, window.v, window.z, window.beta)
    shape = window.v[:1].expand(slots.shape[0], -1, -1, -1)
    _launch(*held, a_log, dt_bias, pool, slots, window, accepted, shape, lower_bound, configuration, folds=True, scores=False)
