"""Every setting: name, type, default, limits and description, said once.

From these models derive the sample file, the command line, the names in the environment, the load request, the tables
in `docs/02.-Server-options.md`, and the checks. Names and defaults are TabbyAPI's where it has the setting, but for the
default of `api_servers`. The string under a setting is its description, for users.

An explicit null means the same as leaving a key out. Numbers and truth values may be given as text, as the environment
and the command line do; so may lists and mappings, in YAML's flow style or, lists, separated by commas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from common.names import tagged

T = TypeVar("T")

PAGE_TOKENS = 256  # a page of the engine's cache; sizes and intervals are multiples of it
DEFAULT_REASONING_TAGS: Final = ("<think>", "</think>")


# --- markers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoEffect:
    """Marks a setting that is recognised and checked, but changes nothing; setting it gives a warning.

    Attributes:
        reason: completes the sentence "... has no effect: ".
        when: which values are worth the warning; None for all but the default.
    """

    reason: str
    when: Callable[[Any], bool] | None = None


@dataclass(frozen=True)
class Allowed:
    """Says in words which values a setting takes, where its type does not."""

    text: str


SEQ_SHIPPED = NoEffect("with log_json on, any log shipper can send the log to Seq.")
ENGINE_SETS_ROPE = NoEffect("ExLlamaV3 reads the RoPE parameters from the model's config.json.")


# --- types --------------------------------------------------------------------------------------------------------


def _refuse_bool(value: object) -> object:
    # bool is an int in Python; `chunk_size: true` is a mistake all the same.
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


def _parse_flow(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return YAML(typ="safe", pure=True).load(value)
    except YAMLError as error:
        raise ValueError("cannot be read as YAML or JSON") from error


def _parse_list(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return _parse_flow(value)
    if value.lstrip().startswith("{"):
        return [value]
    return [item.strip() for item in value.split(",") if item.strip()]


def _parse_cache_mode(value: str) -> str:
    mode = re.sub(r"\s", "", value).upper()
    if not re.fullmatch(r"FP16|Q[468]|[2-8],[2-8]", mode):
        raise ValueError("should be FP16, Q8, Q6, Q4, or the bits of keys and values such as 8,4")
    return mode


def _parse_mode(value: object) -> object:
    # YAML 1.1 tools write on and off as truth values.
    if isinstance(value, bool):
        return "on" if value else "off"
    return value


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _upper(value: object) -> object:
    return value.strip().upper() if isinstance(value, str) else value


def _check_origins(origins: list[str]) -> list[str]:
    for origin in origins:
        parts = urlsplit(origin)
        is_origin = parts.scheme in ("http", "https") and parts.netloc and f"{parts.scheme}://{parts.netloc}" == origin
        if origin not in ("*", "loopback") and not is_origin:
            raise ValueError(f"{origin!r} is not an origin")
    if "*" in origins and len(origins) > 1:
        raise ValueError('"*" stands alone')
    return origins


def _check_hosts(hosts: list[str]) -> list[str]:
    for host in hosts:
        if not re.fullmatch(r"[\w.-]+|\[?[0-9a-fA-F:.]+\]?", host):
            raise ValueError(f"{host!r} is not a host name or an IP address without a port")
    return [host.lower().strip("[]").rstrip(".") for host in hosts]


def _check_adapters(adapters: list[Any]) -> list[Any]:
    if len({adapter.name for adapter in adapters}) < len(adapters):
        raise ValueError("an adapter is named twice")
    return adapters


def _parse_target(value: object) -> object:
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= PAGE_TOKENS:
        return value
    if (
        isinstance(value, str)
        and (seconds := re.fullmatch(r"(\d{1,9}(\.\d+)?)\s*s", value.strip()))
        and float(seconds[1]) > 0
    ):
        return f"{seconds[1]}s"
    raise ValueError(f"should be tokens, at least {PAGE_TOKENS}, or seconds such as 3s")


Integer: TypeAlias = Annotated[int, BeforeValidator(_refuse_bool)]
Number: TypeAlias = Annotated[float, BeforeValidator(_refuse_bool)]
Positive: TypeAlias = Annotated[Integer, Gt(0)]
NotNegative: TypeAlias = Annotated[Integer, Ge(0)]
PageMultiple: TypeAlias = Annotated[Integer, Gt(0), MultipleOf(PAGE_TOKENS)]
ListOf: TypeAlias = Annotated[list[T], BeforeValidator(_parse_list)]
Sizes: TypeAlias = ListOf[Annotated[Number, Ge(0)]]
Variables: TypeAlias = Annotated[dict[str, Any], BeforeValidator(_parse_flow)]
CacheMode: TypeAlias = Annotated[
    str,
    AfterValidator(_parse_cache_mode),
    Allowed("FP16, Q8, Q6, Q4, or the bits of keys and values such as 8,4 (2 to 8)"),
]
CheckpointTarget: TypeAlias = Annotated[
    int | str,  # tokens, or seconds followed by "s"
    BeforeValidator(_parse_target),
    Allowed(f"tokens, at least {PAGE_TOKENS}, or seconds such as 3s"),
]
Aliases: TypeAlias = Annotated[
    dict[str, str], BeforeValidator(_parse_flow), Allowed("a mapping of names to folders in model_dir")
]
RopeAlpha: TypeAlias = Annotated[Number | Literal["auto"], Allowed("a number or auto")]
ApiServers: TypeAlias = Annotated[
    ListOf[Annotated[Literal["oai", "anthropic", "kobold", "ollama"], BeforeValidator(_lower)]],
    AfterValidator(lambda servers: servers or ["oai"]),
]
Origins: TypeAlias = Annotated[
    ListOf[str],
    AfterValidator(_check_origins),
    Allowed('a list of origins such as "https://chat.example.com", "loopback", or "*" alone'),
]
Hosts: TypeAlias = Annotated[
    ListOf[str], AfterValidator(_check_hosts), Allowed("a list of host names or IP addresses, without ports")
]
LogLevel: TypeAlias = Annotated[
    Literal["TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(_upper)
]
# TabbyAPI's sample writes `reasoning: false` out, which must not switch detection off: false is unset.
TrueOrUnset: TypeAlias = Annotated[bool | None, AfterValidator(lambda value: value or None)]
ReasoningMode: TypeAlias = Annotated[Literal["auto", "on", "off"], BeforeValidator(_parse_mode)]


class Section(BaseModel):
    """A group of settings. Values do not change once they are read."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {key: value for key, value in values.items() if value is not None}
        return values


