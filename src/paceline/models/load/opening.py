"""open_checkpoint(): which kind of checkpoint lies at a path, and that one opened."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ModelFormatError, ModelNotFoundError
from paceline.models.load.checkpoint import Checkpoint
from paceline.models.load.gguf_checkpoint import GGUFCheckpoint
from paceline.models.load.quantised.checkpoint import QuantisedFolder, quantization_config
from paceline.models.load.safetensors_folder import SafetensorsFolder


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder with config.json and safetensors, a .gguf file, or a folder that holds one .gguf file."""
    path = Path(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return GGUFCheckpoint(path)
        raise ModelFormatError(f"{path} is not a .gguf file: give the folder of a safetensors model, or a GGUF file.")
    if not path.is_dir():
        raise ModelNotFoundError(f"There is no model at {path}: check the path.")
    if not (path / "config.json").exists():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return GGUFCheckpoint(found[0])
        if found:
            raise ModelFormatError(f"{path} holds several GGUF files ({', '.join(file.name for file in found)}): "
                                   "name the one to load.")
        raise ModelFormatError(f"{path} has neither config.json nor a .gguf file: give the folder of a model.")
    folder = SafetensorsFolder(path)
    return QuantisedFolder(folder) if quantization_config(folder.config) else folder
