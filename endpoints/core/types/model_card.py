"""What the server says about models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from backends.client import EngineClient
from backends.manager import ModelStatus
from backends.messages import LoadProgress, ModelComponent, ModelInfo
from backends.model_events import ModelEvent, ModelState
from backends.process_client import ClientState
from common.parsing.detection import AnswerSyntax
from common.templating import ChatTemplate


class AppliedLora(BaseModel):
    name: str
    scaling: float


class ModelParameters(BaseModel):
    """How the loaded model is set up, with the values in force."""

    model_config = ConfigDict(protected_namespaces=())

    max_seq_len: int
    cache_size: int
    max_batch_size: int
    cache_mode: str
    chunk_size: int
    use_vision: bool
    rope_scale: float = 1.0
    rope_alpha: float = 1.0
    draft: ModelCard | None
    draft_mode: str | None
    loras: list[AppliedLora]  # adapters that it computes with
    prompt_template: str | None
    prompt_template_content: str | None
    tool_format: str | None  # the form in which the model calls tools; None where it is not known
    tool_format_source: str | None  # how sure that is, and by what; None for a model that cannot chat
    reasoning_tags: str | None  # what stands around a thought, such as "<think> ... </think>"
    reasoning_source: str | None  # as tool_format_source
    recurrent_checkpoint_interval: int | None  # tokens; None without recurrent layers, like the next three
    recurrent_checkpoint_interval_pp: int | None  # tokens
    recurrent_checkpoint_bytes: int | None  # one checkpoint in host RAM
    recurrent_checkpoint_capacity: int | None  # checkpoints that fit memory.sysmem_recurrent_cache
    architecture: str
    device: str
    engine_version: str
    engine_state: ClientState  # "ready", "restarting" after its process has died, or "failed" where it was given up
    engine_failure: str | None  # why it is not ready
    warnings: list[str]


class CardStatus(BaseModel):
    """How it is with a model."""

    value: ModelState  # "sleeping": unloaded as nobody used it; the next request loads it again
    reason: str | None = None  # why it has failed, or is being loaded again
    requests: int = 0  # that use it
    memory_bytes: int | None = None  # of the device, that it takes; None where it is not loaded
    unloaded_in: float | None = None  # seconds, if nobody uses it; None: it is in use, or stays

    @classmethod
    def of(cls, status: ModelStatus) -> CardStatus:
        return cls(
            value=status.state,
            reason=status.reason,
            requests=status.requests,
            memory_bytes=status.memory,
            unloaded_in=None if status.idle_in is None else round(status.idle_in, 1),
        )


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "Waypoint"
    status: CardStatus | None = None  # None for one that is part of another
    parameters: ModelParameters | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def model_parameters(
    client: EngineClient,
    info: ModelInfo,
    template: ChatTemplate | None,
    syntax: AnswerSyntax | None,
    warnings: list[str],
    created: int,
) -> ModelParameters:
    """`info`: what the client has loaded."""
    checkpoints = info.checkpoints
    return ModelParameters(
        max_seq_len=info.max_seq_len,
        cache_size=info.cache_size,
        max_batch_size=info.max_batch_size,
        cache_mode=info.cache_mode,
        chunk_size=info.chunk_size,
        use_vision=info.use_vision,
        draft=ModelCard(id=info.draft_model_name, created=created) if info.draft_model_name else None,
        draft_mode=info.draft_mode,
        loras=[AppliedLora(name=lora.name, scaling=lora.scaling) for lora in info.loras],
        prompt_template=template.name if template else None,
        prompt_template_content=template.source if template else None,
        tool_format=syntax.tool_format.value if syntax else None,
        tool_format_source=syntax.tool_format.source if syntax else None,
        reasoning_tags=syntax.thoughts.value if syntax else None,
        reasoning_source=syntax.thoughts.source if syntax else None,
        recurrent_checkpoint_interval=checkpoints.interval if checkpoints else None,
        recurrent_checkpoint_interval_pp=checkpoints.interval_pp if checkpoints else None,
        recurrent_checkpoint_bytes=checkpoints.bytes if checkpoints else None,
        recurrent_checkpoint_capacity=checkpoints.capacity if checkpoints else None,
        architecture=info.architecture,
        device=info.device,
        engine_version=info.engine_version,
        engine_state=client.state,
        engine_failure=client.failure,
        warnings=warnings,
    )


class ModelEventFrame(BaseModel):
    """One frame of what happens to models."""

    model_config = ConfigDict(protected_namespaces=())

    model: str
    status: ModelState
    reason: str | None  # why it has failed, is unloaded (displaced, idle or requested), or is being loaded again
    progress: LoadProgressEvent | None  # while it loads

    @classmethod
    def of(cls, event: ModelEvent) -> ModelEventFrame:
        progress = None if event.progress is None else LoadProgressEvent.of(event.progress)
        return cls(model=event.name, status=event.state, reason=event.reason, progress=progress)


class LoadProgressEvent(BaseModel):
    """One frame of a load's progress. The last one of a load is "finished" for the component "model"."""

    model_config = ConfigDict(protected_namespaces=())

    model_type: ModelComponent
    module: int
    modules: int
    status: Literal["processing", "finished"]

    @classmethod
    def of(cls, progress: LoadProgress, *, finished: bool = False) -> LoadProgressEvent:
        return cls(
            model_type=progress.component,
            module=progress.module,
            modules=progress.modules,
            status="finished" if finished else "processing",
        )
