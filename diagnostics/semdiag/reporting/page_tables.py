"""The columns of the tables on a report's page."""

from markupsafe import Markup

from semdiag.presenting.columns import Column, count, percent, plain, text


def _known(*names: str | None) -> str:
    """Return the first name that is known."""
    return next(name for name in names if name)


def _module(name: str) -> str:
    return name or "the model"


def _code(sha256: str | None) -> str:
    return Markup("<code>{}</code>").format((sha256 or "–")[:12])


_PERCENTILES = tuple(Column(f"dispersion.all.{p}", f"δ {p}") for p in ("p50", "p75", "p90", "p95", "p100"))
_MODEL, _ATTENTION = Column("model", form=text), Column("attention_label", "attention", text)
_SEED, _RESIDUAL = Column("seed", form=plain), Column("residual")
ENCODERS = (
    Column("task model", "task", _known, left=True), _ATTENTION, _SEED, Column("snapshot", form=text),
    Column("epoch", form=plain), Column("accuracy", form=percent), Column("epochs_to_95", "epochs\nto 95%", plain),
    *_PERCENTILES, Column("smaller", "δₕ < δₛ", text),
)  # fmt: skip
EXTERNAL = (
    _MODEL, _ATTENTION, Column("blocks", "layers"), Column("heads"), Column("samples"), *_PERCENTILES,
    Column("attention_captured attention_found", "captured", "{} of {}".format), _RESIDUAL,
)  # fmt: skip
MEASURED = (
    _MODEL, _ATTENTION, _SEED, Column("samples"), Column("inputs", form=text),
    Column("attention_found attention_captured", "attention layers\nfound / captured", "{} / {}".format),
    _RESIDUAL,
    Column("dispersion.all.queries", "queries", count), Column("dispersion.all.undefined", "undefined δ", count),
    Column("blocks heads", "blocks × heads", "{} × {}".format), Column("parameters", form=count),
    Column("sha256", "SHA-256", _code, left=True),
)  # fmt: skip
LAYERS = (
    Column("layer"), Column("module", form=_module, left=True), Column("occurrence", "call"),
    Column("mask", form=text), Column("heads"), Column("key_heads"), Column("width"),
    Column("mechanism", "captured by", text), Column("calls"), Column("residual"), Column("gamma", "Γ"),
    Column("upsilon", "Υ"),
)  # fmt: skip
