"""The prefix cache as requests see it, and the counts of usage."""

from __future__ import annotations

from tests.scripted import ABC, ENDLESS, GREEDY, hashed, scripted_engine


def cached(engine, prompt="abcdefghij", **options) -> int:
    return engine.generate(prompt, temperature=0, max_tokens=1, **options).usage.cached_prompt_tokens


def test_kvo_01_02_bypass_reuses_nothing_and_still_caches(engine):
    assert [cached(engine, bypass_prefix_cache=b) for b in (True, True, False, True)] == [0, 0, 8, 0]


def test_kvo_03_a_salt_separates(engine):
    assert [cached(engine, cache_salt=s) for s in ("x", None, "y", "x", "y", None)] == [0, 0, 0, 8, 8, 8]


def test_kvo_05_use_04_05_only_full_blocks_are_reused_and_one_token_is_computed(engine):
    cached(engine)
    assert [cached(engine, "abcdefghijklmnop"[:n]) for n in (3, 4, 5, 8, 9, 12)] == [0, 0, 4, 4, 8, 8]


def test_kvo_06_a_cached_prompt_gives_the_same_output(engine):
    first, second = (engine.generate("abcdefghij", logprobs=2, prompt_logprobs=2, **GREEDY) for _ in range(2))
    third = engine.generate("abcdefghij", logprobs=2, **GREEDY)
    assert third.usage.cached_prompt_tokens == 8 and third.token_ids == first.token_ids == second.token_ids
    assert list(first.prompt) == list(second.prompt) and first.tokens == third.tokens  # LGP-17


def test_clear_prefix_cache_forgets_everything_and_changes_no_running_request(engine):
    expected = engine.generate("abcdefghij", temperature=0, **ENDLESS).token_ids
    assert cached(engine) == 8
    running = engine.submit("abcdefghij", temperature=0, **ENDLESS)
    engine.clear_prefix_cache()
    assert running.result().token_ids == expected
    engine.clear_prefix_cache()
    assert cached(engine) == 0


def test_use_05_without_a_prefix_cache_the_count_is_absent(tmp_path):
    with scripted_engine(tmp_path, hashed(27), ABC, enable_prefix_cache=False) as engine:
        assert cached(engine) is None and cached(engine, cache_salt="x") is None


def test_use_02_03_the_prompt_counts_once_and_outputs_together(engine):
    usage = engine.generate("abc", num_sequences=4, seed=1, max_tokens=5).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 20, 23)
