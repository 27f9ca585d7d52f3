"""Passes of several requests over pages of codes, beside sessions of the same codes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engine_answers import NEW_TOKENS, Answer, PagedCache, check, prompts_of, session_of
from factories import load, make_model, record
from families import make
from transformers import CONFIG_MAPPING

import kvcli
from kvcli.artifact.artifact import Artifact
from kvcli.artifact.choice import MethodChoice
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.artifact.recipe import Recipe
from kvcli.attention.graphs import Graphs
from kvcli.errors import CacheError, ConfigError, UnsupportedModelError, UsageError
from kvcli.paged import attention as paged_attention
from kvcli.paged.attention import PagedAttention
from kvcli.paged.batch import Batch
from kvcli.paged.captured import CapturedPasses
from kvcli.paged.model import PagedModel, open_pages
from kvcli.paged.pages import LayerEncoder
from kvcli.paged.requests import PassInputs, ScheduledRequest
from kvcli.paged.rings import ResidualRings
from kvcli.registry import get_method, parse_method

METHODS = ("turboquant-3", "rtn-4", "fp8", "klt", "klt-tcq", "commvq", "blockgtq", "oscar", "kvquant")


@contextmanager
def enabled(
    model: Any, name: str = "", *, artifact: Any = None, recipe: Any = None, size: int = 16, **settings: Any
) -> Iterator[PagedModel]:
    """By default without sinks, and without recent tokens but for KIVI, which needs a group of them.

    Pages are not empty but hold NaN, as if others had used them.
    """
    options = {x: settings.pop(x) for x in ("impl", "layers") if x in settings}
    if recipe is None:
        settings = {"sink_length": 0, "residual_length": 32 if name.startswith("kivi") else 0, **settings}
    choice = MethodChoice.of(name, artifact, recipe, settings)
    sizes = {"max_bytes": 2**24, "num_rings": 7, "max_length": 512, "page_size": size}
    with open_pages(model, choice, **options, **sizes) as paged:
        for pages in paged.pages:
            pages.fill_(255)
        yield paged


def generated(
    paged: PagedModel, prompts: list[list[int]], count: int = NEW_TOKENS, chunk: int = 512, first: Sequence[int] = ()
) -> list[Answer]:
    """Greedy continuations of prompts that are read together, of which `first` tokens are in pages already."""
    texts, read = [[*prompt] for prompt in prompts], [*(first or [0] * len(prompts))]
    most = paged.num_pages // paged.num_rings
    pages = [[*range(row * most, (row + 1) * most)] for row in range(len(prompts))]
    rows: list[list[float]] = [[] for _ in prompts]
    if first:
        shared = [x // paged.page_size for x in first]
        pages = [pages[0][:n] + own[n:] for n, own in zip(shared, pages, strict=True)]
    while min(map(len, rows)) < count:
        new = []
        for row, text in enumerate(texts):
            stop = min(len(text), read[row] + chunk)
            begun = first[row] if first else 0
            new.append(ScheduledRequest(text[read[row] : stop], read[row], begun, pages[row], row + 1))
            read[row] = stop
        for row, logits in enumerate(paged.run(new).float().log_softmax(-1)):
            if read[row] == len(texts[row]):
                token = int(logits.argmax())
                texts[row].append(token)
                rows[row].append(float(logits[token]))
    new_tokens = zip(prompts, texts, rows, strict=True)
    return [Answer(text[len(p) : len(p) + count], torch.tensor(x[:count])) for p, text, x in new_tokens]


def check_all(
    model: Any, name: str, prompts: list[list[int]], answers: list[Answer], artifact: Any = None, **settings: Any
) -> None:
    """Checks answers against those of a session that encodes every token at once; with KIVI, every whole group."""
    checked = {key: settings.pop(key) for key in ("chunk", "chunks", "atol") if key in settings}
    if name.startswith("kivi"):
        sinks = settings.pop("sink_length", 0)
        with kvcli.attach(model, name, **settings) as session:
            codecs = session.codecs
        first = max(checked.get("chunks", [0]))
        reference: Any = SimpleNamespace(new_cache=lambda *_: PagedCache(codecs, sinks, residual=32, first=first))
        for prompt, answer in zip(prompts, answers, strict=True):
            check(model, reference, prompt, answer, **checked)
        return
    with session_of(model, name, artifact, **settings) as session:
        for prompt, answer in zip(prompts, answers, strict=True):
            check(model, session, prompt, answer, **checked)


@pytest.mark.parametrize("name", METHODS)
def test_answers_are_those_of_a_session_without_a_window(
    name: str, tiny_model: Any, tiny_artifact: Callable[[Any], Artifact]
) -> None:
    method, _ = parse_method(name)
    artifact = tiny_artifact(method) if method.needs_artifact else None
    prompts = prompts_of(tiny_model, 20, 9, 3, 17, 33)
    with enabled(tiny_model, name, artifact=artifact) as paged:
        ours = generated(paged, prompts)
    check_all(tiny_model, name, prompts, ours, artifact)


@pytest.mark.parametrize("name", ["turboquant-3", "klt", "commvq"])
def test_sinks_and_recent_tokens_are_exact(
    name: str, tiny_model: Any, tiny_artifact: Callable[[Any], Artifact]
) -> None:
    """As in a session with as many."""
    method, _ = parse_method(name)
    artifact = tiny_artifact(method) if method.needs_artifact else None
    prompts, exact = prompts_of(tiny_model, 20, 9, 3, 70), {"sink_length": 3, "residual_length": 7}
    with enabled(tiny_model, name, artifact=artifact, **exact) as paged:
        ours = generated(paged, prompts)
        chunks = generated(paged, prompts[3:], chunk=32)
    check_all(tiny_model, name, prompts, ours, artifact, **exact)
    check_all(tiny_model, name, prompts[3:], chunks, artifact, chunk=32, **exact)


@pytest.mark.parametrize("lengths", [(20, 64, 95, 3, 31, 130), (32,)], ids=str)
def test_kivi_has_whole_groups_as_codes_and_open_ones_exactly(
    lengths: tuple[int, ...], tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several pages, through the end of a group; requests that decode are one call."""
    batches, seen = [], paged_attention.EncodedTokens

    def encoded(*parts: Any) -> Any:
        batches.append(len(parts[4]))
        return seen(*parts)

    prompts = prompts_of(tiny_model, *lengths)
    with enabled(tiny_model, "kivi-2", size=64) as paged:
        monkeypatch.setattr(paged_attention, "EncodedTokens", encoded)
        ours = generated(paged, prompts, 40)
    check_all(tiny_model, "kivi-2", prompts, ours)
    assert set(batches) == {len(prompts)}


