"""The server's routes."""

from __future__ import annotations

import hmac
import logging
import time
from typing import Annotated, Any

import prometheus_client
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from openai.types import Model
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from jaxspec.async_llm import AsyncLLM
from jaxspec.prometheus import Metrics
from jaxspec.server import body as bodies
from jaxspec.server.answers import ChatAnswer, TextAnswer
from jaxspec.server.fields import wish
from jaxspec.server.gate import Gate
from jaxspec.server.generation import Generation
from jaxspec.server.prepared import room_of
from jaxspec.server.refusal import Refusal
from jaxspec.server.settings import ServerConfig

logger = logging.getLogger(__name__)
Key = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


def make_app(llm: AsyncLLM, config: ServerConfig, model: str, gate: Gate) -> FastAPI:
    """The application. model: its name for clients."""
    app = FastAPI(title="jaxspec", openapi_url=None)  # bodies are checked by tables, which no schema here tells
    metrics, created, room = Metrics(llm), int(time.time()), room_of(llm)

    async def allowed(key: Key) -> None:
        given = key.credentials if key else ""
        if config.api_key and not hmac.compare_digest(given.encode(), config.api_key.encode()):
            headers = {"WWW-Authenticate": "Bearer"}
            raise Refusal(401, "the API key is missing or wrong", code="invalid_api_key", headers=headers)

    async def generation(request: Request, chat: bool) -> Generation:
        gate.check()  # before the body is read
        await alive(llm)
        body = await bodies.read(request, config.max_body_bytes, config.request_timeout)
        wanted = wish(body, chat=chat, model=model, room=room)
        answer = (ChatAnswer if chat else TextAnswer)(model, wanted.params, wanted.usage)
        return Generation(llm, gate, wanted, answer, room, config.request_timeout)

    @app.post("/v1/completions", dependencies=[Depends(allowed)], response_model=None)
    async def completions(request: Request) -> Response:
        return await generation(request, chat=False)

    @app.post("/v1/chat/completions", dependencies=[Depends(allowed)], response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await generation(request, chat=True)

    def described() -> dict[str, Any]:
        found = Model(id=model, object="model", created=created, owned_by="jaxspec")
        return found.model_dump(exclude_unset=True) | {"max_model_len": room}

    @app.get("/v1/models", dependencies=[Depends(allowed)])
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described()]}

    @app.get("/v1/models/{name:path}", dependencies=[Depends(allowed)])
    async def model_of(name: str) -> dict[str, Any]:
        if name != model:
            raise Refusal(404, f"model {name!r:.200} is not served here: {model!r} is", code="model_not_found")
        return described()

    @app.get("/health")
    async def health() -> dict[str, str]:
        gate.check(0)
        await alive(llm)
        return {"status": "ok"}

    @app.get("/metrics")
    async def scrape() -> Response:
        body = prometheus_client.generate_latest(metrics.registry)
        return Response(body, headers={"content-type": prometheus_client.CONTENT_TYPE_LATEST})

    for kind, answer in ANSWERS.items():
        app.add_exception_handler(kind, answer)
    return app


async def alive(llm: AsyncLLM) -> None:
    try:
        await llm.check_health()
    except RuntimeError:
        message = "the engine has ended, and serves no request any more: restart the server"
        raise Refusal(503, message, code="engine_ended") from None


# What a route raises -> its response.


async def refused(_: Request, error: Any) -> JSONResponse:
    return error.response()


async def refused_by_routes(_: Request, error: Any) -> JSONResponse:
    return Refusal(error.status_code, str(error.detail), headers=error.headers).response()


async def gone(_: Request, error: Exception) -> Response:
    """Nobody reads it."""
    return Response(status_code=499)


async def failed(_: Request, error: Exception) -> JSONResponse:
    """The server's own log has the traceback."""
    return Refusal(500, "the server failed").response()


ANSWERS: dict[Any, Any] = {
    Refusal: refused,
    HTTPException: refused_by_routes,
    ClientDisconnect: gone,
    Exception: failed,
}