# --- sections -----------------------------------------------------------------------------------------------------


class NetworkConfig(Section):
    """Where the server listens, and who may use it."""

    host: str = "127.0.0.1"
    """Address to listen on. 127.0.0.1 serves this machine only, 0.0.0.0 every network that it is in."""

    port: Annotated[Integer, Ge(0), Le(65535)] = 5000
    """TCP port to listen on. 0 takes any free port; the log says which."""

    disable_auth: bool = False
    """Serve everybody as administrator, without keys. Whoever reaches the port can then load models and change
    settings, so leave it off unless nobody else can reach it."""

    disable_fetch_requests: bool = False
    """Never fetch an image by its http(s) URL. Images that come inside a request (data: URLs) still work."""

    fetch_allowed_hosts: Hosts = []
    """Hosts of your own network that images may be fetched from, such as nas.local or 192.168.1.20. Other addresses
    that are not public are never fetched from, whatever name or redirect leads there."""

    image_dir: str | None = None
    """Folder whose images requests may name, as file://cat.png. Whoever has a key can have them described, those in
    folders inside it too. Empty: none."""

    send_tracebacks: Annotated[bool, NoEffect("tracebacks stay in the log, where they cannot leak to clients.")] = False
    """Taken from TabbyAPI's files, without effect: tracebacks go to the log only."""

    api_servers: ApiServers = ["oai", "kobold", "ollama"]
    """Front ends to offer: oai (OpenAI's API with Anthropic's and llama.cpp's), anthropic (Anthropic's alone), kobold
    (KoboldAI's and KoboldCpp's) and ollama. Health, model and key routes are always there."""

    ssl_certfile: str | None = None
    """Certificate of the server, with those between it and its authority, as a PEM file. With it and ssl_keyfile the
    server speaks https only."""

    ssl_keyfile: str | None = None
    """Private key of ssl_certfile, as a PEM file without a password."""

    allowed_hosts: Hosts = []
    """More names by which browsers may address the server while disable_auth is set, such as llm.example.com, beside
    IP addresses, localhost, names in .local, this machine's own name, and host.docker.internal. Others are refused, so
    that no web page can reach the server through a name of its own (DNS rebinding)."""

    public_docs: bool = False
    """Let everybody read /docs and /openapi.json, without a key."""

    max_body_mb: NotNegative = 64
    """Largest body of a request in MB; images in requests count. A larger one is refused with 413. 0: no limit."""

    body_timeout: NotNegative = 60
    """Seconds that a request may take to send its headers, and that may pass between two pieces of its body, before it
    is given up. 0: no limit."""

    max_queue: NotNegative = 512
    """Requests that may wait at once for their answer to begin; each takes about four times the memory of its prompt.
    Further ones are refused with 503 until others have begun. 0: no limit."""

    max_queue_per_key: NotNegative = 256
    """As max_queue, for each API key; further requests with that key are refused with 429. Keep it below max_queue, so
    that a key that fills its queue leaves room for others. The keys take turns. 0: no limit."""

    queue_timeout: NotNegative = 600
    """Seconds that a request may wait in the queue before it is given up with 503. 0: no limit."""

    stream_timeout: NotNegative = 120
    """Seconds for which the client of a stream may read nothing before the stream is given up. 0: no limit."""

    engine_timeout: NotNegative = 300
    """Seconds for which an engine that has work may report no progress before it counts as hanging, is ended, and is
    started again. One chunk of a prompt (chunk_size) has to be done in that time. 0: no limit."""

    shutdown_timeout: NotNegative = 10
    """Seconds that requests in flight may still take when the server is told to stop; what is left then ends with an
    error. A second signal stops it at once."""

    response_store_mb: NotNegative = 64
    """Memory in MB for the responses of /v1/responses that clients want kept, to go on from them or to ask for them
    again. The least recently used are dropped first, all of them when the server ends. 0: keep none."""

    sse_ping_interval: NotNegative = 15
    """Seconds between signs of life in a stream that has nothing else to send, as during a long prefill. 0 sends
    none."""

    public_metrics: bool = False
    """Let everybody read /metrics, without a key."""

    cors_origins: Origins = ["loopback"]
    """Web pages that may use the server from a browser. "loopback" stands for the pages of this machine (localhost,
    127.0.0.1, [::1]) on any port; they may send credentials, and so may origins that are listed by name. "*" opens the
    server to every page, without credentials."""


