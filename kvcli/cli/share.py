"""`kvcli push` and `kvcli pull`: what `kvcli inspect` knows, or a library's contexts, on the hub or in a folder.

SHA256SUMS lists the files, as `sha256sum` checks it, but not the card; its own sha256 is the digest that pins them.
"""

import hashlib
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import Field

from kvcli.artifact.recipe import Recipe, artifact_sha256
from kvcli.cli.command import Command
from kvcli.cli.fit import generate_with
from kvcli.cli.inspect import shown
from kvcli.cli.output import Output
from kvcli.cli.plan import LOSSES
from kvcli.commands.options import Options
from kvcli.commands.paths import artifact_record, model_folder
from kvcli.commands.tables import DataTable
from kvcli.errors import KvcliError, UsageError, error_text
from kvcli.eval.records import read_rows
from kvcli.registry import DEFAULT_METHOD
from kvcli.report.facts import describe
from kvcli.storage.atomic import file_record, replacing

SUMS, CARD, METADATA = "SHA256SUMS", "README.md", "kvcli.json"
_SUM = re.compile(r"([0-9a-f]{64})  (\w[\w .+=@,-]*)")
_SUFFIXES = {"recipe": (".yaml", ".yml"), "context": (".safetensors",), "records": (".json", ".jsonl")}
"""By kind, of the one file that is shared; an artifact is two."""

_SECONDS = 10.0
"""How long a server may be silent."""


class PushOptions(Options):
    """Options of `kvcli push`."""

    path: Path | None = Field(
        None, description="artifact, recipe, file of a context or records, or folder of 'kvcli library export'"
    )
    target: str | None = Field(None, description="OWNER/NAME on the hub, or a folder that exists")
    public: bool = Field(False, description="let everybody read a repository that is made now")


class PullOptions(Options):
    """Options of `kvcli pull`."""

    source: str | None = Field(None, description="OWNER/NAME[@REVISION] on the hub, a folder or a URL")
    sha256: str | None = Field(None, description="digest that 'kvcli push' told; another is refused")
    out: Path | None = Field(None, description="folder; default: runs/MODEL/NAME for artifacts, else this one")


def push(options: PushOptions, output: Output) -> None:
    """Share an artifact, a recipe, records or a context, which holds its text; prints the commit and digest."""
    from kvcli.artifact.metadata import WEIGHTS, front_matter, is_edited, model_card, with_checksum

    if options.path is None or options.target is None:
        raise UsageError("name what to push and where to: kvcli push PATH OWNER/NAME")
    path, place, documents = options.path, options.target, _contexts_in(options.path)
    facts: dict[str, Any] = {"kind": "context"} if documents else describe(path)
    folder = _folder(place)
    kind, model = facts["kind"], facts.get("provenance", {}).get("model") or ""
    if kind != "artifact" and not documents and not path.is_file():
        raise UsageError(f"{path} is neither an artifact nor a file; 'kvcli contexts export' makes one of a context")
    for file in documents or [path]:
        _check_name(file.name, kind)
    named = {file.name: file for file in documents or [path]}
    if kind == "artifact":
        named = {name: path / name for name in (WEIGHTS, METADATA)}
    about = "".join(f"\n{x.markdown()}" for x in shown(facts) if isinstance(x, DataTable)) if kind == "recipe" else ""
    commands = "".join(f"{shlex.join(x)}\n" for x in (["kvcli", "pull", place], _use(kind, [*named])))
    text = with_checksum(f"{front_matter(model, kind)}\n# A {kind} of kvcli\n\n```bash\n{commands}```\n{about}")
    if kind == "artifact":
        own = artifact_record(path), facts, place, _known_loss(path, model, facts["method"])
        text = (path / CARD).read_text() if is_edited(path / CARD, output.say) else model_card(*own)
    sums = "".join(f"{file_record(file)['sha256']}  {name}\n" for name, file in named.items()).encode()
    files: dict[str, Path | bytes] = {**named, SUMS: sums}
    if folder is not None:
        _check_free(folder / SUMS, named)
        files |= {} if is_edited(folder / CARD, output.say) else {CARD: text.encode()}
        for name, content in files.items():
            _write(content, folder / name)
    else:
        from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download

        with _naming(place):
            api = HfApi()
            api.create_repo(place, private=not options.public, exist_ok=True)
            if api.file_exists(place, SUMS):
                _check_free(Path(hf_hub_download(place, SUMS)), named)
            there = Path(hf_hub_download(place, CARD) if api.file_exists(place, CARD) else "")
            files |= {} if is_edited(there, output.say) else {CARD: text.encode()}
            added = [CommitOperationAdd(name, content) for name, content in files.items()]
            place += f"@{api.create_commit(place, added, commit_message=f'kvcli push {path.name}').oid}"
    record = {"place": place, "sha256": hashlib.sha256(sums).hexdigest()}
    output.result(record, " ".join(record.values()), ["kvcli", "pull", place, "--sha256", record["sha256"]])


