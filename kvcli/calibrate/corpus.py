"""Sources of calibration and evaluation text, and their token sequences.

Every source is a stream of documents: FineWeb-Edu or another dataset on the hub, a local file or folder (parquet,
jsonl, csv, txt), standard input, or the text that ships with kvcli (`builtin_text`).
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from kvcli.calibrate.builtin_text import BUILTIN, builtin_files, is_builtin, mixture
from kvcli.calibrate.rows import READ, format_of, read_rows, text_of
from kvcli.errors import CorpusError, UsageError
from kvcli.models.hub import check_dataset
from kvcli.progress import Say
from kvcli.storage.ranks import environment

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
FINEWEB_EDU_REVISION = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
_SHUFFLE_BUFFER, _FILES_AT_ONCE = 10_000, 10
_PIECE_CHARACTERS = 65536
"""Characters given to the tokenizer at once: it takes about 160 bytes of memory per character."""


@dataclass(frozen=True)
class CorpusConfig:
    """The text to read."""

    # `builtin` (a mixture of domains), `builtin:NAME` (a domain or a source), a dataset's hub name, a file, a folder,
    # or `-` for standard input
    source: str = BUILTIN
    split: str = "calibration"  # or `heldout` of built-in text; the split of a dataset on the hub; unused elsewhere
    name: str | None = None  # configuration of a hub dataset, such as `sample-10BT`; None elsewhere
    revision: str | None = None  # commit, tag or branch of a hub dataset; None elsewhere
    text_column: str = "text"
    seed: int = 0  # of the shuffle; the order is the same for the same seed

    @classmethod
    def fineweb_edu(cls, seed: int = 0) -> CorpusConfig:
        """The default for real models: FineWeb-Edu's 10-billion-token sample at a pinned revision."""
        return cls(FINEWEB_EDU, "train", "sample-10BT", FINEWEB_EDU_REVISION, seed=seed)

    def provenance(self) -> dict[str, Any]:
        """The record of a corpus in artifacts."""
        return asdict(self)

    def shares_text(self, other: Mapping[str, Any]) -> bool:
        """Whether a record of `provenance` names text of this corpus, as far as names tell."""
        mine, source = self.provenance(), str(other.get("source"))
        if self.source == "-" or any(other.get(x) != mine[x] for x in ("split", "name", "revision")):
            return False
        if is_builtin(source) and is_builtin(self.source):
            return not set(builtin_files(source, self.split)).isdisjoint(builtin_files(self.source, self.split))
        return source == self.source


def documents(config: CorpusConfig, stdin: TextIO | None = None, skipping: Say | None = None) -> Iterator[str]:
    """Streams non-empty documents in a seeded random order.

    With `skipping`, rows without text are left out, and it gets a line that counts them at the end. CorpusError: the
    source does not exist, cannot be reached or read, or lacks the text column; a row without text; a split, name or
    revision that the source does not have.
    """
    if config.source == "-":
        _check_local(config)
        # standard input is one pass long and of unknown size: it is shuffled as a whole
        try:
            lines = [line.strip().removeprefix("\ufeff") for line in (stdin or sys.stdin)]
        except UnicodeDecodeError as error:
            raise CorpusError("standard input is not UTF-8 text") from error
        random.Random(config.seed).shuffle(lines)
        yield from (line for line in lines if line)
        return
    skipped: list[str] = []
    try:
        for place, record in _shuffled(config):
            try:
                text = text_of(record, config.text_column)
            except ValueError as error:
                skipped.append(f"{place}: {error}")
                if skipping is None:
                    raise CorpusError(f"{skipped[0]}; mend it, or leave such rows out with --skip-bad-rows") from error
                continue
            if text.strip():
                yield text
    finally:
        if skipped and skipping is not None:
            skipping(f"rows without text that were left out: {len(skipped)}, first {skipped[0]}")


def check_source(config: CorpusConfig, seq_len: int = 0, option: str = "seq_len", *, shared: bool = False) -> None:
    """Checks a local source by name and size, so that it fails before a model is loaded.

    CorpusError: there is no such file or folder, none that can be read, or an option of hub datasets was given; far
    fewer bytes than a sequence of `seq_len` tokens takes, which the `option` says. UsageError: standard input, which
    several processes would read, as is `shared` or as torchrun says.
    """
    if config.source == "-":
        if shared or environment().count > 1:
            raise UsageError("standard input can be read by one process only; pass a file to --corpus")
        _check_local(config)
        return
    files = _local_files(config)
    plain = not any(file.suffix.lower() in (".parquet", ".gz") for file in files)
    if files and plain and (count := sum(file.stat().st_size for file in files)) < seq_len // 2:
        raise _too_short(f"{count} bytes", seq_len, option)


def _shuffled(config: CorpusConfig) -> Iterator[tuple[str, Any]]:
    """The records of a source, with their places; hub datasets are opened with `datasets`, streaming."""
    if config.source == BUILTIN:
        _check_local(config)
        yield from ((BUILTIN, record) for record in mixture(config.split, config.seed))
        return
    if files := _local_files(config):
        if not any(file.stat().st_size for file in files):
            raise CorpusError(f"the corpus '{config.source}' is empty")
        yield from _rows_of(files, config)
        return
    import datasets

    datasets.disable_progress_bars()
    check_dataset(config.source, config.revision)
    version = {"split": config.split, "revision": config.revision}
    try:
        data = datasets.load_dataset(config.source, config.name, **version, streaming=True)
        for record in data.shuffle(seed=config.seed, buffer_size=_SHUFFLE_BUFFER):
            yield f"a row of '{config.source}'", record
    except Exception as error:  # datasets raises errors of a dozen libraries below it
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        advice = " (offline? pass a local file or folder with --corpus)"
        raise CorpusError(f"cannot read the corpus '{config.source}': {reason}{advice}") from error


