"""Monitor a model's attention during training."""

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pandas as pd
import torch
from torch import nn

from semdiag.capturing import attention_calls as hooks
from semdiag.capturing.attention_calls import AttentionCall, watch_attention
from semdiag.capturing.audit import Audit
from semdiag.capturing.batches import as_whole_number, as_whole_numbers
from semdiag.capturing.padding import Padding
from semdiag.capturing.patches import undone
from semdiag.capturing.private_parts import broken_parts, remarks_on_parts
from semdiag.measuring.calls import monitor_heads
from semdiag.measuring.calls.counted_rows import Arrivals, Tensors
from semdiag.measuring.calls.monitor_alarms import (
    Alarm,
    AlarmError,
    Faults,
    MonitorLog,
    Watch,
    rules_of,
    summary_of,
    warn,
)
from semdiag_files import InputError


class _Outputs:
    """Tables of a monitor, and the loggers that get the numbers of its heads."""

    def __init__(
        self,
        path: Path | None,
        tensorboard: Any,
        log: Callable[[dict[str, float], int], object] | None,
        k: Sequence[int],
        first_step: int,
    ) -> None:
        self._k = k
        self._log = log
        self._tensorboard = tensorboard
        self._folder = isinstance(tensorboard, Path | str)  # else the writer is the user's
        self._writer: Any = None
        self.layers = MonitorLog(path, monitor_heads.columns(k), first_step)
        beside = None if path is None else path.with_name(f"{path.stem}-heads{path.suffix}")
        self.heads = MonitorLog(beside, monitor_heads.head_columns(k), first_step)
        self.layers.warn_of_later_steps(first_step)

    def open(self) -> None:
        self.layers.open()
        self.heads.open()
        self._writer = self._tensorboard
        if self._folder:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise InputError(
                    "TensorBoard is not installed. Install it with: pip install tensorboard."
                ) from None
            self._writer = SummaryWriter(str(self._tensorboard))

    def add(self, step: int, rows: list[dict[str, Any]], heads: list[dict[str, Any]], faults: Faults) -> None:
        """Keep and send the rows of a step; report failures to ``faults`` and go on."""
        if self._writer is not None or self._log is not None:
            with faults.reporting():
                numbers = monitor_heads.scalars(heads, self._k)
                for name, value in numbers.items() if self._writer is not None else ():
                    self._writer.add_scalar(name, value, step)
                if self._log is not None:
                    self._log(numbers, step)
        for log, more in ((self.layers, rows), (self.heads, heads)):
            with faults.reporting():
                log.add(more)

    def close(self, faults: Faults) -> None:
        for log in (self.layers, self.heads):
            with faults.reporting():
                log.close()
        writer = self._writer
        self._writer = None
        if self._folder and writer is not None:
            with faults.reporting():
                writer.close()


_COMPILED = (
    "Hooks on a module inside a compiled one do nothing, even with fullgraph: give the monitor the compiled "
    "model, Monitor(torch.compile(model))."
)


