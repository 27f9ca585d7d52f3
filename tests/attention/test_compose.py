"""Documents side by side: what stays of each, what is left out, and what is read again."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
from factories import WINDOW, make_model
from families import make
from torch import Tensor
from transformers import DynamicCache

import kvcli
from kvcli.attention import compose as compose_module
from kvcli.attention.compose import _code_rotation, _decoded, deviations, most_changed
from kvcli.attention.session import Session
from kvcli.cache.context import Context
from kvcli.cache.joined import obstacle
from kvcli.errors import CacheError, UsageError
from kvcli.registry import METHODS, get_method
from kvcli.rope import unrotate
from kvcli.seam.versions import with_cache

PREFIX, QUESTION = torch.arange(3, 8)[None], torch.tensor([[9, 11, 10, 60]])
DOCUMENTS = [torch.randint(3, 97, (1, count), generator=torch.Generator().manual_seed(count)) for count in (30, 41, 27)]
MOVABLE = ["fp16", "commvq", "klt", "klt-tcq", "kvquant"]
SHORT: dict[str, Any] = {**WINDOW, "impl": "reference"}


@pytest.fixture(params=MOVABLE)
def session(request: pytest.FixtureRequest, tiny_model: Any, tiny_artifact: Any) -> Iterator[Session]:
    method = get_method(request.param)
    how: Any = {"artifact": tiny_artifact(method)} if method.needs_artifact else {}
    with torch.no_grad(), kvcli.attach(tiny_model, method.name, **how, **SHORT) as session:
        yield session


def contexts(session: Session, prefix: Tensor = PREFIX) -> list[Context]:
    """Each document, read alone after what all begin with."""
    made = []
    for document in DOCUMENTS:
        cache, ids = session.new_cache(), torch.cat((prefix, document), dim=1)
        session.model(ids.to(session.model.device), **with_cache(cache))
        made.append(cache.context(ids, {"start": prefix.shape[1]}))
    return made


def test_one_document_is_its_own_context(session: Session) -> None:
    made = contexts(session)
    composed = session.compose(made[1:2])
    snapshot = composed.cache.snapshot()
    assert snapshot.counts == made[1].snapshot.counts
    assert all(torch.equal(x, made[1].snapshot.tensors[name]) for name, x in snapshot.tensors.items())
    assert torch.equal(composed.input_ids, torch.cat((PREFIX, DOCUMENTS[1]), dim=1))
    assert composed.reread == 0


def test_no_code_is_touched(session: Session) -> None:
    composed = session.compose(contexts(session), repair=0)
    assert torch.equal(composed.input_ids, torch.cat((PREFIX, *DOCUMENTS), dim=1))
    joined, at = composed.cache.snapshot(), PREFIX.shape[1] + DOCUMENTS[0].shape[1]
    alone = session.load_cache(contexts(session)[1])
    session.flush(alone)
    sinks, start, count = WINDOW["sink_length"], PREFIX.shape[1], DOCUMENTS[1].shape[1]
    for name, x in alone.snapshot().tensors.items():
        if "codes" in name and not ("key_codes" in name and session.method.name == "fp16"):  # which are rotated
            assert torch.equal(joined.tensors[name][:, :, at - sinks :][:, :, :count], x[:, :, start - sinks :])


def test_documents_differ_by_what_they_do_not_see_of_each_other(session: Session) -> None:
    """Stock attention that is masked between documents gives the keys and values that the codes stand for."""
    composed = session.compose(contexts(session, PREFIX[:, :0]), repair=0)
    ids, cache = composed.input_ids, composed.cache
    document = torch.cat([torch.full((x.shape[1],), i) for i, x in enumerate(DOCUMENTS)])
    mask = (document[:, None] == document) & torch.ones(len(document), len(document), dtype=torch.bool).tril()
    positions, rotation = cache.sequences.positions[:, : ids.shape[1]].long(), _code_rotation(cache)
    found = [_decoded(cache, i, rotation, torch.float32) for i in range(len(session.codecs))]
    logits = session.model(QUESTION, **with_cache(cache)).logits
    model, sinks = session.model, WINDOW["sink_length"]
    session.detach()
    stock, rounding = DynamicCache(), {"rtol": 0, "atol": 2e-3}  # of outliers in float16
    model(ids, attention_mask=mask[None, None], position_ids=positions, **with_cache(stock))
    for codec, layer, (key, value) in zip(session.codecs, stock.layers, found, strict=True):
        places = session.rope.rotation(positions[:, sinks:], torch.float32)
        keys, values = layer.keys[:, :, sinks:], layer.values[:, :, sinks:]
        keys = codec.encoder_input(keys, places, unrotate) if codec.needs_rotations else keys
        decoded = codec.decode_keys(codec.key.encode(keys, None), None, places, torch.float32)
        torch.testing.assert_close(decoded, key[:, :, sinks:], **rounding)
        decoded = codec.value.decode(codec.value.encode(values, None), None)
        torch.testing.assert_close(decoded, value[:, :, sinks:], **rounding)
        layer.keys = torch.cat((layer.keys[:, :, :sinks], key[:, :, sinks:]), 2)
        layer.values = torch.cat((layer.values[:, :, :sinks], value[:, :, sinks:]), 2)
    after = positions[:, -1:] + 1 + torch.arange(QUESTION.shape[1])
    expected = model(QUESTION, position_ids=after, **with_cache(stock)).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_everything_read_again_is_reading_anew(session: Session) -> None:
    made = contexts(session)
    composed = session.compose(made, repair=1, prefill_chunk=16 if session.method.name == "fp16" else None)
    assert composed.reread == sum(x.shape[1] for x in DOCUMENTS[1:])
    ids = torch.cat((composed.input_ids, QUESTION), dim=1)
    ours = session.model(QUESTION, **with_cache(composed.cache)).logits
    anew = session.model(ids, **with_cache(session.new_cache())).logits[:, -QUESTION.shape[1] :]
    apart = session.model(QUESTION, **with_cache(session.compose(made, repair=0).cache)).logits
    if session.method.name == "fp16":
        torch.testing.assert_close(ours, anew, rtol=0, atol=1e-5)
    assert (ours - anew).norm() < (apart - anew).norm()


def test_what_differs_most_is_read_again(session: Session) -> None:
    """A document that was stored in its place, with the others in sight, does not differ: it is read last."""
    made = contexts(session)
    composed = session.compose(made, repair=1)
    found = deviations(session, composed.cache, composed.input_ids)
    apart = deviations(session, session.compose(made, repair=0).cache, composed.input_ids)
    first = PREFIX.shape[1] + DOCUMENTS[0].shape[1]
    assert found.shape == apart.shape == (composed.input_ids.shape[1],)
    assert bool(found[first:].mean() < apart[first:].mean())


def test_tokens_that_are_read_again_see_each_other_exactly(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as what their codes decode to."""
    given, attended, encoded, attend = list[Tensor](), list[Tensor](), compose_module._encoded, compose_module.sdpa

    def note(codec: Any, keys: Tensor, *rest: Any) -> Any:
        given.append(keys)
        return encoded(codec, keys, *rest)

    def seen(query: Tensor, key: Tensor, *rest: Any) -> Tensor:
        attended.append(key)
        return attend(query, key, *rest)

    monkeypatch.setattr(compose_module, "_encoded", note)
    monkeypatch.setattr(compose_module, "sdpa", seen)
    session.compose(contexts(session), repair=1)
    assert len(attended) == len(session.codecs)
    for keys, key in zip(given[-len(attended) :], attended, strict=True):
        assert torch.equal(key[:, :, -keys.shape[2] :], keys)


