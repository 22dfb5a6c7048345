"""Requests as chat front ends send them, in our own words, with the values that their settings start with."""

from __future__ import annotations

from typing import Any

_DRY_BREAKERS = '["\\n", ":", "\\"", "*"]'

# SillyTavern's text completion for TabbyAPI, all samplers off.
SILLYTAVERN_NEUTRAL: dict[str, Any] = {
    "prompt": "Narrator: COUNT\nMira:",
    "model": "alpha",
    "max_new_tokens": 250,
    "max_tokens": 250,
    "temperature": 1,
    "top_p": 1,
    "typical_p": 1,
    "typical": 1,
    "min_p": 0,
    "top_k": 0,
    "top_a": 0,
    "tfs": 1,
    "skew": 0,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "nsigma": 0,
    "top_n_sigma": 0,
    "min_keep": 0,
    "repetition_penalty": 1,
    "rep_pen": 1,
    "rep_pen_range": 0,
    "repetition_penalty_range": 0,
    "repetition_decay": 0,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "smoothing_factor": 0,
    "smoothing_curve": 1,
    "temperature_last": True,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 0,
    "dry_sequence_breakers": _DRY_BREAKERS,
    "xtc_threshold": 0.1,
    "xtc_probability": 0,
    "adaptive_target": -0.01,
    "adaptive_decay": 0.9,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "guidance_scale": 1,
    "negative_prompt": "",
    "penalty_alpha": 0,
    "num_beams": 1,
    "length_penalty": 1,
    "early_stopping": False,
    "do_sample": True,
    "add_bos_token": True,
    "ban_eos_token": False,
    "skip_special_tokens": True,
    "include_reasoning": True,
    "token_healing": False,
    "min_length": 0,
    "min_tokens": 0,
    "speculative_ngram": False,
    "truncation_length": 4096,
    "custom_token_bans": "",
    "banned_strings": [],
    "logit_bias": {},
    "grammar_string": "",
    "json_schema": {},
    "sampler_priority": ["temperature", "top_k", "top_p", "min_p"],
    "sampler_order": [6, 0, 1, 3, 4, 2, 5],
    "stopping_strings": ["\nNarrator:"],
    "stop": ["\nNarrator:"],
    "api_type": "tabby",
    "api_server": "http://127.0.0.1:5000/",
    "stream": False,
}

# The same with everything turned on, also what the engine lacks.
SILLYTAVERN_TUNED: dict[str, Any] = {
    **SILLYTAVERN_NEUTRAL,
    "max_new_tokens": 40,
    "max_tokens": 40,
    "temperature": 0.85,
    "top_p": 0.95,
    "top_k": 40,
    "min_p": 0.05,
    "typical_p": 0.98,
    "typical": 0.98,
    "top_a": 0.1,
    "tfs": 0.97,
    "skew": 0.5,
    "repetition_penalty": 1.1,
    "rep_pen": 1.1,
    "rep_pen_range": 1024,
    "repetition_penalty_range": 1024,
    "frequency_penalty": -0.2,
    "presence_penalty": 0.3,
    "smoothing_factor": 0.2,
    "temperature_last": False,
    "dry_multiplier": 0.8,
    "dry_penalty_last_n": 512,
    "xtc_probability": 0.5,
    "adaptive_target": 0.6,
    "mirostat_mode": 2,
    "dynatemp_low": 0.5,
    "dynatemp_high": 1.5,
    "dynatemp_exponent": 2,
    "ban_eos_token": True,
    "token_healing": True,
    "min_tokens": 10,
    "seed": 42,
    "custom_token_bans": "5, 7,",
    "banned_strings": [" shivers down", "testament to"],
    "logit_bias": {"9": -50},
    "logprobs": 10,
}
SILLYTAVERN_LACKING = {
    "smoothing_factor", "top_a", "tfs", "typical", "skew", "mirostat_mode", "min_temp", "max_temp", "temp_exponent",
}  # fmt: skip

_CHAT_IDS = {"chat_id": "0c1d", "id": "7e2f", "session_id": "5a3b"}
_USER = {"name": "User", "id": "41", "email": "user@localhost", "role": "admin"}


def _task(kind: str, words: str) -> dict[str, Any]:
    return {
        "model": "alpha",
        "messages": [{"role": "user", "content": f"### Task:\n{words}\n### Chat:\nUSER: hello\nASSISTANT: hi"}],
        "stream": False,
        "max_completion_tokens": 1000,
        "metadata": {"task": kind, "chat_id": "0c1d", "task_body": {"messages": []}},
    }


# Open WebUI's chat, and what it asks for after the first answer: JSON in the content.
OPEN_WEBUI_CHAT: dict[str, Any] = {
    "model": "alpha",
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "COUNT"}],
    "params": {},
    "features": {"web_search": False, "code_interpreter": False, "image_generation": False},
    "variables": {"{{USER_NAME}}": "User"},
    "background_tasks": {"title_generation": True, "tags_generation": True},
    "user": _USER["id"],
    "metadata": {**_CHAT_IDS, "user": _USER},
    "filter_ids": [],
    **_CHAT_IDS,
}
OPEN_WEBUI_TASKS: dict[str, dict[str, Any]] = {
    "title": _task("title_generation", 'NAME IT: answer with JSON such as { "title": "..." }'),
    "tags": _task("tags_generation", 'TAG IT: answer with JSON such as { "tags": ["...", "..."] }'),
    "follow_ups": _task("follow_up_generation", 'GO ON: answer with JSON such as { "follow_ups": ["..."] }'),
}
