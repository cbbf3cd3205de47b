"""Options of `jaxspec generate-data`: how much text of which kinds, at which temperatures, by how many processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.common.errors import UserError
from jaxspec.common.values import LARGEST_ON_HOST, option, options, whole
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.train.prompts import CATEGORIES

# Default shares of the categories of prompts in the data, relative to the sum of all shares.
MIXTURE = {
    "chat": 0.25,
    "story": 0.16,
    "code": 0.17,
    "summary": 0.13,
    "rewrite": 0.1,
    "list": 0.06,
    "translate": 0.03,
    "free": 0.1,
    # In "self" the target writes the user's message, in "begun" it completes one. The target has seen far more subjects
    # than the grammar that makes all other prompts. But by itself it hardly ever asks for code, and rarely for a fact.
    "self": 1.0,
    "begun": 2.0,
}
# Default shares of sampling temperatures in the data. Half of the text is greedy, because a draft mostly has to find
# the target's argmax token. At temperature 1 a small target often loses its thread, and the rest of such a text teaches
# little about the target's use.
TEMPERATURES = {0.0: 0.5, 0.7: 0.4, 1.0: 0.1}


@options
class DataOptions:
    """Options of the generation of training data."""

    tokens: int = option("Least number of tokens in all, prompts included.", default=10_000_000)
    seed: int = option(
        "Random seed for prompts and samples. Sequence i of shard s depends on (seed, s, i) alone.",
        default=0,
    )
    length: int = option(
        "Longest sequence in tokens, prompt included. A prompt takes at most half of it, a message that the "
        "target writes at most a quarter.",
        default=512,
    )
    shard_size: int = option("Sequences in each shard.", default=4096)
    mixture: Mapping[str, float] = option(
        "Shares of chat, story, code, summary, rewrite, list, translate, free, self, begun: chat:2,self:1. Here"
        " a mapping from prompts.CATEGORIES.",
        factory=lambda: dict(MIXTURE),
    )
    temperatures: Mapping[float, float] = option(
        "Shares of temperatures. Here a mapping; 0 is greedy.",
        factory=lambda: dict(TEMPERATURES),
    )
    rows: int | None = option(
        "Sequences decoded together; 2048 on GPU, 512 on TPU, 16 on CPU, halved until they fit. Their number "
        "changes the speed, but the data only by rounding.",
        default=None,
    )
    part: tuple[int, int] = option(
        "I-th of N processes, with a device each, that fill the folder together. Here (i, n): the process "
        "generates every n-th shard, and that share of the tokens.",
        default=(1, 1),
    )

    def __post_init__(self) -> None:
        if not 1 <= self.part[0] <= self.part[1]:
            raise UserError(f"part {self.part[0]}/{self.part[1]}: give i/n with i in 1..n")
        for name, least in {"tokens": 1, "seed": 0, "length": 16, "shard_size": 1}.items():
            whole(name, getattr(self, name), least, LARGEST_ON_HOST)
        if self.rows is not None:
            whole("rows", self.rows, 1)
        if unknown := self.mixture.keys() - set(CATEGORIES):
            raise UserError(f"mixture has no category {min(unknown)!r}: choose among {', '.join(CATEGORIES)}")
        for name in ("mixture", "temperatures"):
            shares = getattr(self, name)
            if not shares or min(shares.values()) < 0 or not sum(shares.values()) > 0:
                raise UserError(f"{name}={dict(shares)}: shares must not be negative, and one must be positive")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # raises UserError for an invalid temperature

    def takes(self, shard: int) -> bool:
        """Return whether this process generates the shard with this index."""
        return shard % self.part[1] == self.part[0] - 1

    @property
    def recipe(self) -> dict[str, Any]:
        """The options on which the sequences depend, in the form in which the manifest holds them."""
        return {
            "seed": self.seed,
            "length": self.length,
            "shard_size": self.shard_size,
            "mixture": dict(self.mixture),
            "temperatures": {f"{temperature:g}": share for temperature, share in self.temperatures.items()},
        }


def shares(name: str, text: str, kind: Callable[[str], Any] = str) -> dict[Any, float]:
    """Parse the text of an option, such as "chat:2,code:1", into shares {"chat": 2.0, "code": 1.0}.

    name: the option's name, for the error message. kind: function that converts each key.

    Raises: UserError that names the option.
    """
    try:
        pairs = [part.split(":") for part in text.split(",")]
        found = {kind(key.strip()): float(share) for key, share in pairs}
        if len(found) < len(pairs) or not all(map(math.isfinite, found.values())):
            raise UserError
        return found
    except ValueError:
        raise UserError(f"{name} {text!r}: give values, each once, with their shares, such as a:2,b:1") from None


def part_of(text: str) -> tuple[int, int]:
    """Parse the value of --part, such as "2/4", into (2, 4). Raises: UserError."""
    try:
        i, n = map(int, text.split("/"))
    except ValueError:
        raise UserError(f"--part {text}: give i/n, such as 2/4 for the second of four") from None
    return i, n
