"""Choice of k, the number of draft tokens a round, from measured round times and recent acceptance.

A launch is one run of the device program, over many rounds. Each launch has one k. Let E(k) be the expected number of
tokens that a row gains in a round of k draft tokens, and c(k) the measured seconds of such a round. The best k has the
largest sum of E(k) over rows, divided by c(k). k = 0 is plain decoding.

A probe is a short launch with another k than the best one. It measures whether the other k has become better.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

MEMORY = 0.95  # factor per round by which a row's acceptance counts decay
LONG_MEMORY = 0.995  # factor per round by which the counts of all rows together decay; they make each row's prior
PRIOR_ROUNDS = 2.0  # number of observed rounds that a row's prior weighs as much as
GUESS = 0.8  # assumed acceptance probability of each draft token before any round was observed
GUESS_ROUNDS = 4.0  # number of observed rounds that GUESS weighs as much as
MARGIN = 1.02  # factor by which another k must yield more tokens a second than the present k to replace it
PROBE_ROUNDS = 4  # maximum number of rounds of a probe
THIN = 32  # decayed number of observed rounds below which a choice of k > 0 holds for PROBE_ROUNDS rounds only
BUDGET = 0.01  # maximum share of the launches' time that probes may lose; above this share no probe runs
FIRST_PAUSE = 32  # number of rounds between two probes at first; it doubles with each probe that does not change k
LONGEST_PAUSE = 512  # maximum number of rounds between two probes


class Acceptance:
    """Numbers of rounds that verified, and that accepted, the 1st, 2nd, ... draft token of a round.

    A draft token counts as verified if all draft tokens before it in the round were accepted. Accepted / verified is
    therefore a conditional probability, so that rounds with few draft tokens also inform about rounds with more.
    A round without draft tokens counts as one whose first draft token was rejected.

    size: maximum number of draft tokens a round.
    memory: factor per round by which the counts decay, so that newer rounds weigh more.
    """

    def __init__(self, size: int, memory: float = MEMORY) -> None:
        self.memory = memory
        self.tries = np.zeros(size)  # number of rounds that verified the draft token at each position
        self.hits = np.zeros(size)  # number of rounds that accepted the draft token at each position

    def observe(self, accepted: np.ndarray, k: int) -> None:
        """Count rounds of up to k draft tokens. accepted i32[rounds]: number of draft tokens accepted in each round."""
        position = np.arange(k)
        tries = np.sum(accepted[:, None] >= position, axis=0)
        hits = np.sum(accepted[:, None] > position, axis=0)
        self.count(len(accepted), tries, hits)

    def count(self, rounds: int, tries: np.ndarray, hits: np.ndarray) -> None:
        """Add these rounds to the counts, after the decay of the older rounds in the counts.

        rounds: number of rounds.
        tries, hits: i32[k], numbers of rounds in which the 1st, 2nd, ... draft token was verified, and was accepted.
        """
        fade = self.memory**rounds
        k = len(tries)
        self.tries[:k] = fade * self.tries[:k] + tries
        self.hits[:k] = fade * self.hits[:k] + hits


def chances(tries: np.ndarray, hits: np.ndarray, prior: np.ndarray | float, rounds: float) -> np.ndarray:
    """Return P(draft token accepted | all before it accepted), by position. `rounds` is the weight of the prior."""
    return (hits + rounds * prior) / (tries + rounds)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The number of draft tokens a round that a `Controller` chose for the next launch, and limits of this launch.

    k: number of draft tokens a round.
    num_rounds: maximum number of rounds; None for no limit.
    worth: number of tokens that plain decoding would give a row in the time of one round with k draft tokens. If the
      rows together fall behind that by about two rounds' tokens, the launch ends.
    """

    k: int
    num_rounds: int | None = None
    worth: float = 0.0


