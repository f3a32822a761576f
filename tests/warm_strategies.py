"""For `warm_python`: imports all strategies, as the first `prepare` of a script would."""

from paceline.parallel.strategy import STRATEGIES

for name in STRATEGIES.names():
    STRATEGIES.get(name)
