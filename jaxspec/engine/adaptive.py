"""How many drafts a round has: chosen for each launch from measured costs and recent acceptance.

Speculation pays while a round's tokens outweigh its time: with E(k) the expected tokens a row makes in a round of k
drafts and c(k) the measured seconds of such a round, the best k has the largest sum of E(k) over rows / c(k). k = 0 is
plain decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

MEMORY = 0.95  # a row's acceptance forgets at this rate a round
LONG_MEMORY = 0.995  # that of all rows, from which a new row starts
PRIOR_ROUNDS = 2.0  # what all rows did counts as so many rounds of a new row
GUESS, GUESS_ROUNDS = 0.8, 4.0  # chance of each draft, before anything was seen, and for how many rounds that counts
MARGIN = 1.02  # another k must promise this much more
PROBE_ROUNDS = 4  # rounds of a launch that looks whether another choice has become better
THIN = 32  # rounds seen, below which a choice holds for PROBE_ROUNDS only
BUDGET = 0.01  # share of the time that looks may cost, above which there are none
FIRST_PAUSE, LONGEST_PAUSE = 32, 512  # rounds between two such looks; doubles with each that changes nothing


class Acceptance:
    """How often the 1st, 2nd, ... draft of a round was accepted where all before it were, newer rounds counting more.

    A round that proposed nothing counts as one whose first draft was rejected. Chances are conditional so that what was
    seen with few drafts tells something of more.
    """

    def __init__(self, size: int, memory: float = MEMORY) -> None:
        self.memory = memory
        self.tries, self.hits = np.zeros(size), np.zeros(size)  # by position

    def observe(self, accepted: np.ndarray, k: int) -> None:
        """accepted i32[rounds]: drafts kept in each of them, of up to k."""
        position = np.arange(k)
        tries, hits = (np.sum(kept, axis=0) for kept in (accepted[:, None] >= position, accepted[:, None] > position))
        self.count(len(accepted), tries, hits)

    def count(self, rounds: int, tries: np.ndarray, hits: np.ndarray) -> None:
        """tries, hits i32[k]: in how many of the rounds the 1st, 2nd, ... draft came to be judged, and was kept."""
        fade, k = self.memory**rounds, len(tries)
        self.tries[:k] = fade * self.tries[:k] + tries
        self.hits[:k] = fade * self.hits[:k] + hits


def chances(tries: np.ndarray, hits: np.ndarray, prior: np.ndarray | float, rounds: float) -> np.ndarray:
    """P(a draft is accepted if all before it are), by position; `prior` weighs as much as so many rounds."""
    return (hits + rounds * prior) / (tries + rounds)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the next launch does.

    k: drafts a round.
    num_rounds: at most so many; None for no limit.
    worth: tokens that a row's round must bring, or the launch ends.
    """

    k: int
    num_rounds: int | None = None
    worth: float = 0.0


