"""ExllamaV3Container: one model, its caches and its generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from loguru import logger

from backends.exllamav3.cache_state import change_root, clear, flush, observe
from backends.exllamav3.checkpoint_target import choose, in_seconds
from backends.exllamav3.checkpoints import (
    DEFAULT_INTERVAL,
    DEFAULT_INTERVAL_PP,
    MIB,
    CheckpointIntervals,
    advise,
    checkpoint_bytes,
    checkpoint_info,
    describe,
    describe_price,
    page_ceil,
)
from backends.exllamav3.drafters import check_pair, check_window, compare_vocabularies, has_weights
from backends.exllamav3.engine import (
    DEVICE,
    ENGINE_VERSION,
    FLOAT32,
    AsyncGenerator,
    Cache,
    CacheLayer_fp16,
    CacheLayer_quant,
    Config,
    Model,
    Tokenizer,
    check_kernels,
    device_bytes,
    gpu_count,
    release_memory,
    set_cache_root,
    smallest_compute_capability,
    token_tensor,
)
from backends.exllamav3.generation import EngineJob, Limits, PromptJob, Served, explain_request, start_job
from backends.exllamav3.jobs import CheckpointLedger
from backends.exllamav3.lora import ModelAdapters
from backends.exllamav3.memory import check_memory, estimated_bytes
from backends.exllamav3.model_files import check_complete, check_files, read_object
from backends.exllamav3.options import (
    check_shared_chunk,
    draft_options,
    has_scan_states,
    known_options,
    prefill_options,
)
from backends.exllamav3.prefill_speed import measure_prefill_speed
from backends.exllamav3.prompt_history import PromptHistory
from backends.exllamav3.prompt_tokens import PromptEncoder
from backends.exllamav3.tiers import plan_tiers, write_to_disk
from backends.exllamav3.token_bytes import token_bytes
from backends.exllamav3.turns import Turns
from backends.exllamav3.vision import Vision, embedded, find_tower, inserts_of
from backends.messages import LoadProgress, Lora, ModelComponent, ModelInfo
from common.caching import CacheChange, CacheExplanation, CacheState, PlanBasis
from common.config_models import PAGE_TOKENS, LoadSettings
from common.errors import ErrorRecord, InvalidRequest, ServerError, Unsupported, check_token_ids
from common.generation import GenerationRequest, ImageInput, TextSpan
from common.model_folder import model_folder

DEFAULT_MAX_SEQ_LEN = 8192  # where neither the user nor the model's config names one
DEFAULT_MAX_BATCH_SIZE = 128
DEFAULT_MAX_BATCH_SIZE_RECURRENT = 4  # small, since such models hold a state for each slot in VRAM
DEFAULT_DRAFT_TOKENS = 4
# Lowest CUDA compute capability that the engine's kernels are written for (Ampere).
LOWEST_COMPUTE_CAPABILITY = 8
LEGACY_CACHE_MODES = {"Q4": (4, 4), "Q6": (6, 6), "Q8": (8, 8)}
CACHE_GROUP = 32  # values that a quantised cache scales together
# Quantisations of other engines; their folders look like models but hold nothing that this one can read.
FOREIGN_QUANTISATIONS = frozenset({"exl2", "gptq", "awq", "bitsandbytes", "gguf"})


@dataclass(frozen=True)
class Dimensions:
    """Sizes of a loaded model, in tokens, derived from settings and the model's config."""

    max_seq_len: int
    cache_size: int
    chunk_size: int
    max_batch_size: int


@dataclass(frozen=True)
class Draft:
    """Speculative decoding: how, with which model, how many tokens ahead."""

    mode: str  # "model", "mtp" or "ngram"
    name: str | None
    model: Model | None
    num_tokens: int | None  # None: as the drafter prefers
    ngram_match_min: int = 0
    window: int = 0  # tokens that a verification pass may run ahead

    @property
    def recurrent(self) -> bool:
        return self.model is not None and bool(self.model.caps.get("recurrent_states"))


