"""`kvcli contexts show`: one context, and what its stored copy loses."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import Field

from kvcli.cli.command import command
from kvcli.cli.output import Output
from kvcli.cli.session_options import SessionOptions, choose_method
from kvcli.cli.store_options import STORE_HELP, open_store
from kvcli.errors import KvcliError, UsageError
from kvcli.options import IMPL_HELP, ModelOptions
from kvcli.registry import method_name
from kvcli.sizes import size

if TYPE_CHECKING:
    from kvcli.contexts import ContextStore
    from kvcli.contexts.manifest import Manifest
    from kvcli.contexts.usage import Usage
    from kvcli.eval.quality import QualityReport

GROUP = "contexts"


class ShowOptions(ModelOptions):
    """Options of `kvcli contexts show`."""

    name: str | None = Field(default=None, description="the context")
    store: Path | None = Field(default=None, description=STORE_HELP)
    kl: bool = Field(
        default=False,
        description="measure what the stored copy loses: predictions of its last tokens, from the copy of those before "
        "them and without compression; reads the model",
    )
    kl_tokens: int = Field(default=256, ge=1, le=2**16, description="last tokens whose predictions --kl compares")
    artifact: Path | None = Field(
        default=None, description="artifact folder, for --kl; default: the newest for model and method"
    )
    impl: str = Field(default="auto", description=IMPL_HELP)


def run(options: ShowOptions, output: Output) -> None:
    """Show a context: tokens, bytes against fp16, bits, shared blocks; with --kl, what the stored copy loses."""
    store = open_store(options.store, options.model)
    if options.name is None:
        raise UsageError("name a context; 'kvcli contexts list' shows those that are there")
    manifest = store.get(options.name)
    record = describe(store, manifest, store.usage())
    quality = measured(options, store, manifest, output) if options.kl else None
    if quality is not None:
        record["kl"] = {name: x for name, x in quality.to_dict().items() if name != "memory"}
    output.result(record, "\n".join(lines(record)))


def method_of(identity: Mapping[str, Any]) -> Any:
    """The method with its bits; as it is recorded where this version of kvcli does not know it or its settings."""
    with suppress(KvcliError, TypeError, ValueError, KeyError):
        return method_name(identity["method"], identity["config"])
    return identity.get("method")


def describe(store: ContextStore, manifest: Manifest, usage: Usage) -> dict[str, Any]:
    """What is known of a context, as plain JSON values."""
    key_bits, value_bits = manifest.bits
    return {
        "name": manifest.name,
        "tokens": manifest.num_tokens,
        "model": manifest.identity.get("model"),
        "method": method_of(manifest.identity),
        "dtype": manifest.identity.get("dtype"),
        "config": manifest.identity.get("config"),
        "coded_tokens": manifest.counts.attended[0],
        "key_bits": key_bits,
        "value_bits": value_bits,
        "bytes": manifest.nbytes,
        "fp16_bytes": manifest.fp16_bytes,
        "ratio": manifest.fp16_bytes / manifest.nbytes,
        "code_bytes": manifest.key_code_bytes + manifest.value_code_bytes,
        "window_bytes": manifest.window_bytes,
        "block_tokens": manifest.block_tokens,
        "blocks": len(manifest.blocks),
        "shared_blocks": sum(usage.count[file.digest] > 1 for file in manifest.blocks),
        "shared_bytes": usage.shared_bytes(manifest.name),
        "created": manifest.created,
        "last_used": datetime.fromtimestamp(store.last_used(manifest.name), UTC).isoformat(timespec="seconds"),
        "source": str(manifest.notes.get("source", "")),
    }


def lines(record: dict[str, Any]) -> list[str]:
    """A context for people."""
    made = [
        f"{record['name']}: {record['tokens']} tokens of {record['source'] or 'an unknown source'}, "
        f"{record['model']} in {record['dtype']}, method {record['method']}",
        f"{size(record['bytes'])}, in fp16 {size(record['fp16_bytes'])} ({record['ratio']:.2f}x): "
        f"{record['coded_tokens']} tokens as codes at {bits(record)} (K / V) bits, {size(record['code_bytes'])}; "
        f"{size(record['window_bytes'])} in full precision",
        f"{record['blocks']} blocks of {record['block_tokens']} tokens, {record['shared_blocks']} of them shared with "
        f"other contexts; {size(record['shared_bytes'])} shared in all",
        f"stored {record['created']}, last used {record['last_used']}",
    ]
    if "kl" in record:
        kl = record["kl"]
        made.append(
            f"the copy against the uncompressed model, over the last {kl['num_tokens']} tokens: "
            f"KL {kl['kl_mean']:.4f} nats per token (p99 {kl['kl_p99']:.4f}), {100 * kl['flips']:.1f} % flips, "
            f"perplexity {kl['perplexity']:.3f} instead of {kl['reference_perplexity']:.3f}"
        )
    return made


def bits(record: dict[str, Any]) -> str:
    """Stored bits per key and per value; a hyphen where nothing is a code."""
    return f"{record['key_bits']:.2f} / {record['value_bits']:.2f}" if record["coded_tokens"] else "-"


def measured(options: ShowOptions, store: ContextStore, manifest: Manifest, output: Output) -> QualityReport:
    """What the stored copy loses.

    Raises:
        UsageError: a context that is too short.
        ContextError: another model, method or artifact.
    """
    from kvcli.contexts import identity_of
    from kvcli.eval.stored_context import copied_tokens, stored_quality

    copied_tokens(manifest, options.kl_tokens)
    context = store.load(store.whole(manifest.name))
    given = options.model_dump(include={*ModelOptions.model_fields, "artifact", "impl"}, exclude_unset=True)
    session_options = SessionOptions(**given).for_context(context)
    chosen = choose_method(session_options, output, context)
    loaded = session_options.load(output)
    with chosen.attach(loaded, options.impl, output) as session:
        store.whole(manifest.name, identity_of(session, loaded.tokenizer))
        return stored_quality(session, store, manifest, options.kl_tokens)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "show", ShowOptions, "kvcli contexts show report --kl", ("name",))(run)
