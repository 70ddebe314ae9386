"""The real models against transformers, on the same GGUF weights in float32: tokens, logprobs and token ids.

transformers does not generate here. It reads each prompt with the engine's output after it, in one forward pass, and
says at every position which token is best, by what margin, and how likely the next one was. That the engine's tokens
are the best ones, given the tokens before them, is what greedy decoding of the reference would give.

Two programs that add the same numbers in another order may part where two tokens are as good as each other, so another
token counts as wrong only where the reference's two best ones are more than `TOLERANCE` apart.

`pytest -m soak` runs every prompt in every way; by default the slow ways run some of them.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from openengine import Engine, GenerationResult

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 64
TOLERANCE = 1e-3
BLOCK_SIZE = 32
SMALL_BUDGET = 64

_CARGO = ("oranges", "copper wire", "clay pipes", "books", "olive oil", "wool", "window glass", "seed potatoes")
_PORTS = ("Porto", "Riga", "Tunis", "Bergen", "Izmir", "Gdansk", "Palermo")
LEDGER = "Harbour ledger\n\n" + "".join(
    f"Day {day}: the ship from {_PORTS[day * day % 7]} unloaded {day * 37 % 91 + 5} crates of {_CARGO[day * 5 % 8]}.\n"
    for day in range(1, 36)
)

LETTER = (
    "Dear Ms Okafor,\n\nthank you for your letter of 3 May. I have read it with care, and I have shown it to the two "
    "colleagues who run the night shift. Both agree that the noise began in the week when the new pump was fitted, and "
    "that it is loudest between one and four in the morning. We propose three steps. First,"
)
STORY = (
    "The lighthouse keeper counted the steps as he climbed: 199, 200, 201. Every evening for thirty years he had lit "
    "the lamp, written the weather into the log, and watched the ferry cross the strait. Tonight the ferry was late. "
    "The wind had turned to the north, the radio gave nothing but static, and on the black water, where its lights "
    "should have been, he saw instead a single green lantern, moving against the current. He put down his cup, took "
    "the brass telescope from its hook, and leaned into the glass until his breath clouded it. Then he saw"
)

PROMPTS: tuple[str | list[int], ...] = (
    [2],  # one token, whatever a tokenizer puts before a text
    "The",
    "Once upon a time",
    "The capital of France is",
    "Water boils at",
    "To be or not to be, that is",
    "Q: What colour is the sky on a clear day?\nA:",
    "A short list of fruit:\n- apple\n- pear\n-",
    "1, 2, 3, 4, 5,",
    "2 + 2 = 4\n3 + 3 = 6\n12 + 30 =",
    "0x1F 1e-10 1,000,000.00 50% -7",
    "Il était une fois, dans une forêt lointaine,",
    "Der schnelle braune Fuchs springt über",
    "La ciudad más grande de España es",
    LEDGER,
    "Москва — столица",
    "今日はとても天気がいいので、",
    "北京是中国的首都,它",
    "مرحبا، كيف حالك",
    "नमस्ते, आप कैसे",
    "안녕하세요. 저는",
    "Emoji: 😀👩\u200d👩\u200d👧🇩🇪 naïve café \u00a0½ ﬁ",
    "  leading spaces,\ttabs\t\tand\n\n\nempty lines \n",
    '{"name": "Ada", "born": 1815, "tags": ["maths", "engines"],',
    "<html>\n  <body>\n    <h1>Title</h1>\n    <p class='x'>A &amp; B</p>\n",
    "SELECT name, COUNT(*) FROM ships WHERE port = 'Riga' GROUP BY",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf(",
    "| city | people |\n|------|--------|\n| Riga | 605802 |\n| Oslo | 717710 |\n| Bergen |",
    "<|im_start|>user\nName three rivers of Africa.<|im_end|>\n<|im_start|>assistant\n",
    LETTER,
    STORY,
)
LONGEST = PROMPTS.index(LEDGER)


@dataclass(frozen=True)
class Model:
    """A real model, and which prompts it runs a second time, in batches or alone."""

    path: Path
    few: tuple[int, ...]
    alone: tuple[int, ...]

    @property
    def has_chat_template(self) -> bool:
        return "SmolLM2" in self.path.name


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest, smollm2: Path, gemma3: Path) -> Model:
    every = tuple(range(len(PROMPTS)))
    some = tuple(sorted({LONGEST, *every[::4]}))
    in_full = request.config.option.markexpr == "soak"
    return Model(
        path={"smollm2": smollm2, "gemma3": gemma3}[request.param],
        few=every if in_full else some,
        alone=every if in_full else (0, LONGEST),
    )


# ---- the engine ----------------------------------------------------------------------------------


@dataclass
class Run:
    """Results by prompt, and what the steps that made them looked like."""

    results: dict[int, GenerationResult]
    num_sequences: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_preempted: int = 0


def run(engine: Engine, indices: Sequence[int], **options) -> Run:
    """Generate greedily for some of the prompts in one batch."""
    record = Run({})
    scheduler = engine._loop._scheduler
    schedule = type(scheduler).schedule

    def recorded():
        plan = schedule(scheduler)
        record.num_sequences.append(len(plan.scheduled))
        record.num_tokens.append(plan.num_tokens)
        record.num_preempted += len(plan.preempted)
        return plan

    scheduler.schedule = recorded
    options = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": True} | options
    results = engine.generate([PROMPTS[index] for index in indices], progress=False, **options)
    record.results = dict(zip(indices, results, strict=True))
    return record


def open_engine(model: Model, **options) -> Engine:
    options = {"dtype": "float32", "device": "cpu", "block_size": BLOCK_SIZE, "num_kv_blocks": 256} | options
    return Engine(model.path, max_model_len=1024, progress=False, **options)


@dataclass(frozen=True)
class Runs:
    """What one engine did: every prompt in one batch, some again, some alone; and its token ids."""

    cold: Run
    warm: Run
    alone: Run
    token_ids: list[list[int]]
    chat_ids: list[int] | None


CHAT = [
    {"role": "user", "content": "What is 7 times 6?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "  And\n\nhalf of it? 😀"},
]


@pytest.fixture(scope="module")
def runs(model: Model) -> Runs:
    with open_engine(model) as engine:
        cold = run(engine, range(len(PROMPTS)), prompt_logprobs=True)
        warm = run(engine, model.few)
        engine.clear_prefix_cache()
        alone = Run({})
        for index in model.alone:
            alone.results |= run(engine, [index]).results
        token_ids = [engine.tokenize(prompt) for prompt in PROMPTS if isinstance(prompt, str)]
        chat_ids = engine.apply_chat_template(CHAT) if model.has_chat_template else None
    return Runs(cold, warm, alone, token_ids, chat_ids)


# ---- the reference -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """What the reference says of a prompt of P tokens and the engine's N tokens after it."""

    token_ids: np.ndarray  # [N], the tokens that every position was given those before of
    best_ids: np.ndarray  # [N]
    margins: np.ndarray  # [N], between the two best logits
    logprobs: np.ndarray  # [N]
    prompt_logprobs: np.ndarray  # [P - 1], of the second token and later


