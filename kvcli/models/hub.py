"""Locates a model: a folder, or the Hugging Face hub, whose data files of one commit are downloaded into its cache.

Files with Python code and pickles are never fetched.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from kvcli.errors import CorpusError, ModelError, UsageError, error_text, suggestion
from kvcli.models.builtin_models import BUILTIN_MODELS
from kvcli.progress import Say

is_folder, is_file = os.path.isdir, os.path.isfile
"""Unlike those of pathlib, False for a name longer than the file system allows."""

_REACH_SECONDS = 4.0
_CONFIG = ("config.json",)
_DATA = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_NOT_NEEDED = ("*/*", "consolidated*")


def check_model_name(name: str) -> None:
    """Checks without torch that a model's folder or file is there, or its name one of the hub's; else ModelError."""
    if name.endswith(".gguf") and not is_file(Path(name).expanduser()):
        raise ModelError(f"no such GGUF file: {Path(name).expanduser()}")
    folder = None if name in BUILTIN_MODELS or name.endswith(".gguf") else local_folder(name)
    if folder is not None and not any(is_file(folder / file) for file in ("config.json", "adapter_config.json")):
        raise ModelError(f"cannot load model '{folder}': it has no config.json, so it is not a folder of a model")


def check_chat(name: str) -> None:
    """Checks without torch that the tokenizer of a model's folder has a chat template, else UsageError."""
    folder = Path(name).expanduser()
    config = folder / "tokenizer_config.json"
    if name in BUILTIN_MODELS or not is_file(folder / "config.json") or not is_file(config):
        return
    if not any(folder.glob("*chat_template*")) and '"chat_template"' not in config.read_text(errors="replace"):
        raise UsageError(f"{name} has no chat template: it continues texts, as 'kvcli generate' lets it")


def local_folder(name: str) -> Path | None:
    """The folder of that name; None if the name is one of the hub's. ModelError: neither."""
    path = Path(name).expanduser()
    if is_folder(path):
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        built_in = ", ".join(BUILTIN_MODELS)
        what = "it is a file; name its folder" if is_file(path) else "there is no such folder"
        raise ModelError(
            f"cannot load model '{name}': {what}{suggestion(name, BUILTIN_MODELS)} (expected {built_in}, a folder, "
            "a .gguf file, or OWNER/MODEL on the hub)"
        )
    return None


def download_model(name: str, revision: str | None, say: Say, check: Callable[[Path], object]) -> Path:
    """Downloads a model, or finds it in the hub's cache, and returns its folder.

    Without a connection, a copy in the cache is used; where there is none, the error comes within seconds. Before its
    weights are downloaded, `check` can refuse a model by a folder that holds the config alone.

    ModelError: no such model or revision, no access to it, or no connection and no copy in the cache.
    """
    commit, offline = _reach(name, revision)
    check(_fetch(name, commit, offline, _CONFIG))
    if not offline:
        say(f"downloading {name} from the hub, unless its cache has it")
    return _fetch(name, commit, offline, _DATA)


def download_config(name: str, revision: str | None = None) -> Path:
    """The folder of a model's config.json, which alone is downloaded; errors are those of `download_model`."""
    return _fetch(name, *_reach(name, revision), _CONFIG)


def _reach(name: str, revision: str | None) -> tuple[str | None, bool]:
    """The commit of a revision, and whether the hub's cache has to do, because the hub does not answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    refusals: dict[type[Exception], str] = {
        HFValidationError: "this is neither a folder here nor a name of the form OWNER/MODEL",
        GatedRepoError: "access is restricted; ask for it on the model's page and log in with 'hf auth login'",
        RevisionNotFoundError: "it has no such revision",
        RepositoryNotFoundError: "there is no such model, or it is private; check the name, or log in with "
        "'hf auth login'",
    }
    try:
        return str(_answer(lambda: HfApi().model_info(name, revision=revision, timeout=_REACH_SECONDS)).sha), False
    except Exception as error:
        for kind, reason in refusals.items():
            if isinstance(error, kind):
                raise ModelError(f"cannot load model '{name}' from the hub: {reason}") from error
        return revision, True


def _fetch(name: str, revision: str | None, offline: bool, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    files: dict[str, Any] = {"allow_patterns": list(patterns), "ignore_patterns": list(_NOT_NEEDED)}
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=offline, **files))
    except LocalEntryNotFoundError as error:
        at = f" at revision '{revision}'" if revision else ""
        raise ModelError(
            f"cannot load model '{name}'{at}: it is no folder here, and the hub cannot be reached "
            "nor does its cache have a copy; check the name and the connection"
        ) from error
    except Exception as error:
        raise ModelError(
            f"cannot load model '{name}': the download failed ({error_text(error)[:200]}); "
            "run the same command again to resume"
        ) from error


def check_dataset(name: str, revision: str | None) -> None:
    """Checks within seconds that the hub has a dataset, else CorpusError; `datasets` itself tries for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        _answer(lambda: HfApi().dataset_info(name, revision=revision, timeout=_REACH_SECONDS))
    except RevisionNotFoundError as error:
        raise CorpusError(f"the dataset '{name}' has no revision '{revision}'") from error
    except (GatedRepoError, RepositoryNotFoundError) as error:
        raise CorpusError(
            f"there is no dataset '{name}' on the hub, or access is restricted; check the name, or log in with "
            "'hf auth login'"
        ) from error
    except HfHubHTTPError:
        return  # the hub answers; what it says is for `datasets` to deal with
    except Exception as error:
        raise CorpusError(
            f"cannot read the corpus '{name}': it is no file or folder here, and the hub cannot be reached; "
            "pass a local file or folder with --corpus"
        ) from error


def _answer(question: Callable[[], Any]) -> Any:
    """The hub's answer, or TimeoutError; a thread asks, because waiting for a silent name server is not interrupted."""
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer.result(_REACH_SECONDS)
