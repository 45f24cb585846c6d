"""The commands' options, each written once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
_MODEL_HELP = f"Folder, .gguf file, short name or hub id, either with :QUANT. Default: {DEFAULT_MODEL}."


def _sampling(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Sampling")


def _engine(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Engine")


def _output(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Output")


ModelArgument = Annotated[str | None, typer.Argument(help=_MODEL_HELP)]
Model = Annotated[str | None, _engine(_MODEL_HELP, "--model", "-m")]
Device = Annotated[str, _engine("auto, cpu or cuda.")]
Dtype = Annotated[str, _engine("auto, float32, bfloat16 or float16.")]
KvDtype = Annotated[str, _engine("Of the cache: auto, float32, bfloat16, float16, int8 (native CPU path) or fp8.",
                                 "--kv-dtype")]
Quantization = Annotated[
    str | None, _engine("Of the weights on the native CPU path: int8, or blocks (as the file has them).")
]
Deterministic = Annotated[
    bool | None, _engine("Bitwise the same logits at any batch size and chunking. Default: wherever there are kernels "
                         "for it, everywhere but in plain torch on a CPU.", "--deterministic/--no-deterministic")
]
KernelChoice = Annotated[str, _engine("auto, native, eager, reference, triton or stepped (to debug).", "--kernels")]
Lora = Annotated[
    list[str] | None, _engine("NAME=FOLDER of a PEFT adapter that requests may name; repeatable.", "--lora")
]
Head = Annotated[
    list[str] | None, _engine("Folder or name of a trained head that requests may draft with; repeatable. Default: "
                              "those that come with Paceline for this model (on a card only where --speculation "
                              "is one of their methods); none: no heads.", "--head")
]
TensorParallelSize = Annotated[
    int, _engine("Processes that hold the model together, a card each or a part of the cores.",
                 "--tensor-parallel-size")
]
MaxModelLen = Annotated[int | None, _engine("Longest context to serve, in tokens.")]
SpeculationText = Annotated[
    str | None, _engine('A method such as auto, ngram, suffix, skip or exit; none; MODULE:BUILDER of a drafter of '
                        'your own; or JSON such as {"method": "draft", "model": "FOLDER", "k": 6}.', "--speculation")
]

System = Annotated[str | None, typer.Option("--system", "-s", help="System prompt.")]
MaxTokens = Annotated[int, _sampling("Longest output, in tokens.")]
MinTokens = Annotated[int, _sampling("No end before this many tokens.")]
Temperature = Annotated[float, _sampling("0 is greedy.", "--temperature", "-t")]
ChatTemperature = Annotated[
    float | None, _sampling("0 is greedy. Default: 0.2, and 0 without a terminal.", "--temperature", "-t")
]
TopK = Annotated[int, _sampling("Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, _sampling("Keep the smallest set with this much probability.")]
MinP = Annotated[float, _sampling("Drop tokens below this fraction of the best.")]
RepetitionPenalty = Annotated[float, _sampling("Above 1 discourages tokens seen before, prompt included.")]
PresencePenalty = Annotated[float, _sampling("Taken off each token that was written before.")]
FrequencyPenalty = Annotated[float, _sampling("Taken off a token for each time it was written.")]
NoRepeatNgram = Annotated[int, _sampling("Never repeat this many tokens in a row.", "--no-repeat-ngram-size")]
BadWords = Annotated[list[str] | None, _sampling("Never write this; repeatable.", "--bad-word")]
Stop = Annotated[list[str] | None, _sampling("End before this text; repeatable.")]
StopTokenIds = Annotated[list[int] | None, _sampling("End at this token; repeatable.", "--stop-token-id")]
ParseSpecial = Annotated[bool, _sampling("Special tokens written in a prompt are special tokens, not text.",
                                         "--parse-special")]
IgnoreEos = Annotated[bool, _sampling("Go on past the model's own end.", "--ignore-eos")]
Seed = Annotated[int | None, _sampling("Same seed, same text. Default: a random one, reported.")]
Samples = Annotated[int, _sampling("Samples per prompt.", "--n", "-n")]
Timeout = Annotated[float | None, _sampling("Seconds a prompt may take.")]

Logprobs = Annotated[int | None, _output("Log-probabilities of each token and of the k best.")]
PromptLogprobs = Annotated[int | None, _output("The same for the prompt.")]
Json = Annotated[bool, _output("Print one JSON document.", "--json")]
Pretty = Annotated[bool, _output("The JSON indented, on many lines; else it is one.", "--pretty")]
Plain = Annotated[bool, _output("Answers as they come: Markdown is not rendered, lines are not wrapped.", "--plain")]
Trace = Annotated[Path | None, _output("Write what `paceline replay` needs to this file.")]
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON to FILE, or to stdout with '-'.")
]


def adapters(given: list[str] | None) -> dict[str, str] | None:
    """What `--lora` stands for: folders by name."""
    found: dict[str, str] = {}
    for text in given or []:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise ConfigError(f"--lora {text!r} names no adapter: write NAME=FOLDER.")
        if name in found:
            raise ConfigError(f"--lora names {name!r} twice: choose another name for one of them.")
        found[name] = folder
    return found or None


def heads(given: list[str] | None) -> tuple[str, ...] | None:
    """What `--head` stands for; None: what comes with Paceline."""
    if not given:
        return None
    if "none" in given and len(given) > 1:
        raise ConfigError("--head none leaves no other head: name some, or write none alone.")
    return () if given == ["none"] else tuple(given)


def speculation(text: str | None) -> Any:
    """What `--speculation` stands for: None, a method's name, or the object its JSON describes."""
    if text is None or text == "none":
        return None
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--speculation is not valid JSON ({error}): write a method's name or a JSON object.") from None
