"""`paceline train ...`: what drafters need beforehand: trained heads, and the datastore of the drafter `rest`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options, train_heads
from paceline.cli.pulling import pulls
from paceline.cli.terminal import ProgressCallback, loading_bars
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer

app = typer.Typer(
    help="Prepare what drafters need.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_PIECE = 1 << 20
"""Characters that are tokenised at once: long texts are cut at a line's end, to show progress and bound memory."""


train_heads.add_to(app)


@app.command("datastore")
@pulls
def datastore(
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    files: Annotated[list[Path], typer.Argument(help="UTF-8 text files, each one text.")],
    model: options.Model = None,
    as_json: options.Json = False,
) -> None:
    """Tokenise text files and sort them for the drafter `rest`."""
    from paceline.measure.text_files import read_text

    texts = [read_text(path) for path in files]
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder {out.absolute().parent} to write {out.name} to: make it first.")
    from paceline.speculation.datastore import is_datastore, write_datastore

    if out.exists() and not is_datastore(out):
        raise ConfigError(f"{out} is there and is not a datastore: name the file to write first, then the texts.")
    with loading_bars() as progress:
        tokenizer = _tokenizer(model, progress)
        tokenised = _tokenised(texts, tokenizer, progress)
        try:
            header = write_datastore(out, tokenised, tokenizer.vocab_size, tokenizer.fingerprint(),
                                     lambda stage, done, total: progress(stage, done, total))
        except OSError as error:
            raise ConfigError(f"Cannot write {out}: {error.strerror}; choose another file.") from None
    if as_json:
        typer.echo(json.dumps({"datastore": str(out), "texts": len(files), "tokens": header.tokens,
                               "vocab_size": header.vocab_size, "bytes": header.file_size}))
    else:
        typer.echo(f"{out}: {header.tokens:,} tokens of {len(files)} texts, {header.file_size / 1e6:.1f} MB. Use it "
                   f"with --speculation '{json.dumps({'method': 'rest', 'datastore': str(out)})}'.")


def _tokenizer(model: str | None, progress: ProgressCallback) -> Tokenizer:
    from paceline.models.load.opening import open_checkpoint
    from paceline.models.load.resolve import resolve
    from paceline.models.tokenizer import Tokenizer

    with open_checkpoint(resolve(model, progress=progress)) as checkpoint:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
    if tokenizer is None:
        raise ConfigError("This model came without a tokenizer, so text cannot become its tokens: name another one "
                          "with --model.")
    return tokenizer


def _tokenised(texts: list[str], tokenizer: Tokenizer, progress: ProgressCallback) -> Iterator[list[int]]:
    done, total = 0, sum(map(len, texts))
    for text in texts:
        ids: list[int] = []
        for piece in _pieces(text):
            ids += tokenizer.encode(piece, add_special=False)
            done += len(piece)
            progress("tokenise", done, total)
        yield ids


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    while begin < len(text):
        end = begin + _PIECE
        if end < len(text):
            end = text.find("\n", end) + 1 or len(text)
        yield text[begin:end]
        begin = end
