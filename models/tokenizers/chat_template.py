"""Chat templates: a conversation as the one text that its model was trained to go on from.

Guarantees: the text depends on the turns, the template and the special tokens alone. A template is a program off somebody's disk: it runs in jinja's sandbox, which
lets it read what it is given and change nothing, and whatever it raises is a ConfigError. There is no clock in it: a template that would write today's date
takes the date it has for such a case (a prompt that changes over night is another prompt), or is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from driftline.messages.errors import ConfigError
from driftline.models.tokenizer import Turn

__all__ = ["ChatTemplate"]

_FIELD = "chat_template"


class ChatTemplate:
    """`source`: the template in jinja's language, with the names and filters that transformers gives one. `special`: bos_token, eos_token, ... as text."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self.source, self.special = source, dict(special)

    def render(self, turns: Sequence[Turn], *, answer: bool = True) -> str:
        """The conversation as text, with the beginning of the next answer if `answer`. ConfigError when the template is none or refuses the turns."""
        messages = [{"role": turn.role.value, "content": turn.content} for turn in turns]
        try:
            text: str = self._compiled.render(messages=messages, tools=None, documents=None, add_generation_prompt=answer, **self.special)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:  # what a program may raise
            raise ConfigError(f"the template refuses this conversation: {error}", field=_FIELD, value=[turn.role.value for turn in turns],
                              remedy="ask it in another way (some models take no system turn), or give the model another chat_template.jinja") from error
        return text

    @cached_property
    def _compiled(self) -> Any:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _json
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(self.source)
        except TemplateError as error:
            raise ConfigError(f"not a template: {error}", field=_FIELD, value=self.source[:80], remedy="copy the model's files again from their source") from error


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks what the model is to be trained on; the text is the same."""

    tags = {"generation"}  # noqa: RUF012, jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """jinja's own escapes what is special in HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