class LoggingConfig(Section):
    """What the log shows, and where it goes."""

    log_level: LogLevel = "INFO"
    """Least severe messages to show. TABBY_LOG_LEVEL sets it too."""

    log_console: bool = True
    """Write the log to the terminal (stderr)."""

    log_file: bool = True
    """Write the log to a file in logs/, one per start. A file that reaches 20 MB is zipped and a new one begun; files
    older than a week are deleted."""

    log_json: bool = False
    """Write one JSON object a line, on the terminal and in the file, for tools that collect logs."""

    log_prompt: bool = False
    """Log the text of every prompt, as the chat template renders it."""

    log_generation_params: bool = False
    """Log the parameters of every generation: sampling, lengths, stop strings, but not the prompt."""

    log_requests: bool = False
    """Log path, headers and JSON body of every request. Keys, tokens and cookies are left out, and so is the body of a
    request without a valid key."""

    log_chat_completion_requests: bool = False
    """Write every chat completion request to a file of its own in logs/debug, without keys, and beside it the prompt
    that the chat template makes of it. The files stay until you delete them."""


class ModelParameters(Section):
    """How one model is loaded: what config.yml, tabby_config.yml and a load request have in common."""

    backend: Annotated[Literal["exllamav3"] | None, BeforeValidator(_lower)] = None
    """Engine to load the model with. There is one, exllamav3; empty means the same."""

    max_seq_len: Annotated[Integer, Ge(-1)] | None = None
    """Most tokens that prompt and answer may have together. Empty or -1: what the model's config.json says."""

    cache_size: PageMultiple | None = None
    """Tokens that the key/value cache in VRAM holds, for all requests together. More than max_seq_len lets several long
    requests run at once and keeps more of old prompts. Empty: as max_seq_len."""

    cache_mode: CacheMode = "FP16"
    """Precision of the key/value cache: FP16, Q8, Q6 or Q4, or the bits of keys and values apart, such as 8,4. Fewer
    bits hold more tokens in the same VRAM."""

    recurrent_dtype: Literal["fp16", "fp32"] = "fp16"
    """Precision in which the recurrent state of Gated DeltaNet and KDA layers is kept. fp32 doubles it, and with it the
    size of each checkpoint."""

    tensor_parallel: bool = False
    """Compute every layer on all GPUs at once instead of spreading the layers over them. Without effect on one GPU."""

    tensor_parallel_backend: Literal["native", "nccl"] = "native"
    """How GPUs talk to each other with tensor_parallel. native needs nothing; nccl may be faster with NVLink."""

    gpu_split_auto: bool = True
    """Fill one GPU after the other by itself. Without effect on one GPU, with tensor_parallel, or with a gpu_split."""

    autosplit_reserve: Sizes = [96.0]
    """VRAM in MB that gpu_split_auto leaves free on each GPU."""

    gpu_split: Sizes = []
    """VRAM in GB to use on each GPU, such as [20, 24]. Empty: see gpu_split_auto."""

    cpu_moe_offload_layers: NotNegative = 0
    """Layers of a mixture-of-experts model whose experts are computed on the CPU, to save VRAM."""

    rope_scale: Annotated[Number, ENGINE_SETS_ROPE] = 1.0
    """Taken from TabbyAPI's files, without effect."""

    rope_alpha: Annotated[RopeAlpha | None, ENGINE_SETS_ROPE] = None
    """Taken from TabbyAPI's files, without effect."""

    chunk_size: Positive = 2048
    """Prompt tokens processed in one step (rounded up to a multiple of 256). Larger is a little faster and needs more
    VRAM. Recurrent checkpoints of a prompt fall on the ends of chunks, see recurrent_checkpoint_interval_pp."""

    shared_chunk_size: PageMultiple | None = None
    """As chunk_size, while answers to other requests are generated, so that those pause for shorter. A multiple of 256,
    no larger than chunk_size. Empty: half of chunk_size."""

    prefill_cooldown: NotNegative = 4
    """Tokens that each running answer gets between two chunks of somebody else's prompt. 0: a chunk for every token,
    which is soonest done with the prompt and slowest for the answers."""

    recurrent_checkpoint_interval: PageMultiple | None = None
    """Tokens between two checkpoints of a model with recurrent layers, in generated text and in the last two chunks of
    a prompt. Smaller: an edited or continued chat is processed again from a nearer point. Larger: less host RAM
    (memory.sysmem_recurrent_cache). A multiple of 256; empty: the engine's default, 2048 or 6144 by architecture."""

    recurrent_checkpoint_interval_pp: PageMultiple | None = None
    """Tokens between two checkpoints of a model with recurrent layers in the rest of a prompt, all but its last two
    chunks. With the default an edit early in a long prompt costs a full prefill. Checkpoints fall on the ends of
    chunks, so a value below chunk_size brings no more than chunk_size does; set both intervals together. A multiple of
    256; empty: the engine's default, 32768."""

    recurrent_checkpoint_target: CheckpointTarget | None = None
    """Instead of the two intervals: how many unchanged tokens, or seconds of prefill such as 3s, an edit of a prompt
    may cost at most beyond those that follow it. Both intervals, and chunk_size where it is too large, are derived from
    it, from max_seq_len, and from what memory.sysmem_recurrent_cache holds; the log shows what was chosen and why. An
    interval that is set wins. Empty: the intervals say."""

    recurrent_checkpoint_boundaries: NotNegative = 2
    """For models with recurrent layers: put checkpoints where prompts really change, at the end of the system prompt
    and the tools, and where each of the last so many user messages begins. An edit there then costs what follows it,
    and one page more at most. Before the last of these places they stand in for recurrent_checkpoint_interval. 0:
    none."""

    output_chunking: bool = True
    """Reserve cache for an answer in steps of chunk_size instead of all at once, so that more requests fit."""

    max_batch_size: Positive | None = None
    """Most requests generated at once; others wait. Empty: 4 for models with recurrent layers, else 128."""

    prompt_template: str | None = None
    """Chat template to use instead of the model's own: the name of a .jinja file in templates/, or of one of the
    model's templates."""

    vision: bool = False
    """Load the model's vision tower, so that it takes images."""

    template_vars_default: Variables = {}
    """Variables for the chat template, used where a request does not set them."""

    template_vars_force: Variables = {}
    """Variables for the chat template, used whatever a request sets."""

    control_tokens_in_messages: bool = False
    """Let strings such as <|im_end|> become control tokens where a message holds them, as TabbyAPI does. Whoever writes
    part of a message can then forge turns."""

    keep_volatile_lines: bool = False
    """Keep lines that coding agents put before a system prompt and that change with every request, such as Claude
    Code's billing header. They make every prompt differ from its beginning, so nothing cached can be used."""

    sampler_preset: str | None = None
    """Sampler preset for this model: the name of a .yml file in sampler_overrides/. Its parameters win over those of
    sampling.override_preset."""

    force_enable_thinking: bool = False
    """Deprecated: the same as enable_thinking: true in template_vars_force, where that does not set it."""

    reasoning_mode: ReasoningMode = "auto"
    """Whether thoughts are told apart from the answer. auto: where the chat template or the tokenizer shows that the
    model has them; on: in any case; off: they stay in the answer, with their tags."""

    reasoning: TrueOrUnset = None
    """true is the same as reasoning_mode: on. false counts as unset, since TabbyAPI's sample writes it out; to turn
    detection off set reasoning_mode: off."""

    reasoning_start_token: str = DEFAULT_REASONING_TAGS[0]
    """Text that begins a thought. At its default: found from the chat template, as with the next one."""

    reasoning_end_token: str = DEFAULT_REASONING_TAGS[1]
    """Text that ends a thought."""

    start_in_reasoning: Literal["auto", "always", "never"] = "auto"
    """Whether an answer begins inside a thought. auto: as the rendered prompt ends."""

    tool_calls_in_reasoning: bool = True
    """Take a tool call inside a thought for one, if no answer follows the thought. Otherwise it is part of the
    thought."""

    reasoning_budget_tokens: Integer | None = None
    """Tokens after which a thought is ended, where a request does not say. Negative or empty: no limit."""

    reasoning_budget_message: str | None = None
    """Text put at the end of a thought that reaches its budget, where a request does not say."""

    tool_format: str | None = None
    """Form in which the model calls tools, such as hermes, qwen3_coder or mistral; docs/10.-Tool-Calling.md lists all.
    Empty: found from the chat template and the tokenizer."""

    exclude_tools_when_tool_choice_none: bool = False
    """Leave the tools of a request with tool_choice none out of the prompt. It then differs from the prompts of
    requests that may call them, so that nothing cached of those can be used."""

    harmony: bool | None = None
    """Whether the model speaks Harmony, as gpt-oss does. Empty: found from the chat template and the tokenizer."""

    muse_glimmer: bool | None = None
    """Whether the model speaks Muse Glimmer. Empty: found from the chat template and the tokenizer."""

    @property
    def chosen_reasoning_tags(self) -> tuple[str, str] | None:
        """The tags, if they are not the defaults, which samples write out."""
        tags = (self.reasoning_start_token, self.reasoning_end_token)
        return None if tags == DEFAULT_REASONING_TAGS else tags

    @property
    def effective_reasoning_mode(self) -> Literal["auto", "on", "off"]:
        """`reasoning_mode`, with what `reasoning` says where that is auto."""
        return "on" if self.reasoning and self.reasoning_mode == "auto" else self.reasoning_mode

    def template_variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Those in force where a request gives some."""
        return {**self.template_vars_default, **given, **self.forced_template_variables()}

    def forced_template_variables(self) -> dict[str, Any]:
        """`template_vars_force`, with what the deprecated `force_enable_thinking` adds to it."""
        deprecated = {"enable_thinking": True} if self.force_enable_thinking else {}
        return deprecated | self.template_vars_force


class ModelSelection(Section):
    """Which model is loaded at start, and which may be asked for later."""

    model_dir: str = "models"
    """Folder that holds the model folders."""

    inline_model_loading: bool = False
    """Let the "model" field of a request load that model, whichever key it comes with; a name that is no model is then
    refused. Otherwise a loaded model that the field names answers, and for any other name the one that was loaded
    last."""

    aliases: Aliases = {}
    """More names for models, each with the folder in model_dir that it stands for, such as {"gpt-4o": "my-model"}.
    Whatever takes a model's name takes them too."""

    use_dummy_models: bool = False
    """List the names below as models, for clients that insist on one of them. The model answers to them that answers
    requests which name none."""

    dummy_model_names: ListOf[str] = ["gpt-3.5-turbo"]
    """Names that use_dummy_models lists."""

    max_models: Positive = 1
    """Most models that are loaded at once, each in a process of its own. For a further one that goes which was unused
    for longest, as soon as it works on no request."""

    memory_budget: Positive | None = None
    """MB that all loaded models may take together, of VRAM or, without a GPU, of RAM: their weights and key/value
    caches. What a model will take is estimated from the sizes of its files and its cache; on GPUs what it has taken
    counts once it is loaded. Empty: max_models is the only limit."""

    idle_timeout: NotNegative = 0
    """Seconds without a request after which a model is unloaded. The next request that it would answer loads it again.
    0: never."""

    model_name: str | None = None
    """Folder in model_dir to load at start. Empty: none, a model is loaded by request."""

    use_as_default: ListOf[str] = []
    """Names of model and draft_model settings whose values also hold for models loaded by request, such as
    ["cache_mode", "recurrent_checkpoint_interval_pp"]. All others apply to the model loaded at start."""

    def is_dummy(self, name: str) -> bool:
        """Whether a request that gives this name, or that without the tag "latest", leaves the model to the server."""
        return self.use_dummy_models and not {name, tagged(name)}.isdisjoint(self.dummy_model_names)


