"""``watch``: measures any training loop as a ``Step``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from fivefold.api.job_words import JobWords
from fivefold.errors import UserError
from fivefold.requests.extras import requires_extra

if TYPE_CHECKING:
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.profiling.watch_loop import Watched


@requires_extra
def watch(
    model: Any,
    optimizer: Any,
    /,
    *,
    tokens: int = 0,
    mesh: Any = None,
    stage: int = 0,
    layout_name: str = "",
    against: tuple[str | Model, str | Machine, str | Layout] | None = None,
    **job: Unpack[JobWords],
) -> Watched:
    """Measure memory, FLOPs, messages and seconds of a step in the enclosed loop.

    Parameters
    ----------
    model, optimizer : Module, Optimizer or tuple of Optimizer
        The module as it is trained (wrapped by DistributedDataParallel, sharded, …) and its optimizer.
    tokens : int
        Tokens per step, over all ranks.
    mesh : DeviceMesh, optional
        Its dimensions name the axes of messages.
    stage : int
        Pipeline stage of this rank.
    layout_name : str
        A name for the layout.
    against : tuple of model, machine and layout, optional
        ``watched.save(FOLDER)`` writes their predicted step next to the measured one, for ``fivefold show``.
    **job
        Fields of the job of ``against``, as in ``predict``.

    Returns
    -------
    Watched
        A context manager; ``watched.step`` is the measured ``Step`` after the loop.

    Raises
    ------
    UserError
        If fields of a job are given without ``against``.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with ff.watch(model, optimizer, tokens=4) as watched:
    ...     for _ in range(3):
    ...         model(torch.ones(4, 8)).sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> watched.step.kind
    'measured'
    """
    from fivefold.api import functions
    from fivefold.profiling.watch_loop import watch as run

    predicted, machine = None, None
    if against is not None:
        machine = functions._resolve_machine(against[1])
        predicted = functions.predict(against[0], machine, against[2], **job)
        tokens = tokens or int(str(predicted.job["sequence"])) * int(str(predicted.job["global_batch"]))
    elif job:
        raise UserError("job fields apply to a prediction only; add against=(MODEL, MACHINE, LAYOUT)")
    return run(
        model,
        optimizer,
        tokens=tokens,
        mesh=mesh,
        stage=stage,
        predicted=predicted,
        machine=machine,
        layout_name=layout_name,
    )
