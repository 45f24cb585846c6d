"""The tensors of a head's folder, whatever file they lie in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from paceline.errors import ModelFormatError
from paceline.models.heads.tensors import MAPS
from paceline.models.load.checkpoint import Checkpoint
from paceline.models.load.quantised.checkpoint import QuantisedFolder, quantization_config
from paceline.models.load.reading import check_stored, reading
from paceline.models.load.safetensors_folder import SafetensorsFolder

PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
"""What official EAGLE, Medusa and Hydra checkpoints come as. Only tensors are read of them, never code."""
Tensors = dict[str, torch.Tensor]


def read_tensors(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> Tensors:
    """By their stored names; floats as they are stored, matrices in 8 bits with their scales multiplied in."""
    if not any(folder.glob("*.safetensors")):
        return _pickled(folder, wanted)
    stored = SafetensorsFolder(folder)
    with stored:
        source: Checkpoint = QuantisedFolder(stored) if quantization_config(stored.config) else stored
        found: Tensors = {}
        for name in filter(wanted, source.names()):
            if name in MAPS or source is stored:
                found[name] = stored.stored(name).clone()
            else:
                found[name] = source.tensor(name, torch.float32).clone()
        return found


def _pickled(folder: Path, wanted: Callable[[str], bool]) -> Tensors:
    file = next((folder / name for name in PICKLED if (folder / name).is_file()), None)
    if file is None:
        raise ModelFormatError(f"{folder} has config.json but no weights of a draft head (a safetensors file, or one "
                               f"of {', '.join(PICKLED)}): download them.")
    check_stored(file)
    with reading(file, "is truncated or holds more than tensors"):
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict) or not all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in loaded.items()):
        raise ModelFormatError(f"{file} is not a dictionary of tensors: download the head's weights.")
    for name, tensor in loaded.items():
        # A tensor may claim any size over few bytes, or none: strides of 0, sparse ones, those without a storage.
        if tensor.layout != torch.strided or tensor.device.type != "cpu" \
                or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ModelFormatError(f"tensor '{name}' in {file} is larger than what is stored of it: download it again.")
    return {name: tensor for name, tensor in loaded.items() if wanted(name)}
