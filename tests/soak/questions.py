"""What is asked during a soak, and what the right answers are.

The models have random weights: nobody can say what is right but the model itself, asked alone with nothing cached.
Where its two best tokens are close, another order of the same sums may choose the other one; up to there an answer is
certain, and only that is compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from random import Random
from typing import Any, Final

import httpx

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
# Of the log-probabilities of two tokens. After a restored checkpoint the engine's logits differ by up to 0.011.
NEAR_TIE: Final = 0.05
ANSWER_TOKENS: Final = 12

TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"where": {"enum": ["left", "right"]}, "far": {"type": "boolean"}},
                "required": ["where", "far"],
                "additionalProperties": False,
            },
        },
    }
]
SCHEMA: Final = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "dog"]}, "quick": {"type": "boolean"}},
    "required": ["animal", "quick"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Question:
    """
    Attributes:
        name: unique.
        route: where it is asked.
        body: of the request, with all that the answer depends on.
    """

    name: str
    route: str
    body: Mapping[str, Any]

    @property
    def prompt(self) -> dict[str, Any]:
        """The members of the body that the prompt is made of."""
        return {name: self.body[name] for name in ("messages", "prompt", "tools") if name in self.body}


@dataclass(frozen=True)
class RightAnswer:
    """
    Attributes:
        text: the whole answer.
        certain: characters of it before the first near tie.
        prompt_tokens: length of the prompt.
    """

    text: str
    certain: int
    prompt_tokens: int

    def agrees(self, text: str) -> bool:
        return text[: self.certain] == self.text[: self.certain] and (
            self.certain < len(self.text) or text == self.text
        )

    def stop(self, random: Random) -> str | None:
        """A string that ends the answer within what is certain of it, if there is one."""
        places = [match.start() for match in re.finditer(r"(?=[a-z0-9]{2})", self.text[: self.certain])]
        return self.text[(place := random.choice(places)) : place + 2] if places else None


RightAnswers = dict[str, RightAnswer]  # by the question's name


def questions() -> Iterator[Question]:
    greedy = {"temperature": 0, "max_tokens": ANSWER_TOKENS}
    for number in range(6):
        prompt = f"Ada measured the river {number} near the harbour, slowly, because"
        yield Question(f"completion {number}", COMPLETIONS, {"prompt": prompt, **greedy})
    for number, words in enumerate((330, 500)):
        prompt = "The lantern and the compass. " * (words // 5) + f"Chapter {number}:"
        yield Question(f"long completion {number}", COMPLETIONS, {"prompt": prompt, **greedy})
    # One conversation of several turns, then edits of it: of the system prompt, of an early turn, of the last one.
    for edit in ("none", "system", "first", "last"):
        messages = conversation(edit)
        for turns in (2, 4, 6):
            yield Question(f"chat of {turns}, edit {edit}", CHAT, {"messages": messages[:turns], **greedy})
    yield Question("chat with tools", CHAT, {"messages": conversation("none")[:2], "tools": TOOLS, **greedy})


def conversation(edit: str) -> list[dict[str, str]]:
    def unless(place: str, text: str) -> str:
        return f"No, {edit}. {text}" if edit == place else text

    filler = "Greta described the orchard near the station, carefully, because the window had not been painted yet. "
    return [
        {"role": "system", "content": unless("system", "Be brief. " + filler * 8)},
        {"role": "user", "content": unless("first", "What did Greta describe? " + filler * 4)},
        {"role": "assistant", "content": "The orchard near the station. " + filler * 3},
        {"role": "user", "content": "And the window? " + filler * 3},
        {"role": "assistant", "content": "Not painted yet."},
        {"role": "user", "content": unless("last", "Who carried the lantern?")},
    ]


async def learn(
    http: httpx.AsyncClient, admin: httpx.AsyncClient, asked: Iterable[Question] | None = None
) -> RightAnswers:
    """Ask the loaded model everything once, one after the other and with an empty cache."""
    answers = {}
    for question in questions() if asked is None else asked:
        (await admin.post("/v1/cache/clear")).raise_for_status()
        logprobs = {"logprobs": True, "top_logprobs": 2} if question.route == CHAT else {"logprobs": 2}
        response = await http.post(question.route, json={**question.body, **logprobs})
        response.raise_for_status()
        answer = response.json()
        choice = answer["choices"][0]
        text = choice["message"]["content"] if question.route == CHAT else choice["text"]
        certain = certain_of_chat(choice) if question.route == CHAT else certain_of_completion(choice)
        # The bytes of a character may be spread over a certain token and one that is not.
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(text, certain.rstrip("\ufffd"), strict=False))
        answers[question.name] = RightAnswer(text, len(list(equal)), answer["usage"]["prompt_tokens"])
    return answers


def certain_of_chat(choice: dict[str, Any]) -> str:
    entries = choice["logprobs"]["content"]
    clear = takewhile(lambda entry: is_clear([top["logprob"] for top in entry["top_logprobs"]]), entries)
    return bytes(byte for entry in clear for byte in entry["bytes"]).decode(errors="replace")


def certain_of_completion(choice: dict[str, Any]) -> str:
    logprobs = choice["logprobs"]
    clear = sum(1 for _ in takewhile(lambda top: is_clear(list(top.values())), logprobs["top_logprobs"]))
    offsets = [*logprobs["text_offset"], logprobs["text_offset"][0] + len(choice["text"])]
    text: str = choice["text"]
    return text[: offsets[clear] - offsets[0]]


def is_clear(logprobs: list[float]) -> bool:
    # Two tokens with the same text are one entry of a completion's.
    return len(logprobs) > 1 and abs(logprobs[0] - logprobs[1]) > NEAR_TIE
