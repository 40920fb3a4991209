"""Recognise hand-written attention: trace scores from q·kᵀ to the softmax, and weights from there to values.

Two views of the same run are joined. In Python, ``SoftmaxProvenance`` keeps what happened to scores
(``ScoreHistory``: scale, soft-cap, bias, mask). Below Python, at the dispatcher, ``OperationWatch`` tags tensors::

    q ─┐ product             changes, views                 product ┌─ v
       ├────────► ScoresTag ────────────────► softmax ─► WeightsTag ┼──────► AttentionCall
    k ─┘    │                                    │                  │
            └─ ScoreHistory, in Python ──────────┘ compared         └─ no values: it is no attention
            │
            └─ a second product, no softmax between: positions.py tells whether it sums positions

A ``Softmax`` is in one of these states. When the forward pass ends, the audit gets what the last column says.

=========== ==================== ============================================= ==================================
state       attributes           meaning                                       in the audit
=========== ==================== ============================================= ==================================
candidate   ``axis`` is None     an exponential, until its rows sum to one     nothing
open        ``axis`` is set      a softmax whose weights have met no values    counted as no attention; a line if
                                                                               it was masked, or has threads
refused     ``reason`` is set    its weights met values: it is not described   a line with the reason
captured    ``done``             its call was recorded, its memory is freed    counted when it was recorded
=========== ==================== ============================================= ==================================

Files: ``score_history`` (what masks and scales do to scores), ``positions`` (what the axes of products run over),
``tags`` (axes followed through views; the tags of tensors), ``softmaxes`` (from scores to the softmax, and merged
blocks), ``products`` (what makes scores, what meets values), ``propagation`` (what passes tags on), ``operations``
(the dispatcher).
"""
