"""Generate over a socket: GEN, SMP, STP, LGP, KVO, STR, USE and ERR of the requirements, one by one."""

from __future__ import annotations

import itertools
import math
import threading
import time

import grpc
import pytest

from openengine.rpc import openengine_pb2 as pb
from openengine.rpc import tokenizer_pb2 as tok
from tests.rpc.scripted_server import VOCAB_SIZE, VOCABULARY
from tests.rpc.serving import fresh_id, is_idle, load, request, run, status
from tests.waiting import wait_until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PRECOND = grpc.StatusCode.FAILED_PRECONDITION
NAN, INF = math.nan, math.inf
STOP, LENGTH, CANCELLED = 1, 2, 3
C = VOCABULARY.index("c")


def stop_text(text):
    return pb.StopCondition(stop_text=text)


def stop_id(token_id):
    return pb.StopCondition(stop_token_id=token_id)


def top_n(n):
    return pb.CandidateTokenSelection(top_n=n)


def ids_of(*ids):
    return pb.CandidateTokenSelection(token_ids=pb.TokenIds(ids=ids))


ALL = pb.CandidateTokenSelection(all=pb.AllCandidates())

# ---- what is refused -----------------------------------------------------------------------------

REFUSED = {
    "gen_02_empty_model": (request(model=""), INVALID),
    "gen_02_unknown_model": (request(model="nobody"), NOT_FOUND),
    "gen_03_no_input": (request(None), INVALID),
    "gen_04_no_token_ids": (request([]), INVALID),
    "gen_04_empty_prompt": (request(""), INVALID),
    "gen_05_input_id": (request([VOCAB_SIZE]), INVALID),
    "gen_05_stop_id": (request(stopping__conditions=[stop_id(VOCAB_SIZE)]), INVALID),
    "gen_05_candidate_id": (request(response__output_candidates=ids_of(VOCAB_SIZE)), INVALID),
    "gen_07_prompt_fills_the_context": (request([1] * 2048), INVALID),
    "gen_12_lora_disabled": (request(lora_name="x"), PRECOND),
    "gen_13_media_item_without_source": (request(media=[pb.MediaItem()]), INVALID),
    "mod_12_media": (request(media=[pb.MediaItem(url="http://x/y.png")]), INVALID),
    "gde_07_guide_that_does_not_compile": (request(guided__regex="a("), INVALID),
    "gde_10_backend": (request(guided=pb.GuidedDecoding(regex="a", backend="other")), INVALID),
    "gde_09_guided_without_guide": (request(guided=pb.GuidedDecoding(backend="")), INVALID),
    "smp_02_temperature_negative": (request(sampling__temperature=-0.1), INVALID),
    "smp_03_top_p_zero": (request(sampling__top_p=0.0), INVALID),
    "smp_03_top_p_above_one": (request(sampling__top_p=1.01), INVALID),
    "smp_04_top_k_below": (request(sampling__top_k=-2), INVALID),
    "smp_05_min_p_negative": (request(sampling__min_p=-0.1), INVALID),
    "smp_05_min_p_above": (request(sampling__min_p=1.1), INVALID),
    "smp_06_frequency_penalty": (request(sampling__frequency_penalty=2.1), INVALID),
    "smp_06_presence_penalty": (request(sampling__presence_penalty=-2.1), INVALID),
    "smp_07_repetition_penalty": (request(sampling__repetition_penalty=0.0), INVALID),
    "smp_09_no_sequences": (request(sampling__num_sequences=0), INVALID),
    "mod_09_too_many_sequences": (request(sampling__num_sequences=9), INVALID),
    **{
        f"smp_11_{name}_{value}": (request(**{f"sampling__{name}": value}), INVALID)
        for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
        for value in (NAN, INF)
    },
    "stp_06_min_above_max": (request(max_tokens=2, stopping__min_tokens=3), INVALID),
    "stp_07_condition_unset": (request(stopping__conditions=[pb.StopCondition()]), INVALID),
    "stp_07_empty_stop_text": (request(stopping__conditions=[stop_text("")]), INVALID),
    "lgp_07_selection_unset": (request(response__output_candidates=pb.CandidateTokenSelection()), INVALID),
    "lgp_07_no_candidate_ids": (request(response__output_candidates=ids_of()), INVALID),
    "mod_07_top_n_above_the_limit": (request(response__output_candidates=top_n(VOCAB_SIZE + 1)), INVALID),
    "lgp_13_start_beyond_prompt": (
        request(response__return_prompt_logprobs=True, response__prompt_logprob_start=1),
        INVALID,
    ),
    "lgp_16_contradiction": (
        request(response__return_output_logprobs=False, response__output_candidates=top_n(1)),
        INVALID,
    ),
    "kvo_04_empty_salt": (request(kv__cache_salt=""), INVALID),
    "kvo_07_unknown_rank": (request(kv__data_parallel_rank=1), INVALID),
    "pd_06_session_on_an_aggregated_engine": (request(kv__session=pb.KvSessionRef(session_id="s")), PRECOND),
}


