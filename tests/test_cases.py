"""Faults that users of other engines reported, as small inputs with the right values, through the whole engine.

A scripted model makes every expected value exact.
"""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

from openengine import InvalidArgument, RequestTooLarge, SamplingParams
from tests.interrupting import interrupted
from tests.scripted import ABC, follow, hashed, letters, scripted_engine, slow

# ---- sampling ------------------------------------------------------------------------------------


def test_s1_logprobs_are_raw_whatever_the_sampling_values(tmp_path):
    with scripted_engine(tmp_path, lambda history: [1, 0, -1, -2], ["a", "b", "c", "d"]) as engine:
        result = engine.generate([0], max_tokens=1, temperature=0.5, top_p=0.9, logprobs=4)
    candidates = result.tokens[0].candidates
    np.testing.assert_allclose([c.logprob for c in candidates], [-0.44019, -1.44019, -2.44019, -3.44019], atol=1e-5)
    assert [(c.token_id, c.rank) for c in candidates] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_s4_repetition_sees_the_prompt_and_presence_does_not(tmp_path):
    # Logits 2.0 everywhere: repetition 2.0 leaves a and b (the prompt) at 1.0, so c is the first of the best.
    with scripted_engine(tmp_path, lambda history: [2.0] * 4, ["a", "b", "c", "d"]) as engine:
        repetition = engine.generate([0, 0, 1], max_tokens=3, temperature=0, repetition_penalty=2.0)
        presence = engine.generate([0, 0, 1], max_tokens=5, temperature=0, presence_penalty=1.0)
    assert repetition.token_ids == [2, 3, 0]
    assert presence.token_ids == [0, 1, 2, 3, 0]


def test_s5_requests_in_one_batch_do_not_change_each_other(tmp_path):
    a = {"seed": 99, "top_k": 1, "temperature": 1.0}
    b = {"temperature": 0.0, "repetition_penalty": 2.0}
    with scripted_engine(tmp_path, hashed(27), ABC) as engine:

        def run(*options):
            handles = [engine.submit(letters("xyz"), max_tokens=8, **o) for o in options]
            return [handle.result().token_ids for handle in handles]

        alone = [run(a)[0], run(b)[0]]
        assert run(a, b) == alone and run(b, a) == alone[::-1]


def test_s7_sequences_differ_are_reproducible_and_the_first_is_the_single_one(tmp_path):
    with scripted_engine(tmp_path, lambda history: [0.0] * 27, ABC) as engine:

        def run(n):
            result = engine.generate([1], temperature=1.0, seed=7, num_sequences=n, max_tokens=12)
            return [output.token_ids for output in result.outputs]

        four = run(4)
        assert len(set(map(tuple, four))) == 4
        assert run(4) == four and run(1) == four[:1]


def test_s8_the_callers_random_states_and_torch_settings_are_left_alone(tmp_path):
    def states():
        return (
            random.getstate(),
            [part.tolist() if hasattr(part, "tolist") else part for part in np.random.get_state()],
            torch.get_rng_state().tolist(),
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_inference_mode_enabled(),
        )

    before = states()
    with scripted_engine(tmp_path, hashed(27), ABC) as engine:
        engine.generate([1], max_tokens=5, temperature=1.0)
        engine.generate([1], max_tokens=5, temperature=1.0, seed=1)
    assert states() == before


def test_the_callers_default_dtype_changes_nothing(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC) as engine:
        expected = engine.generate([1], max_tokens=5, temperature=1.0, seed=1, top_k=9, frequency_penalty=0.5).token_ids
        torch.set_default_dtype(torch.float64)
        try:
            again = engine.generate(
                [1], max_tokens=5, temperature=1.0, seed=1, top_k=9, frequency_penalty=0.5
            ).token_ids
        finally:
            torch.set_default_dtype(torch.float32)
    assert again == expected


# ---- stops ---------------------------------------------------------------------------------------


def run_script(directory, vocabulary, tokens, *, eos=(), **options):
    script = follow(*tokens, vocab_size=len(vocabulary))
    with scripted_engine(directory, script, vocabulary, eos_token_ids=eos) as engine:
        handle = engine.submit([0], temperature=0, **{"max_tokens": 20, **options})
        events = [event for event in handle if hasattr(event, "tokens")]
        return events, handle.result()


