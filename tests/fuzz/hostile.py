"""What is read of files that somebody else wrote: for each kind small valid ones, and a reader of all of them."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import torch
from quantised_files import awq, compressed_config, compressed_packed, gptq
from safetensors.torch import save as safetensors
from small_tokenizers import byte_level, gguf_metadata, sentencepiece_like, sentencepiece_metadata, wordpiece

from engine.tiny import BASE, RandomWeights
from paceline.engine.decide.recording import RecordedDrafts
from paceline.models.bounded_templates import Limits
from paceline.models.chat import ChatTemplate
from paceline.models.config import ModelConfig
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.formats.read import read_head
from paceline.models.heads.formats.write import write_head
from paceline.models.heads.tensors import expected
from paceline.models.load import Weights, check_vocabulary, open_checkpoint
from paceline.models.load.adapters import read_adapter
from paceline.models.registry import build, read_config
from paceline.models.tokenizer import Tokenizer
from paceline.request import SamplingParams
from paceline.sampling.cycles import Cycle, Distribution
from paceline.sampling.setup import Setup
from paceline.sampling.trace import Trace, TraceToken
from paceline.speculation.datastore import Datastore, write_datastore
from paceline.training.prompts import read_prompts
from paceline.training.shards import Shards, Text, read_manifest

Files = dict[str, bytes]
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim }}"
          "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
LIMITS = Limits(steps=50_000, characters=1 << 20)
CONFIG = {**BASE, "num_hidden_layers": 1, "model_type": "llama", "rope_theta": 10000.0, "head_dim": 8,
          "attention_bias": False, "hidden_act": "silu", "eos_token_id": 2, "bos_token_id": 1,
          "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 9}}


@dataclass(frozen=True)
class Subject:
    """`valid()`: its files. `mutated(files, rng)`: the same, one of them hostile. `read(folder)`: whatever the project
    reads of them."""

    valid: Callable[[], Files]
    mutated: Callable[[Files, random.Random], Files]
    read: Callable[[Path], None]


def tensors_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of a random model of this shape."""
    class Kept(RandomWeights):
        def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
            found[name] = super().take(name, shape, dtype).contiguous().clone()
            return found[name]

    found: dict[str, torch.Tensor] = {}
    build(ModelConfig.from_dict(config), Kept(), 16)
    return found