@pytest.mark.parametrize("name", REFUSED)
def test_gen_09_err_01_it_is_refused_with_a_status_and_no_message(stub, name):
    message, expected = REFUSED[name]
    assert status(lambda: stub.Generate(message)) is expected


def test_gen_01_an_empty_request_id_is_refused(stub):
    message = request()
    message.request_id = ""
    assert status(lambda: stub.Generate(message)) is INVALID


# ---- GEN -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["scripted", "alias-1", "alias-2"])
def test_mod_03_every_name_of_the_model_is_accepted(stub, model):
    assert run(stub, request(model=model)).text == "defg"


def test_gen_06_token_ids_are_used_verbatim_and_a_prompt_as_tokenize_says(server):
    asked = {"response__return_prompt_logprobs": True, "max_tokens": 0}
    given = run(server.stub, request([C, 5, 6], **asked))
    assert [token.token_id for token in given.prompt.tokens] == [C, 5, 6]
    text = run(server.stub, request("cab <eos>", **asked))
    told = server.tokenizer.Tokenize(tok.TokenizeRequest(model="scripted", text="cab <eos>"))
    assert [token.token_id for token in text.prompt.tokens] == list(told.token_ids)


def test_gen_08_an_id_in_flight_is_refused_and_the_first_is_undisturbed(server):
    # Long enough to be in flight whatever the machine does between two calls.
    first = server.stub.Generate(request("s", request_id="twice", max_tokens=1900))
    text = next(first).token.text
    assert status(lambda: server.stub.Generate(request(request_id="twice"))) is grpc.StatusCode.ALREADY_EXISTS
    text += "".join(response.token.text for response in itertools.islice(first, 59))
    assert text == "tuvwxyz" + 2 * "abcdefghijklmnopqrstuvwxyz" + "a"
    first.cancel()
    wait_until(lambda: is_idle(server))
    assert run(server.stub, request(request_id="twice")).text == "defg", "a finished id may be used again"


def test_gen_10_metadata_changes_nothing(stub):
    assert run(stub, request(metadata={"a": "b"})).text == run(stub, request()).text


def test_gen_11_the_larger_priority_starts_first(server):
    busy = [server.stub.Generate(request("s", max_tokens=100)) for _ in range(8)]
    wait_until(lambda: load(server).running_requests == 8)
    first_seen = {}

    def follow(name, priority):
        for _response in server.stub.Generate(request("c", max_tokens=1, priority=priority)):
            first_seen.setdefault(name, time.monotonic())

    threads = []
    for name, priority in (("low", -5), ("high", 5)):
        threads.append(threading.Thread(target=follow, args=(name, priority)))
        threads[-1].start()
        wait_until(lambda: load(server).queued_requests == len(threads))
    for call in busy:
        call.cancel()
    for thread in threads:
        thread.join()
    # Both may start in one step, when several slots get free at once; the smaller is never before the larger.
    assert first_seen["high"] <= first_seen["low"] + 0.05


