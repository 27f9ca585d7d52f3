"""Every type of causal language model that transformers has, times what is done with it: right, or refused in one line.

`PYTHONPATH=tests/support python tests/models/matrix.py` runs all cells and writes docs/results/types.jsonl, from which
`docs/results/tables.py` makes the table of docs/models.md; with names of types, it prints their cells.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch
import transformers
from byte_tokenizer import CHAT, byte_tokenizer
from factories import CONFIG, load
from families import CHANGES, make, tiny_config
from passes import ROUNDS, generated, go_on, ids, mask_of, padded, read
from served import serving
from spm_tokenizer import spm_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvcli
from kvcli.artifact.choice import MethodChoice
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.calibrate.collect import collect
from kvcli.calibrate.config import CollectConfig
from kvcli.calibrate.recording import Recording
from kvcli.contexts import ContextStore
from kvcli.errors import KvcliError
from kvcli.eval.quality import measure, reference_states
from kvcli.models.checkpoint import quiet_transformers
from kvcli.plan.memory import MethodPlan, PlannedModel
from kvcli.registry import get_method, parse_name
from kvcli.spec import no_rope
from kvcli.text.chat import Conversation
from kvcli.text.generate import compress

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
RECORDS = Path(__file__).resolve().parents[2] / "docs" / "results" / "types.jsonl"
SETTINGS = {"sink_length": 2, "residual_length": 8}
TEXT = "Rivers are long: the Nile, the Amazon, the Yangtze. Lakes are deep: Baikal, Tanganyika. "
TOKENIZERS = ("bytes", "sentencepiece", "no BOS", "no EOS")
"""Kinds of tokenizers; of the last, the model's configs know no end of a text."""


@dataclass(frozen=True)
class Subject:
    """A tiny model of one type and a tokenizer, and a folder for what is made of them."""

    model_type: str
    folder: Path
    tokenizer: str = "bytes"

    @cached_property
    def model(self) -> Any:
        made = make(self.model_type, vocab_size=300)
        made.generation_config = GenerationConfig(eos_token_id=None if self.tokenizer == "no EOS" else 2)
        return made

    @cached_property
    def loaded(self) -> Any:
        tokenizer = spm_tokenizer() if self.tokenizer == "sentencepiece" else byte_tokenizer()
        tokenizer.bos_token = None if self.tokenizer == "no BOS" else tokenizer.bos_token
        tokenizer.chat_template = CHAT
        return replace(load(self.model), tokenizer=tokenizer)

    @cached_property
    def recording(self) -> Recording:
        settings, folder = CollectConfig(8, 40, 4, 4, fisher_sequences=2), self.folder / "recording"
        collect(self.loaded, ids(8, 40), settings, folder, {"corpus": {"source": "random"}})
        assert Recording(folder).fisher is not None
        return Recording(folder)

    def attach(self, method: str = "fp16") -> Any:
        example = get_method(parse_name(method)[0]).example_settings
        return kvcli.attach(self.loaded, method, **(SETTINGS if method.startswith("rtn") else example))

    def stock(self, call: Callable[[Any], Any]) -> Any:
        try:
            with torch.no_grad():
                return call(DynamicCache(config=self.model.config))
        except Exception as error:
            raise SkipTest(f"{type(error).__name__}: {error}") from error