def read_model(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        if tokenizer is not None:
            check_vocabulary(checkpoint, tokenizer.vocab_size, tokenizer.added_at_end)
            tokenizer.decode(tokenizer.encode("Hello there, 12 naïve wörds <s>"))
            tokenizer.fingerprint()
            tokenizer.detokenizer().extend(range(min(tokenizer.vocab_size, 300)))
        template = ChatTemplate.from_checkpoint(checkpoint, tokenizer)
        template.limits = LIMITS
        if template.source is not None:
            template.render(MESSAGES)
        shape = read_config(checkpoint.config)
        build(shape, Weights(checkpoint), min(shape.context, 64))
        assert checkpoint.revision
        for name in checkpoint.names():
            checkpoint.shape(name), checkpoint.stored_type(name)
            checkpoint.packed(name), checkpoint.outliers(name)


def one_of(*names: str) -> Callable[[Files, random.Random], Files]:
    """Change one of these files, each in the manner of its kind."""
    def mutated(files: Files, rng: random.Random) -> Files:
        name = rng.choice(names)
        if name.endswith(".safetensors"):
            return files | {name: mutations.of_safetensors(files[name], rng)}
        if name.endswith((".json", ".jsonl")):
            return files | {name: mutations.of_json(files[name].decode(), rng).encode("utf-8", "replace")}
        return files | {name: mutations.of_bytes(files[name], rng)}
    return mutated


# -- safetensors folders -----------------------------------------------------------------------------------------------

@cache
def folder() -> Files:
    tokenizer = byte_level("gpt-2")
    return {"config.json": json.dumps(CONFIG | {"vocab_size": 512}).encode(),
            "model.safetensors": safetensors(tensors_of(CONFIG | {"vocab_size": 512})),
            "tokenizer.json": tokenizer.to_str().encode(),
            "tokenizer_config.json": json.dumps({"chat_template": CHATML, "eos_token": "</s>", "bos_token": {
                "content": "<s>"}}).encode(),
            "special_tokens_map.json": json.dumps({"unk_token": {"content": "<unk>", "lstrip": False}}).encode(),
            "generation_config.json": json.dumps({"eos_token_id": [2, 3], "temperature": 0.7}).encode()}


@cache
def pieces() -> Files:
    return folder() | {"tokenizer.json": sentencepiece_like()[0].to_str().encode()}


@cache
def words() -> Files:
    return folder() | {"tokenizer.json": wordpiece(lowercase=True).to_str().encode()}


@cache
def sharded() -> Files:
    tensors = tensors_of(CONFIG)
    index = {"metadata": {"total_size": 1}, "weight_map": {
        name: f"model-{place % 2}.safetensors" for place, name in enumerate(tensors)}}
    parts = {f"model-{part}.safetensors": safetensors({name: tensors[name] for place, name in enumerate(tensors)
                                                       if place % 2 == part}) for part in range(2)}
    return parts | {"config.json": json.dumps(CONFIG).encode(),
                    "model.safetensors.index.json": json.dumps(index).encode()}


def quantised(made: Callable[[int, int], dict[str, torch.Tensor]], settings: dict[str, Any]) -> Callable[[], Files]:
    @cache
    def files() -> Files:
        tensors = {}
        for name, tensor in tensors_of(CONFIG | {"intermediate_size": 64}).items():
            if name.endswith("_proj.weight"):
                parts = made(*tensor.shape)
                tensors |= {name.removesuffix("weight") + part.rpartition(".")[2]: one for part, one in parts.items()}
            else:
                tensors[name] = tensor
        config = CONFIG | {"intermediate_size": 64, "quantization_config": settings}
        return {"config.json": json.dumps(config).encode(),
                "model.safetensors": safetensors({name: one.contiguous() for name, one in tensors.items()})}
    return files


# -- GGUF --------------------------------------------------------------------------------------------------------------

_GGUF_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "self_attn.q_proj": "attn_q",
               "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
               "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
               "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "model.layers.": "blk."}


@cache
def gguf(kind: str) -> mutations.GGUF:
    if kind == "llama":
        vocabulary = sentencepiece_metadata(*sentencepiece_like())
    else:
        vocabulary = gguf_metadata(byte_level("gpt-2"), "gpt-2")
    config = CONFIG | {"vocab_size": len(vocabulary["tokenizer.ggml.tokens"]), "rope_scaling": None, "model_type": kind}
    tensors = []
    for name, tensor in tensors_of(config).items():
        for theirs, ours in _GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        tensors.append((name, tuple(tensor.shape), 0, tensor.numpy().tobytes()))
    metadata = {"general.architecture": kind, "general.alignment": 32, f"{kind}.block_count": 1,
                f"{kind}.context_length": 128,
                f"{kind}.embedding_length": 32, f"{kind}.feed_forward_length": 48, f"{kind}.attention.head_count": 4,
                f"{kind}.attention.head_count_kv": 2, f"{kind}.attention.layer_norm_rms_epsilon": 1e-5,
                f"{kind}.rope.freq_base": 10000.0, f"{kind}.rope.scaling.type": "yarn",
                f"{kind}.rope.scaling.factor": 2.0,
                f"{kind}.rope.scaling.original_context_length": 64, "tokenizer.chat_template": CHATML,
                **{key: value if isinstance(value, str | bool | int | float) else list(value)
                   for key, value in vocabulary.items()}}
    return mutations.taken_apart(metadata, tensors)


def gguf_subject(kind: str) -> Subject:
    return Subject(lambda: {"model.gguf": gguf(kind).encoded()},
                   lambda files, rng: {"model.gguf": mutations.of_gguf(gguf(kind), rng)}, read_model)


# -- heads, adapters ---------------------------------------------------------------------------------------------------

TARGET = ModelConfig.from_dict(CONFIG)


def head(kind: str, **more: Any) -> Callable[[], Files]:
    @cache
    def files() -> Files:
        import tempfile
        config = HeadConfig(kind=kind, hidden_size=32, vocab_size=97, draft_vocab_size=97, taps=(1,), **more)
        tensors = {name: torch.zeros(shape) for name, shape in expected(config).items()}
        with tempfile.TemporaryDirectory() as folder:
            write_head(Path(folder) / "head", config, tensors)
            return {path.name: path.read_bytes() for path in (Path(folder) / "head").iterdir()}
    return files


@cache
def adapter() -> Files:
    tensors = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight": torch.ones(shape)
               for part, shape in (("A", (4, 32)), ("B", (32, 4)))}
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 2, "target_modules": r".*\.q_proj", "bias": "none",
              "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"layers.0": 3}, "layers_to_transform": [0],
              "layers_pattern": "layers", "use_rslora": True, "exclude_modules": ["v_proj"]}
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": safetensors(tensors)}


# -- traces, data ------------------------------------------------------------------------------------------------------

@cache
def trace() -> Files:
    params = SamplingParams(temperature=0.5, top_p=0.9, stop=("x",), logit_bias={3: 1.5}, seed=7, max_tokens=9)
    chances = Distribution(np.array([4, 9], dtype=np.int32), np.array([0.5, 0.25]))
    found = Trace(Setup(model="sha256:0", kernels="native"), [1, 2, 3], params, 7, {"method": "ngram", "num_tokens": 4},
                  "rejection", None, [TraceToken(4, 3, -0.5, -0.25, 2, ("temperature",), "ngram", "accepted")],
                  [Cycle(4, [4, 5], [-1, 0], "ngram", ["a", "b"], [chances, None])], None, "length")
    return {"trace.json": found.to_json().encode()}


def read_recorded(folder: Path) -> None:
    """As a replay does, drafts included."""
    found = Trace.from_json((folder / "trace.json").read_text(errors="replace"))
    drafts = RecordedDrafts.of(found, 97)
    for cycle in found.cycles:
        assert drafts is None or drafts.at(cycle.start) is not None


