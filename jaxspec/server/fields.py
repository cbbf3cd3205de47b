"""Parsing and checking of a request's JSON fields, which have OpenAI's and vLLM's names.

A field that asks for something the server does not support is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxspec.api.chat import opening, tool_template
from jaxspec.api.grammars import Marks
from jaxspec.api.prompts import Prompt, as_list
from jaxspec.common.errors import UserError, quoted
from jaxspec.common.values import flag, unknown, whole
from jaxspec.options.keywords import ChatOptions
from jaxspec.options.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxspec.server.conversation import conversation
from jaxspec.server.reasoning import after_reasoning, template_variables
from jaxspec.server.refusal import Refusal, refusal_for
from jaxspec.server.structured import structured_outputs
from jaxspec.server.tools import Tools, tools_of

SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams))  # sampling fields, with vLLM's names
OWN = ("model", "stream", "stream_options", "response_format")
# Fields of requests for completions besides those in OWN and SAMPLING.
TEXT = ("prompt", "echo")
# Fields of chat requests besides those in OWN and SAMPLING. In a chat request `logprobs` is a flag, not a number.
CHAT = (
    "messages",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "top_logprobs",
    "max_completion_tokens",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
)
# Fields that are accepted and ignored, because they change no output.
HARMLESS = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "prediction",
)
# Unsupported field -> (values that are accepted because they ask for nothing; reason or remedy for the error message).
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "ask for n samples with logprobs, and choose"),
    "echo": ((False,), "completions echo their prompt, chats do not"),
    "suffix": (("",), "text is only continued"),
    "store": ((False,), "nothing is stored"),
    "service_tier": (("auto", "default", "flex", "scale", "priority", "fast"), "all requests are served alike"),
    "functions": (([],), "give them as tools"),
    "function_call": (("none", "auto"), "give tool_choice"),
    "modalities": ((["text"],), "the output is text"),
    "audio": ((), "the output is text"),
    "verbosity": (("medium",), "write it in the messages"),
    "web_search_options": ((), "nothing is searched"),
    "moderation": ((), "nothing is moderated"),
}
# Field -> largest number of its entries. The host reads all entries for each token, or they become device arrays.
MOST_ENTRIES = {"stop": 64, "stop_token_ids": 64, "bad_words": 128, "logit_bias": 1024, "tools": 128}
# Field -> largest number of characters of each entry. While the host searches for an entry, other requests wait.
LONGEST = {"stop": 1000, "bad_words": 256}


@dataclasses.dataclass(frozen=True)
class RequestFields:
    """The checked parameters of a request for text.

    params: sampling parameters, the same for all prompts.
    prompts: prompts to complete, each `params.n` times; None for a chat.
    messages: messages of a chat; empty for a completion.
    chat: options of the chat template, as jaxspec.api.chat.rendering takes them; empty for a completion.
    source: name of the field that holds the prompts or messages, for error messages.
    echo: whether each output follows its prompt in the answer.
    prompt_logprobs: value of the field of that name. `params` has a larger one if the echo needs it.
    fill: whether the output may be as long as the context allows after the prompt.
    stream: whether the answer is sent as events.
    usage: whether a stream ends with an event that gives the numbers of tokens of prompts and output.
    running_usage: whether each event of a stream with `usage` gives these numbers, for the output so far.
    tools: tools that the output of a chat may call; None if it may call none.
    reasoning: marks by which reasoning in the output of a chat is parted from the content; None if it is not.
    """

    params: SamplingParams
    prompts: list[Prompt] | None
    messages: list[dict[str, Any]]
    chat: ChatOptions
    source: str
    echo: bool
    prompt_logprobs: int | None
    fill: bool
    stream: bool
    usage: bool
    running_usage: bool
    tools: Tools | None = None
    reasoning: Marks | None = None

    @property
    def role(self) -> str:
        """Role of the message that a chat's output belongs to, as in vLLM."""
        opened = self.chat.get("add_generation_prompt", True)
        role: str = "assistant" if opened else self.messages[-1]["role"]
        return role

    @property
    def samples(self) -> int:
        """Number of samples of all prompts together."""
        return self.params.n * (1 if self.prompts is None else len(self.prompts))


