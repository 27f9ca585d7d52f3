"""What lm-eval calls a model, and its index of tasks. Needs the extra `kvcli[eval]`."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from kvcli.cache.compressed import CompressedCache, MemoryReport
from kvcli.calibrate.corpus import bare_ids
from kvcli.errors import UsageError, suggestion
from kvcli.eval.greedy import greedy, read
from kvcli.eval.suite import NewCache
from kvcli.models.load import LoadedModel, not_finite, rendered
from kvcli.seam.decoder import logits_of
from kvcli.storage.ranks import ItemT, MadeT, joined_ranks
from kvcli.text.detokenizer import text_after
from kvcli.text.prompts import ids_to_continue

_MAX_NEW_TOKENS = 256
"""Length of a continuation where a task names none, as in lm-eval."""


class CachedModel(TemplateLM):
    """What lm-eval calls a model: tokens in, log-likelihoods and continuations out, through caches of one kind.

    A context is read in pieces of `chunk` tokens; the model is attached if the caches are compressed. Ranks share the
    requests; `memory` is that of the last one's cache, None of a cache of transformers.
    """

    def __init__(self, loaded: LoadedModel, new_cache: NewCache, chunk: int) -> None:
        super().__init__()
        self.loaded, self.new_cache, self.chunk = loaded, new_cache, chunk
        self.tokenizer: Any = loaded.tokenizer
        self.memory: MemoryReport | None = None
        self._last_cache: Any = None
        self._context_read: tuple[tuple[int, ...], Any] = ((), None)

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
        return ids_to_continue(self.tokenizer, string) if special else bare_ids(self.tokenizer, string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return rendered(self.tokenizer, chat_history, **how)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy generation would give it."""
        # requests of one context, such as the answers of a choice, come one after another, in one rank
        order = sorted(range(len(requests)), key=lambda i: requests[i][1])
        groups = [[*group] for _, group in groupby(order, key=lambda i: requests[i][1])]
        scores = self._each(groups, lambda group: [self._score(*requests[i][1:]) for i in group])
        scored = dict(zip(order, chain(*scores), strict=True))
        return [scored[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        def total(request: Any) -> float:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            return sum(self._score(*make_disjoint_window(window))[0] for window in windows)

        return self._each(requests, total)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations, each up to the first of its stop texts; UsageError for a task that samples."""

        def text_of(request: Any) -> str:
            context, arguments = request.args
            if arguments.get("do_sample") or arguments.get("temperature"):
                raise UsageError("a task asks for sampling; --suite tasks generates greedily")
            until = arguments.get("until") or []
            ends = [until] if isinstance(until, str) else list(until)
            limit = int(arguments.get("max_gen_toks") or arguments.get("max_new_tokens") or _MAX_NEW_TOKENS)
            ids = self.tok_encode(context)[-max(1, self.max_length - limit) :] or [self.prefix_token_id]

            def done(tokens: list[int], ids: Sequence[int] = ids, ends: Sequence[str] = ends) -> bool:
                text = text_after(self.tokenizer, ids, tokens)
                return any(end in text for end in ends)

            stop = self.loaded.end_tokens
            tokens, self._last_cache = greedy(
                self.loaded, self.new_cache, [ids], limit, chunk=self.chunk, stop=stop, done=done
            )
            text = text_after(self.tokenizer, ids, tokens)
            return text[: min((text.find(end) for end in ends if end in text), default=len(text))]

        return self._each(requests, text_of)

    def _each(self, items: Sequence[ItemT], work: Callable[[ItemT], MadeT]) -> list[MadeT]:
        """What `work` makes of each item, of requests."""

        def run(item: ItemT) -> tuple[MadeT, MemoryReport | None]:
            self._last_cache = None
            made = work(item)
            return made, self._last_cache.memory() if isinstance(self._last_cache, CompressedCache) else None

        found = joined_ranks().each(items, run)
        self.memory = found[-1][1] if found else self.memory
        return [made for made, _ in found]

    def _score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """Log-likelihood of a continuation, and whether each of its tokens is the most probable one.

        Beyond the length that the model was trained on, the context loses its first tokens.
        """
        if not continuation:
            return 0.0, True
        context = list(context)[-max(1, self.max_length + 1 - len(continuation)) :]
        model: Any = self.loaded.model
        with torch.inference_mode():
            first = tuple(context[:-1])
            if first and first != self._context_read[0]:  # once, however many answers a context has
                cache = self.new_cache()
                read(model, cache, first, self.chunk)
                self._context_read = (first, cache)
            cache = copy.deepcopy(self._context_read[1]) if first else self.new_cache()
            states = read(model, cache, [context[-1], *continuation[:-1]], self.chunk)
            log_probs = logits_of(model, states)[0].float().log_softmax(-1)
        if not log_probs.isfinite().all():
            again = partial(read, model, self.new_cache(), [*context, *continuation])
            raise not_finite(model, "the cache of this row", again)
        targets = torch.tensor(list(continuation), device=log_probs.device)
        self._last_cache = cache
        picked = log_probs.gather(-1, targets.unsqueeze(-1)).sum()
        return float(picked), bool((log_probs.argmax(-1) == targets).all())


def find_tasks(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """An index that has the tasks; lm-eval's own, which take long to read, are left out if none of them is meant.

    UsageError: a task that does not exist.
    """
    folder = None if include_path is None else str(include_path)
    if folder is not None:
        local = TaskManager(include_path=folder, include_defaults=False)
        if all(name in local.task_index for name in names):
            return local
    manager = TaskManager(include_path=folder)
    for name in names:
        if not manager.match_tasks([name]) and not Path(name).is_file():
            raise UsageError(f"lm-eval has no task '{name}'{suggestion(name, list(manager.task_index))}")
    return manager
