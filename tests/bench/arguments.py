"""Types of the commands' arguments: what argparse refuses with them, it refuses before anything runs."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Collection

from openengine.core.memory import usable_cpus

__all__ = ["arrival_rate", "at_least", "names_of", "num_threads"]


def at_least(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if (value := int(text)) < least:
            raise ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    return integer


def num_threads(text: str) -> int:
    """As many as there are CPUs at most: torch takes any number, and more of them would only wait for each other."""
    if not 1 <= (value := int(text)) <= usable_cpus():
        raise ArgumentTypeError(f"must be from 1 to {usable_cpus()}, the CPUs of this process, not {value}")
    return value


def arrival_rate(text: str) -> float:
    """Per second. The least rate keeps what lies between two arrivals within what can be slept."""
    if not 1e-3 <= (value := float(text)) <= 1e3:  # as no NaN is
        raise ArgumentTypeError(f"must be from 0.001 to 1000 per second, not {text}")
    return value


def names_of(kind: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """Names with commas between them, each once; `kind` says of what."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise ArgumentTypeError(f"unknown {kind} {', '.join(unknown)}; known are {', '.join(known)}")
        if twice := [name for name in dict.fromkeys(found) if found.count(name) > 1]:
            raise ArgumentTypeError(f"{kind} named twice: {', '.join(twice)}")
        return found

    return names
