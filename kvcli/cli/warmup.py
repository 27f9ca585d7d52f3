"""`kvcli warmup`."""

import time
from typing import Any

from pydantic import Field

from kvcli.artifact.choice import MethodChoice, choose
from kvcli.bench.suite import Lengths
from kvcli.cli.command import Command, model_argument, try_method
from kvcli.cli.output import Output
from kvcli.commands.options import ModelOptions, parse_settings
from kvcli.commands.tables import DataTable
from kvcli.errors import UsageError
from kvcli.models.hub import check_model_name
from kvcli.models.shapes import check_shape
from kvcli.registry import UNFITTED_METHOD


class WarmupOptions(ModelOptions):
    """Options of `kvcli warmup`."""

    shape: str | None = Field(None, description="shape instead of a model, such as llama-3.1-8b: no weights are needed")
    method: list[str] = Field([], description="method; repeatable; default: all that bench compares")
    setting: list[str] = Field([], description="setting of every method that has it, NAME=VALUE; repeatable")
    batch: Lengths = Field([1], description="sequences at once; repeatable")


def run(options: WarmupOptions, output: Output) -> None:
    """Compile the kernels of a model ahead, in a container or on a cluster; later processes only load them."""
    settings = parse_settings(options.setting)
    choose(map(MethodChoice, options.method), settings)
    check_model_name(options.model) if options.shape is None else check_shape(options.shape)
    import torch

    from kvcli.kernels.launch import has_triton

    device = torch.device(options.torch_device())
    if device.type != "cuda" or not has_triton():
        raise UsageError(f"kernels are compiled by Triton for the GPU of this machine, not for device '{device}'")
    from kvcli.bench.model import open_session, random_model
    from kvcli.bench.suite import default_methods

    if options.shape is None:
        model: Any = options.load(output).model
    else:
        dtype = torch.bfloat16 if options.dtype == "auto" else getattr(torch, options.dtype)
        model = random_model(options.shape, 1, device, dtype, options.seed)
    records: list[dict[str, Any]] = []
    for name in options.method or default_methods():
        choice, started = MethodChoice(name).plus(settings), time.perf_counter()
        output.say(f"{choice.label}:")
        kernels: list[str] = []
        with open_session(model, choice, "auto", options.seed) as session:
            offsets = [codec.key_offset for codec in session.codecs]
            for constant in (0.0, 1.0) if offsets[0] is not None else (0.0,):  # of fitted keys, as the model's are
                for offset in filter(None.__ne__, offsets):
                    offset.fill_(constant)  # type: ignore[union-attr]
                for batch in options.batch:
                    kernels += session.warmup(batch, output.progress)
        records.append({"method": choice.label, "kernels": len(kernels), "seconds": time.perf_counter() - started})
    rows = [{name: f"{x:.1f}" if name == "seconds" else str(x) for name, x in record.items()} for record in records]
    name = options.shape or options.model
    table = DataTable.of(f"kernels of {name}, {str(model.dtype).removeprefix('torch.')}, ready", rows)
    words = () if options.shape else model_argument(options.model)
    following = try_method(str(records[-1]["method"]), "generate", words)
    output.result({"model": name, "batch": options.batch, "rows": records}, table, following)


EXAMPLE = f"kvcli warmup --shape llama-3.1-8b --method {UNFITTED_METHOD}"
COMMAND = Command("warmup", WarmupOptions, run, EXAMPLE, ("model",))
