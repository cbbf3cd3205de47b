"""The web application of the server: its routes, middleware and error handlers."""

from __future__ import annotations

import dataclasses
import functools
import hmac
import time
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, TypeVar

import prometheus_client
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from openai.types import Model
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.grammars import Marks, marks_of
from jaxspec.api.metrics import Metrics
from jaxspec.common.errors import quoted
from jaxspec.server import body as bodies
from jaxspec.server import page
from jaxspec.server.answers import Base, ChatAnswer, TextAnswer
from jaxspec.server.control_tokens import control_tokens
from jaxspec.server.fields import RequestFields, no_such_model, request_fields
from jaxspec.server.gate import Gate
from jaxspec.server.generation import Generation
from jaxspec.server.guard import Guard
from jaxspec.server.parted_answers import PartedAnswer
from jaxspec.server.prepared import room_of
from jaxspec.server.refusal import Refusal
from jaxspec.server.request_log import RequestLog
from jaxspec.server.response_answers import ResponseAnswer
from jaxspec.server.responses import response_fields
from jaxspec.server.settings import ANY, ServerConfig
from jaxspec.server.tokenization import Tokenization, Tokenize, detokenize_fields, tokenize_fields

T = TypeVar("T")

# Methods and headers that pages of allowed origins may send, and response headers that they may read.
CORS: dict[str, Any] = {
    "allow_methods": ("GET", "HEAD", "POST"),
    "allow_headers": (ANY,),
    "expose_headers": ("Retry-After", "X-Should-Retry"),
}


@dataclasses.dataclass(frozen=True)
class Served:
    """The state that the routes of an application share.

    model: name that clients use for the model.
    gate: object that limits the number of samples that are served at a time.
    created: time at which the application was made, in seconds since the epoch.
    room: largest number of tokens that a prompt and its output may have together.
    control: text of each control token, such as <|im_end|>, that requests may not contain, by token id.
    special_tokens: texts of all control tokens of the tokenizer.
    reasoning: marks by which reasoning is parted from the content of chats; None if it is not.
    """

    llm: AsyncLLM
    config: ServerConfig
    model: str
    gate: Gate
    metrics: Metrics
    created: int
    room: int
    control: Mapping[int, str]
    special_tokens: Collection[str]
    reasoning: Marks | None

    async def check_alive(self) -> None:
        """Raise Refusal with status 503 if the engine has ended."""
        try:
            await self.llm.check_health()
        except RuntimeError:
            message = "the engine has ended, and serves no request any more: restart the server"
            raise Refusal(503, message, code="engine_ended") from None

    async def generation(self, request: Request, *, chat: bool) -> Generation:
        """Read a request for text and return the response that generates its answer.

        chat: whether the request is for chat completions.

        Raises: Refusal for a request that is invalid or that the server does not admit now.
        """
        parsed = await self.read(request, functools.partial(self.fields, chat=chat))
        kind = PartedAnswer if parsed.tools or parsed.reasoning else ChatAnswer if chat else TextAnswer
        return self.generated(request, parsed, kind(self.model, parsed))

    async def response(self, request: Request) -> Generation:
        """Read a request for a response of the Responses API, and return it as `generation` does."""
        chat = functools.partial(self.fields, chat=True)
        parsed = await self.read(request, functools.partial(response_fields, parse=chat))
        return self.generated(request, parsed.chat, ResponseAnswer(self.model, parsed))

    def generated(self, request: Request, parsed: RequestFields, answer: Base) -> Generation:
        """Return the response that generates an answer."""
        request.state.answer = answer  # read by the request log
        return Generation(self.llm, self.gate, parsed, answer, self.room, self.config, self.control)

    def fields(self, body: Mapping[str, Any], *, chat: bool) -> RequestFields:
        """Return the fields of a request for text. Raise Refusal for a field that is wrong."""
        return request_fields(
            body,
            chat=chat,
            model=self.model,
            room=self.room,
            chat_template=getattr(self.llm.llm.tokenizer, "chat_template", None),
            special_tokens=self.special_tokens,
            reasoning=self.reasoning,
        )

    async def read(self, request: Request, parse: Callable[[dict[str, Any]], T]) -> T:
        """Read a request's body, and return the result of `parse` on its JSON object. Raise Refusal as `generation`."""
        self.gate.check()  # a busy server refuses before it reads the body
        await self.check_alive()
        async with self.gate.arriving():
            return await bodies.read(request, self.config.max_body_bytes, self.config.request_timeout, parse)

    def check_model(self, name: Any) -> None:
        """Raise Refusal for a name other than the served model's."""
        if name != self.model:
            raise no_such_model(name, self.model)

    def tokenization(self, fields: Tokenize | list[int]) -> Tokenization:
        """Return the response to a request to tokenise or detokenise. fields: checked fields of the request."""
        return Tokenization(self.llm, self.gate, fields, self.room, self.config.request_timeout)

    def described(self) -> dict[str, Any]:
        """Return a description of the served model in OpenAI's form, with vLLM's field max_model_len."""
        found = Model(id=self.model, object="model", created=self.created, owned_by="jaxspec")
        return found.model_dump(exclude_unset=True) | {"max_model_len": self.room}


