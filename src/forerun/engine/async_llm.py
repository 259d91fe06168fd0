"""`AsyncLLM`: an `LLM` for asynchronous callers. One thread of its own runs the rounds of all requests together."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any

from forerun.engine.llm import LLM, Prompt
from forerun.errors import EngineError
from forerun.types import Output, Piece, SamplingParams


class AsyncLLM:
    """Wraps an `LLM`, which nobody else may use meanwhile. Requests of all tasks are batched continuously.

    Use it as an async context manager, or call `close`.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._wake = threading.Event()
        self._closed = False
        self._streams: dict[Any, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Piece | EngineError]]] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> Output:
        """Answer one prompt. Cancelling the task aborts the request. Raises EngineError if it failed on the way."""
        output = None
        async for piece in self.stream(prompt, params, raw=raw, template_args=template_args):
            output = piece.output
        assert output is not None
        if output.finish_reason == "error":
            raise EngineError(f"the answer failed: {output.error}")
        return output

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[Piece]:
        """Yield an answer piece by piece; the last one carries the Output. Closing it aborts the request."""
        if self._closed:
            raise EngineError("this AsyncLLM is closed")
        loop = asyncio.get_running_loop()
        ids = self._llm.encode(prompt, raw=raw, template_args=template_args)
        queue: asyncio.Queue[Piece | EngineError] = asyncio.Queue()
        job = await loop.run_in_executor(None, self._llm.submit, ids, params)
        with self._lock:
            self._streams[job] = (loop, queue)
        self._wake.set()
        try:
            while True:
                piece = await queue.get()
                if isinstance(piece, EngineError):
                    raise piece
                yield piece
                if piece.output is not None:
                    return
        finally:
            with self._lock:
                self._streams.pop(job, None)
            if job.output is None:
                await asyncio.shield(loop.run_in_executor(None, self._llm.abort, job))

    async def close(self) -> None:
        """End all requests and stop the thread."""
        self._closed = True
        self._wake.set()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            while self._streams and not self._closed:
                try:
                    self._llm.step()
                    failure = None
                except Exception as error:
                    failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
                self._hand_out(failure)
        self._hand_out(EngineError("this AsyncLLM was closed"))

    def _hand_out(self, failure: EngineError | None) -> None:
        """Pass new pieces, or a failure, to the tasks that wait for them."""
        with self._lock:
            for job, (loop, queue) in list(self._streams.items()):
                while job.pieces:
                    loop.call_soon_threadsafe(queue.put_nowait, job.pieces.popleft())
                if failure is not None:
                    loop.call_soon_threadsafe(queue.put_nowait, failure)
                if failure is not None or job.output is not None:
                    del self._streams[job]
