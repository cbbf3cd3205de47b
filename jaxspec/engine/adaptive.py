"""The number of drafts a round, chosen for each launch from measured costs and recent acceptance.

Speculation pays while the tokens of a round outweigh its time. Let E(k) be the expected number of tokens that a row
makes in a round of k drafts, and c(k) the measured seconds of such a round. The best k has the largest sum of E(k) over
rows, divided by c(k). k = 0 is plain decoding.

A probe is a short launch that measures whether another k has become better.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

MEMORY = 0.95  # decay of a row's acceptance counts, per round
LONG_MEMORY = 0.995  # decay of the counts over all rows, which are a new row's prior
PRIOR_ROUNDS = 2.0  # rounds of a new row that this prior counts as
GUESS = 0.8  # acceptance probability of each draft before any round was seen
GUESS_ROUNDS = 4.0  # rounds that the guess counts as
MARGIN = 1.02  # factor by which another k must be better to be chosen
PROBE_ROUNDS = 4  # rounds of a probe
THIN = 32  # rounds seen; with fewer, a choice holds for PROBE_ROUNDS only
BUDGET = 0.01  # share of the time that probes may cost; beyond it there are none
FIRST_PAUSE = 32  # rounds between two probes; doubles with each probe that changes nothing
LONGEST_PAUSE = 512  # maximum of these rounds


class Acceptance:
    """Counts of the rounds that accepted the 1st, 2nd, ... draft, given that all drafts before it were accepted.

    Newer rounds count more.

    A round that proposed nothing counts as one whose first draft was rejected. The probabilities are conditional so
    that rounds of few drafts also inform about more drafts.
    """

    def __init__(self, size: int, memory: float = MEMORY) -> None:
        self.memory = memory
        self.tries = np.zeros(size)  # by position
        self.hits = np.zeros(size)

    def observe(self, accepted: np.ndarray, k: int) -> None:
        """Count rounds of up to k drafts. accepted i32[rounds]: draft tokens accepted in each."""
        position = np.arange(k)
        tries = np.sum(accepted[:, None] >= position, axis=0)
        hits = np.sum(accepted[:, None] > position, axis=0)
        self.count(len(accepted), tries, hits)

    def count(self, rounds: int, tries: np.ndarray, hits: np.ndarray) -> None:
        """Count rounds by position of the draft.

        tries, hits: i32[k], the number of rounds in which the 1st, 2nd, ... draft was verified, and was accepted.
        """
        fade = self.memory**rounds
        k = len(tries)
        self.tries[:k] = fade * self.tries[:k] + tries
        self.hits[:k] = fade * self.hits[:k] + hits


def chances(tries: np.ndarray, hits: np.ndarray, prior: np.ndarray | float, rounds: float) -> np.ndarray:
    """Return P(a draft is accepted | all before it are), by position. `prior` weighs as much as this many rounds."""
    return (hits + rounds * prior) / (tries + rounds)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choice for the next launch.

    k: drafts a round.
    num_rounds: maximum number of rounds; None for no limit.
    worth: tokens that a row must gain a round; if the rows gain less, the launch ends.
    """

    k: int
    num_rounds: int | None = None
    worth: float = 0.0


