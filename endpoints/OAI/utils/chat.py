"""Chat completions: request -> generation requests, events -> pieces of answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from backends.messages import ControlToken
from common.errors import InvalidRequest
from common.generation import (
    Constraint,
    Echo,
    Event,
    Finish,
    FinishReason,
    GenerationRequest,
    ReasoningDelta,
    TextDelta,
    Thoughts,
    ToolCallDelta,
)
from common.parsing.dialect import ReadOptions
from common.parsing.events import AnswerReader
from common.parsing.grammar import answer_constraints
from common.parsing.tags import TagDialect
from endpoints.OAI.types.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    ChunkChoice,
    Delta,
)
from endpoints.OAI.types.common import Envelope, PromptLogprobs, PromptProgress, Usage
from endpoints.OAI.types.message import Unnamed
from endpoints.OAI.types.tools import CalledFunction, CalledFunctionDelta, CalledTool, CalledToolDelta
from endpoints.OAI.utils.generation import Codec, generation_requests, how_it_ended, most_logprobs
from endpoints.OAI.utils.images import NO_IMAGES, RequestImages, check_answers
from endpoints.OAI.utils.logprobs import chat_entries, prompt_entries
from endpoints.OAI.utils.prompt import ChatPrompt, PromptWriter


class ChatTurn:
    """A chat completion on its way from the request to the answers, whatever API it came by.

    Attributes:
        body: the request.
        prompt: which the answers go on from.

    Args:
        writer: of the model.
        images: of the request.

    Raises:
        InvalidRequest: the request cannot be served as it is.
    """

    def __init__(self, body: ChatCompletionRequest, writer: PromptWriter, images: RequestImages = NO_IMAGES) -> None:
        self.prompt = writer.chat(body, images)
        self.body = body
        self._writer = writer
        self._in_thought = self._begins_in_thought()

    def constraints(self, given: Sequence[Constraint], control_tokens: Sequence[ControlToken]) -> list[Constraint]:
        """What the engine has to enforce. Blocks while grammars are compiled.

        Args:
            given: of the text for the user.

        Raises:
            InvalidRequest: the schema of a tool is wrong, or cannot be enforced.
        """
        special_tokens = {token.text: token.token_id for token in control_tokens if token.special}
        return answer_constraints(
            self._writer.syntax.dialect,
            given,
            self.prompt.tools.rules,
            in_thought=self._in_thought,
            special_tokens=special_tokens,
        )

    def requests(self, constraints: Sequence[Constraint] = ()) -> list[GenerationRequest]:
        """One for each answer. Raises `InvalidRequest` where fields contradict each other."""
        body, (text, literals, stop_strings) = self.body, self.prompt.rendered
        check_answers(self.prompt.images, body.n)
        first, *others = generation_requests(
            text,
            body,
            count=body.n,
            logprobs=most_logprobs(_logprobs(body), body.prompt_logprobs),
            constraints=constraints,
            # Templates write the BOS themselves, or mean that there is none before their text that the tokenizer would
            # not add.
            add_bos=False if self._writer.template.begins_with_bos(text, literals) else None,
            literals=literals,
            images=self.prompt.images,
            stop_strings=stop_strings,
            thoughts=self._thoughts(),
            cache_boundaries=self.prompt.boundaries,
        )
        # All have the same prompt.
        return [msgspec.structs.replace(first, echo=body.prompt_logprobs is not None), *others]

    def reading(self) -> ReadAnswer:
        """What reads one of the answers."""
        dialect = self._writer.syntax.dialect
        if self.body.thoughts_in_content and isinstance(dialect, TagDialect):
            dialect = TagDialect(None, dialect.formats)
        tools = self.prompt.tools
        # Calls in thoughts are not enforced.
        in_thoughts = self._writer.model.tool_calls_in_reasoning and not (tools.rules and tools.rules.enforced)
        options = ReadOptions(tools.callable, self._in_thought, in_thoughts)
        return ReadAnswer(AnswerReader(dialect, options), self.prompt)

    def _begins_in_thought(self) -> bool:
        dialect, setting = self._writer.syntax.dialect, self._writer.model.start_in_reasoning
        if dialect.end_of_thought is None:
            return False
        if setting != "auto" and dialect.name == "tags":  # elsewhere the model says at its beginning what a text is
            return setting == "always"
        return dialect.begins_in_thought(self.prompt.text, self.prompt.given)

    def _thoughts(self) -> Thoughts | None:
        body, (dialect, tags, *_), model = self.body, self._writer.syntax, self._writer.model
        if dialect.end_of_thought is None:
            return None
        budget = model.reasoning_budget_tokens if body.reasoning_budget is None else body.reasoning_budget
        message = body.reasoning_budget_message
        start, end = tags or ("", "")
        return Thoughts(
            dialect=dialect.name,
            start=start,
            end=end,
            inside=self._in_thought,
            budget=budget if budget is not None and budget >= 0 else None,
            message=(model.reasoning_budget_message if message is None else message) or "",
        )


class ReadAnswer:
    """Reads one answer as it is generated, and keeps it for the next turn once it is finished.

    Attributes:
        reader: knows what the answer consists of so far.
    """

    def __init__(self, reader: AnswerReader, prompt: ChatPrompt) -> None:
        self.reader = reader
        self._prompt = prompt
        self._token_ids: list[int] = []

    def read(self, event: Event) -> Iterator[Event]:
        """What an event of the engine's says."""
        if isinstance(event, TextDelta):
            self._token_ids += event.token_ids
        yield from self.reader.read(event)
        if isinstance(event, Finish):
            self._prompt.remember(self.reader, self._token_ids)


