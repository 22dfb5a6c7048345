"""The response object as it is before anything of its answer is there."""

from __future__ import annotations

import time
import uuid

from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.Responses.types.request import ResponsesRequest
from endpoints.Responses.types.response import FormatUsed, ReasoningUsed, ResponseObject, ResponseStatus, TextUsed
from endpoints.Responses.utils.tools import ToolTable, shown_choice


def new_response(
    request: ResponsesRequest,
    body: ChatCompletionRequest,
    tools: ToolTable,
    *,
    model: str,
    status: ResponseStatus = "in_progress",
    store: bool,
) -> ResponseObject:
    """
    Args:
        body: the chat completion of the request, with the presets in force.
        store: whether it is kept.
    """
    form = request.text.format
    return ResponseObject(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        status=status,
        model=model,
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        store=store,
        background=request.background,
        max_output_tokens=body.max_tokens if body.max_tokens > 0 else None,
        max_tool_calls=request.max_tool_calls,
        temperature=body.temperature,
        top_p=body.top_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        top_logprobs=request.top_logprobs,
        reasoning=ReasoningUsed(effort=request.reasoning.effort, summary=request.reasoning.summary),
        text=TextUsed(
            format=FormatUsed(
                type=form.type, name=form.name, description=form.description, schema=form.schema_, strict=form.strict
            ),
            verbosity=request.text.verbosity,
        ),
        tools=tools.used,
        tool_choice=shown_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        truncation="disabled",
        metadata=request.metadata,
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
    )