def test_gen_14_beyond_the_queue_limit_it_is_resource_exhausted(server):
    calls = [server.stub.Generate(request("s", max_tokens=300)) for _ in range(8)]
    wait_until(lambda: load(server).running_requests == 8)
    calls += [server.stub.Generate(request("s", max_tokens=300)) for _ in range(16)]
    wait_until(lambda: load(server).queued_requests == 16)
    with pytest.raises(grpc.RpcError) as caught:
        list(server.stub.Generate(request()))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailer = pb.EngineError.FromString(dict(caught.value.trailing_metadata())["openengine-error-bin"])
    assert trailer.retryable and trailer.HasField("retry_after_ms"), "ERR-06, ERR-09"
    for call in calls:
        call.cancel()
    wait_until(lambda: is_idle(server))


@pytest.mark.parametrize("num_read", [0, 2])
def test_gen_15_r4_a_client_that_cancels_frees_its_request(server, num_read):
    message = request("s", max_tokens=1000)
    call = server.stub.Generate(message)
    for _ in range(num_read):
        next(call)
    wait_until(lambda: load(server).running_requests == 1)
    call.cancel()
    wait_until(lambda: is_idle(server), timeout=2)
    assert call.code() is grpc.StatusCode.CANCELLED
    assert load(server).used_kv_blocks == 0
    assert run(server.stub, request(request_id=message.request_id)).text == "defg", "the id may be used again"


def test_gen_15_a_deadline_ends_the_request(server):
    call = server.stub.Generate(request("s", max_tokens=1000), timeout=0.3)
    with pytest.raises(grpc.RpcError):
        list(call)
    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: is_idle(server), timeout=2)


def test_gen_16_a_short_request_finishes_while_a_long_one_runs(stub):
    long = stub.Generate(request("s", max_tokens=500))
    next(long)
    assert run(stub, request()).text == "defg"
    assert long.is_active()
    long.cancel()


def test_gen_17_output_does_not_depend_on_other_traffic(stub):
    alone = run(stub, request("hello", max_tokens=20, sampling__temperature=0.0)).ids
    others = [stub.Generate(request("s", max_tokens=200)) for _ in range(4)]
    assert run(stub, request("hello", max_tokens=20, sampling__temperature=0.0)).ids == alone
    for other in others:
        other.cancel()


# ---- SMP -----------------------------------------------------------------------------------------


def sampled(stub, **options):
    return run(stub, request("hello", max_tokens=16, **options)).ids


def test_smp_01_02_temperature_zero_is_greedy_and_seed_zero_is_a_seed(stub):
    assert sampled(stub, sampling__temperature=0.0) == sampled(stub, sampling__temperature=0.0)
    assert sampled(stub, sampling__seed=0) == sampled(stub, sampling__seed=0)


@pytest.mark.parametrize(
    "option",
    [{"sampling__top_p": 1e-6}, {"sampling__top_k": 1}, {"sampling__min_p": 1.0}],
    ids=["smp_03_top_p", "smp_04_top_k", "smp_05_min_p"],
)
def test_smp_it_equals_greedy_when_one_token_is_left(stub, option):
    assert sampled(stub, sampling__temperature=1.5, **option) == sampled(stub, sampling__temperature=0.0)


def test_smp_04_top_k_zero_and_minus_one_are_off(stub):
    seeded = sampled(stub, sampling__seed=3)
    assert sampled(stub, sampling__seed=3, sampling__top_k=0) == seeded
    assert sampled(stub, sampling__seed=3, sampling__top_k=-1) == seeded


def test_smp_06_07_penalties_apply_to_the_tokens_they_name(stub):
    """The counter always wants the next letter; only a repetition penalty counts those of the prompt."""
    prompt, greedy = "cdefg", {"sampling__temperature": 0.0, "max_tokens": 30}
    plain = run(stub, request(prompt, **greedy)).text
    assert run(stub, request(prompt, sampling__frequency_penalty=2.0, **greedy)).text[:26] == plain[:26]
    hard = run(stub, request("zbcda", sampling__repetition_penalty=1000.0, **greedy)).ids
    assert len(set(hard)) == len(hard), "no token of prompt or output comes again while others are left"


def test_smp_08_a_seed_fixes_the_tokens_and_seeds_differ(stub):
    assert sampled(stub, sampling__seed=7) == sampled(stub, sampling__seed=7) != sampled(stub, sampling__seed=8)


