"""Alarms, faults and files of a training monitor: rules that heads cross, warnings, and logged rows."""

import math
import os
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from semdiag.capturing.audit import Audit, Remark, Skipped, failure
from semdiag.capturing.pretrained import first_line
from semdiag.measuring.calls.monitor_heads import LOGIT, head_columns, head_key, quantities_among
from semdiag.measuring.metrics import NATS, metric_columns, metric_of, monitored
from semdiag.measuring.table import csv_text, from_csv_text, read_parquet
from semdiag.measuring.words import counted
from semdiag_files import InputError, RunLock, open_file, visible

WARNING = "WARNING"
SEVERE = "SEVERE"
ABOVE = "above"
BELOW = "below"
CHANGES = "halves", "doubles"
_SPELLINGS = (
    '50, (0.05, "below"), (50, 100) for a warning and a severe alarm, (0.5, 0.05, "below"), ("halves", 500): '
    'within 500 steps, or ("doubles", 500, 0.5): to a value above 0.5'
)


@dataclass(frozen=True)
class Alarm:
    """First crossing of a threshold by a head's quantity.

    Example:
        >>> print(Alarm(400, 3, 5, "max_logit", 61.25, "SEVERE", "above 50"))
        alarm band=SEVERE step=400 layer=3 head=5 quantity=max_logit value=61.25 rule="above 50"
    """

    step: int
    layer: int  # position of the attention layer
    head: int
    quantity: str  # a column of the monitor's table of heads
    value: float  # value of the quantity
    band: str  # ``WARNING`` or ``SEVERE``
    rule: str  # what was crossed: ``above 50``, ``below 0.05``, ``doubles above 0.5 within 500``
    occurrence: int = 0  # which call of the layer in that step

    def __str__(self) -> str:
        place = f"step={self.step} layer={self.layer} head={self.head}"
        crossing = f'quantity={self.quantity} value={self.value:.6g} rule="{self.rule}"'
        return f"alarm band={self.band} {place} {crossing}"


class AlarmError(RuntimeError):
    """Raised when a rule is crossed, with ``on_alarm="raise"``; ``alarm`` is the first alarm."""

    def __init__(self, alarm: Alarm, further: int) -> None:
        super().__init__(f"{alarm}{f' and {further} more' if further else ''}")
        self.alarm = alarm


@dataclass(frozen=True)
class AlarmRule:
    """A threshold of a quantity, or a change of it."""

    quantity: str  # a column of the table of heads
    band: str  # ``WARNING`` or ``SEVERE``, the alarm's band
    side: str  # ``above``, ``below``, ``halves`` or ``doubles``
    threshold: float  # a value; for a change, the number of steps within which it happens
    floor: float = 0.0  # the larger of the two values of a change must lie above it

    @property
    def text(self) -> str:
        """The rule in words."""
        if self.side not in CHANGES:
            return f"{self.side} {self.threshold:g}"
        return f"{self.side} above {self.floor:g} within {self.threshold:g}"

    def crossed(self, value: float, earlier: Iterable[float]) -> bool:
        """Return whether a value crosses the rule, after earlier values within the steps of a change."""
        if self.side == ABOVE:
            return value > self.threshold
        if self.side == BELOW:
            return value < self.threshold
        positive = [old for old in earlier if old > 0]
        if self.side == "halves":
            return value < max(positive, default=0) / 2 and max(positive, default=0) > self.floor
        return value > 2 * min(positive, default=math.inf) and value > self.floor


def rules_of(alarm: Mapping[str, Any] | None, k: Sequence[int], every: int) -> list[AlarmRule]:
    """Return the rules of ``Monitor(alarm=…)``, severe ones first."""
    if alarm is not None and not isinstance(alarm, Mapping):
        raise InputError(f"alarm takes a dictionary from quantities to thresholds. Got {alarm!r}.")
    rules = [rule for quantity, setting in (alarm or {}).items() for rule in _rules(quantity, setting, k, every)]
    return sorted(rules, key=lambda rule: rule.band != SEVERE)


