"""The client's embed, classify and score give what the engine gives, and end at the server when they end early."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from openengine import (
    Cancelled,
    ClassificationOutput,
    EmbeddingOutput,
    InvalidArgument,
    PreconditionFailed,
    UnsupportedFeature,
    UnsupportedTask,
)
from openengine.rpc import Client
from tests.rpc.serving import is_idle
from tests.rpc.task_serving import (
    LONG,
)
from tests.task_models import TEXTS
from tests.waiting import wait_until


def test_the_client_gives_what_the_engine_gives(task_servers):
    with Client(task_servers["embedding"].target) as client:
        texts = [*TEXTS, [5, 6, 7], *("word " * (index % 9) for index in range(700))]
        mine, theirs = (
            client.embed(texts, normalize=True),
            task_servers["embedding"].engine.embed(texts, normalize=True),
        )
        assert np.abs(mine.numpy() - theirs.numpy()).max() < 1e-5 and len(mine) == len(texts)
        assert [output.input_index for output in mine] == list(range(len(texts)))
        assert mine.usage == theirs.usage
        for one in ("a", [5, 6, 7]):
            for output in (client.embed(one), asyncio.run(client.aembed(one))):
                assert isinstance(output, EmbeddingOutput)
                assert np.abs(output.numpy() - task_servers["embedding"].engine.embed(one).numpy()).max() < 1e-5
        assert client.embed(["a"]).numpy().shape == (1, 64)
        again = asyncio.run(client.aembed(texts, normalize=True))
        assert np.abs(again.numpy() - theirs.numpy()).max() < 1e-5
        with pytest.raises(UnsupportedTask, match="it can embed"):
            client.classify("a")
        with pytest.raises(UnsupportedFeature, match="truncate"):
            client.embed("a", truncate="right")
        with pytest.raises(InvalidArgument, match="did you mean 'normalize'"):
            client.embed("a", normalise=True)
        with pytest.raises(InvalidArgument, match=r"inputs\[1\]"):
            client.embed(["a", "word " * 300])


def test_the_client_splits_long_lists_of_candidates_and_joins_them(task_servers):
    documents = [f"{word} {index}" for index in range(120) for word in ("one", "two", "three", "four", "five")]
    with Client(task_servers["cross"].target) as client:
        mine = client.score(["how", "who"], [documents, "x"])
        theirs = task_servers["cross"].engine.score(["how", "who"], [documents, "x"])
        assert np.abs(mine.scores - theirs.scores).max() < 1e-5
        assert [len(g.candidates) for g in mine.groups] == [600, 1]
        assert [c.candidate_index for c in mine.groups[0].candidates] == list(range(600))
        assert [g.group_index for g in mine.groups] == [0, 1]
    with Client(task_servers["causal"].target) as client:
        named = client.score("how", ["a", "b"], labels=["a", "b"])
        assert named.label_token_ids == tuple(
            task_servers["causal"].engine.tokenize(t, add_special_tokens=False)[0] for t in "ab"
        )
        assert asyncio.run(client.ascore("how", ["a"], label_token_ids=[5])).scores.shape == (1,)
    with Client(task_servers["classifier"].target) as client:
        assert client.classify(TEXTS).labels == task_servers["classifier"].engine.classify(TEXTS).labels
        assert len(asyncio.run(client.aclassify(["a"]))) == 1
        for output in (client.classify("a"), asyncio.run(client.aclassify("a"))):
            assert isinstance(output, ClassificationOutput) and output.numpy().shape == (3,)


def test_an_interrupted_or_cancelled_call_of_the_client_ends_at_the_server(embedding):
    texts = [LONG] * 6000
    with Client(embedding.target) as client:

        async def main() -> None:
            task = asyncio.create_task(client.aembed(texts))
            while is_idle(embedding):
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        wait_until(lambda: is_idle(embedding), timeout=10)
        failures = []

        def run() -> None:
            try:
                client.embed(texts)
            except (Cancelled, PreconditionFailed) as exc:  # between two parts the next one finds the client closed
                failures.append(exc)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        wait_until(lambda: not is_idle(embedding))
        client.close()
        thread.join(5)
        assert failures and not thread.is_alive()
    wait_until(lambda: is_idle(embedding), timeout=10)
