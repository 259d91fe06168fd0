"""What can go wrong, as one tree.

    ForerunError
    ├── UserError             a mistake that the user can mend: the command line prints one line and exits with 2
    │   ├── OptionError       an option or a setting has an impossible value
    │   ├── RequestError      a request that can't be served as it stands (too long, temperature below 0, …)
    │   ├── ModelError        a model that can't be found, read or run
    │   │   ├── CorruptModelError      the file is truncated or damaged
    │   │   └── UnsupportedModelError  a kind that we don't run; the message names it
    │   └── DownloadError     no network, no space, a wrong checksum
    └── EngineError           a request that failed inside the engine; the others go on

Every message says what was got, what was expected and what to do.
"""


class ForerunError(Exception):
    """Base of all errors that forerun raises on purpose."""


class UserError(ForerunError):
    """A mistake that the user can mend."""


class OptionError(UserError):
    """An option or a setting has an impossible value."""


class RequestError(UserError):
    """A request that can't be served as it stands."""


class ModelError(UserError):
    """A model that can't be found, read or run."""


class CorruptModelError(ModelError):
    """A model file is truncated or damaged."""


class UnsupportedModelError(ModelError):
    """A kind of model that forerun doesn't run."""


class DownloadError(UserError):
    """A download failed; nothing half-written is left."""


class EngineError(ForerunError):
    """A request failed inside the engine."""