def _rows_of(files: list[Path], config: CorpusConfig) -> Iterator[tuple[str, Any]]:
    """The rows of files with their places: of ten files in turn, through a buffer, as `datasets` 5.2 shuffles them."""

    def rows(part: Iterable[int]) -> Iterator[tuple[str, Any]]:
        for file in (files[i] for i in part):
            for row, record in read_rows(file, config.text_column):
                yield f"{file}, row {row}", record

    order, numbers, kept = [*range(len(files))], np.random.default_rng(config.seed), list[tuple[str, Any]]()
    np.random.default_rng(config.seed).shuffle(order)
    streams = [rows(part) for part in np.array_split(order, min(_FILES_AT_ONCE, len(files)))]
    while streams:
        for stream in [*streams]:
            kept += (new := list(islice(stream, _SHUFFLE_BUFFER // _FILES_AT_ONCE)))
            if not new:
                streams.remove(stream)
            if len(kept) >= _SHUFFLE_BUFFER:
                kept = [kept[i] for i in numbers.permutation(len(kept))]
                yield from kept[: -(_SHUFFLE_BUFFER // 2)]
                kept = kept[-(_SHUFFLE_BUFFER // 2) :]
    yield from (kept[i] for i in numbers.permutation(len(kept)))


def _local_files(config: CorpusConfig) -> list[Path]:
    """The files of a local source, all of one format; empty when the source is a hub name."""
    if is_builtin(config.source):
        _check_local(config)
        return builtin_files(config.source, config.split)
    path = Path(config.source).expanduser()
    if path.exists():
        _check_local(config)
    if path.is_file():
        if format_of(path) is None:
            raise CorpusError(f"{path} is none of {READ}")
        return [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if format_of(file) and file.is_file())
        kinds = {format_of(file): file.suffix for file in files}
        if not files:
            raise CorpusError(f"{path} holds no files of {READ}")
        if len(kinds) > 1:
            raise CorpusError(f"{path} holds {' and '.join(kinds.values())} files; keep one format in the folder")
        return files
    is_local = config.source.startswith((".", "/", "~")) or format_of(path) or path.is_symlink()
    if is_local or config.source.count("/") != 1:
        raise CorpusError(f"no such file or folder: {config.source}")
    return []


def _check_local(config: CorpusConfig) -> None:
    """Refuses what only a dataset on the hub has: a configuration name, a revision, a split."""
    settings = {"configuration": config.name, "revision": config.revision}
    if not is_builtin(config.source) and config.split not in ("train", CorpusConfig.split):
        settings["split"] = config.split
    for what, value in settings.items():
        if value is not None:
            raise CorpusError(f"the corpus '{config.source}' is no dataset on the hub: it has no {what} '{value}'")


def _too_short(size: str, seq_len: int, option: str) -> CorpusError:
    flag = option.replace("_", "-")
    return CorpusError(
        f"the corpus has {size}, fewer than one sequence of {seq_len} tokens; give more text, or a lower --{flag}"
    )


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that a tokenizer puts before every text, such as that of its beginning; often none."""
    text = "a"
    whole, bare = (tokenizer(text, add_special_tokens=special)["input_ids"] for special in (True, False))
    start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return list(whole[:start])


def bare_ids(tokenizer: Any, text: str, follows: bool = False) -> list[int]:
    """Token ids of a text without a token that begins it, also where it is longer than a model's context.

    Some tokenizers put a space before every text; a text that `follows` another one has its tokens without.
    """
    bare, unknown = {"add_special_tokens": False, "verbose": False}, getattr(tokenizer, "unk_token_id", None)
    for before in ("\n", ":", "") if follows else ("",):  # where it would be part of the text's first token, another
        first, ids = (tokenizer(x, **bare)["input_ids"] for x in (before, before + text))
        if ids[: len(first)] == first and unknown not in first:  # which takes unknown characters after it in
            break
    return list(ids[len(first) :])


def token_sequences(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, num_sequences: int, seq_len: int, option: str = "seq_len"
) -> Tensor:
    """Packs documents into sequences of equal length, with the end-of-text token between documents.

    Each sequence begins as the tokenizer begins a text: models that were trained so lose far more without. Returns
    int64 [num_sequences, seq_len], fewer sequences when the texts run out. CorpusError: they do not fill a single one,
    whose length the `option` says.
    """
    import torch

    first = beginning(tokenizer)
    if (width := seq_len - len(first)) < 1:
        raise CorpusError(f"sequences of {seq_len} have no room after the tokens that begin a text")
    num_tokens = num_sequences * width
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens = array("q")  # a list takes five times the memory
    for text in texts:
        start = 0
        while start < len(text) and len(tokens) < num_tokens:
            stop = start + _PIECE_CHARACTERS
            if stop < len(text):  # cut before a space or line break, where tokens end
                cut = max(text.rfind(" ", start + 1, stop), text.rfind("\n", start + 1, stop))
                stop = cut if cut > start else stop
            tokens.extend(bare_ids(tokenizer, text[start:stop], follows=start > 0))
            start = stop
        tokens.extend(separator)
        if len(tokens) >= num_tokens:
            break
    if len(tokens) < width:
        raise _too_short(f"{len(tokens)} tokens", seq_len, option)
    count = min(num_sequences, len(tokens) // width)
    packed = torch.frombuffer(tokens, dtype=torch.int64)[: count * width].view(count, width)
    return torch.cat((torch.tensor([first] * count, dtype=torch.int64), packed), dim=1) if first else packed
