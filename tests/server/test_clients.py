"""Real clients of OpenAI's API. Each is tested where it is installed (`pip install -e '.[clients]'`)."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.server.running import MODEL
from tests.server.test_structured import Item
from tests.server.test_tools import COUNT, TEMPLATES, tool

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages
TOOL = tool("total", COUNT)
MOST = 200  # tokens: enough for a call


@pytest.fixture
def url(server, monkeypatch):
    """The server with a template of tools. Calls are short: the tiny model would go on with further ones."""
    monkeypatch.setattr(server.llm.llm.tokenizer, "chat_template", TEMPLATES["Hermes and Qwen"])
    return server.url + "/v1"


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(url, responses):
    langchain = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    model = langchain.ChatOpenAI(
        model=MODEL, base_url=url, api_key="any", max_tokens=MOST, use_responses_api=responses, max_retries=0
    )
    assert model.invoke("x").content
    assert "".join(piece.text for piece in model.stream("x"))
    assert not model.bind_tools([TOOL], tool_choice="none").invoke("x").tool_calls
    (call,) = model.bind_tools([TOOL], tool_choice="total").invoke("x").tool_calls
    assert call["args"]["count"] in range(1, 10)
    once: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    pieces = list(model.bind_tools([TOOL], **once).stream("x"))
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece
    assert joined.tool_calls[0]["args"]["count"] in range(1, 10)
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Item, method=method).invoke("x"), Item)
    called = messages.AIMessage("", tool_calls=[{"name": "total", "args": {"count": 1}, "id": "c1"}])
    talk = [messages.HumanMessage("x"), called, messages.ToolMessage("3", tool_call_id="c1")]
    assert model.bind_tools([TOOL]).invoke(talk).usage_metadata["input_tokens"] > 0


@pytest.mark.parametrize("name", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(url, name):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    provider = pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider
    limits = {"max_tokens": MOST, "parallel_tool_calls": False}

    async def asked() -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0)
        model = getattr(models, name)(MODEL, provider=provider(openai_client=client))
        for output in (pydantic_ai.ToolOutput(Item), pydantic_ai.NativeOutput(Item)):
            agent = pydantic_ai.Agent(model, output_type=output, model_settings=limits)
            assert isinstance((await agent.run("x")).output, Item)
        async with pydantic_ai.Agent(model, model_settings=limits).run_stream("x") as stream:
            assert [text async for text in stream.stream_text()]
        await client.close()

    asyncio.run(asked())


@pytest.mark.parametrize("name", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(url, name):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    counts: list[int] = []

    @agents.function_tool
    def total(count: int) -> str:
        """Return the total."""
        counts.append(count)
        return "3"

    async def asked() -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0)
        model = getattr(agents, name)(MODEL, client)
        limits = agents.ModelSettings(max_tokens=MOST, tool_choice="required", parallel_tool_calls=False)
        typed = agents.Agent("a", model=model, output_type=Item, model_settings=agents.ModelSettings(max_tokens=MOST))
        assert isinstance((await agents.Runner.run(typed, "x")).final_output, Item)
        caller = agents.Agent(
            "a", model=model, tools=[total], model_settings=limits, tool_use_behavior="stop_on_first_tool"
        )
        assert (await agents.Runner.run(caller, "x")).final_output == "3"
        stream = agents.Runner.run_streamed(caller, "x")
        assert [event async for event in stream.stream_events()]
        assert stream.final_output == "3"
        await client.close()

    asyncio.run(asked())
    assert len(counts) == 2


@pytest.mark.parametrize("prefix", ["openai/", "hosted_vllm/"])
def test_litellm(url, prefix):
    litellm = pytest.importorskip("litellm")
    asked = {"model": prefix + MODEL, "api_base": url, "api_key": "any", "max_tokens": MOST}
    asked |= {"messages": [{"role": "user", "content": "x"}]}
    once = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "total"}}}
    (call,) = litellm.completion(**asked, **once).choices[0].message.tool_calls
    assert call.function.name == "total"
    pieces = list(litellm.completion(**asked, **once, stream=True))
    (call,) = litellm.stream_chunk_builder(pieces).choices[0].message.tool_calls
    assert call.function.name == "total"
    assert Item.model_validate_json(litellm.completion(**asked, response_format=Item).choices[0].message.content)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(server, url, mode):
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(server.client(), mode=getattr(instructor.Mode, mode))
    talk = [{"role": "user", "content": "x"}]
    assert client.chat.completions.create(
        model=MODEL, messages=talk, response_model=Item, max_retries=1, max_tokens=MOST
    )
