"""The files of `pytest -m fast`, some of every room; tests of kernels and slow tests in them do not take part."""

import re

FAST = (
    "test_foundation.py",
    "artifact/test_artifact.py",
    "attention/test_calls.py",
    "attention/test_encoding_times.py",
    "bench/test_bench_timing.py",
    "cache/test_methods_cache.py",
    "cache/test_store.py",
    "calibrate/test_collect.py",
    "calibrate/test_corpus.py",
    "cli/test_help.py",
    "cli/test_output.py",
    "contexts/test_put_and_prune.py",
    "eval/test_intervals.py",
    "eval/test_records_and_gates.py",
    "faults/test_artifacts_on_disk.py",
    "faults/test_cache_state.py",
    "faults/test_locks_and_writes.py",
    "foundation/test_docs.py",
    "foundation/test_method_names.py",
    "foundation/test_names_and_fingerprints.py",
    "foundation/test_rope_and_spec.py",
    "methods/test_contract.py",
    "methods/test_kivi.py",
    "models/test_models.py",
    "plan/test_bits.py",
    "seam/test_logits.py",
    "serve/test_requests.py",
    "storage/test_run_manifest.py",
    "text/test_detokenizer.py",
)
"""Paths in `tests/`. `tests/test_fast.py` says how many cases they may have."""

SLOWER = re.compile(
    r"test_import_patches_nothing|test_help_loads_nothing|test_misused_flags|before_torch|what_the_probe_finds"
    r"|test_a_command_imports_no_other|test_no_table_is_stale"
    r"|test_methods_cache.py::TestRegistry.*\[(?!rtn|kivi|klt(?!-tcq)|commvq)"
)
"""Tests of these files that do not take part: they start processes, or run a model for each of the other methods."""