@pytest.mark.parametrize("chunk", [512, 32])
@pytest.mark.parametrize("name", ["turboquant-3", "rtn-4", "kivi-2", "fp16"])
def test_passes_that_can_be_captured_make_the_same_tokens(name: str, chunk: int, tiny_model: Any) -> None:
    """Of other numbers of requests and pages than there are, through ends of groups and pages, after odd prompts."""
    prompts, shapes = prompts_of(tiny_model, 20, 63, 1), set[tuple[int, ...]]()
    recent = {} if name.startswith("kivi") else {"residual_length": 8}
    with enabled(tiny_model, name, size=32, sink_length=3, **recent) as paged:
        expected = generated(paged, prompts, 40, chunk)

        def run(inputs: PassInputs) -> torch.Tensor:
            shapes.add(tuple(inputs.block_table.shape))
            return paged.capturable(inputs)

        paged.captured = CapturedPasses(run, 32, 7, Graphs(paged.device, enabled=False))
        ours = generated(paged, prompts, 40, chunk)
    assert {(1, 8), (4, 8)} <= shapes <= {(1, 8), (2, 8), (4, 8)}
    for found, answer in zip(ours, expected, strict=True):
        assert found.tokens == answer.tokens
        torch.testing.assert_close(found.logprobs, answer.logprobs, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["turboquant-3", "rtn-4", "kivi-2", "fp16"])
def test_graphs_make_the_tokens_of_passes_over_pages(name: str) -> None:
    """Requests end, so that there are fewer and other graphs."""
    model = make_model("llama", head_dim=64, num_attention_heads=4, num_key_value_heads=2).cuda()
    prompts = prompts_of(model, 20, 250, 64, 1, 130)
    with enabled(model, name, size=32, sink_length=3) as paged:
        paged.warm_up(64)
        captured, paged.captured = paged.captured, None
        expected = [generated(paged, some, 50) for some in (prompts, prompts[1:3], prompts[:1])]
        paged.captured = captured
        ours = [generated(paged, some, 50) for some in (prompts, prompts[1:3], prompts[:1])]
        assert captured is not None
        assert captured.graphs.enabled, captured.graphs.note
        assert captured.graphs.nbytes > 0
    assert [[answer.tokens for answer in some] for some in ours] == [[x.tokens for x in some] for some in expected]


