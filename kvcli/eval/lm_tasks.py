"""Tasks of lm-eval over the real cache.

lm-eval asks for log-likelihoods and continuations of contexts. Here every context is read into a cache in chunks, and
what follows reads the cache: with a single pass over context and answer, as usual, no code would ever be read.
Needs the extra `kvcli[eval]`.
"""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import disable_progress_bars

try:
    from lm_eval import evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    from kvcli.errors import UsageError as _UsageError

    raise _UsageError("--suite tasks needs lm-eval; install it with: pip install 'kvcli[eval]'") from error

from kvcli.cache.memory import MemoryReport
from kvcli.errors import UsageError, suggestion
from kvcli.eval.case import Case, NewCache
from kvcli.eval.greedy import end_tokens, greedy, not_finite_logits, read
from kvcli.eval.records import Better
from kvcli.models import LoadedModel
from kvcli.seam.decoder import logits_of

_MAX_NEW_TOKENS = 256
"""Length of a continuation where a task names none, as in lm-eval."""

Advance = Callable[[int], None]


@dataclass(frozen=True)
class TasksConfig:
    """Which tasks, and how they are asked.

    Attributes:
        tasks: names of lm-eval tasks, or paths of their YAML files.
        include_path: folder with YAML files of further tasks.
        limit: documents per task; None for all.
        num_fewshot: examples in the context; None for each task's own number.
        chat: whether contexts are put into the chat template.
        chunk: tokens of a context read at once.
        seed: of examples.
    """

    tasks: Sequence[str]
    include_path: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    chat: bool = False
    chunk: int = 32
    seed: int = 0


class Document(NamedTuple):
    """The value of a metric for one document of a task."""

    task: str
    document: int
    metric: str
    better: Better
    value: float


class CachedModel(TemplateLM):
    """What lm-eval calls a model: tokens in, log-likelihoods and continuations out, through caches of one kind.

    Args:
        loaded: the model, attached if the caches are compressed.
        new_cache: makes an empty cache.
        chunk: tokens of a context read at once.
        advance: called with 1 after each request.
    """

    def __init__(
        self, loaded: LoadedModel, new_cache: NewCache, chunk: int, advance: Advance = lambda requests: None
    ) -> None:
        super().__init__()
        self.loaded, self.new_cache, self.chunk, self.advance = loaded, new_cache, chunk, advance
        self.tokenizer: Any = loaded.tokenizer
        self.last_cache: Any = None
        self._read: tuple[tuple[int, ...], Any] = ((), None)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        """Tokens of a context with its answer: what the model was trained on."""
        return self.loaded.spec.max_position_embeddings

    @property
    def tokenizer_name(self) -> str:
        return self.loaded.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        bos = getattr(self.tokenizer, "bos_token", None)
        special = not (bos and string.startswith(bos)) if add_special_tokens is None else add_special_tokens
        ids: list[int] = self.tokenizer(string, add_special_tokens=special)["input_ids"]
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy generation would give it."""
        scored: dict[int, tuple[float, bool]] = {}
        # requests of one context, such as the answers of a choice, come one after another
        for index in sorted(range(len(requests)), key=lambda i: requests[i][1]):
            _, context, continuation = requests[index]
            scored[index] = self._score(context, continuation)
            self.advance(1)
        return [scored[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            totals.append(sum(self._score(*make_disjoint_window(window))[0] for window in windows))
            self.advance(1)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations, each up to the first of its stop texts.

        Raises:
            UsageError: a task that samples.
        """
        texts = []
        for request in requests:
            context, asked = request.args
            if asked.get("do_sample") or asked.get("temperature"):
                raise UsageError("a task asks for sampling; --suite tasks generates greedily")
            until = asked.get("until") or []
            ends = [until] if isinstance(until, str) else list(until)
            limit = int(asked.get("max_gen_toks") or asked.get("max_new_tokens") or _MAX_NEW_TOKENS)

            def ended(tokens: list[int], ends: Sequence[str] = ends) -> bool:
                text = self.tokenizer.decode(tokens)
                return any(end in text for end in ends)

            ids = self.tok_encode(context)[-max(1, self.max_length - limit) :] or [self.prefix_token_id]
            stop = end_tokens(self.loaded)
            tokens, self.last_cache = greedy(
                self.loaded, self.new_cache, [ids], limit, chunk=self.chunk, stop=stop, done=ended
            )
            text = self.tokenizer.decode(tokens)
            texts.append(text[: min((text.find(end) for end in ends if end in text), default=len(text))])
            self.advance(1)
        return texts

    def _score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """Log-likelihood of a continuation, and whether each of its tokens is the most probable one.

        Beyond the length that the model was trained on, the context loses its first tokens.
        """
        if not continuation:
            return 0.0, True
        context = list(context)[-max(1, self.max_length + 1 - len(continuation)) :]
        model: Any = self.loaded.model
        with torch.inference_mode():
            cache = self._cache_of(tuple(context[:-1]))
            states = read(model, cache, [context[-1], *continuation[:-1]], self.chunk)
            log_probs = logits_of(model, states)[0].float().log_softmax(-1)
        if not log_probs.isfinite().all():
            raise not_finite_logits(model, self.new_cache, [*context, *continuation])
        targets = torch.tensor(list(continuation), device=log_probs.device)
        self.last_cache = cache
        picked = log_probs.gather(-1, targets.unsqueeze(-1)).sum()
        return float(picked), bool((log_probs.argmax(-1) == targets).all())

    def _cache_of(self, context: tuple[int, ...]) -> Any:
        """A cache that holds a context; the last context is read once however many answers it has."""
        if not context:
            return self.new_cache()
        if self._read[0] != context or self._read[1] is None:
            cache = self.new_cache()
            read(self.loaded.model, cache, context, self.chunk)
            self._read = (context, cache)
        return copy.deepcopy(self._read[1])