@dataclass(frozen=True)
class Reference:
    scores: list[Scores]
    token_ids: list[list[int]]
    chat_ids: list[int] | None


@pytest.fixture(scope="module")
def reference(model: Model, runs: Runs) -> Reference:
    gguf = pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    source = {"pretrained_model_name_or_path": model.path.parent, "gguf_file": model.path.name}
    with pytest.MonkeyPatch.context() as patch:
        # transformers parses the file three times, and each takes its reader ten seconds of a large vocabulary.
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        hf = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    chat_ids = None
    if model.has_chat_template:
        _restore_digits(tokenizer)
        chat_ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    token_ids = [tokenizer(prompt).input_ids for prompt in PROMPTS if isinstance(prompt, str)]
    with torch.inference_mode():
        scores = [_score(hf, result) for result in runs.cold.results.values()]
    del hf
    gc.collect()
    return Reference(scores, token_ids, chat_ids)


def _restore_digits(tokenizer) -> None:
    """Split numbers into digits, as this model's own tokenizer.json does.

    In a GGUF file, `tokenizer.ggml.pre` says so, which transformers does not read.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _score(hf, result: GenerationResult) -> Scores:
    prompt_ids, token_ids = [token.token_id for token in result.prompt], result.token_ids
    all_ids = torch.tensor(prompt_ids + token_ids)
    logits = hf(all_ids[None, :-1]).logits[0]
    logprobs = torch.cat(
        [
            rows.gather(1, ids[:, None])[:, 0] - rows.logsumexp(1)
            for rows, ids in zip(logits.split(64), all_ids[1:].split(64), strict=True)
        ]
    )
    best = logits[-len(token_ids) :].topk(2)
    num_prompt = len(prompt_ids) - 1
    return Scores(
        token_ids=np.array(token_ids),
        best_ids=best.indices[:, 0].numpy(),
        margins=(best.values[:, 0] - best.values[:, 1]).numpy(),
        logprobs=logprobs[num_prompt:].numpy(),
        prompt_logprobs=logprobs[:num_prompt].numpy(),
    )


def assert_greedy(results: dict[int, GenerationResult], reference: Reference) -> None:
    """Every token is the reference's best and as likely as there, up to where a tie sends it another way."""
    num_compared = 0
    for index, result in results.items():
        scores = reference.scores[index]
        assert len(result.token_ids) == NUM_TOKENS
        for position, (token_id, logprob) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
            place = f"prompt {index}, output token {position}"
            if token_id != scores.best_ids[position]:
                margin = scores.margins[position]
                assert margin <= TOLERANCE, f"{place}: {token_id}, not {scores.best_ids[position]} by {margin}"
            if token_id != scores.token_ids[position]:
                break
            assert logprob == pytest.approx(scores.logprobs[position], abs=TOLERANCE), place
            num_compared += 1
    assert num_compared >= 0.9 * NUM_TOKENS * len(results), "so many ties cannot be"


