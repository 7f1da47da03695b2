"""What ends a run of a stage before the step's own end."""


class StageDoneError(BaseException):
    """The stage has all that it owes to the next one; no ``except Exception`` of the user's stops it."""


class OtherStageError(RuntimeError):
    """The step asks for a value that lives on another stage."""
