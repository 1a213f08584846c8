"""Exercises of `00_start_here`: the notation."""

from __future__ import annotations

from minispec.teach.grading import Exercise, Mistake

RIGHT = {"p": "target", "q": "draft", "K": 4, "passes": 1}
EXERCISES = {
    "00.notation": Exercise(
        right=RIGHT,
        praise="p is the target's law, q the draft's: keep the two apart, half of all bugs are a mix-up.",
        mistakes=[
            Mistake(
                "p and q swapped",
                "papers and repositories swap p and q. Here one letter always stands for the law that the output must "
                "have. Which one?",
                RIGHT | {"p": "draft", "q": "target"},
            ),
            Mistake(
                "the pending token counted",
                "the pending token was emitted by the step before; K counts guesses only.",
                RIGHT | {"K": 5},
            ),
            Mistake(
                "a pass for each guess",
                "if the target had to read the guesses one by one, nothing would be gained. Look at the picture again.",
                RIGHT | {"passes": 4},
            ),
            Mistake(
                "a pass for each node",
                "the pending token and the guesses are read together. Look at the picture again.",
                RIGHT | {"passes": 5},
            ),
        ],
        otherwise="Look at the picture above: who guesses, who checks, how many guesses, how many passes?",
    ),
}
