# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,attr-defined,assignment"
"""KDA decode in Gluon: a row's head at a time, its state in registers from its one read to its one write.

Decode, replay and fold inline the same `_prepare` and `_recur`, in one layout, with every multiply-add spelled out and the compiler's own contraction
off: the same token on the same state gives the same bits in all three. A row's bits depend on nothing but the row.

A warp owns 32 columns of the state, a thread 32 rows of four of them, so a sum over the key channels is a chain in a thread and two exchanges in the
warp, and between tokens no warp waits for another. What a token needs of its raw inputs (the norms, the gate, sqrt(beta)) is computed for the whole
window at once, before the first token, and lies in shared memory. With k' = sqrt(beta) k and v' = sqrt(beta) v the step needs no beta:
`S <- e^g S; u = v' - k' S; S <- S + k' u`.

Memory and arithmetic are to overlap: for a window the multiply-adds take two thirds of the time that the bytes take. So a few programs stay on each
multiprocessor and go through the heads of the rows; while one computes, its next state is on its way into shared memory.
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

    `programs`: how many stay on a multiprocessor, each with its next state in flight (64 KiB of shared memory); None: one program a state, which is
    loaded into registers. `copies`: how often the keys lie in shared memory; with two, the rank-one update reads them again instead of holding 32
    registers a thread from the dot product on. `registers`: the cap a thread; at 168 three programs fit a multiprocessor instead of two."""

    programs: int | None
    copies: int
    registers: int | None


CONFIGURATION = Configuration(programs=2, copies=1, registers=None)
"""The pinned one, for every shape. Not yet timed against CANDIDATES."""

CANDIDATES = (CONFIGURATION, Configuration(2, 2, None), Configuration(1, 1, None), Configuration(None, 2, 168), Configuration(None, 1, None))

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
def _rows(tensor, offset, step, head, t, live):
    """Raw [tokens, 128] of one row and head, zero where not live. offset, step: of the row and of a token, in heads."""
    n = gl.arange(0, _DIM, gl.SliceLayout(0, _TOKEN))
    return gl.load(tensor + offset * _DIM + ((t * step + head) * _DIM)[:, None] + n[None, :], mask=live[:, None], other=0.0)


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
def _read(state, query):
    """o [128]: the state against a query."""
    dot = state[0] * _channels(query, 0)
    for p in gl.static_range(1, _PARTS):
        dot = _multiply_add(state[p], _channels(query, p), dot)
    return gl.sum(dot, axis=0)


@gluon.jit
def _places(pool, slot, head, heads):
    row = gl.arange(0, _PART, gl.SliceLayout(1, _STATE))
    column = gl.arange(0, _DIM, gl.SliceLayout(0, _STATE))
    return pool + (slot * heads + head) * (_DIM * _DIM) + row[:, None] * _DIM + column[None, :]


@gluon.jit
def _load_state(places):
    state = (gl.load(places),)
    for p in gl.static_range(1, _PARTS):
        state = state + (gl.load(places + p * (_PART * _DIM)),)  # noqa: RUF005
    return state


@gluon.jit
def _ask(buffer, pool, slot, head, heads):
    """Begin to bring a state into shared memory; none for a padding row."""
    if slot >= 0:
        row = gl.arange(0, _DIM, gl.SliceLayout(1, _TOKEN))
        column = gl.arange(0, _DIM, gl.SliceLayout(0, _TOKEN))
        _copy(buffer, pool + (slot * heads + head) * (_DIM * _DIM) + row[:, None] * _DIM + column[None, :])
    async_copy.commit_group()


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