def near(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max(), "other logits"


def passes(subject: Subject, lengths: tuple[int, ...], rounds: tuple[int, ...] = ROUNDS, removed: int = 0) -> None:
    """A pass over rows of these lengths and more after it; ours are cut in between, after some tokens more."""

    def run(cache: Any) -> list[Tensor]:
        if lengths[0]:
            read(subject.model, cache, mask_of(*lengths))
        if removed and not isinstance(cache, DynamicCache):
            go_on(subject.model, cache, mask_of(*lengths), (removed,))
            cache.crop(-removed)
        return go_on(subject.model, cache, mask_of(*lengths), rounds)

    for dtype in (torch.float32, torch.float64):  # in which less is rounded, where that is more than 1e-5
        expected = subject.stock(lambda cache, dtype=dtype: subject.model.to(dtype) and run(cache))
        with subject.attach() as session:
            cache = session.new_cache()
            pairs = [*zip(run(cache), expected, strict=True)]
        if all((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max() for ours, theirs in pairs):
            break
    else:
        raise AssertionError("other logits")
    subject.model.float()
    assert cache.memory().num_encoded > 0


def generates(subject: Subject, ours: bool = False, **settings: Any) -> None:
    """The model's own `generate`, or ours, for a batch of prompts of different lengths."""
    call = partial(generated, subject.model, padded(30, 19), eos_token_id=-1, **settings)
    expected, logits = subject.stock(call)
    with subject.attach() as session:
        if ours:
            sampling = kvcli.SamplingConfig(12)
            tokens = session.generate(**padded(30, 19), sampling=sampling, eos_token_id=[], prefill_chunk=7).sequences
        else:
            tokens, found = call(session.new_cache())
            near(found, logits)
    assert torch.equal(tokens, expected), "other tokens"


def loads(subject: Subject) -> None:
    folder = subject.folder / "model"
    subject.model.save_pretrained(folder)
    subject.loaded.tokenizer.save_pretrained(folder)
    expected = subject.stock(lambda _: AutoModelForCausalLM.from_pretrained(folder).eval()(ids(1, 30)).logits)
    with torch.no_grad():
        near(kvcli.load_model(str(folder), device="cpu").model(ids(1, 30)).logits, expected)


def plans(subject: Subject) -> None:
    """A config tells what the model is found to do, but for rotations without a name, and the sizes of caches."""
    config, choice = tiny_config(subject.model_type, vocab_size=300), MethodChoice("rtn-4", SETTINGS)
    planned = PlannedModel("tiny", config, torch.float32, torch.device("cpu"))
    told, found = planned.spec, subject.loaded.spec
    assert replace(told, rope=found.rope) == found
    assert found.rope in (told.rope, no_rope(found.head_dim))
    plan = MethodPlan(planned, "rtn-4", choice.record, choice.config.resolve(planned.spec))
    assert plan.peak_bytes(40, 1) > planned.weights_bytes == sum(x.nbytes for x in subject.model.parameters())
    with subject.attach("rtn-4") as session:
        sizes, memory = plan.memory(40, 1), compress(session, ids(1, 40)).memory()
    assert (sizes.cache_bytes, sizes.fp16_bytes) == (memory.cache_bytes, memory.fp16_bytes)
    assert planned.state_bytes is not None or found.other_layers
    if planned.state_bytes is not None:
        assert (sizes.other_bytes, sizes.share) == (memory.other_bytes, memory.share)


@torch.no_grad()
def saves(subject: Subject) -> None:
    """A cache goes on from a file as it would have gone on."""
    with subject.attach("rtn-4") as session:
        cache = compress(session, ids(1, 40), prefill_chunk=16)
        cache.save(subject.folder / "cache", ids(1, 40))
        again = session.load_cache(subject.folder / "cache")
        assert all(map(torch.equal, *(go_on(subject.model, x, mask_of(40), (5, 1)) for x in (again, cache))))


@torch.no_grad()
def reuses(subject: Subject) -> None:
    """A text goes on from what it has in common with a stored one, if no layer has a state of the whole of that."""
    store, text = ContextStore(subject.folder / "reused", block_tokens=8), ids(1, 40)
    with subject.attach("rtn-4") as session:
        cache = compress(session, text, prefill_chunk=16)
        store.put(cache.context(text, {"source": "x"}), name="x")
        prompt = torch.cat((text[:, :28], ids(1, 9, seed=9)), dim=1)
        found = store.fetch(prompt, session.identity(), say=print, window=8)
        if session.spec.other_layers:
            return
        begun = session.load_cache(found[1])
        cache.crop(begun.get_seq_length() - 40)
        near(*(go_on(subject.model, x, mask_of(x.get_seq_length()), (5,))[0] for x in (begun, cache)))


def asks(subject: Subject) -> None:
    """The second time nothing is read, and the answer is the same."""
    told = []
    for _ in range(2):
        with subject.attach("rtn-4") as session:
            store = ContextStore(subject.folder / "asked", block_tokens=16)
            document, pieces = kvcli.Document(subject.loaded, session, TEXT, store=store, prefill_chunk=32), list[str]()
            answer = document.ask("Which?", kvcli.SamplingConfig(6), write=pieces.append).text
            assert answer == "".join(pieces)
            told.append((answer, document.reused_tokens))
    assert told == [(answer, 0), (answer, document.ids.shape[1])]


def chats(subject: Subject) -> None:
    """A conversation that is resumed goes on as it would have gone on."""
    with subject.attach("rtn-4") as session:
        talk, again = (Conversation(subject.loaded, session, kvcli.SamplingConfig(6)) for _ in range(2))
        talk.reply(TEXT)
        talk.context().save(subject.folder / "chat")
        again.resume(kvcli.Context.load(subject.folder / "chat", "cpu"))
        one, two = (x.reply("And then?") for x in (talk, again))
        assert (one.text, one.reused_tokens) == (two.text, two.reused_tokens)
        assert one.reused_tokens > len(TEXT) // 4


def serves(subject: Subject) -> None:
    """After an edit, and after a restart, an answer is that of a server that knows nothing."""
    turns = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "Yes."}]
    talks: Any = [turns[:1], *([*turns, {"role": "user", "content": x}] for x in ("Why?", "Who says so?"))]

    def last(store: str, *asked: Any) -> tuple[str, int]:
        with serving(subject.folder / store, method="rtn-4", model=subject.loaded) as served, served.client() as client:
            options = {"model": "tiny", "max_tokens": 6, "temperature": 0}
            *_, told = [client.chat.completions.create(messages=talk, **options) for talk in asked]
        return told.choices[0].message.content, told.usage.prompt_tokens_details.cached_tokens

    with redirect_stdout(StringIO()) as said:
        warm, again, cold = last("warm", *talks), last("warm", talks[2]), last("cold", talks[2])
    assert not said.getvalue()
    assert warm[0] == again[0] == cold[0]
    assert subject.loaded.spec.other_layers or warm[1] > cold[1] == 0 < again[1]


