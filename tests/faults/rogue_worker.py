"""A worker process that breaks the protocol in the way that a prompt names.

    python -m tests.faults.rogue_worker

It answers "garbage", "length", "unknown load", "close", "flood", "strangers", "echo", "orphan" and "fork"; other
prompts get "Hello". Calls are never answered, except `Encode`, which is answered with the wrong message.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from backends import messages
from backends.messages import FromEngine
from common.generation import Finish, TextDelta, Usage
from tests.scripted import load_settings
from tests.scripted_worker import ScriptedContainer

ENDLESS_BYTES = 3_000_000
FLOOD_LINES = 20_000


def write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def send(message: FromEngine) -> None:
    write(messages.frame(message))


def answer(request_id: str, text: str = "Hello") -> None:
    send(messages.Accepted(id=request_id, prompt_tokens=1))
    send(messages.Produced(id=request_id, event=TextDelta(text, [1])))
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    send(messages.Produced(id=request_id, event=Finish(reason="stop", usage=usage)))


def misbehave(request_id: str, how: str) -> None:
    match how:
        case "garbage":
            write((100).to_bytes(messages.HEADER_BYTES, "big") + b"x" * 100)
        case "length":
            write(b"Traceback (most recent call last)")
        case "unknown load":
            send(messages.LoadProgress(component="model", module=1, modules=1))
        case "close":
            os.close(sys.stdout.fileno())
            sys.stdin.read()
        case "flood":
            sys.stderr.write("x" * ENDLESS_BYTES)
            sys.stderr.write("\n" + "a line\n" * FLOOD_LINES + "the last line\n")
            sys.stderr.flush()
            answer(request_id)
        case "strangers":
            send(messages.Accepted(id="nobody", prompt_tokens=1))
            send(messages.Produced(id="nobody", event=TextDelta("?", [1])))
            send(messages.Pieces(id="nobody", pieces=[]))
            send(messages.Cancelled(id="nobody"))
            answer(request_id)
        case "echo":
            answer(request_id)
            answer(request_id, "again")
            send(messages.Cancelled(id=request_id))
        case "orphan":  # outlives this process, and holds its stderr open
            code = "import sys, time; print(1, flush=True); time.sleep(float(sys.argv[1]))"
            child = subprocess.Popen([sys.executable, "-c", code, "8"], stdout=subprocess.PIPE)
            assert child.stdout is not None
            child.stdout.read(1)
            os._exit(5)
        case "fork":  # as "orphan", but all pipes are held open, and something waits to be read meanwhile
            if (left_behind := os.fork()) == 0:
                time.sleep(600)
                os._exit(0)
            print(f"left behind: {left_behind}", file=sys.stderr, flush=True)
            time.sleep(0.5)
            os._exit(5)
        case _:
            answer(request_id)


def read() -> messages.ToEngine | None:
    header = sys.stdin.buffer.read(messages.HEADER_BYTES)
    if not header:
        return None
    return messages.to_engine_decoder.decode(sys.stdin.buffer.read(messages.body_length(header)))


def main() -> None:
    script = Path(sys.argv[1])
    if not script.exists():
        script.write_bytes(b"{}")
    while (message := read()) is not None:
        match message:
            case messages.Prepare(directory=directory):
                container = ScriptedContainer(script, Path(directory), load_settings())
                send(messages.Prepared())
            case messages.Load():
                send(messages.Loaded(info=container.info()))
            case messages.Generate(id=request_id, request=request):
                misbehave(request_id, str(request.prompt))
            case messages.Encode(id=call_id):
                send(messages.Decoded(id=call_id, text="?"))
            case messages.Shutdown():
                return


if __name__ == "__main__":
    main()