def assert_prompts_agree(results: dict[int, GenerationResult], reference: Reference) -> None:
    for index, result in results.items():
        assert result.prompt[0].logprob is None
        logprobs = np.array([token.logprob for token in result.prompt[1:]], dtype=np.float32)
        np.testing.assert_allclose(
            logprobs, reference.scores[index].prompt_logprobs, rtol=0, atol=TOLERANCE, err_msg=f"prompt {index}"
        )


# ---- text ----------------------------------------------------------------------------------------


def test_token_ids_of_prompts_are_those_of_transformers(runs: Runs, reference: Reference):
    assert runs.token_ids == reference.token_ids


def test_a_rendered_chat_has_the_token_ids_of_transformers(runs: Runs, reference: Reference):
    if runs.chat_ids is None:
        pytest.skip("this model has no chat template")
    assert runs.chat_ids == reference.chat_ids


def test_prompts_have_one_token_to_more_than_a_window_of_512(runs: Runs):
    lengths = [len(result.prompt) for result in runs.cold.results.values()]
    assert len(lengths) >= 30
    assert min(lengths) == 1 and 650 < max(lengths) < 850


# ---- greedy decoding -----------------------------------------------------------------------------


def test_tokens_of_one_batch_are_those_of_transformers(runs: Runs, reference: Reference):
    assert max(runs.cold.num_sequences) == len(PROMPTS)
    assert_greedy(runs.cold.results, reference)


def test_prompt_logprobs_of_one_batch_are_those_of_transformers(runs: Runs, reference: Reference):
    assert_prompts_agree(runs.cold.results, reference)


@pytest.mark.soak
def test_tokens_of_a_prompt_alone_are_those_of_transformers(runs: Runs, reference: Reference):
    assert_greedy(runs.alone.results, reference)


@pytest.mark.soak
def test_tokens_after_a_cached_prompt_are_those_of_transformers(runs: Runs, reference: Reference):
    for index, result in runs.warm.results.items():
        num_prompt = len(runs.cold.results[index].prompt)
        assert runs.cold.results[index].usage.cached_prompt_tokens == 0
        assert result.usage.cached_prompt_tokens == (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert runs.warm.results[LONGEST].usage.cached_prompt_tokens > 512
    assert_greedy(runs.warm.results, reference)


@pytest.mark.soak
def test_tokens_of_prompts_in_chunks_are_those_of_transformers(model: Model, reference: Reference):
    with open_engine(model, max_num_batched_tokens=SMALL_BUDGET) as engine:
        chunked = run(engine, model.few, prompt_logprobs=True)
    assert max(chunked.num_tokens) <= SMALL_BUDGET
    assert_greedy(chunked.results, reference)
    assert_prompts_agree(chunked.results, reference)


@pytest.mark.soak
def test_tokens_of_preempted_sequences_are_those_of_transformers(model: Model, runs: Runs, reference: Reference):
    # Room for all prompts, so that they start together, and not for their outputs.
    num_blocks = sum(-(-len(runs.cold.results[index].prompt) // BLOCK_SIZE) for index in model.few)
    with open_engine(model, num_kv_blocks=num_blocks) as engine:
        preempted = run(engine, model.few)
    assert preempted.num_preempted > 0
    assert_greedy(preempted.results, reference)
