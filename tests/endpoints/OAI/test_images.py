"""Images in requests, from the body to what the engine gets; and what the real engine makes of them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from common.errors import Unsupported
from common.fetch import ImageFetcher
from common.generation import GenerationRequest
from endpoints.OAI.types.message import ChatMessage
from endpoints.OAI.utils import images
from endpoints.OAI.utils.images import NO_IMAGES, RequestImage, RequestImages, load_images
from tests.endpoints.running import RunningServer, running_server
from tests.pictures import BLUE, RED, data_url, picture
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Script
from tests.serving import ServerProcess

if TYPE_CHECKING:
    from openai import OpenAI

RED_URL, BLUE_URL = data_url(picture(RED)), data_url(picture(BLUE))
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a scripted model that sees. `pictures/cat.png` may be named."""
    root = tmp_path_factory.mktemp("seeing")
    (root / "pictures").mkdir()
    (root / "pictures" / "cat.png").write_bytes(picture(RED))
    engine = ScriptedEngine(root)
    engine.add_model("alpha")
    engine.write(Script(models={"alpha": ModelScript(tower=True)}))
    with running_server(engine, network={"image_dir": str(root / "pictures")}).running() as running:
        running.load("alpha", vision=True)
        yield running


def image(url: object, **part: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **part}


def user(*parts: object) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def sent(server: RunningServer, *messages: dict[str, Any], **body: object) -> GenerationRequest:
    """What a chat asks the engine for."""
    response = server.http.post(CHAT, json={"messages": messages, **body})
    assert response.status_code == 200, response.text
    return server.engine.history()[-1]


def with_marks(request: GenerationRequest) -> str:
    """The prompt with a mark in place of each image: its number among those of the request."""
    prompt = str(request.prompt)
    spans = [(span, number) for number, image in enumerate(request.images) for span in image.spans]
    for (start, end), number in sorted(spans, reverse=True):
        prompt = f"{prompt[:start]}[{number}]{prompt[end:]}"
    return prompt


def test_images_stand_where_they_stood_in_the_message(seeing: RunningServer) -> None:
    request = sent(
        seeing,
        {"role": "system", "content": [image(BLUE_URL), {"type": "text", "text": " is the sign."}]},
        user("See ", image(RED_URL), " and ", image(BLUE_URL, detail="high"), "."),
        {"role": "assistant", "content": "Yes."},
        user(image(RED_URL)),
    )
    assert [image.data for image in request.images] == [picture(BLUE), picture(RED)]
    assert [image.param for image in request.images] == [
        "messages.0.content.0.image_url.url",
        "messages.1.content.1.image_url.url",
    ]
    prompt = with_marks(request)
    assert "system\n[0] is the sign.<|im_end|>" in prompt
    assert "user\nSee [1] and [0].<|im_end|>" in prompt
    assert "user\n[1]<|im_end|>" in prompt
    assert "image" not in prompt


def test_an_image_in_the_result_of_a_tool(seeing: RunningServer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": ["shot: ", image(RED_URL)]}
    request = sent(seeing, user("look"), {"role": "assistant", "content": None, "tool_calls": [call]}, result)
    assert "shot: [0]" in with_marks(request)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": RED_URL},
        {"type": "input_image", "image_url": RED_URL, "detail": "auto"},
        {"type": "image", "image_url": {"url": RED_URL}},
        image(RED_URL.replace("data:image/png", "DATA:image/png;charset=utf-8")),
        image(RED_URL[:90] + "\r\n" + RED_URL[90:]),
        image("file://cat.png"),
    ],
)
def test_every_way_to_give_an_image(seeing: RunningServer, part: dict[str, Any]) -> None:
    prompt = sent(seeing, user("see ", part)).prompt
    assert prompt == sent(seeing, user("see ", image(RED_URL))).prompt
    assert seeing.engine.history()[-1].images[0].data == picture(RED)


def test_an_answer_that_shows_an_image_is_gone_on_from(seeing: RunningServer) -> None:
    begun = {"role": "assistant", "content": ["Here: ", image(RED_URL), " so "]}
    body = {"messages": [user("draw"), begun], "continue_final_message": True, "echo": True}
    response = seeing.http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "Here:  so Hello world"
    assert with_marks(seeing.engine.history()[-1]).endswith("Here: [0] so ")


