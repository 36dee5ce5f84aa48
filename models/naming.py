"""Where a checkpoint keeps the text model: every one of our names has exactly one stored name, and what is stored elsewhere is another model's.

Our names are those of the release's text model (`model.layers.N...`, `lm_head.weight`). A multimodal file has them below a prefix, beside a vision tower and a
projector, which are then not the text model's and left unread.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from driftline.messages.errors import IntegrityError

__all__ = ["Naming"]

_EMBEDDING = "embed_tokens.weight"
_BODY, _HEAD = "model.", "lm_head."
_KNOWN = (_BODY, f"language_model.{_BODY}", f"{_BODY}language_model.")


@dataclass(frozen=True)
class Naming:
    """What stands in the files for `model.` and for `lm_head.`."""

    body: str = _BODY
    head: str = _HEAD

    @classmethod
    def of(cls, stored: Collection[str]) -> Naming:
        """Read off the place of the embedding. Raises IntegrityError when there is none, or several and none of them at a known place."""
        bodies = [name.removesuffix(_EMBEDDING) for name in stored if name.endswith(f".{_EMBEDDING}")]
        known = [body for body in _KNOWN if body in bodies]
        if not known and len(bodies) != 1:
            raise IntegrityError("no tensor is the text model's embedding" if not bodies else "several tensors could be the text model's embedding",
                                 field=f"*.{_EMBEDDING}", value=sorted(bodies)[:3], remedy=f"expected {_BODY}{_EMBEDDING}, or the same below a prefix")
        body = (known or bodies)[0]
        beside = body[: body[:-1].rfind(".") + 1] + _HEAD  # `language_model.model.` has its head at `language_model.lm_head.`
        return cls(body, beside if f"{beside}weight" in stored or f"{_HEAD}weight" not in stored else _HEAD)

    @property
    def prefixed(self) -> bool:
        return self.body != _BODY

    def stored(self, name: str) -> str:
        """The stored name of one of ours."""
        for ours, theirs in ((_BODY, self.body), (_HEAD, self.head)):
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    def owns(self, stored: str) -> bool:
        """Whether a stored tensor is part of the text model; without a prefix everything is."""
        return not self.prefixed or stored.startswith((self.body, self.head))