def pull(options: PullOptions, output: Output) -> None:
    """Get what 'kvcli push' shared: an artifact, contexts, or one recipe or file of records, and nothing else.

    Every file is compared with its checksum and read before one is written.
    """
    if options.source is None:
        raise UsageError("name what to pull: kvcli pull OWNER/NAME@COMMIT")
    with tempfile.TemporaryDirectory() as scratch:
        with _naming(options.source):
            place, digest, files = _fetched(options.source, options.sha256, scratch, output)
        for name, path in files.items():
            facts = describe(path.parent if METADATA in files else path)
            kind = facts["kind"]
            _check_name(name, kind)
        folder = options.out or Path()
        if kind == "artifact" and options.out is None:
            folder = model_folder(facts["provenance"]["model"], facts["method"])
        folder.mkdir(parents=True, exist_ok=True)
        there = [(folder / name, path) for name, path in files.items() if (folder / name).exists()]
        if other := [old for old, new in there if file_record(old) != file_record(new)]:
            raise UsageError(f"{other[0]} is there with other content; name another folder with --out")
        for name, path in files.items():
            _write(path, folder / name)
    told = str(folder if len(files) > 1 else folder / name)
    record = {"place": place, "sha256": digest, "kind": kind, "path": told}
    output.result(record, told, generate_with(told) or _use(kind, [str(folder / name) for name in files]))


def _use(kind: str, files: list[str]) -> list[str]:
    """The command that uses shared files that are no artifact."""
    several = ["kvcli", "contexts", "import"] if len(files) > 1 else ["kvcli", "inspect"]
    return [*(["kvcli", "generate", "--recipe"] if kind == "recipe" else several), *files]


def _known_loss(artifact: Path, model: str, method: str) -> str:
    """What records in or beside its folder say of an artifact, else what is known of its method; empty: nothing is."""
    to, seal, rows = "nats per token to the uncompressed model", artifact_sha256(artifact), list[Any]()
    for path in (*artifact.glob("*.jsonl"), *artifact.parent.glob("*.jsonl")):
        with suppress(KvcliError):
            found = [x for x in read_rows(path) if (x.suite, x.artifact_sha256) == ("kl", seal)]
            rows += [x for x in found if not x.options["setting"] and not x.options["recipe"]]
    if x := max(rows, key=lambda x: x.num_tokens, default=None):
        exact = f"first {x.options['sink_length']} and last {x.options['residual_length']} in full precision"
        return f"KL {x.kl_mean:.2g} {to}, suite kl, {x.num_tokens} tokens of {x.options['corpus']}, {exact}"
    with suppress(KvcliError):
        measured, of = (recipe := Recipe.read(artifact.parent / "recipe.yaml")).measured, recipe.artifact_sha256
        if of == seal and isinstance(measured.get("kl_mean"), float):
            return f"KL {measured['kl_mean']:.2g} {to}, {measured.get('tokens')} tokens of {measured.get('corpus')}"
    for x in json.loads(LOSSES.read_text()):
        if x["model"] == model and method in x["kl"]:
            text = f"{x['tokens']} tokens of {x['text']}, {x['window']} in full precision"
            return f"not measured; in kvcli's records {method} has KL {x['kl'][method]:.2g} {to}, {text}"
    return ""


