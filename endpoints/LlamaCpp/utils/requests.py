"""Bodies -> generation requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from backends.client import EngineClient
from backends.messages import ControlToken
from common.errors import Unsupported, check_characters, check_token_ids
from common.fim import fim_tokens
from common.generation import Constraint, GenerationRequest, TextSpan
from endpoints.LlamaCpp.types.request import CompletionFields, InfillRequest, LlamaCppCompletionRequest, Prompt
from endpoints.OAI.utils.generation import check_answers, generation_requests
from endpoints.state import loaded_info

F = TypeVar("F", bound=CompletionFields)

# Control tokens with which models mark the files of a repository: before its name, and before each file's.
REPOSITORY_TOKENS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))  # Qwen; StarCoder


class ReadyPrompt(NamedTuple):
    """A prompt for the engine.

    Attributes:
        text: of token ids too.
        literals: as in `GenerationRequest`.
    """

    prompt: str | list[int]
    text: str
    literals: Sequence[TextSpan] = ()


class Asked(NamedTuple):
    """One answer that was asked for."""

    request: GenerationRequest
    prompt: str


def wants_no_answer(body: CompletionFields, fields: CompletionFields) -> bool:
    """Whether a prompt shall only be processed.

    Args:
        body: as it came, with `n_predict: 0`. That of a preset means all that fit.
        fields: with presets applied, which may force another limit.
    """
    return "max_tokens" in body.model_fields_set and body.max_tokens == fields.max_tokens == 0


async def with_text_biases(fields: F, client: EngineClient) -> F:
    """The biases of texts become those of their tokens."""
    biases = dict(fields.logit_bias)
    for text, bias in fields.biased_texts.items():
        for token in await client.encode(text, add_bos=False, encode_special_tokens=False):
            biases.setdefault(token, bias)
    return fields.model_copy(update={"logit_bias": biases})


def answers_asked_for(
    fields: CompletionFields,
    prompts: Sequence[ReadyPrompt],
    constraints: Sequence[Constraint] = (),
    *,
    prompt_only: bool = False,
) -> list[Asked]:
    """`n` for each prompt, in order.

    Args:
        prompt_only: process the prompts, so that they are cached. The engine cannot but generate a token for that.

    Raises:
        InvalidRequest: fields contradict each other, or ask for what cannot be done.
    """
    _refuse_unsupported(fields)
    check_answers(len(prompts), fields.n, "n")
    if prompt_only:
        fields = fields.model_copy(update={"max_tokens": 1, "min_tokens": 0})
    return [
        Asked(request, prompt.text)
        for prompt in prompts
        for request in generation_requests(
            prompt.prompt,
            fields,
            count=fields.n,
            logprobs=fields.n_probs or None,
            constraints=constraints,
            add_bos=fields.add_bos_token,
            literals=prompt.literals,
        )
    ]


def _refuse_unsupported(fields: CompletionFields) -> None:
    if fields.post_sampling_probs and fields.n_probs:
        raise Unsupported(
            "post_sampling_probs is not available: probabilities are those that the model gives, before any sampler.",
            param="post_sampling_probs",
        )
    if fields.n_indent > 0:
        raise Unsupported("n_indent is not available.", param="n_indent")
    if any(adapter.scale for adapter in fields.lora):
        raise Unsupported("lora: adapters cannot be chosen by a request.", param="lora")


# --- prompts ------------------------------------------------------------------------------------------------------


async def completion_prompts(body: LlamaCppCompletionRequest, client: EngineClient) -> list[ReadyPrompt]:
    """Raises `InvalidRequest` for token ids outside the vocabulary."""
    return [await _ready(prompt, body.add_bos_token, client) for prompt in body.prompt]


async def _ready(prompt: Prompt, add_bos: bool | None, client: EngineClient) -> ReadyPrompt:
    texts = [prompt] if isinstance(prompt, str) else [part for part in prompt if isinstance(part, str)]
    check_characters(sum(map(len, texts)), loaded_info(client).max_seq_len, "prompt")
    if isinstance(prompt, str):
        return ReadyPrompt(prompt, prompt)
    check_token_ids([part for part in prompt if isinstance(part, int)], loaded_info(client).vocab_size, "prompt")
    tokens: list[int] = []
    for place, part in enumerate(prompt):
        if isinstance(part, str):
            tokens += await client.encode(part, add_bos=add_bos if place == 0 else False)
        else:
            tokens.append(part)
    return ReadyPrompt(tokens, await client.decode(tokens))


def infill_prompt(body: InfillRequest, control_tokens: Sequence[ControlToken]) -> ReadyPrompt:
    """The texts as the model was trained to see them. What they spell never is a control token.

    Raises:
        Unsupported: the model's tokenizer has no tokens for it.
    """
    tokens = fim_tokens(control_tokens)
    if tokens is None:
        raise Unsupported(
            "The loaded model cannot fill in the middle: its tokenizer has no tokens for it. Load a model that was "
            "trained for it."
        )
    written = _extra_files(body, control_tokens)
    for control, text in tokens.parts(body.input_prefix + body.prompt, body.input_suffix):
        written += [(control, False), (text, True)]
    return _joined(written)


_Part = tuple[str, bool]  # a text, and whether it is literal


def _extra_files(body: InfillRequest, control_tokens: Sequence[ControlToken]) -> list[_Part]:
    if not body.input_extra:
        return []
    known = {token.text for token in control_tokens}
    marks = next((marks for marks in REPOSITORY_TOKENS if known.issuperset(marks)), None)
    if marks is None:
        return [(f"{file.text}\n\n", True) for file in body.input_extra]
    repository, separator = marks
    written: list[_Part] = [(repository, False), ("repository\n", True)]
    for file in body.input_extra:
        written += [(separator, False), (f"{file.filename}\n{file.text}", True)]
    return [*written, (separator, False), ("file\n", True)]


def _joined(parts: Iterable[_Part]) -> ReadyPrompt:
    text = ""
    literals: list[TextSpan] = []
    for part, literal in parts:
        if literal and part:
            literals.append((len(text), len(text) + len(part)))
        text += part
    return ReadyPrompt(text, text, literals)
