"""Calls a test's function around each action of a step, on the action's worker."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest

from pipepart.runtime.actions import Act
from pipepart.runtime.step import Step
from schedules import Action, Kind


def around_each_action(
    monkeypatch: pytest.MonkeyPatch, around: Callable[[Step, Action, Callable[[], None]], None]
) -> None:
    """Call ``around(step, action, run)`` in place of each action, which ``run()`` runs."""
    begin = Step.begin

    def begin_observed(step: Step) -> None:
        begin(step)

        def act(kind: Kind, stage: int, run: Callable[[int | None], None], micro_batch: int | None) -> None:
            around(step, Action(kind, stage, micro_batch), partial(run, micro_batch))

        tables: dict[int, Mapping[Kind, Act]] = {
            stage: {kind: partial(act, kind, stage, run) for kind, run in table.items()}
            for stage, table in step._tables.items()
        }
        step._tables = tables

    monkeypatch.setattr(Step, "begin", begin_observed)


def after_each_action(monkeypatch: pytest.MonkeyPatch, after: Callable[[Step, Action], None]) -> None:
    """Call ``after(step, action)`` after each action."""

    def around(step: Step, action: Action, run: Callable[[], None]) -> None:
        run()
        after(step, action)

    around_each_action(monkeypatch, around)
