"""How far can a top-k be trusted?"""

from semdiag.presenting.question import Question

QUESTION = Question("selections", __name__, asked_by="command:selections")
