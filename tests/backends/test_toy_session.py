"""The toy backend is a Session, to the bit."""

import pytest

from forerun.backends.base import Session
from forerun.backends.toy import ToySession
from tests.backends.session_suite import SessionSuite


class TestToySession(SessionSuite):
    @pytest.fixture
    def session(self) -> Session:
        return ToySession.random(11, max_len=60)