class Controller:
    """Chooses k for each launch, and learns from what it did.

    Args:
      choices: the k that programs are compiled for, 0 among them.
      adaptive: False always takes the largest.
      draft_cost: of a draft step, in target passes: a guess, rather too high. It only decides whether plain decoding is
        worth compiling, to be measured.
    """

    def __init__(self, choices: Sequence[int], *, adaptive: bool = True, draft_cost: float = 0.0) -> None:
        self.choices, self.adaptive, self.draft_cost = tuple(sorted(choices)), adaptive, draft_cost
        self.costs: dict[tuple[Hashable, int], float] = {}  # (kind of launch, k) -> seconds a round
        self.once: dict[tuple[Hashable, int], float] = {}  # the same, where there is one measurement only
        self.ran: dict[tuple[Hashable, int], float] = {}  # the same -> when it ran last, in seconds of all launches
        self.overall = Acceptance(self.choices[-1], LONG_MEMORY)
        self.best: int | None = None
        self.rounds, self.pause = 0, FIRST_PAUSE  # of the best choice since the last look at its rival
        self.seconds, self.spent = 0.0, 0.0  # of all launches; lost to looks
        self.prices: dict[tuple[Hashable, int], float] = {}  # (kind, k) -> what the last look at it lost
        self.instead: float | None = None  # tokens a second of the best choice, while the launch to come is a look

    def choose(self, kind: Hashable, rows: Sequence[tuple[int, Acceptance]], *, pinned: bool = False) -> Choice:
        """For rows of (most drafts it may have, its acceptance) in launches of this kind. pinned: no choice is to be
        made, because some row's tokens depend on k."""
        wanted = max((most for most, _ in rows), default=0)
        full = next(k for k in self.choices if k >= wanted)
        if not full or pinned or not self.adaptive:
            return Choice(full)
        tokens = {k: promised for k, promised in self.expected(rows).items() if k <= full}
        plain_may_win = tokens[full] / len(rows) < 2.0 + full * self.draft_cost
        unmeasured = lambda k: Choice(k, PROBE_ROUNDS if (kind, k) in self.ran else 1)  # the first does not count
        if (kind, full) not in self.costs:
            return unmeasured(full)
        if (kind, 0) not in self.costs:
            return unmeasured(0) if plain_may_win else Choice(full)
        value = {k: tokens[k] / self.cost(kind, k, full) for k in tokens}
        best = max(value, key=value.__getitem__)
        held = self.best if self.best in value else 0
        if value[best] < MARGIN * value[held]:
            best = held
        if best != self.best:
            self.best, self.rounds, self.pause = best, 0, FIRST_PAUSE
        # What was measured grows old; and with another text, or for a newcomer, drafts may do better.
        rivals = [k for k in value if k != best and (k or plain_may_win)]
        if best == 0:
            rival = max(rivals, key=value.__getitem__)
        else:
            rival = min(rivals, key=lambda k: self.ran.get((kind, k), 0.0), default=best)
        worth = {k: self.cost(kind, k, full) / self.costs[kind, 0] if k else 0.0 for k in (best, rival)}
        newcomer = any(most and not acceptance.tries.any() for most, acceptance in rows)
        pause = FIRST_PAUSE if newcomer and best == 0 else self.pause
        if best and self.overall.tries[0] < THIN:
            self.instead = value[0]
            return Choice(best, PROBE_ROUNDS, worth[best])
        if self.rounds < pause:
            return Choice(best, pause - self.rounds, worth[best])
        price = PROBE_ROUNDS * self.cost(kind, rival, full) * (1.0 - value[rival] / value[best])
        if rival == best or self.spent + self.prices.get((kind, rival), price) > BUDGET * self.seconds:
            return Choice(best, worth=worth[best])
        self.rounds, self.pause = 0, min(2 * self.pause, LONGEST_PAUSE)
        self.instead = value[best]
        return Choice(rival, PROBE_ROUNDS, worth[rival])

    @property
    def likely_k(self) -> int:
        """The k of the next launch, as far as is known before it is chosen."""
        return self.choices[-1] if self.best is None or not self.adaptive else self.best

    def expected(self, rows: Sequence[tuple[int, Acceptance]]) -> dict[int, float]:
        """k -> tokens of all rows in a round of k drafts."""
        prior = chances(self.overall.tries, self.overall.hits, GUESS, GUESS_ROUNDS)
        tries, hits = (np.stack([getattr(row, name) for _, row in rows]) for name in ("tries", "hits"))
        reached = np.cumprod(chances(tries, hits, prior, PRIOR_ROUNDS), axis=1)
        own = np.array([most for most, _ in rows])[:, None]
        gained = np.cumsum(np.sum(np.where(np.arange(reached.shape[1]) < own, reached, 0.0), axis=0))
        return {k: len(rows) + (float(gained[k - 1]) if k else 0.0) for k in self.choices}

    def cost(self, kind: Hashable, k: int, full: int) -> float:
        """Seconds of a round; between two measured ones, for a k not yet tried."""
        if (kind, k) in self.costs:
            return self.costs[kind, k]
        low, high = self.costs[kind, 0], self.costs[kind, full]
        return low + (high - low) * k / full

    def rounds_within(self, seconds: float, kind: Hashable, k: int) -> int:
        """Rounds of k drafts that take so long as far as is known, one at least."""
        cost = self.costs.get((kind, k))
        return 1 if cost is None else max(1, int(seconds / cost))

    def observe(
        self, kind: Hashable, k: int, seconds: float, num_rounds: int, *, tokens: int, catch_up: float = 0.0
    ) -> None:
        """A launch of so many rounds gained so many tokens of all rows, after catch_up seconds for the draft to read
        what it had missed. The first of its kind is slow for reasons of its own and does not count; of the next two the
        faster does, and of the others the faster count more, because what disturbs a measurement makes it slower: a
        choice that seems slow is not measured again for long."""
        instead, self.instead = self.instead, None
        if not num_rounds:
            return
        self.seconds += seconds + catch_up
        if instead:
            lost = self.prices[kind, k] = seconds + catch_up - tokens / instead
            self.spent += max(lost, 0.0)
        if k == self.best:
            self.rounds += num_rounds
        which, new = (kind, k), seconds / num_rounds
        first = which not in self.ran
        self.ran[which] = self.seconds
        if which in self.costs:
            self.costs[which] += (new - self.costs[which]) * (0.5 if new < self.costs[which] else 0.2)
        elif which in self.once:
            self.costs[which] = min(new, self.once[which])
        elif not first:
            self.once[which] = new
