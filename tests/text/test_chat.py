"""Chat templates of the common families, message checks, and what the sandbox refuses."""

from __future__ import annotations

from datetime import datetime

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxinfer.errors import ConfigError, InvalidRequest
from jaxinfer.text import sandbox
from jaxinfer.text.chat import ChatTemplate

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'ipython' or message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson + "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'assistant') %}{% set role = 'model' %}
{%- else %}{% set role = message['role'] %}{% endif %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""

SYSTEM, USER = {"role": "system", "content": " Be kind. "}, {"role": "user", "content": "<b>é&😀"}
ASSISTANT = {"role": "assistant", "content": "yes"}


def test_chatml():
    text = ChatTemplate(CHATML).render([SYSTEM, USER])
    assert text == (
        "<|im_start|>system\n Be kind. <|im_end|>\n<|im_start|>user\n<b>é&😀<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ChatTemplate(CHATML).render([USER], add_generation_prompt=False).endswith("<|im_end|>\n")


def test_llama3_with_tools():
    template = ChatTemplate(LLAMA3, "<|begin|>", "<|end|>")
    tools = [{"type": "function", "function": {"name": "f", "description": "é<"}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é<"}'}}
    text = template.render(
        [
            SYSTEM,
            USER,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "4", "tool_call_id": "1"},
        ],
        tools=tools,
    )
    assert text == (
        "<|begin|><|start_header_id|>system<|end_header_id|>\n\n"
        '{\n    "type": "function",\n    "function": {\n        "name": "f",\n'
        '        "description": "é<"\n    }\n}Be kind.<|eot_id|>'
        "<|start_header_id|>user<|end_header_id|>\n\n<b>é&😀<|eot_id|>"
        '{"name": "f", "parameters": {"x": "é<"}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_mistral_and_its_own_error_message():
    template = ChatTemplate(MISTRAL, "<s>", "</s>")
    assert template.render([USER, ASSISTANT, USER]) == (
        "<s>[INST] <b>é&😀 [/INST]yes</s>[INST] <b>é&😀 [/INST]"
    )
    with pytest.raises(InvalidRequest, match="Conversation roles must alternate"):
        template.render([USER, USER])


def test_gemma_and_its_own_error_message():
    template = ChatTemplate(GEMMA, "<bos>")
    assert template.render([USER, ASSISTANT]) == (
        "<bos><start_of_turn>user\n<b>é&😀<end_of_turn>\n<start_of_turn>model\nyes<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
    with pytest.raises(InvalidRequest, match="System role not supported"):
        template.render([SYSTEM, USER])


def test_template_helpers(monkeypatch: pytest.MonkeyPatch):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2031, 12, 31, 23, 59)

    monkeypatch.setattr(sandbox, "datetime", Clock)
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}{{ messages[0].content }}{% endgeneration %}"
        "{{ strftime_now('%Y %b') }}{{ pad_token }}{{ extra }}{{ bos_token }}"
        "{{ messages | map(attribute='role') | join(',') }}{{ 'a-a'.replace('-', '+') }}"
        "{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ loop.length }}{% endfor %}"
        "{% filter upper %}x{% endfilter %}{% set y %}z{% endset %}{{ y }}{{ '%s!' | format(1) }}"
    )
    text = ChatTemplate(source, pad_token="<p>").render([USER], extra="E")
    assert text == "01<b>é&😀2031 Dec<p>Eusera+a1Xz1!"


def test_tool_use_template_serves_requests_with_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "tools {{ tools[0].function.name }}"})
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[{"function": {"name": "f"}}]) == "tools f"


def test_continue_final_message():
    template = ChatTemplate(CHATML)
    open_turn = template.render(
        [USER, ASSISTANT], add_generation_prompt=False, continue_final_message=True
    )
    assert open_turn.endswith("<|im_start|>assistant\nyes")
    with pytest.raises(InvalidRequest, match="add_generation_prompt"):
        template.render([USER], continue_final_message=True)


def test_content_parts_are_joined_and_messages_stay_as_they_were():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert ChatTemplate("{{ messages[0].content }}").render(messages) == "a\nb"
    assert messages == [{"role": "user", "content": parts}]


def test_fields_that_clients_leave_null_are_left_out():
    source = "{{ messages[0].keys() | list | sort | join(',') }}"
    message = {"role": "assistant", "content": "x", "tool_calls": [], "refusal": None, "name": "n"}
    assert ChatTemplate(source).render([message]) == "content,name,role"
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    none = ChatTemplate("{{ messages[0].content is none }}{{ messages[0].tool_calls[0].function }}")
    assert none.render([called]) == "True{'name': 'f', 'arguments': {}}"
    silent = {"role": "assistant", "content": None, "tool_calls": None, "reasoning": "hm"}
    assert ChatTemplate("{{ messages[0] }}").render([silent]) == str(
        {"role": "assistant", "reasoning": "hm", "content": ""}
    )


