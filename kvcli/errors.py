"""Every error the library raises on purpose, each with the exit code the command line gives it.

This module does not know how errors are printed: `kvcli.cli.output` does.
"""


class KvcliError(Exception):
    """A failure with a cause a user can act on; its text is one line that names cause and cure."""

    exit_code = 1


class UsageError(KvcliError):
    """The request itself is off: an unknown value, two options that exclude each other, a missing input."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration value or file that cannot be used."""


class ModelError(KvcliError):
    """A model that cannot be found, downloaded, verified or loaded."""


class UnsupportedModelError(ModelError):
    """A model whose architecture kvcli does not compress; the message names what is unsupported."""


class CorpusError(KvcliError):
    """A calibration or evaluation corpus that is missing, empty or malformed."""


class SamplesError(KvcliError):
    """Recorded calibration samples that are missing, incomplete or belong to another run."""


class ArtifactError(KvcliError):
    """An artifact that is missing, corrupt, of another format version or made for another model."""


class CacheError(KvcliError):
    """An operation the compressed cache cannot do, such as cropping into encoded tokens."""


class QualityError(KvcliError):
    """A quality or verification gate that was missed."""

    exit_code = 3
