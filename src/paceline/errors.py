"""Every error a user can cause. Each message is a sentence that says what to change."""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors raised on purpose; the command line prints its text, never a traceback."""


class ConfigError(PacelineError, ValueError):
    """The engine cannot be built as asked (unknown key, impossible size)."""


class ModelNotFoundError(PacelineError, FileNotFoundError):
    """No such model: not a folder, not a file, not a known short name, not on the hub."""


class ModelFormatError(PacelineError, ValueError):
    """A model's files are truncated, malformed or do not fit together; names the tensor or key."""


class RequestError(PacelineError, ValueError):
    """One request cannot be served. `param` names the parameter at fault, where there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt does not fit the context. `tokens`: how many it has at least, of `context`."""

    tokens: int = 0
    context: int = 0

    @classmethod
    def of(cls, context: int, length: str, tokens: int, param: str = "prompt") -> ContextLengthError:
        """In the words that clients know. `length`: how long it is."""
        made = cls(f"This model's maximum context length is {context} tokens. However, your {param} resulted in "
                   f"{length}: please reduce the length of the {param}, or raise max_model_len.", param)
        made.tokens, made.context = tokens, context
        return made


class QueueFullError(RequestError):
    """The waiting queue is at its limit; try again later. `retry_after_s`: when there may be room, by the rate at which
    places became free of late; None: nothing is known of it."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(PacelineError):
    """The engine itself failed. `told`: the message without what was raised inside, which is none of a client's
    business."""

    def __init__(self, message: str, inside: BaseException | None = None) -> None:
        super().__init__(message if inside is None else f"{message} ({type(inside).__name__}: {inside})")
        self.told = message


class NoWorkerError(EngineError):
    """There is nobody to carry out a request at the moment; try again later."""


class StepError(EngineError, RequestError):
    """The engine failed on a step of this request; nothing that it asked for is to blame."""


class TransferError(PacelineError):
    """Blocks of a cache could not be handed from one engine to another. Whoever wanted them computes the prompt."""


class EmptySupportError(RequestError):
    """After every mask no token was left to sample at some position of this request."""


class GrammarError(RequestError):
    """The structure a request asks for (`param` names the field) is malformed, unsatisfiable or too complex."""


class NotYetError(PacelineError, NotImplementedError):
    """A planned feature that this version does not have. Never silently ignored."""


class ParallelError(EngineError):
    """A rank of a model that several hold together is gone, or did not start: the engine has to be made anew."""