def test_templates_that_take_arguments_for_text():
    """DeepSeek's add them to a string, others write them as JSON."""
    source = (
        "{% set call = messages[0].tool_calls[0].function %}"
        "{{ call.name + '\n' + call.arguments + '|' }}{{ call.arguments | tojson }}{{ call.arguments.a }}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":"é"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert ChatTemplate(source).render([message]) == 'f\n{"a": "é"}|{"a": "é"}é'


PLAIN = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
SAME_AS_JINJA = [
    "{{ 'a\nb\n\n\rc\n'|indent }}|{{ 'a\nb'|indent(2, true) }}|{{ 'a\n\nb'|indent('--', blank=true) }}",
    "{{ messages|join('+', attribute='role') }}{{ messages|join(attribute='nope') }}{{ [1, none]|join }}",
    "{{ 'aaa'|replace('a', 'b', 2) }}{{ 'ab'|replace('', '-') }}{{ 'aaa'.replace('a', '', 1) }}",
    "{{ '-'.join(['a', 'b']) }}{{ 'Year 12345 %s: %5.1f%%'|format('x', 2.5) }}{{ '%(a)s' % {'a': 1} }}",
    "{{ '{:>5}{b!r}{{}} 123456'.format('x', b=[1]) }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ 'ab' * 2 }}{{ [1] + [2] }}",
    "{% for k, v in messages[0].items() %}{{ k }}{{ loop.last }}{{ loop.length }}{% else %}n{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is sequence else x }}{% endfor %}",
    "{% for x in nothing %}{% else %}none{% endfor %}{{ ('a', 'b')|last }}{{ {'a': 1}|dictsort }}",
    "{% macro m(a, b=['x']) %}{{ a }}{{ b[0] }}{{ caller() }}{% endmacro %}{% call m('q') %}!{% endcall %}",
    "{{ messages|map(attribute='content')|map('upper')|list }}{{ messages|groupby('role')|length }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ range(5)|batch(2)|list }}{{ [3, 1]|sort }}{{ 'x' ~ 1 ~ none }}{{ messages[::-1][0].role }}",
    "{% filter replace('b', 'c') %}ab{% endfilter %}{% set t | upper %}q{% endset %}{{ t }}{{ 'a' in 'ab' }}",
]


@pytest.mark.parametrize("source", SAME_AS_JINJA)
def test_accounting_does_not_change_what_a_template_means(source: str):
    messages = [USER, ASSISTANT]
    want = PLAIN.from_string(source).render(messages=messages)
    assert ChatTemplate(source).render(messages) == want


def test_no_template_says_what_to_do():
    with pytest.raises(InvalidRequest, match="raw prompt.*--chat-template"):
        ChatTemplate(None).render([USER])


@pytest.mark.parametrize(
    "messages, field",
    [
        ("hi", "messages must be a list"),
        ([], "messages has 0 entries"),
        (["hi"], r"messages\[0\] must be an object"),
        ([USER, {"content": "x"}], r"messages\[1\].role=None"),
        ([{"role": "king", "content": "x"}], r"messages\[0\].role='king'"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "tool", "content": None}], r"messages\[0\].content"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\] must be an object"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"messages\[0\].content\[0\].type='image_url'",
        ),
        (
            [{"role": "user", "content": [{"type": {}, "text": "x"}]}],
            r"messages\[0\].content\[0\].type={} is not supported",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            r"messages\[0\].content\[0\].text",
        ),
        ([{"role": "assistant", "tool_calls": 5}], r"messages\[0\].tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"messages\[0\].tool_calls\[0\].function"),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                }
            ],
            r"messages\[0\].tool_calls\[0\].function.arguments is not valid JSON",
        ),
    ],
)
def test_bad_messages_name_their_field(messages: list, field: str):
    with pytest.raises(InvalidRequest, match=field):
        ChatTemplate(CHATML).render(messages)


def test_roles_that_the_template_names_are_allowed():
    template = ChatTemplate("{% if messages[0].role == 'documents' %}D{% endif %}")
    assert template.render([{"role": "documents", "content": "x"}]) == "D"


def test_bad_tools_and_reserved_variables():
    with pytest.raises(InvalidRequest, match=r"tools\[0\].function"):
        ChatTemplate(CHATML).render([USER], tools=[{"name": "f"}])
    for name in ("bos_token", "tokenize", "chat_template"):
        with pytest.raises(InvalidRequest, match=name):
            ChatTemplate(CHATML).render([USER], **{name: "x"})  # type: ignore[reportArgumentType]


