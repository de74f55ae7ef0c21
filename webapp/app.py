"""The application factory: `gunicorn -c python:webapp.gunicorn_conf 'webapp.app:create_app()'`."""

from __future__ import annotations

from pathlib import Path

from flask import Flask

from tasks.api_keys import KeyRing
from tasks.config import Settings, load_settings
from webapp.auth import register_auth
from webapp.errors import register_errors
from webapp.metrics import register_metrics
from webapp.node import EXTENSION, make_node
from webapp.request_ids import register_request_ids
from webapp.routes import (
    admin_model_rows,
    admin_models,
    admin_queues,
    chat,
    completions,
    docs,
    health,
    models,
    programs,
    responses,
)


def create_app(settings: Settings | None = None) -> Flask:
    """The HTTP API over `settings` (None: the process's own). Starts no thread and opens no connection: that comes with
    the first request, after any fork. Raises ConfigurationError."""
    app = Flask("genpool", static_folder=None, template_folder=str(Path(__file__).with_name("templates")))
    app.url_map.merge_slashes = False
    settings = settings if settings is not None else load_settings()
    ring = KeyRing(settings)
    node = make_node(settings)
    app.extensions[EXTENSION] = node
    register_request_ids(app)
    register_errors(app)
    register_metrics(app, node)
    register_auth(app, ring, pending_per_key=settings.limits.pending_per_key)
    for module in (
        responses,
        chat,
        completions,
        models,
        programs,
        admin_model_rows,
        admin_models,
        admin_queues,
        health,
        docs,
    ):
        app.register_blueprint(module.blueprint)
    return app
