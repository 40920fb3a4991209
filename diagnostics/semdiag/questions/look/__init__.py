"""What does each head do with one text?"""

from semdiag.presenting.question import Question

QUESTION = Question("look", __name__, asked_by="command:look")