def _rules(quantity: str, setting: Any, k: Sequence[int], every: int) -> list[AlarmRule]:
    columns = metric_columns(monitored(), k)
    if quantity not in columns:
        raise _unknown_quantity(quantity, list(columns))
    parts = (tuple(setting) or (None,)) if isinstance(setting, tuple | list) else (setting,)
    metric, limit = columns[quantity]
    low, high = metric.limits_at(limit)
    if len(parts) in (2, 3) and isinstance(parts[0], str) and parts[0] in CHANGES:
        floor = 0.1 if metric.unit == NATS else 0.0
        if math.isfinite(high):
            floor = high / 10  # a weight that goes from 0.019 to 0.04 is no alarm
        return [_change(quantity, parts[0], parts[1], every, parts[2] if len(parts) == 3 else floor, high)]
    side, numbers = _thresholds(quantity, setting, parts)
    for x in numbers:
        if x >= high if side == ABOVE else x <= low:
            raise InputError(f"alarm: {quantity} is never {side} {x:g}: it lies between {low:g} and {high:g}.")
    return [AlarmRule(quantity, band, side, float(x)) for band, x in zip((WARNING, SEVERE), numbers, strict=False)]


def _unknown_quantity(quantity: str, columns: Sequence[str]) -> InputError:
    metric_and_k = metric_of(str(quantity))
    hint = f"Known: {', '.join(columns)}."
    if metric_and_k is not None and metric_and_k[0].by_head:
        hint = "Add that k to the monitor's k."
    return InputError(f"alarm: there is no quantity {quantity!r}. {hint}")


def _change(quantity: str, side: str, steps: Any, every: int, floor: Any, high: float) -> AlarmRule:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < every:
        raise InputError(
            f"alarm: {quantity} is looked at every {counted(every, 'step')}; what {side} within {steps!r} is "
            "missed."
        )
    if not _is_number(floor) or not 0 <= floor < high:
        raise InputError(
            f"alarm: the floor of a change of {quantity} must be a number of at least 0 and below {high:g}. "
            f"Got {floor!r}."
        )
    return AlarmRule(quantity, WARNING, side, steps, float(floor))


def _thresholds(quantity: str, setting: Any, parts: tuple[Any, ...]) -> tuple[str, list[Any]]:
    """Read one or two numbers, optionally followed by the side on which they are crossed."""
    *numbers, side = parts if isinstance(parts[-1], str) else (*parts, ABOVE)
    legal = len(numbers) in (1, 2) and side in (ABOVE, BELOW)
    if not legal or not all(_is_number(x) and math.isfinite(x) for x in numbers):
        raise InputError(f"alarm: a rule must look like {_SPELLINGS}. Got {quantity}: {setting!r}.")
    if len(numbers) == 2 and not (numbers[0] < numbers[1] if side == ABOVE else numbers[0] > numbers[1]):
        raise InputError(f"alarm: the warning must come before the severe threshold. Got {quantity}: {setting!r}.")
    return side, numbers


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


@dataclass
class Watch:
    """Records which heads have crossed which rules."""

    rules: Sequence[AlarmRule]  # severe ones first
    # quantity, band, side, layer, occurrence and head of every alarm so far
    crossed: set[tuple[Any, ...]] = field(default_factory=set)
    # steps and values that a change compares with, by rule, layer, occurrence and head
    history: dict[tuple[Any, ...], deque[tuple[int, float]]] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)  # quantities with a value in some row

    @property
    def logit(self) -> float:
        """Score above which rows are counted: the lowest threshold of ``max_logit``, or 50."""
        limits = (rule.threshold for rule in self.rules if (rule.quantity, rule.side) == ("max_logit", ABOVE))
        return min(limits, default=LOGIT)

    def look(self, rows: Sequence[dict[str, Any]]) -> list[Alarm]:
        """Return the new alarms in the rows of one step."""
        alarms = []
        for row in rows:
            step = row["step"]
            place = (row["layer"], row["occurrence"], row["head"])
            bands: dict[str, str] = {}
            for rule in self.rules:
                if math.isnan(value := row[rule.quantity]):
                    continue
                self.met.add(rule.quantity)
                earlier = self.history.setdefault((rule, *place), deque())
                while earlier and step - earlier[0][0] > rule.threshold:
                    earlier.popleft()
                crossed = rule.crossed(value, [old for _, old in earlier])
                if rule.side in CHANGES:
                    earlier.append((step, value))
                if not crossed:
                    continue
                bands.setdefault(rule.quantity, rule.band)
                # a severe alarm says what the warning of the same head would
                marks = {(rule.quantity, band, rule.side, *place) for band in (rule.band, WARNING)}
                if not marks <= self.crossed:
                    self.crossed |= marks
                    layer, occurrence, head = place
                    alarms.append(Alarm(step, layer, head, rule.quantity, value, rule.band, rule.text, occurrence))
            row["alarm"] = " ".join(f"{quantity}:{band}" for quantity, band in bands.items())
        return sorted(alarms, key=lambda alarm: alarm.band != SEVERE)