def test_smp_10_sequences_are_independent_reproducible_and_equal_when_greedy(stub):
    seeded = {"sampling__num_sequences": 3, "sampling__seed": 5, "max_tokens": 12}
    first, again = run(stub, request("hello", **seeded)), run(stub, request("hello", **seeded))
    assert first.all_ids == again.all_ids and len({tuple(ids) for ids in first.all_ids.values()}) == 3
    greedy = run(stub, request("hello", max_tokens=6, sampling__num_sequences=3, sampling__temperature=0.0))
    assert len({tuple(ids) for ids in greedy.all_ids.values()}) == 1


# ---- STP -----------------------------------------------------------------------------------------


def test_stp_01_without_max_tokens_it_runs_to_the_context_limit(stub):
    result = run(stub, request([C] * 2040, max_tokens=None))
    assert result.usage.total_tokens == 2048 and result.finished[0].reason == LENGTH


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
def test_stp_02_03_max_tokens_is_exact(stub, max_tokens):
    result = run(stub, request(max_tokens=max_tokens))
    assert len(result.ids) == result.usage.completion_tokens == max_tokens
    assert result.finished[0].reason == LENGTH


def test_stp_04_a_max_tokens_beyond_the_context_is_accepted(stub):
    assert run(stub, request([C] * 2040, max_tokens=100)).finished[0].reason == LENGTH


def test_stp_05_min_tokens_holds_back_every_stop(stub):
    conditions = [stop_text("f"), stop_id(VOCABULARY.index("g"))]
    result = run(stub, request("c", max_tokens=40, stopping__min_tokens=6, stopping__conditions=conditions))
    assert result.usage.completion_tokens >= 6
    assert run(stub, request("e", max_tokens=9, stopping__min_tokens=5)).usage.completion_tokens >= 5


def test_stp_08_the_earliest_stop_text_wins_and_is_named(stub):
    result = run(stub, request(max_tokens=20, stopping__conditions=[stop_text("ij"), stop_text("gh")]))
    assert result.text == "def" and result.finished[0].reason == STOP
    assert result.finished[0].stop_match.stop_text == "gh"


def test_stp_09_a_stop_token_is_named(stub):
    result = run(stub, request(max_tokens=20, stopping__conditions=[stop_id(7)]))
    assert result.text == "def" and result.finished[0].stop_match.stop_token_id == 7


def test_stp_10_include_keeps_the_stop(stub):
    kept = {"max_tokens": 20, "stopping__include_stop_in_output": True}
    assert run(stub, request(stopping__conditions=[stop_text("gh")], **kept)).text == "defgh"
    assert run(stub, request(stopping__conditions=[stop_id(7)], **kept)).ids[-1] == 7


@pytest.mark.parametrize("explicit", [None, False])
def test_stp_11_without_include_nothing_of_the_stop_is_sent(stub, explicit):
    option = {} if explicit is None else {"stopping__include_stop_in_output": explicit}
    result = run(stub, request(max_tokens=20, stopping__conditions=[stop_text("hij")], **option))
    assert [output.text for output in result.tokens] and result.text == "defg"
    assert result.ids == [4, 5, 6, 7]


def test_stp_12_eos_is_named_recorded_and_has_no_text(stub):
    result = run(stub, request("e", max_tokens=20))
    assert result.finished[0].stop_match.eos_token_id == 0
    assert result.finished[0].stop_match.WhichOneof("match") == "eos_token_id"
    assert result.ids[-1] == 0 and result.text == "fgh"


def test_stp_13_ignore_eos_runs_on_and_other_stops_still_stop(stub):
    result = run(stub, request("e", max_tokens=10, stopping__ignore_eos=True))
    assert len(result.ids) == 10 and result.finished[0].reason == LENGTH
    stopped = run(stub, request("e", max_tokens=10, stopping__ignore_eos=True, stopping__conditions=[stop_text("g")]))
    assert stopped.text == "f"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stp_14_an_eos_that_the_caller_names_is_the_callers_stop(stub, ignore_eos):
    result = run(stub, request("e", max_tokens=10, stopping__ignore_eos=ignore_eos, stopping__conditions=[stop_id(0)]))
    assert result.finished[0].stop_match.WhichOneof("match") == "stop_token_id"


