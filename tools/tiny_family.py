"""The tiny family that tests draft with: a real target of about a million parameters that has read some books, its
tokenizer, and a head of every kind, trained by the commands that users have.

    python tools/tiny_family.py --text moby_dick.txt.gz pride_and_prejudice.txt.gz --out tests/family

Seconds a head on a card, minutes on a laptop; kinds that are there already are left as they are. The texts must be free
for everybody to use; they are not kept.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from paceline.measure.perplexity import read_text
from paceline.training.networks.llama import Llama, LlamaShape
from paceline.training.news import News
from paceline.training.options import HEADS, TrainOptions
from paceline.training.run import train

END = "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""A conversation is a text to go on with: the target knows nothing else."""
SHAPE = LlamaShape(vocab_size=1024, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32,
                   intermediate_size=384, norm_eps=1e-5, rope_theta=10000.0, positions=1024)
WINDOW, BATCH = 256, 32
PROMPTS, WORDS = 3000, (12, 60)


def books(paths: list[Path]) -> list[str]:
    """Texts without what Project Gutenberg puts around them, their lines joined to paragraphs."""
    found = []
    for path in paths:
        text = read_text(path)
        inner = re.search(r"\*\*\* ?START OF.*?\*\*\*(.*?)\*\*\* ?END OF", text, re.S)
        paragraphs = re.split(r"\n\s*\n", (inner.group(1) if inner else text).replace("\r", ""))
        found.append("\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip()))
    return found


def made_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=SHAPE.vocab_size, special_tokens=[END], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def batches(tokens: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    while True:
        begins = torch.randint(len(tokens) - WINDOW - 1, (BATCH,), generator=drawn)
        yield torch.stack([tokens[begin:begin + WINDOW + 1] for begin in begins.tolist()])


def made_target(tokens: torch.Tensor, steps: int, device: torch.device) -> Llama:
    torch.manual_seed(0)
    model = Llama(SHAPE, device).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.05)
    for step, batch in zip(range(steps), batches(tokens, seed=0)):
        batch = batch.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(batch[:, :-1]) @ model.embed_tokens.weight.t()
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"target: step {step} of {steps}, {loss.item():.3f} nats a token", file=sys.stderr, flush=True)
    return model


def write_target(folder: Path, model: Llama, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = model.shape.config() | {"torch_dtype": "float16", "eos_token_id": tokenizer.token_to_id(END)}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({f"model.{name}": one.detach().half().cpu().contiguous() for name, one in model.named_parameters()},
              folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": END}, indent=1))


def write_prompts(path: Path, texts: list[str]) -> None:
    """Beginnings of paragraphs, for the target to go on with."""
    drawn = random.Random(0)
    paragraphs = [part for text in texts for part in text.split("\n\n") if len(part.split()) >= WORDS[1]]
    with path.open("w", encoding="utf-8") as file:
        for part in drawn.sample(paragraphs, min(PROMPTS, len(paragraphs))):
            words = part.split()[:drawn.randint(*WORDS)]
            file.write(json.dumps({"prompt": " ".join(words)}) + "\n")


def show(news: News) -> None:
    print(f"{news.stage}: {news.text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/tiny_family.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="UTF-8, plain or .gz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=None, help="checkpoints and texts; default: OUT.work")
    parser.add_argument("--target-steps", type=int, default=3000)
    parser.add_argument("--head-steps", type=int, default=1500)
    parser.add_argument("--kinds", default=",".join((*HEADS, "draft")))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    out: Path = given.out
    work: Path = given.work or out.with_name(out.name + ".work")
    texts = books(given.text)
    target = out / "target"
    if not (target / "config.json").is_file():
        tokenizer = made_tokenizer(texts)
        tokens = torch.tensor([token for text in texts for token in tokenizer.encode(text).ids])
        print(f"target: {len(tokens):,} tokens", file=sys.stderr)
        write_target(target, made_target(tokens, given.target_steps, torch.device(given.device)), tokenizer)
    work.mkdir(parents=True, exist_ok=True)
    prompts = work / "prompts.jsonl"
    write_prompts(prompts, texts)
    first: Path | None = None
    for kind in given.kinds.split(","):
        if (out / kind).exists():
            print(f"{kind}: {out / kind} is there already", file=sys.stderr)
            if first is None and (work / kind / "data").exists():
                first = work / kind
            continue
        if first is not None and not (work / kind).exists():  # all learn from the same texts
            shutil.copytree(first / "data", work / kind / "data")
        first = first or work / kind
        report = train(TrainOptions(
            kind=kind, out=work / kind, model=str(target), data=(prompts,), samples=2, new_tokens=128, held_out=64,
            steps=given.head_steps, batch_tokens=8192, anchors=48, lr=2e-3, draft_vocab=512, markov_rank=32,
            device=given.device), show)
        half = out / f".{kind}"  # what is under its own name is whole
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(report["head"], half)
        half.rename(out / kind)
        print(f"{kind}: {json.dumps({name: report[name] for name in report if name.startswith('tokens')})}")


if __name__ == "__main__":
    main()