@pytest.mark.parametrize("sinks", [3, 40])
def test_sinks_do_not_widen_the_scale_of_their_group(sinks: int, tiny_model: Any) -> None:
    """Of fewer tokens than a group, and of more."""
    prompts = prompts_of(tiny_model, 20, 95, 31)
    with enabled(tiny_model, "kivi-2", sink_length=sinks, size=64) as paged:
        ours = generated(paged, prompts, 40)
    check_all(tiny_model, "kivi-2", prompts, ours, sink_length=sinks)


def test_sinks_are_encoded_as_zeros(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs are often out of the range of codes, which nobody reads."""
    seen, encode = [], LayerEncoder.encode_values

    def note(self: LayerEncoder, values: torch.Tensor) -> Any:
        seen.append(values.abs().amax((1, 2)) > 0)
        return encode(self, values)

    with enabled(tiny_model, "rtn-4", sink_length=3) as paged:
        monkeypatch.setattr(LayerEncoder, "encode_values", note)
        generated(paged, prompts_of(tiny_model, 9), 1)
    assert len(seen) == tiny_model.config.num_hidden_layers
    assert all(x.tolist() == [False] * 3 + [True] * 6 for x in seen)


@pytest.mark.parametrize("name", ["kivi-2", "rtn-4", "commvq"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_16_bits(name: str, dtype: torch.dtype, tiny_model: Any, tiny_artifact: Any) -> None:
    artifact = tiny_artifact(get_method(name)) if name == "commvq" else None
    model, prompts = tiny_model.to(dtype), prompts_of(tiny_model, 20, 9, 70)
    with enabled(model, name, artifact=artifact, size=64) as paged:
        ours = generated(paged, prompts)
    # log-probabilities of 4 to 8 in units in the last place: processors add up products of 16 bits in other orders
    units = 4 if dtype == torch.float16 else 2.5
    check_all(model, name, prompts, ours, artifact, atol=units * 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["rtn-2", "kivi-2"])
def test_chunks_of_a_prompt_read_earlier_ones_from_codes(name: str, tiny_model: Any) -> None:
    prompts = prompts_of(tiny_model, 190)
    with enabled(tiny_model, name, size=32) as paged:
        ours = generated(paged, prompts, chunk=72)
    check_all(tiny_model, name, prompts, ours, chunk=72)
    with pytest.raises(AssertionError):
        check_all(tiny_model, name, prompts, ours)


@pytest.mark.parametrize("name", ["turboquant-2", "kivi-2"])
def test_a_prefix_that_requests_share_is_read_from_codes(name: str, tiny_model: Any) -> None:
    first, rest = prompts_of(tiny_model, 80, 18)
    second = first[:64] + rest
    with enabled(tiny_model, name, size=32) as paged:
        generated(paged, [first], 1)
        ours = generated(paged, [second, second], first=[64, 64])
    check_all(tiny_model, name, [second] * 2, ours, chunks=[0, 64])
    with pytest.raises(AssertionError):
        check_all(tiny_model, name, [second] * 2, ours)


def test_kernels_read_the_pages_of_a_batch() -> None:
    """In the interpreter."""
    model = make_model("llama", head_dim=64, num_hidden_layers=2)
    prompts = prompts_of(model, 20, 33, 140)
    with enabled(model, "kivi-2", impl="fused", size=64) as paged:
        ours = generated(paged, prompts, 4, chunk=72)
    check_all(model, "kivi-2", prompts, ours, chunk=72, atol=1e-3)


@pytest.mark.parametrize("family", ["whisper", "gpt2", "opt", "gpt_neox", "cohere", "phi"])
def test_models_of_other_kinds(family: str) -> None:
    """Learned positions, a part of the channels rotated, channels side by side, and one that keeps all logits."""
    model = make(family)
    prompts = prompts_of(model, 20, 9, 33)
    with enabled(model, "rtn-4") as paged:
        ours = generated(paged, prompts)
    check_all(model, "rtn-4", prompts, ours)


def test_a_page_has_the_bits_of_its_codes(tiny_model: Any) -> None:
    with enabled(tiny_model, "turboquant-3") as paged:
        numbers = paged.page_size * paged.session.spec.num_layers * paged.session.spec.kv_width
        assert 8 * paged.page_bytes / numbers == pytest.approx(paged.session.true_bits, rel=0.01)


@pytest.mark.parametrize("name", ["commvq", "klt"])
def test_keys_of_layers_without_rope_are_not_rotated(name: str, tmp_path: Path) -> None:
    model, method = make("smollm3", no_rope_layers=[1, 0, 0, 0]), get_method(name)
    for parameter in (x for key, x in model.named_parameters() if "v_proj" in key or "o_proj" in key):
        parameter.data *= 6
    samples = record(model, tmp_path / "samples")
    config = method.config_cls(**method.example_settings).resolve(samples.spec)
    fit_recording(samples, method, config, tmp_path / "fit")
    artifact, prompts = assemble([tmp_path / "fit"]), prompts_of(model, 90, 130, 200, 33, 50, 60)
    with enabled(model, name, artifact=artifact) as paged:
        ours = generated(paged, prompts)
    check_all(model, name, prompts, ours, artifact)


@pytest.mark.parametrize("name", ["rtn-4", "kivi-2"])
def test_layers_in_full_precision(name: str, tiny_model: Any) -> None:
    prompts = prompts_of(tiny_model, 20, 9, 70)
    with enabled(tiny_model, name, layers=[0, 2], size=32) as paged:
        ours = generated(paged, prompts)
    check_all(tiny_model, name, prompts, ours, layers=[0, 2])


@pytest.mark.parametrize(("name", "recent"), [("kivi", 32), ("turboquant", 7)])
def test_a_recipe_is_followed_with_bits_by_layer_and_exact_layers(
    name: str, recent: int, tiny_model: Any, tmp_path: Path
) -> None:
    """And with the recipe's own sinks and recent tokens, which can be changed."""
    settings: dict[str, Any] = {"k_bits": [4, 16, 2], "v_bits": [2, 16, 16], "sink_length": 3}
    settings["residual_length"] = recent
    path, prompts = tmp_path / "r.yaml", prompts_of(tiny_model, 20, 2, 70, 100)
    recipe = Recipe(model="tiny", fingerprint=load(tiny_model).fingerprint, method=name, settings=settings)
    recipe.save(path)
    with enabled(tiny_model, recipe=path, size=32) as paged:
        ours = generated(paged, prompts)
    check_all(tiny_model, name, prompts, ours, **settings)
    if name == "turboquant":
        with enabled(tiny_model, recipe=path, residual_length=20, size=32) as paged:
            longer = generated(paged, prompts)
        check_all(tiny_model, name, prompts, longer, **{**settings, "residual_length": 20})
        with pytest.raises(AssertionError):
            check_all(tiny_model, name, prompts, longer, **settings)


def test_a_recipe_of_another_model_or_beside_a_method_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    Recipe(model="tiny", fingerprint=load(make_model("qwen2")).fingerprint, method="rtn-4").save(path)
    with pytest.raises(ConfigError, match="made for tiny, not for this model"), enabled(tiny_model, recipe=path):
        pass
    with pytest.raises(UsageError, match="name a method, an artifact or a recipe"), enabled(tiny_model):
        pass
    other = "the recipe is for method 'rtn-4', not 'kivi-2'"
    with pytest.raises(UsageError, match=other), enabled(tiny_model, "kivi-2", recipe=path):
        pass
    Recipe(model="tiny", fingerprint=load(tiny_model).fingerprint, method="squat-2").save(path)
    with pytest.raises(UsageError, match="method 'squat-2' depend on other tokens"), enabled(tiny_model, recipe=path):
        pass


def test_what_cannot_be_is_refused_by_name(tiny_model: Any) -> None:
    for name in ("squat-2", "squat-pre-2", "qjl", "kvarn"):
        refused = pytest.raises(UsageError, match=f"method '{name}' depend on other tokens")
        with refused, open_pages(tiny_model, MethodChoice.of(name), max_bytes=2**20, num_rings=1, max_length=512):
            pass
    with pytest.raises(UsageError, match="omit flush_block"), enabled(tiny_model, "rtn-4", flush_block=8):
        pass
    for name, size, reason in (("kivi-2", 16, "no multiple of 32 tokens"), ("rtn-4", 48, "of 48 tokens are not")):
        with pytest.raises(UsageError, match=reason), enabled(tiny_model, name, size=size):
            pass
    sizes = {"max_bytes": 100, "num_rings": 1, "max_length": 512}
    with pytest.raises(UsageError, match="bytes, more than the 100 of all pages"):
        open_pages(tiny_model, MethodChoice("fp16"), **sizes).__enter__()
    with enabled(tiny_model, "rtn-4"), pytest.raises(CacheError, match="its passes are those of"):
        tiny_model(torch.arange(3)[None])


NTK = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma3_text", {}, "layers without full attention"),
        ("mimo_v2_flash", {"v_head_dim": 8}, "different widths"),
        ("llama", {"rope_parameters": NTK}, "does not depend on the length"),
        ("blenderbot", {}, "is given the positions"),
    ],
)
def test_models_that_pages_cannot_take_are_refused_by_name(family: str, changes: Any, message: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know it")
    with pytest.raises(UnsupportedModelError, match=message), enabled(make(family, **changes), "fp16"):
        pass


def test_a_model_that_mixes_the_tokens_of_a_row_is_refused(tiny_model: Any) -> None:
    norm, implementation = tiny_model.model.layers[0].post_attention_layernorm, tiny_model.config._attn_implementation
    norm.register_forward_hook(lambda module, args, x: x + x.mean(1, keepdim=True))
    with pytest.raises(UnsupportedModelError, match="by attention alone"), enabled(tiny_model, "fp16"):
        pass
    assert tiny_model.config._attn_implementation == implementation


def test_numbers_that_codes_cannot_hold_are_refused(tiny_model: Any) -> None:
    with enabled(tiny_model, "turboquant-3") as paged:
        tiny_model.model.layers[1].self_attn.v_proj.weight.data *= 1e7
        paged.run([ScheduledRequest([5], 0, 0, [0], 1)])
        assert [str(paged.range_error())[:23] for _ in range(2)] == ["values of layer 1 reach", "None"]
    with pytest.raises(CacheError, match="values of layer 1 reach"), enabled(tiny_model, "turboquant-3"):
        pass


def work_late(patch: pytest.MonkeyPatch) -> None:
    """Side streams do only what is waited for, as late as it may be."""
    call, encode = PagedAttention.__call__, PagedAttention._encode
    waiting, last, sides = list[Callable[[], None]](), list[Callable[[], None]](), list[bool]()

    class LateEvent:
        def __init__(self, device: Any) -> None:
            sides[:] = [device is not None]
            self.record = Mock()

        def wait(self) -> None:
            while waiting and not self.record.called:
                waiting.pop(0)()
            assert self.record.called

    @contextmanager
    def beside(device: Any, work: Callable[[], None], branch: int = 0) -> Iterator[None]:
        once = cache(work)
        if device is None:
            once()
        elif branch == 0:
            waiting.append(once)
        yield
        once()

    def attend(self: Any, *args: Any) -> None:
        call(self, *args)
        while last:
            last.pop()()

    def encode_last(*args: Any) -> None:
        last.append(partial(encode, *args))
        if not sides[0]:
            last.pop()()

    patch.setattr(PagedAttention, "__call__", attend)
    patch.setattr(PagedAttention, "_encode", encode_last)
    patch.setattr(paged_attention, "Event", LateEvent)
    patch.setattr(paged_attention, "beside", beside)


INTERPRETED = [pytest.mark.kernels, pytest.mark.skipif(torch.cuda.is_available(), reason="the model is on a CPU")]


@pytest.mark.parametrize("impl", ["reference", pytest.param("fused", marks=INTERPRETED)])
@pytest.mark.parametrize(("name", "recent"), [("turboquant-3", 1), ("turboquant-3", 0), ("kivi-2", 32)])
def test_no_code_of_a_pass_is_read_in_it(name: str, recent: int, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request joins whose last page is filled by another one in that pass: as in the next, codes written or not.

    Side streams work as late as they may; rings have room for a token at least, or for none.
    """
    text = [(7919 * i + 11) % 90 + 3 for i in range(64)]
    read = ScheduledRequest(text[:63], 0, 0, [0, 1], 1)
    fill, join = ScheduledRequest(text[63:], 63, 0, [0, 1], 1), ScheduledRequest([5], 64, 0, [0, 1, 2], 2)

    def logits(late: bool, passes: list[list[ScheduledRequest]]) -> torch.Tensor:
        of = Batch.of.__func__  # type: ignore[attr-defined]
        with (
            enabled(make_model("llama"), name, impl=impl, size=32, sink_length=2, residual_length=recent) as paged,
            monkeypatch.context() as patch,
        ):
            rings = ResidualRings(paged.num_rings, recent, paged.layout[0].group, paged.device)
            how = {"null_page": paged.num_pages, "rings": rings}
            patch.setattr(Batch, "of", classmethod(lambda cls, *args, **named: of(cls, *args, **{**named, **how})))
            if late:
                work_late(patch)
            seen = [paged.run(requests)[0] for requests in passes]
            return torch.stack([seen[-1], paged.run([ScheduledRequest([7], 65, 0, [0, 1, 2], 2)])[0]])

    expected = logits(False, [[read], [fill], [join]])
    found = [logits(late, [[read], [join, fill]]) for late in (False, True)]
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
