"""Fill in the middle: the prompt for the text between two others, as a model was trained for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from common.errors import Unsupported


class FimTokens(NamedTuple):
    """The control tokens of a family of models, and the order in which its prompts have the two texts."""

    prefix: str  # stands before the text that comes first in the document
    suffix: str  # before the one that comes last
    middle: str  # where the model goes on; none for models that go on with the prefix
    suffix_first: bool = False

    def parts(self, before: str, after: str) -> list[tuple[str, str]]:
        """What a prompt consists of, in its order: a control token, and the text that it stands before."""
        parts = [(self.prefix, before), (self.suffix, after)]
        return [*(reversed(parts) if self.suffix_first else parts), (self.middle, "")]

    def prompt(self, before: str, after: str) -> str:
        return "".join(control + text for control, text in self.parts(before, after))


FAMILIES = (
    FimTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Yi-Coder
    FimTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, SmolLM, StableCode
    FimTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FimTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    FimTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    FimTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    FimTokens("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    FimTokens("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)


class _Token(Protocol):
    @property
    def text(self) -> str: ...


def fim_tokens(control_tokens: Iterable[_Token]) -> FimTokens | None:
    """The family whose tokens are all among a tokenizer's; None where there is none."""
    texts = {token.text for token in control_tokens}
    return next((family for family in FAMILIES if texts.issuperset(filter(None, family[:3]))), None)


def fim_prompt(before: str, after: str, control_tokens: Iterable[_Token]) -> str:
    """The prompt for what stands between two texts.

    Raises:
        Unsupported: the tokenizer has no tokens for it.
    """
    tokens = fim_tokens(control_tokens)
    if tokens is None:
        raise Unsupported(
            "suffix is not possible with this model: its tokenizer has no fill-in-the-middle tokens. Leave suffix out, "
            "or load a model that was trained for it.",
            param="suffix",
        )
    return tokens.prompt(before, after)
