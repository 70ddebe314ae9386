"""Chat templates: realistic ones against the text they must give, and what a hostile or broken one may do."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from openengine.core.chat import render_chat_template
from openengine.core.tokenizer import load_tokenizer
from openengine.errors import InvalidArgument, UnsupportedFeature

USER = [{"role": "user", "content": "Hi <b>é</b>"}]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
TOOLS = [{"type": "function", "function": {"name": "sum", "description": "a < b & ü", "parameters": {"z": 1, "a": 2}}}]

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Tools:\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{{- system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {{- "<call>" + message.tool_calls[0].function | tojson + "</call>" }}
        {%- continue %}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == "assistant" else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {{ '<image>' if item['type'] == 'image' else item['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' -}}
    {% elif message['role'] == 'assistant' %}
        {% generation %}
{{ message['content'] + eos_token -}}
        {% endgeneration %}
    {% else %}
{{ raise_exception('Only user and assistant roles are supported!') }}
    {% endif %}
{% endfor %}"""


def render(template, messages=USER, **kwargs):
    return render_chat_template(template, messages, bos_token="<s>", eos_token="</s>", **kwargs)


def directory_with(tmp_path, template=None, *, post_bos=False, jinja_file=None):
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "tokenizer_class": "LlamaTokenizer"}
    config["add_bos_token"] = post_bos
    if template is not None:
        config["chat_template"] = template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja_file is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja_file)
    return load_tokenizer(tmp_path)


# ---- rendering


def test_chatml_conversation():
    assert render(CHATML, TURNS) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_generation_prompt_is_left_out_on_request():
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi <b>é</b><|im_end|>\n"


def test_llama_style_template_with_tools_keeps_key_order_and_characters():
    text = render(LLAMA, TURNS[:2], tools=TOOLS)
    assert text.startswith('<s><|start_header_id|>system<|end_header_id|>\n\nTools:\n{\n  "type": "function"')
    assert '"description": "a < b & ü"' in text and text.index('"z"') < text.index('"a"')
    assert "Be brief.<|eot_id|>" in text


def test_message_with_tool_calls_and_no_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "sum", "arguments": {"a": 1}}}]}
    text = render(LLAMA, [*TURNS[:2], call, {"role": "tool", "content": "3"}])
    assert '<call>{"name": "sum", "arguments": {"a": 1}}</call><|start_header_id|>tool' in text


def test_gemma_style_template_with_parts():
    parts = [{"type": "image"}, {"type": "text", "text": " what? "}]
    assert render(GEMMA, [{"role": "user", "content": parts}]) == (
        "<s><start_of_turn>user\n<image>what?<end_of_turn>\n<start_of_turn>model\n"
    )


def test_mistral_style_template_with_generation_tag_and_block_trimming():
    assert render(MISTRAL, TURNS[1:]) == "<s>[INST] Hi [/INST]Hello.</s>[INST] Bye [/INST]"


def test_template_arguments_reach_the_template():
    assert render("{{ 'think' if enable_thinking else 'no' }}", enable_thinking=True) == "think"
    assert render("{{ 'think' if enable_thinking is defined else 'no' }}") == "no"


def test_current_date_is_available():
    assert render("{{ strftime_now('%Y') }}").isdecimal()


def test_special_tokens_are_variables_of_the_template():
    template = "{{ bos_token }}{{ pad_token }}{{ eos_token }}"
    assert render(template, special_tokens={"bos_token": "old", "pad_token": "<pad>"}) == "<s><pad></s>"


def test_numpy_arrays_of_messages_and_parts_are_accepted():
    messages = np.empty(1, dtype=object)
    messages[0] = {"role": "user", "content": np.array([{"type": "text", "text": "hi"}], dtype=object)}
    assert "user\nhi<end_of_turn>" in render(GEMMA, messages)


def test_messages_are_left_as_they_were():
    messages = [{"role": "user", "content": "x"}]
    render("{% set m = messages[0] %}{{ m.content }}", messages)
    assert messages == [{"role": "user", "content": "x"}]


# ---- refusals


def test_exception_of_the_template_reaches_the_caller():
    with pytest.raises(InvalidArgument, match="Conversation roles must alternate"):
        render(GEMMA, [{"role": "assistant", "content": "x"}])


def test_syntax_error_names_the_line():
    with pytest.raises(InvalidArgument, match="line 2"):
        render("ok\n{% if %}")


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "empty"),
        ("hello", "expected .*role"),
        ({"role": "user", "content": "x"}, "expected .*role"),
        (None, "expected .*role"),
        (["hello"], r"messages\[0\]"),
        ([{"content": "x"}], "role"),
        ([{"role": 3, "content": "x"}], "role"),
        ([{"role": "user"}], "neither content nor tool_calls"),
        ([{"role": "user", "content": 5}], "content of type int"),
        ([*USER, {"role": "user", "content": ["x"]}], r"messages\[1\]\.content\[0\]"),
    ],
)
def test_malformed_messages_are_refused_naming_the_place(messages, complaint):
    with pytest.raises(InvalidArgument, match=complaint):
        render(CHATML, messages)


def test_tools_that_are_no_mappings_are_refused():
    with pytest.raises(InvalidArgument, match=r"tools\[0\]"):
        render(LLAMA, tools=[print])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ undefined_name.field }}",
        "{{ 1 / 0 }}",
    ],
)
def test_sandbox_stops_what_a_template_must_not_do(template):
    with pytest.raises(InvalidArgument):
        render(template)


# ---- a tokenizer's own template


def test_template_file_wins_over_the_config(tmp_path):
    tokenizer = directory_with(tmp_path, "from config", jinja_file="from file")
    assert tokenizer.chat_template == "from file" == tokenizer.apply_chat_template(USER)


def test_named_templates_are_chosen_by_tools_and_by_name(tmp_path):
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | default([], true) | length }}"},
    ]
    tokenizer = directory_with(tmp_path, named)
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "{{ tools | default([], true) | length }}"}
    assert tokenizer.apply_chat_template(USER) == "plain"
    assert tokenizer.apply_chat_template(USER, tools=TOOLS) == str(len(TOOLS))
    assert tokenizer.apply_chat_template(USER, chat_template="tool_use") == "0"
    with pytest.raises(InvalidArgument, match="does not use tools"):
        tokenizer.apply_chat_template(USER, tools=TOOLS, chat_template="default")
    assert tokenizer.apply_chat_template(USER, chat_template="{{ messages[0].role }}") == "user"


def test_model_without_a_template_says_so(tmp_path):
    with pytest.raises(UnsupportedFeature, match="no default chat template"):
        directory_with(tmp_path).apply_chat_template(USER)


@pytest.mark.parametrize("post_bos", [True, False])
def test_c8_template_that_writes_bos_gives_exactly_one(tmp_path, post_bos):
    tokenizer = directory_with(tmp_path, GEMMA, post_bos=post_bos)
    ids = tokenizer.encode_chat(USER)
    assert ids.count(0) == 1 and ids[0] == 0
    assert ids == tokenizer.encode(tokenizer.apply_chat_template(USER), add_special_tokens=False)


def test_c8_text_that_already_starts_with_bos_is_recognized(tmp_path):
    tokenizer = directory_with(tmp_path, GEMMA, post_bos=True)
    text = tokenizer.apply_chat_template(USER)
    assert tokenizer.adds_bos and tokenizer.starts_with_bos(text) and not tokenizer.starts_with_bos("Hi <s>")
    assert tokenizer.encode(text).count(0) == 2
