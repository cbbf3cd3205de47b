"""Reading of a request's body: a JSON object from a client that may be slow, broken or hostile."""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from fastapi import Request

from jaxspec.common.errors import quoted, shortened
from jaxspec.server.offload import LARGE_BODY, offload
from jaxspec.server.refusal import Refusal
from jaxspec.server.structured import FIELDS

T = TypeVar("T")

# Largest time limit for the arrival of a body, in seconds. It is needed because max_queue does not limit the requests
# whose body is incomplete.
LONGEST = 60.0
CODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # value of Content-Encoding -> zlib's argument wbits


async def read(request: Request, most: int, seconds: float, take: Callable[[dict[str, Any]], T]) -> T:
    """Read a request's body, and return the result of `take` on its JSON object.

    A long or compressed body is parsed in a thread, and one with structured outputs is checked there: a small schema
    can take long.

    most: largest number of bytes of the body, both before and after decompression.
    seconds: time in which the body has to arrive. A value above LONGEST is replaced by LONGEST.
    take: function of the parsed JSON object.

    Raises: Refusal for a body that exceeds a limit, has the wrong content type or is not a JSON object.
    """
    seconds = min(seconds, LONGEST)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # browsers let a page of another site send this type only after a CORS preflight
        raise Refusal(415, f"content-type {quoted(kind)} must be application/json")
    coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if coding not in ("", "identity", *CODINGS):
        headers = {"Accept-Encoding": "gzip, deflate"}
        raise Refusal(415, f"content-encoding {quoted(coding)} must be gzip, deflate or none", headers=headers)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > most:
        raise too_long(most)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise too_long(most)
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {seconds:g} seconds") from None

    large = coding in CODINGS or len(body) > LARGE_BODY
    given = await offload(large, lambda: parsed(decoded(bytes(body), coding, most)))
    return await offload(large or any(given.get(field) is not None for field in FIELDS), take, given)


def too_long(most: int) -> Refusal:
    """Return the error for a body of more than `most` bytes."""
    return Refusal(413, f"the body is longer than {most} bytes: send less, or raise --max-body-bytes")


def decoded(body: bytes, coding: str, most: int) -> bytes:
    """Decompress a body with this Content-Encoding. Raise Refusal for invalid or too long data.

    coding: value of the header; a body without one of CODINGS is returned as it is.
    most: largest number of bytes of the result.
    """
    if coding not in CODINGS:
        return body
    decoder = zlib.decompressobj(CODINGS[coding])
    try:
        found = decoder.decompress(body, most + 1)
    except zlib.error as error:
        raise Refusal(400, f"the body is not {coding}, which its content-encoding names: {error}") from None
    if len(found) > most:
        raise too_long(most)
    if not decoder.eof or decoder.unused_data:
        place = "goes on after" if decoder.eof else "ends before"
        raise Refusal(400, f"the body {place} the end of its {coding} data")
    return found


def parsed(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raise Refusal for other JSON, and for NaN, infinities and repeated names in an object."""
    try:
        hooks: dict[str, Any] = {"parse_constant": refuse_constant, "parse_float": finite}
        found = json.loads(body, object_pairs_hook=without_repetition, **hooks)
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    except ValueError as error:  # includes UnicodeDecodeError, for bytes that are not text
        raise Refusal(400, f"the body is not JSON: {shortened(str(error), 200)}") from None
    if not isinstance(found, dict):
        raise Refusal(400, "the body must be a JSON object")
    return found


def refuse_constant(name: str) -> NoReturn:
    """Raise Refusal for NaN and infinities. JSON has none, but Python's parser would accept them."""
    raise Refusal(400, f"the body holds {name}, which is not a JSON number")


def finite(digits: str) -> float:
    """Return a number with a fraction or an exponent. Raise Refusal if it is too large for a float."""
    number = float(digits)
    if not math.isfinite(number):
        raise Refusal(400, f"the body holds {shortened(digits, 40)}, which is too large for a number")
    return number


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's (name, value) pairs as a dict. Raise Refusal if a name occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise Refusal(400, f"the body has {quoted(twice)} twice in one object", param=twice[:80])
    return found