def _logprobs(body: ChatCompletionRequest) -> int | None:
    """How many alternatives to report for each token; None for no log-probabilities."""
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        return body.n_probs or None
    # TabbyAPI also takes a number, as the older API does.
    return body.top_logprobs or (0 if body.logprobs is True else int(body.logprobs))


class ChatCodec(Codec[ChunkChoice, ChatCompletion, ChatCompletionChunk]):
    """Renders the answers to one chat completion."""

    def __init__(self, envelope: Envelope, turn: ChatTurn) -> None:
        body = turn.body
        super().__init__(envelope, body, body.n)
        self._answers = [turn.reading() for _ in range(body.n)]
        self._preface = _gone_on_from(body) if body.echo else ""
        self._shows_thoughts = body.shows_thoughts
        self._both_names = body.include_reasoning is True
        self._logprobs = _logprobs(body)
        self._alternatives_of_prompt = body.prompt_logprobs or 0
        self._prompt_logprobs: PromptLogprobs | None = None
        self._begun: set[int] = set()

    def finish_reason(self, index: int, finish: Finish) -> FinishReason:
        return self._answers[index].reader.finish_reason(finish)

    def pieces(self, index: int, event: Event) -> Iterator[ChunkChoice]:
        if index not in self._begun:
            self._begun.add(index)
            yield ChunkChoice(index=index, delta=Delta(role="assistant", content=""))
            if self._preface:
                yield ChunkChoice(index=index, delta=Delta(content=self._preface))
        for part in self._answers[index].read(event):
            if (piece := self._piece(index, part)) is not None:
                yield piece

    def _piece(self, index: int, event: Event) -> ChunkChoice | None:
        match event:
            case Finish():
                return ChunkChoice(index=index, delta=Delta(), **how_it_ended(event))
            case Echo():
                self._prompt_logprobs = prompt_entries(event, self._alternatives_of_prompt)
            case TextDelta(text, _, sampled):
                logprobs = None
                if self._logprobs is not None and sampled:
                    logprobs = ChatLogprobs(content=chat_entries(sampled, self._logprobs))
                if text or logprobs:
                    return ChunkChoice(index=index, delta=Delta(content=text), logprobs=logprobs)
            case ReasoningDelta(text) if self._shows_thoughts:
                return ChunkChoice(index=index, delta=Delta(reasoning_content=text, reasoning=self._again(text)))
            case ToolCallDelta(number, id, name, arguments):
                call = CalledToolDelta(
                    index=number,
                    id=id,
                    type=None if id is None else "function",
                    function=CalledFunctionDelta(name=name, arguments=arguments),
                )
                return ChunkChoice(index=index, delta=Delta(tool_calls=[call]))
        return None

    def _again(self, thought: str | None) -> str | None:
        """A thought under its other name, for clients that want that too."""
        return thought if self._both_names else None

    def chunk(
        self, choices: list[ChunkChoice], *, usage: Usage | None = None, progress: PromptProgress | None = None
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._head, choices=choices, usage=usage, prompt_progress=progress)

    def whole(self, answers: Sequence[Sequence[ChunkChoice]], usage: Usage) -> ChatCompletion:
        choices = [self._joined(index, pieces) for index, pieces in enumerate(answers)]
        return ChatCompletion(**self._head, choices=choices, usage=usage, prompt_logprobs=self._prompt_logprobs)

    def _joined(self, index: int, pieces: Sequence[ChunkChoice]) -> ChatChoice:
        entries = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs.content]
        return ChatChoice(
            index=index,
            message=self._message(self._answers[index].reader),
            logprobs=ChatLogprobs(content=entries) if self._logprobs is not None else None,
            finish_reason=pieces[-1].finish_reason,
            eos_reason=pieces[-1].eos_reason,
            stop_str=pieces[-1].stop_str,
        )

    def _message(self, answer: AnswerReader) -> AssistantMessage:
        content = self._preface + answer.content
        calls = [
            CalledTool(id=call.id or "", function=CalledFunction(name=call.name, arguments=call.arguments))
            for call in answer.calls
        ]
        thought = answer.reasoning if answer.reasoning and self._shows_thoughts else None
        return AssistantMessage(
            content=content if content or not (calls or answer.reasoning) else None,
            reasoning_content=thought,
            reasoning=self._again(thought),
            tool_calls=calls or None,
        )


def _gone_on_from(body: ChatCompletionRequest) -> str:
    """The text of the assistant's that the answer goes on from."""
    last = body.messages[-1]
    path = f"messages.{len(body.messages) - 1}"
    texts = last.texts(path, Unnamed()) if last.role == "assistant" else []
    return "".join(texts) + (body.response_prefix or "")
