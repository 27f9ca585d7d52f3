"""What makes the tokens of `kvcli serve`: pages for requests at once where they can be, else one request at a time."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvcli.artifact.choice import MethodChoice
from kvcli.attention.attach import attach
from kvcli.attention.session import Session
from kvcli.errors import UnsupportedModelError, UsageError
from kvcli.models.load import LoadedModel
from kvcli.paged.model import open_pages
from kvcli.progress import Progress, Say, no_progress, say_nothing
from kvcli.serve.continuous import ContinuousEngine
from kvcli.serve.jobs import JobThread
from kvcli.serve.pages import LONG_PASS
from kvcli.serve.sequential import SequentialEngine


@contextmanager
def open_engine(
    loaded: LoadedModel,
    choice: MethodChoice,
    name: str,
    *,
    max_batch: int,
    hot_bytes: int,
    max_model_len: int | None = None,
    attach: Callable[..., Session] = attach,
    impl: str = "auto",
    note: Say = say_nothing,
    progress: Progress = no_progress,
    **others: Any,
) -> Iterator[JobThread]:
    """What answers requests, inside the block.

    Args:
        choice: of a method; see `open_pages`.
        name: of the model, as clients see it.
        max_batch: requests at once at most; with 1, none has pages.
        hot_bytes: of pages, or of the caches of prompts.
        max_model_len: tokens of a prompt and its answer; None: as many as the model has positions, or pages hold.
        attach, impl: as of `open_pages`.
        note: gets a line if there is one request at a time where more may be, with the reason.
        others: as of `JobThread`.

    As `kvcli.attach`, and UsageError: a `max_model_len` that the pages do not hold, or has no positions.
    """
    loaded.check_length(max_model_len or 0, note)
    engine: JobThread | None = None
    common = {"max_model_len": max_model_len, **others}
    with ExitStack() as stack:
        if max_batch > 1:
            length = max_model_len or loaded.spec.max_position_embeddings
            sizes: dict[str, Any] = {"max_bytes": hot_bytes, "num_rings": max_batch, "max_length": length}
            try:
                model = stack.enter_context(open_pages(loaded, choice, attach=attach, impl=impl, **sizes))
            except (UnsupportedModelError, UsageError) as error:
                note(f"one request is answered at a time: {error}")
            else:
                model.warm_up(LONG_PASS * model.page_size, progress)
                if model.captured is not None and (reason := model.captured.graphs.note) is not None:
                    note(reason)
                    model.captured = None  # launched one by one, passes are best of all requests at once
                engine = ContinuousEngine(model, loaded.tokenizer, name, **common)
        if engine is None:
            session = stack.enter_context(attach(loaded, choice, impl=impl))
            session.warmup(progress=progress)
            engine = SequentialEngine(loaded, session, name, hot_bytes=hot_bytes, **common)
        stack.callback(engine.close)
        yield engine