def test_stp_15_at_one_token_the_stop_token_wins_over_the_text(stub):
    result = run(stub, request(max_tokens=20, stopping__conditions=[stop_text("g"), stop_id(7)]))
    assert result.finished[0].stop_match.WhichOneof("match") == "stop_token_id"


def test_stp_16_stops_look_at_output_only(stub):
    assert run(stub, request("cdef", stopping__conditions=[stop_text("de")], max_tokens=4)).text == "ghij"


def test_stp_17_each_output_stops_on_its_own(stub):
    hot = {"sampling__num_sequences": 4, "sampling__seed": 2, "sampling__temperature": 5.0}
    result = run(stub, request("hello", max_tokens=60, stopping__conditions=[stop_text("a"), stop_text("k")], **hot))
    assert len(result.finished) == 4 and len({len(ids) for ids in result.all_ids.values()}) > 1


# ---- LGP -----------------------------------------------------------------------------------------


def test_lgp_01_15_r3_every_token_has_a_finite_logprob_and_a_rank(stub):
    result = run(
        stub, request("hello", max_tokens=10, sampling__temperature=0.0, response__return_output_logprobs=True)
    )
    assert all(math.isfinite(info.logprob) and info.logprob <= 0 and info.rank == 1 for info in result.infos)
    assert all(info.HasField("logprob") for info in result.infos)


def test_lgp_02_03_without_it_no_token_has_one_and_every_token_has_its_text(stub):
    result = run(stub, request("e", max_tokens=10))
    assert not any(info.HasField("logprob") or info.HasField("rank") or info.candidates for info in result.infos)
    assert [info.token for info in result.infos] == ["f", "g", "h", "<eos>"]


@pytest.mark.parametrize("count", [0, 1, 5, VOCAB_SIZE])
def test_lgp_04_mod_07_top_n_gives_n_distinct_candidates_best_first(stub, count):
    result = run(
        stub, request("hello", response__output_candidates=top_n(count), response__return_output_logprobs=True)
    )
    for info in result.infos:
        logprobs = [candidate.logprob for candidate in info.candidates]
        assert len({candidate.token_id for candidate in info.candidates}) == len(logprobs) == count
        assert logprobs == sorted(logprobs, reverse=True)


def test_lgp_05_the_ids_asked_for_come_in_order(stub):
    result = run(stub, request("hello", response__output_candidates=ids_of(9, 2, 30)))
    assert all([c.token_id for c in info.candidates] == [9, 2, 30] for info in result.infos)


def test_lgp_06_all_is_the_whole_vocabulary(stub):
    result = run(stub, request("hello", response__output_candidates=ALL))
    for info in result.infos:
        assert len({c.token_id for c in info.candidates}) == VOCAB_SIZE
        assert sum(math.exp(c.logprob) for c in info.candidates) == pytest.approx(1, abs=1e-4)


def test_lgp_09_10_11_prompt_tokens_all_but_the_first_have_logprobs(stub):
    result = run(stub, request("hello", response__return_prompt_logprobs=True, response__prompt_candidates=top_n(2)))
    first, *others = result.prompt.tokens
    assert len(result.prompt.tokens) == result.usage.prompt_tokens == 5
    assert not (first.HasField("logprob") or first.HasField("rank") or first.candidates)
    assert all(token.HasField("logprob") and len(token.candidates) == 2 for token in others)


def test_lgp_12_prompt_and_output_selections_are_independent(stub):
    result = run(stub, request("hello", response__prompt_candidates=top_n(3), response__output_candidates=ids_of(1)))
    assert all(len(token.candidates) == 3 for token in result.prompt.tokens[1:])
    assert all([c.token_id for c in info.candidates] == [1] for info in result.infos)


def test_lgp_13_tokens_before_the_start_are_listed_without_scores(stub):
    result = run(stub, request("hello", response__return_prompt_logprobs=True, response__prompt_logprob_start=3))
    assert [token.HasField("logprob") for token in result.prompt.tokens] == [False, False, False, True, True]


