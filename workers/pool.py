"""The worker's pool. Generations do not run in it: its size is how many of them may be in flight at once.

Other, short tasks of the same application run in one plain thread, so that the hub stays free.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from celery.concurrency.base import BasePool, apply_target


class _Applied:
    """Celery's view of a running auxiliary task."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def get(self) -> Any:
        return self._future.result()


class HostPool(BasePool):
    """`pool_grow` and `pool_shrink` change the generations in flight; `on_resize` is told by how many."""

    task_join_will_block = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_resize: Callable[[int], None] = lambda _: None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="genpool-task")

    def grow(self, n: int = 1) -> None:
        """Allow `n` more generations in flight."""
        self.limit += n
        self.on_resize(n)

    def shrink(self, n: int = 1) -> None:
        """Allow `n` fewer; running ones finish. At least one stays allowed."""
        n = min(n, self.limit - 1)
        self.limit -= n
        self.on_resize(-n)

    def on_apply(
        self,
        target: Any,
        args: Any = None,
        kwargs: Any = None,
        callback: Any = None,
        accept_callback: Any = None,
        **_: Any,
    ) -> _Applied:
        """Run an auxiliary task."""
        future = self._executor.submit(apply_target, target, args, kwargs, callback, accept_callback)
        return _Applied(future)

    def on_stop(self) -> None:
        """Let auxiliary tasks finish."""
        self._executor.shutdown(wait=True)

    def on_terminate(self) -> None:
        """Drop auxiliary tasks that have not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)
