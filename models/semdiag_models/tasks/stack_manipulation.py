"""Stack manipulation: what lies on top of a stack after some pushes and pops?"""

import torch
from torch import Tensor

from semdiag_models.errors import InputError
from semdiag_models.tasks.task import Recipe, Task

POP, PUSH_0, PUSH_1 = 2, 3, 4
EMPTY = 2  # the label of an empty stack


class StackManipulation(Task):
    """The top of a stack after a list of actions."""

    name = "stack-manipulation"
    aliases = ("stack_manipulation", "stackman")
    summary = "what lies on top of a stack after some pushes and pops?"
    symbols = ("0", "1", "2", "3", "4")
    classes = 3
    majority = 0.499865
    shortcut = (0.8333, "the last token alone: a push, two times in three, gives the label")
    recipe = Recipe(length=40, epochs=200)

    def sample(self, n: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw a stack and actions; see :meth:`Task.sample`."""
        self.require_length(length, 1)
        tokens = torch.randint(2, (n, length), generator=generator)
        if length > 1:
            bits = torch.randint(1, length, (n, 1), generator=generator)
            actions = torch.randint(POP, PUSH_1 + 1, (n, length), generator=generator)
            tokens = torch.where(torch.arange(length) < bits, tokens, actions)
        from_right = tokens.flip(1)
        unmatched = torch.where(from_right == POP, -1, 1).cumsum(1) == 1
        top = from_right.gather(1, unmatched.int().argmax(1, keepdim=True)).squeeze(1)
        top = torch.where(top >= PUSH_0, top - PUSH_0, top)
        return tokens, torch.where(unmatched.any(1), top, EMPTY)

    def label(self, tokens: list[int]) -> int:
        """Run the stack machine; see :meth:`Task.label`."""
        self.require_symbols(tokens)
        if tokens[0] >= POP:
            raise InputError(f"{self.name} starts with a bit of the stack. Got the action {tokens[0]}.")
        stack: list[int] = []
        acting = False
        for token in tokens:
            if token < POP and acting:
                raise InputError(f"{self.name} has all bits before the first action. Got {token} after one.")
            acting = token >= POP
            if token != POP:
                stack.append(token - PUSH_0 if acting else token)
            elif stack:
                stack.pop()
        return stack[-1] if stack else EMPTY
