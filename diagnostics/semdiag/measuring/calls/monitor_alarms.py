"""Alarms of a training monitor: their rules, checked at the start, and the heads that crossed them."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from semdiag.measuring.calls.monitor_heads import LIMITS, LOGIT, OF_K, head_key, quantities_among
from semdiag.measuring.counted import counted
from semdiag_models import InputError

WARNING, SEVERE = "WARNING", "SEVERE"
ABOVE, BELOW = "above", "below"
CHANGES = {"halves": 0.5, "doubles": 2.0}
_SPELLINGS = (
    '50, (0.05, "below"), (50, 100) for a warning and a severe alarm, (0.5, 0.05, "below") or ("halves", 500): '
    "within 500 steps"
)


@dataclass(frozen=True)
class Alarm:
    """A head whose quantity crossed a threshold for the first time.

    ``str(alarm)`` holds the same as ``name=value`` pairs, separated by spaces.

    Attributes:
        step: number of the step that was looked at.
        layer: position of the attention layer.
        head: position of the head.
        quantity: a column of the monitor's table of heads.
        value: of the quantity.
        band: ``WARNING`` or ``SEVERE``.
        rule: what was crossed: ``above 50``, ``below 0.05``, ``halves within 500``.
        occurrence: which call of the layer in that step.

    Example:
        >>> print(Alarm(400, 3, 5, "max_logit", 61.25, "SEVERE", "above 50"))
        alarm band=SEVERE step=400 layer=3 head=5 quantity=max_logit value=61.25 rule="above 50"
    """

    step: int
    layer: int
    head: int
    quantity: str
    value: float
    band: str
    rule: str
    occurrence: int = 0

    def __str__(self) -> str:
        place = f"step={self.step} layer={self.layer} head={self.head}"
        what = f'quantity={self.quantity} value={self.value:.6g} rule="{self.rule}"'
        return f"alarm band={self.band} {place} {what}"


class AlarmError(RuntimeError):
    """Raised when a rule is crossed, with ``on_alarm="raise"``; ``alarm`` is the first."""

    def __init__(self, alarm: Alarm, others: int) -> None:
        super().__init__(f"{alarm}{f' and {others} more' if others else ''}")
        self.alarm = alarm


@dataclass(frozen=True)
class Rule:
    """A threshold of a quantity, or a change of it."""

    quantity: str  # a column of the table of heads
    band: str  # of the alarm
    side: str  # ``above``, ``below``, ``halves`` or ``doubles``
    threshold: float  # a value; for a change, the number of steps within which it happens

    @property
    def text(self) -> str:
        """The rule in words."""
        within = "within " if self.side in CHANGES else ""
        return f"{self.side} {within}{self.threshold:g}"

    def crossed(self, value: float, earlier: Iterable[tuple[int, float]]) -> bool:
        """Return whether a value crosses the rule."""
        if self.side == ABOVE:
            return value > self.threshold
        if self.side == BELOW:
            return value < self.threshold
        before = [old for _, old in earlier if old > 0]
        if not before:
            return False
        return value < max(before) / 2 if self.side == "halves" else value > 2 * min(before)


def rules_of(alarm: Mapping[str, Any] | None, k: Sequence[int], every: int) -> list[Rule]:
    """Return the rules of ``Monitor(alarm=…)``, severe ones first."""
    if alarm is not None and not isinstance(alarm, Mapping):
        raise InputError(f"alarm takes a dictionary from quantities to thresholds. Got {alarm!r}.")
    rules = [rule for quantity, setting in (alarm or {}).items() for rule in _rules(quantity, setting, k, every)]
    return sorted(rules, key=lambda rule: rule.band != SEVERE)


def counted_above(rules: Iterable[Rule]) -> float:
    """Return the score above which rows are counted: the lowest threshold of ``max_logit``, or 50."""
    limits = (rule.threshold for rule in rules if (rule.quantity, rule.side) == ("max_logit", ABOVE))
    return min(limits, default=LOGIT)


def _rules(quantity: str, setting: Any, k: Sequence[int], every: int) -> list[Rule]:
    """Read one quantity's rules: a change, or one or two thresholds."""
    limits = {**LIMITS, **{f"{name}_k{value}": ends for name, ends in OF_K.items() for value in k}}
    if quantity not in limits:
        of_k = [name for name in OF_K if str(quantity).startswith(f"{name}_k")]
        more = " Add that k to the monitor's k." if of_k else f" Known: {', '.join(limits)}."
        raise InputError(f"alarm: there is no quantity {quantity!r}.{more}")
    parts = (tuple(setting) or (None,)) if isinstance(setting, tuple | list) else (setting,)
    if len(parts) == 2 and isinstance(parts[0], str) and parts[0] in CHANGES:
        return [_change(quantity, parts[0], parts[1], every)]
    side, numbers = _thresholds(quantity, setting, parts)
    low, high = limits[quantity]
    for x in numbers:
        if x >= high if side == ABOVE else x <= low:
            raise InputError(f"alarm: {quantity} is never {side} {x:g}: it lies between {low:g} and {high:g}.")
    return [Rule(quantity, band, side, float(x)) for band, x in zip((WARNING, SEVERE), numbers, strict=False)]


