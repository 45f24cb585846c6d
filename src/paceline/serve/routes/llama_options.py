"""Options as llama.cpp and Ollama call them, as fields of a chat or a completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import RequestError
from paceline.serve.calls import Service

SAME = ("temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty", "seed")
RENAMED = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens", "n_predict": "max_tokens"}
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "mirostat": (0,), "tfs_z": (1, 1.0), "typical_p": (1, 1.0), "dynatemp_range": (0,), "xtc_probability": (0,),
    "dry_multiplier": (0,), "top_n_sigma": (-1, 0), "penalize_newline": (True, False), "min_keep": (0, 1)}
"""Samplers that are not here, with the values that switch them off: with others a text would differ from what was asked
for."""
PENALTIES: Mapping[str, float] = {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
"""With the values that switch them off."""
LAST = (-1, 64)
"""For `repeat_last_n`: the whole text, which penalties here look at, and what clients send that choose nothing."""
IGNORED = frozenset({
    "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram", "f16_kv", "vocab_only",
    "use_mmap", "use_mlock", "logits_all", "draft_num_predict", "mirostat_eta", "mirostat_tau", "n_keep", "id_slot",
    "cache_prompt", "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "samplers"})
"""How a machine is used, which is the operator's to say, and what belongs to samplers that are off."""


def sampling(options: Mapping[str, Any], service: Service) -> dict[str, Any]:
    """Lengths and seeds below 0 stand for none: as long as the context and the server allow, a seed of the server's."""
    limits = service.options
    fields: dict[str, Any] = {
        "max_tokens": service.llm.engine.config.max_model_len if limits.max_output_tokens is None
        else limits.max_output_tokens}
    last = options.get("repeat_last_n")
    for name, value in _heeded(options, last).items():
        if value is None or name in IGNORED:
            continue
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise RequestError(f"{name} is not supported: leave it out, or set it to {NEUTRAL[name][0]}.", name)
        elif name in SAME or name in RENAMED:
            own = RENAMED.get(name, name)
            if own not in ("seed", "max_tokens") or not isinstance(value, int) or value >= 0:
                fields[own] = value
        else:
            raise RequestError(f"There is no option {name!r} here: leave it out.", name)
    return fields


def _heeded(options: Mapping[str, Any], last: Any) -> dict[str, Any]:
    """Without `repeat_last_n`: with 0 nothing is penalised, and where nothing is, it says nothing."""
    found = {name: value for name, value in options.items() if name != "repeat_last_n"}
    if last is None or last in LAST:
        return found
    if not isinstance(last, int) or isinstance(last, bool):
        raise RequestError(f"repeat_last_n must be a whole number, got {last!r}.", "repeat_last_n")
    if last == 0:
        return {name: value for name, value in found.items() if name not in PENALTIES}
    if any(found.get(name) not in (None, off) for name, off in PENALTIES.items()):
        raise RequestError("repeat_last_n is not supported: penalties look at the whole text; leave it out, or set it "
                           "to -1.", "repeat_last_n")
    return found