def test_what_looks_like_the_name_of_an_image_is_text(seeing: RunningServer) -> None:
    """Also where a client has seen one: it can be no other image than those that it sends itself."""
    names = seeing.http.post("/apply-template", json={"messages": [user(image(RED_URL))]}).json()["prompt"]
    name = names.partition("user\n")[2].partition("<|im_end|>")[0]
    assert sent(seeing, user("name: ", name)).images == []
    [other] = sent(seeing, user("name: ", name, image(BLUE_URL))).images
    assert other.data == picture(BLUE)
    assert len(other.spans) == 1


def test_a_chat_with_an_image_goes_on_as_it_began(seeing: RunningServer) -> None:
    first = user("see ", image(RED_URL))
    begun = str(sent(seeing, first).prompt)
    answer = {"role": "assistant", "content": "Hello world"}
    going_on = sent(seeing, first, answer, user("and ", image(BLUE_URL)))
    assert str(going_on.prompt).startswith(f"{begun}Hello world<|im_end|>")
    assert [image.data for image in going_on.images] == [picture(RED), picture(BLUE)]
    changed = sent(seeing, user("see ", image(BLUE_URL)), answer, user("and"))
    assert not str(changed.prompt).startswith(begun)


def test_all_that_asks_about_a_prompt_knows_its_images(seeing: RunningServer) -> None:
    body = {"messages": [user("see ", image(RED_URL))]}
    explained = seeing.http.post("/v1/cache/explain", json=body)
    assert explained.status_code == 200, explained.text
    for route, field in (("/v1/token/encode", "length"), ("/tokenize", "count")):
        counted = seeing.http.post(route, json={**body, "add_generation_prompt": True}).json()[field]
        assert counted == len(str(sent(seeing, *body["messages"]).prompt))


def test_whether_a_model_sees_is_on_its_card(seeing: RunningServer) -> None:
    assert seeing.http.get("/v1/model").json()["parameters"]["use_vision"] is True
    assert seeing.http.get("/props").json()["modalities"]["vision"] is True


@pytest.mark.parametrize(
    ("part", "place", "message"),
    [
        ({"type": "image_url"}, "image_url", "image_url is missing"),
        ({"type": "input_image", "file_id": "file-1"}, "image_url", "image_url is missing"),
        (image("file:///etc/hosts"), "image_url.url", "no such image"),
        (image("file:../models/alpha/config.json"), "image_url.url", "no such image"),
        (image("cat.png"), "image_url.url", "needs a URL"),
        (image("http://127.0.0.1:1/cat.png"), "image_url.url", "could not be fetched"),
        (image("http://localhost/cat.png"), "image_url.url", "could not be fetched"),
        (image("data:image/png;base64,%%%"), "image_url.url", "not valid base64"),
    ],
)
def test_what_is_no_image_is_refused_with_its_place(
    seeing: RunningServer, part: dict[str, Any], place: str, message: str
) -> None:
    for stream in (False, True):
        response = seeing.http.post(CHAT, json={"messages": [user("see ", part)], "stream": stream})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, f"messages.0.content.1.{place}")
        assert message in error["message"]


@pytest.mark.parametrize(
    ("tower", "reason"),
    [(True, "the vision tower of alpha is not loaded. Set model.vision"), (False, "alpha has no vision")],
)
def test_who_cannot_see_says_why_before_anything_is_fetched(seeing: RunningServer, tower: bool, reason: str) -> None:
    assert seeing.manager.current is not None
    assert seeing.manager.current.info is not None
    info = msgspec.structs.replace(seeing.manager.current.info, use_vision=False, has_vision=tower)
    messages = [ChatMessage.model_validate(user("see ", image("http://127.0.0.1/cat.png")))]
    with pytest.raises(Unsupported, match=reason) as caught:
        asyncio.run(load_images(messages, info, ImageFetcher()))
    assert caught.value.param == "messages.0.content.1"