@cache
def datastore() -> Files:
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        write_datastore(Path(folder) / "store", [[1, 2, 3, 4, 1, 2, 3, 5], [7, 8, 9]], 97, "abc")
        return {"store": (Path(folder) / "store").read_bytes()}


def read_datastore(folder: Path) -> None:
    store = Datastore(folder / "store")
    store.fits(1 << 62, None)
    length, first, last = store.longest_suffix([1, 2, 3], 8, 1)
    store.following(first, last, length, 4, 16)


@cache
def texts() -> Files:
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        shards = Shards(Path(folder), {"model": "m"}, 97)
        shards.add([Text(index, np.arange(9, dtype=np.int32), 3) for index in range(3)], [7])
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def mutated_texts(files: Files, rng: random.Random) -> Files:
    """With the manifest saying how long the shard is: a changed length alone is found at once."""
    found = one_of("manifest.json", "shard-00000.npz")(files, rng)
    if found["manifest.json"] == files["manifest.json"]:
        manifest = json.loads(files["manifest.json"])
        manifest["shards"][0]["bytes"] = len(found["shard-00000.npz"])
        found["manifest.json"] = json.dumps(manifest).encode()
    return found


PROMPTS = "\n".join(json.dumps(one) for one in ({"prompt": "What is it?"}, {"messages": MESSAGES}, {"prompt": "é"}))


def mutated_prompts(files: Files, rng: random.Random) -> Files:
    lines = PROMPTS.split("\n")
    lines[rng.randrange(len(lines))] = mutations.of_json(rng.choice(lines), rng)
    raw = "\n".join(lines).encode("utf-8", "replace")
    packed = gzip.compress(raw)
    return {"a.jsonl": raw, "b.jsonl.gz": mutations.of_bytes(packed, rng) if rng.random() < 0.7 else packed}


def read_both_prompts(folder: Path) -> None:
    for name in ("b.jsonl.gz", "a.jsonl"):
        read_prompts([folder / name])


def mutated_template(files: Files, rng: random.Random) -> Files:
    if rng.random() < 0.2:
        return {"template": mutations.of_bytes(CHATML.encode(), rng)}
    return {"template": mutations.template(rng).encode()}


def read_template(folder: Path) -> None:
    source = (folder / "template").read_text(encoding="utf-8", errors="replace")
    ChatTemplate(source, {"bos_token": "<s>"}, limits=LIMITS).render(MESSAGES)


SUBJECTS: dict[str, Subject] = {
    "gguf-llama": gguf_subject("llama"), "gguf-qwen2": gguf_subject("qwen2"),
    "config": Subject(folder, one_of("config.json"), read_model),
    "side-files": Subject(folder, one_of("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
                          read_model),
    "safetensors": Subject(folder, one_of("model.safetensors"), read_model),
    "sharded": Subject(sharded, one_of("model.safetensors.index.json", "model-0.safetensors"), read_model),
    "tokenizer-bytes": Subject(folder, one_of("tokenizer.json"), read_model),
    "tokenizer-pieces": Subject(pieces, one_of("tokenizer.json"), read_model),
    "tokenizer-words": Subject(words, one_of("tokenizer.json"), read_model),
    "awq": Subject(quantised(lambda rows, columns: awq(rows, columns, 32)[0], {
        "quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
        one_of("config.json", "model.safetensors"), read_model),
    "gptq": Subject(quantised(lambda rows, columns: gptq(rows, columns, 32, act_order=True)[0], {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}),
        one_of("config.json", "model.safetensors"), read_model),
    "compressed": Subject(quantised(lambda rows, columns: compressed_packed(rows, columns, 32)[0],
                                    compressed_config(4, "pack-quantized", strategy="group", group_size=32)),
                          one_of("config.json", "model.safetensors"), read_model),
    "adapter": Subject(adapter, one_of("adapter_config.json", "adapter_model.safetensors"), lambda folder: [
        found.targets.take(name) for found in [read_adapter(folder)] for name in ("model.layers.0.mlp.up_proj", "x")]),
    **{f"head-{kind}": Subject(head(kind, **more), one_of("config.json", "model.safetensors"),
                               lambda folder: read_head(folder, TARGET))
       for kind, more in (("medusa", {"heads": 2}), ("eagle3", {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
                                                                "intermediate_size": 48}),
                          ("dspark", {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48,
                                      "block_size": 4, "mask_token_id": 3, "markov_rank": 4}))},
    "trace": Subject(trace, one_of("trace.json"), read_recorded),
    "datastore": Subject(datastore, one_of("store"), read_datastore),
    "texts": Subject(texts, mutated_texts, lambda folder: list(read_manifest(folder, "make them again").read())),
    "prompts": Subject(lambda: {"a.jsonl": PROMPTS.encode(), "b.jsonl.gz": gzip.compress(PROMPTS.encode())},
                       mutated_prompts, read_both_prompts),
    "template": Subject(lambda: {"template": CHATML.encode()}, mutated_template, read_template),
}


def written(folder: Path, files: Files) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