class ExllamaV3Container:
    """One model from checked settings to generated tokens; the `Container` of `backends.worker`.

    Life: `create()` -> `load()` -> `create_generator()` -> `start()`, `encode()`, `decode()` -> `unload()`, all from
    one thread and, from `create_generator()` on, inside one event loop.

    Attributes:
        generator: the engine's, after `create_generator()`.
        warnings: advice to the user about these settings on this model.
    """

    @classmethod
    def create(cls, directory: Path, settings: LoadSettings) -> Self:
        """Read the model's configuration and check the settings against it; no weight is read.

        Raises:
            InvalidRequest: the folder is no model of this engine, or the settings do not fit it.
        """
        return cls(directory, settings)

    def __init__(self, directory: Path, settings: LoadSettings) -> None:
        model_settings = settings.model
        self.directory = directory
        self.settings = settings
        self.warnings: list[str] = []
        self.generator: AsyncGenerator | None = None
        self.ledger = CheckpointLedger()
        self.turns = Turns()
        self.history = PromptHistory()
        self.on_results: Callable[[], None] = lambda: None

        self.config = _read_config(directory)
        _check_quantisation(self.config, directory.name)
        self._check_devices()
        self.config.infer_params.moe_cpu_offload = model_settings.cpu_moe_offload_layers
        self.model = _make_model(self.config, directory.name)
        check_kernels(self.model, directory.name)
        self.tokenizer, self.add_bos = _read_tokenizer(self.config, directory)
        self.encoder = PromptEncoder(self.tokenizer)
        self.eos_token_ids: list[int] = list(self.config.eos_token_id_list)
        self.recurrent = bool(self.model.caps.get("recurrent_states"))
        self.dimensions = self._dimensions()
        self.adapters = ModelAdapters(
            self.model, directory.name, Path(settings.lora.lora_dir), tensor_parallel=self._tensor_parallel
        )
        self._first_adapters = [self.adapters.find(lora.name, lora.scaling, "loras") for lora in settings.lora.loras]
        self.draft = self._draft()
        tower = find_tower(self.config)
        self.has_vision = tower is not None
        self.vision = self._vision(tower)

        window = max(self.draft.window if self.draft else 0, settings.draft_model.hybrid_draft_tokens)
        check_window(window, self.dimensions.cache_size, settings.draft_model)
        self.cache = self._new_cache(self.model, model_settings.cache_mode, window, "model.cache_mode")
        self.draft_cache = (
            self._new_cache(
                self.draft.model, settings.draft_model.draft_cache_mode, window, "draft_model.draft_cache_mode"
            )
            if self.draft and self.draft.model
            else None
        )
        self.intervals = self._intervals_set()
        self.basis = self._plan_basis()
        target = self._target()
        if target is not None and not in_seconds(target):
            self.warnings += self._keep_to(target)
        self.warnings += advise(
            self._intervals_set(),
            basis=self.basis,
            default_interval=self._default_interval(),
            target=model_settings.recurrent_checkpoint_target,
            boundaries=model_settings.recurrent_checkpoint_boundaries,
        )
        if model_settings.recurrent_dtype == "fp32" and not has_scan_states(self.cache):
            self.warnings.append("model.recurrent_dtype has no effect: there are no Gated DeltaNet or KDA layers.")
        self.draft_options = self._draft_options()
        self.tiers, advice = plan_tiers(settings.memory, [cache for cache in (self.cache, self.draft_cache) if cache])
        self.warnings += advice
        for warning in self.warnings:
            logger.warning("{}", warning)

    # --- checks and derived values ------------------------------------------------------------------------------

    def _check_devices(self) -> None:
        if DEVICE == "cpu":
            return
        capability = smallest_compute_capability(self._devices())
        if capability < LOWEST_COMPUTE_CAPABILITY:
            raise Unsupported(
                f"ExLlamaV3 needs GPUs of compute capability {LOWEST_COMPUTE_CAPABILITY}.0 (Ampere) or newer; "
                f"one of those in use has {capability}. Exclude it with model.gpu_split."
            )

    def _devices(self) -> list[int]:
        """Indices of the GPUs that the model may use."""
        split = self.settings.model.gpu_split
        return [index for index in range(gpu_count()) if not split or (index < len(split) and split[index] > 0)]

    @property
    def _tensor_parallel(self) -> bool:
        return self.settings.model.tensor_parallel and gpu_count() > 1

    def _dimensions(self) -> Dimensions:
        model = self.settings.model
        trained = self.config.config_dict.get("max_position_embeddings") or (
            self.config.config_dict.get("text_config") or {}
        ).get("max_position_embeddings")
        max_seq_len = model.max_seq_len if model.max_seq_len and model.max_seq_len > 0 else trained
        if max_seq_len is None:
            max_seq_len = DEFAULT_MAX_SEQ_LEN
            self.warnings.append(
                f"{self.directory.name} does not say how long its context is; max_seq_len is {max_seq_len}. "
                "Set model.max_seq_len if it can do more."
            )
        cache_size = page_ceil(model.cache_size or max_seq_len)
        if max_seq_len > cache_size:
            self.warnings.append(
                f"max_seq_len {max_seq_len} is larger than the cache; it is lowered to cache_size {cache_size}."
            )
            max_seq_len = cache_size
        default_batch = DEFAULT_MAX_BATCH_SIZE_RECURRENT if self.recurrent else DEFAULT_MAX_BATCH_SIZE
        chunk_size = page_ceil(model.chunk_size)
        if chunk_size != model.chunk_size:
            self.warnings.append(f"chunk_size {model.chunk_size} is rounded up to {chunk_size}, a multiple of 256.")
        check_shared_chunk(model, chunk_size)
        return Dimensions(
            max_seq_len=max_seq_len,
            cache_size=cache_size,
            chunk_size=chunk_size,
            max_batch_size=model.max_batch_size or default_batch,
        )

    def _intervals_set(self) -> CheckpointIntervals:
        model = self.settings.model
        return CheckpointIntervals(model.recurrent_checkpoint_interval, model.recurrent_checkpoint_interval_pp)

    def _default_interval(self) -> int:
        """As the generator has it: the drafter's counts where it alone has recurrent layers."""
        model = self.model
        if not self.recurrent and self.draft is not None and self.draft.recurrent:
            model = self.draft.model
        return int(model.caps.get("default_recurrent_checkpoint_interval", DEFAULT_INTERVAL))

    def _plan_basis(self) -> PlanBasis | None:
        """For the intervals that are set or the engine's defaults; None without recurrent layers."""
        caches = [self.cache] if self.recurrent else []
        if self.draft is not None and self.draft.recurrent:
            caches.append(self.draft_cache)
        if not caches:
            return None
        intervals = self._intervals_set()
        return PlanBasis(
            chunk_size=self.dimensions.chunk_size,
            max_seq_len=self.dimensions.max_seq_len,
            cache_size=self.dimensions.cache_size,
            interval=intervals.interval or self._default_interval(),
            interval_pp=intervals.interval_pp or DEFAULT_INTERVAL_PP,
            checkpoint_bytes=checkpoint_bytes(caches),
            budget_bytes=self.settings.memory.sysmem_recurrent_cache * MIB,
        )

    def _target(self) -> int | str | None:
        """The target that intervals are derived from; None where there is none, or nothing to derive."""
        if self.basis is None or len(self._intervals_set().engine_arguments()) == 2:
            return None
        return self.settings.model.recurrent_checkpoint_target

    def _keep_to(self, target: int | str, tokens_per_second: float | None = None) -> list[str]:
        """Take the intervals and the chunk size that a target asks for; returns advice where it cannot be met."""
        assert self.basis is not None
        choice = choose(target, self.basis, self._intervals_set(), tokens_per_second=tokens_per_second)
        self.basis = choice.basis
        self.intervals = choice.intervals
        self.dimensions = replace(self.dimensions, chunk_size=choice.basis.chunk_size)
        if not choice.met:
            return [choice.reason]
        logger.info("{}", choice.reason)
        return []

    def _draft(self) -> Draft | None:
        settings = self.settings.draft_model
        mode = settings.draft_mode
        if mode == "ngram":
            tokens = settings.draft_num_tokens or DEFAULT_DRAFT_TOKENS
            return Draft(mode, None, None, tokens, settings.ngram_match_min, window=tokens)
        if mode == "mtp":
            if "mtp" not in self.config.model_classes:
                raise InvalidRequest(
                    f"{self.directory.name} has no multi-token prediction head. Use another draft_model.draft_mode.",
                    param="draft_model.draft_mode",
                )
            model = _make_model(self.config, self.directory.name, "mtp")
            if not has_weights(model):
                raise InvalidRequest(
                    f"{self.directory.name} should have a multi-token prediction head, but its files do not hold it. "
                    "Use another draft_model.draft_mode.",
                    param="draft_model.draft_mode",
                )
            return self._model_draft(mode, self.directory.name, model)
        if mode == "model" and settings.draft_model_name:
            param = "draft_model.draft_model_name"
            directory = model_folder(Path(settings.draft_model_dir), settings.draft_model_name, param)
            try:
                config = _read_config(directory)
                _check_quantisation(config, directory.name)
                self.warnings += compare_vocabularies(config, directory, self.config, self.tokenizer)
                model = _make_model(config, directory.name)
            except InvalidRequest as error:
                error.param = param
                raise
            return self._model_draft(mode, directory.name, model)
        return None

    def _model_draft(self, mode: str, name: str, model: Model) -> Draft:
        tokens = self.settings.draft_model.draft_num_tokens
        window = tokens or model.caps.get("default_draft_size", DEFAULT_DRAFT_TOKENS)
        param = "draft_model.draft_model_name" if mode == "model" else "draft_model.draft_mode"
        check_kernels(model, name, param)
        check_pair(model, self.model, param, tensor_parallel=self._tensor_parallel)
        return Draft(mode, name, model, tokens, window=window)

    def _vision(self, tower: Model | None) -> Vision | None:
        """The tower where it is asked for and can be used."""
        if not self.settings.model.vision:
            if tower is not None:
                logger.info("{} could take images: set model.vision.", self.directory.name)
            return None
        if tower is None:
            self.warnings.append(f"model.vision has no effect: {self.directory.name} has no vision tower.")
            return None
        drafter = self.draft.model if self.draft else None
        if drafter is not None and not (drafter.caps.get("mtp_draft") or drafter.caps.get("dflash_draft")):
            self.warnings.append(
                "model.vision has no effect: the engine takes no images while a draft model drafts. Use another "
                "draft_model.draft_mode, or none."
            )
            return None
        check_kernels(tower, f"The vision tower of {self.directory.name}", "model.vision")
        return Vision(tower, self.tokenizer, self.settings.memory.sysmem_image_cache * MIB)

    def _draft_options(self) -> dict[str, Any]:
        drafter = self.draft.model if self.draft else None
        options, advice = draft_options(
            self.settings.draft_model, drafter, self.directory, tensor_parallel=self._tensor_parallel
        )
        self.warnings += advice
        options, advice = known_options(options)
        self.warnings += advice
        return options

    def _new_cache(self, model: Model, mode: str, history: int, param: str) -> Cache:
        sizes: dict[str, Any] = {
            "max_num_tokens": self.dimensions.cache_size,
            "max_batch_size": self.dimensions.max_batch_size,
            "max_history": history,
        }
        if self.settings.model.recurrent_dtype == "fp32":
            sizes["recurrent_dtype"] = FLOAT32
        bits = _cache_bits(mode)
        if bits is None:
            return Cache(model, layer_type=CacheLayer_fp16, **sizes)
        cache = Cache(model, layer_type=CacheLayer_quant, k_bits=bits[0], v_bits=bits[1], **sizes)
        _check_groups(cache, mode, param)
        return cache

    # --- life ---------------------------------------------------------------------------------------------------

    def load(self) -> Iterator[LoadProgress]:
        """Read the weights, the tower's and the drafter's first. Yields after every module."""
        self.tiers.check_memory()
        if DEVICE == "cpu":
            check_memory(self.directory.name, self.memory_bytes())
        if self.vision is not None:
            yield from _progress("vision", self.vision.load(self._placed()))
        split = self.settings.draft_model.draft_gpu_split
        if self.draft is not None and self.draft.model is not None:
            yield from _progress("draft", self.draft.model.load_gen(**_placement(split, None)))
        yield from _progress("model", self.model.load_gen(**self._load_arguments()))
        self.adapters.apply(self._first_adapters)
        set_cache_root(self.adapters.root)
        release_memory()

    def _load_arguments(self) -> dict[str, Any]:
        settings = self.settings.model
        arguments: dict[str, Any] = {
            "max_chunk_size": self.dimensions.chunk_size,
            "max_batch_size": self.dimensions.max_batch_size,
        }
        if DEVICE == "cpu":
            return arguments
        if self._tensor_parallel:
            arguments |= {"tensor_p": True, "tp_backend": settings.tensor_parallel_backend}
        return arguments | self._placed()

    def _placed(self) -> dict[str, Any]:
        settings = self.settings.model
        reserve = None
        if settings.gpu_split_auto and settings.autosplit_reserve:
            reserve = [megabytes / 1024 for megabytes in settings.autosplit_reserve]
        return _placement(settings.gpu_split, reserve)

    async def create_generator(self) -> None:
        """Create the generator over the loaded model, and log the checkpoint intervals in force.

        For a target in seconds the speed is measured first, with a generator of its own.
        """
        target = self._target()
        if target is not None and in_seconds(target):
            for warning in (advice := self._keep_to(target, await self._prefill_speed())):
                logger.warning("{}", warning)
            self.warnings += advice
        draft = self.draft
        self.tiers.open_directory()
        self.generator = AsyncGenerator(
            model=self.model,
            cache=self.cache,
            tokenizer=self.tokenizer,
            draft_model=draft.model if draft else None,
            draft_cache=self.draft_cache,
            num_draft_tokens=draft.num_tokens if draft else None,
            dynamic_draft_tokens=self.settings.draft_model.dynamic_draft,
            ngram_match_min=draft.ngram_match_min if draft else 0,
            max_batch_size=self.dimensions.max_batch_size,
            max_chunk_size=self.dimensions.chunk_size,
            recurrent_cache_size=self.settings.memory.sysmem_recurrent_cache * MIB,
            **self.tiers.engine_arguments(),
            **prefill_options(self.settings.model, self.dimensions.chunk_size),
            **self.draft_options,
            **self.intervals.engine_arguments(),
        )
        if self.basis is not None:
            logger.info(describe(self.generator.generator))
            logger.info(describe_price(self.basis))

    async def _prefill_speed(self) -> float:
        """Prompt tokens per second of a chunk."""
        draft = self.draft
        # Without tiers: what it reads is to be kept nowhere.
        generator = AsyncGenerator(
            model=self.model,
            cache=self.cache,
            tokenizer=self.tokenizer,
            draft_model=draft.model if draft else None,
            draft_cache=self.draft_cache,
            num_draft_tokens=draft.num_tokens if draft else None,
            max_batch_size=self.dimensions.max_batch_size,
            max_chunk_size=self.dimensions.chunk_size,
            recurrent_cache_size=0,
        )
        # Beside them the cache has to hold two tokens of an answer and what a draft runs ahead.
        room = self.dimensions.max_seq_len - (draft.window if draft else 0) - 3
        try:
            return await measure_prefill_speed(
                generator,
                tokens=max(1, min(self.dimensions.chunk_size, room)),
                vocabulary=self.tokenizer.actual_vocab_size,
            )
        finally:
            # The next generator takes the cache over.
            await generator.close()

    def plan_basis(self) -> PlanBasis | None:
        return self.basis

    def memory_bytes(self) -> int:
        # The processes of tensor parallelism do not tell.
        if self.generator is not None and DEVICE == "cuda" and not self._tensor_parallel:
            return device_bytes()
        return self._estimated_bytes

    @cached_property
    def _estimated_bytes(self) -> int:
        directories = [self.directory]
        if self.draft is not None and self.draft.model is not None and self.draft.mode == "model":
            directories.append(Path(self.draft.model.config.directory))  # others are in the model's own files
        return estimated_bytes(directories, [cache for cache in (self.cache, self.draft_cache) if cache])

    def info(self) -> ModelInfo:
        assert self.generator is not None
        return ModelInfo(
            name=self.directory.name,
            directory=str(self.directory),
            architecture=self.config.architecture,
            max_seq_len=self.dimensions.max_seq_len,
            cache_size=self.dimensions.cache_size,
            max_batch_size=self.generator.generator.max_batch_size,
            cache_mode=self.settings.model.cache_mode,
            chunk_size=self.dimensions.chunk_size,
            use_vision=self.vision is not None,
            has_vision=self.has_vision,
            device=DEVICE,
            engine_version=ENGINE_VERSION,
            draft_mode=self.draft.mode if self.draft else None,
            draft_model_name=self.draft.name if self.draft else None,
            checkpoints=checkpoint_info(self.generator.generator),
            vocab_size=self.tokenizer.actual_vocab_size,
            control_tokens=self.encoder.control_tokens,
            warnings=self.warnings,
            loras=[Lora(adapter.name, adapter.scaling) for adapter in self.adapters.active],
        )

    async def unload(self) -> None:
        """Release the generator, the weights and the caches; first what they hold is written to disk, where it may."""
        if self.generator is not None:
            on_disk = self.tiers.directory is not None and self.settings.memory.disk_cache_flush_on_idle
            if on_disk and not self.broken():
                await write_to_disk(self.generator.generator)
            await self.generator.close()
            self.generator = None
        self.adapters.remove()
        self.model.unload()
        if self.vision is not None:
            self.vision.unload()
        if self.draft is not None and self.draft.model is not None:
            self.draft.model.unload()
        release_memory()

    def broken(self) -> bool:
        return self.generator is not None and self.generator.error is not None

    # --- adapters ---------------------------------------------------------------------------------------------------

    def check_loras(self, loras: Sequence[Lora]) -> list[ErrorRecord | None]:
        problems: list[ErrorRecord | None] = []
        for index, lora in enumerate(loras):
            try:
                self.adapters.find(lora.name, lora.scaling, f"loras.{index}.name")
            except ServerError as error:
                problems.append(error.to_record())
            else:
                problems.append(None)
        return problems

    def set_loras(self, loras: Sequence[Lora]) -> None:
        assert self.generator is not None
        adapters = [self.adapters.find(lora.name, lora.scaling, "loras") for lora in loras]
        root = self.adapters.root
        self.adapters.apply(adapters)
        change_root(self.generator.generator, root, self.adapters.root)
        self.history.clear()  # what is cached of these prompts is of no use to the next

    # --- what is cached ---------------------------------------------------------------------------------------------

    def cache_state(self) -> CacheState:
        assert self.generator is not None
        return observe(self.generator.generator, self.ledger)

    async def flush(self) -> CacheChange:
        assert self.generator is not None
        return await flush(self.generator.generator)

    async def clear(self) -> CacheChange:
        assert self.generator is not None
        if self.vision is not None:
            self.vision.clear()
        return await clear(self.generator.generator, self.ledger, self.history)

    # --- requests -----------------------------------------------------------------------------------------------

    async def see(self, images: Sequence[ImageInput]) -> None:
        if self.vision is not None:  # else `start()` says so
            await self.vision.see(images)

    def start(self, request: GenerationRequest) -> EngineJob | PromptJob:
        return start_job(request, self._served())

    def explain(self, request: GenerationRequest) -> CacheExplanation:
        return explain_request(request, self._served())

    def _served(self) -> Served:
        assert self.generator is not None
        return Served(
            generator=self.generator,
            tokenizer=self.tokenizer,
            encoder=self.encoder,
            vision=self.vision,
            eos_token_ids=self.eos_token_ids,
            add_bos=self.add_bos,
            limits=self._limits(),
            ledger=self.ledger,
            turns=self.turns,
            history=self.history,
            on_results=self.on_results,
        )

    def _limits(self) -> Limits:
        assert self.generator is not None
        engine = self.generator.generator
        return Limits(
            max_seq_len=self.dimensions.max_seq_len,
            cache_capacity=self.dimensions.cache_size - engine.max_draft_tokens,
            max_rq_tokens=self.dimensions.chunk_size if self.settings.model.output_chunking else None,
            allocation_boundary=engine.recurrent_checkpoint_interval
            if engine.recurrent_cache is not None
            else PAGE_TOKENS,
        )

    def encode(
        self,
        text: str,
        *,
        add_bos: bool | None,
        encode_special_tokens: bool,
        literals: Sequence[TextSpan] = (),
        images: Sequence[ImageInput] = (),
    ) -> list[int]:
        return self.encoder.encode(
            text,
            add_bos=self.add_bos if add_bos is None else add_bos,
            encode_special_tokens=encode_special_tokens,
            literals=literals,
            inserts=inserts_of(images, embedded(self.vision, images)),
        )

    def decode(self, tokens: list[int], *, decode_special_tokens: bool) -> str:
        check_token_ids(tokens, self.tokenizer.actual_vocab_size, "tokens")
        (text,) = self.tokenizer.decode(token_tensor(tokens), decode_special_tokens=decode_special_tokens)
        return str(text)

    def pieces(self, tokens: list[int]) -> list[bytes]:
        check_token_ids(tokens, self.tokenizer.actual_vocab_size, "tokens")
        known = token_bytes(self.tokenizer)
        return [known[token] for token in tokens]