class _Looking:
    """What a look has seen so far; numbers that come from a GPU are described in a thread of their own."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.audit = Audit()
        self.rows: list[dict[str, Any]] = []
        self.heads: list[dict[str, Any]] = []
        self.parts: dict[str, str] = {}
        self.seen: bool | None = None  # whether attention was seen; None if it cannot look
        self.arrivals = Arrivals(polls=False)
        self.described: Future[None] | None = None  # in a thread; None where all numbers came from the CPU

    def follow(self) -> None:
        """Describe what is still on its way."""
        if len(self.arrivals):
            threads = ThreadPoolExecutor(1)
            self.described = threads.submit(self.arrivals.settle)
            threads.shutdown(wait=False)


class Monitor:
    """Monitors dispersion, separation, stability and entropy of a model's attention during training.

    At every ``every``-th forward call in training mode, it scores a few query rows of each attention call: 8 (or
    ``queries``) random queries of 4 random samples, all heads. Outputs, gradients and random numbers equal those
    of training without a monitor, to the last bit. It never stops training: if it fails, it warns.

    For compiled training, give it the compiled model: ``Monitor(torch.compile(model))``. The forward calls of
    looks then run uncompiled, with other rounding (about 1e-7). Several threads may train the model: a look
    belongs to one, and others' forward calls are only counted. Under torch.distributed, every rank starts one.

    Two tables grow. ``table`` has one row per step, attention layer and occurrence of the layer in that step:
    ``step, layer, module, occurrence, rows`` (scored queries that are not padding), and medians over these rows of
    ``keys``, ``dispersion`` (δ, nats), ``separation`` (Δ, nats; empty if nothing is dropped), ``xi`` (the local
    stability 2p(1 − p) of the largest weight p, docs/theory.md#local-stability) and ``entropy`` (nats); for each k
    also ``dispersion_kK``, ``separation_kK``, ``weight_kept_kK`` as if the K largest scores were kept.
    ``heads`` has one row per head of each of these: extremes over the same rows, defined in
    :func:`~semdiag.measuring.calls.monitor_heads.describe_heads`, and the rules that it crosses (``alarm``).
    On a GPU no step waits for a look: it is written, and alarms, in a later forward call or at the end.

    Args:
        model: module whose forward calls are counted; any that :func:`semdiag.watch_attention` understands.
        every: number of forward calls in training mode from one look to the next; the first call is looked at.
        k: number of heavy hitters for the counterfactual columns, or several numbers.
        path: ``.csv`` or ``.parquet`` file, continued if it exists; rows of heads go to ``NAME-heads`` beside it.
        tensorboard: a directory for TensorBoard, or a SummaryWriter.
        log: function of a dictionary of numbers and the step, like ``wandb.log``. Keys are
            ``attention/layer_3/head_5/max_logit`` and, over the heads of a layer,
            ``attention/layer_3/max_logit/max``, ``min`` and ``median``; TensorBoard gets the same.
        rows: ``sample``, or ``all`` to look at every query row, without storing scores.
        alarm: for each quantity (a column of ``heads``) a threshold: 50, ``(0.05, "below")``, ``(50, 100)`` for a
            warning and a severe alarm, ``(0.5, 0.05, "below")``; or a change within so many steps: ``("halves",
            500)`` or ``("doubles", 500, 0.5)``. The last number is the floor, above which the larger of the two
            values must lie: by default a tenth of the largest possible value; if there is none, 0.1 nats, and 0
            in other units. Each head alarms once per rule.
        on_alarm: ``warn`` (one warning per look), ``raise`` (:class:`~.monitor_alarms.AlarmError` after the
            forward call), or a function of each :class:`~.monitor_alarms.Alarm`.
        accumulation: forward calls in training mode per step, of which only the first is looked at.
        ranks: with ``all``, under torch.distributed, each look waits for all ranks, which then have the same rows
            and alarms; rank 0 writes, logs and warns. With ``own``, each rank is on its own.
        seed: random seed for the choice of samples and queries.
        queries: number of queries per sample; medians of more rows vary less from look to look.
        first_step: number of the first step, for resumed training: its rows replace those that the file has from
            this step on, with a warning.

    Raises:
        InputError: if an argument is invalid, no row can ever cross a rule, the file cannot be written or
            continued, TensorBoard is not installed, or (on start) the model has no attention that can be watched
            or was compiled in place, or another rank has no monitor or one with other arguments.

    Example:
        >>> from semdiag_models import Encoder, ModelConfig
        >>> encoder = Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=2)).train()
        >>> with Monitor(encoder, every=2) as monitor:
        ...     for _ in range(3):
        ...         loss = encoder(torch.tensor([[0, 1, 1, 0]])).sum()
        >>> monitor.table[["step", "layer", "rows"]].values.tolist()
        [[0, 0, 4], [0, 1, 4], [2, 0, 4], [2, 1, 4]]
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 200,
        *,
        k: int | Sequence[int] = (),
        path: Path | str | None = None,
        tensorboard: Any = None,
        log: Callable[[dict[str, float], int], object] | None = None,
        alarm: Mapping[str, Any] | None = None,
        on_alarm: str | Callable[[Alarm], object] = "warn",
        rows: str = "sample",
        accumulation: int = 1,
        ranks: str = "all",
        seed: int = 0,
        first_step: int = 0,
        queries: int = 8,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"A monitor watches a module, like Encoder(config). Got {model!r}.")
        if not any(model.children()) and type(model) in vars(nn).values():
            raise InputError(f"{type(model).__name__} has no attention to watch.")
        self.model = model
        self.every = as_whole_number(every, "every", 1)
        self.k = tuple(dict.fromkeys(as_whole_numbers(k, "k", 1)))
        if rows not in ("sample", "all"):
            raise InputError(f'rows must be "sample" or "all". Got {rows!r}.')
        if log is not None and not callable(log):
            raise InputError(f"log must be a function of a dictionary and the step, like wandb.log. Got {log!r}.")
        looked_at = as_whole_number(queries, "queries", 1)
        self._queries = None if rows == "all" else looked_at
        self._watch = Watch(rules_of(alarm, self.k, self.every))
        if not (on_alarm in ("warn", "raise") or callable(on_alarm)):
            raise InputError(f'on_alarm must be "warn", "raise" or a function of the alarm. Got {on_alarm!r}.')
        self._on_alarm = on_alarm
        self.alarms: list[Alarm] = []
        self._accumulation = as_whole_number(accumulation, "accumulation", 1)
        self._micro = 0
        self.step = self._first_step = as_whole_number(first_step, "first_step", 0)
        self.seconds = 0.0
        self._ranks = monitor_heads.Ranks(ranks)
        self._reduction = monitor_heads.Reduction()
        self._generator = torch.Generator().manual_seed(as_whole_number(seed, "seed", 0) + self._ranks.rank)
        if self._ranks.rank:  # only rank 0 writes
            path = tensorboard = log = None
        self._outputs = _Outputs(None if path is None else Path(path), tensorboard, log, self.k, self.step)
        self._faults = Faults()
        self._hooks: hooks.Hooks | None = None
        self._look = ExitStack()
        self._looked_at: int | None = None
        self._looker: threading.Thread | None = None  # thread of the current look
        self._forwards: set[int] = set()  # threads that run the model
        self._turn = threading.RLock()  # held while counting a call and starting a look
        self._now = _Looking(self.step)
        self._behind: _Looking | None = None  # a look whose numbers are on their way
        self._last: list[dict[str, Any]] = []  # rows of heads in the last look
        self._padding = Padding(model)

    @property
    def table(self) -> pd.DataFrame:
        """All rows so far, including those of a continued file."""
        self._catch_up()
        return self._outputs.layers.table()

    @property
    def heads(self) -> pd.DataFrame:
        """All rows of heads so far, including those of a continued file."""
        self._catch_up()
        return self._outputs.heads.table()

    def summary(self) -> str:
        """Return every alarm, and the extremes of the last look, as plain text."""
        self._catch_up()
        return summary_of(self._last, self.alarms, monitor_heads.monitored_columns(self.k))

    def begin_step(self, step: int) -> None:
        """Set the step that the next forward call belongs to, if the training loop knows better."""
        with self._turn:
            self.step = step
            self._micro = 0

    def start(self) -> Self:
        """Start counting and looking, and return the monitor; ``with Monitor(…)`` calls it."""
        if self._hooks is not None:
            return self
        if getattr(self.model, "_compiled_call_impl", None) is not None:
            raise InputError(
                "A monitor cannot look into a module that was compiled in place, by its compile(): its hooks "
                "would be compiled too. Give it the compiled model: Monitor(torch.compile(model))."
            )
        with self._faults.reporting():  # tried now, not in the middle of training
            for remark in remarks_on_parts(broken_parts(self.model)):
                self._faults.warn_once(remark.text, f"The monitor of a training: {remark.text}.")
        agreed = {"every": self.every, "k": self.k, "accumulation": self._accumulation, "first_step": self.step}
        try:
            self._outputs.open()
            self._ranks.open({**agreed, "alarm": self._watch.rules, "raise": self._on_alarm == "raise"})
            self._hooks = hooks.Hooks(self.model, self._before, self._after)
            self._hooks.put_on()
            return self
        except BaseException:
            self._leave()
            raise

    def stop(self) -> None:
        """Restore the model; rows remain readable."""
        begun = self._hooks is not None
        reports = False
        with self._faults.reporting():
            reports = self._ranks.reports  # before this process leaves the others
        unseen = begun and self.step == self._first_step and not self._micro
        try:
            self._catch_up()
        finally:
            self._leave()
        with self._faults.reporting():
            never = {rule.quantity for rule in self._watch.rules} - self._watch.met
            if begun and self._last and never and reports:
                warn(f"No row had a value of {', '.join(sorted(never))}: these alarms watched nothing.")
            if unseen:
                warn(f"The monitor saw no forward call in training mode (model.train()). {_COMPILED}")

    def _leave(self) -> None:
        with undone(self._undo):
            pass

    def _undo(self) -> None:
        close_outputs = partial(self._outputs.close, self._faults)
        for undo in (self._take_off, self._look.close, self._written, self._ranks.leave, close_outputs):
            with self._faults.reporting():
                undo()
        self._looked_at = None
        self._looker = None

    def _take_off(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.stop()
        finally:
            self._leave()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            _warn_while_compiling()
            return
        alarms: list[Alarm] = []
        with self._faults.reporting():
            self._forwards.add(threading.get_ident())
            if not model.training:
                return
            alarms = self._arrived()
        self._report_alarms(alarms)
        with self._faults.reporting():
            self._begin(model, (*args, *kwargs.values()), (args, kwargs))

    def _arrived(self) -> list[Alarm]:
        """Write the rows of the last look if its numbers are there or another look is due; return its alarms."""
        if (behind := self._behind) is None:
            return []
        look_is_due = not self._micro and self.step % self.every == 0
        due = look_is_due or self._ranks.joined or behind.described is None or behind.described.done()
        return self._written() if due else []

    def _begin(self, model: nn.Module, inside: tuple[Any, ...], arguments: Any) -> None:
        """Count a forward call, and start to look at it if it is its turn."""
        here = threading.current_thread()
        with self._turn:
            step = self.step
            first = self._micro == 0
            self._micro = (self._micro + 1) % self._accumulation
            self.step += self._micro == 0
            if self._looker is not None and self._looker is not here and self._looker.is_alive():
                return
            interrupted = self._look
            self._look = ExitStack()
            self._looked_at = step
            self._looker = here if first and step % self.every == 0 else None
        with self._faults.reporting():
            interrupted.close()
        if self._looker is here:
            now = self._now = _Looking(step)
            with self._faults.reporting(), ExitStack() as look:
                look.enter_context(self._padding.watched(arguments))
                watch = watch_attention(model, partial(self._reduce, look=now), inside=inside)
                now.audit = look.enter_context(watch)
                self._look = look.pop_all()
                now.seen = False

    def _after(self, model: nn.Module, inputs: object, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        alarms: list[Alarm] = []
        with self._faults.reporting():
            self._forwards.discard(threading.get_ident())
            if self._looker is not threading.current_thread():
                return
            step = self._looked_at
            self._looked_at = None
            self._looker = None
            with self._faults.reporting():
                self._look.close()
            if step is not None:
                alarms = self._end(step, output is not None)
        self._report_alarms(alarms)

    def _end(self, step: int, complete: bool) -> list[Alarm]:
        """End the look at a forward call; return its alarms if all of its numbers are there."""
        if not complete:  # the forward pass raised an exception
            self._ranks.fail(step)
            return []
        self._now.parts = dict(self._ranks.parts)
        self._now.follow()
        self._behind = self._now
        return self._written() if self._now.described is None else []

    def _catch_up(self) -> None:
        """Write the rows of the last look, and report its alarms, once its numbers have arrived."""
        self._report_alarms(self._written())

    def _written(self) -> list[Alarm]:
        """Write the rows of the last look if they are not written yet; return its alarms."""
        with self._faults.reporting():
            with self._turn:
                look = self._behind
                self._behind = None
            if look is not None:
                return self._finish(look)
        return []

    def _reduce(self, call: AttentionCall, look: _Looking) -> None:
        with self._faults.reporting():
            if self._looker is not threading.current_thread() and threading.get_ident() in self._forwards:
                return  # another thread's forward pass
            start = time.perf_counter()
            look.seen = True
            audit = Audit()
            call = self._padding.marked(call, audit)
            self._faults.name_remarks(audit)  # masks that could not be matched
            self._ranks.part(self.model, call.module)
            place = {"step": look.step, "layer": call.layer, "module": call.module, "occurrence": call.occurrence}
            rows = monitor_heads.sampled_rows(call, self.k, self._generator, self._queries)

            def receive(tensors: Tensors) -> None:
                look.rows.append(place | monitor_heads.describe_layer(tensors, self.k))
                of_heads = monitor_heads.describe_heads(tensors, self.k, self._watch.logit)
                look.heads += [place | row for row in of_heads]

            look.arrivals.send(monitor_heads.looked_at(rows), receive)
            self.seconds += time.perf_counter() - start

    def _finish(self, look: _Looking) -> list[Alarm]:
        start = time.perf_counter()
        self._faults.begin()
        failed = None if look.described is None else look.described.exception()  # waits
        this_rank = monitor_heads.Look(look.step, look.rows, look.heads, look.parts)
        looks = self._ranks.together(this_rank)  # all ranks take part, whatever each of them saw
        rows, heads = self._reduction(looks)
        if look.seen is False:
            self._faults.warn_once("no attention", f"No attention was captured in step {look.step}.")
        if look.seen is not None:
            self._faults.name_missed(look.audit)
            self._faults.name_remarks(look.audit, "private-part")
        self._last = heads or self._last
        alarms = self._watch.look(heads)
        self.alarms += alarms
        self._outputs.add(look.step, rows, heads, self._faults)
        with self._faults.reporting():
            if failed is not None:
                raise failed
        self._faults.end()
        self.seconds += time.perf_counter() - start
        return alarms

    def _report_alarms(self, alarms: list[Alarm]) -> None:
        if not alarms:
            return
        if callable(self._on_alarm):
            for alarm in alarms:
                self._on_alarm(alarm)
        elif self._on_alarm == "raise":
            raise AlarmError(alarms[0], len(alarms) - 1)
        else:
            with self._faults.reporting():
                self._warn_of(alarms)

    def _warn_of(self, alarms: list[Alarm]) -> None:
        if self._ranks.reports:
            further = f" and {len(alarms) - 1} more" if len(alarms) > 1 else ""
            warn(f"{alarms[0]}{further}")


def _warn_while_compiling() -> None:
    warnings.warn(f"A monitored module is being compiled. {_COMPILED}", stacklevel=2)


_warn_while_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run while compiling, not compiled