class ModelConfig(ModelParameters, ModelSelection):
    """The model to load at start, and how."""


class DraftModelParameters(Section):
    """How answers are drafted: what config.yml, tabby_config.yml and a load request have in common."""

    draft_mode: Literal["model", "disabled", "mtp", "ngram"] = "model"
    """Where drafts come from: a smaller model, the model's own MTP layers, or repetitions in the text (ngram). model
    without a draft_model_name, and disabled, draft nothing."""

    draft_model_name: str | None = None
    """Folder in draft_model_dir of the draft model."""

    draft_rope_scale: Annotated[Number, ENGINE_SETS_ROPE] = 1.0
    """Taken from TabbyAPI's files, without effect."""

    draft_rope_alpha: Annotated[RopeAlpha | None, ENGINE_SETS_ROPE] = None
    """Taken from TabbyAPI's files, without effect."""

    draft_cache_mode: CacheMode = "FP16"
    """Precision of the draft model's key/value cache, as cache_mode."""

    draft_gpu_split: Sizes = []
    """VRAM in GB for the draft model on each GPU. Empty: placed automatically."""

    draft_num_tokens: Positive | None = None
    """Tokens to draft at a time. Empty: what suits the draft model."""

    dynamic_draft: bool = False
    """Draft fewer tokens while drafts are being rejected, draft_num_tokens at most."""

    ngram_match_min: Positive = 2
    """Tokens that must repeat before ngram drafts what followed them."""

    ngram_corpus: str | None = None
    """File with a text index that ngram drafts from as well, made with the engine's own tool. Only with draft_mode
    ngram. A load request can only name one inside model_dir."""

    draft_confidence: Annotated[Number, Gt(0), Lt(1)] = 0.4
    """With dynamic_draft: how probable it must be that a drafted token is accepted. Lower drafts more."""

    hybrid_draft_tokens: NotNegative = 0
    """Tokens to draft at once where the answer repeats this many tokens of its context, on top of any draft_mode. Pays
    where a model recites long texts, such as a file that it edits. 0: off."""

    draft_max_rows: NotNegative = 0
    """Most tokens checked in one step, of all requests together; drafts are shortened to it. 0: no limit."""

    sparse_draft_head: NotNegative = 0
    """Words of the vocabulary that a drafter may propose, the frequent ones; makes drafting quicker for drafters that
    use the model's own output layer, as MTP, without tensor_parallel. How often each token occurs is counted in a file
    in the user's cache folder. 0: all."""


