"""The question landscape."""