def make_app(llm: AsyncLLM, config: ServerConfig, model: str, gate: Gate) -> FastAPI:
    """Return the web application that serves an LLM.

    model: name that clients use for the model.
    gate: object that limits the number of samples that are served at a time.
    """
    if getattr(llm.llm.tokenizer, "chat_template", None):
        llm.templates.start()  # starts the process that renders chat templates; else the first chat would wait for it
    # There is no OpenAPI document, because fields.py checks bodies by its own tables, which a schema would not show.
    app = FastAPI(title="jaxspec", openapi_url=None)
    special = control_tokens(llm.llm.tokenizer)
    control = special if config.refuse_control_tokens else {}
    started, texts = int(time.time()), frozenset(special.values())
    reasoning = marks_of(llm.llm.tokenizer) if config.separate_reasoning else None
    app.state.served = Served(llm, config, model, gate, Metrics(llm), started, room_of(llm), control, texts, reasoning)
    app.include_router(routes)
    if config.page:
        app.include_router(page.routes)
    if config.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=config.allowed_origins, **CORS)
    app.add_middleware(Guard, config=config)  # runs before the CORS middleware, because it is added later
    if config.enable_log_requests:
        app.add_middleware(RequestLog)
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    return app


# The routes get the model from the request's application. FastAPI would keep a model that a route refers to until the
# process ends.

routes = APIRouter()
get = functools.partial(routes.api_route, methods=["GET", "HEAD"])
Key = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


def served_by(request: Request) -> Served:
    """Return the shared state of the application to which a request came."""
    served: Served = request.app.state.served
    return served


CurrentServed = Annotated[Served, Depends(served_by)]


async def allowed(key: Key, served: CurrentServed) -> None:
    """Raise Refusal for a request without the server's API key, if the server has one."""
    expected = served.config.api_key
    given = key.credentials if key else ""
    if expected and not hmac.compare_digest(given.encode(), expected.encode()):
        headers = {"WWW-Authenticate": "Bearer"}
        raise Refusal(401, "the API key is missing or wrong", code="invalid_api_key", headers=headers)


@routes.post("/v1/completions", dependencies=[Depends(allowed)], response_model=None)
async def completions(request: Request, served: CurrentServed) -> Response:
    """Complete one or more prompts (OpenAI's completions)."""
    return await served.generation(request, chat=False)


@routes.post("/v1/chat/completions", dependencies=[Depends(allowed)], response_model=None)
async def chat_completions(request: Request, served: CurrentServed) -> Response:
    """Answer a conversation (OpenAI's chat completions)."""
    return await served.generation(request, chat=True)


@routes.post("/v1/responses", dependencies=[Depends(allowed)], response_model=None)
async def responses(request: Request, served: CurrentServed) -> Response:
    """Answer a conversation in OpenAI's newer form (OpenAI's responses)."""
    return await served.response(request)


@routes.post("/tokenize", dependencies=[Depends(allowed)], response_model=None)
async def tokenize(request: Request, served: CurrentServed) -> Response:
    """Return the token ids of a text or a chat (vLLM's route)."""
    parse = functools.partial(tokenize_fields, parse=served.fields, model=served.model)
    return served.tokenization(await served.read(request, parse))


@routes.post("/detokenize", dependencies=[Depends(allowed)], response_model=None)
async def detokenize(request: Request, served: CurrentServed) -> Response:
    """Return the text of token ids (vLLM's route)."""
    vocab_size = served.llm.llm.engine.limits.vocab_size
    parse = functools.partial(detokenize_fields, vocab_size=vocab_size, check_model=served.check_model)
    return served.tokenization(await served.read(request, parse))


@get("/v1/models/", dependencies=[Depends(allowed)])
@get("/v1/models", dependencies=[Depends(allowed)])
async def models(served: CurrentServed) -> dict[str, Any]:
    """List the one model that is served."""
    return {"object": "list", "data": [served.described()]}


@get("/v1/models/{name:path}", dependencies=[Depends(allowed)])
async def model_of(name: str, served: CurrentServed) -> dict[str, Any]:
    """Describe the served model. Answer any other name with status 404."""
    if name != served.model:
        message = f"model {quoted(name, 200)} is not served here: use {served.model!r}"
        raise Refusal(404, message, code="model_not_found")
    return served.described()


@get("/health")
async def health(served: CurrentServed) -> dict[str, str]:
    """Answer with status 200 while the engine runs and the server is not shutting down."""
    served.gate.check(0)
    await served.check_alive()
    return {"status": "ok"}


@get("/metrics")
async def scrape(served: CurrentServed) -> Response:
    """Return the metrics in Prometheus' text format."""
    body = prometheus_client.generate_latest(served.metrics.registry)
    return Response(body, headers={"content-type": prometheus_client.CONTENT_TYPE_LATEST})


# The following functions make the responses for exceptions that routes raise.


async def refused(request: Request, error: Refusal) -> Response:
    """Return the response for a Refusal, an error that is meant for the client."""
    request.state.refusal = error  # read by the request log
    return error.response()


async def refused_by_routes(request: Request, error: HTTPException) -> Response:
    """Return the response, in OpenAI's form, for an error of FastAPI's routing, such as an unknown path."""
    return await refused(request, Refusal(error.status_code, str(error.detail), headers=error.headers))


async def gone(_: Request, error: Exception) -> Response:
    """Return a response for a client that has disconnected. Nobody reads the response."""
    return Response(status_code=499)


async def failed(_: Request, error: Exception) -> Response:
    """Return the response, without details, for an unexpected error. The server's log has the traceback."""
    return Refusal(500, "the server failed").response()


HANDLERS: dict[Any, Any] = {
    Refusal: refused,
    HTTPException: refused_by_routes,
    ClientDisconnect: gone,
    Exception: failed,
}