def test_runs_that_changed_most_are_chosen() -> None:
    changed = torch.zeros(21)
    changed[torch.tensor([3, 20])] = torch.tensor([1.0, 2.0])
    assert most_changed(changed, 1).tolist() == [16, 17, 18, 19, 20]
    assert most_changed(changed, 9).tolist() == [*range(8), *range(16, 21)]


def test_composed_caches_go_on(session: Session) -> None:
    """By passes, by steps, by transformers' own generate, loaded from a file, and after a crop: the same tokens."""
    made = contexts(session)
    composed = session.compose(made)
    ids = torch.cat((composed.input_ids, QUESTION), dim=1)
    context = composed.cache.context(composed.input_ids)

    def tokens(**options: Any) -> list[int]:
        generated = session.generate(ids, cache=session.load_cache(context), max_new_tokens=24, **options)
        assert generated.mode == options["mode"]
        return generated.sequences[0].tolist()

    expected = tokens(mode="passes")
    assert tokens(mode="steps") == expected
    states: dict[str, list[Tensor]] = {"passes": [], "steps": []}
    for mode, made_states in states.items():
        with closing(session.chunks(session.load_cache(context), 1, 40, mode)) as chunks:  # type: ignore[arg-type]
            made_states += [chunks(torch.tensor([[token]])).clone() for token in range(3, 43)]
            assert chunks.mode == mode
    torch.testing.assert_close(torch.cat(states["steps"]), torch.cat(states["passes"]), rtol=0, atol=1e-4)
    assert tokens(mode="passes", prefill_chunk=2) == expected
    theirs = session.model.generate(ids, **with_cache(session.load_cache(context)), max_new_tokens=24, do_sample=False)
    assert theirs[0].tolist() == expected
    cropped = session.load_cache(context)
    session.model(torch.tensor([[5, 6, 7]]), **with_cache(cropped))
    cropped.crop(-3)
    assert session.generate(ids, cache=cropped, max_new_tokens=24, mode="passes").sequences[0].tolist() == expected
    cropped.crop(-cropped.get_seq_length())
    assert (cropped.get_seq_length(), cropped.gap) == (0, 0)