def test_t1_no_part_of_a_stop_is_streamed_before_it_completes(tmp_path):
    vocabulary = ["<eos>", "DEF", "G", "HI", "J"]
    events, result = run_script(tmp_path, vocabulary, [1, 2, 3, 4], stop="DEFGHIJ")
    assert events == [] and result.text == "" and result.tokens == ()
    assert result.finish_reason == "stop" and result.stop_match.stop_text == "DEFGHIJ"
    assert result.usage.completion_tokens == 4


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc!")])
def test_t2_a_stop_may_begin_and_end_inside_tokens(tmp_path, include, text):
    _, result = run_script(tmp_path, ["<eos>", "ab", "c!d"], [1, 2], stop="c!", include_stop_in_output=include)
    assert result.text == text and result.finish_reason == "stop"


def test_t3_ids_and_text_come_in_the_same_event(tmp_path):
    events, result = run_script(tmp_path, ABC, letters("axb"), stop="xyz", max_tokens=3)
    assert [(event.text, [token.token for token in event.tokens]) for event in events] == [
        ("a", ["a"]),
        ("xb", ["x", "b"]),
    ]
    assert result.text == "axb" and result.finish_reason == "length"


def test_t7_the_earliest_then_shortest_stop_wins_and_eos_is_reported_as_eos(tmp_path):
    _, result = run_script(tmp_path / "a", ["<eos>", "abc"], [1], stop=["abc", "ab"])
    assert result.text == "" and result.stop_match.stop_text == "ab"
    _, result = run_script(tmp_path / "b", ["<eos>", "x"], [1, 0], stop=["q"], eos=(0,))
    assert result.text == "x" and result.stop_match.eos_token_id == 0 and result.stop_match.stop_text is None


# ---- detokenization ------------------------------------------------------------------------------

EMOJI = "😀".encode()
BYTES = ["<eos>", EMOJI[:1], EMOJI[1:2], EMOJI[2:3], EMOJI[3:], "x", "abc"]


def test_d1_the_first_delta_never_repeats_the_prompt(tmp_path):
    script = follow(1, 2, 3, 4, 5, vocab_size=7)
    with scripted_engine(tmp_path, script, BYTES) as engine:
        events = list(engine.stream([6, 1, 2], max_tokens=3, temperature=0))
    assert "".join(event.text for event in events) == "😀x"


def test_d2_a_character_split_over_tokens_is_never_cut_even_interleaved(tmp_path):
    script = follow(1, 2, 3, 4, 5, 1, 2, 3, 4, vocab_size=7)
    with scripted_engine(tmp_path, script, BYTES) as engine:
        streams = [engine.stream([5], max_tokens=9, temperature=0) for _ in range(2)]
        texts = [[], []]
        for pair in zip(*streams):
            for index, event in enumerate(pair):
                texts[index].append(event.text)
                assert "\ufffd" not in event.text
    assert ["".join(parts) for parts in texts] == ["😀x😀"] * 2


def test_d5_an_unfinished_character_is_flushed_before_the_end(tmp_path):
    events, result = run_script(tmp_path, BYTES, [5, 1, 2], max_tokens=3)
    assert result.text == "x\ufffd" and result.token_ids == [5, 1, 2]
    assert events[-1].text == "\ufffd" and [token.token_id for token in events[-1].tokens] == [1, 2]


# ---- cache, scheduling, preemption, abort --------------------------------------------------------


def test_p1_prompt_logprobs_do_not_depend_on_order_or_cache(tmp_path):
    prompts = [letters("abcdefghij"), letters("abcdefghxy"), letters("abcdefgh")]

    def run(name, order, **options):
        with scripted_engine(tmp_path / name, hashed(27), ABC, **options) as engine:
            results = {i: engine.generate(prompts[i], max_tokens=1, temperature=0, prompt_logprobs=2) for i in order}
        return [[(t.logprob, t.rank, list(t.candidates)) for t in results[i].prompt] for i in range(3)]

    expected = run("off", [0, 1, 2], enable_prefix_cache=False)
    assert run("forth", [0, 1, 2]) == expected and run("back", [2, 1, 0]) == expected
    assert expected[0][0] == (None, None, [])


