"""Every type of causal language model that transformers has, times what is done with it: right, or refused in one line.

`PYTHONPATH=tests/support:. python tests/models/matrix.py [TYPES]` runs the cells of all types, or some, and writes them
into docs/results/types.jsonl, from which `docs/results/tables.py` makes the table of docs/models.md.
"""

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
from encoders import relative_error
from factories import CONFIG, load
from families import CHANGES, make, tiny_config
from passes import ROUNDS, generated, go_on, ids, mask_of, padded, read
from served import serving
from spm_tokenizer import spm_tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvcli
from kvcli.artifact.choice import MethodChoice
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.calibrate.collect import collect
from kvcli.calibrate.config import CollectConfig
from kvcli.calibrate.corpus import token_sequences
from kvcli.calibrate.recording import Recording
from kvcli.contexts import ContextStore
from kvcli.errors import KvcliError
from kvcli.eval.quality import measure, reference_states
from kvcli.models.checkpoint import quiet_transformers
from kvcli.plan.memory import MethodPlan, PlannedModel
from kvcli.registry import get_method, parse_name
from kvcli.seam.versions import with_cache
from kvcli.spec import no_rope
from kvcli.text.chat import Conversation
from kvcli.text.detokenizer import text_after
from kvcli.text.generate import compress, generate_text
from kvcli.text.prompts import prompt_ids

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
RECORDS = Path(__file__).resolve().parents[2] / "docs" / "results" / "types.jsonl"
SETTINGS = {"sink_length": 2, "residual_length": 8}
TEXT = "Rivers are long: the Nile, the Amazon, the Yangtze. Lakes are deep: Baikal, Tanganyika. "
TOKENIZERS = ("bytes", "sentencepiece", "no BOS", "no EOS")
"""Kinds of tokenizers: all but one begin a text with a token; of the last, the model's configs know no end of one."""
SAMPLING = kvcli.SamplingConfig(12, temperature=1.0)  # the same token over and over would hide what differs


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
        if self.tokenizer == "no BOS":
            tokenizer.bos_token = None
        else:
            begun = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
            tokenizer.backend_tokenizer.post_processor = begun
        tokenizer.chat_template = CHAT
        return replace(load(self.model), tokenizer=tokenizer)

    def texts(self, count: int, length: int) -> Tensor:
        """This file in sequences, which begin as a text does."""
        found = token_sequences([Path(__file__).read_text()], self.loaded.tokenizer, count, length)
        assert (found[:, 0] == 1).tolist() == [self.tokenizer != "no BOS"] * count
        return found

    @cached_property
    def recording(self) -> Recording:
        settings, folder = CollectConfig(8, 40, 4, 4, fisher_sequences=2), self.folder / "recording"
        collect(self.loaded, self.texts(8, 40), settings, folder, {"corpus": {"source": "file"}})
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
    """A text goes on from what it has in common with a stored one: from all of that alone if a layer keeps a state."""
    store, text = ContextStore(subject.folder / "reused", block_tokens=8), ids(1, 40)
    with subject.attach("rtn-4") as session:
        for common, reused in ((40, 40), (28, 26)):
            cache = compress(session, text, prefill_chunk=16)
            store.put(cache.context(text, {"source": "x"}), name="x")
            states = [x for x in cache.end_of_pass().tensors.values() if x.dim()]
            assert sum(x.nbytes for x in states) == cache.memory().other_bytes
            prompt = torch.cat((text[:, :common], ids(1, 9, seed=9)), dim=1)
            found = store.fetch(prompt, session.identity(), say=print, window=8)
            if reused < 40 and states:
                assert found is None
            else:
                begun = session.load_cache(found[1])
                cache.crop(reused - 40)
                near(*(go_on(subject.model, x, mask_of(reused), (5,))[0] for x in (begun, cache)))