def test_rows_go_on_from_documents_as_one_does(session: Session) -> None:
    """Repeated, padded, cropped and loaded again: the logits of a row alone."""
    composed = session.compose(contexts(session))
    held, context = composed.input_ids.shape[1], composed.cache.context(composed.input_ids)

    def alone(question: Tensor) -> Tensor:
        return session.model(question, **with_cache(session.load_cache(context))).logits[:, -1]

    expected = torch.cat((alone(QUESTION), alone(QUESTION[:, 2:])))
    rows = session.load_cache(context)
    rows.batch_repeat_interleave(2)
    ids = torch.cat((QUESTION, torch.cat((torch.zeros(1, 2, dtype=torch.long), QUESTION[:, 2:]), 1)))
    mask = torch.ones(2, held + QUESTION.shape[1], dtype=torch.long)
    mask[1, held : held + 2] = 0
    positions = (mask.cumsum(1) - 1)[:, held:]
    for given in (positions, None) if rows.gap else (positions,):  # without a gap, as transformers places them
        made = session.model(ids, attention_mask=mask, position_ids=given, **with_cache(rows)).logits[:, -1]
        torch.testing.assert_close(made, expected, rtol=0, atol=1e-4)
        rows.crop(-QUESTION.shape[1])
    again = session.load_cache(rows.context(composed.input_ids.repeat(2, 1)))
    made = session.model(ids[:1].repeat(2, 1), **with_cache(again)).logits[:, -1]
    torch.testing.assert_close(made, expected[:1].repeat(2, 1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("first", [0, 5])
def test_what_was_never_composed_has_no_gap(session: Session, first: int) -> None:
    """A padded row, and one whose positions begin elsewhere, go on after loading as before."""
    ids, mask = torch.cat((PREFIX, DOCUMENTS[0]), dim=1), torch.ones(1, 39, dtype=torch.long)
    mask[:, : 0 if first else 4] = 0
    options: Any = {"position_ids": torch.arange(5, 40)[None]} if first else {"attention_mask": mask[:, :35]}
    cache = session.new_cache()
    session.model(ids, **options, **with_cache(cache))
    loaded = session.load_cache(cache.context(ids))
    options = {"position_ids": torch.arange(35, 39)[None]} if first else {"attention_mask": mask}
    live, again = (session.model(QUESTION, **options, **with_cache(x)).logits for x in (cache, loaded))
    assert loaded.gap == 0
    torch.testing.assert_close(again, live, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MOVABLE)
def test_composed_caches_on_a_gpu(name: str, tiny_artifact: Any) -> None:
    """Kernels make the tokens of the reference, captured too, also where positions are left out."""
    method, tokens = get_method(name), dict[str, list[int]]()
    how: Any = {"artifact": tiny_artifact(method)} if method.needs_artifact else {}
    for mode, impl in (("passes", "reference"), ("passes", "auto"), ("graphs", "auto")):
        model = make_model("llama").cuda()
        with torch.no_grad(), kvcli.attach(model, name, **how, **WINDOW, impl=impl) as session:
            composed = session.compose(contexts(session), repair=0.2)
            ids = torch.cat((composed.input_ids, QUESTION.cuda()), dim=1)
            made = session.generate(ids, cache=composed.cache, max_new_tokens=40, mode=mode)
            assert made.mode == mode
            tokens[f"{mode} {impl}"] = made.sequences[0].tolist()
    assert len({tuple(x) for x in tokens.values()}) == 1


@pytest.mark.parametrize("name", [name for name in METHODS if name not in MOVABLE])
def test_methods_whose_codes_are_of_one_place_are_refused(name: str, tiny_model: Any, tiny_artifact: Any) -> None:
    method = get_method(name)
    how: Any = {"artifact": tiny_artifact(method)} if method.needs_artifact else {}
    with kvcli.attach(tiny_model, name, **how) as session:
        reason = obstacle(session.codecs[0])
        assert reason is not None
        with pytest.raises(UsageError, match=f"side by side: method '{name}' does not let them: {reason}"):
            session.compose([])


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma3_text", {}, "the model has layers that keep a state of the whole text"),
        ("gpt2", {}, "the model's positions are not understood as RoPE"),
        ("hunyuan_v1_dense", {}, "the model's positions are not understood as RoPE"),
    ],
)
def test_models_whose_keys_are_of_one_place_are_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    with kvcli.attach(make(family, **changes), "fp16") as session, pytest.raises(UsageError, match=reason):
        session.compose([])


