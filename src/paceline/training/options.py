"""TrainOptions: everything `paceline train` can be told, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from paceline.errors import ConfigError

HEADS = ("dspark", "eagle3", "medusa", "hydra", "mtp")
"""Those that read the target's states."""
MODELS = ("draft", "prune")
"""Whole models, made of the target's layers."""
KINDS = (*HEADS, *MODELS)
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
COMPILES = ("auto", "never")
VOCABS = ("whole", "draft")
BORROWING = ("dspark", "eagle3", "mtp")
"""Heads whose output matrix is the target's: it need not end with the draft vocabulary."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Fields with a `help` entry below are options of the command line under their own names."""

    kind: str
    out: Path
    model: str | None = None
    data: tuple[Path, ...] = ()
    self_made: int = 0
    texts: Path | None = None
    samples: int = 1
    answers: int | None = None
    first_job: int = 0
    new_tokens: int = 256
    prompt_tokens: int = 512
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    held_out: int = 192
    seed: int = 0
    minutes: float | None = None
    steps: int | None = None
    batch_tokens: int = 32768
    anchors: int = 64
    lr: float = 1.5e-3
    warmup: int = 100
    ema: float = 0.0
    layers: int | None = None
    heads: int | None = None
    width: int | None = None
    intermediate: int | None = None
    taps: tuple[int, ...] = ()
    draft_vocab: int = 16384
    loss_vocab: str = "whole"
    markov_rank: int = 64
    block: int = 7
    depth: int = 5
    ce_weight: float | None = None
    l1_weight: float | None = None
    first_answers: int = 4096
    generate_share: float = 0.5
    generate_until: float = 0.75
    workers: int | None = None
    concurrent: int | None = None
    target_rows: int = 8192
    evaluate_seconds: float = 60.0
    save_seconds: float = 120.0
    log_steps: int = 50
    init: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    compile: str = "auto"

    def check(self) -> None:
        """Refuse what can never work."""
        if self.kind not in KINDS:
            raise ConfigError(f"There is no training of {self.kind!r}: choose one of {', '.join(KINDS)}.")
        self._check_pruning()
        if not self.data and not self.self_made and self.texts is None:
            raise ConfigError("There is nothing to train on: name files of prompts with --data, let the target make "
                              "its own with --self-made N, or take another run's answers with --texts.")
        if self.texts is not None and (self.self_made or (self.data and self.kind != "prune")):
            raise ConfigError("--texts are answers that are there already, so --data and --self-made are of no use "
                              "beside them: leave those out, or --texts.")
        if self.minutes is None and self.steps is None and self.kind != "prune":
            raise ConfigError("Say how long to train, with --minutes or with --steps.")
        if self.minutes is not None and self.steps is not None:
            raise ConfigError("--minutes and --steps cannot be combined: give one of them.")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigError(f"{_flag(name)} must be at least {least}, got {value}.")
        for name in ("minutes", "lr", "evaluate_seconds", "save_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{_flag(name)} must be more than 0, got {value}.")
        for name in ("generate_share", "generate_until", "ema"):
            if not 0.0 <= getattr(self, name) < (1.0 if name == "ema" else 1.0 + 1e-9):
                raise ConfigError(f"{_flag(name)} is a share between 0 and 1, got {getattr(self, name)}.")
        if not self.temperatures or not all(0.0 <= value <= 5.0 for value in self.temperatures):
            raise ConfigError("--temperatures are numbers from 0 to 5, separated by commas, at least one.")
        for name, known in (("device", DEVICES), ("dtype", DTYPES), ("compile", COMPILES),
                            ("loss_vocab", VOCABS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{_flag(name)} is one of {', '.join(known)}, got {getattr(self, name)!r}.")

    def _check_pruning(self) -> None:
        asked = [name for name in ("heads", "width") if getattr(self, name) is not None]
        if self.kind != "prune":
            if asked:
                raise ConfigError(f"{_flag(asked[0])} is what `paceline train prune` keeps of the target; {self.kind} "
                                  "has no use for it.")
            return
        if self.intermediate is not None:
            raise ConfigError("--intermediate is for networks that are made anew: say with --width how much of the "
                              "target's feed-forward is kept.")
        if self.init is not None:
            raise ConfigError("--init is for heads: a pruned model begins as its target.")
        if self.layers is None and not asked:
            raise ConfigError("There is nothing to prune: say how many --layers, --heads or how much --width to keep.")
        if not self.data:
            raise ConfigError("Pruning needs to see the target at work: name files of prompts with --data.")

    @property
    def makes_model(self) -> bool:
        """Not a head."""
        return self.kind in MODELS

    @property
    def whole(self) -> bool:
        """Whether drafts are compared with the target over its whole vocabulary."""
        return self.kind in BORROWING and self.loss_vocab == "whole"

    @property
    def learns(self) -> bool:
        """What is pruned need not be."""
        return self.minutes is not None or self.steps is not None

    @property
    def loss_weights(self) -> tuple[float, float]:
        """Of cross entropy and of distance."""
        usual = (0.1, 0.9) if self.kind == "dspark" else (1.0, 0.0)
        return (usual[0] if self.ce_weight is None else self.ce_weight,
                usual[1] if self.l1_weight is None else self.l1_weight)

    def workers_on(self, device: str) -> int:
        """None where steps are counted: such a run depends on nothing but its seed."""
        if self.minutes is None:
            return 0
        return (4 if device == "cuda" else 0) if self.workers is None else self.workers

    def data_settings(self) -> dict[str, object]:
        """What the texts depend on: those of another run can be used if these are the same."""
        return {"seed": self.seed, "new_tokens": self.new_tokens, "prompt_tokens": self.prompt_tokens,
                "temperatures": list(self.temperatures), "self_made": self.self_made, "held_out": self.held_out}

    def network_settings(self) -> dict[str, object]:
        """What a checkpoint depends on: a run with others cannot go on from it."""
        names = ("kind", "seed", "batch_tokens", "anchors", "lr", "warmup", "ema", "layers", "heads", "width",
                 "intermediate", "taps", "draft_vocab", "loss_vocab", "markov_rank", "block", "depth", "ce_weight",
                 "l1_weight")
        return {name: list(value) if isinstance(value := getattr(self, name), tuple) else value for name in names}


_LEAST = {"self_made": 0, "samples": 1, "answers": 1, "first_job": 0, "new_tokens": 2, "prompt_tokens": 1,
          "held_out": 1, "seed": 0, "steps": 1, "batch_tokens": 16, "anchors": 1, "warmup": 0, "layers": 1,
          "heads": 1, "width": 1, "intermediate": 1, "draft_vocab": 2, "markov_rank": 0, "block": 1, "depth": 1,
          "first_answers": 1, "workers": 0, "concurrent": 1, "target_rows": 16, "log_steps": 1}

HELP = {
    "model": "The target: a folder, a .gguf file, a hub id or a short name. Default: the default model.",
    "data": "Prompts: .jsonl with a \"prompt\" (or \"messages\") a line, or .txt whose paragraphs are prompts; .gz is "
            "unpacked.",
    "out": "The folder to write: the head, its checkpoints, the texts and the report.",
    "self_made": "So many prompts are made by the target, from its bare chat template.",
    "texts": "Another run's --out: learn from its answers, and make none. Its --prompt-tokens and --new-tokens hold.",
    "samples": "Answers to each prompt, each at the next of --temperatures.",
    "answers": "Answers in all. Default: samples times prompts.",
    "first_job": "The number of the first answer: a later run with another one makes other texts.",
    "new_tokens": "Longest answer, in tokens.",
    "prompt_tokens": "Longer prompts are left out.",
    "temperatures": "The answers' temperatures, taken in turn, separated by commas; 0 (greedy) once a prompt.",
    "held_out": "Prompts that nothing is learned from: acceptance is measured on them.",
    "seed": "Of everything that is drawn.",
    "minutes": "How long it may take in all (prune: neither this nor --steps is needed, then nothing is trained).",
    "steps": "How many steps to train. All texts are made before the first.",
    "batch_tokens": "Tokens of a step, padding included.",
    "anchors": "Places of each text that are drafted from in a step, at most: short answers get fewer.",
    "lr": "Highest learning rate; it falls like a cosine.",
    "warmup": "Steps until the learning rate is reached.",
    "ema": "Keep a moving average of the weights, with this decay; 0: none.",
    "layers": "Decoder layers (dspark, draft, prune). Default: 2 for dspark, a fifth of the target's for draft, all of "
              "them for prune.",
    "heads": "Attention heads that are kept of each layer (prune). Default: all.",
    "width": "Features of each feed-forward that are kept (prune). Default: all.",
    "intermediate": "Width of its feed-forward (not prune). Default: the target's.",
    "taps": "Layers of the target whose inputs are read, separated by commas. Default: 2, half and all but 3.",
    "draft_vocab": "Tokens that can always be drafted: those that come most often.",
    "loss_vocab": "What drafts are compared over: whole (dspark, eagle3 and mtp: such heads can draft other tokens of "
                  "a text, too) or draft, the draft vocabulary alone.",
    "markov_rank": "Rank of the Markov head (dspark); 0: none.",
    "block": "Tokens of a block (dspark).",
    "depth": "Tokens that the others learn to draft: passes (eagle3, mtp), heads (medusa, hydra), tokens (draft, "
             "prune).",
    "ce_weight": "Of the cross entropy in the loss. Default: 0.1 for dspark, else 1.",
    "l1_weight": "Of the distance between the distributions in the loss. Default: 0.9 for dspark, else 0.",
    "first_answers": "Answers before the draft vocabulary is chosen and training begins, or what 30 % of the time "
                     "give (with --minutes).",
    "generate_share": "Share of the time that making answers takes, while it lasts (with --minutes, without workers).",
    "generate_until": "Share of the time after which no more answers are made (with --minutes).",
    "workers": "Processes that make answers beside training (with --minutes); 0: in turn with it. Default: 4 on a "
               "card, 0 on a CPU.",
    "concurrent": "Answers made at once, by each worker. Default: 512 on a card, 16 on a CPU.",
    "target_rows": "Rows that the target computes at once while training.",
    "evaluate_seconds": "Acceptance is measured so often.",
    "save_seconds": "A checkpoint is written so often.",
    "log_steps": "Steps between two lines of progress.",
    "init": "A head to train further.",
    "device": "auto, cpu or cuda.",
    "dtype": "What the target computes in: float32, bfloat16 or auto (bfloat16 on a card).",
    "compile": "auto (on a card) or never.",
}
"""What each option is, for whatever builds a command line."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def option_names() -> list[str]:
    return [field.name for field in fields(TrainOptions) if field.name != "kind"]
