"""The engine's side of the pipe, in this process: every request gets a last message, and its job is ended."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Sequence
from io import FileIO

import msgspec
import pytest

from backends import messages
from backends.messages import FromEngine
from backends.worker import Worker
from backends.worker_process import is_out_of_memory, load_failure
from common.errors import InvalidRequest
from common.generation import Event, Finish, GenerationRequest, ImageInput, TextDelta, Usage
from tests.scripted import ScriptedEngine, ask, load_settings
from tests.scripted_worker import Script, ScriptedContainer

FINISH = Finish(reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=1))


class FakeJob:
    """A job that waits before its events."""

    prompt_tokens = 1

    def __init__(self, events: list[Event | Exception], cancel_error: Exception | None = None) -> None:
        self.cancelled = False
        self._events = events
        self._cancel_error = cancel_error

    async def events(self) -> AsyncIterator[Event]:
        await asyncio.sleep(0.01)
        for event in self._events:
            if isinstance(event, Exception):
                raise event
            yield event

    async def cancel(self) -> None:
        self.cancelled = True
        if self._cancel_error is not None:
            raise self._cancel_error


class FakeContainer(ScriptedContainer):
    def __init__(self, engine: ScriptedEngine, job: FakeJob) -> None:
        engine.write(Script())
        super().__init__(engine.script_path, engine.model_dir / "alpha", load_settings())
        self._job = job

    def start(self, request: GenerationRequest) -> FakeJob:  # type: ignore[override]  # of the protocol, not of a script
        return self._job


class Driven:
    """A worker that is handed messages, and what it writes."""

    def __init__(self, engine: ScriptedEngine, job: FakeJob, container: type[FakeContainer] = FakeContainer) -> None:
        self._container = container(engine, job)
        self._written = io.BytesIO()
        with FileIO(os.devnull) as incoming:  # is not read
            self._worker = Worker(lambda directory, settings: self._container, incoming, self._written)

    def handle(self, message: messages.ToEngine) -> None:
        self._worker._handle(self._container, message)

    async def rest(self) -> None:
        while self._worker._tasks:
            await asyncio.sleep(0.005)

    def said(self) -> list[FromEngine]:
        self._written.seek(0)
        said = []
        while header := self._written.read(messages.HEADER_BYTES):
            said.append(messages.from_engine_decoder.decode(self._written.read(messages.body_length(header))))
        return said


GENERATE, CANCEL = messages.Generate(id="1", request=ask()), messages.Cancel(id="1")
ACCEPTED, CANCELLED = messages.Accepted(id="1", prompt_tokens=1), messages.Cancelled(id="1")


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
async def test_a_request_cancelled_however_soon_ends_its_job(scripted: ScriptedEngine, turns: int) -> None:
    job = FakeJob([TextDelta("a", [1]), FINISH])
    worker = Driven(scripted, job)
    worker.handle(GENERATE)
    for _ in range(turns):
        await asyncio.sleep(0)
    worker.handle(CANCEL)
    await worker.rest()
    assert job.cancelled
    assert worker.said() == [ACCEPTED, CANCELLED]


class SeeingContainer(FakeContainer):
    """Takes a while to see an image, and fails at one without data."""

    async def see(self, images: Sequence[ImageInput]) -> None:
        await asyncio.sleep(0.02)
        if any(not image.data for image in images):
            raise InvalidRequest("The image is empty.", param=images[0].param)


def with_image(data: bytes = b"picture") -> GenerationRequest:
    image = ImageInput(spans=[(0, 2)], digest=b"", data=data, param="image")
    return msgspec.structs.replace(ask(), images=[image])


async def test_images_are_seen_before_a_request_is_accepted(scripted: ScriptedEngine) -> None:
    worker = Driven(scripted, FakeJob([FINISH]), SeeingContainer)
    worker.handle(messages.Generate(id="1", request=with_image()))
    assert worker.said() == []
    await worker.rest()
    assert worker.said() == [ACCEPTED, messages.Produced(id="1", event=FINISH)]


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
async def test_a_request_cancelled_while_its_images_are_seen(scripted: ScriptedEngine, turns: int) -> None:
    worker = Driven(scripted, FakeJob([FINISH]), SeeingContainer)
    worker.handle(messages.Generate(id="1", request=with_image()))
    for _ in range(turns):
        await asyncio.sleep(0)
    worker.handle(CANCEL)
    await worker.rest()
    assert worker.said() == [CANCELLED]


async def test_an_image_that_cannot_be_seen_fails_what_shows_it(scripted: ScriptedEngine) -> None:
    worker = Driven(scripted, FakeJob([FINISH]), SeeingContainer)
    request = with_image(b"")
    worker.handle(messages.Generate(id="1", request=request))
    worker.handle(messages.Explain(id="2", request=request))
    worker.handle(messages.Encode(id="3", text="hi", add_bos=None, encode_special_tokens=True, images=request.images))
    await worker.rest()
    said = worker.said()
    assert all(isinstance(message, messages.Failed) and message.error.param == "image" for message in said)
    assert len(said) == 3


async def test_what_shows_images_is_answered_when_they_are_seen(scripted: ScriptedEngine) -> None:
    worker = Driven(scripted, FakeJob([FINISH]), SeeingContainer)
    request = with_image()
    worker.handle(messages.Explain(id="2", request=request))
    worker.handle(messages.Encode(id="3", text="hi", add_bos=None, encode_special_tokens=True, images=request.images))
    assert worker.said() == []
    await worker.rest()
    explained, encoded = worker.said()
    assert isinstance(explained, messages.Explained)
    assert encoded == messages.Encoded(id="3", tokens=[104, 105])


async def test_a_request_cancelled_after_its_end(scripted: ScriptedEngine) -> None:
    job = FakeJob([FINISH])
    worker = Driven(scripted, job)
    worker.handle(GENERATE)
    await worker.rest()
    worker.handle(CANCEL)
    assert worker.said() == [ACCEPTED, messages.Produced(id="1", event=FINISH), CANCELLED]


async def test_a_job_that_ends_without_a_finish_is_told(scripted: ScriptedEngine) -> None:
    worker = Driven(scripted, FakeJob([TextDelta("a", [1])]))
    worker.handle(GENERATE)
    await worker.rest()
    assert worker.said()[-1] == CANCELLED


async def test_a_job_that_cannot_be_ended_is_told(scripted: ScriptedEngine, log_lines: list[str]) -> None:
    worker = Driven(scripted, FakeJob([TextDelta("a", [1])], RuntimeError("no")))
    worker.handle(GENERATE)
    await worker.rest()
    assert worker.said()[-1] == CANCELLED
    assert any("could not be ended in order" in line for line in log_lines)


async def test_a_failed_job_names_no_place_of_a_file(scripted: ScriptedEngine) -> None:
    worker = Driven(scripted, FakeJob([FileNotFoundError(2, "No such file", "/srv/models/alpha/weights.bin")]))
    worker.handle(GENERATE)
    await worker.rest()
    failed = worker.said()[-1]
    assert isinstance(failed, messages.Failed)
    assert failed.error.code == "engine_failed"
    assert failed.error.message.endswith("FileNotFoundError: [Errno 2] No such file: 'weights.bin'")


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Insufficient VRAM in split for model and cache"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (KeyError("x"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory


@pytest.mark.parametrize("text", ["the file is torn", "the file is torn."])
def test_a_load_that_a_library_fails_over_says_what_it_said(text: str) -> None:
    failure = load_failure("tiny", ValueError(text), too_large="Use less.", strange="Its files may be damaged.")
    assert str(failure) == "tiny: ValueError: the file is torn. Its files may be damaged."