@torch.no_grad()
def fits(subject: Subject, name: str, **settings: Any) -> None:
    """A fitted method is exported, read back and attached."""
    method, folder, samples, logits = get_method(name), subject.folder / name, subject.recording, list[Tensor]()
    fit_recording(samples, method, method.config_cls(**settings).resolve(samples.spec), folder / "run")
    artifact = assemble([folder / "run"])
    artifact.save(folder / "artifact")
    for source in (artifact, folder / "artifact"):
        with kvcli.attach(subject.loaded, artifact=source, residual_length=6) as session:
            cache = session.new_cache()
            read(subject.model, cache, mask_of(40, 29))
            logits += go_on(subject.model, cache, mask_of(40, 29), (5,))
            assert cache.memory().num_encoded > 0
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()


def evaluates(subject: Subject) -> None:
    """fp16 loses nothing, rtn-8 little, rtn-2 more; other methods run."""
    texts, sizes = ids(2, 48), {"chunk": 8, "batch_size": 2}
    states = [reference_states(subject.model, texts)]
    reports = [
        measure(subject.model, partial(subject.attach, method), texts, states, **sizes)
        for method in ("fp16", "rtn-8", "rtn-2", "kivi-2", "qjl")
    ]
    full, wide, narrow, *_ = kl = [x.figures["kl_mean"] for x in reports]
    assert all(x.memory.num_encoded > 0 for x in reports)
    assert (full < 1e-5, full < wide + 1e-6 < narrow + 2e-6) == (True, True), kl


VERBS: dict[str, Callable[[Subject], Any]] = {
    "one pass": partial(passes, lengths=(0,), rounds=(30,)), "passes": partial(passes, lengths=(24,)),
    "padding": partial(passes, lengths=(30, 19)), "crop": partial(passes, lengths=(30,), removed=4),
    "generate": generates, "beams": partial(generates, num_beams=3), "ragged batch": partial(generates, ours=True),
    "load": loads, "plan": plans, "save": saves, "reuse": reuses, "ask": asks, "chat": chats, "serve": serves,
    "calibrate": lambda x: x.recording, "fit klt": partial(fits, name="klt", bits=3),
    "fit commvq": partial(fits, name="commvq", **CONFIG.model_dump()), "eval": evaluates,
}  # fmt: skip


def row(model_type: str, tokenizer: str = "bytes", verbs: Collection[str] = tuple(VERBS)) -> dict[str, Any]:
    """Runs the cells of a type: what is compressed, and which verbs are right, refused or wrong, or fail in stock."""
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        subject, found = Subject(model_type, Path(folder), tokenizer), {"type": model_type, "refused": {}, "wrong": {}}
        try:
            with torch.device("meta"):
                empty = AutoModelForCausalLM.from_config(tiny_config(model_type))
            assert sum(x.numel() for x in empty.parameters()) < 3 * 10**7, "large"
            _ = subject.model
        except Exception:  # what configs raise that do not fit
            return {**found, "what": "not tried", "refused": {"make": "sizes in its config make no tiny model"}}
        try:
            with subject.attach() as session:
                own = any(layer.own_rotation for layer in session.seam.attention.layers)
        except KvcliError as error:
            return {**found, "what": "nothing", "refused": {"attach": reason(error)}}
        what = f"{'some' if session.spec.other_layers else 'all'} layers{', keys after RoPE' if own else ''}"
        if CHANGES.get(model_type, {}).get("sliding_window", 0) is None:
            what += ", if its config has no `sliding_window`"
        if hasattr(subject.model.config.get_text_config(decoder=True), "num_kv_shared_layers"):
            what += ", if its `num_kv_shared_layers` are 0"
        found |= {"what": what, "right": []}
        for verb in verbs:
            try:
                VERBS[verb](subject)
                found["right"].append(verb)
            except SkipTest:
                found.setdefault("stock", []).append(verb)
            except KvcliError as error:
                found["wrong" if "\n" in str(error) else "refused"][verb] = reason(error)
            except Exception as error:
                found["wrong"][verb] = f"{type(error).__name__}: {error}"
        return found


def reason(error: Exception) -> str:
    text = re.sub(r"^model type '[^']*' cannot be compressed: | by [\d.e+]+ %", "", " ".join(str(error).split()))
    text = re.sub(r"^[\w.]*\.\d+\.[\w.]*:? ", "", re.sub(r"<class '([\w.]*)'>", r"\1", text))
    text = re.sub(r"\d+ (layers of the model)", r"\1", text)
    return re.sub(r"^\w+ has no list of its \d+ layers.*", "its layers are in no single list", text)


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORDS.read_text().splitlines()]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with ProcessPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        rows = []
        for found in pool.map(row, sys.argv[1:] or TYPES):
            print(found)
            rows.append(json.dumps({"transformers": transformers.__version__, **found}, sort_keys=True) + "\n")
    if not sys.argv[1:]:
        RECORDS.write_text("".join(rows))