class DraftModelSelection(Section):
    """Where draft models are."""

    draft_model_dir: str = "models"
    """Folder that holds the draft models' folders."""


class DraftModelConfig(DraftModelParameters, DraftModelSelection):
    """Drafting (speculative decoding): tokens are guessed cheaply and checked together, which is faster and changes no
    output."""


class LoraInstance(Section):
    """One LoRA adapter."""

    name: str
    scaling: Annotated[Number, Ge(0)] = 1.0


class LoraParameters(Section):
    """Which adapters a model gets: what config.yml, tabby_config.yml and a load request have in common."""

    loras: Annotated[
        ListOf[Annotated[LoraInstance, BeforeValidator(_parse_flow)]],
        AfterValidator(_check_adapters),
        Allowed('a list such as [{"name": "my-lora", "scaling": 1.0}], each name once'),
    ] = []
    """Adapters to apply, each with a name and a scaling of 0 or more. In config.yml: to the model loaded at start.
    Every other model gets those that its own tabby_config.yml or the load request names."""


class LoraSelection(Section):
    """Where adapters are."""

    lora_dir: str = "loras"
    """Folder that holds the adapters' folders."""


class LoraConfig(LoraParameters, LoraSelection):
    """LoRA adapters."""


class EmbeddingsConfig(Section):
    """Embedding models and rerankers. They need sentence-transformers: start with --extra embeddings."""

    embedding_model_dir: str = "models"
    """Folder that holds the folders of embedding models and rerankers."""

    embeddings_device: Literal["cpu", "auto", "cuda"] = "cpu"
    """Where they compute: on the CPU, on a GPU beside the language model (cuda), or on a GPU if there is one (auto). On
    the CPU with float32, whatever the files hold."""

    embedding_model_name: str | None = None
    """Folder in embedding_model_dir to load at start. Empty: none, a model is loaded by request."""

    embeddings_batch_tokens: Positive | None = None
    """Tokens that are computed in one step, padding included; between two steps others get their turn. More is faster
    on a GPU, and takes more memory. Empty: 16384 on a GPU, 1024 on the CPU."""

    embeddings_truncate: bool = False
    """Cut texts that are too long for the model off, where a request does not say. Otherwise they are an error, as
    with OpenAI."""


