"""Recognise hand-written attention: trace scores from q·kᵀ to the softmax, and weights from there to values.

Two views of the same run are joined. In Python, ``SoftmaxProvenance`` keeps what happened to scores
(``ScoreHistory``: scale, soft-cap, bias, mask). Below Python, at the dispatcher, ``OperationWatch`` tags tensors::

    q ─┐ product          changes, views              product ┌─ v
       ├────────► Scores ────────────────► softmax ─► Weights ┼──────► AttentionCall
    k ─┘    │                                 │               │
            └─ ScoreHistory, in Python ───────┘ compared      └─ no values: it is no attention
            │
            └─ a second product, no softmax between: positions.py tells whether it sums positions

A ``Softmax`` is in one of these states; the audit has a line for those that are neither captured nor no attention.

=============== ========================================== ====================================================
state           how it is told                             outcome, at the latest when the forward pass ends
=============== ========================================== ====================================================
candidate       ``axis`` is None                           an exponential; a softmax once its rows sum to one
open            ``axis`` is set, not ``done``, no reason   no attention, unless a mask was applied to it
refused         ``reason`` is set                          its weights met values, and it cannot be described
captured        ``done``                                   its call was recorded, and its memory is freed
=============== ========================================== ====================================================

Files: ``score_history`` (what masks and scales do to scores), ``positions`` (what the axes of products run over),
``tags`` (axes followed through views; the tags of tensors), ``softmaxes`` (from scores to the softmax, and merged
blocks), ``products`` (what makes scores, what meets values, what passes tags on), ``operations`` (the dispatcher).
"""
