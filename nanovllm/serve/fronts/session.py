"""Defines the engine's side of the channel to one front."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from msgspec import DecodeError

from nanovllm.llm import LLM
from nanovllm.serve.beams import beam_completion
from nanovllm.serve.engine_calls import EngineCalls, StepSizes
from nanovllm.serve.fronts.channel import Channel, FromEngine, decode_from_front, decode_request
from nanovllm.serve.replicas.messages import NewRequest
from nanovllm.serve.replicas.replica import Replica

logger = logging.getLogger("nanovllm")


class Session(Replica):
    """Serves one front. One thread reads the front's messages. Another thread sends outputs and errors."""

    orders_by_id = False  # ids of several fronts do not show which request came first, so the engine sets the order

    def __init__(self, engine: LLM, sizes: StepSizes, on_failure: Callable[[], None], channel: Channel):
        self.attach(engine)
        self._channel, self._on_failure, self._calls = channel, on_failure, EngineCalls(engine, sizes)
        for work in (self._carry_out, self._report):
            threading.Thread(target=work, name="nanovllm-session", daemon=True).start()

    def _carry_out(self) -> None:
        try:
            while True:
                message = decode_from_front(self._channel.receive())
                if message.problem:  # the front has a problem after its start, so it ends, and is restarted
                    logger.error("an HTTP process can't continue: %s", message.problem)
                self._submit(self._decoded(message.requests))
                if message.discarded:
                    self.discard(message.discarded)
                for request_id in message.aborted:
                    self.abort(request_id)
                if message.calls:
                    self._channel.send(FromEngine(results=[self._result(*call) for call in message.calls]))
        except OSError:
            pass  # the front has ended
        except Exception:
            logger.exception("a message from a front can't be processed, and the front is restarted")
        finally:
            self.discard({*self._requests, *self._in_grammar_thread})
            self.close()
            self._channel.close()  # ends the front if it still runs
            with suppress(RuntimeError):  # the engine was closed
                self._calls.stop_recording()

    def _result(self, number: int, name: str, arguments: list[Any]) -> tuple[int, Any, str]:
        try:
            result = getattr(self._calls, name)(*arguments)
            return number, _encodable(result) if isinstance(result, str) else result, ""
        except Exception as error:  # the engine was closed, or the call has failed: other calls go on
            return number, None, _as_text(error)

    def _make_request(self, new: NewRequest) -> Any:  # a beam search is no CompletionRequest
        if new.beams is None:
            return super()._make_request(new)
        prompt, processor = new.prompt(self.engine.config), self.engine.input_processor
        request = beam_completion(processor, prompt, new.beams, new.priority, new.kind)
        processor.with_adapters([request], new.lora_request)
        request.request_id = request.group[0].request_id = new.request_id
        return request

    def _decoded(self, requests: Iterable[tuple[int, bytes]]) -> Iterator[NewRequest]:
        """Yield the requests that can be decoded. For a request that can't be decoded, report an error."""
        for request_id, data in requests:
            try:
                yield decode_request(data)
            except DecodeError as error:
                self._report_error(request_id, error)

    def _report(self) -> None:
        try:
            for deltas, finals, errors in self.new_reports():
                named = [(request_id, type(error).__name__, _as_text(error)) for request_id, error in errors]
                try:
                    self._channel.send(FromEngine(deltas, finals, named))
                except OSError:
                    raise
                except Exception:
                    self._send_singly(FromEngine(deltas, finals, named))
        except OSError:
            pass  # the front has ended
        except Exception as error:  # the engine has failed, and no caller may wait forever
            if not self.is_closed:
                self._channel.send(FromEngine(failure=repr(error.__cause__ or error)))
                self._on_failure()

    def _send_singly(self, message: FromEngine) -> None:
        """Send a message's outputs one by one, because the whole message could not be encoded.

        An output that can't be encoded becomes an error.
        """
        parts = [(delta.request_id, FromEngine(deltas=[delta])) for delta in message.deltas]
        parts += [(final.request_id, FromEngine(finals=[final])) for final in message.finals]
        for request_id, part in parts:
            try:
                self._channel.send(part)
            except OSError:
                raise
            except Exception as error:
                logger.error("an answer can't be sent to its front", exc_info=error)
                self.discard([request_id])
                message.errors.append((request_id, "RuntimeError", _as_text(error)))
        self._channel.send(FromEngine(errors=message.errors))


def _as_text(error: Exception) -> str:
    return _encodable(str(error))


def _encodable(text: str) -> str:
    """Replace unpaired surrogates, which can't be sent."""
    return text.encode(errors="replace").decode()