def extremes_of(heads: pd.DataFrame) -> list[str]:
    """Return the first step at which each rule was crossed, and the extremes of a whole run, one per line."""
    rows = [{str(name): value for name, value in row.items()} for row in heads.to_dict("records")]
    if not rows:
        return ["no rows"]
    rows.sort(key=lambda row: int(row["step"]))
    looks = len({row["step"] for row in rows})
    lines = [f"{counted(looks, 'look')}, steps {rows[0]['step']} to {rows[-1]['step']}"]
    lines += _ends(rows, quantities_among(heads.columns), lambda row: f"{head_key(row)}, step {row['step']}")
    crossed: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for alarm in row["alarm"].split():
            # a severe head has crossed the threshold of the warning, too
            for name in dict.fromkeys((alarm.replace(SEVERE, WARNING), alarm)):
                crossed.setdefault(name, []).append(row)
    alarms = []
    for alarm, rows_of_alarm in crossed.items():
        number = counted(len({head_key(row) for row in rows_of_alarm}), "head")
        alarms.append(
            f"alarm {alarm}: {number}, first at step {rows_of_alarm[0]['step']}, {head_key(rows_of_alarm[0])}"
        )
    return [*(alarms or ["no alarm"]), *lines]


def summary_of(rows: Sequence[Mapping[str, Any]], alarms: Sequence[Alarm], quantities: Sequence[str]) -> str:
    """Return every alarm and the extremes of the last step, one per line."""
    if not rows:
        return "No step was looked at."
    last = rows[-1]["step"]
    last_rows = [row for row in rows if row["step"] == last]
    lines = [f"step {last}, {counted(len(last_rows), 'head')}:"]
    lines += [f"  {line}" for line in _ends(last_rows, quantities, head_key)]
    return "\n".join([*(map(str, alarms) if alarms else ["no alarm"]), *lines])


def _ends(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], place: Callable[[Mapping[str, Any]], str]
) -> list[str]:
    """Return the smallest and the largest value of each quantity, where first met; one number if all are alike."""
    lines = []
    for name in names:
        with_value = [row for row in rows if not math.isnan(row[name])]
        if not with_value:
            continue
        low, high = (end(with_value, key=lambda row: float(row[name])) for end in (min, max))
        texts = [f"{row[name]:.4g}" for row in (low, high)]
        heads = len({head_key(row) for row in with_value})
        if texts[0] != texts[1]:
            text = f"{texts[0]} ({place(low)}) to {texts[1]} ({place(high)})"
        else:
            text = f"{texts[0]} ({counted(heads, 'head') if heads > 1 else place(low)})"
        lines.append(f"{name}: {text}")
    return lines


_CANNOT_WRITE = "The monitor cannot write"
_NAMED = 3  # modules that a warning names


def warn(text: str, stacklevel: int = 3) -> None:
    """Warn, and only print where warnings are errors: a monitor never stops training."""
    try:
        warnings.warn(text, stacklevel=stacklevel)
    except Exception:
        with suppress(Exception):  # there may be no stream
            print(f"semdiag: {visible(text)}", file=sys.stderr)


