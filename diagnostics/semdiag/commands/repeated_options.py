"""Options given twice: a list takes both values; any other option refuses the second."""

from typing import Any

from typer.core import TyperCommand


class RepeatedOptions(TyperCommand):
    """A command whose options are lists where their placeholder has a comma: ``--k 8 --k 32`` is ``--k 8,32``."""

    def make_parser(self, ctx: Any) -> Any:
        """Return a parser that keeps every value."""
        parser: Any = super().make_parser(ctx)
        lists = {p.name for p in self.params if "," in (getattr(p, "metavar", None) or "")}
        single = {}
        for option in (*parser._long_opt.values(), *parser._short_opt.values()):
            if option.action == "store" and option.nargs == 1:
                option.action = "append"  # click would keep only the last
                single[option.dest] = option.obj
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            options, rest, order = parse(args=args)
            for name in single.keys() & options.keys():
                values = options[name]
                if len(values) > 1 and name not in lists:
                    ctx.fail(f"{single[name].opts[0]} is given {len(values)} times, and takes one value.")
                options[name] = values[0] if len(values) == 1 else ",".join(values)
            return options, rest, order

        parser.parse_args = parse_args
        return parser
