"""Process of one embedding model or reranker: `python -m backends.embeddings.worker`.

Reads messages from stdin, has sentence-transformers compute, writes messages to stdout. All of it happens in the event
loop of the main thread, in steps between which messages are taken: one thread alone calls torch.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import msgspec
from loguru import logger

from backends.embeddings import messages
from backends.embeddings.computing import Embedder, EmbeddingContainer, Judge, RerankContainer
from backends.embeddings.messages import Device, LoadModel, ToEmbedder
from backends.embeddings.model_files import find_kind
from backends.messages import Cancel, Cancelled, Failed, Shutdown
from backends.worker_process import WorkerProcess, is_out_of_memory, load_failure, open_pipes, request_failure
from common.errors import ServerError, Unsupported

Container: TypeAlias = EmbeddingContainer | RerankContainer
OpenModel: TypeAlias = Callable[[Path, Device], Container]

# `EmbeddingsConfig.embeddings_batch_tokens` says what they are.
GPU_TOKENS: Final = 16_384
CPU_TOKENS: Final = 1_024
MODEL_IS_STRANGE: Final = (
    "Its files may be damaged, or of a kind that sentence-transformers does not know; the server's log says more."
)
MODEL_TOO_LARGE: Final = "there is not enough memory to load it. Take a smaller model, or another embeddings_device."
REQUEST_TOO_LARGE: Final = "There is not enough memory for this request. Lower embeddings.embeddings_batch_tokens."
EXTRA_IS_MISSING: Final = (
    "Embedding models need sentence-transformers, which is not installed. Start once with --extra embeddings "
    '(start.sh, start.bat or start.py), or install it: pip install "sentence-transformers>=6,<7".'
)


class EmbeddingWorker(WorkerProcess[ToEmbedder]):
    """Has a model compute what the server asks until told to stop."""

    decoder = messages.to_embedder_decoder

    def __init__(self, open_model: OpenModel, incoming: FileIO, outgoing: BinaryIO) -> None:
        super().__init__(incoming, outgoing)
        self._open_model = open_model
        self._model: Embedder | Judge

    async def run(self) -> None:
        self._open()
        message = await self._inbox.get()
        if not isinstance(message, LoadModel):
            return
        try:
            container = self._load(Path(message.directory), message.device)
        except ServerError as error:
            self._tell_load_failed(error)
            return
        tokens = message.batch_tokens or (GPU_TOKENS if container.info.device == "cuda" else CPU_TOKENS)
        if isinstance(container, RerankContainer):
            self._model = Judge(container, tokens, self._report)
        else:
            self._model = Embedder(container, tokens, self._report)
        self._send(messages.ModelLoaded(info=container.info))
        self._serve_with(self._handle)
        computing = asyncio.create_task(self._model.stepper.run())
        await self._stopped.wait()
        computing.cancel()

    def _load(self, directory: Path, device: Device) -> Container:
        name = directory.name
        try:
            return self._open_model(directory, device)
        except ServerError:
            raise
        except Exception as error:
            if "trust_remote_code" in str(error):
                raise Unsupported(f"{name} needs code that comes with the model, which is never run.") from error
            raise load_failure(name, error, too_large=MODEL_TOO_LARGE, strange=MODEL_IS_STRANGE) from error

    def _handle(self, message: ToEmbedder) -> None:
        match message:
            case messages.Embed():
                self._run(message.id, self._answer(message.id, self._model.embed(message)))
            case messages.Rank():
                self._run(message.id, self._answer(message.id, self._model.rank(message)))
            case Cancel(id=request_id):
                if (task := self._tasks.get(request_id)) is not None:
                    # Not before the task has begun, which would never look at its work.
                    asyncio.get_running_loop().call_soon(task.cancel)
                self._send(Cancelled(id=request_id))
            case Shutdown():
                self._stopped.set()
            case LoadModel():
                logger.error("The engine process got LoadModel while it serves")

    async def _answer(self, request_id: str, work: Coroutine[Any, Any, msgspec.Struct]) -> None:
        try:
            self._send(await work)
        except Exception as error:
            self._send(Failed(id=request_id, error=request_failure(error, too_large=REQUEST_TOO_LARGE)))
            if _is_broken(error):
                logger.critical("The GPU failed; the process ends and is started again")
                # What else has failed with it is reported in this turn of the loop.
                asyncio.get_running_loop().call_later(0.1, os._exit, 1)

    def _report(self, request_id: str) -> None:
        self._send(messages.Computing(id=request_id))


def _is_broken(error: Exception) -> bool:
    """Whether no later request can succeed in this process."""
    return "CUDA error" in str(error) and not is_out_of_memory(error)


def open_model(directory: Path, device: Device) -> Container:
    """Load a model of either kind. Raises `ServerError`, or whatever the library does."""
    kind = find_kind(directory)
    # What is not in the folder is never fetched, and progress bars are nobody's here.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    if find_spec("sentence_transformers") is None:
        raise Unsupported(EXTRA_IS_MISSING)
    # Imported here: it takes seconds.
    from backends.embeddings.model import EmbeddingModel, Reranker

    return EmbeddingModel(directory, device) if kind == "embedding" else Reranker(directory, device)


def run(open_model: OpenModel) -> None:
    """Serve one server process over this process's stdin and stdout."""
    incoming, outgoing = open_pipes()
    asyncio.run(EmbeddingWorker(open_model, incoming, outgoing).run())
    # Nothing is left to do, and clearing away all that torch and the other libraries have brought takes seconds.
    os._exit(0)


if __name__ == "__main__":
    run(open_model)
