"""Text and messages before and after the model: tokenize, detokenize, chat templates, BOS tokens."""

from __future__ import annotations

import asyncio
import contextlib
import warnings

import numpy as np
import pytest

from openengine import (
    InvalidArgument,
    UnsupportedFeature,
)
from tests.scripted import ABC, GREEDY, hashed, letters, scripted_engine

# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages", ["hi", [], [5], [{}], [{"role": "user"}], {"role": "user"}, 5, [{"role": 5, "content": "x"}]]
)
def test_malformed_messages_are_refused(chatting, messages):
    for call in (chatting.chat, chatting.apply_chat_template, lambda m: chatting.submit(messages=m)):
        with pytest.raises(InvalidArgument):
            call(messages)


# ---- chat ----------------------------------------------------------------------------------------


@pytest.fixture
def chatting(tmp_path):
    """An engine whose chat template writes each content, then "z" where the answer begins."""
    import json

    with scripted_engine(tmp_path, hashed(27), ABC) as engine:
        path = tmp_path / "tokenizer_config.json"
        template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}t{% endif %}{{ extra }}z"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
        from openengine.core.tokenizer import load_tokenizer

        engine._tokenizer = engine._preparer._tokenizer = load_tokenizer(tmp_path)
        yield engine


MESSAGES = [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]


def test_chat_is_generate_with_the_rendered_messages_in_every_form(chatting):
    expected = chatting.generate("abcz", **GREEDY).token_ids
    assert chatting.apply_chat_template(MESSAGES) == letters("abcz")
    assert chatting.chat(MESSAGES, **GREEDY).token_ids == expected
    assert chatting.generate(messages=MESSAGES, **GREEDY).token_ids == expected
    assert chatting.submit(messages=MESSAGES, **GREEDY).result().token_ids == expected
    assert asyncio.run(chatting.agenerate(messages=MESSAGES, **GREEDY)).token_ids == expected
    text = "".join(event.text for event in chatting.stream(messages=MESSAGES, **GREEDY))
    assert text == chatting.detokenize(expected)


def test_tools_and_template_arguments_reach_the_template(chatting):
    assert chatting.apply_chat_template(MESSAGES, [{"name": "f"}], extra="x") == letters("abctxz")
    result = chatting.chat(MESSAGES, tools=[{"name": "f"}], template_kwargs={"extra": "x"}, **GREEDY)
    assert result.token_ids == chatting.generate("abctxz", **GREEDY).token_ids


@pytest.mark.parametrize(
    "arguments", [{"prompts": "a", "messages": MESSAGES}, {}, {"messages": MESSAGES, "template_kwargs": 5},
                  {"messages": MESSAGES, "tools": 5}, {"prompts": "a", "tools": [{}]}],
)  # fmt: skip
def test_prompt_and_messages_exclude_each_other_and_tools_need_messages(chatting, arguments):
    with pytest.raises(InvalidArgument):
        chatting.generate(**arguments)


def test_c8_a_prompt_with_a_bos_of_its_own_warns_where_it_was_written_if_the_tokenizer_adds_another(tmp_path):
    from openengine.core.tokenizer import load_tokenizer
    from tests.checkpoints import VOCAB_SIZE, write_tokenizer

    write_tokenizer(tmp_path / "adds")
    with scripted_engine(tmp_path / "m", hashed(VOCAB_SIZE), [f"<{i}>" for i in range(VOCAB_SIZE)]) as engine:
        engine._preparer._tokenizer = load_tokenizer(tmp_path / "adds")

        async def agenerate(prompt):
            return await engine.agenerate(prompt, max_tokens=1)

        async def asubmit(prompt):
            return await (await engine.asubmit(prompt, max_tokens=1)).aresult()

        async def astream(prompt, **guide):
            return [event async for event in engine.astream(prompt, max_tokens=1, **guide)]

        calls = {
            "generate": lambda: engine.generate("<|bos|>hello", max_tokens=1),
            "batch": lambda: engine.generate(["a", "<|bos|>hello"], max_tokens=1),
            "as_completed": lambda: list(engine.as_completed(["<|bos|>hello"], max_tokens=1)),
            "stream": lambda: list(engine.stream("<|bos|>hello", max_tokens=1)),
            "submit": lambda: engine.submit("<|bos|>hello", max_tokens=1).result(),
            "agenerate": lambda: asyncio.run(agenerate("<|bos|>hello")),
            "agenerate of itself": lambda: asyncio.run(engine.agenerate("<|bos|>hello", max_tokens=1)),
            "async batch": lambda: asyncio.run(agenerate(["a", "<|bos|>hello"])),
            "asubmit": lambda: asyncio.run(asubmit("<|bos|>hello")),
            "astream": lambda: asyncio.run(astream("<|bos|>hello")),
            "astream with a guide": lambda: asyncio.run(astream("<|bos|>hello", regex="<.*>")),
        }
        for name, call in calls.items():
            with pytest.warns(UserWarning, match="sees two") as caught, contextlib.suppress(UnsupportedFeature):
                call()  # the guide is refused late, for want of an end of sequence
            assert [warning.filename for warning in caught] == [__file__], name
        engine.generate(["hello"], max_tokens=1)


def test_c8_no_warning_where_the_tokenizer_adds_no_bos(chatting):
    from openengine.core.tokenizer import Tokenizer

    tokenizer = chatting._preparer._tokenizer
    named = Tokenizer(tokenizer.vocabulary, bos_token_id=0, eos_token_id=0, pad_token_id=None, unk_token_id=None)
    chatting._preparer._tokenizer = named
    assert named.starts_with_bos("<eos>abc")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chatting.generate("<eos>abc", max_tokens=1).usage.prompt_tokens == 4


def test_a_model_without_a_chat_template_says_so(engine):
    with pytest.raises(UnsupportedFeature, match="chat template"):
        engine.chat(MESSAGES)


# ---- tokens --------------------------------------------------------------------------------------


def test_tokenize_is_what_generate_runs_and_detokenize_takes_it_back(engine):
    assert engine.tokenize("abc") == letters("abc") and engine.tokenize("") == []
    for ids in (letters("abc"), tuple(letters("abc")), np.array(letters("abc")), iter(letters("abc"))):
        assert engine.detokenize(ids) == "abc"
    assert engine.detokenize([]) == "" and engine.detokenize(iter([])) == ""
    assert engine.detokenize([1, 0]) == "a" and engine.detokenize([1, 0], skip_special_tokens=False) == "a<eos>"
    assert [t.token_id for t in engine.generate("abc", prompt_logprobs=0, max_tokens=0).prompt] == letters("abc")


@pytest.mark.parametrize(
    "ids", [5, None, "abc", [1.5], [True], ["1"], [None], [-1], [27], [2**70], [[1]], np.array(1.0)]
)
def test_tok_14_detokenize_refuses_what_is_no_token_id(engine, ids):
    with pytest.raises(InvalidArgument):
        engine.detokenize(ids)


@pytest.mark.parametrize("text", [5, None, b"abc", ["abc"], "\ud800"])
def test_tokenize_refuses_what_is_no_text(engine, text):
    with pytest.raises(InvalidArgument):
        engine.tokenize(text)
