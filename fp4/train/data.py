"""Text to batches of tokens, the same on every run: corpus, byte-level BPE, held-out split, order of the batches."""

from __future__ import annotations

import functools
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp4.train.settings import TrainError

END_OF_TEXT = "<|endoftext|>"
# Documents are cut at line ends into pieces of about this many characters; one piece in HELD_OUT is for evaluation only.
PIECE = 4096
HELD_OUT = 20
# Not the library proper: its tests, its bundled applications, and what was installed beside it.
NOT_LIBRARY = {"test", "tests", "idlelib", "turtledemo", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Tokens of a text. train, held_out: (tokens,) uint16, or uint32 for a vocabulary above 65536."""

    train: np.ndarray
    held_out: np.ndarray
    info: CorpusInfo


@dataclass(frozen=True)
class CorpusInfo:
    """Where the tokens come from. digest: SHA-256 of the tokens; vocab: entries of the tokenizer, at most those asked for."""

    source: str
    files: int
    characters: int
    vocab: int
    train_tokens: int
    held_out_tokens: int
    digest: str


def standard_library() -> list[Path]:
    """The Python source files of the running interpreter's standard library, in order of their path within it."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [p.relative_to(root) for p in root.rglob("*.py")]
    kept = [p for p in files if not NOT_LIBRARY & set(p.parts) and not p.parts[0].startswith("config-")]
    return [root / p for p in sorted(kept, key=Path.as_posix)]


def text_files(paths: Iterable[str]) -> list[Path]:
    """`paths` with each folder replaced by the files in it, sorted; hidden files and folders left out.

    Raises TrainError for a path that does not exist or a folder without files.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_file():
            found.append(path)
        elif path.is_dir():
            inside = [p.relative_to(path) for p in path.rglob("*") if p.is_file()]
            visible = sorted((p for p in inside if not any(part.startswith(".") for part in p.parts)), key=Path.as_posix)
            if not visible:
                raise TrainError(f"--data {path} is a folder without files; name files, or a folder with text files in it")
            found += [path / p for p in visible]
        else:
            raise TrainError(f"--data {path} does not exist; name files or folders of text, or leave --data out")
    return found


def documents(paths: Iterable[str]) -> tuple[str, list[str]]:
    """(what was read, its texts): the files of `paths`, or the standard library when `paths` is empty.

    Files that are not UTF-8 text are passed over. Raises TrainError when nothing is left.
    """
    paths = list(paths)
    source = " ".join(paths) or f"standard library of Python {sysconfig.get_python_version()}"
    texts = []
    for file in text_files(paths) if paths else standard_library():
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and "\0" not in text:
            texts.append(text)
    if not texts:
        raise TrainError(f"no UTF-8 text in {source}; name text files or folders with --data")
    return source, texts


def pieces(text: str) -> Iterator[str]:
    """`text` in pieces of about PIECE characters, cut after line ends (a line longer than that stays whole)."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def train_tokenizer(texts: Iterable[str], vocab: int) -> Any:
    """A byte-level BPE of at most `vocab` entries, as a ``tokenizers.Tokenizer``; equal texts give equal tokenizers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The whole byte alphabet: every text can be encoded, seen or not.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build(paths: Iterable[str], vocab: int) -> tuple[Corpus, Any]:
    """(corpus, tokenizer) of the text in `paths`. Every HELD_OUT-th piece is held out; the tokenizer never sees it."""
    source, texts = documents(paths)
    cut = [list(pieces(text)) for text in texts]
    flat = [piece for document in cut for piece in document]
    held = [i % HELD_OUT == HELD_OUT - 1 for i in range(len(flat))]
    if not any(held):
        need = HELD_OUT * PIECE
        raise TrainError(f"{source} has {sum(map(len, texts))} characters, too few to hold some out; give at least {need}")
    tokenizer = train_tokenizer((p for p, h in zip(flat, held, strict=True) if not h), vocab)
    end = tokenizer.token_to_id(END_OF_TEXT)
    last = set(np.cumsum([len(document) for document in cut]) - 1)
    dtype = np.uint16 if vocab <= 1 << 16 else np.uint32
    parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    # The special token's own text is encoded as text: a corpus that mentions it does not end a document.
    tokenizer.encode_special_tokens = True
    for i, encoding in enumerate(tokenizer.encode_batch(flat, add_special_tokens=False)):
        parts[held[i]].append(np.array(encoding.ids + [end] * (i in last), dtype=dtype))
    tokenizer.encode_special_tokens = False
    train, held_out = np.concatenate(parts[False]), np.concatenate(parts[True])
    info = CorpusInfo(
        source=source,
        files=len(texts),
        characters=sum(map(len, texts)),
        vocab=tokenizer.get_vocab_size(),
        train_tokens=len(train),
        held_out_tokens=len(held_out),
        digest=hashlib.sha256(train.tobytes() + held_out.tobytes()).hexdigest(),
    )
    return Corpus(train, held_out, info), tokenizer


def prepare(paths: Iterable[str], vocab: int, folder: Path, *, reuse: bool = False) -> Corpus:
    """The corpus of `paths`, written to `folder` (tokenizer.json, train.npy, held_out.npy, corpus.json).

    reuse: read it from there if a run has written it, so that a resumed run has the same tokens whatever became of the text.
    """
    done = folder / "corpus.json"  # written last: its presence says that the rest is whole
    if reuse and done.exists():
        info = CorpusInfo(**json.loads(done.read_text()))
        return Corpus(np.load(folder / "train.npy"), np.load(folder / "held_out.npy"), info)
    corpus, tokenizer = build(paths, vocab)
    done.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    np.save(folder / "train.npy", corpus.train)
    np.save(folder / "held_out.npy", corpus.held_out)
    done.write_text(json.dumps(asdict(corpus.info), indent=1))
    return corpus


@functools.lru_cache(maxsize=4)
def _order(windows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(windows)


@dataclass(frozen=True)
class Batches:
    """Batches of consecutive windows of `seq` tokens, in an order that depends on the seed and the step alone.

    So a resumed run needs no more than its step, and every recipe sees the same data. Each epoch is a new permutation of
    the windows. Raises TrainError when the text has no window; `part` says in its message which text that is.
    """

    part: str
    tokens: np.ndarray
    batch: int
    seq: int
    seed: int

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise TrainError(
                f"the {self.part} text has {len(self.tokens)} tokens, --seq {self.seq} needs {self.seq + 1}: give more text "
                "with --data, or write a smaller --seq"
            )

    @property
    def windows(self) -> int:
        return (len(self.tokens) - 1) // self.seq

    def _take(self, windows: Iterable[int]) -> tuple[Tensor, Tensor]:
        rows = np.stack([self.tokens[w * self.seq : (w + 1) * self.seq + 1] for w in windows]).astype(np.int64)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def training(self, step: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of a step (from 0), each (batch, seq) int64; targets are the tokens one further on."""
        places = range(step * self.batch, (step + 1) * self.batch)
        return self._take(_order(self.windows, self.seed, i // self.windows)[i % self.windows] for i in places)

    def evaluation(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """At most `count` batches spread evenly over the text, the same every time (windows repeat in a very short text)."""
        count = min(count, max(1, self.windows // self.batch))
        places = np.linspace(0, self.windows - 1, count * self.batch).astype(np.int64)
        for i in range(count):
            yield self._take(places[i * self.batch : (i + 1) * self.batch])
