"""`kvcli contexts show`: one context, and what its stored copy loses."""

from __future__ import annotations

from collections.abc import Collection
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
    from kvcli.contexts import ContextStore, StoredContext

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
    stored = store.get(options.name)
    record = describe(stored, store.shared())
    lines = [
        f"{record['name']}: {record['tokens']} tokens of {record['source'] or 'an unknown source'}, "
        f"{record['model']} in {record['dtype']}, method {record['method']}",
        f"{size(record['bytes'])}, in fp16 {size(record['fp16_bytes'])} ({record['ratio']:.2f}x): "
        f"{record['coded_tokens']} tokens as codes at {bits(record)} (K / V) bits, {size(record['code_bytes'])}; "
        f"{size(record['window_bytes'])} in full precision",
        f"{record['blocks']} blocks of {record['block_tokens']} tokens, {record['shared_blocks']} of them shared with "
        f"other contexts; {size(record['shared_bytes'])} shared in all",
        f"stored {record['created']}, last used {record['last_used']}",
    ]
    if options.kl:
        kl = record["kl"] = measured(options, store, stored, output)
        lines.append(
            f"the copy against the uncompressed model, over the last {kl['num_tokens']} tokens: "
            f"KL {kl['kl_mean']:.4f} nats per token (p99 {kl['kl_p99']:.4f}), {100 * kl['flips']:.1f} % flips, "
            f"perplexity {kl['perplexity']:.3f} instead of {kl['reference_perplexity']:.3f}"
        )
    output.result(record, "\n".join(lines))


def describe(context: StoredContext, shared: Collection[str]) -> dict[str, Any]:
    """What is known of a context, as plain JSON values.

    Args:
        context: of a store.
        shared: digests of the blocks that several contexts of the store need.
    """
    stored, identity = context.record, context.record.identity
    method, (key_bits, value_bits) = identity.get("method"), stored.bits
    with suppress(KvcliError, TypeError, ValueError, KeyError):  # one that this version of kvcli does not know
        method = method_name(identity["method"], identity["config"])
    return {
        "name": context.name,
        "tokens": stored.num_tokens,
        "model": identity.get("model"),
        "method": method,
        "dtype": identity.get("dtype"),
        "config": identity.get("config"),
        "coded_tokens": stored.counts.attended[0],
        "key_bits": key_bits,
        "value_bits": value_bits,
        "bytes": stored.nbytes,
        "fp16_bytes": stored.fp16_bytes,
        "ratio": stored.fp16_bytes / stored.nbytes,
        "code_bytes": sum(stored.bytes_of.get(kind, 0) for kind in ("key_codes", "value_codes")),
        "window_bytes": sum(stored.bytes_of.get(kind, 0) for kind in ("keys", "values")),
        "block_tokens": stored.part_tokens,
        "blocks": len(stored.coded),
        "shared_blocks": sum(block.digest in shared for block in stored.coded),
        "shared_bytes": sum(block.bytes for block in stored.blocks if block.digest in shared),
        "created": context.created,
        "last_used": datetime.fromtimestamp(context.used, UTC).isoformat(timespec="seconds"),
        "source": str(stored.notes.get("source", "")),
    }


def bits(record: dict[str, Any]) -> str:
    """Stored bits per key and per value; a hyphen where nothing is a code."""
    return f"{record['key_bits']:.2f} / {record['value_bits']:.2f}" if record["coded_tokens"] else "-"


def measured(options: ShowOptions, store: ContextStore, stored: StoredContext, output: Output) -> dict[str, Any]:
    """What the stored copy loses, as plain JSON values.

    Raises:
        UsageError: a context that is too short.
        ContextError: another model, method or artifact.
    """
    from kvcli.contexts import identity_of
    from kvcli.eval.stored_context import copied_tokens, stored_quality

    copied_tokens(stored.record, options.kl_tokens)
    context = store.load(store.whole(stored.name))
    given = options.model_dump(include={*ModelOptions.model_fields, "artifact", "impl"}, exclude_unset=True)
    session_options = SessionOptions(**given).for_context(context)
    chosen = choose_method(session_options, output, context)
    loaded = session_options.load(output)
    with chosen.attach(loaded, options.impl, output) as session:
        store.whole(stored.name, identity_of(session, loaded.tokenizer))
        quality = stored_quality(session, store, stored, options.kl_tokens).to_dict()
    return {name: x for name, x in quality.items() if name != "memory"}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "show", ShowOptions, "kvcli contexts show report --kl", ("name",))(run)