class SamplingConfig(Section):
    """Defaults for sampling parameters that requests leave out."""

    override_preset: str | None = None
    """Preset to apply at start: the name of a .yml file in sampler_overrides/, such as safe_defaults."""


class MemoryConfig(Section):
    """Host memory that the engine may use. Applies to every model."""

    sysmem_recurrent_cache: NotNegative = 4096
    """MB of host RAM for checkpoints of recurrent state. When it is full, checkpoints that can no longer be used go
    first, then those unused for longest."""

    sysmem_kv_cache: NotNegative = 0
    """MB of host RAM for key/value pages pushed out of VRAM, from where they return quicker than they are computed. At
    least two pages of the model have to fit. 0: none."""

    sysmem_image_cache: NotNegative = 1024
    """MB of host RAM for images as the model sees them, so that one that comes again, as in every turn of a chat, need
    not go through the vision tower again. Those unused for longest go first."""

    disk_cache_dir: str | None = None
    """Folder in which key/value pages and checkpoints are kept, so that they survive a restart and another model. What
    it holds tells what was in the prompts; it is made for its owner alone. It goes through host RAM: where
    sysmem_kv_cache is 0, 1024 is used. Empty: none."""

    disk_cache_size: Positive = 51200
    """MB that disk_cache_dir may take, for all models together. When it is full, what was unused for longest goes."""

    disk_cache_flush_on_idle: bool = True
    """Write everything to disk_cache_dir as soon as no request runs, and when the model is unloaded. Otherwise only
    what leaves VRAM, and what disk_cache_write_interval asks for."""

    disk_cache_checkpoint_interval: NotNegative = 4096
    """Least distance in tokens of the checkpoints that are kept in disk_cache_dir; they are larger than pages by far.
    The last one of a conversation is always kept. 0: all."""

    disk_cache_write_interval: Annotated[Number, Ge(0)] = 2.0
    """Seconds between two writes to disk_cache_dir while requests run, so that little of a long prefill is lost when
    the process dies. 0: none."""

    cuda_malloc_async: bool = True
    """Use CUDA's asynchronous allocator. Turn it off if the driver has trouble with it."""


