#!/usr/bin/env bash
# An output class of one's own with a field `past_key_values` cannot be made any more.
# transformers 5.24.0. Source: utils/generic.py, ModelOutput, which renames `past_key_values` to `cache` for its own
# classes until 5.40.
# A dataclass of one's own, derived from ModelOutput as the docs ask, with a field `past_key_values` cannot be made
# any more: the argument is renamed before the class sees it, and the error names an argument that nobody passed.
# So models with code of their own, which return such a class, fail in their first pass; a class whose field is called
# `cache` works with either name. Up to 5.23.0 it is what it says.
# Output seen:
#   5.23.0 x
#   5.24.0 TypeError: Output.__init__() got an unexpected keyword argument 'cache'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 5.23.0 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q torch==2.13.0 "transformers==$version"
    "$folder/$version/bin/python" -W ignore - "$version" <<'PY'
import sys
from dataclasses import dataclass
from transformers.utils import ModelOutput

@dataclass
class Output(ModelOutput):
    past_key_values: object | None = None

try:
    said = str(Output(past_key_values="x").past_key_values)
except TypeError as error:
    said = f"TypeError: {error}"
print(sys.argv[1], said)
wrong = "TypeError: Output.__init__() got an unexpected keyword argument 'cache'"
assert said == (wrong if sys.argv[1] == "5.24.0" else "x")
PY
done
