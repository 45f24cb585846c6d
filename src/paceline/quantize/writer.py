"""Writes a model's folder: tensors in shards, config, tokenizer, chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from paceline.errors import ConfigError
from paceline.models.chat import ChatTemplate
from paceline.models.load.checkpoint import Checkpoint
from paceline.models.load.safetensors_folder import INDEX, SINGLE
from paceline.models.tokenizer import Tokenizer

SHARD_BYTES = 4 << 30
_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
           "chat_template.jinja", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Made, or there and empty; anything else is not overwritten. If what is done inside fails, the folder is as it was
    before: gone, or there and empty."""
    there = path.exists()
    if there and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} is there already: name another folder with --out, or remove it.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot make the folder {path}: {error.strerror}; name another one with --out.") from None
    try:
        yield path
    except BaseException:
        with suppress(OSError):  # what went wrong first is what counts
            for file in path.iterdir():
                file.unlink()
            if not there:
                path.rmdir()
        raise


class FolderWriter:
    """Takes tensors one by one and writes a shard when enough are together; `finish` writes what names them."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._waiting_bytes = 0
        self._shards: list[list[str]] = []
        self.bytes = 0
        """Of all tensors so far."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        own = tensor.detach().cpu().contiguous().clone()  # may share memory with another tensor or with a file
        size = own.numel() * own.element_size()
        if self._waiting and self._waiting_bytes + size > self._shard_bytes:
            self._flush()
        self._waiting[name] = own
        self._waiting_bytes += size
        self.bytes += size

    def finish(self, config: dict[str, Any]) -> None:
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = SINGLE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._shard(number).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            _write_json(self._folder / INDEX, {"metadata": {"total_size": self.bytes}, "weight_map": weight_map})
        _write_json(self._folder / "config.json", config)
        readable = (self._folder / "config.json").stat().st_mode & 0o777
        for file in set(weight_map.values()):
            (self._folder / file).chmod(readable)  # safetensors makes files that only their owner may read

    def _flush(self) -> None:
        if not self._waiting:
            return
        try:
            save_file(self._waiting, self._shard(len(self._shards)), metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"Cannot write to {self._folder} ({error}): choose a folder with enough room.") from None
        self._shards.append(list(self._waiting))
        self._waiting.clear()
        self._waiting_bytes = 0

    def _shard(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """What turns text into tokens and messages into text: copied, or written out where the model is one file."""
    if checkpoint.path.is_dir():
        for name in _COPIED:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, folder / name)
        if (folder / "tokenizer.json").exists():
            return
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    if tokenizer is None:
        return
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = dict(tokenizer.special_tokens)
    template = ChatTemplate.from_checkpoint(checkpoint, tokenizer)
    if template.tool_source is not None:
        settings["chat_template"] = [{"name": "default", "template": template.source},
                                     {"name": "tool_use", "template": template.tool_source}]
    elif template.source is not None:
        settings["chat_template"] = template.source
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "generation_config.json", {"eos_token_id": sorted(tokenizer.eos_ids)})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