def _read_config(directory: Path) -> Config:
    check_files(directory)
    with _readable(directory.name):
        config = Config.from_directory(str(directory))
    check_complete(directory)
    return config


def _make_model(config: Config, name: str, component: str = "text") -> Model:
    with _readable(name):
        return Model.from_config(config, component)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """What the engine raises, which can be anything, names the file and what it misses in it."""
    try:
        yield
    except Exception as error:
        what = str(error) or type(error).__name__
        raise InvalidRequest(f"{name} is not a model that ExLlamaV3 can load: {what}") from error


def _check_quantisation(config: Config, name: str) -> None:
    quantisation = config.config_dict.get("quantization_config")
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
    if method in FOREIGN_QUANTISATIONS:
        raise Unsupported(
            f"{name} is quantised as {method}, which ExLlamaV3 cannot read. Use an EXL3 quantisation or the "
            "unquantised model."
        )


def _read_tokenizer(config: Config, directory: Path) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether it puts a BOS token before a text."""
    try:
        return Tokenizer.from_config(config), _adds_bos(directory)
    except Exception as error:  # the libraries that read these files raise what they like
        raise InvalidRequest(
            f"The tokenizer of {directory.name} (tokenizer.json, tokenizer_config.json) cannot be read: {error}"
        ) from error


def _adds_bos(directory: Path) -> bool:
    """`add_bos_token` of tokenizer_config.json; true where it is not said, as for transformers' Llama."""
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return True
    return bool(read_object(path).get("add_bos_token", True))