def test_p1_prompt_logprobs_survive_chunking_and_preemption(tmp_path):
    prompts = [letters("abcdefghijklmnopqrstu"), letters("zyxwvutsrqponml")]

    def run(name, **options):
        with scripted_engine(tmp_path / name, hashed(27), ABC, **options) as engine:
            results = engine.generate(prompts, max_tokens=8, temperature=0, prompt_logprobs=1, progress=False)
        return [([token.logprob for token in r.prompt], r.token_ids) for r in results]

    expected = run("whole")
    assert run("tiny", num_kv_blocks=8, max_num_seqs=2, max_num_batched_tokens=5) == expected


def test_p3_a_prompt_of_exactly_k_blocks_sent_twice(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC) as engine:
        first, second = (engine.generate(letters("abcdefgh"), max_tokens=4, temperature=0) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert (first.usage.cached_prompt_tokens, second.usage.cached_prompt_tokens) == (0, 4)


def test_p4_p5_preempted_requests_give_the_same_tokens_logprobs_and_stops(tmp_path):
    rng = random.Random(3)
    prefix = letters("abcdefgh")
    requests = [
        (prefix + [rng.randrange(1, 27) for _ in range(rng.randint(1, 6))], options)
        for options in [
            {"temperature": 0},
            {"temperature": 0.9, "seed": 5},
            {
                "temperature": 1.0,
                "seed": 6,
                "repetition_penalty": 1.3,
                "frequency_penalty": 0.4,
                "presence_penalty": 0.2,
            },
            {"temperature": 1.0, "seed": 7, "stop": ["e"]},
            {"temperature": 1.0, "seed": 8, "num_sequences": 2},
        ]
    ]

    def run(name, **options):
        with scripted_engine(tmp_path / name, hashed(27), ABC, **options) as engine:
            handles = [engine.submit(prompt, max_tokens=18, logprobs=1, **o) for prompt, o in requests]
            streamed = ["".join(event.text for event in handle) for handle in handles]
            results = [handle.result() for handle in handles]
            load = engine.load_info()
        assert load.used_kv_blocks == 0
        assert all(text == r.text for text, r in zip(streamed, results) if len(r.outputs) == 1)
        return [
            [(o.token_ids, o.text, o.finish_reason, o.stop_match, o.logprobs.tolist()) for o in r.outputs]
            for r in results
        ]

    expected = run("big", num_kv_blocks=256)
    assert run("small", num_kv_blocks=13) == expected
    assert run("small-uncached", num_kv_blocks=13, enable_prefix_cache=False) == expected


def test_p11_an_interrupted_batch_leaves_every_block_free(tmp_path):
    with scripted_engine(tmp_path, slow, ABC) as engine:
        with interrupted(when=lambda: engine._loop.num_steps > 2) as times:
            while True:
                engine.generate([letters("abc")] * 100, max_tokens=100, temperature=0, progress=False)
        assert time.monotonic() - times[-1] < 5
        load = engine.load_info()
        assert (load.running_requests, load.queued_requests, load.used_kv_blocks) == (0, 0, 0)
        assert len(engine.generate([1], max_tokens=3).token_ids) == 3


def test_p12_one_bad_item_is_named_before_anything_runs_or_returned_in_its_place(tmp_path):
    prompts = [letters("ab"), letters("a") * 6000, letters("cd")]
    with scripted_engine(tmp_path, hashed(27), ABC) as engine:
        with pytest.raises(InvalidArgument, match=r"item 1 of 3.*6000 tokens.*128"):
            engine.generate(prompts, max_tokens=2)
        assert engine._loop.num_steps == 0
        results = engine.generate(prompts, max_tokens=2, on_error="return", progress=False)
    assert [len(r.outputs) for r in results] == [1, 0, 1]
    assert isinstance(results[1].error, InvalidArgument) and results[1].to_dict()["text"] is None


def test_p13_a_prompt_larger_than_the_whole_pool_is_refused_with_both_counts(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC, num_kv_blocks=4, max_model_len=64) as engine:
        with pytest.raises(RequestTooLarge, match=r"21 tokens.*16") as caught:
            engine.submit(letters("abcdefghij") * 2)
    assert not caught.value.retryable and caught.value.grpc_status == "RESOURCE_EXHAUSTED"


def test_sampling_params_and_keywords_say_the_same(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC) as engine:
        a = engine.generate([1], SamplingParams(temperature=0.8, seed=3), max_tokens=9)
        b = engine.generate([1], temperature=0.8, seed=3, max_tokens=9)
    assert a.token_ids == b.token_ids and a.sampling == b.sampling
