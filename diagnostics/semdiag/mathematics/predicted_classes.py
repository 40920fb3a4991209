"""The class that a model predicts."""

from torch import Tensor

NO_CLASS = -1  # prediction if a logit is NaN: never right


def predicted_classes(logits: Tensor) -> Tensor:
    """Return the class of the largest logit, the first of equal ones; ``NO_CLASS`` if a logit is NaN.

    torch's argmax treats NaN as the largest, so a diverged model would be right at times.

    Args:
        logits: (…, C), or log-probabilities.

    Returns:
        (…) int64.

    Example:
        >>> import torch
        >>> predicted_classes(torch.tensor([[0.0, 2.0], [torch.nan, 1.0]])).tolist()
        [1, -1]
    """
    classes = logits.argmax(-1)  # NaN where there is one
    return classes.masked_fill(logits.gather(-1, classes[..., None])[..., 0].isnan(), NO_CLASS)