def request_fields(
    body: Mapping[str, Any],
    *,
    chat: bool,
    model: str,
    room: int,
    chat_template: Any = None,
    special_tokens: Collection[str] = (),
    reasoning: Marks | None = None,
) -> RequestFields:
    """Parse and check the body of a request.

    chat: True for a body sent to /v1/chat/completions, False for one sent to /v1/completions.
    model: name of the served model, which the request has to give.
    room: largest number of tokens that a prompt and its output may have together.
    chat_template: the tokenizer's chat_template, which decides whether tools are supported.
    special_tokens: texts of the tokenizer's special tokens.
    reasoning: marks by which reasoning is parted from the content of a chat whose template has them; None if not.

    Raises: Refusal, which names the field.
    """
    given = {name: value for name, value in body.items() if value is not None}  # null asks for OpenAI's default
    source = "messages" if chat else "prompt"
    known = [*OWN, *SAMPLING, *(CHAT if chat else TEXT)]
    try:
        for name, value in given.items():
            check(name, value, known)
        if given.get("model") != model:
            raise no_such_model(given.get("model"), model)
        stream, options = streaming(given)
        sampling = {name: given[name] for name in SAMPLING if name in given}
        sampling["structured_outputs"] = structured_outputs(given)
        messages: list[dict[str, Any]] = []
        template: ChatOptions = {}
        tools = None
        prompts = None
        echo = False
        if chat:
            sampling |= {"logprobs": chat_logprobs(given), "max_tokens": chat_max_tokens(given, room)}
            rendered_by = tool_template(chat_template)
            messages = conversation(required(given, "messages"), rendered_by)
            tools = tools_of(given, rendered_by, special_tokens, sampling["structured_outputs"])
            opened = opening(given.get("add_generation_prompt"), given.get("continue_final_message", False))
            template = {"chat_template_kwargs": template_variables(given, rendered_by), **opened}
            if tools:
                template["tools"] = tools.described
                sampling |= tools.sampling()
            if reasoning and (reasoning.close not in rendered_by or (tools and tools.opening)):
                reasoning = None
            if reasoning:
                sampling["structured_outputs"] = after_reasoning(sampling["structured_outputs"], reasoning)
                if reasoning.open in special_tokens:
                    sampling["skip_special_tokens"] = False  # so that the text shows the marks
        else:
            prompts = prompts_of(required(given, "prompt"))
            echo = flag("echo", given.get("echo", False))
            sampling["prompt_logprobs"] = scored(given, echo)
        params = SamplingParams(**sampling)
        if stream and "prompt_logprobs" in given:
            raise Refusal(400, "prompt_logprobs come with a whole answer: leave stream out", param="prompt_logprobs")
    except UserError as error:
        raise refusal_for(error, source, given) from None
    return RequestFields(
        params,
        prompts,
        messages,
        chat=template,
        source=source,
        echo=echo,
        prompt_logprobs=given.get("prompt_logprobs"),
        fill=chat and not {"max_tokens", "max_completion_tokens"} & given.keys(),
        stream=stream,
        usage=options.get("include_usage", False),
        running_usage=options.get("continuous_usage_stats", False),
        tools=tools,
        reasoning=reasoning if chat else None,
    )


def check(name: str, value: Any, known: list[str]) -> None:
    """Raise Refusal if a field is unknown, has an unsupported value or is too long. known: names of valid fields."""
    if name in ONLY and name not in known:
        values, instead = ONLY[name]
        if not any(value == v and type(value) is type(v) for v in values):
            raise Refusal(400, f"{name}={quoted(value)} is not supported: {instead}", param=name)
    elif name not in known and name not in HARMLESS:
        message = str(unknown(name, "the request", known, "field"))
        raise Refusal(400, message, param=name[:80], code="unknown_parameter")
    most = MOST_ENTRIES.get(name)
    if most is not None and isinstance(value, list | dict) and len(value) > most:
        raise Refusal(400, f"{name} has {len(value)} entries, the server takes at most {most}", param=name)
    most = LONGEST.get(name)
    if most is not None:
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and len(text) > most:
                message = f"{name} holds {quoted(text, 40)}, of {len(text)} characters: the server takes at most {most}"
                raise Refusal(400, message, param=name)


