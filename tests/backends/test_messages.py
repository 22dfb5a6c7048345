"""Frames, however the pipe cuts them."""

from __future__ import annotations

import pytest

from backends.messages import Cancelled, Decoded, FromEngine, frame, from_engine_decoder, take_frames

MESSAGES: list[FromEngine] = [Decoded(id="1", text=""), Decoded(id="2", text="é" * 300), Cancelled(id="3")]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 100, 1000])
def test_frames_are_taken_as_soon_as_they_are_complete(size: int) -> None:
    written = b"".join(map(frame, MESSAGES))
    buffer, taken = bytearray(), []
    for start in range(0, len(written), size):
        buffer += written[start : start + size]
        taken += [from_engine_decoder.decode(body) for body in take_frames(buffer)]
        assert b"".join(map(frame, taken)) + buffer == written[: start + size]
    assert taken == MESSAGES
    assert not buffer


def test_what_comes_before_garbage_is_not_lost() -> None:
    frames = take_frames(bytearray(frame(MESSAGES[0]) + b"Traceback"))
    assert from_engine_decoder.decode(next(frames)) == MESSAGES[0]
    with pytest.raises(ValueError, match="not the beginning of a frame"):
        next(frames)
