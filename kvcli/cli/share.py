"""`kvcli push` and `kvcli pull`: what `kvcli inspect` knows, in a repository of the hub or a folder.

SHA256SUMS lists the files, as `sha256sum` checks it, but not the card; its own sha256 is the digest that pins them.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field

from kvcli.cli.command import Command
from kvcli.cli.fit import generate_with
from kvcli.cli.inspect import shown
from kvcli.cli.output import Output
from kvcli.errors import KvcliError, UsageError, error_text
from kvcli.options import Options
from kvcli.paths import model_folder
from kvcli.registry import DEFAULT_METHOD
from kvcli.storage.atomic import file_record, replacing
from kvcli.tables import DataTable

SUMS, CARD, METADATA = "SHA256SUMS", "README.md", "kvcli.json"
_SUM = re.compile(r"([0-9a-f]{64})  ([^/\\.][^/\\]*)")


class PushOptions(Options):
    """Options of `kvcli push`."""

    path: Path | None = Field(None, description="artifact, recipe, or file of a context or records")
    target: str | None = Field(None, description="OWNER/NAME on the hub, or a folder that exists")
    public: bool = Field(False, description="let everybody read a repository that is made now")


class PullOptions(Options):
    """Options of `kvcli pull`."""

    source: str | None = Field(None, description="OWNER/NAME[@REVISION] on the hub, a folder or a URL")
    sha256: str | None = Field(None, description="digest that 'kvcli push' told; another is refused")
    out: Path | None = Field(None, description="folder; default: runs/MODEL/NAME for artifacts, else this one")


def push(options: PushOptions, output: Output) -> None:
    """Share an artifact, a recipe, records or a context, which holds its text; prints the commit and digest."""
    from kvcli.artifact.metadata import WEIGHTS, front_matter
    from kvcli.report.facts import describe

    if options.path is None or options.target is None:
        raise UsageError("name what to push and where to: kvcli push PATH OWNER/NAME")
    path, place, facts = options.path, options.target, describe(options.path)
    kind, model = facts["kind"], facts.get("provenance", {}).get("model") or ""
    if kind != "artifact" and not path.is_file():
        raise UsageError(f"{path} is neither an artifact nor a file; 'kvcli contexts export' makes one of a context")
    named = {name: path / name for name in (WEIGHTS, METADATA)} if kind == "artifact" else {path.name: path}
    about = "".join(f"\n{x.markdown()}" for x in shown(facts) if isinstance(x, DataTable)) if kind == "recipe" else ""
    text = f"{front_matter(model, kind)}\n# A {kind} of kvcli\n{about}"
    card = path / CARD if kind == "artifact" else text.encode()
    sums = "".join(f"{file_record(file)['sha256']}  {name}\n" for name, file in named.items()).encode()
    files: dict[str, Path | bytes] = {**named, SUMS: sums}
    if (folder := Path(place).expanduser()).is_dir():
        for name, content in (files if (folder / CARD).exists() else {CARD: card, **files}).items():
            _write(content, folder / name)
    else:
        from huggingface_hub import CommitOperationAdd, HfApi

        with _naming(place):
            api = HfApi()
            api.create_repo(place, private=not options.public, exist_ok=True)
            files |= {} if api.file_exists(place, CARD) else {CARD: card}
            added = [CommitOperationAdd(name, content) for name, content in files.items()]
            place += f"@{api.create_commit(place, added, commit_message=f'kvcli push {path.name}').oid}"
    record = {"place": place, "sha256": hashlib.sha256(sums).hexdigest()}
    output.result(record, " ".join(record.values()), ["kvcli", "pull", place, "--sha256", record["sha256"]])


def pull(options: PullOptions, output: Output) -> None:
    """Get what 'kvcli push' shared; every file is compared with its checksum before it is used."""
    from kvcli.report.facts import describe

    if options.source is None:
        raise UsageError("name what to pull: kvcli pull OWNER/NAME@COMMIT")
    with tempfile.TemporaryDirectory() as scratch:
        with _naming(options.source):
            place, digest, files = _fetched(options.source, options.sha256, scratch)
        folder = options.out or Path()
        if METADATA in files and options.out is None:
            model = describe(files[METADATA].parent)["provenance"]["model"]
            folder = model_folder(model, Path(place.partition("@")[0]).name)
        folder.mkdir(parents=True, exist_ok=True)
        there = [(folder / name, path) for name, path in files.items() if (folder / name).exists()]
        if other := [old for old, new in there if file_record(old) != file_record(new)]:
            raise UsageError(f"{other[0]} is there with other content; name another folder with --out")
        for name, path in files.items():
            _write(path, folder / name)
    told = folder if METADATA in files else folder / name
    record = {"place": place, "sha256": digest, "kind": describe(told)["kind"], "path": str(told)}
    follow = ["kvcli", "generate", "--recipe", str(told)] if record["kind"] == "recipe" else generate_with(str(told))
    output.result(record, str(told), follow or ["kvcli", "inspect", str(told)])


def _fetched(source: str, digest: str | None, scratch: str) -> tuple[str, str, dict[str, Path]]:
    """Where the source is, with its commit, its digest, and its files by name, whose checksums are right."""
    from urllib.request import urlretrieve

    from huggingface_hub import HfApi, hf_hub_download

    (repo, _, revision), folder, url = source.partition("@"), Path(source).expanduser(), "://" in source
    commit = "" if url or folder.is_dir() else str(HfApi().repo_info(repo, revision=revision or None).sha)

    def fetch(name: str) -> Path:
        if commit:
            return Path(hf_hub_download(repo, name, revision=commit))
        return Path(urlretrieve(f"{source}/{name}", Path(scratch, name))[0]) if url else folder / name

    sums, files = fetch(SUMS).read_bytes(), {}
    if (found := hashlib.sha256(sums).hexdigest()) != (digest or found):
        raise KvcliError(f"{source} has the digest {found}, not {digest}")
    for line in sums.decode(errors="replace").splitlines() or [""]:
        match = _SUM.fullmatch(line)
        if match is None or file_record(path := fetch(match[2]))["sha256"] != match[1]:
            raise KvcliError(f"{line[66:] or SUMS} of {source} is damaged; 'hf cache rm' removes a copy of the hub")
        files[match[2]] = path
    return f"{repo}@{commit}" if commit else source, found, files


def _write(content: Path | bytes, path: Path) -> None:
    """Writes bytes, or a copy of a file; it appears when it is complete."""
    with replacing(path) as temporary:
        shutil.copyfile(content, temporary) if isinstance(content, Path) else temporary.write_bytes(content)


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Errors of the hub and of URLs in the block name the source; those of the disk and kvcli's own stay."""
    try:
        yield
    except Exception as error:
        if isinstance(error, KvcliError) or getattr(error, "errno", None):
            raise
        where = source if "://" in source else f"{source} is no folder here, and on the hub"
        raise KvcliError(f"{where}: {error_text(error)[:250]}") from error


_EXAMPLE = f"kvcli push runs/smollm2-135m/{DEFAULT_METHOD}-2bit OWNER/NAME"
PUSH = Command("push", PushOptions, push, _EXAMPLE, ("path", "target"))
PULL = Command("pull", PullOptions, pull, "kvcli pull OWNER/NAME", ("source",))