class Faults:
    """Warns of each fault once; of a file that cannot be written, again after a success."""

    def __init__(self) -> None:
        self._faults: set[str] = set()
        self._noted: set[Remark | Skipped] = set()
        self._stuck = False  # whether the current look could not write

    def begin(self) -> None:
        """Start a look."""
        self._stuck = False

    def end(self) -> None:
        """End a look; after one that could write, a later failure to write is a new fault."""
        if not self._stuck:
            self._faults = {fault for fault in self._faults if not fault.startswith(_CANNOT_WRITE)}

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Warn of an exception in the context, and go on."""
        try:
            yield
        except Exception as error:
            with suppress(Exception):
                self._report(error)

    def _report(self, error: Exception) -> None:
        if isinstance(error, OSError):
            reason = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
            self._stuck = True
            self.warn_once(
                f"{_CANNOT_WRITE}: {type(error).__name__} {error.errno}",
                f"{_CANNOT_WRITE} ({reason}). Its rows stay in memory and are written as soon as possible.",
            )
        else:
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            fault = f"{type(error).__name__} {frame.f_code.co_filename}:{line}"
            self.warn_once(fault, f"The monitor of a training: {failure(error)}.")

    def name_remarks(self, audit: Audit, code: str = "") -> None:
        """Warn of each remark once, or of those with a code."""
        for remark in audit.remarks.keys() - self._noted:
            if code in ("", remark.code):
                self._noted.add(remark)
                warn(f"The monitor of {remark.module or 'a model'}: {remark.text}.")

    def name_missed(self, audit: Audit) -> None:
        """Warn once of attention without rows, with the reason."""
        missed: dict[str, list[str]] = {}
        for entry in audit.skipped.keys() - self._noted:
            self._noted.add(entry)
            missed.setdefault(f"{entry.operation}, {entry.reason}", []).append(entry.module or "the model itself")
        texts = []
        for why, modules in sorted(missed.items()):
            further = len(modules) - _NAMED
            names = ", ".join(sorted(modules)[:_NAMED]) + (f" and {further} more" if further > 0 else "")
            texts.append(f"{names} ({why})")
        if texts:
            warn(f"The monitor cannot see all attention: it has no rows for {'; '.join(texts)}.")

    def warn_once(self, fault: str, text: str) -> None:
        """Warn once of a fault, even if its text changes at every step."""
        if fault not in self._faults:
            self._faults.add(fault)
            warn(text, stacklevel=6)


class MonitorLog:
    """Rows that are added step by step: appended to a CSV file, or to a parquet file that is rewritten.

    A run that goes back to an earlier step, like a resumed one, replaces its rows from there on; a run that begins
    at step 0 is another run, whose rows follow.
    """

    def __init__(self, path: Path | None, columns: list[str], first_step: int) -> None:
        self.path = path
        self.columns = columns
        self._rows: list[dict[str, Any]] = []
        self._written = 0  # rows in the file
        self._size = 0  # bytes of the file after them
        self._earlier = pd.DataFrame(columns=columns)
        self._resumed_at = first_step  # 0: not resumed, or the rows from there on are replaced
        self._last_step = -math.inf  # last step of the last run in the table
        self._valid_lines: int | None = None  # rows of the file before those that are replaced
        self._lock: RunLock | None = None
        if path is None:
            return
        if path.suffix not in (".csv", ".parquet"):
            raise InputError(f"A monitor writes .csv or .parquet. Got {path}.")
        if not path.parent.is_dir():
            raise InputError(f"{path} cannot be written: there is no folder {path.parent}.")
        self.open()

    def warn_of_later_steps(self, first_step: int) -> None:
        """Warn if the file has the step at which a monitor starts."""
        if not self._last_step >= first_step:  # it is NaN if no step is a number
            return
        text = f"{self.path} goes up to step {self._last_step:g}, but this monitor starts at step {first_step}: "
        if first_step:
            text += "its rows from there on will be replaced."
        else:
            text += "its rows follow as another run's. Resume with Monitor(…, first_step=…), or name a new file."
        warnings.warn(text, stacklevel=4)

    def open(self) -> None:
        """Lock the file and read its rows; do nothing if the log is open."""
        if self.path is None or self._lock is not None:
            return
        with suppress(OSError, NotImplementedError):  # on file systems without locks
            self._lock = RunLock(self.path.parent, self.path.name)
        try:
            _check_writable(self.path)
            if self.path.exists():
                self._earlier = _read(self.path, self.columns)[: self._valid_lines]
                self._rows = self._rows[self._written :]
                self._written = 0
                self._size = self.path.stat().st_size
                self._last_step = _last_run(self._earlier).max()
        except OverflowError as error:
            self._release()
            raise InputError(
                f"{self.path} cannot be continued (a step: {first_line(error)}). Name a new file."
            ) from None
        except InputError:
            self._release()
            raise

    def close(self) -> None:
        """Write the remaining rows and unlock the file."""
        try:
            self.write()
        finally:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def table(self) -> pd.DataFrame:
        """Return all rows, those of the continued file first."""
        added = pd.DataFrame(self._rows, columns=self.columns)
        if self._earlier.empty:
            return added
        return pd.concat([self._earlier, added], ignore_index=True) if len(added) else self._earlier.copy()

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Add the rows of a step, also to the file."""
        if rows:
            step = rows[0]["step"]
            self._leave_out_from(self._resumed_at or step)
            self._resumed_at = 0
            self._last_step = step
        self._rows += rows
        self.write()

    def _leave_out_from(self, step: float) -> None:
        """Leave out the rows of the last run from a step on."""
        if not 0 < step <= self._last_step:
            return
        steps = _last_run(self.table())
        valid = int(steps.index[steps >= step].min())
        in_file = len(self._earlier) + self._written
        self._rows = self._rows[: max(0, valid - len(self._earlier))]
        self._earlier = self._earlier[:valid]
        self._written = min(self._written, len(self._rows))
        if valid < in_file:
            self._valid_lines = valid

    def write(self) -> None:
        """Write the rows that are not in the file yet."""
        new = self._rows[self._written :]
        if self.path is None or not new:
            return
        if self.path.suffix == ".csv":
            self._append_to_csv(self.path, new)
        else:
            unfinished = _unfinished(self.path)
            try:
                self.table().to_parquet(unfinished, index=False)
                unfinished.replace(self.path)
            finally:
                unfinished.unlink(missing_ok=True)
        self._written = len(self._rows)
        self._valid_lines = None

    def _append_to_csv(self, path: Path, rows: list[dict[str, Any]]) -> None:
        if self._size and (not path.exists() or path.stat().st_size < self._size):
            warn(
                f"{path} was removed or shortened during training: it goes on with step {rows[0]['step']}. The "
                "monitor's table still holds the earlier rows.",
                stacklevel=7,
            )
        elif self._valid_lines is not None:
            _cut(path, self._valid_lines)
            self._valid_lines = None
        _append(path, pd.DataFrame(rows, columns=self.columns))
        self._size = path.stat().st_size