def continues(subject: Subject) -> None:
    """A text goes on as transformers' own does, in tokens and in letters."""
    loaded, settings = subject.loaded, {"max_new_tokens": 12, "do_sample": False}
    prompt, decode = prompt_ids(loaded, TEXT, chat=False), partial(loaded.tokenizer.decode, skip_special_tokens=True)
    assert ((prompt[0, 0] == 1).item(), loaded.end_tokens) == (subject.tokenizer != "no BOS", [2])
    expected = subject.stock(lambda _: subject.model.generate(prompt, eos_token_id=loaded.end_tokens, **settings))
    with subject.attach() as session:
        made, found = generate_text(loaded, session, prompt, kvcli.SamplingConfig(12), prefill_chunk=16)
    assert torch.equal(found.sequences, expected), "other tokens"
    spoilt = subject.tokenizer == "sentencepiece"  # a byte that is no character undoes all bytes beside it
    before, told = (decode(x[0]) for x in (prompt, expected))
    assert before + made.text == told or (spoilt and made.text and "\ufffd" in told)
    half = len(tokens := prompt[0].tolist()) // 2
    assert decode(tokens[:half]) + text_after(loaded.tokenizer, tokens[:half], tokens[half:]) == before


def asks(subject: Subject) -> None:
    """The second time nothing is read, and the answer is the same."""
    told = []
    for _ in range(2):
        with subject.attach("rtn-4") as session:
            store = ContextStore(subject.folder / "asked", block_tokens=16)
            document, pieces = kvcli.Document(subject.loaded, session, TEXT, store=store, prefill_chunk=32), list[str]()
            answer = document.ask("Which?", SAMPLING, write=pieces.append)
            assert answer.text == "".join(pieces) != ""
            assert answer.reused_tokens == document.ids.shape[1]
            told.append((answer.text, document.reused_tokens))
    assert told == [(answer.text, 0), (answer.text, answer.reused_tokens)]


def chats(subject: Subject) -> None:
    """A conversation that is resumed goes on as it would have gone on."""
    with subject.attach("rtn-4") as session:
        talk, again = (Conversation(subject.loaded, session, SAMPLING) for _ in range(2))
        talk.reply(TEXT)
        talk.context().save(subject.folder / "chat")
        again.resume(kvcli.Context.load(subject.folder / "chat", "cpu"))
        one, two = (x.reply("And then?") for x in (talk, again))
        assert (one.text, one.reused_tokens) == (two.text, two.reused_tokens) != ("", 0)
        assert one.reused_tokens > len(TEXT) // 4


def serves(subject: Subject) -> None:
    """After an edit, and after a restart, an answer is that of a server that knows nothing."""
    turns = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "Yes."}]
    talks: Any = [turns[:1], *([*turns, {"role": "user", "content": x}] for x in ("Why?", "Who says so?"))]

    def last(store: str, *asked: Any) -> tuple[str, int]:
        with serving(subject.folder / store, method="rtn-4", model=subject.loaded) as served, served.client() as client:
            options = {"model": "tiny", "max_tokens": 12, "temperature": 1, "seed": 3}
            *_, told = [client.chat.completions.create(messages=talk, **options) for talk in asked]
        return told.choices[0].message.content, told.usage.prompt_tokens_details.cached_tokens

    with redirect_stdout(StringIO()) as said:
        warm, again, cold = last("warm", *talks), last("warm", talks[2]), last("cold", talks[2])
    assert not said.getvalue()
    assert warm[0] == again[0] == cold[0]
    assert warm[1] > cold[1] == 0 < again[1]


@torch.no_grad()
def calibrates(subject: Subject) -> None:
    """What is recorded is what the model caches, keys before they are rotated."""
    recording, spec = subject.recording, subject.loaded.spec
    filled = subject.stock(lambda x: subject.model(subject.texts(8, 40), **with_cache(x)) and x)
    samples, layer = recording.load(0), filled.layers[spec.in_model(0)]
    assert recording.fisher is not None
    ours = (samples.k * recording.manifest.rope.scaling, samples.v)
    for x, cached in zip(ours[::-1] if spec.latent else ours, (layer.keys, layer.values), strict=True):
        rows = cached.transpose(0, 1).flatten(1, 2)
        torch.testing.assert_close(x.norm(dim=-1), rows.norm(dim=-1), rtol=1e-2, atol=1e-3)


@torch.no_grad()
def fits(subject: Subject, name: str, **settings: Any) -> None:
    """A fitted method is exported, read back and attached; its codes are of what it was fitted to."""
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
            layers = [*map(samples.load, samples.layers)]
            for side, coded in (("key", [x.k[None] for x in layers]), ("value", [x.v[None] for x in layers])):
                codecs = [getattr(codec, side) for codec in session.codecs]
                decoded = [codec.decode(codec.encode(x, None), None) for codec, x in zip(codecs, coded, strict=True)]
                assert sum(min(1, relative_error(*x)) for x in zip(decoded, coded, strict=True)) < 0.9 * len(coded)
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()


