"""What the site shows beside docs: pages from elsewhere in the repository, their links, and the Python reference."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OTHERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/*", "findings/*", "notes/*")
OTHERS += ("calibration_data/README.md", "calibration_data/licenses/*")
"""Files that pages lead to."""

API = {
    "attach": (
        "Attaching a model",
        ["attention.attach.attach", "attention.attach.new_cache", "models.load.load_model"],
    ),
    "session": (
        "Sessions",
        ["attention.session.Session", "attention.generation.SamplingConfig", "attention.generation.Generated"],
    ),
    "cache": ("Caches", ["cache.compressed.CompressedCache", "cache.compressed.MemoryReport", "cache.context.Context"]),
    "documents": ("Documents and stores", ["text.document.Document", "text.library.Library", "contexts.ContextStore"]),
    "artifacts": (
        "Artifacts and choices",
        ["artifact.artifact.Artifact", "artifact.choice.MethodChoice", "artifact.recipe.Recipe"],
    ),
    "methods": ("For a method of your own", ["methods.base", "methods.method"]),
    "errors": ("Errors", ["errors"]),
}
"""Of each page of the Python reference its heading and what it documents."""

FILE_NAME = re.compile(r"\[([\w-]+)\.md\](?=\()")
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")


def place(path: str) -> str:
    """Where a file of the repository is on the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def origin(uri: str) -> str:
    """Where a page of the site is in the repository."""
    if uri == "index.md":
        return "README.md"
    return uri if any(Path(uri).match(pattern) for pattern in OTHERS) else f"docs/{uri}"


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from elsewhere."""
    for pattern in OTHERS:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                text = path.read_bytes() if path.suffix != ".md" else path.read_text()
                files.append(File.generated(config, place(str(path.relative_to(ROOT))), content=text))
    for name, (heading, objects) in API.items():
        text = "\n\n".join([f"# {heading}", *(f"::: kvcli.{x}" for x in objects)])
        files.append(File.generated(config, f"api/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links between files of the repository into links between pages, and names of files into words."""
    uri = page.file.src_uri
    here = posixpath.dirname(origin(uri))

    def moved(match: re.Match[str]) -> str:
        target = place(posixpath.normpath(posixpath.join(here, match[2])))
        return match[1] + posixpath.relpath(target, posixpath.dirname(uri) or ".")

    return FILE_NAME.sub(lambda match: f"[{match[1].replace('_', ' ')}]", LINK.sub(moved, markdown))