def test_lgp_14_logprobs_are_raw_and_equal_those_of_the_sequence_as_a_prompt(stub):
    asked = {"response__return_output_logprobs": True, "max_tokens": 6}
    plain = run(stub, request("hello", sampling__temperature=0.0, **asked))
    hot = run(stub, request("hello", sampling__temperature=9.0, sampling__top_k=1, **asked))
    assert [i.logprob for i in plain.infos] == [i.logprob for i in hot.infos]
    ids = [VOCABULARY.index(letter) for letter in "hello"] + plain.ids
    scored = run(stub, request(ids, max_tokens=0, response__return_prompt_logprobs=True))
    assert [t.logprob for t in scored.prompt.tokens[5:]] == pytest.approx([i.logprob for i in plain.infos], abs=1e-5)


def test_lgp_16_a_selection_implies_its_logprobs(stub):
    assert all(info.HasField("logprob") for info in run(stub, request(response__output_candidates=top_n(0))).infos)


def test_lgp_17_a_cached_prompt_gives_the_same_prompt_logprobs(stub):
    message = {"response__return_prompt_logprobs": True, "max_tokens": 0}
    first, again = (run(stub, request("prompt logprobs twice", **message)).prompt for _ in range(2))
    assert first == again


# ---- KVO -----------------------------------------------------------------------------------------


def cached(stub, prompt, **options):
    result = run(stub, request(prompt, max_tokens=1, **options))
    assert result.usage.HasField("cached_prompt_tokens"), "USE-05: also as 0"
    return result.usage.cached_prompt_tokens


def test_kvo_01_02_bypass_reuses_nothing_and_caches_what_it_computed(stub):
    assert cached(stub, "a bypassed prompt", kv__bypass_prefix_cache=True) == 0
    assert cached(stub, "a bypassed prompt", kv__bypass_prefix_cache=True) == 0
    assert cached(stub, "a bypassed prompt", kv__bypass_prefix_cache=False) > 0


def test_kvo_03_a_salt_is_part_of_the_key(stub):
    prompt = "a salted prompt"
    assert cached(stub, prompt, kv__cache_salt="one") == 0
    assert cached(stub, prompt) == 0
    assert cached(stub, prompt, kv__cache_salt="two") == 0
    assert cached(stub, prompt, kv__cache_salt="one") > 0


@pytest.mark.parametrize("length", [7, 8, 9])
def test_kvo_05_full_blocks_are_reused_and_one_token_is_computed(stub, length):
    prompt = [20, 21, 22, 23, length, 24, 25, 26, 27][:length]
    cached(stub, prompt)
    hit = cached(stub, prompt)
    assert hit % 4 == 0 and 0 < hit < length


def test_kvo_06_cached_or_not_the_output_is_the_same(stub):
    results = [run(stub, request("the same output", max_tokens=12, sampling__temperature=0.0)).ids for _ in range(2)]
    assert results[0] == results[1]


# ---- STR, USE ------------------------------------------------------------------------------------


def test_str_01_to_09_11_12_the_stream_of_several_outputs(stub):
    message = request(
        "hello", max_tokens=9, sampling__num_sequences=3, sampling__seed=1, response__return_prompt_logprobs=True
    )
    result = run(stub, message)
    kinds = [response.WhichOneof("event") for response in result.responses]
    assert all(kinds), "STR-01"
    assert {response.request_id for response in result.responses} == {message.request_id}, "STR-02"
    assert all(output.HasField("output_index") for output in (*result.tokens, *result.finished)), "STR-03"
    assert sorted(f.output_index for f in result.finished) == [0, 1, 2], "STR-04, STR-08"
    assert kinds.count("prompt") == 1 and kinds[0] == "prompt", "STR-05"
    seen = set()
    for response in result.responses[1:]:
        output = response.token if response.WhichOneof("event") == "token" else response.finished
        assert output.output_index not in seen, "STR-07"
        if response.WhichOneof("event") == "finished":
            seen.add(output.output_index)
            assert output.reason in (STOP, LENGTH), "STR-11"
            assert output.HasField("stop_match") == (output.reason == STOP), "STR-12"
    assert kinds[-1] == "finished" and "prefill_ready" not in kinds, "STR-09, STR-14"
    assert [response.HasField("usage") for response in result.responses] == [False] * (len(kinds) - 1) + [True], (
        "USE-01"
    )
    usage = result.usage
    assert usage.prompt_tokens == 5 and usage.total_tokens == 5 + usage.completion_tokens, "USE-03, USE-05"
    assert usage.completion_tokens == sum(map(len, result.all_ids.values())), "USE-02"
    assert usage.cached_prompt_tokens <= usage.prompt_tokens, "USE-04"


