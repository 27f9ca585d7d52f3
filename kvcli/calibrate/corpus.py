"""Sources of calibration and evaluation text, and their token sequences.

Every source is a stream of documents: FineWeb-Edu or another dataset on the hub, a local file or folder (parquet,
jsonl, csv, txt), standard input, or the text that ships with kvcli (`builtin_text`).
"""

from __future__ import annotations

import gzip
import random
import re
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kvcli.calibrate.builtin_text import BUILTIN, builtin_files, is_builtin, mixture
from kvcli.errors import CorpusError
from kvcli.models.hub import check_dataset

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
FINEWEB_EDU_REVISION = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".txt": "text"}
_COMPRESSED = ".gz"
_READ = f"{', '.join(_FORMATS)} (the last four also with {_COMPRESSED})"
_SHUFFLE_BUFFER = 10_000
_PIECE_CHARACTERS = 65536
"""Characters given to the tokenizer at once: it takes about 160 bytes of memory per character."""


@dataclass(frozen=True)
class CorpusConfig:
    """The text to read.

    Attributes:
        source: `builtin` (a mixture of domains), `builtin:NAME` (a domain or a source), a dataset's hub name, a
            file, a folder, or `-` for standard input.
        split: `calibration` or `heldout` for built-in text, the dataset's split for hub names; unused elsewhere.
        name: configuration of a hub dataset, such as `sample-10BT`; None elsewhere.
        revision: commit, tag or branch of a hub dataset; None elsewhere.
        seed: of the shuffle; the order is the same for the same seed.
    """

    source: str = BUILTIN
    split: str = "calibration"
    name: str | None = None
    revision: str | None = None
    text_column: str = "text"
    seed: int = 0

    @classmethod
    def fineweb_edu(cls, seed: int = 0) -> CorpusConfig:
        """The default for real models: FineWeb-Edu's 10-billion-token sample at a pinned revision."""
        return cls(FINEWEB_EDU, "train", "sample-10BT", FINEWEB_EDU_REVISION, seed=seed)

    def provenance(self) -> dict[str, Any]:
        """The record of a corpus in artifacts."""
        return asdict(self)


def documents(config: CorpusConfig, stdin: TextIO | None = None) -> Iterator[str]:
    """Streams non-empty documents in a seeded random order.

    Raises:
        CorpusError: the source does not exist, cannot be reached, is not text or lacks the text column; a split, name
            or revision that the source does not have.
    """
    if config.source == "-":
        _check_local(config)
        # standard input is one pass long and of unknown size: it is shuffled as a whole
        try:
            lines = [line.strip() for line in (stdin or sys.stdin)]
        except UnicodeDecodeError as error:
            raise CorpusError("standard input is not UTF-8 text") from error
        random.Random(config.seed).shuffle(lines)
        yield from (line for line in lines if line)
        return
    for record in _shuffled(config):
        if config.text_column not in record:
            have = ", ".join(sorted(record))
            raise CorpusError(f"'{config.source}' has no column '{config.text_column}'; its columns are {have}")
        text = record[config.text_column]
        if text is None:
            raise CorpusError(f"a record of '{config.source}' has no text in column '{config.text_column}'")
        if not isinstance(text, str):
            kind = type(text).__name__
            raise CorpusError(f"column '{config.text_column}' of '{config.source}' holds {kind}, not text")
        if text.strip():
            yield text


def check_source(config: CorpusConfig) -> None:
    """Checks a local source by its name, so that it fails before a model is loaded.

    Raises:
        CorpusError: there is no such file or folder, none that can be read, or an option of hub datasets was given.
    """
    if config.source == "-":
        _check_local(config)
    else:
        _local_files(config)


