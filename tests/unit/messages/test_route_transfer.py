"""What recorded routes cost on the wire: two bytes an id, whole again on the other side, and smaller in the frame."""

from __future__ import annotations

import numpy as np
import pytest
from messages_samples import trajectory

from driftline.messages import Trajectory, decode, encode

LAYERS, EXPERTS, TOP_K = 92, 896, 16
TOKENS = 192


def routes(preference: float) -> np.ndarray:
    """int16 [TOKENS, 92, 16]: lists without repetition, drawn by a power law over each layer's experts; the last token has none."""
    rng = np.random.default_rng(0)
    weight = -preference * np.log(np.arange(1, EXPERTS + 1))
    out = np.empty((TOKENS, LAYERS, TOP_K), dtype="<i2")
    for layer in range(LAYERS):
        order = np.argsort(-(weight + rng.gumbel(size=(TOKENS, EXPERTS))), axis=1)[:, :TOP_K]
        out[:, layer] = rng.permutation(EXPERTS)[order]
    out[-1] = -1
    return out


@pytest.mark.parametrize("preference", [0.0, 1.2])
def test_routes_of_92_layers_travel_as_int16_compressed_and_come_back_whole(preference: float) -> None:
    table = routes(preference)
    bare = trajectory("r", length=TOKENS)
    full = bare.model_copy(update={"routes": table})
    frame = encode(full)
    cost = (len(frame) - len(encode(bare))) / TOKENS
    assert table.nbytes / TOKENS == 2944, "int32 would be 5888 a token"
    # 16 lists of 10 bits an id are 1840 bytes; the compressor gets to about 2170.
    assert 1840 < cost < 0.75 * 2944
    back = decode(frame)
    assert isinstance(back, Trajectory)
    assert back.routes is not None
    assert back.routes.dtype == np.dtype("<i2")
    assert np.array_equal(back.routes, table)


def test_a_record_that_lacks_a_token_is_no_trajectory() -> None:
    bare = trajectory("r", length=TOKENS)
    with pytest.raises(ValueError, match="routes has 191 rows"):
        Trajectory.model_validate({**{name: getattr(bare, name) for name in Trajectory.model_fields}, "routes": routes(0.0)[:-1]})
    with pytest.raises(ValueError, match="3-d array of int16"):
        Trajectory.model_validate({**{name: getattr(bare, name) for name in Trajectory.model_fields}, "routes": routes(0.0).astype(np.int32)})