class Controller:
    """A controller that chooses k, the draft tokens a round, for each launch, and learns from earlier launches.

    Args:
      choices: the values of k that programs are compiled for, 0 among them.
      adaptive: whether k adapts; if not, it is as large as the rows allow.
      draft_cost: an upper estimate of the time of one draft step, divided by the time of one target pass. It only
        decides whether plain decoding is worth compiling and measuring.
    """

    def __init__(self, choices: Sequence[int], *, adaptive: bool = True, draft_cost: float = 0.0) -> None:
        self.choices = tuple(sorted(choices))
        self.adaptive = adaptive
        self.draft_cost = draft_cost
        # The keys of these dicts are (kind of launch, k). Launches of one kind have similar round times.
        self.costs: dict[tuple[Hashable, int], float] = {}  # measured seconds a round
        self.once: dict[tuple[Hashable, int], float] = {}  # measured seconds a round, after only one counted launch
        self.last_run: dict[tuple[Hashable, int], float] = {}  # value of self.seconds after the last such launch
        self.probe_costs: dict[tuple[Hashable, int], float] = {}  # seconds that the last probe of this k lost
        self.overall = Acceptance(self.choices[-1], LONG_MEMORY)
        self.best: int | None = None
        self.rounds = 0  # rounds run with the best k since the last probe, or since this k became the best
        self.pause = FIRST_PAUSE  # rounds to run with the best k before the next probe
        self.seconds = 0.0  # seconds of all launches so far
        self.probe_seconds = 0.0  # seconds lost to probes so far
        # Expected tokens a second if the chosen probe did not run; None if the chosen launch is no probe.
        self.rate_without_probe: float | None = None

    def choose(self, kind: Hashable, rows: Sequence[tuple[int, Acceptance]], *, pinned: bool = False) -> Choice:
        """Return the choice of k for the next launch.

        kind: kind of the launch; launches of one kind have similar round times.
        rows: for each row, its maximum number of draft tokens a round, and its acceptance counts.
        pinned: whether k must not adapt, because some row's sampled tokens depend on it.
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
        # A new row's draft tokens may be accepted more often than those of the rows before it. So the next probe comes
        # sooner if plain decoding is best.
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
        """Return the k to probe next; `best` if no other k is worth a probe.

        Probes are needed because measurements grow old, and because acceptance changes with the text.

        value: expected tokens a second by k.
        plain_may_win: whether k = 0, plain decoding, may be a candidate.
        """
        rivals = [k for k in value if k != best and (k or plain_may_win)]
        if best == 0:
            return max(rivals, key=value.__getitem__)
        return min(rivals, key=lambda k: self.last_run.get((kind, k), 0.0), default=best)

    def measurement(self, kind: Hashable, k: int) -> Choice:
        """Return a choice that measures k. The first launch with k is not counted: one round is enough for it."""
        return Choice(k, PROBE_ROUNDS if (kind, k) in self.last_run else 1)

    @property
    def likely_k(self) -> int:
        """The probable k of the next launch, before `choose` is called for this launch."""
        return self.choices[-1] if self.best is None or not self.adaptive else self.best

    def expected(self, rows: Sequence[tuple[int, Acceptance]]) -> dict[int, float]:
        """Return, for each k, the expected number of tokens of all rows together in a round of k draft tokens."""
        prior = chances(self.overall.tries, self.overall.hits, GUESS, GUESS_ROUNDS)
        tries = np.stack([acceptance.tries for _, acceptance in rows])
        hits = np.stack([acceptance.hits for _, acceptance in rows])
        reached = np.cumprod(chances(tries, hits, prior, PRIOR_ROUNDS), axis=1)
        own = np.array([most for most, _ in rows])[:, None]
        gained = np.cumsum(np.sum(np.where(np.arange(reached.shape[1]) < own, reached, 0.0), axis=0))
        return {k: len(rows) + (float(gained[k - 1]) if k else 0.0) for k in self.choices}

    def cost(self, kind: Hashable, k: int, full: int) -> float:
        """Return the seconds of a round of k draft tokens, interpolated between k = 0 and `full` if not measured."""
        if (kind, k) in self.costs:
            return self.costs[kind, k]
        low = self.costs[kind, 0]
        high = self.costs[kind, full]
        return low + (high - low) * k / full

    def rounds_within(self, seconds: float, kind: Hashable, k: int) -> int:
        """Return how many rounds of k draft tokens fit into `seconds`, at least 1; 1 if their cost is not known."""
        cost = self.costs.get((kind, k))
        return 1 if cost is None else max(1, int(seconds / cost))

    def observe(
        self, kind: Hashable, k: int, seconds: float, num_rounds: int, *, tokens: int, catch_up: float = 0.0
    ) -> None:
        """Learn the cost of k from a launch of num_rounds rounds that gained `tokens` tokens over all rows.

        The first launch of this kind with k is slow for other reasons and is not counted. Of the next two launches the
        faster one counts. After them, faster launches weigh more than slower ones: disturbances only make a launch
        slower, and a k that seems slow is not measured again for long.

        seconds: time of the launch.
        catch_up: seconds that the draft's delayed prefill took before the launch.
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