def evaluates(subject: Subject) -> None:
    """fp16 loses nothing, rtn-8 less than methods of fewer bits, where these lose."""
    texts, sizes = subject.texts(2, 48), {"chunk": 8, "batch_size": 2}
    states = [reference_states(subject.model, texts)]
    reports = [
        measure(subject.model, partial(subject.attach, method), texts, states, **sizes)
        for method in ("fp16", "rtn-8", "rtn-2", "kivi-2", "qjl")
    ]
    full, wide, *narrow = kl = [x.figures["kl_mean"] for x in reports]
    assert all(x.memory.num_encoded > 0 for x in reports)
    assert full < 1e-5, kl
    assert max(full, wide) < max(1e-6, min(narrow)), kl


VERBS: dict[str, Callable[[Subject], Any]] = {
    "one pass": partial(passes, lengths=(0,), rounds=(30,)), "passes": partial(passes, lengths=(24,)),
    "padding": partial(passes, lengths=(30, 19)), "crop": partial(passes, lengths=(30,), removed=4),
    "generate": generates, "beams": partial(generates, num_beams=3), "ragged batch": partial(generates, ours=True),
    "text": continues, "load": loads, "plan": plans, "save": saves, "reuse": reuses, "ask": asks, "chat": chats,
    "serve": serves, "calibrate": calibrates, "fit klt": partial(fits, name="klt", bits=3),
    "fit commvq": partial(fits, name="commvq", **CONFIG.model_dump()), "eval": evaluates,
}  # fmt: skip


TEXTS = ("llama", "gemma3", "gpt2", "qwen3_5_text")
OF_TEXT = ("text", "ask", "chat", "serve", "calibrate", "eval")
ALL = [(x, TOKENIZERS[0], tuple(VERBS)) for x in TYPES] + [(x, kind, OF_TEXT) for x in TEXTS for kind in TOKENIZERS[1:]]


def row(model_type: str, tokenizer: str, verbs: Collection[str]) -> dict[str, Any]:
    """Runs the cells of a type: what is compressed, and which verbs are right, refused or wrong, or fail in stock."""
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        subject = Subject(model_type, Path(folder), tokenizer)
        found = {"type": model_type, "tokenizer": tokenizer, "refused": {}, "wrong": {}}
        try:
            with torch.device("meta"):
                empty = AutoModelForCausalLM.from_config(tiny_config(model_type))
            assert sum(x.numel() for x in empty.parameters()) < 3 * 10**7, "large"
            _ = subject.model
        except Exception as error:  # of a composite's config, or a package that is missing
            why = f"transformers makes none of its config ({type(error).__name__})"
            return {**found, "what": "not tried", "refused": {"make": why}}
        try:
            with subject.attach() as session:
                own = any(layer.own_rotation for layer in session.seam.attention.layers)
        except KvcliError as error:
            return {**found, "what": "nothing", "refused": {"attach": reason(error)}}
        what = f"{'some' if session.spec.other_layers else 'all'} layers{', keys after RoPE' if own else ''}"
        if CHANGES.get(model_type, {}).get("sliding_window", 0) is None:
            what += ", if its config has no `sliding_window`"
        config = subject.model.config.get_text_config(decoder=True)
        if "use_dsa" in CHANGES.get(config.model_type, {}):
            what += ", if its config has `use_dsa` false"
        if hasattr(config, "num_kv_shared_layers"):
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
    text = re.sub(r"\d+ (layers of the model)|: it has a window, or its cache is of .*", r"\1", text)
    return re.sub(r"^\w+ has no list of its (\d+|decoder) layers.*", "its layers are in no single list", text)


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORDS.read_text().splitlines()]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    rows = {(x["type"], x["tokenizer"]): x for x in records()}
    with ProcessPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for found in pool.map(row, *zip(*[x for x in ALL if x[0] in (sys.argv[1:] or TYPES)], strict=True)):
            print(found)
            rows[found["type"], found["tokenizer"]] = {"transformers": transformers.__version__, **found}
    RECORDS.write_text("".join(json.dumps(rows[x[:2]], sort_keys=True) + "\n" for x in ALL))