def _change(quantity: str, side: str, steps: Any, every: int) -> Rule:
    """Read the rule for a change within some steps."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < every:
        raise InputError(
            f"alarm: {quantity} is looked at every {every} steps; what {side} within {steps!r} is missed."
        )
    return Rule(quantity, WARNING, side, steps)


def _thresholds(quantity: str, setting: Any, parts: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Read one or two numbers, optionally followed by the side on which they are crossed."""
    side = parts[-1] if parts[-1] in (ABOVE, BELOW) and isinstance(parts[-1], str) else ABOVE
    numbers = parts[:-1] if isinstance(parts[-1], str) else parts
    legal = 1 <= len(numbers) <= 2 and all(
        isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in numbers
    )
    if not legal or (isinstance(parts[-1], str) and parts[-1] not in (ABOVE, BELOW)):
        raise InputError(f"alarm: a rule must look like {_SPELLINGS}. Got {quantity}: {setting!r}.")
    if len(numbers) == 2 and not (numbers[0] < numbers[1] if side == ABOVE else numbers[0] > numbers[1]):
        raise InputError(f"alarm: the warning must come before the severe threshold. Got {quantity}: {setting!r}.")
    return side, numbers


@dataclass
class Watch:
    """Records which heads have crossed which rules."""

    rules: Sequence[Rule]  # severe ones first
    # quantity, band, side, layer, occurrence and head of every alarm so far
    crossed: set[tuple[Any, ...]] = field(default_factory=set)
    # values of the steps that a change looks back to, by quantity, layer, occurrence and head
    history: dict[tuple[Any, ...], deque[tuple[int, float]]] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)  # quantities that had a value in some row

    def look(self, rows: Sequence[dict[str, Any]]) -> list[Alarm]:
        """Check the rows of one step."""
        alarms = []
        for row in rows:
            place = row["layer"], row["occurrence"], row["head"]
            bands: dict[str, str] = {}
            for rule in self.rules:
                value = row[rule.quantity]
                if math.isnan(value):
                    continue
                self.met.add(rule.quantity)
                if not rule.crossed(value, self._earlier(rule, place, row["step"])):
                    continue
                bands.setdefault(rule.quantity, rule.band)
                # a severe alarm says what the warning of the same head would
                marks = {(rule.quantity, band, rule.side, *place) for band in (rule.band, WARNING)}
                if not marks <= self.crossed:
                    self.crossed |= marks
                    layer, occurrence, head = place
                    alarms.append(
                        Alarm(row["step"], layer, head, rule.quantity, value, rule.band, rule.text, occurrence)
                    )
            row["alarm"] = " ".join(f"{quantity}:{band}" for quantity, band in bands.items())
            self._remember(row, place)
        return sorted(alarms, key=lambda alarm: alarm.band != SEVERE)

    def _earlier(self, rule: Rule, place: tuple[Any, ...], step: int) -> list[tuple[int, float]]:
        known = self.history.get((rule.quantity, *place), ())
        return [(at, value) for at, value in known if step - at <= rule.threshold]

    def _remember(self, row: dict[str, Any], place: tuple[Any, ...]) -> None:
        longest: dict[str, float] = {}
        for rule in self.rules:
            if rule.side in CHANGES:
                longest[rule.quantity] = max(rule.threshold, longest.get(rule.quantity, 0))
        for quantity, steps in longest.items():
            if not math.isnan(row[quantity]):
                known = self.history.setdefault((quantity, *place), deque())
                known.append((row["step"], row[quantity]))
                while row["step"] - known[0][0] > steps:
                    known.popleft()


def checked_on_alarm(on_alarm: Any) -> str | Callable[[Alarm], object]:
    """Return ``warn``, ``raise`` or a callable; refuse anything else."""
    if on_alarm in ("warn", "raise") or callable(on_alarm):
        return on_alarm  # type: ignore[no-any-return]
    raise InputError(f'on_alarm must be "warn", "raise" or a function of the alarm. Got {on_alarm!r}.')


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
        for alarm in row["alarm"].split() if isinstance(row["alarm"], str) else ():
            quantity = alarm.removesuffix(f":{SEVERE}")
            if quantity != alarm:  # it has crossed the threshold of the warning as well
                crossed.setdefault(f"{quantity}:{WARNING}", []).append(row)
            crossed.setdefault(alarm, []).append(row)
    alarms = []
    for alarm, own in crossed.items():
        place = f"step {own[0]['step']}, {head_key(own[0])}"
        number = counted(len({head_key(row) for row in own}), "head")
        alarms.append(f"alarm {alarm}: {number}, first at {place}")
    return [*(alarms or ["no alarm"]), *lines]


def summary_of(rows: Sequence[Mapping[str, Any]], alarms: Sequence[Alarm], quantities: Sequence[str]) -> str:
    """Return every alarm and the extremes of the last step, one per line."""
    if not rows:
        return "No step was looked at."
    last = rows[-1]["step"]
    own = [row for row in rows if row["step"] == last]
    lines = [f"step {last}, {counted(len(own), 'head')}:"]
    lines += [f"  {line}" for line in _ends(own, quantities, head_key)]
    return "\n".join([*(map(str, alarms) if alarms else ["no alarm"]), *lines])


def _ends(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], place: Callable[[Mapping[str, Any]], str]
) -> list[str]:
    """Return the smallest and the largest value of each quantity, where first met; one number if all are alike."""
    lines = []
    for name in names:
        known = [row for row in rows if not math.isnan(row[name])]
        if not known:
            continue
        low, high = (end(known, key=lambda row: float(row[name])) for end in (min, max))
        texts = [f"{row[name]:.4g}" for row in (low, high)]
        heads = len({head_key(row) for row in known})
        if texts[0] != texts[1]:
            said = f"{texts[0]} ({place(low)}) to {texts[1]} ({place(high)})"
        else:
            said = f"{texts[0]} ({counted(heads, 'head') if heads > 1 else place(low)})"
        lines.append(f"{name}: {said}")
    return lines
