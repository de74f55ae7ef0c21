"""Which devices a worker sees that Celery itself started."""

from __future__ import annotations

from tests.integration.celery_process import Site


def test_a_worker_that_celery_started_sees_its_models_device(fresh_site: Site) -> None:
    """The first of those that the catalogue gives to replicas, and says so; unless the variable is there already."""
    fresh_site.env |= {"GENPOOL_MODELS__TINY__DEVICE": "3;4"}
    fresh_site.env.pop("CUDA_VISIBLE_DEVICES", None)
    fresh_site.worker()
    assert [rank["device"] for rank in fresh_site.ranks()] == ["3"]
    fresh_site.env |= {"CUDA_VISIBLE_DEVICES": "7"}
    fresh_site.worker("-n", "other@%h")
    assert sorted(rank["device"] for rank in fresh_site.ranks()) == ["3", "7"]


def test_one_process_cannot_be_on_two_devices(fresh_site: Site) -> None:
    """Refused by name before anything loads."""
    fresh_site.env |= {"GENPOOL_MODELS__TINY__DEVICE": "0", "GENPOOL_MODELS__OTHER__DEVICE": "1"}
    fresh_site.env.pop("CUDA_VISIBLE_DEVICES", None)
    done = fresh_site.celery("worker", "-Q", "tiny,other")
    assert done.returncode == 1
    assert "Its models are on different devices (0, 1)" in done.stderr
    assert "Traceback" not in done.stderr