def test_str_05_no_prompt_output_unless_asked_for(stub):
    assert run(stub, request()).prompt is None


def test_str_06_r1_every_output_is_a_delta(stub):
    result = run(stub, request(max_tokens=6, response__return_output_logprobs=True))
    assert [output.text for output in result.tokens] == list("defghi")
    assert [[info.token_id for info in output.tokens] for output in result.tokens] == [[i] for i in range(4, 10)]
    assert all(len(output.tokens) == 1 and output.tokens[0].HasField("logprob") for output in result.tokens)


def test_str_15_streaming_is_real(server):
    call = server.stub.Generate(request("s", max_tokens=100))
    next(call)
    assert load(server).running_requests == 1, "the first token comes before the last is made"
    assert len(list(call)) == 100


def test_str_16_text_is_cut_at_characters_only(stub):
    result = run(stub, request("u", max_tokens=5))
    assert result.text == "éé\ufffd"
    assert all(output.text in ("", "é", "\ufffd") for output in result.tokens)


def test_str_17_the_text_is_what_detokenize_says(server):
    result = run(server.stub, request("hello", max_tokens=30, sampling__seed=4, stopping__ignore_eos=True))
    text = server.tokenizer.Detokenize(tok.DetokenizeRequest(model="scripted", token_ids=result.ids)).text
    assert result.text == text


def test_use_02_a_stop_token_that_is_not_sent_counts(stub):
    result = run(stub, request(max_tokens=20, stopping__conditions=[stop_id(7)]))
    assert result.usage.completion_tokens == len(result.ids) + 1


# ---- ERR -----------------------------------------------------------------------------------------


def test_err_02_05_08_use_01_a_failure_after_acceptance_is_one_terminal_error(stub):
    call = stub.Generate(request("n", max_tokens=5))
    responses = list(call)
    assert call.code() is grpc.StatusCode.OK
    assert [response.WhichOneof("event") for response in responses] == ["error"]
    error = responses[0].error
    assert error.code == pb.ERROR_CODE_INTERNAL and error.message and not error.HasField("retry_after_ms")
    assert responses[0].HasField("usage") and responses[0].usage.prompt_tokens == 1


def test_err_03_bytes_that_are_no_message_are_an_invalid_argument(server):
    for service, module in (("OpenEngine", pb), ("OpenEngineTokenizer", tok)):
        for method in module.DESCRIPTOR.services_by_name[service].methods:
            kind = server.channel.unary_stream if method.server_streaming else server.channel.unary_unary
            raw = kind(f"/openengine.v1.{service}/{method.name}")
            assert status(lambda raw=raw: raw(b"\xff\xff\xff")) is INVALID, method.name


def test_err_07_details_are_namespaced(stub):
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request([1] * 2048)))
    error = pb.EngineError.FromString(dict(caught.value.trailing_metadata())["openengine-error-bin"])
    assert error.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert set(error.details) == {"openengine.prompt_tokens", "openengine.max_model_len"}


def test_gen_07_a_prompt_of_ten_megabytes_is_refused_and_holds_up_no_stream(stub):
    gaps = []

    def follow():
        last = time.monotonic()
        for _response in stub.Generate(request("s", max_tokens=150)):
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    thread = threading.Thread(target=follow)
    thread.start()
    assert status(lambda: stub.Generate(request("word " * 2_000_000, request_id=fresh_id()))) is INVALID
    thread.join()
    assert max(gaps[1:]) < 2.0
