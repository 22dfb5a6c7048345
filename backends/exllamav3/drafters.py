"""Whether a drafter fits the model that it is to draft for, checked before either is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from backends.exllamav3.engine import Config, Linear, Model, Tokenizer
from common.config_models import DraftModelConfig
from common.errors import InvalidRequest

# Of all tokens, those that may be other texts for the draft model: control tokens that nobody uses.
MOST_DIFFERING: Final = 0.01


def check_window(tokens: int, cache_size: int, settings: DraftModelConfig) -> None:
    """Raise InvalidRequest where drafts would take the cache that prompts need.

    Args:
        tokens: that a verification pass may run ahead.
        cache_size: in tokens.
    """
    if tokens > cache_size // 2:
        name = "hybrid_draft_tokens" if tokens == settings.hybrid_draft_tokens else "draft_num_tokens"
        raise InvalidRequest(
            f"draft_model.{name} {tokens} is more than half the cache of {cache_size} tokens. Lower it, to 16 or less "
            "for most models.",
            param=f"draft_model.{name}",
        )


def has_weights(drafter: Model) -> bool:
    """Whether the checkpoint holds any layer of a drafter that its configuration tells of."""
    layers = [module for module in drafter if isinstance(module, Linear)]
    return any(
        layer.config.stc.has_tensor_group(layer.key, ["weight"]) or layer.is_exl3_storage(layer.key) for layer in layers
    )


def compare_vocabularies(drafter: Config, directory: Path, model: Config, tokenizer: Tokenizer) -> list[str]:
    """Advice on the vocabulary of a draft model in a folder beside the model's.

    Raises:
        InvalidRequest: the tokens of one are not those of the other, or one has no embedding for them.
    """
    name = directory.name
    ids = min(tokenizer.actual_vocab_size, model.vocab_size)
    room = getattr(drafter, "vocab_size", None)
    if room is not None and room < ids:
        raise InvalidRequest(
            f"The draft model {name} knows {room} tokens, the model {ids}. Use one that was made with the same "
            "tokenizer."
        )
    if not (directory / "tokenizer.json").is_file():  # as of drafters that are made for one model
        return []
    try:
        other = Tokenizer.from_config(drafter)
    except Exception as error:  # the libraries that read these files raise what they like
        raise InvalidRequest(f"The tokenizer of the draft model {name} cannot be read: {error}") from error
    own, others = _names(tokenizer), _names(other)
    differing = sum(others.get(token_id) != token for token_id, token in own.items())
    if differing > MOST_DIFFERING * len(own) or other.actual_vocab_size > model.vocab_size:
        raise InvalidRequest(
            f"The draft model {name} has another tokenizer: {differing} of {len(own)} tokens differ, and its ids go to "
            f"{other.actual_vocab_size - 1}. Use one that was made with the same tokenizer."
        )
    if differing:
        return [
            f"{differing} tokens are others for the draft model {name} than for the model, which rejects drafts with "
            "them."
        ]
    return []


def _names(tokenizer: Tokenizer) -> dict[int, str]:
    """Of tokens, by their ids."""
    return {token_id: token for token, token_id in tokenizer.tokenizer.get_vocab(True).items()}


def check_pair(drafter: Model, model: Model, param: str, *, tensor_parallel: bool) -> None:
    """Raise InvalidRequest for a drafter that the engine would refuse beside this model once both are loaded."""
    if drafter.caps.get("draft_uses_target_cache") and tensor_parallel:
        raise InvalidRequest(
            "This drafter reads the model's own cache, which tensor_parallel spreads over processes. Use another one, "
            "or turn model.tensor_parallel off.",
            param=param,
        )
    if drafter.caps.get("mtp_draft") and drafter.caps.get("recurrent_states"):
        raise InvalidRequest(
            "The engine cannot draft with MTP layers that are recurrent. Use another draft_model.draft_mode.",
            param=param,
        )
    if drafter.caps.get("attach_target"):
        try:
            drafter.attach_to(model)
        except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"The drafter does not fit this model: {error}. Use another one, or another draft_model.draft_mode.",
                param=param,
            ) from error