def find_tasks(config: TasksConfig) -> TaskManager:
    """An index that has the tasks; lm-eval's own, which take long to read, are left out if none of them is meant.

    Raises:
        UsageError: a task that does not exist.
    """
    folder = None if config.include_path is None else str(config.include_path)
    if folder is not None:
        local = TaskManager(include_path=folder, include_defaults=False)
        if all(name in local.task_index for name in config.tasks):
            return local
    manager = TaskManager(include_path=folder)
    for name in config.tasks:
        if not manager.match_tasks([name]) and not Path(name).is_file():
            raise UsageError(f"lm-eval has no task '{name}'{suggestion(name, list(manager.task_index))}")
    return manager


def measure(
    loaded: LoadedModel, case: Case, config: TasksConfig, manager: TaskManager, advance: Advance = lambda requests: None
) -> tuple[list[Document], dict[str, Any], MemoryReport | None]:
    """Runs tasks.

    Args:
        loaded: the model.
        case: how its cache is compressed.
        config: which tasks.
        manager: what `find_tasks` returned.
        advance: called with 1 after each request.

    Returns:
        One unit per document and metric; the tasks' versions; the memory of the last cache, None if not compressed.

    Raises:
        UsageError: tasks that cannot be read, or have no metric that is a mean over documents.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    disable_progress_bars()
    random.seed(config.seed)
    # lm-eval's own bars, one for each of its steps, are not shown
    with case.caches(loaded) as new_cache, redirect_stderr(StringIO()):
        model = CachedModel(loaded, new_cache, config.chunk, advance)
        try:
            chosen = manager.load(list(config.tasks))
            for task in chosen["tasks"].values():
                if config.num_fewshot is not None or task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=config.num_fewshot or 0)
                task.set_fewshot_seed(seed=config.seed)
            results = evaluate(
                lm=model,
                task_dict=chosen,
                limit=config.limit,
                bootstrap_iters=0,
                apply_chat_template=config.chat,
                log_samples=True,
            )
        except (KeyError, ValueError, OSError) as error:  # data that cannot be had, fields that are missing
            raise UsageError(f"lm-eval cannot run {', '.join(config.tasks)}: {' '.join(str(error).split())}") from error
        memory = model.last_cache.memory() if case.compressed and model.last_cache is not None else None
    units = [unit for task in results["samples"] for unit in documents(results, task)]
    return units, dict(results["versions"]), memory


def documents(results: dict[str, Any], task: str) -> list[Document]:
    """The documents of a task, with every metric that is a mean over them.

    Args:
        results: what lm-eval returned.
        task: its name.

    Raises:
        UsageError: no metric is a mean over documents, such as those of perplexity.
    """
    units: list[Document] = []
    figures, better = results["results"][task], results["higher_is_better"][task]
    for name in figures:
        metric, comma, chosen = name.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        samples = [sample for sample in results["samples"][task] if sample["filter"] == chosen]
        values = []
        with suppress(KeyError, TypeError, ValueError):  # a metric of several numbers per document
            values = [(int(sample["doc_id"]), float(sample[metric])) for sample in samples]
        mean = sum(value for _, value in values) / len(values) if values else math.nan
        if not math.isclose(mean, figures[name], abs_tol=1e-6):
            continue
        shown = metric if chosen == "none" else f"{metric},{chosen}"
        direction: Better = "higher" if better.get(metric, True) else "lower"
        units += [
            Document(task=task, document=document, metric=shown, better=direction, value=value)
            for document, value in sorted(values)
        ]
    if not units:
        raise UsageError(f"task '{task}' has no metric that is a mean over its documents; choose another task")
    return units