def _shuffled(config: CorpusConfig) -> Iterable[dict[str, Any]]:
    """The records of a source; files and hub datasets are opened with `datasets`, streaming."""
    if config.source == BUILTIN:
        _check_local(config)
        yield from mixture(config.split, config.seed)
        return
    import datasets

    datasets.disable_progress_bars()
    files = _local_files(config)
    if files and not any(file.stat().st_size for file in files):
        raise CorpusError(f"the corpus '{config.source}' is empty")
    try:
        if files:
            kind = _format(files[0])
            for file in files if kind == "json" else ():
                with gzip.open(file) if file.suffix.lower() == _COMPRESSED else file.open("rb") as stream:
                    # pyarrow's reader can end the process where the first value is none
                    if not re.match(rb"(\xef\xbb\xbf)?\s*\[?\s*(\{|$)", stream.read(4096)):
                        raise CorpusError(f"the corpus '{file}' does not begin with a record, a JSON object")
            options = {"sample_by": "document"} if kind == "text" else {}
            data = datasets.load_dataset(
                kind, data_files=[str(file) for file in files], split="train", streaming=True, **options
            )
        else:
            check_dataset(config.source, config.revision)
            data = datasets.load_dataset(
                config.source, config.name, split=config.split, revision=config.revision, streaming=True
            )
        yield from data.shuffle(seed=config.seed, buffer_size=_SHUFFLE_BUFFER)
    except CorpusError:
        raise
    except Exception as error:  # datasets raises errors of a dozen libraries below it
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        advice = "" if files else " (offline? pass a local file or folder with --corpus)"
        raise CorpusError(f"cannot read the corpus '{config.source}': {reason}{advice}") from error


def _local_files(config: CorpusConfig) -> list[Path]:
    """The files of a local source, all of one format; empty when the source is a hub name."""
    if is_builtin(config.source):
        _check_local(config)
        return builtin_files(config.source, config.split)
    path = Path(config.source).expanduser()
    if path.exists():
        _check_local(config)
    if path.is_file():
        if _format(path) is None:
            raise CorpusError(f"{path} is none of {_READ}")
        return [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _format(file) and file.is_file())
        kinds = {_format(file): file.suffix for file in files}
        if not files:
            raise CorpusError(f"{path} holds no files of {_READ}")
        if len(kinds) > 1:
            raise CorpusError(f"{path} holds {' and '.join(kinds.values())} files; keep one format in the folder")
        return files
    if config.source.count("/") != 1 or config.source.startswith((".", "/", "~")) or _format(path) or path.is_symlink():
        raise CorpusError(f"no such file or folder: {config.source}")
    return []


def _format(path: Path) -> str | None:
    """The reader in `datasets` of a file, by its name; None if there is none."""
    name = path.with_suffix("") if path.suffix.lower() == _COMPRESSED else path
    kind = _FORMATS.get(name.suffix.lower())
    return None if kind == "parquet" and name != path else kind


def _check_local(config: CorpusConfig) -> None:
    """Refuses what only a dataset on the hub has: a configuration name, a revision, a split."""
    settings = {"configuration": config.name, "revision": config.revision}
    if not is_builtin(config.source) and config.split not in ("train", CorpusConfig.split):
        settings["split"] = config.split
    for what, value in settings.items():
        if value is not None:
            raise CorpusError(f"the corpus '{config.source}' is no dataset on the hub: it has no {what} '{value}'")


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that a tokenizer puts before every text, such as that of its beginning; often none."""
    text = "a"
    whole, bare = (tokenizer(text, add_special_tokens=special)["input_ids"] for special in (True, False))
    start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return list(whole[:start])


def token_sequences(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, num_sequences: int, seq_len: int
) -> Tensor:
    """Packs documents into sequences of equal length, with the end-of-text token between documents.

    Each sequence begins as the tokenizer begins a text: models that were trained so lose far more without.

    Returns:
        int64 [num_sequences, seq_len]; fewer sequences when the texts run out.

    Raises:
        CorpusError: the texts do not fill a single sequence.
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
            # a piece longer than the model's context is no mistake here: it is cut into sequences
            tokens.extend(tokenizer(text[start:stop], add_special_tokens=False, verbose=False)["input_ids"])
            start = stop
        tokens.extend(separator)
        if len(tokens) >= num_tokens:
            break
    if len(tokens) < width:
        short = f"the corpus has {len(tokens)} tokens, fewer than one sequence of {seq_len}"
        raise CorpusError(f"{short}; give more text, or a lower --seq-len or --prompt-tokens")
    count = min(num_sequences, len(tokens) // width)
    packed = torch.frombuffer(tokens, dtype=torch.int64)[: count * width].view(count, width)
    return torch.cat((torch.tensor([first] * count, dtype=torch.int64), packed), dim=1) if first else packed