def test_other_threads_go_on_meanwhile(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of another thread attends as ever while documents are read again."""
    made, attended, encoded = contexts(session), list[Tensor](), compose_module._encoded
    expected = session.model(QUESTION, **with_cache(session.new_cache())).logits

    def read() -> None:
        with torch.no_grad():
            attended.append(session.model(QUESTION, **with_cache(session.new_cache())).logits)

    def interrupted(*arguments: Any) -> Any:
        thread = Thread(target=read)
        thread.start()
        thread.join()
        return encoded(*arguments)

    monkeypatch.setattr(compose_module, "_encoded", interrupted)
    session.compose(made)
    assert len(attended) > 3
    assert all(torch.equal(x, expected) for x in attended)


def test_what_is_no_document_is_refused(session: Session) -> None:
    made = contexts(session)
    for wrong, options, match in (
        ([], {}, "takes contexts"),
        (made, {"repair": 1.5}, "a share from 0 to 1"),
        (made, {"starts": [5]}, "starts of all"),
        (made, {"starts": [5, 46, 5]}, "its document begins at 46"),
        ([made[0], replace(made[1], input_ids=None)], {}, "no single text"),
    ):
        with pytest.raises(UsageError, match=match):
            session.compose(wrong, **options)
    tensors = {name: x[:, :, :3] if name == "layers.1.values" else x for name, x in made[1].snapshot.tensors.items()}
    damaged = replace(made[1], snapshot=replace(made[1].snapshot, tensors=tensors))
    with pytest.raises(CacheError):
        session.compose([made[0], damaged])
    cache = session.load_cache(made[1])
    session.flush(cache)
    for context in (made[1], cache.context(made[1].input_ids, made[1].notes)):
        foreign = replace(context, identity=replace(context.identity, weights="0" * 32))
        with pytest.raises(CacheError, match="was made"):
            session.compose([made[0], foreign])
