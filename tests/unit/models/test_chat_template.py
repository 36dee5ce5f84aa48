"""Chat templates as their models publish them: the same text as transformers, no clock, and nothing that reaches out of the sandbox."""

from __future__ import annotations

from datetime import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from driftline.messages.errors import ConfigError
from driftline.models.tokenizer import Role, Turn
from driftline.models.tokenizers.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + (system + '\n\n' if loop.first and system else '') + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
BLOCKS = """{{- bos_token }}
{%- if tools is not none and tools %}
    {{- tools | tojson(indent=2) }}
{%- endif %}
{% for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if loop.last and message.role == 'assistant' %}
        {%- break %}
    {%- endif %}
{{ message | tojson }}
    {% generation %}{{ message.content.split()|join(' ') }}{% endgeneration %}

{% endfor %}
{%- if add_generation_prompt %}
answer:
{%- endif %}"""
NAMESPACE = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}{{ m.role[0]|upper }}{{ ns.n }};{% endfor %}{{ messages|map(attribute='role')|list }}"

CHATS = [
    [Turn(Role.USER, "hello  there")],
    [Turn(Role.SYSTEM, "Be <b>brief</b> & \"kind\"."), Turn(Role.USER, " 1 < 2?\n\n")],
    [Turn(Role.USER, "a"), Turn(Role.ASSISTANT, " b "), Turn(Role.USER, "é漢🙂 {{ not.a.template }}")],
]


def theirs(source: str, chat: list[Turn], answer: bool) -> str:
    rendered, _ = render_jinja_template(
        conversations=[[{"role": t.role.value, "content": t.content} for t in chat]], chat_template=source, add_generation_prompt=answer, **SPECIAL)
    return str(rendered[0])


@pytest.mark.parametrize("source", [CHATML, LLAMA2, BLOCKS, NAMESPACE])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("answer", [True, False])
def test_the_text_is_that_of_transformers(source: str, chat: list[Turn], answer: bool) -> None:
    assert ChatTemplate(source, SPECIAL).render(chat, answer=answer) == theirs(source, chat, answer)


def test_a_template_with_a_date_takes_the_one_it_has_without_a_clock() -> None:
    """Llama 3.2's prompt changes at midnight elsewhere: here a prompt of today is tomorrow's too."""
    source = "{%- if strftime_now is defined %}{%- set today = strftime_now('%d %b %Y') %}{%- else %}{%- set today = '26 Jul 2024' %}{%- endif %}{{ today }}: {{ messages[0].content }}"
    assert ChatTemplate(source, {}).render(CHATS[0]) == "26 Jul 2024: hello  there"
    assert theirs(source, CHATS[0], True) == f"{datetime.now().strftime('%d %b %Y')}: hello  there"
    with pytest.raises(ConfigError, match="strftime_now"):
        ChatTemplate("{{ strftime_now('%d') }}", {}).render(CHATS[0])


@pytest.mark.parametrize(("source", "chat", "match"), [
    (LLAMA2, [Turn(Role.ASSISTANT, "first")], "roles must alternate"),
    ("{% for m in messages %}", CHATS[0], "not a template"),
    ("{{ messages[7].content }}", CHATS[0], "refuses this conversation"),
    ("{{ messages[0].content + 3 }}", CHATS[0], "refuses this conversation"),
    ("{{ 1 / 0 }}", CHATS[0], "refuses this conversation"),
    ("{{ messages.append(1) }}", CHATS[0], "unsafe"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", CHATS[0], "refuses this conversation"),
    ("{% for i in range(999999999) %}x{% endfor %}", CHATS[0], "refuses this conversation"),
    ("{% include '/etc/passwd' %}", CHATS[0], "refuses this conversation"),
])
def test_what_a_template_must_not_or_cannot_do_is_our_own_error(source: str, chat: list[Turn], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ChatTemplate(source, SPECIAL).render(chat)
