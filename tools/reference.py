"""Writes docs/reference.md from the code: options, parameters, methods, commands, endpoints and errors.

`PYTHONPATH=src python tools/reference.py` writes it; a test compares the file with what the code gives, so it cannot
rot. Fields are described by the string below them, commands by their help, everything else by its docstring. What has
no words in the code is refused, so that nothing new comes without.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any

import typer.main

from paceline import errors
from paceline.cli.main import app
from paceline.cli.serve import KEY_VARIABLE, OPERATOR_VARIABLE, PREFIX
from paceline.config import EngineOptions
from paceline.request import Completion, RequestOutput, SamplingParams, TokenLogprob
from paceline.speculation import spec
from paceline.speculation.options import Options
from paceline.speculation.stats import SpeculationStats
from paceline.speculation.verify import RULES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"

HEAD = """# Reference

Written by `tools/reference.py` from the code; do not edit. Prose is in [concepts](concepts.md), [serving](serving.md),
[speculation](speculation.md) and [structured output](structured-output.md).

[Engine options](#engine-options) | [Sampling parameters](#sampling-parameters) | [Outputs](#outputs) |
[Speculation](#speculation) | [Python](#python) | [Commands](#commands) |
[Environment](#environment) | [HTTP](#http) | [Errors](#errors)"""

FIELDS = {
    "Speculation.method": "The drafter.",
    "Speculation.options": "Those of the drafter.",
    "Speculation.verify": "The verification rule, see below.",
    "SpeculationStats.accepted": "Drafted tokens that stood.",
    "SpeculationStats.cycles": "Verifications of a draft.",
    "SpeculationStats.draft_s": "Seconds of its decode steps spent drafting; in shared steps its share by rows. 0 in "
                                "steps that a device drafts and repeats by itself, whose parts are not measured.",
    "SpeculationStats.drafted": "Tokens that were proposed in them.",
    "SpeculationStats.method": "The drafter.",
    "SpeculationStats.sample_s": "The same, sampling.",
    "SpeculationStats.verify_s": "The same, in the model.",
}
"""Fields whose names say it all in the code, or that share their words with the one below."""

DRAFTER_OPTIONS = {
    "accuracies": "by which choices=True is the likeliest tree: how often the best, second best, ... token is right, "
                  "by depth",
    "bits": "bits of the target's weights, 8 or 4; None: the nearest below its own",
    "branches": "siblings at each depth, of which the first goes on; a list: children of every node by depth",
    "by": "the middle drafter, one that runs a model (draft, skip, exit, precision)",
    "cache_tokens": "tokens its own cache holds; None: as many as the target's",
    "chain": "the best path alone instead of a tree",
    "choices": "a sparse tree: paths such as [0, 2], the third best token after the best one; True: a good default",
    "datastore": "file that `paceline train datastore` wrote",
    "drafter": "the small drafter, any method",
    "drafters": "its parts: methods' names, or dicts with a \"method\"",
    "factor": "draft at most factor * length of the match + offset tokens",
    "guesses": "n-grams kept for each first token",
    "head": "folder or name of a trained head that was loaded when the engine was made (heads, --head)",
    "hits": "places that are looked at",
    "layers": "the target's first layers that draft",
    "library_tokens": "tokens of all requests that are remembered; 0: none",
    "longest": "longest suffix of the text that is looked for",
    "max_n": "longest n-gram that is looked for",
    "min_confidence": "the draft does not go on below a token less likely than this",
    "min_n": "shortest n-gram that is looked for",
    "min_prob": "the draft goes on while its path's probability stays above this",
    "model": "anything `LLM` loads, with the target's vocabulary",
    "ngram": "length of the n-grams that are collected",
    "offset": "see factor",
    "ratio": "share of the layers that is skipped, a run in the middle, where `skip` does not name them",
    "shortest": "shortest suffix of the text that is looked for",
    "skip": "layers by number, or sublayers such as \"attn.5\" and \"mlp.7\"",
    "small_k": "how deep the small drafter guesses in a round",
    "tokens": "the continuation that is known",
    "top_k": "nodes of each level that go on, and children that each of them gets (with tree)",
    "tree": "a tree of the most probable continuations instead of a chain",
    "window": "columns of probe tokens in every step",
}
"""Options of drafters are read where drafters are built, which says names, types and bounds, but not what they mean."""

METHODS = {
    "dflash": "a block in one pass",
    "dspark": "a block in one pass, with a Markov head and a confidence head",
    "eagle1": "a layer fed with the target's last hidden state, then with its own",
    "eagle3": "a layer over several of the target's layers, then fed with its own output",
    "hydra": "networks side by side, one for each token, each fed with the tokens before it",
    "medusa": "networks side by side, one for each token",
    "mtp": "the layer for multi-token prediction that some models come with",
    "oracle": "proposes the continuation it is given: the ceiling of what speculation can do",
    "wrong": "proposes tokens that are never right: the floor",
}
"""Methods that share a file, whose docstring is of all of them."""

ENDPOINTS = {
    "/version": "Version, model and fingerprint.",
    "/v1/models": "The model and its adapters.",
    "/v1/models/{name:path}": "One of them.",
    "/detokenize": "The text of token ids.",
    "/paceline/requests": "The latest requests, for the page.",
    "/paceline/request": "One of them, step by step.",
}
"""Endpoints whose names say it all in the code."""

FACES = {"stream_chat": "stream() through the model's chat template."}
"""Likewise of methods."""


def reference() -> str:
    """The whole page."""
    parts = [HEAD, engine_options(), sampling_parameters(), outputs(), speculation(), python_face(), commands(),
             environment(), http(), error_classes()]
    return "\n\n".join(parts) + "\n"


# Tables

def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
                     for line in lines)


def code(text: object) -> str:
    return f"`{text}`"


def sentence(text: str | None, of: str) -> str:
    """The first paragraph of a docstring as one line."""
    if not text or not text.strip():
        raise SystemExit(f"{of} has no words in the code: write a docstring, or a string below the field.")
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split())


# Fields

def field_docs(kind: type) -> dict[str, str]:
    """The string literal below each field of a dataclass, where there is one."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {field.target.id: str(words.value.value) for field, words in pairwise(body.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            and isinstance(words, ast.Expr) and isinstance(words.value, ast.Constant)}


def field_rows(kind: type) -> Iterator[list[str]]:
    """Name, type, default and words of each field."""
    docs = field_docs(kind)
    for field in fields(kind):
        default = "" if field.default is MISSING else code(repr(field.default))
        name = f"{kind.__name__}.{field.name}"
        yield [code(field.name), code(field.type), default, FIELDS.get(name) or sentence(docs.get(field.name), name)]


def engine_options() -> str:
    return ("## Engine options\n\nOf `LLM(...)` and `AsyncLLM(...)`; None and \"auto\" are resolved, and "
            "`llm.engine.config.why` says how. An unknown name is a `ConfigError` that says the nearest known one.\n\n"
            + table(["option", "type", "default", "what it says"], field_rows(EngineOptions)))


def sampling_parameters() -> str:
    return ("## Sampling parameters\n\nOf `SamplingParams(...)`, checked when it is made. They apply in this order: "
            "penalties, bias, masks, temperature, top_k, top_p, min_p.\n\n"
            + table(["parameter", "type", "default", "what it says"], field_rows(SamplingParams)))


def outputs() -> str:
    kinds = (RequestOutput, Completion, TokenLogprob, SpeculationStats)
    computed = [[code(name), sentence(value.__doc__, name)] for name, value in vars(SpeculationStats).items()
                if isinstance(value, property)]
    return "\n\n".join(["## Outputs",
                        *(f"### {kind.__name__}\n\n{sentence(kind.__doc__, kind.__name__)}\n\n"
                          + table(["field", "type", "default", "what it says"], field_rows(kind)) for kind in kinds),
                        "Computed from them:", table(["property", "what it says"], computed)])


# Speculation

def speculation() -> str:
    wish = [row for row in field_rows(spec.Speculation) if row[0] not in ("`method`", "`options`", "`numbers`")]
    methods = [f"### {method}\n\n{method_words(method)}\n\n" + option_table(method) for method in spec.BUILDERS]
    rules = [[code(rule.name), "yes" if rule.reads_q else "", "yes" if rule.chains_only else "",
              "no: lossy" if rule.lossy else "yes",
              ", ".join(f"`{name}` ({value:g})" for name, value in rule.numbers.items())] for rule in RULES.values()]
    return ("## Speculation\n\n`speculation` is None, a method's name, or a dict with a `\"method\"`, these options "
            "and those of the method. Where depth adapts `k` is 12 unless given; `oracle` and `wrong` do not adapt.\n\n"
            + table(["option", "type", "default", "what it says"], wish)
            + "\n\n" + table(["`verify`", "reads q", "chains only", "keeps the target's distribution",
                              "options of its own"], rules)
            + f"\n\nPlanned, and refused with `NotYetError`: {', '.join(map(code, spec.PLANNED_METHODS))}; "
              f"verify {', '.join(map(code, spec.PLANNED_RULES))}.\n\n" + "\n\n".join(methods))


def method_words(method: str) -> str:
    module = inspect.getmodule(spec.BUILDERS[method])
    words = METHODS.get(method) or sentence(module.__doc__ if module else None, method)
    words = words.split(": ", 1)[1] if words.startswith(f"{method}") and ": " in words else words
    return words[0].upper() + words[1:].rstrip(".") + "."


def option_table(method: str) -> str:
    rows = sorted(set(read_options(spec.BUILDERS[method])))
    if not rows:
        return "No options of its own."
    missing = [name for name, *_ in rows if name not in DRAFTER_OPTIONS]
    if missing:
        raise SystemExit(f"{method} reads {', '.join(missing)}: say in tools/reference.py what that is.")
    return table(["option", "type", "default", "from, to", "what it says"],
                 [[code(name), kind, *(code(value) if value else "" for value in values), DRAFTER_OPTIONS[name]]
                  for name, kind, *values in rows])


KINDS = {"integer": "int", "number": "float", "flag": "bool", "text": "str", "tokens": "list[int]", "take": "any"}


def read_options(function: Callable[..., Any], seen: frozenset[object] = frozenset()) -> Iterator[tuple[str, ...]]:
    """(name, type, default, bounds) of every option that a builder, or a function it hands its options to, reads."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    loops = {node.target.id: [item.value for item in node.iter.elts if isinstance(item, ast.Constant)]
             for node in ast.walk(tree) if isinstance(node, ast.For) and isinstance(node.target, ast.Name)
             and isinstance(node.iter, ast.Tuple)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if (isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "options"
                and called.attr in KINDS and hasattr(Options, called.attr) and node.args):
            first, *rest = node.args
            names = [first.value] if isinstance(first, ast.Constant) else loops[first.id]  # type: ignore[attr-defined]
            values = [value_of(argument, function) for argument in rest]
            default = values[0] if values and called.attr != "tokens" else ""
            bounds = ", ".join(values[1:3]) if called.attr in ("integer", "number") else ""
            for name in names:
                yield str(name), KINDS[called.attr], default, bounds
        elif any(isinstance(argument, ast.Name) and argument.id == "options" for argument in node.args):
            target = resolve(called, function)
            if target is not None and target not in seen:
                yield from read_options(target, seen | {function})


def resolve(called: ast.expr, function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function of ours that a call means; None: it is none."""
    names = inspect.unwrap(function).__globals__ if hasattr(function, "__globals__") else {}
    if isinstance(called, ast.Name):
        found = names.get(called.id)
    elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        found = getattr(names.get(called.value.id), called.attr, None)
    else:
        return None
    found = getattr(found, "__func__", found)
    return found if isinstance(found, FunctionType) and found.__module__.startswith("paceline.") else None


def value_of(argument: ast.expr, function: Callable[..., Any]) -> str:
    """An argument as the reader should see it: a number where that is known, else the expression."""
    text = ast.unparse(argument)
    names = {name: value for name, value in function.__globals__.items() if isinstance(value, int | float)}
    try:
        return repr(eval(text, {"__builtins__": {"min": min, "max": max, "float": float}}, names))
    except (NameError, AttributeError, TypeError):
        return text


# Python

def python_face() -> str:
    from paceline.async_llm import AsyncLLM
    from paceline.llm import LLM

    parts = ["## Python"]
    for kind in (LLM, AsyncLLM):
        methods = [(name, value) for name, value in vars(kind).items()
                   if not name.startswith("_") and (callable(value) or isinstance(value, property | classmethod))]
        parts.append(f"### {kind.__name__}\n\n{sentence(kind.__doc__, kind.__name__)}\n\n"
                     + table(["method", "what it does"],
                             [[code(call(name, value)), sentence(value.__doc__ or FACES.get(name), name)]
                              for name, value in methods]))
    return "\n\n".join(parts)


def call(name: str, value: Any) -> str:
    if isinstance(value, property):
        return name
    names = [one.name if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) else f"**{one.name}"
             for one in inspect.signature(getattr(value, "__func__", value)).parameters.values()
             if one.name not in ("self", "cls")]
    return f"{name}({', '.join(names)})"


# Commands

def commands() -> str:
    root = typer.main.get_command(app)
    parts = ["## Commands\n\nExit codes: 0 fine, 1 a check failed, 2 a mistake that the text explains. "
             "What the environment says is [below](#environment)."]
    parts += [command(path, one) for path, one in walk("paceline", root)]
    return "\n\n".join(parts)


def walk(path: str, one: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(one, "commands"):
        yield path, one
        return
    for name, inner in one.commands.items():
        yield from walk(f"{path} {name}", inner)


def command(path: str, one: Any) -> str:
    words = sentence(one.help, path).replace("\b", "").strip()
    rows = []
    for parameter in one.params:
        if parameter.name == "help":
            continue
        names = [*parameter.opts, *parameter.secondary_opts]
        if parameter.param_type_name == "argument":
            names = [f"{parameter.name.upper()}{'...' if parameter.nargs != 1 else ''}"]
        shown = "required" if parameter.required else shown_default(parameter.default)
        rows.append([" ".join(map(code, names)), shown, sentence(parameter.help, f"{path} {names[0]}")])
    heading = f"### {path}\n\n{words}"
    return heading if not rows else heading + "\n\n" + table(["option", "default", "what it says"], rows)


def shown_default(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return code(default) if isinstance(default, int | float | str) and default != "" else ""


# Environment

ENVIRONMENT = {
    "PACELINE_CACHE": "Folder of fetched models and measured profiles. Default: paceline in the user's cache folder "
                      "(`XDG_CACHE_HOME`, else ~/.cache).",
    "PACELINE_DEBUG": "1: commands show tracebacks.",
    KEY_VARIABLE: "Keys of `paceline serve`, separated by commas; beside those of the command line.",
    OPERATOR_VARIABLE: "Operators' keys, likewise.",
    f"{PREFIX}...": "Any option of `paceline serve` by its name in capitals (`PACELINE_SERVE_MAX_QUEUE`), lists "
                    "separated by commas; a file (`--config`, or `PACELINE_SERVE_CONFIG`) and the command line win "
                    "over it.",
    "PACELINE_RANKS_TOKEN": "What tensor-parallel ranks of several hosts know each other by (docs/cluster.md).",
    "HF_ENDPOINT": "Address of the hub, or of a mirror. Default: https://huggingface.co.",
    "HF_TOKEN": "Your token of the hub, for models that are gated or private. It is sent to the hub alone, never to a "
                "host that it redirects to, and is never logged.",
    "HF_HUB_OFFLINE": "1: the hub is never asked.",
    "HF_HUB_CACHE": "Where the hub's own client keeps models (else hub in `HF_HOME`): those are found, never changed.",
    "OMP_NUM_THREADS": "Threads of torch, and of the native kernels where `threads` does not say.",
}
"""What is read of it."""


def environment() -> str:
    rows = ([code(name), words] for name, words in ENVIRONMENT.items())
    return "## Environment\n\n" + table(["variable", "what it says"], rows)


# HTTP

def http() -> str:
    from paceline.serve import live, schema
    from paceline.serve.app import ROUTERS
    from paceline.serve.routes import docs, embeddings, llamacpp, messages_input, ollama, responses_input

    routes: dict[str, tuple[list[str], str]] = {}
    for router in (*ROUTERS, docs.router, live.router):
        for route in router.routes:
            path, methods = route.path, sorted(route.methods)  # type: ignore[attr-defined]
            known = routes.get(path, ([], ""))
            words = sentence(route.endpoint.__doc__ or ENDPOINTS.get(path), path)  # type: ignore[attr-defined]
            both = words if known[1] in ("", words) else f"{known[1]} {words}"
            routes[path] = (sorted({*known[0], *methods}), both)
    bodies = {"Both kinds of completion, responses and messages": schema.Sampling,
              "`/v1/completions`": schema.CompletionBody,
              "`/v1/chat/completions`": schema.ChatBody, "`/tokenize`": schema.TokenizeBody,
              "`/detokenize`": schema.DetokenizeBody, "`/v1/responses`": responses_input.ResponsesBody,
              "`/v1/embeddings`": embeddings.EmbeddingBody, "`/v1/messages`": messages_input.MessagesBody,
              "`/api/chat`": ollama.OllamaChat, "`/api/generate`": ollama.OllamaGenerate,
              "`/api/embed`": ollama.OllamaEmbed, "`/completion`": llamacpp.LlamaCompletion}
    parts = ["## HTTP", table(["endpoint", "methods", "what it answers"],
                              [[code(path), " ".join(methods), words] for path, (methods, words) in routes.items()]),
             "Fields of bodies. They mean what the [sampling parameter](#sampling-parameters) of that name means, or "
             "what [serving](serving.md#fields) says. A null is the default; unknown fields are refused."]
    for title, body in bodies.items():
        common = schema.Sampling.model_fields if schema.Sampling in body.__mro__[1:] else {}
        names = [field.alias or name for name, field in body.model_fields.items() if name not in common]
        parts.append(f"{title}: {', '.join(map(code, names))}.")
    return "\n\n".join(parts)


# Errors

def error_classes() -> str:
    rows = []
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.PacelineError):
            bases = ", ".join(code(base.__name__) for base in kind.__bases__)
            rows.append([code(kind.__name__), bases, sentence(kind.__doc__, kind.__name__)])
    return ("## Errors\n\nOf `paceline.errors`. Each message is a sentence that says what to change.\n\n"
            + table(["error", "is a", "when"], rows))


def main() -> int:
    text = reference()
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
