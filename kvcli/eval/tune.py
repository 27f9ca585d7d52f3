"""Bits of each layer, of its keys and values apart, that lose least for their bytes: the search of `kvcli tune`.

Losses nearly add up. Keys, or values, of one layer alone are coded at a few bits, which gives each layer's share of the
loss; keys, or values, of all layers at each number of bits give the rest. The choices with the least predicted loss for
their bytes lie on a path from the fewest bits on, each step of which saves most loss per byte. What is chosen from it
is measured on text that the search has not seen, and the prediction is corrected by that.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Self, TypeVar, get_args

import torch

from kvcli.artifact.recipe import Recipe, artifact_sha256
from kvcli.cache.compressed import MemoryReport
from kvcli.commands.sizes import size
from kvcli.errors import QualityGateError, UsageError
from kvcli.eval.intervals import estimate, paired_difference
from kvcli.eval.kl import scored
from kvcli.eval.suite import Case
from kvcli.methods.config import EXACT, CacheConfig
from kvcli.models.load import LoadedModel
from kvcli.plan.cache import CachePlan
from kvcli.plan.memory import other_bytes_of
from kvcli.progress import Reporter
from kvcli.registry import get_config
from kvcli.seam.probe import probe
from kvcli.storage.atomic import append_record, read_records
from kvcli.storage.manifest import json_sha256
from kvcli.storage.ranks import joined_ranks

SCREENED = (2, 4)
"""Bits of all layers at which methods are compared."""

RUINOUS = 0.3
"""Loss of all keys, or values, in nats per token, at which bits are too few: layers no longer add up."""

ROUNDS = 4
"""Most choices that are measured of bits by layer, and of those that are the same in all layers."""

FoundT = TypeVar("FoundT")
Curve = Mapping[int, tuple[float, float]]
"""Bytes and loss at each number of bits."""


@dataclass(frozen=True)
class Goal:
    """The fewest bytes of a cache of `context` tokens for `max_kld` nats per token, else the least loss."""

    context: int
    max_kld: float = math.inf
    max_bytes: float = math.inf

    def best(self, found: Sequence[FoundT], sizes: Callable[[FoundT], tuple[float, float]]) -> FoundT | None:
        """The best of what has it, by its bytes and loss; None: nothing has."""
        by_loss, known = math.isinf(self.max_kld), [(sizes(x), x) for x in found]
        holds = [(y, x) for y, x in known if y[0] <= self.max_bytes and y[1] <= self.max_kld]
        return min(holds, key=lambda pair: pair[0][by_loss])[1] if holds else None


@dataclass(frozen=True)
class Trial:
    """A method measured on held-out text: losses of blocks, and its caches on a model in 16 bits."""

    case: Case
    plan: CachePlan
    memory: MemoryReport
    blocks: Sequence[Mapping[str, Any]]

    @property
    def loss(self) -> float:
        return sum(x["kl"] * x["tokens"] for x in self.blocks) / sum(x["tokens"] for x in self.blocks)

    def to_dict(self, best: Self) -> dict[str, Any]:
        """Bits, bytes and loss with its interval, and the difference to the best, as plain JSON values."""
        ours, theirs = ([x["kl"] for x in trial.blocks] for trial in (self, best))
        tokens = [x["tokens"] for x in self.blocks]
        kl, difference = estimate(ours, tokens), paired_difference(ours, theirs, tokens)
        memory = {x: getattr(self.memory, x) for x in ("key_bits", "value_bits", "effective_bits", "cache_bytes")}
        loss = {"kl_mean": kl.mean, "kl_low": kl.low, "kl_high": kl.high}
        versus = {"difference": difference.mean, "real": difference.excludes_zero}
        return {"label": self.case.label, "method": self.case.choice.method, **memory, **loss, **versus}

    def recipe(self, loaded: LoadedModel, measured: Mapping[str, Any]) -> Recipe:
        """The recipe of it; `measured` says on what."""
        settings, folder = self.plan.config.model_dump(mode="json"), self.case.choice.folder
        row = {name: x for name, x in self.to_dict(self).items() if name.startswith("kl_") or name.endswith("_bits")}
        return Recipe(
            model=loaded.name,
            fingerprint=loaded.fingerprint,
            method=self.case.choice.method,
            # what was fitted is in the artifact
            settings={x: settings[x] for x in (settings if folder is None else CacheConfig.model_fields)},
            artifact=None if folder is None else str(folder),
            artifact_sha256=None if folder is None else artifact_sha256(folder),
            measured={**row, **measured},
        )


@dataclass
class Objective:
    """Measures methods; ranks share each measurement."""

    options: Any  # with `chunk` and `batch_size`
    loaded: LoadedModel
    goal: Goal
    texts: tuple[torch.Tensor, torch.Tensor]  # of the search and held out: token ids, int64 [sequences, length]
    path: Path  # a file; what it holds is not measured again
    count: int  # measurements at most
    total: int  # tokens that these read
    reporter: Reporter
    _tried: set[str] = field(default_factory=set)
    _reports: dict[bool, Any] = field(default_factory=dict)

    @cached_property
    def other_bytes(self) -> Callable[[int], int] | None:
        return other_bytes_of(self.loaded)

    def plan(self, case: Case) -> CachePlan:
        """The caches of a method on a model in 16 bits; errors as those of `kvcli.attach`."""
        choice, spec = case.choice, self.loaded.spec
        config, codecs = choice.codecs(spec, lambda: probe(self.loaded.model), lambda: self.loaded.fingerprint)
        return CachePlan.of_codecs(spec, choice.record, config, codecs, torch.float16, other_bytes=self.other_bytes)

    def measure(self, case: Case, *, held_out: bool = True) -> Trial:
        plan, text, folder = self.plan(case), self.texts[held_out], case.choice.folder
        made: dict[str, Any] = {"method": case.choice.method, "settings": plan.config.model_dump(mode="json")}
        made |= {"artifact": folder and artifact_sha256(folder), "chunk": self.options.chunk}
        model = {"fingerprint": self.loaded.fingerprint, "dtype": str(self.loaded.model.dtype)}
        key = json_sha256({**made, **model, "tokens": text.tolist()})
        ranks = joined_ranks()
        (known,) = ranks.each(
            [key], lambda key: next((x for x in read_records(self.path) if x.get("key") == key), None)
        )
        self._tried.add(key)
        if known is None:
            first, started = not self._reports, time.perf_counter()
            if held_out not in self._reports:
                self._reports[held_out] = scored(self.options, self.loaded, text, self.reporter)
            label = f"{len(self._tried)} of {self.count}, {case.label}"
            with self.reporter.progress(label, text.numel(), "tokens") as advance:
                blocks = self._reports[held_out](case, None, advance).scores.blocks()
            seconds = time.perf_counter() - started
            spent = {"held_out": held_out, "seconds": seconds}
            known = {"key": key, "label": case.label, **made, **spent, "blocks": blocks}
            if ranks.rank == 0:
                append_record(self.path, known)
            if first:
                minutes = seconds / text.numel() * self.total / 60
                self.reporter.say(f"about {minutes:.0f} minutes at most, less what {self.path} holds")
        return Trial(case, plan, plan.memory(self.goal.context), known["blocks"])


def widths_of(method: str) -> list[int]:
    """Bits that keys, and values, of a method can have."""
    return [*get_args(get_config(method).model_fields["k_bits"].annotation)]


def with_bits(base: Case, bits: Sequence[int]) -> Case:
    """A method with bits of the keys of each layer, then of the values; a single number where they are the same."""
    sides = {"k_bits": [*bits[: len(bits) // 2]], "v_bits": [*bits[len(bits) // 2 :]]}
    settings = {name: x[0] if len({*x}) == 1 else x for name, x in sides.items()}
    choice = replace(base.choice, settings={**base.choice.settings, **settings})
    name = choice.label
    if len(coded := [i for i, x in enumerate(bits) if x != EXACT]) == 1:
        side, layer = divmod(coded[0], len(bits) // 2)
        name += f", {('keys', 'values')[side]} of layer {layer} alone"
    elif name == base.choice.method:
        name += " by layer, K {:.2f} V {:.2f}".format(*map(fmean, sides.values()))
    return replace(base, label=name + base.label, choice=choice)


def path_of(curves: Sequence[Curve]) -> list[list[int]]:
    """Bits of all curves with the least sum of losses for their bytes, along lower convex hulls, the cheapest first."""
    chosen, moves = [], []
    for place, curve in enumerate(curves):
        bits = min(curve, key=lambda x: curve[x][0])
        chosen.append(bits)
        while further := [x for x, (cost, loss) in curve.items() if cost > curve[bits][0] and loss < curve[bits][1]]:
            cost, loss = curve[bits]
            gain, bits = max(((loss - curve[x][1]) / (curve[x][0] - cost), x) for x in further)
            moves.append((gain, place, bits))
    found = [chosen]
    for _, place, bits in sorted(moves, key=lambda move: -move[0]):
        found.append([*found[-1][:place], bits, *found[-1][place + 1 :]])
    return found


def curves_of(base: Case, objective: Objective) -> list[Curve]:
    """Bytes of the codes, and predicted loss, of the keys of each layer, then of the values."""
    spec, curves = objective.loaded.spec, list[Curve]()
    layers, exact = range(spec.num_layers), [EXACT] * spec.num_layers
    for side, width in enumerate((spec.kv_dim, spec.num_kv_heads * spec.value_dim)):

        def measure(bits: list[int]) -> Trial:
            return objective.measure(with_bits(base, exact + bits if side else bits + exact), held_out=False)  # noqa: B023

        measured = {x: measure([x] * len(layers)) for x in widths_of(base.choice.method)}
        whole = {x: y for x, y in measured.items() if y.loss < RUINOUS or x == max(measured)}
        least = min(whole)
        alone = [measure([least if i == layer else EXACT for i in layers]).loss for layer in layers]
        per_bit = width * whole[least].memory.num_encoded / 8
        for layer, loss in enumerate(alone):
            share = loss / max(sum(alone), 1e-30)
            curve = {x: (per_bit * y.plan.layer_bits()[layer][side], share * y.loss) for x, y in whole.items()}
            curves.append(curve | {EXACT: (per_bit * EXACT, 0.0)})
    return curves


def by_layer(base: Case, objective: Objective) -> list[Trial]:
    """What was measured of a method: bits that are the same in all layers, and bits of each."""
    layers, goal, found = objective.loaded.spec.num_layers, objective.goal, list[Trial]()
    curves = curves_of(base, objective)
    least, same = [min(curve) for curve in curves], product(curves[0], curves[-1])
    cheapest = objective.plan(with_bits(base, least)).memory(goal.context).cache_bytes
    rest = cheapest - sum(curve[x][0] for curve, x in zip(curves, least, strict=True))
    for choices in ([[k] * layers + [v] * layers for k, v in same], path_of(curves)):
        tried, factor = list[list[int]](), 1.0

        def sizes(bits: list[int]) -> tuple[float, float]:
            chosen = [curve[x] for curve, x in zip(curves, bits, strict=True)]
            return rest + sum(x for x, _ in chosen), factor * sum(x for _, x in chosen)  # noqa: B023

        while len(tried) < ROUNDS and (bits := goal.best(choices, sizes)) is not None and bits not in tried:
            tried.append(bits)
            found.append(objective.measure(with_bits(base, bits)))
            factor *= found[-1].loss / max(sizes(bits)[1], 1e-30)
    return found


def tune(bases: Sequence[Case], fitted: Sequence[Case], objective: Objective) -> tuple[Trial, list[Trial]]:
    """The best, and all that were measured on held-out text.

    Bits by layer are searched of the method that is best with the same bits in all layers: by its bytes at the asked
    loss, or its loss at the asked bytes, where the logarithm of the loss is taken to be linear in bytes.

    `bases` are methods without their bits, whose labels are what is said after the method's name; `fitted` ones are
    measured as they are. QualityGateError: nothing reaches the goal; UsageError: a text so short that bits make no
    difference.
    """
    goal, layers = objective.goal, objective.loaded.spec.num_layers
    trials, order = [objective.measure(case) for case in fitted], list[tuple[float, int]]()
    for base in bases:
        low, high = (objective.measure(with_bits(base, [bits] * 2 * layers)) for bits in SCREENED)
        first, last = (math.log(max(x.loss, 1e-30)) for x in (low, high))
        if first == last:
            raise UsageError(
                f"all bits of {base.choice.method} lose the same: few codes are read, so take a longer --seq-len"
            )
        slope = (last - first) / (high.memory.cache_bytes - low.memory.cache_bytes)
        by_loss = first + slope * (goal.max_bytes - low.memory.cache_bytes)
        by_bytes = low.memory.cache_bytes + (math.log(goal.max_kld) - first) / slope
        order.append((by_loss if math.isinf(goal.max_kld) else by_bytes, len(order)))
        trials += [low, high]
    trials += by_layer(bases[min(order)[1]], objective)
    trials = list({x.case.label + str(x.case.choice.settings): x for x in trials}.values())
    best = goal.best(trials, lambda x: (x.memory.cache_bytes, x.loss))
    if best is None:
        least, small = min(trials, key=lambda x: x.loss), min(trials, key=lambda x: x.memory.cache_bytes)
        reason = f"least is lost by {least.case.label}: {least.loss:.4g}"
        if small.memory.cache_bytes > goal.max_bytes:
            sizes = f"{size(small.memory.cache_bytes)}, more than {size(goal.max_bytes)}"
            reason = f"the smallest cache, of {small.case.label}, takes {sizes}"
        raise QualityGateError(f"nothing reaches the goal; {reason}")
    return best, trials