class DeveloperConfig(Section):
    """Settings for development. Wrong values may make the server unusable."""

    unsafe_launch: Annotated[bool, NoEffect("the start checks nothing that could be skipped.")] = False
    """Taken from TabbyAPI's files, without effect."""

    disable_request_streaming: bool = False
    """Answer requests that ask for a stream with one JSON body."""

    realtime_process_priority: Annotated[
        bool,
        NoEffect("raising a priority takes rights that a server should not run with; the system's own tools do it."),
    ] = False
    """Taken from TabbyAPI's files, without effect."""

    seqlog: Annotated[bool, SEQ_SHIPPED] = False
    """Taken from TabbyAPI's files, without effect."""

    seqlog_server_url: Annotated[str, SEQ_SHIPPED] = "http://localhost:5341"
    """Taken from TabbyAPI's files, without effect."""

    seqlog_api_key: Annotated[str | None, SEQ_SHIPPED] = None
    """Taken from TabbyAPI's files, without effect."""


class Settings(Section):
    """All settings of the server."""

    network: NetworkConfig = NetworkConfig()
    logging: LoggingConfig = LoggingConfig()
    model: ModelConfig = ModelConfig()
    draft_model: DraftModelConfig = DraftModelConfig()
    lora: LoraConfig = LoraConfig()
    embeddings: EmbeddingsConfig = EmbeddingsConfig()
    sampling: SamplingConfig = SamplingConfig()
    memory: MemoryConfig = MemoryConfig()
    developer: DeveloperConfig = DeveloperConfig()


class LoadSettings(Section):
    """What one load is made of. Equal values load equal models."""

    model: ModelConfig = ModelConfig()
    draft_model: DraftModelConfig = DraftModelConfig()
    lora: LoraConfig = LoraConfig()
    memory: MemoryConfig = MemoryConfig()