def test_template_that_does_not_compile():
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("{% if x %}\n{% endfor %}")


ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by attr": "{{ (''|attr('__class__')).__mro__ }}",
    "class by item": "{{ messages['__class__'].__base__ }}",
    "globals": "{{ raise_exception.__globals__['__builtins__'] }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "generator": "{% set g = messages|map('upper') %}{{ g.gi_frame.f_globals }}",
    "self": "{{ self._TemplateReference__context.environment.globals }}",
    "include": "{% include '/etc/passwd' %}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update({'role': 'x'}) }}",
}


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES.keys())
def test_sandbox_keeps_python_out(source: str):
    with pytest.raises(InvalidRequest, match="refused by the chat template"):
        ChatTemplate(source).render([USER])


def test_error_messages_hold_no_addresses():
    with pytest.raises(InvalidRequest, match="Cycler object>$"):
        ChatTemplate("{{ raise_exception(cycler(1)) }}").render([USER])


DOUBLING = (
    "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}BODY{% endfor %}{{ ns.s|length }}"
)
BOMBS = {
    "range": "{{ range(1000000000)|list }}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops over text": "{% for i in range(99999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for x in [1,2] recursive %}{{ loop([1,2]) }}{% endfor %}",
    "repeat": "{{ 'a' * 1000000000 }}",
    "repeat list": "{{ (['a'] * 1000000)|map('center', 1000000)|list }}",
    "repeat in list": "{{ ([['a' * 999999]] * 999999)|string }}",
    "power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "squares": DOUBLING.replace("'aaaa'", "99").replace("BODY", "{% set ns.s = ns.s * ns.s %}"),
    "plus": DOUBLING.replace("BODY", "{% set ns.s = ns.s + ns.s %}"),
    "tilde": DOUBLING.replace("BODY", "{% set ns.s = ns.s ~ ns.s %}"),
    "join": DOUBLING.replace("BODY", "{% set ns.s = [ns.s, ns.s]|join %}"),
    "join method": DOUBLING.replace("BODY", "{% set ns.s = ''.join([ns.s, ns.s]) %}"),
    "replace": DOUBLING.replace("BODY", "{% set ns.s = ns.s|replace('a', ns.s) %}"),
    "replace method": DOUBLING.replace("BODY", "{% set ns.s = ns.s.replace('a', ns.s) %}"),
    "set block": DOUBLING.replace("BODY", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"),
    "percent": DOUBLING.replace("BODY", "{% set ns.s = '%s%s' % (ns.s, ns.s) %}"),
    "format filter": DOUBLING.replace("BODY", "{% set ns.s = '%s%s'|format(ns.s, ns.s) %}"),
    "format method": DOUBLING.replace("BODY", "{% set ns.s = '{0}{0}'.format(ns.s) %}"),
    "nested lists": DOUBLING.replace("BODY", "{% set ns.s = [ns.s, ns.s] %}"),
    "nested dicts": DOUBLING.replace("BODY", "{% set ns.s = {'a': ns.s, 'b': ns.s} %}"),
    "dict call": DOUBLING.replace("BODY", "{% set ns.s = dict(a=ns.s, b=ns.s) %}"),
    "width": "{{ '%1000000000d' % 1 }}",
    "width filter": "{{ '%1000000000d'|format(1) }}",
    "width by name": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "computed width of %": "{{ '%*d' % (1000000, 1) }}",
    "big keys": DOUBLING.replace("BODY", "{% set ns.s = [{ns.s|string: 1}, {ns.s|string: 2}] %}"),
    "constant text": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "width method": "{{ '{:1000000000}'.format(1) }}",
    "computed width": "{{ '{:{}}'.format(1, '1000000000') }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "indent": "{{ 'a'|indent(1000000000, true) }}",
    "expandtabs": "{{ '\\t'.expandtabs(1000000) }}",
    "lipsum": "{{ lipsum(1000000) }}",
    "batch": "{{ [1]|batch(1000000000, 'x')|list }}",
}  # fmt: skip


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_sandbox_bounds_work_and_memory(source: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "MAX_TICKS", 30_000)  # to be quick
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 100.0)  # counts must refuse it, not the clock
    with pytest.raises((InvalidRequest, ConfigError), match="chat.template") as refused:
        ChatTemplate(source).render([USER])
    assert "seconds" not in str(refused.value)


def test_sandbox_bounds_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.05)
    with pytest.raises(InvalidRequest, match="0.05 seconds"):
        ChatTemplate(BOMBS["macro"]).render([USER])


def test_long_conversations_are_within_the_bounds():
    messages = [USER, ASSISTANT] * 2000
    assert ChatTemplate(CHATML).render(messages).count("<|im_start|>") == 4001
    assert len(ChatTemplate(LLAMA3).render([{"role": "user", "content": "x" * 2_000_000}])) > 2e6