def test_answers_about_images_are_bounded(seeing: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_SENT_BYTES", 3 * len(picture(RED)))
    body = {"messages": [user(image(RED_URL))]}
    assert seeing.http.post(CHAT, json={**body, "n": 3}).status_code == 200
    response = seeing.http.post(CHAT, json={**body, "n": 4})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


def test_images_of_a_prompt_in_the_order_in_which_it_shows_them() -> None:
    one, two, unseen = (RequestImage(bytes([value]) * 16, b"data", f"messages.{value}") for value in (1, 2, 3))
    given = RequestImages({"one": one, "again": one, "two": two, "unseen": unseen})
    assert given.name_of("one") == given.name_of("again") == one.name
    assert given.name_of("other") is None
    shown = given.shown_in(f"a{two.name}b{one.name}{two.name}")
    width = len(one.name)
    assert [(image.digest, image.spans) for image in shown] == [
        (two.digest, [(1, 1 + width), (2 + 2 * width, 2 + 3 * width)]),
        (one.digest, [(2 + width, 2 + 2 * width)]),
    ]
    assert NO_IMAGES.shown_in(one.name) == []


# --- the real engine --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(hybrid_server: ServerProcess, tiny_vision: Path) -> ServerProcess:
    """The tiny model with a tower on the real engine."""
    with hybrid_server.client(hybrid_server.admin_key) as admin:
        response = admin.post("/v1/model/load", json={"model_name": tiny_vision.name, "vision": True})
    assert '"model_type":"vision"' in response.text.replace(" ", "")
    assert '"status":"finished"' in response.text, response.text
    return hybrid_server


def test_a_chat_about_pictures(real: ServerProcess) -> None:
    """Through the strict client: what it sees matters, and what it has seen is cached, in the next turn too."""
    large = {name: data_url(picture(colour, (256, 256))) for name, colour in (("red", RED), ("blue", BLUE))}
    text = "Ada carried the lantern near the harbour. " * 20
    red, blue = (user(image(large[name]), text) for name in ("red", "blue"))
    with real.openai() as client:
        asked = partial(answer_of, client, str(real.model))
        message, first, usage = asked(red)
        _, other, _ = asked(blue)
        _, both, _ = asked(user(image(large["red"]), image(large["blue"])))
        _, swapped, _ = asked(user(image(large["blue"]), image(large["red"])))
        _, again, cached = asked(red)
        answer = {"role": "assistant", "content": message.content}
        _, _, next_turn = asked(red, answer, user("and this ", image(RED_URL)))
    assert first != pytest.approx(other, abs=1e-3)
    assert both != pytest.approx(swapped, abs=1e-3)
    assert again == pytest.approx(first, abs=0.02)
    assert cached.prompt_tokens == usage.prompt_tokens
    assert cached.prompt_tokens_details.cached_tokens >= 256 > usage.prompt_tokens_details.cached_tokens == 0
    assert next_turn.prompt_tokens_details.cached_tokens >= 256
    assert next_turn.prompt_tokens > usage.prompt_tokens + 6

    with real.client() as http:
        for route, field in (("/v1/token/encode", "length"), ("/tokenize", "count")):
            body = {"messages": [red], "add_generation_prompt": True}
            assert http.post(route, json=body).json()[field] == usage.prompt_tokens
        found = http.post("/v1/cache/explain", json={"messages": [red]}).json()
        assert found["resumed_tokens"] >= 256
        assert http.get("/props").json()["modalities"]["vision"] is True


def answer_of(client: OpenAI, model: str, *messages: Any) -> tuple[Any, list[float], Any]:
    """The message, the log-probabilities of its tokens, and the usage."""
    answer = client.chat.completions.create(
        model=model, messages=list(messages), max_tokens=4, temperature=0, logprobs=True
    )
    [choice] = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert answer.usage is not None
    return choice.message, [entry.logprob for entry in choice.logprobs.content], answer.usage


@pytest.mark.parametrize("stream", [False, True])
def test_a_picture_that_the_engine_cannot_read(real: ServerProcess, stream: bool) -> None:
    broken = data_url(picture()[:-40])
    with real.client() as http:
        body = {"messages": [user("see ", image(broken))], "stream": stream, "max_tokens": 1}
        response = http.post(CHAT, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "messages.0.content.1.image_url.url")
        assert "cannot be read" in error["message"]
        assert http.post("/v1/token/encode", json=body).status_code == 400
        assert http.post(CHAT, json={**body, "messages": [user(image(RED_URL))]}).status_code == 200


def test_the_smallest_picture(real: ServerProcess) -> None:
    pixel = (
        "data:image/gif;base64,"
        + base64.b64encode(
            b"GIF89a\x01\0\x01\0\x80\0\0\xff\0\0\0\0\0!\xf9\x04\0\0\0\0\0,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;"
        ).decode()
    )
    with real.client() as http:
        response = http.post(CHAT, json={"messages": [user(image(pixel))], "max_tokens": 1})
    assert response.status_code == 200, response.text
