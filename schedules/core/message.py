"""Message: a tensor sent from one rank to another in a step, or a sum of gradients over several ranks."""

from __future__ import annotations

from typing import NamedTuple

from .action import Kind


class Message(NamedTuple):
    """A message between stages of different ranks, or a sum of gradients over ranks.

    Its fields identify it within a step, on all of its ranks.

    kind: F for the output of a stage, or values of it that go past stages; B for the gradient of such values; W for the
        gradient of a shared parameter; REDUCE_GRAD for a sum over the copies of a stage.
    stages: the one that sends it and the one that receives it; of a REDUCE_GRAD all copies of the stage.
    ranks: the one that sends it and the one that receives it; of a REDUCE_GRAD all that take part, ascending.
    micro_batch: None for a REDUCE_GRAD.
    number: which shared parameter, for W.
    """

    kind: Kind
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    micro_batch: int | None
    number: int = 0

    def end(self, rank: int) -> str:
        """Return the role of a rank in the message, written as an action.

        >>> Message(Kind.F, (0, 1), (0, 1), 5).end(0), Message(Kind.F, (0, 3), (0, 1), 5).end(1)
        ('0SEND_F5', '3RECV_F5 from stage 0')
        """
        if self.kind is Kind.REDUCE_GRAD:
            return f"{self.stages[0]}{self.kind}"
        sends = rank == self.ranks[0]
        own, other = self.stages if sends else self.stages[::-1]
        name = f"{own}{'SEND' if sends else 'RECV'}_{self.kind}{self.micro_batch}"
        if self.kind is Kind.W:
            name += f" of shared parameter {self.number}"
        if self.kind is Kind.W or abs(own - other) > 1:
            name += f" {'to' if sends else 'from'} stage {other}"
        return name