def _last_run(table: pd.DataFrame) -> "pd.Series[Any]":
    """Return the steps of the rows after the last step back, by number of the row; NaN for a step in words."""
    steps = pd.to_numeric(table["step"], errors="coerce").astype(float)
    returns = steps.index[steps.diff() < 0]
    return steps.loc[returns.max() :] if len(returns) else steps


def _cut(path: Path, rows: int) -> None:
    """Cut a CSV file after its header and so many rows; pandas reads no row from a blank line."""
    with path.open("rb+") as file:
        lines_left = 1 + rows
        while lines_left and (line := file.readline()):
            lines_left -= bool(line.strip())
        file.truncate(file.tell())


def _check_writable(path: Path) -> None:
    target = path if path.suffix == ".csv" else _unfinished(path)
    new = not target.exists()
    try:
        target.open("ab").close()
        if new:
            target.unlink()
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}.") from None


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")


def _append(path: Path, table: pd.DataFrame) -> None:
    """Append lines to a CSV file, all or none."""
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            left = csv_text(table, header=end == 0).encode()
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(end)
            raise


def _read(path: Path, columns: list[str]) -> pd.DataFrame:
    torn = 0
    try:
        if path.suffix == ".csv":
            with open_file(path) as file:
                content = file.read()
            torn = len(content) - content.rfind(b"\n") - 1
            if torn == len(content) and ",".join(columns).encode().startswith(content):
                table = pd.DataFrame(columns=columns)  # not even the header is complete
            else:
                table = from_csv_text(content[: len(content) - torn])
        else:
            table = read_parquet(path)
    except (OSError, ValueError, OverflowError) as error:  # pandas 3.0 reads no whole number of 400 digits
        raise InputError(f"{path} cannot be continued ({first_line(error)}). Name a new file.") from None
    if list(table) != columns:
        found_columns = " ".join(", ".join(map(str, table)).split())[:200]  # a name may hold a line feed
        raise InputError(
            f"{path} cannot be continued: its columns are {found_columns}, not {', '.join(columns)}. "
            "Name a new file."
        )
    if torn:
        os.truncate(path, path.stat().st_size - torn)
        warnings.warn(f"The last line of {path} was incomplete and is left out.", stacklevel=6)
    return table


def read_heads(path: Path) -> pd.DataFrame:
    """Read the table of heads of a monitor."""
    heads = path if path.stem.endswith("-heads") else path.with_name(f"{path.stem}-heads{path.suffix}")
    if heads.suffix not in (".csv", ".parquet"):
        raise InputError(f"A monitor writes .csv or .parquet. Got {path}.")
    if not heads.exists():
        raise InputError(f"{heads} does not exist: a Monitor with path=… writes it beside its table of layers.")
    try:
        if heads.suffix == ".csv":
            with open_file(heads) as file:
                table = from_csv_text(file.read())
        else:
            table = read_parquet(heads)
        if missing := [name for name in head_columns(()) if name not in table]:
            raise InputError(f"{heads} is not a monitor's table of heads: it lacks the column {missing[0]}.")
        places = ["step", "layer", "head", "occurrence"]
        numbers = [*places, *quantities_among(map(str, table))]
        table[numbers] = table[numbers].apply(pd.to_numeric)
        table["alarm"] = [alarm if isinstance(alarm, str) else "" for alarm in table["alarm"]]
        types = dict.fromkeys(places, "int64") | dict.fromkeys(numbers[len(places) :], "float64")
        return table.dropna(subset=places).astype(types)
    except InputError:
        raise
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{heads} cannot be read ({first_line(error)}).") from None