class Controller:
    """The choice of k for each launch, learned from earlier launches.

    Args:
      choices: the values of k that programs are compiled for, 0 among them.
      adaptive: False always takes the largest.
      draft_cost: a high estimate of the cost of a draft step, in target passes. It only decides whether plain decoding
        is worth compiling and measuring.
    """

    def __init__(self, choices: Sequence[int], *, adaptive: bool = True, draft_cost: float = 0.0) -> None:
        self.choices = tuple(sorted(choices))
        self.adaptive = adaptive
        self.draft_cost = draft_cost
        # By (kind of launch, k):
        self.costs: dict[tuple[Hashable, int], float] = {}  # seconds a round
        self.once: dict[tuple[Hashable, int], float] = {}  # seconds a round after a single measurement
        self.last_run: dict[tuple[Hashable, int], float] = {}  # when it ran last, in seconds of all launches
        self.probe_costs: dict[tuple[Hashable, int], float] = {}  # seconds that its last probe lost
        self.overall = Acceptance(self.choices[-1], LONG_MEMORY)
        self.best: int | None = None
        self.rounds = 0  # rounds of the best choice since the last probe of its rival
        self.pause = FIRST_PAUSE  # such rounds before the next probe
        self.seconds = 0.0  # seconds of all launches
        self.probe_seconds = 0.0  # seconds lost to probes
        self.rate_without_probe: float | None = None  # tokens a second that the probe to come gives up

    def choose(self, kind: Hashable, rows: Sequence[tuple[int, Acceptance]], *, pinned: bool = False) -> Choice:
        """Return the choice for a launch of this kind.

        rows: for each row, the maximum number of its drafts, and its acceptance.
        pinned: whether k must not adapt, because some row's tokens depend on it.
        """
        wanted = max((most for most, _ in rows), default=0)
        full = next(k for k in self.choices if k >= wanted)
        if not full or pinned or not self.adaptive:
            return Choice(full)
        tokens = {k: promised for k, promised in self.expected(rows).items() if k <= full}
        plain_may_win = tokens[full] / len(rows) < 2.0 + full * self.draft_cost
        if (kind, full) not in self.costs:
            return self.measurement(kind, full)
        if (kind, 0) not in self.costs:
            return self.measurement(kind, 0) if plain_may_win else Choice(full)
        value = {k: tokens[k] / self.cost(kind, k, full) for k in tokens}
        best = max(value, key=value.__getitem__)
        held = self.best if self.best in value else 0
        if value[best] < MARGIN * value[held]:
            best = held
        if best != self.best:
            self.best, self.rounds, self.pause = best, 0, FIRST_PAUSE
        rival = self.rival(kind, value, best, plain_may_win=plain_may_win)
        worth = {k: self.cost(kind, k, full) / self.costs[kind, 0] if k else 0.0 for k in (best, rival)}
        # Drafts may do better for a new row.
        has_new_row = any(most and not acceptance.tries.any() for most, acceptance in rows)
        pause = FIRST_PAUSE if has_new_row and best == 0 else self.pause
        if best and self.overall.tries[0] < THIN:
            self.rate_without_probe = value[0]
            return Choice(best, PROBE_ROUNDS, worth[best])
        if self.rounds < pause:
            return Choice(best, pause - self.rounds, worth[best])
        estimate = PROBE_ROUNDS * self.cost(kind, rival, full) * (1.0 - value[rival] / value[best])
        probe_cost = self.probe_costs.get((kind, rival), estimate)
        if rival == best or self.probe_seconds + probe_cost > BUDGET * self.seconds:
            return Choice(best, worth=worth[best])
        self.rounds, self.pause = 0, min(2 * self.pause, LONGEST_PAUSE)
        self.rate_without_probe = value[best]
        return Choice(rival, PROBE_ROUNDS, worth[rival])

    def rival(self, kind: Hashable, value: Mapping[int, float], best: int, *, plain_may_win: bool) -> int:
        """Return the k to probe next; `best` if there is none. value: tokens a second that each k promises.

        Probes are needed because measurements grow old, and because drafts may be accepted more often in another text.
        """
        rivals = [k for k in value if k != best and (k or plain_may_win)]
        if best == 0:
            return max(rivals, key=value.__getitem__)
        return min(rivals, key=lambda k: self.last_run.get((kind, k), 0.0), default=best)

    def measurement(self, kind: Hashable, k: int) -> Choice:
        """Return a launch that measures k. The first launch does not count, so that one round of it is enough."""
        return Choice(k, PROBE_ROUNDS if (kind, k) in self.last_run else 1)

    @property
    def likely_k(self) -> int:
        """The expected k of the next launch, before it is chosen."""
        return self.choices[-1] if self.best is None or not self.adaptive else self.best

    def expected(self, rows: Sequence[tuple[int, Acceptance]]) -> dict[int, float]:
        """Return, for each k, the expected tokens of all rows in a round of k drafts."""
        prior = chances(self.overall.tries, self.overall.hits, GUESS, GUESS_ROUNDS)
        tries = np.stack([acceptance.tries for _, acceptance in rows])
        hits = np.stack([acceptance.hits for _, acceptance in rows])
        reached = np.cumprod(chances(tries, hits, prior, PRIOR_ROUNDS), axis=1)
        own = np.array([most for most, _ in rows])[:, None]
        gained = np.cumsum(np.sum(np.where(np.arange(reached.shape[1]) < own, reached, 0.0), axis=0))
        return {k: len(rows) + (float(gained[k - 1]) if k else 0.0) for k in self.choices}

    def cost(self, kind: Hashable, k: int, full: int) -> float:
        """Return the seconds of a round. For a k that was not measured, interpolate between two that were."""
        if (kind, k) in self.costs:
            return self.costs[kind, k]
        low = self.costs[kind, 0]
        high = self.costs[kind, full]
        return low + (high - low) * k / full

    def rounds_within(self, seconds: float, kind: Hashable, k: int) -> int:
        """Return the number of rounds of k drafts that take this long, at least 1; 1 if their cost is not known."""
        cost = self.costs.get((kind, k))
        return 1 if cost is None else max(1, int(seconds / cost))

    def observe(
        self, kind: Hashable, k: int, seconds: float, num_rounds: int, *, tokens: int, catch_up: float = 0.0
    ) -> None:
        """Learn from a launch of num_rounds rounds that gained `tokens` tokens over all rows.

        catch_up: seconds that the draft spent before on prefill that it had missed.

        The first launch of a kind is slow for other reasons and does not count. Of the next two the faster counts.
        After that, faster ones weigh more, because disturbances only make a launch slower, and a k that seems slow is
        not measured again for long.
        """
        rate_without_probe, self.rate_without_probe = self.rate_without_probe, None
        if not num_rounds:
            return
        self.seconds += seconds + catch_up
        if rate_without_probe:
            lost = seconds + catch_up - tokens / rate_without_probe
            self.probe_costs[kind, k] = lost
            self.probe_seconds += max(lost, 0.0)
        if k == self.best:
            self.rounds += num_rounds
        which = (kind, k)
        new = seconds / num_rounds
        first = which not in self.last_run
        self.last_run[which] = self.seconds
        if which in self.costs:
            self.costs[which] += (new - self.costs[which]) * (0.5 if new < self.costs[which] else 0.2)
        elif which in self.once:
            self.costs[which] = min(new, self.once[which])
        elif not first:
            self.once[which] = new
