"""Ctrl-C where Python cannot raise it, and where a library hides it."""

from __future__ import annotations

import signal
import time
from contextlib import suppress

import pytest

from voxtune.cli.common import Output
from voxtune.cli.main import Interrupted, _interrupts
from voxtune.cli.train import SignalStop


class InterruptedAtItsEnd:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_within_a_destructor(capfd):
    with _interrupts() as pressed, pytest.raises(Interrupted):
        InterruptedAtItsEnd()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            time.sleep(0.01)
    assert set(pressed) == {signal.SIGINT}
    assert capfd.readouterr().err == ""


def test_hidden_by_a_library_before_the_first_step():
    with _interrupts() as pressed:
        with suppress(BaseException):
            signal.raise_signal(signal.SIGINT)
        assert pressed
        stop = SignalStop(Output(json=False, quiet=True))
        with pytest.raises(KeyboardInterrupt):
            stop()
    assert not stop.caught
