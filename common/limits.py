"""How much a request, or a model's folder, may hold of what costs more than its bytes do. Each limit is far beyond what
is sent or published.

What is bounded by `network.max_body_mb` alone has none here: text is worked on in a time that grows with its length.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from pydantic import Field

# --- the body -----------------------------------------------------------------------------------------------------

MAX_BODY_MARKS: Final = 1_000_000  # commas and opening brackets, also in text: no JSON has more values
MAX_DEPTH: Final = 200  # of lists and objects within each other
MAX_CONTAINERS: Final = 40_000  # lists and objects: each is checked, and MAX_MESSAGES in parts have three for each

# --- what is generated --------------------------------------------------------------------------------------------

MAX_ANSWERS: Final = 128  # of one request, to all of its prompts together
MAX_PROMPTS: Final = 128
MAX_TOP_LOGPROBS: Final = 20

# --- what every token is compared with ----------------------------------------------------------------------------

MAX_STOPS: Final = 256
MAX_BANNED_STRINGS: Final = 2_000
MAX_BREAKERS: Final = 256
MAX_LISTED_TOKENS: Final = 100_000
MAX_BIASES: Final = 20_000
MAX_LOOP_WINDOW: Final = 10_000  # tokens

# --- conversations ------------------------------------------------------------------------------------------------

MAX_MESSAGES: Final = 10_000
MAX_PARTS: Final = 1_000  # of one message
MAX_CALLS: Final = 1_000  # of one message
MAX_IMAGES: Final = 32  # of all messages
MAX_TOOLS: Final = 1_000

# --- others -------------------------------------------------------------------------------------------------------

MAX_CHOICES: Final = 10_000  # of which an answer is one
MAX_WORDS: Final = 64  # in lists of names, such as llama.cpp's samplers
MAX_FILES: Final = 1_000  # around the text to fill in
MAX_PATTERNS: Final = 1_000  # of names of files to download
MAX_TOKENIZED: Final = 4_000_000  # characters, where tokens are all that is asked for
MAX_ENCODED: Final = 256  # texts that become tokens one by one, between token ids or as biases

# --- embeddings ---------------------------------------------------------------------------------------------------

MAX_EMBEDDED: Final = 2_048  # texts of one request, as with OpenAI
MAX_RANKED: Final = 2_048  # documents of one request

# --- files of a model ---------------------------------------------------------------------------------------------

MAX_CONFIG_BYTES: Final = 16_000_000  # of its configurations in JSON; the largest that are published have a tenth of it
MAX_ADAPTER_WEIGHTS: Final = 20_000  # of a LoRA adapter, which has two for each linear layer that it changes

_MAX_SHORT: Final = 1_000  # characters
ShortText: TypeAlias = Annotated[str, Field(max_length=_MAX_SHORT)]


def at_most(limit: int) -> object:
    """Of a list: how long it may be. The first item that is wrong ends the check, so that a long list has one error."""
    return Field(max_length=limit, fail_fast=True)
