"""The origins of output tokens: which round made each of them, and whether a draft or the target itself proposed it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.api.outputs import TokenOrigin
from jaxspec.api.tokens import Token
from jaxspec.engine.request import Place, Request
from jaxspec.grammars.automaton import START


class Origins:
    """Record of what proposed each token of one sample: the target, the drafting method, or prompt lookup.

    method: name of the engine's drafting method. If prompt lookup is tried first, it names the method that follows.
      None if the engine has no drafts.
    """

    def __init__(self, request: Request, method: str | None) -> None:
        self.request = request
        self.method = method
        self.states = [START]  # states of the grammar's automaton before each token and after the last one

    def since(self, start: int, tokens: Sequence[Token]) -> list[TokenOrigin]:
        """Return the origins of the tokens from index `start` on. tokens: the text that each of them adds."""
        placed = zip(tokens, self.request.places[start:], self.num_legal(start), strict=False)
        return [self.origin(token, place, legal) for token, place, legal in placed]

    def origin(self, token: Token, place: Place, num_legal: int | None) -> TokenOrigin:
        """Return the origin of one token."""
        method = ("ngram" if place.looked_up else self.method) if place.accepted else None
        kind = "draft" if place.accepted else "target"
        text = token.text if token.text and token.data is not None else ""
        return TokenOrigin(text, kind, method, place.round, place.position, place.num_drafts, num_legal)

    def num_legal(self, start: int) -> list[int | None]:
        """Return the number of legal ids at each token from index `start` on; None for each without a grammar."""
        output, automaton = self.request.output, self.request.automaton
        if automaton is None:
            return [None] * (len(output) - start)
        for token in output[len(self.states) - 1 :]:
            self.states.append(automaton.advance(self.states[-1], [token]))
        return [automaton.num_legal(state) for state in self.states[start : len(output)]]
