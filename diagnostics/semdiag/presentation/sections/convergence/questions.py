"""The sections of a report on training runs: speed, numbers along training, other lengths."""

from semdiag.presentation.report.question import Question, Shown

CONVERGENCE_QUESTIONS = (
    Question(
        "convergence",
        "convergence",
        "Which attention learns faster, and by how much?",
        (
            Shown(
                "learning_curves",
                "Training and held-out accuracy against epochs, one panel per task, median and range over seeds "
                "for each attention: {models}.",
                "Thick lines are training accuracy, of each run or from three seeds on their median with their "
                "range; markers on the dashed line are the epochs at which single runs arrive. A curve that ends "
                "below the line belongs to a run that never arrived in the epochs it was given.",
            ),
            Shown(
                "speed_up",
                "Speed-up over full attention by task and attention, logarithmic axis with a line at 1, arrows "
                "where only a bound is known: {models}.",
                "Points above the line learned in fewer epochs than full attention of the same seed. An arrow "
                "says that one run never arrived: the true speed-up lies in its direction, however far.",
            ),
            Shown(
                "speed_up_against_dispersion",
                "Speed-up over full attention against the ratio of median dispersions at the last checkpoint, "
                "logarithmic axes: {models}.",
                "If a smaller dispersion went with faster learning, points would fall from the upper left to the "
                "lower right. Bars are intervals over inputs only; what stands above the panel says what the "
                "tasks at hand can and cannot settle.",
            ),
        ),
        (
            "Runs that never arrive are censored, not dropped: medians of epochs are Kaplan–Meier's, medians of "
            "speed-ups are ranges if a bound leaves them open.",
            "Intervals over seeds are order statistics and hold for any distribution; their confidence is given "
            "because with few seeds it is low. One seed has no interval.",
            "Epochs are counted, not seconds. A correlation of final checkpoints' dispersion with speed does not "
            "show that one causes the other: both are measured after training.",
        ),
    ),
    Question(
        "along",
        "along",
        "How do the numbers move while the model learns?",
        (
            Shown(
                "along_training",
                "Dispersion, separation, ξ, response, Γ and the share of the gradient in queries and keys against "
                "epochs, for each run: {models}.",
                "Each point is a snapshot, measured on the same inputs. A difference between attentions that is "
                "there at epoch 0 is owed to the mask; what opens later was learned.",
            ),
        ),
        (
            "Between two snapshots nothing is known; lines join them for the eye. Runs keep the initialisation, "
            "the last epoch and the epochs named by --snapshots.",
            "At most 50 held-out samples; gradients are of the mean loss on them, not on training batches.",
        ),
    ),
    Question(
        "predictors",
        "predictors",
        "What goes with faster learning?",
        (
            Shown(
                "predictors",
                "Rank correlation of each candidate with speed-up, at the initialisation, on the plateau and at "
                "the end, with intervals and a line at 0: {models}.",
                "A point right of 0 says: the larger the number against full attention's, the faster the run. "
                "Filled points remain after correction for the number of candidates and stages tried; a bar is "
                "what other tasks and seeds could have given.",
            ),
            Shown(
                "predictor_cells",
                "Speed-up against the ratio of each candidate to full attention's at the initialisation, one "
                "panel per candidate, arrows where only a bound is known: {models}.",
                "A candidate that predicts speed orders the points across attentions and tasks alike. One that "
                "only sets one kind of attention apart tells which mask it is, not how fast it learns.",
            ),
        ),
        (
            "A correlation over a handful of attentions on a handful of tasks does not show what causes what: "
            "whatever is peculiar to the attention that learns fastest correlates with speed.",
            "Seeds of one task and attention are not independent tests; p-values exchange attentions within "
            "tasks, for all seeds at once. With few tasks and attentions only strong relations can be seen.",
            "Every number is a ratio to full attention of the same task and seed at the same stage; full "
            "attention itself stands at 1 and 1. Plateau: the latest snapshot before half of the rise in "
            "training accuracy.",
        ),
    ),
    Question(
        "lengths",
        "lengths",
        "Does it hold on other lengths?",
        (
            Shown(
                "length_generalisation",
                "Accuracy, dispersion and separation against the length of the inputs, the trained length marked: "
                "{models}.",
                "Compare the points right of the dotted line, the trained length, with those on it. Accuracy at "
                "the level of guessing means that what was learned is tied to the length.",
            ),
        ),
        (
            "Inputs are fresh samples of the task, without padding, from a generator that training never used.",
            "Longer inputs stand at sinusoidal positions that training never showed; global tokens move behind "
            "the longest input, as the encoder places them. k stays what it was.",
        ),
    ),
)