def _cache_bits(mode: str) -> tuple[int, int] | None:
    """Bits of keys and values; None for an unquantised cache."""
    if mode in LEGACY_CACHE_MODES:
        return LEGACY_CACHE_MODES[mode]
    if "," not in mode:
        return None
    keys, values = mode.split(",")
    return int(keys), int(values)


def _check_groups(cache: Cache, mode: str, param: str) -> None:
    """Raise InvalidRequest where a token's keys do not fill groups: the engine would fail in the first request."""
    for layer in cache.layers.values():
        if isinstance(layer, CacheLayer_quant) and layer.token_dim % CACHE_GROUP:
            raise InvalidRequest(
                f"{param} {mode} does not fit this model: it packs {CACHE_GROUP} values together, and a token's keys "
                f"are {layer.token_dim}. Set it to FP16.",
                param=param,
            )


def _placement(split: list[float] | None, reserve: list[float] | None) -> dict[str, Any]:
    """GB per GPU to use, or to keep free; the engine takes one of the two."""
    if DEVICE == "cpu":
        return {}
    return {"use_per_device": split} if split else {"reserve_per_device": reserve}


def _progress(component: ModelComponent, steps: Iterator[tuple[int, int]]) -> Iterator[LoadProgress]:
    for module, modules in steps:
        if module > 0:  # the engine also reports before the first module
            yield LoadProgress(component=component, module=module, modules=modules)
