"""Reads batches ahead of the step loop in threads. What is read and in which order doesn't depend on the threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from bessemer.data.dataset import Batch, Dataset

__all__ = ["Reader"]


class Reader:
    """Iterates over the batches of the id lists in `wanted`, in their order.

        with Reader(dataset, ([0, 1], [2, 3]), workers=1) as reader:
            for batch in reader: ...

    With `workers` threads up to 2 x workers batches are ready or under way; `wanted` may be endless and is only drawn
    from in the caller's thread. `workers` = 0 reads in the caller. An error of a read is raised at its batch.
    """

    def __init__(self, dataset: Dataset, wanted: Iterable[Sequence[int]], workers: int) -> None:
        if workers < 0:
            raise ValueError(f"workers must be at least 0, not {workers}")
        self._dataset = dataset
        self._wanted = iter(wanted)
        self._depth = 2 * workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="bessemer-data") if workers else None
        self._ahead: deque[Future[Batch]] = deque()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._pool is None:
            return self._dataset.batch(next(self._wanted))
        while len(self._ahead) < self._depth:
            try:
                ids = next(self._wanted)
            except StopIteration:
                break
            self._ahead.append(self._pool.submit(self._dataset.batch, ids))
        if not self._ahead:
            raise StopIteration
        return self._ahead.popleft().result()

    def close(self) -> None:
        """Ends the threads, dropping what was read ahead; iterating further raises StopIteration."""
        self._wanted = iter(())
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