@gluon.jit(do_not_specialize=["items", "heads", "tokens", "qkv_row", "qkv_step", "z_row", "z_step", "beta_row", "beta_step", "capacity"])
def _replay(q, k, v, z, beta, a_log, dt_bias, pool, slots, accepted, held_k, held_v, held_z, held_beta, out, items, heads, tokens, qkv_row, qkv_step, z_row,
            z_step, beta_row, beta_step, capacity, lower, FOLD: gl.constexpr, SCORE: gl.constexpr, OLD: gl.constexpr, NEW: gl.constexpr, COPIES: gl.constexpr,
            STAGED: gl.constexpr):
    """FOLD: the accepted tokens of the window held go into the state. SCORE: the new tokens are run from there; with FOLD their raw inputs are held and
    the state that is kept is the one before them, else (plain decode) the one after them. OLD, NEW: rows of the tiles, at least what they hold. An item
    is a row's head. Rows and steps of q, k, v and z are strides in heads; no integer is specialised, so one compilation is for any shape. STAGED: the
    state of the next item is asked for while this one is worked on."""
    n = gl.arange(0, _DIM, gl.SliceLayout(0, _TOKEN))
    t_old = gl.arange(0, OLD, gl.SliceLayout(1, _TOKEN))
    t_new = gl.arange(0, NEW, gl.SliceLayout(1, _TOKEN))
    new = t_new < tokens
    first = gl.program_id(0)
    slot = gl.load(slots + first // heads).to(gl.int64)
    if STAGED:
        buffer = gl.allocate_shared_memory(gl.float32, [_DIM, _DIM], _TILE)
        _ask(buffer, pool, slot, first % heads, heads)
    for item in range(first, items, gl.num_programs(0)):
        row = item // heads
        head = item % heads
        following = item + gl.num_programs(0)
        next_slot = gl.load(slots + following // heads, mask=following < items, other=-1).to(gl.int64)
        wide = row.to(gl.int64)
        if slot >= 0:
            rate = gl.exp2(_LOG2_E * gl.load(a_log + head))
            bias = gl.load(dt_bias + head * _DIM + n)
            # All raw inputs are asked for before the state: they are few, and what comes first works on them.
            if FOLD:
                count = gl.minimum(gl.maximum(gl.load(accepted + row), 0), capacity)
                old = t_old < count
                held = slot * capacity * heads
                old_k = _rows(held_k, held, heads, head, t_old, old)
                old_z = _rows(held_z, held, heads, head, t_old, old)
                old_v = _rows(held_v, held, heads, head, t_old, old)
                old_beta = gl.load(held_beta + held + t_old * heads + head, mask=old, other=0.0)
            if SCORE:
                new_k = _rows(k, wide * qkv_row, qkv_step, head, t_new, new)
                new_z = _rows(z, wide * z_row, z_step, head, t_new, new)
                new_v = _rows(v, wide * qkv_row, qkv_step, head, t_new, new)
                new_q = _rows(q, wide * qkv_row, qkv_step, head, t_new, new)
                new_beta = gl.load(beta + wide * beta_row + t_new * beta_step + head, mask=new, other=0.0)
            places = _places(pool, slot, head, heads)
            if STAGED:
                # Without a barrier here the compiler would ask for the raw inputs when the state is there, instead of before.
                _wait()
                # The state has come, and no warp reads the tiles of the item before any more.
                async_copy.wait_group(0)
                _wait()
                state = _take(buffer)
                # Every warp has its state: the next one may come.
                _wait()
                _ask(buffer, pool, next_slot, following % heads, heads)
            else:
                state = _load_state(places)
            if FOLD:
                old_decays, old_keys, old_again, old_values = _prepare(old_k, old_z, old_v, old_beta, rate, bias, lower, OLD, COPIES)
            if SCORE:
                decays, keys, again, values = _prepare(new_k, new_z, new_v, new_beta, rate, bias, lower, NEW, COPIES)
                queries = _prepare_queries(new_q, NEW)
            # The tiles are there for every warp, and every warp has read the old window before one writes the new.
            _wait()
            if FOLD:
                if SCORE:
                    _put_rows(held_k, held, heads, head, t_new, new, new_k)
                    _put_rows(held_z, held, heads, head, t_new, new, new_z)
                    _put_rows(held_v, held, heads, head, t_new, new, new_v)
                    gl.store(held_beta + held + t_new * heads + head, new_beta, mask=new)
                for i in range(count):
                    state = _recur(state, old_decays.index(i), old_keys.index(i), old_again.index(i), old_values.index(i))
                _store_state(places, state)
            if SCORE:
                column = gl.arange(0, _DIM, gl.SliceLayout(0, _STATE))
                for i in range(tokens):
                    state = _recur(state, decays.index(i), keys.index(i), again.index(i), values.index(i))
                    o = _read(state, queries.index(i))
                    gl.store(out + ((wide * tokens + i) * heads + head) * _DIM + column, o.to(out.dtype.element_ty))
                if not FOLD:
                    _store_state(places, state)
        else:
            if STAGED:
                _ask(buffer, pool, next_slot, following % heads, heads)
            if SCORE:
                zero = gl.zeros([NEW, _DIM], gl.float32, _TOKEN).to(out.dtype.element_ty)
                _put_rows(out, wide * tokens * heads, heads, head, t_new, new, zero)
        slot = next_slot


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
    items, programs, whole = rows * heads, configuration.programs, int(_DIM.value)
    grid = items if programs is None else min(items, programs * _multiprocessors(pool.device))
    if items:
        _replay[(grid,)](
            q, k, v, z, beta, a_log, dt_bias, pool, slots, accepted, window.k, window.v, window.z, window.beta, out, items, heads, tokens,
            k.stride(0) // whole, k.stride(1) // whole, z.stride(0) // whole, z.stride(1) // whole, beta.stride(0), beta.stride(1), window.capacity,
            float(lower_bound), FOLD=folds, SCORE=scores, OLD=_tile(window.capacity), NEW=_tile(tokens), COPIES=configuration.copies,
            STAGED=programs is not None, num_warps=4, maxnreg=configuration.registers, enable_fp_fusion=False,
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