def prompts_of(prompt: Any) -> list[Prompt]:
    """Return the prompts in the value of the field `prompt`.

    prompt: a string, a list of token ids, or a list of strings and lists of token ids.

    Raises: Refusal for another value.
    """
    prompts = as_list(prompt) if isinstance(prompt, str | list) else []
    if not prompts or not all(isinstance(p, str | list) for p in prompts):
        message = (
            f"prompt={quoted(prompt)} must be a string, a list of strings, a list of token ids, or a list of those"
        )
        raise Refusal(400, message, param="prompt")
    return prompts


def required(given: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field. Raise Refusal if the field is missing."""
    if name not in given:
        raise Refusal(400, f"{name} is missing", param=name, code="missing_required_parameter")
    return given[name]


def no_such_model(name: Any, model: str) -> Refusal:
    """Return the error for a request whose field `model` is missing or names another than the served model.

    name: value of the field, or None if it is missing.
    model: name of the served model.
    """
    if name is None:
        return Refusal(400, f"model is missing: give {model!r}", param="model", code="missing_required_parameter")
    return Refusal(
        404, f"model {quoted(name, 200)} is not served here: give {model!r}", param="model", code="model_not_found"
    )


def streaming(given: Mapping[str, Any]) -> tuple[bool, dict[str, bool]]:
    """Return the values of the fields `stream` and `stream_options`. Raise Refusal if they cannot be served."""
    stream = flag("stream", given.get("stream", False))
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise Refusal(400, f"stream_options={quoted(options)} must be an object", param="stream_options")
    if options and not stream:
        raise Refusal(400, "stream_options are for stream=true", param="stream_options")
    for name, value in options.items():
        if name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
            raise Refusal(400, f"unknown field {quoted(name)} of stream_options", param="stream_options")
        if flag(f"stream_options.{name}", value) and name == "include_obfuscation":
            raise Refusal(400, f"stream_options.{name}=true is not supported", param="stream_options")
    return stream, options


def scored(given: Mapping[str, Any], echo: bool) -> int | None:
    """Return SamplingParams.prompt_logprobs of a completion: those of the field of that name and of the echo."""
    names = ("prompt_logprobs", "logprobs") if echo else ("prompt_logprobs",)
    asked = [whole(name, given[name], 0, MAX_LOGPROBS) for name in names if name in given]
    if echo and given.get("max_tokens") == 0:  # needs prompt_logprobs in any case
        asked.append(0)
    return max(asked, default=None)


def chat_logprobs(given: Mapping[str, Any]) -> int | None:
    """Return SamplingParams.logprobs for a chat's fields `logprobs` (a flag) and `top_logprobs` (a number)."""
    wanted = flag("logprobs", given.get("logprobs", False))
    top = given.get("top_logprobs")
    if top is None:
        return 0 if wanted else None
    top = whole("top_logprobs", top, 0, MAX_LOGPROBS)
    if not wanted and top == 0:  # 0 is vLLM's default, which its clients send without logprobs
        return None
    if not wanted:
        raise Refusal(400, f"top_logprobs={top} needs logprobs=true", param="top_logprobs")
    return top


def chat_max_tokens(given: Mapping[str, Any], room: int) -> Any:
    """Return the largest number of output tokens of a chat: max_completion_tokens, else max_tokens, else `room`.

    room: largest number of tokens that a prompt and its output may have together.

    Raises: Refusal if the two fields differ.
    """
    newer = given.get("max_completion_tokens")
    older = given.get("max_tokens")
    if newer is not None:
        whole("max_completion_tokens", newer, 0 if "prompt_logprobs" in given else 1)
        if older is not None and older != newer:
            raise Refusal(400, "max_tokens and max_completion_tokens differ: give one", param="max_completion_tokens")
        return newer
    return room if older is None else older
