"""all-MiniLM-L6-v2 against sentence-transformers, both in float32: texts of many languages and lengths, their tokens too.

`pytest -m soak` compares 500 texts; by default there are 150 of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from openengine import Engine

pytestmark = pytest.mark.timeout(900)

MAX_LENGTH = 512  # of the model's positions; its files ask for 256
NUM_TEXTS, NUM_BY_DEFAULT = 500, 150

ODD = (
    "",
    " ",
    "\t\n \r",
    "\u200b",
    "\ufeff\u200e\u202e",
    "\x00\x01\x7f",
    ".",
    "a",
    "?!…—",
    "\u0301",
    "e\u0301 é É ﬁ ½ Ⅷ",
    "İstanbul STRASSE Straße ΣΑΣ ς",
    "👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🇩🇪 👍🏽",
    "\ud7ff \ue000 \ufffd \ufdd0 \U0010ffff",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒽ℯ𝓁𝓁ℴ ＡＢＣ１２３",
    "zero\u200bwidth soft\u00adhyphen no\u00a0break",
    "[CLS] and [SEP] and [MASK] and [PAD]",
    "[SEP]",
    "##ing ##ed un##able",
    "x" * 150,
    "a.b-c_d/e\\f@g#h$i%j^k&l*m",
    "0x1F 1e-10 1,000,000.00 50% -7 ٣٤٥ 六",
    "<p class='x'>A &amp; B</p>\u2028\u2029\x85",
    "Z\u0351\u036b\u0343a\u0352\u0346l\u0351g\u0301\u0344o\u0305",
)
LANGUAGES = (
    "the harbour lay quiet while seven ships waited for the tide and their captains argued about prices",
    "der schnelle braune Fuchs überspringt gemächlich den faulen Hund während Köche Äpfel schälen",
    "il était une fois dans une forêt lointaine un garçon très naïf qui aimait les gâteaux de Noël",
    "la ciudad más grande de España está llena de niños, señores y pingüinos ¿verdad? ¡sí!",
    "Москва столица России где много улиц площадей и старых домов у широкой реки",
    "το πρωί πίνω καφέ και διαβάζω την εφημερίδα κοντά στη θάλασσα",
    "مرحبا كيف حالك اليوم ذهبت إلى السوق واشتريت بعض الفاكهة الطازجة",
    "שלום מה שלומך היום הלכתי לשוק וקניתי פירות טריים",
    "नमस्ते आप कैसे हैं मैं आज बाज़ार गया और ताज़े फल लाया",
    "สวัสดี ครับ วันนี้ อากาศ ดี มาก เรา ไป ตลาด กัน",
    "안녕하세요 저는 오늘 시장에 가서 신선한 과일을 샀습니다",
    "北 京 是 中 国 的 首 都 也 是 历 史 悠 久 的 城 市",
    "今日は とても 天気 が いい ので 散歩 に 行き ましょう",
    "tiếng Việt có nhiều dấu và thanh điệu khác nhau",
    "def fibonacci(n: int) -> int: return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "🦊 🚀 ☃️ ♞ ∑ ∫ ≠ → ½ € ™ ※",
)


def draw_texts(engine: Engine) -> list[str]:
    """`NUM_TEXTS` texts: the odd ones, then lengths from 1 to 512 tokens, as many short as long ones."""
    draw = random.Random(6)
    words = [language.split() for language in LANGUAGES]
    lens = {word: len(engine.tokenize(word)) - 2 for language in words for word in language}
    texts = list(ODD)
    while len(texts) < NUM_TEXTS:
        wanted = 2 ** draw.uniform(0, 9.2) - 2
        spoken = draw.sample(words, draw.choice((1, 1, 1, 2, 4)))
        chosen = [draw.choice(spoken[0])]
        while sum(map(lens.get, chosen)) < wanted:
            chosen.append(draw.choice(draw.choice(spoken)))
        texts.append(" ".join(chosen))
    return texts


@dataclass(frozen=True)
class Both:
    """An engine, the library's model, and texts for both, with each one's vector and those of its tokens by the library."""

    engine: Engine
    texts: list[str]
    vectors: np.ndarray
    tokens: list[np.ndarray]


@pytest.fixture(scope="module")
def both(minilm: Path, request: pytest.FixtureRequest) -> Iterator[Both]:
    library = pytest.importorskip("sentence_transformers")
    in_full = request.config.option.markexpr == "soak"
    reference = library.SentenceTransformer(str(minilm), device="cpu")
    reference.max_seq_length = MAX_LENGTH
    with Engine(minilm, dtype="float32", max_model_len=MAX_LENGTH) as engine:
        texts = draw_texts(engine)
        if not in_full:
            texts = [*ODD, *random.Random(1).sample(texts[len(ODD) :], NUM_BY_DEFAULT - len(ODD))]
        rows = reference.encode(texts, output_value=None, show_progress_bar=False)
        tokens = [row["token_embeddings"][row["attention_mask"].bool()].numpy() for row in rows]
        vectors = np.stack([row["sentence_embedding"].numpy() for row in rows])
        yield Both(engine, texts, vectors, tokens)


@pytest.mark.soak
def test_the_texts_have_one_to_512_tokens(both):
    lens = [len(rows) for rows in both.tokens]
    assert min(lens) == 2 and max(lens) == MAX_LENGTH
    assert min(sum(n <= 8 for n in lens), sum(n > 256 for n in lens)) >= len(lens) / 20


@pytest.mark.soak
def test_vectors_are_those_of_sentence_transformers(both):
    response = both.engine.embed(both.texts, truncate="right")
    assert np.abs(np.linalg.norm(response.numpy(), axis=1) - 1).max() < 1e-5, "as its files ask for"
    cosines = (response.numpy().astype(np.float64) * both.vectors).sum(1)
    worst = int(cosines.argmin())
    assert cosines[worst] >= 0.99999, f"{cosines[worst]} of {both.texts[worst]!r:.200}"
    assert response.usage.input_tokens == sum(map(len, both.tokens))


@pytest.mark.soak
def test_vectors_of_tokens_are_those_of_sentence_transformers(both):
    for output, expected, text in zip(
        both.engine.embed(both.texts, granularity="token", truncate="right"), both.tokens, both.texts, strict=True
    ):
        assert output.numpy().shape == expected.shape, f"{text!r:.200}"
        assert np.abs(output.numpy() - expected).max() < 1e-4, f"{text!r:.200}"


def test_the_models_own_limit_holds_unless_another_is_given(minilm):
    with Engine(minilm, dtype="float32") as engine:
        assert engine.model_info().max_context_length == 256
        assert engine.embed("word " * 300, truncate="right").numpy().shape == (384,)
