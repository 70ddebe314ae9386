"""Every requirement of the areas served here has a test that names it, or a line that says why none can show it."""

from __future__ import annotations

import re
from pathlib import Path

# Area -> how many requirements it has, numbered from 01.
AREAS = {
    "ENG": 12,
    "MOD": 14,
    "GEN": 18,
    "SMP": 12,
    "STP": 18,
    "LGP": 18,
    "GDE": 12,
    "KVO": 8,
    "STR": 17,
    "USE": 6,
    "ERR": 9,
    "LD": 5,
    "HLT": 7,
    "ABT": 9,
    "DRN": 13,
    "RTE": 5,
    "KV": 25,
    "TOK": 21,
    "ART": 8,
    "CKY": 13,
    "TSK": 20,
    "EMB": 10,
    "CLS": 7,
    "SCR": 18,
    "CAP": 9,
}
ONE_OF = {"KVC-01", "PD-06"}
UNSEEN = {
    "ABT-09": "abort is supported, so that no engine without it can be asked",
    "CAP-01": "every model of this engine performs a task; that others are refused: test_tsk_11_cap_02",
    "DRN-10": "an aggregated engine has no KV sessions; with prefill and decode engines",
    "ENG-11": "a role mismatch: test_gen_09 with the case pd_06",
    "KVO-08": "no adapters here; with LoRA",
    "LGP-08": "every selection mode is advertised",
    "LGP-18": "logprobs of both kinds are advertised",
    "MOD-13": "informative only",
    "SMP-12": "the order shows in tokens only: the sampler's own tests, and equality with the engine in process",
    "STR-10": "an error may replace finishes: test_err_02 shows it for the only output",
    "STR-13": "the engine has the role AGGREGATED; with a prefill engine",
    "TOK-07": "the scripted tokenizer adds no special tokens; the tokenizer service's own tests",
    "TOK-21": "documentation",
    "USE-06": "the engine has the role AGGREGATED; with a prefill engine",
}


def named(source: str) -> set[str]:
    """Requirements that names like `test_gen_09_err_01_…` and `test_eng_02_to_06_…`, or texts like "KV-14", mention."""
    found = set(re.findall(r"\b([A-Z]{2,3}-\d\d)\b", source))
    for word in re.findall(r"\b[a-z0-9_]+\b", source):
        area, last, is_range = None, 0, False
        for part in word.split("_"):
            if part.upper() in AREAS or part.upper() in {"KVC", "PD"}:
                area = part.upper()
            elif part == "to":
                is_range = True
            elif area and re.fullmatch(r"\d\d", part):
                first = last + 1 if is_range else int(part)
                found |= {f"{area}-{number:02d}" for number in range(first, int(part) + 1)}
                last, is_range = int(part), False
            elif area:
                area, is_range = None, False
    return found


def test_every_requirement_is_tested_or_says_why_not():
    sources = [path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path.name != Path(__file__).name]
    wanted = {f"{area}-{number:02d}" for area, count in AREAS.items() for number in range(1, count + 1)} | ONE_OF
    missing = wanted - named("\n".join(sources)) - UNSEEN.keys()
    assert not missing, sorted(missing)
