"""Over the wire and in process, the same: tokens, scores, events; and the grammar of every stream of a randomized run.

`pytest -m soak` runs 2,000 random requests.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import grpc
import pytest

from openengine import (
    CandidateTokenSelection,
    DuplicateRequest,
    Engine,
    GenerateRequest,
    InvalidArgument,
    KvSessionRef,
    OpenEngineError,
    SamplingParams,
)
from openengine.rpc import Client, openengine_pb2_grpc
from openengine.rpc import openengine_pb2 as pb
from openengine.rpc.convert import from_proto
from tests.checkpoints import write_checkpoint
from tests.rpc.scripted_server import VOCAB_SIZE
from tests.rpc.serving import is_idle, load, running
from tests.stream_grammar import check_stream
from tests.waiting import wait_until

HOT = SamplingParams(temperature=-1.0)
OPTIONS = {"max_num_seqs": 8, "num_kv_blocks": 64, "block_size": 32}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same checkpoint in this process and behind a server in another."""
    directory = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    flags = [text for name, value in OPTIONS.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    with running("-m", "openengine.rpc", "--model", str(directory), "--port", "0", *flags) as server:
        with Engine(str(directory), num_threads=1, **OPTIONS) as engine, Client(server.target) as client:
            yield engine, client


CASES = {
    "greedy": ("Hello world", {"temperature": 0, "max_tokens": 24}),
    "seeded": ("the quick brown", {"seed": 11, "max_tokens": 24}),
    "several": ("how are you", {"seed": 3, "num_sequences": 3, "max_tokens": 12}),
    "logprobs": ([5, 9, 77, 300], {"temperature": 0, "max_tokens": 6, "logprobs": 4, "prompt_logprobs": 3}),
    "all": ("one", {"temperature": 0, "max_tokens": 2, "output_candidates": CandidateTokenSelection(top_n=256)}),
    "ids": ("two", {"max_tokens": 3, "seed": 1, "output_candidates": CandidateTokenSelection(token_ids=(3, 1, 2))}),
    "truncated": ("three four", {"seed": 5, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "max_tokens": 16}),
    "penalties": (
        "five five five",
        {"temperature": 0, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "max_tokens": 16},
    ),
    "stops": ("jumps over", {"seed": 9, "stop": ["e", "oo"], "stop_token_ids": [40], "max_tokens": 60}),
    "kept stops": ("jumps over", {"seed": 9, "stop": ["e", "a"], "include_stop_in_output": True, "max_tokens": 60}),
    "no tokens": ("nothing", {"max_tokens": 0}),
    "to the end": ("x", {"ignore_eos": True, "seed": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_events_over_the_wire_are_those_in_process(pair, name):
    engine, client = pair
    prompt, options = CASES[name]
    local, remote = (merged(list(side.stream(prompt, **options))) for side in (engine, client))
    assert len(local) == len(remote)
    for one, other in zip(local, remote, strict=True):
        assert one == other


def merged(events):
    """Events with plain tuples in place of what is made on demand."""

    def token(info):
        return (info.token_id, info.token, info.logprob, info.rank, tuple(info.candidates))

    return [
        (type(event).__name__, getattr(event, "output_index", None), event.text)
        + (tuple(map(token, getattr(event, "tokens", ()))),)
        + tuple(getattr(event, name, None) for name in ("reason", "message", "stop_match", "usage"))
        for event in events
    ]


def test_results_of_a_batch_are_equal_token_for_token(pair):
    engine, client = pair
    prompts = [f"prompt number {i}" for i in range(12)]
    options = {"seed": 4, "max_tokens": 12, "num_sequences": 2}
    local, remote = engine.generate(prompts, progress=False, **options), client.generate(prompts, **options)
    assert [[o.token_ids for o in r.outputs] for r in local] == [[o.token_ids for o in r.outputs] for r in remote]
    assert [[(o.text, o.finish_reason, o.stop_match) for o in r.outputs] for r in local] == [
        [(o.text, o.finish_reason, o.stop_match) for o in r.outputs] for r in remote
    ]


def test_the_async_methods_give_the_same(pair):
    engine, client = pair

    async def ask(side):
        one, many = await asyncio.gather(
            side.agenerate("a", temperature=0, max_tokens=5), side.agenerate(["b", "c"], temperature=0, max_tokens=5)
        )
        texts = [event.text async for event in side.astream("d", temperature=0, max_tokens=5)]
        return one.text, [result.text for result in many], "".join(texts)

    assert asyncio.run(ask(client)) == asyncio.run(ask(engine))


def test_what_needs_no_generation_is_equal_too(pair):
    engine, client = pair
    assert client.tokenize("Hello wörld") == engine.tokenize("Hello wörld")
    assert client.detokenize([5, 80, 90]) == engine.detokenize([5, 80, 90])
    assert client.tokenizer_info() == engine.tokenizer_info()
    assert client.cache_key_spec() == engine.cache_key_spec()
    assert client.cache_keys(text="Hello" * 30) == engine.cache_keys(text="Hello" * 30)
    assert client.model_info() == engine.model_info()
    assert list(client.tokenizer_artifacts()) == list(engine.tokenizer_artifacts())


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("x", {"temperature": -1.0}),
        ("x", {"model": "nobody"}),
        ("x", {"lora_name": "a"}),
        ([0] * 300, {}),
        ("x", {"session": KvSessionRef(session_id="s")}),
    ],
)
def test_refusals_are_the_same_class_with_the_same_message(pair, prompt, options):
    errors = []
    for side in pair:
        with pytest.raises(OpenEngineError) as caught:
            side.submit(prompt, **options)
        errors.append((caught.value.code, caught.value.grpc_status, caught.value.message))
    assert errors[0][:2] == errors[1][:2] and errors[0][2] == errors[1][2]


def test_what_cannot_be_tokenized_is_refused_by_both(pair):
    for side in pair:
        for wrong in (lambda: side.tokenize(b"x"), lambda: side.tokenize(None)):
            with pytest.raises(InvalidArgument, match="text"):
                wrong()
        for wrong in (None, 5, "ab"):
            with pytest.raises(InvalidArgument, match="token_ids must be a flat sequence"):
                side.detokenize(wrong)
        with pytest.raises(InvalidArgument, match="add_special_tokens"):
            side.tokenize("x", add_special_tokens="x")
        with pytest.raises(InvalidArgument, match="names must be a sequence"):
            side.tokenizer_artifacts("tokenizer.json")


def test_gen_07_a_prompt_of_ten_megabytes_is_refused_by_its_length_alone(pair):
    prompt, errors, started = "word " * 2_000_000, [], time.monotonic()
    for side in pair:
        for options in ({}, {"prompt_logprobs": 5}):
            with pytest.raises(InvalidArgument, match="at least") as caught:
                side.submit(prompt, **options)
            errors.append((caught.value.message, caught.value.details))
    assert all(error == errors[0] for error in errors) and errors[0][1]["prompt_tokens_at_least"] > 256
    assert time.monotonic() - started < 2.0, "it takes longer to tokenize"


def test_errors_in_a_batch_stand_in_their_place_and_name_their_item(pair):
    for side in pair:
        results = side.generate(["good", [0] * 300, "good", []], max_tokens=2, on_error="return", progress=False)
        assert [type(r.error) for r in results] == [type(None), InvalidArgument, type(None), InvalidArgument]
        with pytest.raises(InvalidArgument, match="item 1 of 2"):
            side.generate(["good", [0] * 300], max_tokens=2)
        with pytest.raises(InvalidArgument, match="item 1 of 2: temperature"):
            side.generate([GenerateRequest(prompt="a"), GenerateRequest(prompt="b", sampling=HOT)])
        with pytest.raises(DuplicateRequest, match="item 1 of 2"):
            side.generate([GenerateRequest(prompt="a", request_id="x"), GenerateRequest(prompt="b", request_id="x")])
        for wrong in ({"on_error": "ignore"}, {"temprature": 1}, {"request_id": "one"}):
            with pytest.raises(InvalidArgument):
                side.generate(["a", "b"], **wrong)
        with pytest.raises(InvalidArgument):
            side.as_completed("one prompt")


def test_results_have_usage_timing_and_what_was_asked_for(pair):
    for side in pair:
        result = side.generate("Hello", seed=1, max_tokens=5, num_sequences=2, stop="zzz")
        timing = result.timing
        assert 0 <= timing.queue_s <= timing.time_to_first_token_s <= timing.total_s and timing.time_per_token_s > 0
        assert result.usage.completion_tokens == 10 and result.sampling.num_sequences == 2
        assert result.stopping.max_tokens == 5 and [o.message for o in result.outputs] == ["max_tokens 5 reached"] * 2
        assert set(result.to_dict()) >= {"text", "prompt_tokens", "total_s"}


CHAT = [{"role": "user", "content": "Hello"}]


def test_a_chat_is_rendered_with_the_servers_template(pair):
    engine, client = pair
    assert client.apply_chat_template(CHAT) == engine.apply_chat_template(CHAT)
    options = {"temperature": 0, "max_tokens": 6}
    assert client.chat(CHAT, **options).token_ids == engine.chat(CHAT, **options).token_ids
    with client.stream(messages=CHAT, **options) as events:
        assert "".join(event.text for event in events) == engine.chat(CHAT, **options).text
    for side in pair:
        with pytest.raises(InvalidArgument, match="not both"):
            side.generate("a", messages=CHAT)


def test_smollm2_answers_the_same_over_the_wire(smollm2):
    prompts = ["The capital of France is", "One, two, three,", "Once upon a time"]
    options = {"temperature": 0, "max_tokens": 12, "logprobs": 2}
    flags = ("--num-threads", "1", "--max-model-len", "256", "--num-kv-blocks", "64")
    with (
        running("-m", "openengine.rpc", "--model", str(smollm2), "--port", "0", *flags) as server,
        Client(server.target) as client,
    ):
        remote = [client.generate(prompt, **options) for prompt in prompts]
    with Engine(str(smollm2), num_threads=1, max_model_len=256, num_kv_blocks=64, progress=False) as engine:
        local = [engine.generate(prompt, **options) for prompt in prompts]
    for one, other in zip(local, remote, strict=True):
        assert other.token_ids == one.token_ids and other.text == one.text and other.usage == one.usage
        assert [t.logprob for t in other.tokens] == [t.logprob for t in one.tokens]
        assert [tuple(t.candidates) for t in other.tokens] == [tuple(t.candidates) for t in one.tokens]


# ---- the randomized run --------------------------------------------------------------------------


def random_request(rng: random.Random, number: int) -> tuple[pb.GenerateRequest, bool]:
    """A request with any options, and whether it is invalid."""
    message = pb.GenerateRequest(request_id=f"random-{number}", model="scripted")
    if rng.random() < 0.7:
        message.prompt = rng.choice("csuehxyz") + "".join(rng.choice("abcdefgh") for _ in range(rng.randrange(30)))
    else:
        message.token_ids.ids.extend([rng.randrange(1, 27) for _ in range(rng.randrange(1, 40))])
    sampling, stopping, response = message.sampling, message.stopping, message.response
    stopping.max_tokens = rng.choice([0, 1, 3, 10, 40, 80])
    for name, values in {
        "temperature": (0.0, 0.7, 2.0),
        "top_p": (0.5, 1.0),
        "top_k": (-1, 0, 1, 5),
        "min_p": (0.0, 0.1),
        "frequency_penalty": (-1.0, 1.0),
        "presence_penalty": (-1.0, 1.0),
        "repetition_penalty": (0.8, 1.5),
        "seed": (0, 1, 2**64 - 1),
        "num_sequences": (1, 2, 4),
    }.items():
        if rng.random() < 0.3:
            setattr(sampling, name, rng.choice(values))
    if rng.random() < 0.3:
        stopping.conditions.add(stop_text=rng.choice(["a", "de", "fgh", "é"]))
    if rng.random() < 0.3:
        stopping.conditions.add(stop_token_id=rng.randrange(VOCAB_SIZE))
    if rng.random() < 0.2:
        stopping.min_tokens = min(2, stopping.max_tokens)
    for name in ("ignore_eos", "include_stop_in_output"):
        if rng.random() < 0.3:
            setattr(stopping, name, rng.random() < 0.5)
    if rng.random() < 0.3:
        response.return_prompt_logprobs = True
    if rng.random() < 0.3:
        response.output_candidates.top_n = rng.choice([0, 1, 5, VOCAB_SIZE])
    elif rng.random() < 0.1:
        response.output_candidates.all.SetInParent()
    if rng.random() < 0.2:
        message.kv.cache_salt = rng.choice(["one", "two"])
    if rng.random() < 0.2:
        message.kv.bypass_prefix_cache = rng.random() < 0.5
    if rng.random() < 0.3:
        message.priority = rng.randrange(-3, 4)
    is_invalid = rng.random() < 0.1
    if is_invalid:
        rng.choice(
            [
                lambda: setattr(sampling, "temperature", float("nan")),
                lambda: setattr(sampling, "num_sequences", 0),
                lambda: setattr(message, "model", "nobody"),
                lambda: setattr(message, "lora_name", "none"),
                lambda: stopping.conditions.add(),
                lambda: setattr(message.kv, "cache_salt", ""),
            ]
        )()
    return message, is_invalid


@pytest.mark.soak
def test_every_stream_of_a_randomized_run_keeps_the_grammar_and_nothing_is_left(server, request):
    count = 2000 if request.config.option.markexpr == "soak" else 200
    rng = random.Random(2026)
    wait_until(lambda: is_idle(server))
    outcomes: Counter[str] = Counter()

    async def one(stub, number, window):
        message, is_invalid = random_request(rng, number)
        fate = "run" if is_invalid else rng.choices(["run", "abort", "cancel", "deadline"], [8, 1, 1, 1])[0]
        async with window:
            call = stub.Generate(message, timeout=rng.uniform(0.005, 0.2) if fate == "deadline" else 60)
            events, failed = [], False
            stop_at = rng.randrange(1, 6)
            try:
                async for response in call:
                    assert response.request_id == message.request_id, "STR-02"
                    assert not failed, "ERR-08"
                    try:
                        events.append(from_proto(response))
                    except OpenEngineError as exc:
                        assert exc.code == "INTERNAL" and response.HasField("usage"), "the prompt begins with an n"
                        failed = True
                    if len(events) == stop_at and fate == "cancel":
                        call.cancel()
                    if len(events) == stop_at and fate == "abort":
                        await stub.Abort(pb.AbortRequest(request_id=message.request_id))
            except asyncio.CancelledError:
                if fate != "cancel":
                    raise  # another request failed, and its error is the one to see
                outcomes["cancelled"] += 1
                return
            except grpc.RpcError as exc:
                outcomes[exc.code().name] += 1
                if is_invalid:
                    assert not events and exc.code().name in ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION"), (
                        exc
                    )
                elif exc.code().name == "RESOURCE_EXHAUSTED":
                    # The client is done with a cancelled request before the server is: until then it fills the queue.
                    assert not events and "max_queued_requests" in exc.details(), exc
                else:
                    assert exc.code().name == {"deadline": "DEADLINE_EXCEEDED", "cancel": "CANCELLED"}.get(fate), exc
                return
        assert not is_invalid
        outcomes["error" if failed else "OK"] += 1
        if failed:
            return
        check_stream(events, message.sampling.num_sequences if message.sampling.HasField("num_sequences") else 1)

    async def main():
        window = asyncio.Semaphore(16)
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub = openengine_pb2_grpc.OpenEngineStub(channel)
            await asyncio.gather(*(one(stub, number, window) for number in range(count)))

    asyncio.run(main())
    assert outcomes["OK"] > count / 2 and outcomes["INVALID_ARGUMENT"], outcomes
    wait_until(lambda: is_idle(server))
    assert load(server).used_kv_blocks == 0, "used blocks are cached blocks only, which count as free"
