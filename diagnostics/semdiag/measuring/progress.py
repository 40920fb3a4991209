"""What a survey tells about its progress while it runs."""


class SurveyProgress:
    """Told of every stage and step of a survey. This one tells nobody; a command shows bars."""

    def announce(self, stage: str, steps: int) -> None:
        """Start a stage of this many steps, 0 if their number is unknown, and end the one before."""

    def expect(self, steps: int) -> None:
        """Set the number of steps of the current stage, once it is known."""

    def advance(self, steps: int) -> None:
        """Count finished steps of the current stage."""

    def say(self, text: str) -> None:
        """Say what a long run will take."""
