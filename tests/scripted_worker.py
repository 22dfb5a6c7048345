"""A worker process whose "engine" plays a script: exact texts, timings and faults over the real protocol.

    python -m tests.scripted_worker SCRIPT

SCRIPT is the path of a JSON `Script`. A token is a character, its id the code point; the most likely others are those
that follow it. A thought that has spent its budget is ended as by the real engine, and what the script has left of it
is skipped. Every request that arrives is appended to SCRIPT + ".history", one JSON `GenerationRequest` a line.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec
from loguru import logger

from backends import worker
from backends.messages import CheckpointInfo, ControlToken, LoadProgress, Lora, ModelInfo
from common.caching import (
    CacheChange,
    CacheExplanation,
    CacheState,
    Checkpoint,
    CheckpointsState,
    PlanBasis,
    TierState,
)
from common.config_models import LoadSettings
from common.errors import ErrorRecord, ServerError, Unsupported, check_token_ids, validate_context_requirements
from common.generation import (
    Echo,
    Event,
    Finish,
    FinishReason,
    GenerationRequest,
    ImageInput,
    Prefill,
    SampledLogprob,
    TextDelta,
    TextSpan,
    Thoughts,
    TokenLogprob,
    Usage,
)
from common.parsing.thoughts import ThoughtTracker, ending

FOREVER = 3600.0


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """How to answer a request. The first play whose `when` is part of the prompt is taken."""

    when: str = ""
    chunks: list[str] = msgspec.field(default_factory=lambda: ["Hello", " world"])
    finish: FinishReason = "stop"
    delay: float = 0.0  # seconds before each chunk, during which the engine can be interrupted
    busy: float = 0.0  # seconds before the first chunk, during which its thread is blocked
    prefill: list[tuple[int, int]] = []  # progress records
    cached_tokens: int = 0
    draft_tokens: tuple[int, int] = (0, 0)  # accepted, rejected
    stop_sequence: str | None = None  # the stop string that ends the answer
    logprob: float = -0.5  # of every token, where log-probabilities are asked for
    deltas: list[TextDelta] = []  # what comes in place of chunks, as it is
    then: list[Play] = []  # the answers to further requests of the kind, in turn with this one
    fail_after: int | None = None  # chunks after which the request fails
    crash_after: int | None = None  # chunks after which the process dies
    hang_after: int | None = None  # chunks after which nothing comes any more


class ModelScript(msgspec.Struct, frozen=True, kw_only=True):
    prepare_error: ErrorRecord | None = None
    load_error: ErrorRecord | None = None
    load_crash: bool = False
    load_seconds: float = 0.0
    unload_steps: list[float] = []  # seconds; after each it says that it gets on
    modules: int = 3
    max_seq_len: int = 4096
    recurrent: bool = True
    warning: str | None = None  # of a thread of the engine, as it loads
    flush_seconds: float = 0.0  # that it takes to write the cache to disk
    control_tokens: list[ControlToken] = []
    refused_loras: dict[str, str] = {}  # with the reason
    lora_crash: bool = False  # the process dies of any change of adapters
    memory: int = 0  # bytes
    tower: bool = False  # it takes images, where `model.vision` is set


class Script(msgspec.Struct, frozen=True, kw_only=True):
    plays: list[Play] = []
    models: dict[str, ModelScript] = {}  # by folder name

    def play_for(self, prompt: str) -> Play:
        return next((play for play in self.plays if play.when in prompt), Play())


class ScriptedJob:
    def __init__(self, play: Play, request: GenerationRequest, prompt: str, max_tokens: int) -> None:
        self.prompt_tokens = len(prompt)
        self._play = play
        self._request = request
        self._prompt = prompt
        self._max_tokens = 0 if request.prompt_only else max_tokens
        self._thoughts = None if request.thoughts is None else ScriptedThoughts(request.thoughts)

    async def events(self) -> AsyncIterator[Event]:
        play = self._play
        for done, total in play.prefill:
            await asyncio.sleep(play.delay)
            yield Prefill(done_tokens=done, total_tokens=total, cached_tokens=play.cached_tokens)
        time.sleep(play.busy)
        if self._request.echo:
            yield self._echo()
        produced = 0
        for delta in play.deltas:
            produced += len(delta.token_ids)
            yield delta
        for index, chunk in enumerate(["" if play.deltas else chunk for chunk in [*play.chunks, ""]]):
            if index == play.crash_after:
                print("the script says: die", file=sys.stderr, flush=True)
                os._exit(23)
            if index == play.fail_after:
                raise RuntimeError("the script says: fail")
            if index == play.hang_after:
                await asyncio.sleep(FOREVER)
            if not chunk or produced == self._max_tokens:
                break
            await asyncio.sleep(play.delay)
            characters = chunk if self._thoughts is None else self._thoughts.play(chunk)
            text = "".join(islice(characters, self._max_tokens - produced))
            produced += len(text)
            if text:
                yield TextDelta(text, _ids(text), [] if self._request.logprobs is None else self._logprobs(text))
        length = produced == self._max_tokens
        yield Finish(
            reason="length" if length else play.finish,
            eos_reason="max_new_tokens" if length else "stop_string" if play.stop_sequence else "stop_token",
            stop_sequence=None if length else play.stop_sequence,
            usage=Usage(
                prompt_tokens=self.prompt_tokens,
                completion_tokens=produced,
                reasoning_tokens=0 if self._thoughts is None else self._thoughts.tokens,
                cached_tokens=play.cached_tokens,
                matched_tokens=play.cached_tokens,
                explanation=explanation_of(play, self.prompt_tokens, self._request.owner)
                if self._request.explain_cache
                else None,
                accepted_draft_tokens=play.draft_tokens[0],
                rejected_draft_tokens=play.draft_tokens[1],
            ),
        )

    def _echo(self) -> Echo:
        logprobs: list[SampledLogprob | None] = []
        if self._request.logprobs is not None:
            logprobs = [None, *self._logprobs(self._prompt[1:])]
        return Echo(self._prompt, _ids(self._prompt), logprobs)

    def _logprobs(self, text: str) -> list[SampledLogprob]:
        return [_logprob(token_id, self._play.logprob, self._request.logprobs or 0) for token_id in _ids(text)]

    async def cancel(self) -> None:
        pass


class ScriptedThoughts:
    """What is played of a script whose thoughts have a budget."""

    def __init__(self, thoughts: Thoughts) -> None:
        self._ending = ending(thoughts)
        self._script = ThoughtTracker(thoughts)
        self._played = ThoughtTracker(thoughts)
        self._skips = False

    @property
    def tokens(self) -> int:
        """Of thoughts, in what was played so far."""
        return self._played.tokens

    def play(self, chunk: str) -> Iterator[str]:
        for scripted in chunk:
            if self._played.spent:
                self._skips = True
                yield from map(self._play, self._ending)
            self._script.feed(_raw(scripted))
            if not self._skips:
                yield self._play(scripted)
            self._skips = self._skips and self._script.thinking

    def _play(self, character: str) -> str:
        self._played.feed(_raw(character))
        return character


def _raw(character: str) -> bytes:
    return character.encode("utf-8", "surrogatepass")


def _ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def _logprob(token_id: int, logprob: float, top: int) -> SampledLogprob:
    others = [
        TokenLogprob(other, chr(other), chr(other).encode(), logprob - (other - token_id))
        for other in range(token_id, token_id + top)
    ]
    return SampledLogprob(token_id, chr(token_id), chr(token_id).encode(), logprob, others)


def explanation_of(play: Play, prompt_tokens: int, owner: str) -> CacheExplanation:
    resumed = play.cached_tokens
    return CacheExplanation(
        prompt_tokens=prompt_tokens,
        matched_tokens=resumed,
        resumed_tokens=resumed,
        processed_tokens=prompt_tokens - resumed,
        replayed_tokens=0,
        ram_tokens=0,
        disk_tokens=0,
        difference=None,
        reason=f"The script says so to {owner or 'everybody'}.",
    )


class ScriptedContainer:
    def __init__(self, path: Path, directory: Path, settings: LoadSettings) -> None:
        script = msgspec.json.decode(path.read_bytes(), type=Script)
        self._script = script
        self._history = path.with_name(path.name + ".history")
        self._model = script.models.get(directory.name, ModelScript())
        self._directory = directory
        self._settings = settings
        self._loras = [Lora(lora.name, lora.scaling) for lora in settings.lora.loras]
        self._asked: Counter[str] = Counter()  # requests by the `when` of their play
        self.on_results: Callable[[], None] = lambda: None
        self._refuse(self._loras)
        if self._model.prepare_error is not None:
            raise ServerError.from_record(self._model.prepare_error)

    def plan_basis(self) -> PlanBasis | None:
        info = self.info()
        checkpoints = info.checkpoints
        if checkpoints is None:
            return None
        return PlanBasis(
            chunk_size=info.chunk_size,
            max_seq_len=info.max_seq_len,
            cache_size=info.cache_size,
            interval=checkpoints.interval,
            interval_pp=checkpoints.interval_pp,
            checkpoint_bytes=checkpoints.bytes,
            budget_bytes=checkpoints.bytes * checkpoints.capacity,
        )

    def memory_bytes(self) -> int:
        return self._model.memory

    def load(self) -> Iterator[LoadProgress]:
        for module in range(1, self._model.modules + 1):
            time.sleep(self._model.load_seconds / self._model.modules)
            yield LoadProgress(component="model", module=module, modules=self._model.modules)
        if self._model.load_crash:
            os._exit(24)
        if self._model.load_error is not None:
            raise ServerError.from_record(self._model.load_error)

    async def create_generator(self) -> None:
        print("a stray line on stdout")
        if self._model.warning is not None:
            thread = threading.Thread(target=logging.getLogger("engine").warning, args=(self._model.warning,))
            thread.start()
            thread.join()

    def info(self) -> ModelInfo:
        model, draft = self._settings.model, self._settings.draft_model
        recurrent = CheckpointInfo(
            interval=model.recurrent_checkpoint_interval or 2048,
            interval_pp=model.recurrent_checkpoint_interval_pp or 32768,
            bytes=1000,
            capacity=4,
        )
        return ModelInfo(
            name=self._directory.name,
            directory=str(self._directory),
            architecture="Scripted",
            max_seq_len=model.max_seq_len or self._model.max_seq_len,
            cache_size=model.cache_size or self._model.max_seq_len,
            max_batch_size=4,
            cache_mode="FP16",
            chunk_size=2048,
            use_vision=self._model.tower and model.vision,
            has_vision=self._model.tower,
            device="cpu",
            engine_version="0",
            draft_mode=draft.draft_mode if draft.draft_model_name else None,
            draft_model_name=draft.draft_model_name,
            checkpoints=recurrent if self._model.recurrent else None,
            vocab_size=sys.maxunicode + 1,
            control_tokens=self._model.control_tokens,
            warnings=[],
            loras=self._loras,
        )

    async def see(self, images: Sequence[ImageInput]) -> None: ...

    def start(self, request: GenerationRequest) -> ScriptedJob:
        with self._history.open("ab") as history:
            history.write(msgspec.json.encode(request) + b"\n")
        prompt = request.prompt if isinstance(request.prompt, str) else "".join(map(chr, request.prompt))
        limit = self._settings.model.max_seq_len or self._model.max_seq_len
        room = validate_context_requirements(len(prompt), limit, request.max_tokens, limit)
        first = self._script.play_for(prompt)
        plays = [first, *first.then]
        play = plays[self._asked[first.when] % len(plays)]
        self._asked[first.when] += 1
        return ScriptedJob(play, request, prompt, room)

    def encode(
        self,
        text: str,
        *,
        add_bos: bool | None,
        encode_special_tokens: bool,
        literals: Sequence[TextSpan],
        images: Sequence[ImageInput],
    ) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: list[int], *, decode_special_tokens: bool) -> str:
        check_token_ids(tokens, self.info().vocab_size, "tokens")
        return "".join(map(chr, tokens))

    def pieces(self, tokens: list[int]) -> list[bytes]:
        check_token_ids(tokens, self.info().vocab_size, "tokens")
        return [_raw(chr(token)) for token in tokens]

    def cache_state(self) -> CacheState:
        """Two checkpoints and two pages, one more of them in host RAM."""
        page = TierState(
            tier="vram",
            capacity_tokens=self.info().cache_size,
            capacity_bytes=self.info().cache_size * 10,
            used_tokens=512,
            used_bytes=5120,
            active_tokens=256,
            hit_tokens=1024,
            evicted_tokens=256,
        )
        return CacheState(
            tiers=[page, msgspec.structs.replace(page, tier="ram", used_tokens=256, used_bytes=2560, active_tokens=0)],
            checkpoints=self._checkpoints() if self._model.recurrent else None,
            active_requests=1,
            queued_requests=0,
        )

    def _checkpoints(self) -> CheckpointsState:
        anchor = Checkpoint(position=256, bytes=1000, age_seconds=60.0, tier="ram", usable=True, boundary=True)
        return CheckpointsState(
            capacity_bytes=4000,
            used_bytes=2000,
            checkpoint_bytes=1000,
            capacity=4,
            hits=3,
            replayed_tokens=512,
            evictions=2,
            evictions_usable=1,
            pruned=1,
            entries=[msgspec.structs.replace(anchor, position=512, usable=False, boundary=False), anchor],
        )

    def explain(self, request: GenerationRequest) -> CacheExplanation:
        """As the play says, with the owner as the reason."""
        prompt = request.prompt if isinstance(request.prompt, str) else "".join(map(chr, request.prompt))
        limit = self._settings.model.max_seq_len or self._model.max_seq_len
        validate_context_requirements(len(prompt), limit, request.max_tokens, limit)
        return explanation_of(self._script.play_for(prompt), len(prompt), request.owner)

    async def flush(self) -> CacheChange:
        if self._settings.memory.disk_cache_dir is None:
            raise Unsupported("There is no disk tier. Set memory.disk_cache_dir.")
        await asyncio.sleep(self._model.flush_seconds)
        return CacheChange(pages=2, checkpoints=1)

    async def clear(self) -> CacheChange:
        return CacheChange(pages=3, checkpoints=2)

    def check_loras(self, loras: Sequence[Lora]) -> list[ErrorRecord | None]:
        refused = self._model.refused_loras
        return [
            ErrorRecord("unsupported", refused[lora.name], f"loras.{index}.name") if lora.name in refused else None
            for index, lora in enumerate(loras)
        ]

    def set_loras(self, loras: Sequence[Lora]) -> None:
        if self._model.lora_crash:
            os._exit(25)
        self._refuse(loras)
        self._loras = list(loras)

    def _refuse(self, loras: Sequence[Lora]) -> None:
        for problem in filter(None, self.check_loras(loras)):
            raise ServerError.from_record(problem)

    def broken(self) -> bool:
        return False

    async def unload(self) -> None:
        for seconds in self._model.unload_steps:
            await asyncio.sleep(seconds)
            logger.info("the script says: still unloading")


if __name__ == "__main__":
    script_path = Path(sys.argv[1])
    worker.run(lambda directory, settings: ScriptedContainer(script_path, directory, settings))
