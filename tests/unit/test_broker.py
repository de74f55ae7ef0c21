"""What the application tells of dropped messages, and what it accepts at all."""

from __future__ import annotations

import hashlib
import logging

import pytest
from kombu.transport import redis as kombu_redis

from tasks import broker
from tasks.broker import QUIET_S, Drops
from tasks.celery import create_app
from tasks.config import load_configuration


def test_a_dropped_message_is_told_by_size_and_hash_and_a_flood_by_its_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line, then silence for a while, then how many there were meanwhile; never the content."""
    now_s = 100.0
    drops = Drops(clock=lambda: now_s)
    with caplog.at_level(logging.ERROR, logger="genpool.broker"):
        for number in range(1000):
            drops.note("queue tiny", "ValueError", f"private {number}")
        now_s += QUIET_S
        drops.note("queue tiny", "ValueError", b"private")
        drops.note("queue tiny", "ValueError", None)
    first, second = (record.getMessage() for record in caplog.records)
    digest = hashlib.sha256(b"private 0").hexdigest()[:12]
    assert first == f"dropped a message from queue tiny: ValueError; 9 bytes, sha256 {digest}..."
    assert second.endswith("... (999 more before it)")
    assert "private" not in caplog.text


def test_json_is_all_that_is_accepted() -> None:
    """Of tasks, results, events and control commands, by every program that uses the application."""
    app = create_app(load_configuration(environ={}).settings)
    assert app.conf.accept_content == ["json"]
    assert app.conf.result_accept_content == ["json"]
    assert app.control.mailbox.accept == ["json"]
    # A receiver of events accepts what the application sends them as, and JSON.
    assert (app.conf.task_serializer, app.conf.result_serializer, app.conf.event_serializer) == ("json",) * 3
    app.close()


@pytest.mark.parametrize(
    ("url", "transport"),
    [
        ("redis://h:1/2", broker.Transport),
        ("rediss://h", broker.Transport),
        ("unix:///run/x.sock?db=3", broker.Transport),
        ("sentinel://h", kombu_redis.SentinelTransport),
    ],
)
def test_every_connection_of_the_application_outlives_what_it_reads(url: str, transport: type) -> None:
    """Plain Redis in each form; a copy of a connection is no exception. Other brokers keep their transport."""
    app = create_app(load_configuration(environ={"GENPOOL_STATE__BROKER_URL": url}).settings)
    for connection in (app.connection_for_read(), app.connection_for_write(), app.connection_for_read().clone()):
        assert connection.get_transport_cls() is transport
    app.close()