def _contexts_in(folder: Path) -> list[Path]:
    """The files of a folder of contexts; none for anything else. KvcliError: one of them is damaged."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    if not files or any(not file.is_file() or file.suffix not in _SUFFIXES["context"] for file in files):
        return []
    from kvcli.cache.context import read_header

    for file in files:
        read_header(file)
    return files


def _folder(place: str) -> Path | None:
    """The folder of that name, None for OWNER/NAME on the hub; UsageError: neither."""
    folder = Path(place).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or place.startswith((".", "~")) or place.count("/") != 1:
        raise UsageError(f"there is no folder '{place}', and it is no OWNER/NAME on the hub")
    return None


def _check_name(name: str, kind: str) -> None:
    """UsageError: the file of something that is not shared, or whose name does not say what it is."""
    suffixes = _SUFFIXES.get(kind, ())
    if kind != "artifact" and not (name.endswith(suffixes) and _SUM.fullmatch(f"{'0' * 64}  {name}")):
        raise UsageError(f"'{name}' is no name for {kind} to share: letters and digits, then {' or '.join(suffixes)}")


def _check_free(sums: Path, named: Collection[str]) -> None:
    """UsageError: a list of checksums, if it is there, names other files than these."""
    listed = map(_SUM.fullmatch, sums.read_text(errors="replace").splitlines() if sums.is_file() else ())
    if others := [match[2] for match in listed if match and match[2] not in named]:
        raise UsageError(f"{others[0]} was pushed there, and would stay; name another place")


def _fetched(source: str, digest: str | None, scratch: str, output: Output) -> tuple[str, str, dict[str, Path]]:
    """Where the source is, with its commit, its digest, and its files by name, whose checksums are right."""
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url

    from kvcli.artifact.metadata import WEIGHTS

    (repo, _, revision), url = source.partition("@"), source.startswith(("http://", "https://"))
    folder = None if url else _folder(source)
    commit = "" if url or folder else str(HfApi().repo_info(repo, revision=revision or None, timeout=_SECONDS).sha)
    free = shutil.disk_usage(scratch).free

    def fetch(name: str, most: int = free) -> Path:
        if folder is not None:
            return folder / name
        if url:
            return _download(f"{source}/{name}", Path(scratch, name), most, output)
        _check_size(name, get_hf_file_metadata(hf_hub_url(repo, name, revision=commit), timeout=_SECONDS).size, most)
        return Path(hf_hub_download(repo, name, revision=commit))

    sums, files = fetch(SUMS, 4096).read_bytes(), {}
    if (found := hashlib.sha256(sums).hexdigest()) != (digest or found):
        raise KvcliError(f"{source} has the digest {found}, not {digest}")
    listed = {match[2]: match[1] for x in sums.decode(errors="replace").splitlines() if (match := _SUM.fullmatch(x))}
    if len(listed) != sums.count(b"\n") or not listed:
        raise KvcliError(f"{SUMS} of {source} is damaged")
    if (
        len(listed) > 1
        and listed.keys() != {WEIGHTS, METADATA}
        and not all(x.endswith(_SUFFIXES["context"]) for x in listed)
    ):
        raise KvcliError(f"{source} lists {len(listed)} files that are neither an artifact nor contexts")
    for name, checksum in listed.items():
        files[name] = fetch(name)
        if file_record(files[name])["sha256"] != checksum:
            hint = "; 'hf cache rm' removes a copy of the hub" if commit else ""
            raise KvcliError(f"{name} of {source} is damaged{hint}")
    return f"{repo}@{commit}" if commit else source, found, files


def _download(url: str, path: Path, most: int, output: Output) -> Path:
    """Gets a file of as many bytes as the server says first."""
    from huggingface_hub import get_session

    plain = {"Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=plain, timeout=_SECONDS) as answer, path.open("wb") as file:
        answer.raise_for_status()
        _check_size(path.name, size := int(answer.headers.get("Content-Length", 0)), most)
        with output.progress(f"download {path.name}", size, "B") as advance:
            for block in answer.iter_raw():
                advance(file.write(block))
                _check_size(path.name, file.tell(), size)
    return path


def _check_size(name: str, size: int | None, most: int) -> None:
    if not size or size > most:
        raise KvcliError(f"{name} has {size or 'no known number of'} bytes; {most} at most are taken here")


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
